#include "model/rows.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"

mtp_status mtp__rows_create(int64_t capacity, int32_t K, mtp__rows *rows)
{
    MTP_REQUIRE(capacity >= 1 && K >= 1);
    *rows = (mtp__rows){.capacity = capacity, .K = K};
    const size_t n = (size_t)capacity, nk = n * (size_t)K;
    rows->document = calloc(n, sizeof *rows->document);
    rows->position = calloc(n, sizeof *rows->position);
    rows->place = calloc(n, sizeof *rows->place);
    rows->doc_begin = calloc(n, sizeof *rows->doc_begin);
    rows->input_token = calloc(nk, sizeof *rows->input_token);
    rows->target = calloc(nk, sizeof *rows->target);
    rows->valid = calloc(nk, sizeof *rows->valid);
    rows->supervised = calloc(nk, sizeof *rows->supervised);
    if (rows->document && rows->position && rows->place && rows->doc_begin && rows->input_token && rows->target &&
        rows->valid && rows->supervised)
        return MTP_OK;
    mtp__rows_free(rows);
    return MTP_FAIL(MTP_E_MEMORY, "out of memory for %lld rows of %d draft steps", (long long)capacity, K);
}

void mtp__rows_free(mtp__rows *rows)
{
    free(rows->document);
    free(rows->position);
    free(rows->place);
    free(rows->doc_begin);
    free(rows->input_token);
    free(rows->target);
    free(rows->valid);
    free(rows->supervised);
    *rows = (mtp__rows){0};
}

/* Does a row exist at position t of a document of `length` tokens whose mask starts at `mask`? */
static bool row_exists(const mtp__rows *rows, mtp__row_rule rule, const uint8_t *mask, int64_t t, int64_t length,
                       int64_t prompt_len)
{
    if (rule == MTP__ROWS_ROUNDS) return t >= prompt_len - 1 && t + 1 + rows->K < length;
    for (int32_t k = 0; k < rows->K && t + 2 + k < length; k++)
        if (mask[t + 2 + k]) return true;
    return false;
}

/* Places of documents in order of their first token: a batch lists documents in that order. */
static mtp_status scan(const mtp_batch *batch, mtp__row_rule rule, const int64_t *prompt_len, mtp__rows *rows)
{
    int64_t r = 0;
    for (int64_t d = 0; d < batch->num_documents; d++) {
        const int64_t begin = batch->document_begin[d], length = batch->document_end[d] - begin;
        for (int64_t t = 0; t + 2 < length; t++) {
            if (!row_exists(rows, rule, batch->loss_mask + begin, t, length, prompt_len ? prompt_len[d] : 0)) continue;
            if (r == rows->capacity)
                return MTP_FAIL(MTP_E_INTERNAL, "a batch has more than the %lld rows there is room for",
                                (long long)rows->capacity);
            rows->document[r] = (int32_t)d;
            rows->position[r] = (int32_t)t;
            rows->place[r] = (int32_t)(begin + t);
            rows->doc_begin[r] = (int32_t)begin;
            r++;
        }
    }
    rows->num_rows = r;
    return MTP_OK;
}

mtp_status mtp__rows_build(const mtp_batch *batch, mtp__row_rule rule, const int64_t *prompt_len, mtp__rows *rows)
{
    MTP_REQUIRE(batch && rows && (rule == MTP__ROWS_SUPERVISED || prompt_len));
    MTP_TRY(scan(batch, rule, prompt_len, rows));
    const int64_t R = rows->num_rows;
    for (int32_t k = 0; k < rows->K; k++) {
        for (int64_t r = 0; r < R; r++) {
            const int64_t i = k * R + r, place = rows->place[r];
            const bool valid = place + 2 + k < batch->document_end[rows->document[r]];
            rows->valid[i] = valid;
            rows->input_token[i] = valid ? batch->token_ids[place + 1 + k] : 0;
            rows->target[i] = valid ? batch->token_ids[place + 2 + k] : 0;
            rows->supervised[i] = valid && batch->loss_mask[place + 2 + k] != 0;
        }
    }
    return MTP_OK;
}

void mtp__rows_count(const mtp__rows *rows, int64_t *counts)
{
    for (int32_t k = 0; k < rows->K; k++)
        for (int64_t r = 0; r < rows->num_rows; r++) counts[k] += rows->supervised[k * rows->num_rows + r];
}
