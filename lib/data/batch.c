/* Collating: samples into one batch, packed or padded. */
#include "data/batch.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/pages.h"

enum { ALIGNMENT = 64 };

/* ---- memory --------------------------------------------------------------------------------------------------- */

/* The next part of the block; with base NULL only the sum is made. */
static void *carve(char *base, size_t *used, int64_t count, size_t size)
{
    void *part = base ? base + *used : NULL;
    *used += ((size_t)count * size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return part;
}

static int64_t kv_width(const mtp_verifier_config *verifier, int type)
{
    return MTP__KV * verifier->num_kv_heads[type] * verifier->head_dim[type];
}

/* Lay out batch->shape at `base`; returns the bytes. */
static size_t lay_out(mtp__batch *batch, const mtp_verifier_config *verifier, char *base)
{
    const mtp__batch_shape *shape = &batch->shape;
    const int64_t places = shape->places, documents = shape->documents;
    int64_t widest = verifier->hidden_size, heads = 0;
    size_t used = 0;
    batch->view.token_ids = carve(base, &used, places, sizeof *batch->view.token_ids);
    batch->view.loss_mask = carve(base, &used, places, sizeof *batch->view.loss_mask);
    batch->view.document_ids = carve(base, &used, places, sizeof *batch->view.document_ids);
    batch->view.document_begin = carve(base, &used, documents, sizeof *batch->view.document_begin);
    batch->view.document_end = carve(base, &used, documents, sizeof *batch->view.document_end);
    batch->view.document_sample = carve(base, &used, documents, sizeof *batch->view.document_sample);
    batch->hidden = carve(base, &used, places * verifier->hidden_size, shape->hidden_size);
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        const int64_t width = kv_width(verifier, type);
        if (width > widest) widest = width;
        if (verifier->num_kv_heads[type] > heads) heads = verifier->num_kv_heads[type];
        batch->kv[type] = width ? carve(base, &used, places * width, shape->kv_size[type]) : NULL;
    }
    batch->items = carve(base, &used, documents, sizeof *batch->items);
    batch->scratch = carve(base, &used, 2 * widest, sizeof(float));
    char *bounce = shape->direct ? carve(base, &used, 1, MTP__STORE_BOUNCE + MTP__STORE_BLOCK) : NULL;
    if (bounce) bounce += (MTP__STORE_BLOCK - (uintptr_t)bounce % MTP__STORE_BLOCK) % MTP__STORE_BLOCK;
    batch->reader.bounce = bounce;
    batch->scales = shape->fp8 ? carve(base, &used, places * MTP__KV * heads, sizeof(float)) : NULL;
    return used;
}

size_t mtp__batch_bytes(const mtp_verifier_config *verifier, const mtp__batch_shape *shape)
{
    mtp__batch batch = {.shape = *shape};
    return lay_out(&batch, verifier, NULL);
}

static void *own_alloc(void *user, size_t size)
{
    (void)user;
    return mtp__pages_alloc(size);
}

static void own_free(void *user, void *memory, size_t size)
{
    (void)user;
    (void)size;
    free(memory);
}

static mtp_status allocate(mtp__batch *batch)
{
    const mtp_verifier_config *verifier = mtp_verifier_get_config(batch->dataset->verifier);
    batch->bytes = lay_out(batch, verifier, NULL);
    batch->memory = batch->allocator.alloc(batch->allocator.user, batch->bytes);
    if (!batch->memory)
        return MTP_FAIL(MTP_E_MEMORY, "no memory for a batch of %lld tokens (%zu MiB)", (long long)batch->shape.places,
                        batch->bytes >> 20);
    if ((uintptr_t)batch->memory % ALIGNMENT)
        return MTP_FAIL(MTP_E_ARGUMENT, "the allocator of the batches returned memory not aligned to %d bytes",
                        (int)ALIGNMENT);
    lay_out(batch, verifier, batch->memory);
    return MTP_OK;
}

mtp__batch_shape mtp__batch_shape_of(const mtp_dataset *dataset, int64_t places, int64_t documents)
{
    mtp__batch_shape shape = {
        .places = places, .documents = documents, .hidden_size = dataset->hidden_size, .fp8 = dataset->fp8};
    memcpy(shape.kv_size, dataset->kv_size, sizeof shape.kv_size);
    return shape;
}

mtp_status mtp__batch_create(const mtp_dataset *dataset, const mtp__batch_shape *shape, const mtp_allocator *allocator,
                             mtp__batch **batch)
{
    static const mtp_allocator own = {own_alloc, own_free, NULL};
    *batch = NULL;
    if (shape->places > INT32_MAX)
        return MTP_FAIL(MTP_E_ARGUMENT, "a batch of %lld token places; at most %d are possible",
                        (long long)shape->places, INT32_MAX);
    mtp__batch *made = calloc(1, sizeof *made);
    if (!made) return MTP_FAIL(MTP_E_MEMORY, "no memory for a batch");
    made->dataset = dataset;
    made->allocator = allocator ? *allocator : own;
    made->shape = *shape;
    const mtp_status status = allocate(made);
    if (status != MTP_OK) {
        mtp__batch_free(made);
        return status;
    }
    *batch = made;
    return MTP_OK;
}

void mtp__batch_free(mtp__batch *batch)
{
    if (!batch) return;
    if (batch->memory) batch->allocator.free(batch->allocator.user, batch->memory, batch->bytes);
    free(batch);
}

/* ---- collating ------------------------------------------------------------------------------------------------ */

/* Types of this batch: those of its samples when they agree, else fp32. */
static void choose_types(const mtp_dataset *dataset, const mtp__batch_item *items, int64_t count, mtp_dtype *hidden,
                         mtp_dtype kv[MTP_LAYER_TYPES])
{
    const mtp__dataset_entry start = mtp__dataset_at(dataset, items[0].sample), *first = &start;
    *hidden = first->hidden_dtype;
    for (int type = 0; type < MTP_LAYER_TYPES; type++) kv[type] = first->kv_dtype[type];
    for (int64_t i = 1; i < count; i++) {
        const mtp__dataset_entry found = mtp__dataset_at(dataset, items[i].sample), *entry = &found;
        if (entry->hidden_dtype != *hidden) *hidden = MTP_F32;
        for (int type = 0; type < MTP_LAYER_TYPES; type++)
            if (entry->kv_dtype[type] != kv[type]) kv[type] = MTP_F32;
    }
}

/* Shape, views and the places of every document. */
static void place_documents(mtp__batch *batch, const mtp__batch_item *items, int64_t count, bool packed)
{
    const mtp_verifier_config *verifier = mtp_verifier_get_config(batch->dataset->verifier);
    mtp_batch *view = &batch->view;
    mtp_dtype hidden, kv[MTP_LAYER_TYPES];
    int64_t total = 0, longest = 0;
    for (int64_t i = 0; i < count; i++) {
        total += items[i].length;
        if (items[i].length > longest) longest = items[i].length;
    }
    view->batch = packed ? 1 : count;
    view->seq = packed ? total : longest;
    view->num_documents = count;
    view->num_supervised = 0;
    choose_types(batch->dataset, items, count, &hidden, kv);
    view->hidden_states = mtp_view_3d(batch->hidden, hidden, view->batch, view->seq, verifier->hidden_size);
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        const int64_t shape[5] = {view->batch, view->seq, MTP__KV, verifier->num_kv_heads[type],
                                  verifier->head_dim[type]};
        view->kv[type] = batch->kv[type] ? mtp_view_nd(batch->kv[type], kv[type], 5, shape) : (mtp_view){0};
    }
    int64_t begin = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!packed) begin = i * longest;
        view->document_begin[i] = (int32_t)begin;
        view->document_end[i] = (int32_t)(begin + items[i].length);
        view->document_sample[i] = items[i].sample;
        begin += items[i].length;
    }
}

static void clear_padding(mtp__batch *batch)
{
    mtp_batch *view = &batch->view;
    const size_t places = (size_t)(view->batch * view->seq);
    memset(view->token_ids, 0, places * sizeof *view->token_ids);
    memset(view->loss_mask, 0, places * sizeof *view->loss_mask);
    memset(view->document_ids, 0xff, places * sizeof *view->document_ids);
    memset(batch->hidden, 0, (size_t)mtp_view_count(view->hidden_states) * mtp_dtype_size(view->hidden_states.dtype));
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        if (batch->kv[type])
            memset(batch->kv[type], 0, (size_t)mtp_view_count(view->kv[type]) * mtp_dtype_size(view->kv[type].dtype));
}

static void *at(const mtp_view *view, int64_t elements)
{
    return (char *)view->data + (size_t)elements * mtp_dtype_size(view->dtype);
}

static mtp_status read_mask(const mtp__dataset_entry *entry, const mtp__sample *sample, int64_t length, uint8_t *mask)
{
    if (sample->loss_mask) return mtp__sample_read_mask(sample, length, mask);
    for (int64_t i = 0; i < length; i++)
        mask[i] = entry->sidecar_mask ? entry->sidecar_mask[i] : i >= entry->sidecar_prompt_len;
    return MTP_OK;
}

/* The planner relied on the mask that the data set saw. */
static mtp_status count_targets(const mtp__dataset_entry *entry, const uint8_t *mask, int64_t length, int64_t *count)
{
    int64_t targets = 0;
    for (int64_t i = 2; i < length; i++) targets += mask[i];
    if ((targets > 0) != (entry->first_target < length))
        return MTP_FAIL(MTP_E_DATA, "loss_mask changed since the data set was opened");
    *count += targets;
    return MTP_OK;
}

mtp__row_range mtp__batch_rows(const mtp__batch *batch, const mtp__dataset_entry *entry, int type, int64_t length)
{
    const mtp_verifier_config *verifier = mtp_verifier_get_config(batch->dataset->verifier);
    if (batch->visible_steps == MTP__BATCH_ALL) return (mtp__row_range){0, length};
    return mtp__batch_visible(verifier, entry, type, batch->visible_steps, length);
}

void *mtp__batch_clear_unread(const mtp_view *view, int64_t begin, int64_t length, int64_t width, mtp__row_range rows)
{
    const size_t row_bytes = (size_t)width * mtp_dtype_size(view->dtype);
    char *first = at(view, begin * width), *read = first + (size_t)rows.begin * row_bytes;
    memset(first, 0, (size_t)rows.begin * row_bytes);
    memset(first + (size_t)rows.end * row_bytes, 0, (size_t)(length - rows.end) * row_bytes);
    return read;
}

static mtp_status read_kv(mtp__batch *batch, const mtp__dataset_entry *entry, const mtp__sample *sample, int type,
                          int64_t begin, int64_t length)
{
    const mtp_verifier_config *config = mtp_verifier_get_config(batch->dataset->verifier);
    const mtp__final_norm none = {.weight = NULL};
    const mtp_view *view = &batch->view.kv[type];
    const int64_t width = kv_width(config, type);
    if (width == 0) return MTP_OK;
    const mtp__row_range rows = mtp__batch_rows(batch, entry, type, length);
    char *dst = mtp__batch_clear_unread(view, begin, length, width, rows);
    for (int part = 0; part < MTP__KV; part++) {
        const mtp__field *field = &sample->kv[type][part];
        char *half = dst + (size_t)(part * (width / MTP__KV)) * mtp_dtype_size(view->dtype);
        MTP_TRY(
            mtp__field_read_rows(field, rows.begin, rows.end, none, false, view->dtype, half, width, batch->scratch));
        batch->bytes_read += (rows.end - rows.begin) * mtp__field_row_bytes(field);
    }
    return MTP_OK;
}

/* The disk has work for all fields before the first is waited for. */
static void announce_file(const mtp__batch *batch, const mtp__dataset_entry *entry, const mtp__sample *sample,
                          int64_t length)
{
    mtp__field_announce(&sample->hidden, 0, length);
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        const mtp__row_range rows = mtp__batch_rows(batch, entry, type, length);
        for (int part = 0; part < MTP__KV; part++)
            if (sample->kv[type][part].entry) mtp__field_announce(&sample->kv[type][part], rows.begin, rows.end);
    }
}

static mtp_status read_values(mtp__batch *batch, const mtp__dataset_entry *entry, const mtp__sample *sample,
                              int64_t begin, int64_t length)
{
    const mtp_verifier *verifier = batch->dataset->verifier;
    const mtp_verifier_config *config = mtp_verifier_get_config(verifier);
    const mtp__final_norm none = {.weight = NULL};
    const mtp__final_norm norm = {.weight = mtp_verifier_norm(verifier), .eps = config->rms_norm_eps};
    mtp_batch *view = &batch->view;
    MTP_TRY(mtp__field_read(&sample->hidden, length, entry->normalise ? norm : none, true, view->hidden_states.dtype,
                            at(&view->hidden_states, begin * config->hidden_size), config->hidden_size,
                            batch->scratch));
    batch->bytes_read += length * mtp__field_row_bytes(&sample->hidden);
    for (int type = 0; type < MTP_LAYER_TYPES; type++) MTP_TRY(read_kv(batch, entry, sample, type, begin, length));
    return MTP_OK;
}

static mtp_status read_file(mtp__batch *batch, const mtp__dataset_entry *entry, int64_t begin,
                            const mtp__batch_item *item)
{
    mtp_batch *view = &batch->view;
    const int64_t length = item->length;
    mtp__sample sample;
    mtp_safetensors *file = NULL;
    MTP_TRY(mtp__dataset_open_sample(batch->dataset, item->sample, &file, &sample));
    const int64_t vocab_size = mtp_verifier_get_config(batch->dataset->verifier)->vocab_size;
    mtp_status status = mtp__sample_read_ids(&sample, vocab_size, length, view->token_ids + begin);
    if (status == MTP_OK) status = read_mask(entry, &sample, length, view->loss_mask + begin);
    if (status == MTP_OK) announce_file(batch, entry, &sample, length);
    if (status == MTP_OK) status = read_values(batch, entry, &sample, begin, length);
    batch->bytes_read += length * (int64_t)mtp_dtype_size(sample.token_ids->dtype);
    if (sample.loss_mask) batch->bytes_read += length * (int64_t)mtp_dtype_size(sample.loss_mask->dtype);
    mtp_safetensors_close(file);
    return status;
}

/* The sample, what is wrong with it, and what can be done about bad values. */
static mtp_status fail_in_file(const mtp__dataset_entry *entry, mtp_status status)
{
    const mtp_error first = *mtp_last_error();
    if (status != MTP_E_DATA) return mtp__fail_prefix(status, "%s", entry->path);
    return mtp__fail(
        status, first.foreign, first.file, first.line,
        "%s: %s; make this sample again (mtp check lists all that are bad), or leave it out: mtp pack --max-bad "
        "packs the others",
        entry->path, first.message);
}

static mtp_status read_document(mtp__batch *batch, int64_t document, const mtp__batch_item *item)
{
    const mtp__dataset_entry entry = mtp__dataset_at(batch->dataset, item->sample);
    mtp_batch *view = &batch->view;
    const int64_t begin = view->document_begin[document], length = item->length;
    for (int64_t i = 0; i < length; i++) view->document_ids[begin + i] = (int32_t)document;
    mtp_status status =
        entry.shard ? mtp__batch_read_packed(batch, &entry, begin, length) : read_file(batch, &entry, begin, item);
    if (status == MTP_OK) status = count_targets(&entry, view->loss_mask + begin, length, &view->num_supervised);
    return status == MTP_OK || entry.shard ? status : fail_in_file(&entry, status);
}

/* The disk has work for the whole batch before the first document is waited for. */
static mtp_status announce(mtp__batch *batch, const mtp__batch_item *items, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const mtp__dataset_entry entry = mtp__dataset_at(batch->dataset, items[i].sample);
        if (entry.shard) MTP_TRY(mtp__batch_announce_packed(batch, &entry, items[i].length));
    }
    return MTP_OK;
}

mtp_status mtp__batch_fill(mtp__batch *batch, const mtp__batch_item *items, int64_t count, bool packed,
                           int64_t visible_steps)
{
    batch->visible_steps = visible_steps;
    batch->bytes_read = 0;
    place_documents(batch, items, count, packed);
    if (!packed) clear_padding(batch);
    mtp_status status = announce(batch, items, count);
    for (int64_t i = 0; i < count && status == MTP_OK; i++) status = read_document(batch, i, &items[i]);
    mtp__batch_close_shard(batch);
    return status;
}

mtp_status mtp_batch_collate(const mtp_dataset *dataset, const int64_t *samples, int64_t num_samples, bool packed,
                             mtp_batch **batch)
{
    MTP_REQUIRE(dataset && samples && num_samples >= 1 && batch);
    *batch = NULL;
    int64_t total = 0, longest = 0;
    for (int64_t i = 0; i < num_samples; i++) {
        if (samples[i] < 0 || samples[i] >= dataset->count)
            return MTP_FAIL(MTP_E_ARGUMENT, "sample %lld of a data set of %lld", (long long)samples[i],
                            (long long)dataset->count);
        const int64_t length = mtp__dataset_at(dataset, samples[i]).num_tokens;
        total += length;
        if (length > longest) longest = length;
    }
    mtp__batch *made = NULL;
    const mtp__batch_shape shape = mtp__batch_shape_of(dataset, packed ? total : num_samples * longest, num_samples);
    MTP_TRY(mtp__batch_create(dataset, &shape, NULL, &made));
    mtp__batch_item *items = malloc((size_t)num_samples * sizeof *items);
    mtp_status status = items ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "no memory for %lld samples", (long long)num_samples);
    for (int64_t i = 0; i < num_samples && status == MTP_OK; i++)
        items[i] = (mtp__batch_item){samples[i], mtp__dataset_at(dataset, samples[i]).num_tokens};
    if (status == MTP_OK) status = mtp__batch_fill(made, items, num_samples, packed, MTP__BATCH_ALL);
    free(items);
    if (status != MTP_OK) {
        mtp__batch_free(made);
        return status;
    }
    *batch = &made->view;
    return MTP_OK;
}

void mtp_batch_free(mtp_batch *batch)
{
    mtp__batch_free((mtp__batch *)batch);
}
