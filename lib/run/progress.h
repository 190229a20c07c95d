/* Internal: the progress line of a run. */
#ifndef MTP_RUN_PROGRESS_H
#define MTP_RUN_PROGRESS_H

#include "run/metrics.h"

enum { MTP__PROGRESS_LINE = 512 };

/* Clocks of a run, in seconds of a clock that never goes back. */
typedef struct mtp__progress {
    double begin;       /* of training in this process, evaluations and saves taken out */
    int64_t begin_step; /* updates done then */
    double last;        /* when the pace was last taken */
    int64_t rows;       /* since then */
    double wait;        /* the loader's waiting time then */
    double last_live;   /* when a live line was last shown */
} mtp__progress;

double mtp__clock(void);

void mtp__progress_start(mtp__progress *progress, int64_t step);
/* Time that was not spent training (an evaluation, a save) does not count for pace and ETA. */
void mtp__progress_skip(mtp__progress *progress, double seconds);
/* Rows a second, share of waiting and memory since the last call with `reset`. */
mtp__pace mtp__progress_pace(mtp__progress *progress, double wait_seconds, bool reset);
/* "step 120/2000  loss 2.345  acc .512 .311 .180  miss .021 ...  lr 1.00e-04  832 rows/s  wait 1%  1234 MiB  ETA 12:34"
 */
void mtp__progress_line(const mtp__progress *progress, const mtp__metrics *metrics, const mtp__update *update,
                        const mtp__pace *pace, int64_t total_steps, char line[MTP__PROGRESS_LINE]);

#endif
