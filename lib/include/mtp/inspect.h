/* What is this file or directory? */
#ifndef MTP_INSPECT_H
#define MTP_INSPECT_H

#include <stdint.h>

#include "mtp/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mtp_inspect_kind {
    MTP_INSPECT_SAFETENSORS, /* a safetensors file of no other kind */
    MTP_INSPECT_SAMPLE,      /* a stored sample */
    MTP_INSPECT_SAMPLES,     /* a directory of them */
    MTP_INSPECT_SHARD,       /* a file of a packed store */
    MTP_INSPECT_STORE,       /* a packed store */
    MTP_INSPECT_DRAFTER,     /* a drafter's directory, or its model.safetensors alone */
    MTP_INSPECT_VERIFIER,
    MTP_INSPECT_CHECKPOINT,
    MTP_INSPECT_RUN
} mtp_inspect_kind;

typedef struct mtp_inspection {
    mtp_inspect_kind kind;
    char *text;           /* lines for people, each ending in a newline; problems last */
    char *json;           /* the same as one JSON object on one line: kind, path, facts by name, problems */
    int64_t num_problems; /* what makes it unusable, or needs a decision before use */
} mtp_inspection;

/* Explain `path`: a safetensors file, a sample, a directory of samples, a drafter, a verifier, a checkpoint or a run.
 * `verifier` (may be NULL) is the verifier's directory: samples and drafters are compared with it. Headers and
 * configurations are read; values only where they are few (a sample's mask) and, of a checkpoint, for its checksums.
 * MTP_E_NOT_FOUND, MTP_E_IO; MTP_E_FORMAT for what is none of these. Problems do not fail: they are listed. Free with
 * mtp_inspection_free. */
MTP_API mtp_status mtp_inspect(const char *path, const char *verifier, mtp_inspection *inspection);
MTP_API void mtp_inspection_free(mtp_inspection *inspection); /* accepts a zeroed struct */

#ifdef __cplusplus
}
#endif
#endif
