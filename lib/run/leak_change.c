#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/real.h"
#include "run/leak.h"

/* ---- rows ----------------------------------------------------------------------------------------------------- */

void mtp__leak_pick(const mtp__rows *from, const int64_t *index, int64_t count, mtp__rows *to)
{
    to->num_rows = count;
    for (int64_t i = 0; i < count; i++) {
        to->document[i] = from->document[index[i]];
        to->position[i] = from->position[index[i]];
        to->place[i] = from->place[index[i]];
        to->doc_begin[i] = from->doc_begin[index[i]];
    }
    for (int32_t k = 0; k < from->K; k++) {
        for (int64_t i = 0; i < count; i++) {
            const int64_t source = k * from->num_rows + index[i], target = k * count + i;
            to->input_token[target] = from->input_token[source];
            to->target[target] = from->target[source];
            to->valid[target] = from->valid[source];
            to->supervised[target] = from->supervised[source];
        }
    }
}

mtp_status mtp__leak_rows(const mtp_batch *batch, int64_t per_document, mtp__rows *all, mtp__rows *probed)
{
    MTP_TRY(mtp__rows_build(batch, MTP__ROWS_SUPERVISED, NULL, all));
    int64_t *index = malloc((size_t)(all->num_rows + 1) * sizeof *index), count = 0;
    if (!index) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %lld rows", (long long)all->num_rows);
    for (int64_t first = 0, end; first < all->num_rows; first = end) {
        for (end = first; end < all->num_rows && all->document[end] == all->document[first];) end++;
        const int64_t rows = end - first, wanted = rows < per_document ? rows : per_document;
        for (int64_t i = 0; i < wanted; i++) index[count++] = first + (wanted > 1 ? i * (rows - 1) / (wanted - 1) : 0);
    }
    mtp__leak_pick(all, index, count, probed);
    free(index);
    return MTP_OK;
}

/* ---- a batch that can be changed --------------------------------------------------------------------------------- */

static size_t view_bytes(mtp_view view)
{
    return view.data ? (size_t)mtp_view_count(view) * mtp_dtype_size(view.dtype) : 0;
}

mtp_status mtp__leak_copy(const mtp_batch *batch, mtp_batch *copy)
{
    *copy = *batch;
    copy->token_ids = malloc((size_t)(batch->batch * batch->seq) * sizeof *copy->token_ids);
    copy->hidden_states.data = malloc(view_bytes(batch->hidden_states));
    bool complete = copy->token_ids && copy->hidden_states.data;
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        if (!batch->kv[type].data) continue;
        copy->kv[type].data = malloc(view_bytes(batch->kv[type]));
        complete = complete && copy->kv[type].data;
    }
    if (complete) {
        mtp__leak_restore(batch, copy);
        return MTP_OK;
    }
    mtp__leak_copy_free(copy);
    return MTP_FAIL(MTP_E_MEMORY, "out of memory for a copy of a batch of %lld tokens",
                    (long long)(batch->batch * batch->seq));
}

void mtp__leak_copy_free(mtp_batch *copy)
{
    free(copy->token_ids);
    free(copy->hidden_states.data);
    for (int type = 0; type < MTP_LAYER_TYPES; type++) free(copy->kv[type].data);
    *copy = (mtp_batch){0};
}

void mtp__leak_restore(const mtp_batch *batch, mtp_batch *copy)
{
    memcpy(copy->token_ids, batch->token_ids, (size_t)(batch->batch * batch->seq) * sizeof *copy->token_ids);
    memcpy(copy->hidden_states.data, batch->hidden_states.data, view_bytes(batch->hidden_states));
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        if (batch->kv[type].data) memcpy(copy->kv[type].data, batch->kv[type].data, view_bytes(batch->kv[type]));
}

/* ---- changes -------------------------------------------------------------------------------------------------- */

/* Other values, uniform in (-8, 8), for the places [begin, end) of a tensor whose leading axes count places. */
static void scramble(mtp_view tensor, int64_t num_places, int64_t begin, int64_t end, mtp__rng *rng)
{
    if (!tensor.data || begin >= end) return;
    const int64_t width = mtp_view_count(tensor) / num_places;
    const size_t size = mtp_dtype_size(tensor.dtype);
    for (int64_t i = begin * width; i < end * width; i++) {
        const float value = 16 * mtp__rng_uniform(rng) - 8;
        mtp__real_from_f32((char *)tensor.data + (size_t)i * size, tensor.dtype, &value, 1);
    }
}

static void scramble_kv(mtp_batch *copy, mtp_layer_type type, int64_t begin, int64_t end, mtp__rng *rng)
{
    scramble(copy->kv[type], copy->batch * copy->seq, begin, end, rng);
}

static void scramble_hidden(mtp_batch *copy, int64_t begin, int64_t end, mtp__rng *rng)
{
    scramble(copy->hidden_states, copy->batch * copy->seq, begin, end, rng);
}

/* Every token becomes one that the batch has elsewhere, so that ids stay in the vocabulary. */
static void scramble_tokens(mtp_batch *copy, int64_t begin, int64_t end, mtp__rng *rng)
{
    const uint64_t num_places = (uint64_t)(copy->batch * copy->seq);
    for (int64_t i = begin; i < end; i++) copy->token_ids[i] = copy->token_ids[mtp__rng_below(rng, num_places)];
}

bool mtp__leak_change(mtp_batch *copy, mtp_leak_kind kind, const mtp__rows *rows, int64_t r, mtp__leak_rule rule,
                      mtp__rng *rng)
{
    const int64_t begin = rows->doc_begin[r], end = copy->document_end[rows->document[r]], place = rows->place[r];
    const int64_t last_target = place + 1 + rows->K;
    switch (kind) {
    case MTP_LEAK_FUTURE:
        for (int type = 0; type < MTP_LAYER_TYPES; type++)
            scramble_kv(copy, (mtp_layer_type)type, place + rule.future, end, rng);
        return true;
    case MTP_LEAK_WINDOW:
        if (place - rule.window < begin) return false;
        scramble_kv(copy, MTP_LAYER_SLIDING, begin, place - rule.window + 1, rng);
        return true;
    case MTP_LEAK_ROWS:
        scramble_hidden(copy, begin, place, rng);
        scramble_hidden(copy, place + 1, end, rng);
        scramble_tokens(copy, begin, place + 1, rng);
        scramble_tokens(copy, last_target + 1 < end ? last_target + 1 : end, end, rng);
        return true;
    default: /* MTP_LEAK_CONTROL: a key that the row sees */
        for (int type = 0; type < MTP_LAYER_TYPES; type++)
            scramble_kv(copy, (mtp_layer_type)type, place, place + 1, rng);
        return true;
    }
}

void mtp__leak_change_others(mtp_batch *copy, int64_t kept, mtp__rng *rng)
{
    for (int64_t d = 0; d < copy->num_documents; d++) {
        const int64_t begin = copy->document_begin[d], end = copy->document_end[d];
        if (d == kept) continue;
        for (int type = 0; type < MTP_LAYER_TYPES; type++) scramble_kv(copy, (mtp_layer_type)type, begin, end, rng);
        scramble_hidden(copy, begin, end, rng);
        scramble_tokens(copy, begin, end, rng);
    }
}
