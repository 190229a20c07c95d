/* Internal: products with a table that is too large to copy (the verifier's embedding), a block of rows at a time. */
#ifndef MTP_MODEL_TABLE_H
#define MTP_MODEL_TABLE_H

#include "base/context.h"

enum { MTP__TABLE_BLOCK = 1024 }; /* rows a block */

typedef struct mtp__table {
    mtp_context *context;
    mtp_view rows; /* real [V, width], host */
    float *host;   /* [MTP__TABLE_BLOCK, width]: the block last read */
    void *device;  /* the same */
    void *product; /* device, [MTP__TABLE_BLOCK, columns] */
    int64_t columns;
    mtp_scratch scratch; /* device, for the products */
} mtp__table;

/* Memory for blocks of `rows` and for products with up to `columns` columns. */
mtp_status mtp__table_open(mtp_context *context, mtp_view rows, int64_t columns, mtp__table *table);
void mtp__table_close(mtp__table *table); /* accepts a zeroed struct */
/* Rows ids[0..count), or first, first + 1, ... when ids is NULL, as fp32 in host and device memory; count is at most
 * MTP__TABLE_BLOCK. */
mtp_status mtp__table_read(mtp__table *table, const int64_t *ids, int64_t first, int64_t count);
/* result [count, n] = block W^T for the block last read (count rows) and W [n, width] in device memory; downloaded to
 * host. */
mtp_status mtp__table_project(mtp__table *table, int64_t count, const float *weight, int64_t n, float *result);
/* gram [width, width] (device) += block^T block. */
mtp_status mtp__table_gram(mtp__table *table, int64_t count, float *gram);

#endif
