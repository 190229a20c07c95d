/* Internal: the memory of a batch, from shapes alone. */
#ifndef MTP_DATA_BATCH_SIZE_H
#define MTP_DATA_BATCH_SIZE_H

#include "mtp/verifier.h"

/* What decides the size of a batch. */
typedef struct mtp__batch_shape {
    int64_t places, documents;                    /* at most */
    size_t hidden_size, kv_size[MTP_LAYER_TYPES]; /* bytes of a value */
    bool fp8;                                     /* some K/V is packed in 8 bits: its scales need room */
    bool direct;                                  /* stores are read past the page cache, through a buffer */
} mtp__batch_shape;
/* Bytes that such a batch takes. */
size_t mtp__batch_bytes(const mtp_verifier_config *verifier, const mtp__batch_shape *shape);

#endif
