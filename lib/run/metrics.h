/* Internal: what a run writes about itself: metrics.jsonl and TensorBoard scalars.
 *
 * metrics.jsonl has one object a line. Everything outside "time" is the same bit for bit when the run is repeated or
 * resumed.
 *   {"kind": "train", "step", "epoch", "loss", "learning_rate", "grad_norm" (before clipping), "rows", "tokens",
 *    "step_loss": [K], "centroid_loss": [K] or null, "accuracy": [K], "centroid_miss": [K] or null, "supervised": [K],
 *    "time": {"unix", "rows_per_second", "data_wait", "peak_memory_mib"}}
 *   {"kind": "eval", "step", "weighted_loss", "step_loss": [K], "accuracy": [K], "centroid_miss": [K] or null,
 *    "rounds": {"count", "mean_accepted", "acceptance": [K], "conditional": [K]}, "positions": {...},
 *    "time": {"unix", "seconds"}}
 *   {"kind": "bad_step", "step", "epoch", "bad_steps" (so far), "time": {"unix"}}: a step that was skipped, see
 * bad_steps.h TensorBoard has the same numbers, as "<kind>/<key>/<index>": train/loss, train/accuracy/0,
 * eval/rounds/mean_accepted. step counts finished updates, so the first line of training has step >= 1; an evaluation
 * at step 0 is that of the drafter the run started from. */
#ifndef MTP_RUN_METRICS_H
#define MTP_RUN_METRICS_H

#include "base/text.h"
#include "formats/jsonl.h"
#include "formats/tfevents.h"
#include "model/step.h"
#include "mtp/eval.h"

/* One finished step, over all ranks. */
typedef struct mtp__update {
    int64_t step;         /* done, this one and the skipped ones included */
    bool bad;             /* loss or gradient norm is not finite: nothing was updated */
    int64_t epoch;        /* of its last micro-batch */
    int64_t batch;        /* index of that micro-batch in the epoch */
    int64_t rows, tokens; /* of all micro-batches */
    double loss;          /* of the global batch */
    double grad_norm;     /* before clipping */
    double learning_rate;
    mtp__step_sums sums[MTP_MAX_SPECULATIVE_STEPS]; /* [K] */
    int64_t counts[MTP_MAX_SPECULATIVE_STEPS];      /* [K] N_k */
} mtp__update;

/* What depends on the clock and the machine, since the last line. */
typedef struct mtp__pace {
    double rows_per_second;
    double data_wait; /* share of the time spent waiting for data */
    double peak_memory_mib;
} mtp__pace;

/* A full disk costs no line and ends no run: lines that cannot be written are kept and written before the next one.
 * TensorBoard's events of that time are lost. */
typedef struct mtp__metrics {
    const mtp_logger *logger; /* told when that begins and ends; may be NULL */
    mtp__jsonl_writer lines;
    mtp__text late; /* lines that could not be written yet */
    bool behind;    /* something could not be written; it was said */
    mtp__tfevents *events;
    int32_t K;
    bool ordered;       /* centroid figures mean something */
    bool centroid_term; /* the loss has one */
} mtp__metrics;

/* Start RUN/metrics.jsonl and a new event file in RUN/tb. What metrics.jsonl has beyond `step` (evaluations of
 * `last_eval_step` and earlier are kept) is dropped: those steps will be done again. step -1: start empty. Close with
 * mtp__metrics_close, also after a failure. */
mtp_status mtp__metrics_open(const char *run_directory, int64_t step, int64_t last_eval_step, mtp__metrics *metrics);
mtp_status mtp__metrics_train(mtp__metrics *metrics, const mtp__update *update, const mtp__pace *pace);
mtp_status mtp__metrics_eval(mtp__metrics *metrics, int64_t step, const mtp_evaluation *evaluation);
/* A step that was skipped, the `bad_steps`-th of the run. */
mtp_status mtp__metrics_bad_step(mtp__metrics *metrics, const mtp__update *update, int64_t bad_steps);
/* Are there lines that cannot be written, now that it was tried again. */
bool mtp__metrics_behind(mtp__metrics *metrics);
/* Accepts a zeroed struct (with lines.fd -1). A failing close is reported, everything is released. */
mtp_status mtp__metrics_close(mtp__metrics *metrics);
/* The same after a failure: the error record stays that of the failure. */
void mtp__metrics_abandon(mtp__metrics *metrics);

/* Drop the lines of a file of this kind that are of later steps (evaluations: than last_eval_step). */
mtp_status mtp__metrics_cut_back(const char *path, int64_t step, int64_t last_eval_step);
/* Seconds since 1970. */
double mtp__metrics_time(void);

#endif
