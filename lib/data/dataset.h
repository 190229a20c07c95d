/* Internal: what a data set knows about its samples without holding any of them open. */
#ifndef MTP_DATA_DATASET_H
#define MTP_DATA_DATASET_H

#include "data/sample.h"

typedef struct mtp__dataset_entry {
    char *path;
    int64_t num_tokens;
    int64_t prompt_len;     /* first supervised token; num_tokens when none is */
    int64_t first_target;   /* first supervised token that can be a target (index >= 2); num_tokens when none is */
    int64_t num_supervised; /* ones in the mask */
    bool normalise;         /* hidden states were stored before the final norm */
    mtp_dtype hidden_dtype;
    mtp_dtype kv_dtype[MTP_LAYER_TYPES]; /* F32 when K and V differ */
    int64_t sidecar_prompt_len;          /* when the mask comes from a sidecar; -1: from sidecar_mask or the file */
    uint8_t *sidecar_mask;               /* [num_tokens] or NULL */
} mtp__dataset_entry;

struct mtp_dataset {
    const mtp_verifier *verifier;
    mtp__dataset_entry *entries;
    int64_t count, capacity;
    int64_t num_tokens;                           /* of all samples */
    size_t hidden_size, kv_size[MTP_LAYER_TYPES]; /* bytes of a value in the widest type that a batch can have */
};

/* Open the file of a sample and describe it; it must be what it was when the data set was opened. Close the file with
 * mtp_safetensors_close. Messages name the path. */
mtp_status mtp__dataset_open_sample(const mtp_dataset *dataset, int64_t index, mtp_safetensors **file,
                                    mtp__sample *sample);

#endif
