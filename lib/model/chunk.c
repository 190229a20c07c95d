/* A chunk: which rows it has, and what the ops read of them, put together in one block (stage.h).
 *
 * On devices with graphs the sizes are rounded up, so that few of them occur: a padding row repeats the last row and is
 * not supervised, a padding token is nobody's, a padding row of the head is no row (zeros) of weight 0. They change no
 * other row, and add zeros to sums over rows. */
#include <string.h>

#include "base/error.h"
#include "model/sizes.h"
#include "model/workspace.h"

/* ---- the block --------------------------------------------------------------------------------------------------- */

enum { ALIGN = 64 };

typedef struct block {
    char *host, *device;
    size_t used;
} block;

/* The next n numbers of 4 bytes: where to fill them in, and as ops see them; nowhere while a block is measured. */
static void *next(block *b, mtp_dtype dtype, int64_t n, mtp_view *view)
{
    void *host = b->host ? b->host + b->used : NULL;
    *view = mtp_view_1d(b->device ? b->device + b->used : NULL, dtype, n);
    b->used += ((size_t)n * sizeof(int32_t) + ALIGN - 1) / ALIGN * ALIGN;
    return host;
}

/* Rows of the embedding table are brought with the chunk: ops can read neither the host's table nor one of their own.
 */
static bool brings_table_rows(const mtp__step *step)
{
    return !step->context->ops->memory_is_host && !step->device_table.data;
}

bool mtp__chunk_waits(const mtp__step *step)
{
    return step->config.feeding == MTP_FEED_SELF && step->config.num_speculative_steps > 1 && brings_table_rows(step);
}

size_t mtp__chunk_size(const mtp__step *step, const mtp_drafter_config *config)
{
    const int64_t K = step->config.num_speculative_steps, Rc = step->Rc, Mc = K * Rc;
    const int64_t tokens = mtp__chunk_tokens(step);
    mtp_view unused;
    block b = {0};
    for (int i = 0; i < 5; i++) next(&b, MTP_I32, Rc, &unused);
    next(&b, MTP_I32, tokens, &unused);
    next(&b, MTP_I32, K * Rc, &unused);
    next(&b, MTP_I32, K * tokens, &unused);
    for (int i = 0; i < 5; i++) next(&b, MTP_I32, Mc, &unused);
    const size_t width = (size_t)config->backbone_hidden_size * sizeof(float); /* the widest type */
    return b.used + (brings_table_rows(step) ? (size_t)tokens * width : 0);
}

/* ---- its sizes --------------------------------------------------------------------------------------------------- */

int64_t mtp__chunk_tokens(const mtp__step *step)
{
    return step->config.feeding == MTP_FEED_SELF ? step->Rc
                                                 : mtp__tokens_capacity(step->Rc, step->config.num_speculative_steps);
}

/* The rows from `first` on, and their supervised (step, row) pairs. */
static mtp_status choose_rows(mtp__step *step, int64_t first, const int64_t *counts)
{
    const mtp__rows *rows = step->rows;
    const int64_t rest = rows->num_rows - first;
    step->first_row = first;
    step->own_rows = rest < step->Rc ? rest : step->Rc;
    if (step->config.feeding == MTP_FEED_TEACHER) mtp__tokens_build(&step->tokens, rows, first, &step->own_rows);
    step->last_chunk = first + step->own_rows == rows->num_rows;
    step->num_supervised = 0;
    for (int32_t k = 0; k < step->config.num_speculative_steps; k++) {
        const uint8_t *supervised = rows->supervised + k * rows->num_rows + first;
        int64_t found = 0;
        for (int64_t r = 0; r < step->own_rows; r++) found += supervised[r] != 0;
        if (found > 0 && counts[k] < 1)
            return MTP_FAIL(MTP_E_ARGUMENT, "step %d has supervised rows, but its global count is %lld", k,
                            (long long)counts[k]);
        step->num_supervised += found;
    }
    return MTP_OK;
}

static void choose_sizes(mtp__step *step)
{
    const int64_t own_tokens = step->config.feeding == MTP_FEED_TEACHER ? step->tokens.count : step->own_rows;
    step->num_rows = step->own_rows;
    step->num_tokens = own_tokens;
    step->head_rows = step->num_supervised;
    if (!step->padded) return;
    step->num_rows = mtp__size_above(step->own_rows, step->Rc);
    const int64_t rows = step->num_rows, most = step->config.num_speculative_steps * rows;
    step->num_tokens = step->config.feeding == MTP_FEED_SELF
                           ? rows
                           : mtp__size_in_strides(own_tokens, rows / 4, mtp__chunk_tokens(step));
    step->head_rows = mtp__size_in_strides(step->num_supervised, rows / 8, most);
}

/* ---- filling it -------------------------------------------------------------------------------------------------- */

static void fill_rows(mtp__step *step, block *b)
{
    const mtp__rows *rows = step->rows;
    const int64_t first = step->first_row, n = step->num_rows, window = step->drafter->config.sliding_window;
    int32_t *place = next(b, MTP_I32, n, &step->places), *position = next(b, MTP_I32, n, &step->positions);
    int32_t *document = next(b, MTP_I32, n, &step->doc_begin), *end = next(b, MTP_I32, n, &step->key_end);
    int32_t *sliding = next(b, MTP_I32, n, &step->key_begin[MTP_LAYER_SLIDING]);
    step->key_begin[MTP_LAYER_FULL] = step->doc_begin;
    for (int64_t r = 0; r < n; r++) {
        const int64_t i = first + (r < step->own_rows ? r : step->own_rows - 1);
        const int64_t begin = rows->place[i] - window + 1;
        place[r] = rows->place[i];
        position[r] = rows->position[i] + step->config.position_offset;
        document[r] = rows->doc_begin[i];
        end[r] = rows->place[i] + 1;
        sliding[r] = (int32_t)(begin > document[r] ? begin : document[r]);
    }
}

/* Tokens from the data: the list with who takes what, or (self-fed) those of the first step. */
static int32_t *fill_tokens(mtp__step *step, block *b, int64_t *own)
{
    const int64_t n = step->num_rows, entries = step->num_tokens;
    int32_t *ids = next(b, MTP_I32, entries, &step->token_ids);
    if (step->config.feeding == MTP_FEED_SELF) {
        *own = step->own_rows;
        memcpy(ids, step->rows->input_token + step->first_row, (size_t)*own * sizeof *ids);
    } else {
        const mtp__tokens *tokens = &step->tokens;
        int32_t *entry_of = next(b, MTP_I32, tokens->K * n, &step->entry_of);
        for (int32_t k = 0; k < tokens->K; k++)
            for (int64_t r = 0; r < n; r++)
                entry_of[k * n + r] =
                    tokens->entry_of[k * tokens->max_rows + (r < step->own_rows ? r : step->own_rows - 1)];
        if (step->mode == MTP__STEP_TRAIN)
            mtp__tokens_takers(tokens, step->own_rows, n, entries,
                               next(b, MTP_I32, tokens->K * entries, &step->taken_by));
        *own = tokens->count;
        memcpy(ids, tokens->ids, (size_t)*own * sizeof *ids);
    }
    for (int64_t u = *own; u < entries; u++) ids[u] = ids[*own - 1];
    return ids;
}

static void fill_head(mtp__step *step, block *b, const int64_t *counts)
{
    const int64_t R = step->rows->num_rows, m = step->head_rows;
    const bool hierarchical = step->config.head_mode == MTP_HEAD_HIERARCHICAL;
    int32_t *index = next(b, MTP_I32, m, &step->head_index), *target = next(b, MTP_I32, m, &step->head_target);
    int32_t *centroid = next(b, MTP_I32, m, &step->head_centroid);
    float *scale = next(b, MTP_F32, m, &step->head_scale);
    float *centroid_scale = next(b, MTP_F32, m, &step->head_centroid_scale);
    double weights[MTP_MAX_SPECULATIVE_STEPS];
    int64_t at = 0;

    mtp__step_weights(&step->config, weights);
    for (int32_t k = 0; k < step->config.num_speculative_steps; k++) {
        for (int64_t r = 0; r < step->own_rows; r++) {
            const int64_t i = k * R + step->first_row + r;
            if (!step->rows->supervised[i]) continue;
            const double share = weights[k] / (double)counts[k];
            index[at] = (int32_t)(k * step->num_rows + r);
            target[at] = step->rows->target[i];
            centroid[at] = step->centroid_of ? step->centroid_of[target[at]] : 0;
            scale[at] = (float)share;
            centroid_scale[at] = (float)(hierarchical ? share : share * step->config.centroid_weight);
            at++;
        }
    }
    for (; at < m; at++) {
        index[at] = MTP_NO_ROW;
        target[at] = centroid[at] = 0;
        scale[at] = centroid_scale[at] = 0;
    }
}

/* Rows `ids` of the host's table into the block, from where the numbers end; ops then find row i under i. */
static mtp_status fill_table_rows(mtp__step *step, char *host, const int32_t *ids, int64_t count)
{
    const mtp_view table = step->table;
    const size_t element = mtp_dtype_size(table.dtype), row = (size_t)table.shape[1] * element;
    for (int64_t r = 0; r < count; r++) {
        if (ids[r] < 0 || ids[r] >= table.shape[0])
            return MTP_FAIL(MTP_E_ARGUMENT, "token %d is outside of the embedding table, which has %lld rows",
                            (int)ids[r], (long long)table.shape[0]);
        memcpy(host + step->table_rows_at + (size_t)r * row,
               (const char *)table.data + (size_t)(ids[r] * table.stride[0]) * element, row);
    }
    return MTP_OK;
}

static size_t table_rows_end(const mtp__step *step, int64_t count)
{
    return step->table_rows_at + (size_t)(count * step->table.shape[1]) * mtp_dtype_size(step->table.dtype);
}

mtp_status mtp__chunk_begin(mtp__step *step, int64_t first, const int64_t *counts)
{
    block b = {.device = step->stage.device};
    int64_t own_tokens;
    MTP_TRY(choose_rows(step, first, counts));
    choose_sizes(step);
    MTP_TRY(mtp__stage_open(&step->stage, &b.host));
    fill_rows(step, &b);
    fill_head(step, &b, counts);
    int32_t *ids = fill_tokens(step, &b, &own_tokens);
    step->embed_table = step->device_table;
    if (!brings_table_rows(step)) return mtp__stage_send(&step->stage, 0, b.used, true);
    step->table_rows_at = b.used;
    step->embed_table = mtp_view_2d(b.device + b.used, step->table.dtype, step->num_tokens, step->table.shape[1]);
    MTP_TRY(fill_table_rows(step, b.host, ids, own_tokens));
    for (int64_t u = 0; u < step->num_tokens; u++) ids[u] = (int32_t)(u < own_tokens ? u : own_tokens - 1);
    /* self-fed: the rows of later draft steps come into the same block */
    return mtp__stage_send(&step->stage, 0, table_rows_end(step, own_tokens), !mtp__chunk_waits(step));
}

mtp_status mtp__chunk_feed(mtp__step *step, int32_t k)
{
    char *host = step->stage.host[step->stage.turn];
    const bool last = k + 1 == step->config.num_speculative_steps;
    if (!brings_table_rows(step)) {
        step->token_ids = mtp__first_rows(step->head_argmax, step->num_rows);
        return MTP_OK;
    }
    MTP_TRY(step->context->ops->download(step->context->device, step->host_ids, step->head_argmax.data,
                                         (size_t)step->num_rows * sizeof *step->host_ids)); /* what was sent is there */
    MTP_TRY(fill_table_rows(step, host, step->host_ids, step->num_rows));
    return mtp__stage_send(&step->stage, step->table_rows_at, table_rows_end(step, step->num_rows), last);
}
