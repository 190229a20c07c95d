/* Internal to lib/model: the tokens that the rows of a chunk are fed with from the data. A row at place t takes the
 * tokens at t + 1 to t + K, one a draft step, so the rows of a stretch of text share most of theirs. What follows from
 * a token alone (its embedding, and its half of the pre-projection) is computed once for each entry of this list.
 *
 * An entry is one place of the batch, and at each draft step at most one row takes it. Rows that do not stand in the
 * order of their places share less, nothing else changes. */
#ifndef MTP_MODEL_TOKENS_H
#define MTP_MODEL_TOKENS_H

#include "model/rows.h"

/* Host memory. */
typedef struct mtp__tokens {
    int64_t capacity; /* entries, at most */
    int64_t max_rows; /* of a chunk */
    int32_t K;
    int64_t count;     /* entries of the chunk at hand */
    int32_t *ids;      /* [capacity] token of each entry */
    int32_t *entry_of; /* [K, max_rows]: which entry a row takes at a step; MTP_NO_ROW where the step does not exist */
} mtp__tokens;

/* Entries to have room for: rows of supervised text come in runs of at least K, which need fewer than two a row. Where
 * that does not hold a chunk has fewer rows. */
int64_t mtp__tokens_capacity(int64_t max_rows, int32_t K);
mtp_status mtp__tokens_create(int64_t max_rows, int32_t K, mtp__tokens *tokens);
void mtp__tokens_free(mtp__tokens *tokens); /* accepts a zeroed struct */
/* The list for the rows from `first` on, as many as there is room for: *taken rows, at least one. */
void mtp__tokens_build(mtp__tokens *tokens, const mtp__rows *rows, int64_t first, int64_t *taken);
/* Who takes an entry of the list for `taken` rows: taken_by [K, entries], k * rows + r of the row r that takes it at
 * step k, or MTP_NO_ROW. entries is at least tokens->count and rows at least `taken`. */
void mtp__tokens_takers(const mtp__tokens *tokens, int64_t taken, int64_t rows, int64_t entries, int32_t *taken_by);

#endif
