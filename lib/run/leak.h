/* Internal: the pieces of the leak test. */
#ifndef MTP_RUN_LEAK_H
#define MTP_RUN_LEAK_H

#include "base/rng.h"
#include "model/step.h"
#include "mtp/leak.h"

/* ---- outputs (lib/run/leak_outputs.c) -------------------------------------------------------------------------- */

/* Everything a step can say about R rows. Logits only when they fit in a budget: argmax and loss stand for them. */
typedef struct mtp__leak_outputs {
    mtp__step_outputs arrays;
    int64_t num_rows;
    int32_t K;
    size_t hidden_size, state_size, selected_size, logits_size; /* values of a row and step */
} mtp__leak_outputs;

mtp_status mtp__leak_outputs_create(const mtp_drafter_config *config, int32_t K, int64_t num_rows,
                                    mtp__leak_outputs *outputs);
void mtp__leak_outputs_free(mtp__leak_outputs *outputs); /* accepts a zeroed struct */
/* Compare row `row_a` of `a` with row `row_b` of `b`: bit for bit when tolerance is 0, else as mtp_leak_report says.
 * False when they differ; then draft step and name of the output. */
bool mtp__leak_same(const mtp__leak_outputs *a, int64_t row_a, const mtp__leak_outputs *b, int64_t row_b,
                    double tolerance, int32_t *step, const char **output);

/* ---- rows and changes (lib/run/leak_change.c) -------------------------------------------------------------------- */

/* The supervised rows of the batch, at most `per_document` of each document, spread evenly, both ends included. `all`
 * is room for every row of the batch. */
mtp_status mtp__leak_rows(const mtp_batch *batch, int64_t per_document, mtp__rows *all, mtp__rows *probed);
/* The rows listed in `index` [count]. */
void mtp__leak_pick(const mtp__rows *from, const int64_t *index, int64_t count, mtp__rows *to);

/* A copy of what can be changed in a batch; everything else is shared with it. */
mtp_status mtp__leak_copy(const mtp_batch *batch, mtp_batch *copy);
void mtp__leak_copy_free(mtp_batch *copy); /* accepts a zeroed struct */
/* Undo all changes. */
void mtp__leak_restore(const mtp_batch *batch, mtp_batch *copy);
/* What a row at place t may see: keys t - window < j < t + future. */
typedef struct mtp__leak_rule {
    int64_t window, future;
} mtp__leak_rule;
/* Change, in the document of row r, what `kind` (FUTURE, WINDOW, ROWS, CONTROL) says about that row. False when there
 * is nothing of the kind: the row is too near to its document's start for WINDOW. */
bool mtp__leak_change(mtp_batch *copy, mtp_leak_kind kind, const mtp__rows *rows, int64_t r, mtp__leak_rule rule,
                      mtp__rng *rng);
/* Change everything of every document but `kept`. */
void mtp__leak_change_others(mtp_batch *copy, int64_t kept, mtp__rng *rng);

/* ---- one batch (lib/run/leak.c) ---------------------------------------------------------------------------------- */

typedef struct mtp__leak {
    mtp_drafter *drafter;
    const mtp_verifier *verifier;
    const mtp_dataset *dataset;
    mtp_leak_options options; /* resolved */
    mtp_step_config config;
    double tolerance;    /* of tests that change a row's company: 0 when the context's rows are exact */
    mtp__leak_rule rule; /* the drafter's window and 1; a test plants a leak by stating a narrower rule */
    mtp_batch *batch;
    mtp_batch changed; /* copy */
    mtp__rows all;     /* room */
    mtp__rows probed;
    mtp__rows moved; /* the probed rows as the changed batch gives them */
    mtp__rows picked;
    mtp__step *whole; /* all probed rows at once */
    int64_t *index;   /* [rows] room */
    mtp__rng rng;
} mtp__leak;

/* Everything needed to test the given samples together. Free with mtp__leak_close, also after a failure. */
mtp_status mtp__leak_open(mtp__leak *leak, const int64_t *samples, int64_t num_samples);
void mtp__leak_close(mtp__leak *leak);
/* One test, added to `property`. */
mtp_status mtp__leak_test(mtp__leak *leak, mtp_leak_kind kind, mtp_leak_property *property);

#endif
