/* Internal: steps whose loss or gradient has a NaN or an infinity. They are skipped (weights and moments stay as they
 * were, the step and its samples count as done) until the run has more of them than max_bad_steps; that one ends it.
 *
 * RUN/bad_steps.jsonl, made by the first of them, has one object a line:
 *   {"kind": "bad_step", "step", "epoch", "bad_steps": skipped so far, this one included, "loss": null when not finite,
 *    "grad_norm": the same, "samples": [name of every sample of the batch], "time": {"unix"}}
 * "step" is that of the run, the one that ends the run included: its line is dropped when the run is resumed and does
 * the step again. */
#ifndef MTP_RUN_BAD_STEPS_H
#define MTP_RUN_BAD_STEPS_H

#include "base/text.h"
#include "mtp/data.h"
#include "run/metrics.h"

/* Samples of an update that was bad, as indices into the training data. Zero-initialise. */
typedef struct mtp__sample_list {
    int64_t *samples; /* [count] */
    int64_t count, capacity;
} mtp__sample_list;

mtp_status mtp__sample_list_add(mtp__sample_list *list, int64_t sample);
void mtp__sample_list_free(mtp__sample_list *list); /* accepts a zeroed struct and zeroes it */
/* "a.safetensors, b.safetensors and 3 more". */
void mtp__sample_list_names(const mtp__sample_list *list, const mtp_dataset *dataset, mtp__text *names);

/* Drop lines of later steps than `step`, which the run will do again; -1: all. */
mtp_status mtp__bad_steps_cut_back(const char *run_directory, int64_t step);
/* Append the line of a bad step, durably. `bad_steps` counts it. */
mtp_status mtp__bad_steps_record(const char *run_directory, const mtp__update *update, int64_t bad_steps,
                                 const mtp__sample_list *samples, const mtp_dataset *dataset);
/* "RUN/bad_steps.jsonl"; free() it. */
mtp_status mtp__bad_steps_path(const char *run_directory, char **path);

#endif
