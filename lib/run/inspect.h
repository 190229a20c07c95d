/* Internal: how an inspection is put together. */
#ifndef MTP_RUN_INSPECT_H
#define MTP_RUN_INSPECT_H

#include <stdbool.h>

#include "formats/json.h"
#include "mtp/inspect.h"
#include "mtp/safetensors.h"

typedef struct mtp__inspector {
    const char *path;
    const char *verifier; /* directory; may be NULL */
    mtp_inspect_kind kind;
    json_t *facts;    /* by name, in order */
    json_t *problems; /* strings */
    bool failed;      /* out of memory: sticky */
} mtp__inspector;

/* Add a fact; `value` is taken over. */
void mtp__fact(mtp__inspector *inspector, const char *name, json_t *value);
void mtp__fact_text(mtp__inspector *inspector, const char *name, const char *format, ...) MTP__PRINTF(3, 4);
void mtp__problem(mtp__inspector *inspector, const char *format, ...) MTP__PRINTF(2, 3);
/* The message of the last failure as a problem. */
void mtp__problem_last(mtp__inspector *inspector);

/* One safetensors file; what it holds decides the kind. */
mtp_status mtp__inspect_file(mtp__inspector *inspector);
/* A directory of sample files. */
mtp_status mtp__inspect_samples(mtp__inspector *inspector);
/* A file and a directory that mtp pack wrote. */
mtp_status mtp__inspect_shard(mtp__inspector *inspector);
mtp_status mtp__inspect_store(mtp__inspector *inspector);
mtp_status mtp__inspect_drafter(mtp__inspector *inspector);
mtp_status mtp__inspect_verifier(mtp__inspector *inspector);
mtp_status mtp__inspect_checkpoint(mtp__inspector *inspector);
mtp_status mtp__inspect_run(mtp__inspector *inspector);

/* Tensors, values, bytes, dtypes and metadata of a file. */
void mtp__inspect_tensors(mtp__inspector *inspector, const mtp_safetensors *file);
/* Look for NaN and infinity in every real tensor of a file: a problem for each that has one. */
void mtp__inspect_values(mtp__inspector *inspector, const mtp_safetensors *file);

#endif
