/* Internal: counting accepted drafts. Pure functions over what a drafter drafted; mtp/eval.h defines the numbers. */
#ifndef MTP_RUN_ACCEPTANCE_H
#define MTP_RUN_ACCEPTANCE_H

#include "mtp/eval.h"

/* How many of the K drafts of row r a greedy verifier keeps: up to the first that is not the target. Both arrays [K,
 * R], step-major. */
int32_t mtp__acceptance_kept(const int32_t *drafts, const int32_t *targets, int64_t R, int32_t K, int64_t r);

/* First position of a document at which a round can start, and how many such positions follow each other: t from
 * prompt_len - 1 (not below 0) while t + 1 + K < S. */
int64_t mtp__acceptance_first(int64_t prompt_len);
int64_t mtp__acceptance_positions(int64_t prompt_len, int64_t num_tokens, int32_t K);

/* The bucket of a position or length: 0, 1, 2..3, 4..7, ...; the last has no upper end. */
int32_t mtp__acceptance_bucket(int64_t value);

/* Add a document to a sample's figures and to the pooled ones: kept[i] is what the round at first + i accepted. */
void mtp__acceptance_document(mtp_evaluation *evaluation, int64_t sample, int64_t first, int64_t num_tokens,
                              const int32_t *kept, int64_t count);
/* After the last document: means over samples, ends of the buckets. */
void mtp__acceptance_finish(mtp_evaluation *evaluation);

#endif
