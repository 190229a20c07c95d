/* Internal: a batch with its memory. One block, laid out once for so many places, serves batch after batch. */
#ifndef MTP_DATA_BATCH_H
#define MTP_DATA_BATCH_H

#include "data/batch_size.h"
#include "data/dataset.h"

/* A sample, or its first `length` tokens. */
typedef struct mtp__batch_item {
    int64_t sample, length;
} mtp__batch_item;

enum { MTP__BATCH_ALL = -1 };

typedef struct mtp__batch {
    mtp_batch view; /* first: mtp_batch_free takes a pointer to it */
    const mtp_dataset *dataset;
    mtp_allocator allocator;
    mtp__batch_shape shape;
    size_t bytes;
    void *memory;
    mtp__batch_item *items; /* [shape.documents] for what the batch is made of; not used here */
    /* while it is filled */
    int64_t visible_steps;  /* draft steps K of the rows that K/V is read for; MTP__BATCH_ALL: all of it is read */
    int64_t bytes_read;     /* of values */
    const mtp__shard *open; /* whose files the reader has; NULL: none is open */
    mtp__store_reader reader;
    void *hidden, *kv[MTP_LAYER_TYPES];
    float *scratch; /* two rows of the widest field */
    float *scales;  /* of 8-bit K/V, [places, 2, most heads]; NULL when no shard has it */
} mtp__batch;

/* The shape of batches of a data set with at most `places` tokens (padding included) in at most `documents` documents.
 */
mtp__batch_shape mtp__batch_shape_of(const mtp_dataset *dataset, int64_t places, int64_t documents);
/* Memory for such batches, one block of the allocator; NULL: our own memory. */
mtp_status mtp__batch_create(const mtp_dataset *dataset, const mtp__batch_shape *shape, const mtp_allocator *allocator,
                             mtp__batch **batch);
void mtp__batch_free(mtp__batch *batch); /* accepts NULL */
/* Read the items. packed: back to back, else one a line. visible_steps: MTP__BATCH_ALL, or K: only the K/V that a row
 * of training with K draft steps can see is read; the rest of it is zero. Allocates nothing of its own. */
mtp_status mtp__batch_fill(mtp__batch *batch, const mtp__batch_item *items, int64_t count, bool packed,
                           int64_t visible_steps);

/* ---- for the parts of it -------------------------------------------------------------------------------------- */

/* Rows [begin, end) of a document. */
typedef struct mtp__row_range {
    int64_t begin, end;
} mtp__row_range;
/* Which K/V of a type the rows of training see, of the first `length` tokens of a document. Rows are the positions t
 * with a supervised target among t + 2 .. t + 1 + K, so with the first target at f and the last before l they lie in [f
 * - 1 - K, l - 2). A row sees global K/V up to t and local K/V in (t - W, t]. */
mtp__row_range mtp__batch_visible(const mtp_verifier_config *verifier, const mtp__dataset_entry *entry, int type,
                                  int64_t num_steps, int64_t length);
/* Which K/V of a document this batch reads. */
mtp__row_range mtp__batch_rows(const mtp__batch *batch, const mtp__dataset_entry *entry, int type, int64_t length);
/* Zero the K/V of a document at places [begin, begin + length), rows of `width` values, but for the rows to be read;
 * returns where those begin. */
void *mtp__batch_clear_unread(const mtp_view *view, int64_t begin, int64_t length, int64_t width, mtp__row_range rows);

/* A document of a shard: what will be read of it is made known to the system; then it is read into places [begin, begin
 * + length) of the batch. Document ids and counts are the caller's. The file stays open for the next document of the
 * shard, until mtp__batch_close_shard. */
mtp_status mtp__batch_announce_packed(mtp__batch *batch, const mtp__dataset_entry *entry, int64_t length);
mtp_status mtp__batch_read_packed(mtp__batch *batch, const mtp__dataset_entry *entry, int64_t begin, int64_t length);
void mtp__batch_close_shard(mtp__batch *batch);

#endif
