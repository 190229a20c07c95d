/* Internal: the parts of opening a data set. */
#ifndef MTP_DATA_DATASET_OPEN_H
#define MTP_DATA_DATASET_OPEN_H

#include "data/dataset.h"
#include "data/sidecar.h"

/* What is the same for all samples of a directory. */
typedef struct mtp__dataset_opening {
    mtp_hidden_norm hidden_norm;
    mtp__sidecar *sidecar;
    const mtp__dataset_quarantine *quarantine;
    const mtp_logger *logger;
} mtp__dataset_opening;

/* One path. The sidecar of the directory read last (`*known`, the caller frees it) is kept, so that files listed one by
 * one do not read it again. */
mtp_status mtp__dataset_add_path(mtp_dataset *dataset, const char *path, const mtp__dataset_opening *how, char **known);
/* Where the mask of a sample comes from, and what it holds, into its entry. `mask` is scratch [num_tokens]. */
mtp_status mtp__dataset_find_mask(const mtp__sample *sample, mtp__sidecar *sidecar, mtp__dataset_entry *entry,
                                  uint8_t *mask);
/* Note the sources and their shares, before their paths are added. */
mtp_status mtp__dataset_create_sources(mtp_dataset *dataset, const char *const *paths, int64_t num_paths,
                                       const double *weights);
/* Sources after a split: their places among the selected samples. One of a mixture that has none left is an error. */
mtp_status mtp__dataset_split_sources(mtp_dataset *dataset);
/* What K and V of a type are read as: their type, F32 when they differ or there are none. */
mtp_dtype mtp__dataset_kv_dtype(const mtp__field kv[MTP__KV]);

#endif
