/* Internal: rows. A row is a position t of a document with its up to K draft steps; no position of the drafter reads
 * another position of the drafter, so rows are the unit of compute.
 *
 * Row t, step k: input token x[t+1+k], target x[t+2+k]; step k exists (is valid) when t+2+k is inside the document, and
 * is supervised when loss_mask[t+2+k] is 1. Rotary position and key range are those of t for every k. */
#ifndef MTP_MODEL_ROWS_H
#define MTP_MODEL_ROWS_H

#include "mtp/data.h"

typedef enum mtp__row_rule {
    MTP__ROWS_SUPERVISED, /* positions with at least one supervised step: training and loss */
    MTP__ROWS_ROUNDS /* positions at which a server could start a round of K drafts: prompt_len - 1 <= t, t+1+K < S */
} mtp__row_rule;

/* All arrays are host memory owned by the struct; [k] arrays are K * num_rows, step-major (k * num_rows + r). In places
 * of steps that do not exist token and target are 0, valid and supervised 0. */
typedef struct mtp__rows {
    int64_t num_rows, capacity;
    int32_t K;
    int32_t *document;    /* [R] */
    int32_t *position;    /* [R] t within its document */
    int32_t *place;       /* [R] t as a place of the batch */
    int32_t *doc_begin;   /* [R] first place of the document */
    int32_t *input_token; /* [K, R] */
    int32_t *target;      /* [K, R] */
    uint8_t *valid;       /* [K, R] */
    uint8_t *supervised;  /* [K, R] */
} mtp__rows;

/* Memory for up to `capacity` rows of K steps. */
mtp_status mtp__rows_create(int64_t capacity, int32_t K, mtp__rows *rows);
void mtp__rows_free(mtp__rows *rows); /* accepts a zeroed struct */
/* Rows of the batch by `rule`, in order of place. `prompt_len` (host [num_documents]) is used by MTP__ROWS_ROUNDS only.
 * More rows than capacity: MTP_E_INTERNAL. */
mtp_status mtp__rows_build(const mtp_batch *batch, mtp__row_rule rule, const int64_t *prompt_len, mtp__rows *rows);
/* Supervised rows of each step added to counts [K]: the N_k of the loss. */
void mtp__rows_count(const mtp__rows *rows, int64_t *counts);

#endif
