/* Internal: a batch with its memory. One block, laid out once for so many places, serves batch after batch. */
#ifndef MTP_DATA_BATCH_H
#define MTP_DATA_BATCH_H

#include "data/dataset.h"

/* A sample, or its first `length` tokens. */
typedef struct mtp__batch_item {
    int64_t sample, length;
} mtp__batch_item;

typedef struct mtp__batch {
    mtp_batch view; /* first: mtp_batch_free takes a pointer to it */
    const mtp_dataset *dataset;
    int64_t max_places, max_documents;
    size_t bytes;
    void *memory;
    void *hidden, *kv[MTP_LAYER_TYPES];
    float *scratch; /* two rows of the widest field */
    float *scales;  /* of 8-bit K/V, [places, 2, most heads]; NULL when no shard has it */
} mtp__batch;

/* Memory for batches of at most `places` tokens (padding included) in at most `documents` documents. */
mtp_status mtp__batch_create(const mtp_dataset *dataset, int64_t places, int64_t documents, mtp__batch **batch);
void mtp__batch_free(mtp__batch *batch); /* accepts NULL */
/* Read the items. packed: back to back, else one a line. visible: of packed samples only the K/V that a row of training
 * can see is read (lib/data/batch_packed.c); the rest of it is zero. Allocates nothing of its own. */
mtp_status mtp__batch_fill(mtp__batch *batch, const mtp__batch_item *items, int64_t count, bool packed, bool visible);

/* A document of a shard into places [begin, begin + length) of the batch; document ids and counts are the caller's. */
mtp_status mtp__batch_read_packed(mtp__batch *batch, const mtp__dataset_entry *entry, int64_t begin, int64_t length,
                                  bool visible);

#endif
