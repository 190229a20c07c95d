/* What commands that look at a drafter on data open: verifier, samples, drafter, and the device they run on. */
#ifndef MTP_TRAINERS_INPUTS_H
#define MTP_TRAINERS_INPUTS_H

#include "args.h"
#include "mtp/check.h"

typedef struct inputs_options {
    const char *model; /* drafter directory; NULL: no drafter, no device */
    const char *verifier, *embedding_from;
    const char *hidden_norm; /* "pre", "post" or NULL */
    int64_t threads;
    const char *device; /* NULL: "cpu" */
    args_list data;
} inputs_options;

/* Zero-initialise. */
typedef struct inputs {
    mtp_context *context;
    mtp_verifier *verifier;
    mtp_drafter *drafter;
    mtp_dataset *dataset;
} inputs;

/* ---- options that several commands have: rows of their tables ------------------------------------------------- */

args_option inputs_option_verifier(const char **target, const char *help, bool required);
args_option inputs_option_hidden_norm(const char **target);
args_option inputs_option_embedding_from(const char **target);
args_option inputs_option_threads(int64_t *target, const char *help);
args_option inputs_option_device(const char **target);
args_option inputs_option_position_offset(int64_t *target, const char *help);
args_option inputs_option_structure_only(bool *target, const char *help);
args_option inputs_option_drafter(const char **target, const char *help);

/* ---- what they ask for ---------------------------------------------------------------------------------------- */

/* "pre", "post" or NULL. */
mtp_hidden_norm inputs_hidden_norm(const char *side);
/* How the samples are to be opened. */
mtp_dataset_options inputs_dataset_options(const inputs_options *options);
/* Close with inputs_close, also after a failure. */
mtp_status inputs_open(const inputs_options *options, inputs *opened);
void inputs_close(inputs *opened);
/* Was the drafter in `directory` made for this verifier? */
mtp_status inputs_check_drafter(const char *directory, const mtp_verifier *verifier);
/* One line: a test that rests on the verifier, and whether it could be made. */
void inputs_print_evidence(const mtp_check_evidence *evidence);

/* A progress callback of evaluations, tests and packing: a line on stderr, rewritten in place when that is a terminal,
 * else a new one now and then. False when a signal asked for an end (program_catch_signals). */
bool inputs_progress(void *user, int64_t done, int64_t total);
/* Take that line away. */
void inputs_progress_end(void);

#endif
