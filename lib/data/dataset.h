/* Internal: what a data set knows about its samples without holding any of them open. */
#ifndef MTP_DATA_DATASET_H
#define MTP_DATA_DATASET_H

#include "data/sample.h"
#include "data/store.h"
#include "data/verifier_key.h"

typedef struct mtp__dataset_entry {
    char *path;         /* of the sample's file, or of its shard */
    uint64_t sample_id; /* of its token ids */
    int64_t num_tokens;
    int64_t prompt_len;     /* first supervised token; num_tokens when none is */
    int64_t first_target;   /* first supervised token that can be a target (index >= 2); num_tokens when none is */
    int64_t last_target;    /* one past the last such token; 0 when there is none */
    int64_t num_supervised; /* ones in the mask */
    bool normalise;         /* hidden states were stored before the final norm */
    mtp_dtype hidden_dtype;
    mtp_dtype kv_dtype[MTP_LAYER_TYPES]; /* F32 when K and V differ */
    int64_t sidecar_prompt_len;          /* when the mask comes from a sidecar; -1: from sidecar_mask or the file */
    uint8_t *sidecar_mask;               /* [num_tokens] or NULL */
    const mtp__shard *shard;             /* where it is packed; NULL: a file of its own */
    int64_t row;                         /* in the index of the shard */
} mtp__dataset_entry;

/* A run of samples: those of a shard, or sample files that stand in `entries` one after the other. */
typedef struct mtp__dataset_part {
    int64_t first, count; /* samples of the data set */
    int64_t entry;        /* index of the first in `entries`, without a shard */
    mtp__shard *shard;    /* owned; NULL: sample files */
} mtp__dataset_part;

/* What a path brought. */
typedef struct mtp__dataset_source {
    char *path;
    double share;         /* of the tokens; 0: no mixing */
    int64_t first, count; /* samples of the data set */
} mtp__dataset_source;

struct mtp_dataset {
    const mtp_verifier *verifier;
    int64_t count;
    uint32_t *selected; /* [count] which samples of the parts, when a split leaves some out; NULL: all */
    mtp__dataset_source *sources;
    int64_t num_sources;
    bool mixed; /* the sources have shares */
    mtp__dataset_part *parts;
    int64_t num_parts;
    mtp__dataset_entry *entries; /* of sample files only: those of shards are made when they are asked for */
    int64_t num_entries, capacity;
    int64_t num_tokens;                           /* of all samples */
    bool fp8;                                     /* some K/V is packed in 8 bits */
    mtp__verifier_key *key;                       /* global K is made with it; NULL: every part holds K */
    size_t hidden_size, kv_size[MTP_LAYER_TYPES]; /* bytes of a value in the widest type that a batch can have */
};

/* What is known about sample `index`, which must be below the count. Pointers belong to the data set. */
mtp__dataset_entry mtp__dataset_at(const mtp_dataset *dataset, int64_t index);

/* Who takes samples that are refused. */
typedef struct mtp__dataset_quarantine {
    void (*refuse)(void *user, const char *path, const mtp_error *why);
    void *user;
} mtp__dataset_quarantine;
/* mtp_dataset_open; with a quarantine samples with bad data are handed to it and left out, and no sample at all is no
 * error. */
mtp_status mtp__dataset_open(const char *const *paths, int64_t num_paths, const mtp_verifier *verifier,
                             const mtp_dataset_options *options, const mtp__dataset_quarantine *quarantine,
                             mtp_dataset **dataset);

/* Describe the open file of a sample (not of a shard); it must be what it was when the data set was opened. */
mtp_status mtp__dataset_describe_sample(const mtp_dataset *dataset, int64_t index, const mtp_safetensors *file,
                                        mtp__sample *sample);
/* Open the file of a sample (not of a shard) and describe it; it must be what it was when the data set was opened.
 * Close the file with mtp_safetensors_close. Messages name the path. */
mtp_status mtp__dataset_open_sample(const mtp_dataset *dataset, int64_t index, mtp_safetensors **file,
                                    mtp__sample *sample);

#endif
