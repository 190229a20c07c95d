#include "model/stage.h"

#include <string.h>

#include "base/error.h"

static size_t rows_bytes(int64_t Rc, int64_t width)
{
    return (size_t)(Rc * width) * sizeof(float); /* the widest type */
}

void mtp__stage_layout(mtp__stage *stage, const mtp_context *context, int64_t Rc, int64_t width, mtp__arena *arena)
{
    static const char label[] = "rows on their way to the device";
    stage->context = context;
    stage->direct = context->ops->memory_is_host;
    stage->Rc = Rc;
    if (stage->direct) return;
    stage->rows = mtp__arena_take(arena, label, rows_bytes(Rc, width));
    stage->index = mtp__arena_view(arena, label, MTP_I32, 1, &Rc);
}

mtp_status mtp__stage_create(mtp__stage *stage, int64_t width)
{
    if (stage->direct) return MTP_OK;
    const size_t bytes = rows_bytes(stage->Rc, width);
    MTP_TRY_AT(stage->context->ops->host_alloc(stage->context->device, bytes, &stage->host), "rows of a chunk");
    int32_t *numbers = stage->host;
    for (int64_t r = 0; r < stage->Rc; r++) numbers[r] = (int32_t)r;
    return stage->context->ops->upload(stage->context->device, stage->index.data, numbers,
                                       (size_t)stage->Rc * sizeof *numbers);
}

void mtp__stage_release(mtp__stage *stage)
{
    if (!stage->context) return;
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        stage->context->ops->memory_free(stage->context->device, stage->kv[type]);
    stage->context->ops->host_free(stage->context->device, stage->host);
    *stage = (mtp__stage){0};
}

/* Memory for K/V of one type: grows, never shrinks. */
static mtp_status reserve(mtp__stage *stage, int type, size_t bytes)
{
    const mtp_backend *ops = stage->context->ops;
    if (bytes <= stage->kv_size[type]) return MTP_OK;
    ops->memory_free(stage->context->device, stage->kv[type]);
    stage->kv[type] = NULL;
    stage->kv_size[type] = 0;
    MTP_TRY_AT(ops->memory_alloc(stage->context->device, bytes, &stage->kv[type]), "K/V of a batch");
    stage->kv_size[type] = bytes;
    return MTP_OK;
}

mtp_status mtp__stage_kv(mtp__stage *stage, const mtp_batch *batch, mtp_view flat[MTP_LAYER_TYPES])
{
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        const mtp_view kv = batch->kv[type];
        flat[type] = (mtp_view){0};
        if (!kv.data) continue;
        /* the batch and sequence axes as one */
        flat[type] = mtp_view_4d(kv.data, kv.dtype, kv.shape[0] * kv.shape[1], 2, kv.shape[3], kv.shape[4]);
        if (stage->direct) continue;
        const size_t bytes = (size_t)mtp_view_count(kv) * mtp_dtype_size(kv.dtype);
        MTP_TRY(reserve(stage, type, bytes));
        MTP_TRY(stage->context->ops->upload(stage->context->device, stage->kv[type], kv.data, bytes));
        flat[type].data = stage->kv[type];
    }
    return MTP_OK;
}

mtp_status mtp__stage_rows(mtp__stage *stage, mtp_view host_table, const int32_t *ids, mtp_view ids_device,
                           int64_t count, mtp_view *table, mtp_view *index)
{
    *table = host_table;
    *index = ids_device;
    if (stage->direct) return MTP_OK;
    const int64_t width = host_table.shape[1];
    const size_t element = mtp_dtype_size(host_table.dtype), row = (size_t)width * element;
    for (int64_t r = 0; r < count; r++) {
        if (ids[r] < 0 || ids[r] >= host_table.shape[0])
            return MTP_FAIL(MTP_E_ARGUMENT, "row %lld of a table of %lld rows is asked for", (long long)ids[r],
                            (long long)host_table.shape[0]);
        memcpy((char *)stage->host + (size_t)r * row,
               (const char *)host_table.data + (size_t)(ids[r] * host_table.stride[0]) * element, row);
    }
    *table = mtp_view_2d(stage->rows, host_table.dtype, count, width);
    *index = mtp_view_rows(stage->index, 0, count);
    return stage->context->ops->upload(stage->context->device, stage->rows, stage->host, (size_t)count * row);
}
