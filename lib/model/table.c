#include "model/table.h"

#include <stdlib.h>

#include "base/error.h"
#include "base/real.h"

static int64_t width_of(const mtp__table *table)
{
    return table->rows.shape[1];
}

static mtp_linear_args project_args(const mtp__table *table, int64_t count, const float *weight, int64_t n)
{
    const int64_t width = width_of(table);
    return (mtp_linear_args){.x = mtp_view_2d(table->device, MTP_F32, count, width),
                             .w = mtp_view_2d((float *)weight, MTP_F32, n, width),
                             .y = mtp_view_2d(table->product, MTP_F32, count, n),
                             .write = MTP_OVERWRITE,
                             .scratch = table->scratch};
}

static mtp_linear_args gram_args(const mtp__table *table, int64_t count, float *gram)
{
    const int64_t width = width_of(table);
    const mtp_view block = mtp_view_2d(table->device, MTP_F32, count, width);
    return (mtp_linear_args){.x = block,
                             .w = mtp_view_2d(gram, MTP_F32, width, width),
                             .y = block,
                             .write = MTP_ACCUMULATE,
                             .scratch = table->scratch};
}

static mtp_status allocate(mtp__table *table)
{
    const mtp_context *context = table->context;
    const size_t block = (size_t)(MTP__TABLE_BLOCK * width_of(table)) * sizeof(float);
    table->host = malloc(block);
    if (!table->host) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %d rows of a table", MTP__TABLE_BLOCK);
    MTP_TRY(context->ops->memory_alloc(context->device, block, &table->device));
    MTP_TRY(context->ops->memory_alloc(context->device, (size_t)(MTP__TABLE_BLOCK * table->columns) * sizeof(float),
                                       &table->product));
    const mtp_linear_args project = project_args(table, MTP__TABLE_BLOCK, NULL, table->columns);
    const mtp_linear_args gram = gram_args(table, MTP__TABLE_BLOCK, NULL);
    const size_t a = context->ops->linear_fwd_scratch(context->device, &project);
    const size_t b = context->ops->linear_dw_scratch(context->device, &gram);
    table->scratch.size = a > b ? a : b;
    if (table->scratch.size == 0) return MTP_OK;
    return context->ops->memory_alloc(context->device, table->scratch.size, &table->scratch.data);
}

mtp_status mtp__table_open(mtp_context *context, mtp_view rows, int64_t columns, mtp__table *table)
{
    *table = (mtp__table){.context = context, .rows = rows, .columns = columns};
    const mtp_status status = allocate(table);
    if (status != MTP_OK) mtp__table_close(table);
    return status;
}

void mtp__table_close(mtp__table *table)
{
    if (!table->context) return;
    const mtp_context *context = table->context;
    context->ops->memory_free(context->device, table->device);
    context->ops->memory_free(context->device, table->product);
    context->ops->memory_free(context->device, table->scratch.data);
    free(table->host);
    *table = (mtp__table){0};
}

mtp_status mtp__table_read(mtp__table *table, const int64_t *ids, int64_t first, int64_t count)
{
    const int64_t width = width_of(table);
    const size_t stride = (size_t)table->rows.stride[0] * mtp_dtype_size(table->rows.dtype);
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = ids ? ids[i] : first + i;
        mtp__real_to_f32(table->host + i * width, (const char *)table->rows.data + (size_t)row * stride,
                         table->rows.dtype, width);
    }
    return table->context->ops->upload(table->context->device, table->device, table->host,
                                       (size_t)(count * width) * sizeof(float));
}

mtp_status mtp__table_project(mtp__table *table, int64_t count, const float *weight, int64_t n, float *result)
{
    const mtp_context *context = table->context;
    const mtp_linear_args args = project_args(table, count, weight, n);
    MTP_TRY(context->ops->linear_fwd(context->device, &args));
    return context->ops->download(context->device, result, table->product, (size_t)(count * n) * sizeof(float));
}

mtp_status mtp__table_gram(mtp__table *table, int64_t count, float *gram)
{
    const mtp_linear_args args = gram_args(table, count, gram);
    return table->context->ops->linear_dw(table->context->device, &args);
}
