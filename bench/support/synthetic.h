/* Drafters, verifiers and batches of the official sizes with made-up numbers, for timing. */
#ifndef MTP_BENCH_SYNTHETIC_H
#define MTP_BENCH_SYNTHETIC_H

#include "model/drafter.h"
#include "mtp/data.h"
#include "optim/optimizer.h"

/* Geometry of "e2b", "e4b", "12b", "26b-a4b" or "31b" with a vocabulary of `vocab_size` (0: 262144). MTP_E_CONFIG for
 * another name. Free with mtp_drafter_config_free. */
mtp_status synthetic_config(const char *size, int64_t vocab_size, mtp_drafter_config *config);
/* A drafter with seeded weights: norms 1, matrices N(0, 1 / fan_in), a token ordering when the head is ordered. */
mtp_status synthetic_drafter(mtp_context *context, const mtp_drafter_config *config, mtp_drafter **drafter);
/* AdamW over the trained parameters of the drafter, which it refers to. Free with mtp__optimizer_free. */
mtp_status synthetic_optimizer(mtp_context *context, const mtp_drafter *drafter, mtp__optimizer **optimizer);
/* A verifier directory under `directory` (which exists): config.json and a bf16 table stored sparsely, with numbers in
 * the rows of `tokens`. */
mtp_status synthetic_verifier(const char *directory, const mtp_drafter_config *config, const int32_t *tokens,
                              int64_t num_tokens, mtp_verifier **verifier);
/* One packed document of `num_tokens` tokens, all of them supervised, bf16. Free with synthetic_batch_free. */
mtp_status synthetic_batch(const mtp_drafter_config *config, int64_t num_tokens, mtp_batch *batch);
/* The same tokens as documents of `document` of them each; the last one may be shorter. */
mtp_status synthetic_split(mtp_batch *batch, int64_t document);
void synthetic_batch_free(mtp_batch *batch);
/* Seconds of a monotonic clock. */
double synthetic_seconds(void);
/* Most memory that the process had resident so far, in bytes. */
double synthetic_peak_rss(void);

#endif
