/* What commands that look at a drafter on data open: verifier, samples, drafter, and the device they run on. */
#ifndef MTP_TRAINERS_INPUTS_H
#define MTP_TRAINERS_INPUTS_H

#include "args.h"
#include "mtp/data.h"

typedef struct inputs_options {
    const char *model; /* drafter directory; NULL: no drafter, no device */
    const char *verifier, *embedding_from;
    const char *hidden_norm; /* "pre", "post" or NULL */
    int64_t threads;
    args_list data;
} inputs_options;

/* Zero-initialise. */
typedef struct inputs {
    mtp_context *context;
    mtp_verifier *verifier;
    mtp_drafter *drafter;
    mtp_dataset *dataset;
} inputs;

/* The choices of --hidden-norm. */
extern const char *const inputs_hidden_norms[];

/* How the samples are to be opened. */
mtp_dataset_options inputs_dataset_options(const inputs_options *options);
/* Close with inputs_close, also after a failure. */
mtp_status inputs_open(const inputs_options *options, inputs *opened);
void inputs_close(inputs *opened);

/* A progress callback of evaluations and tests: a line on stderr, rewritten in place, when that is a terminal. */
bool inputs_progress(void *user, int64_t done, int64_t total);
/* Take that line away. */
void inputs_progress_end(void);

#endif
