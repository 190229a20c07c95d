/* Internal: learning rate as a pure function of the step, so that a resumed run needs no state of it. */
#ifndef MTP_OPTIM_SCHEDULE_H
#define MTP_OPTIM_SCHEDULE_H

#include <stdint.h>

#include "mtp/optim.h"

typedef struct mtp__schedule {
    mtp_lr_scheduler type;
    double learning_rate; /* the peak */
    double min_lr_ratio;  /* the decay ends at min_lr_ratio * learning_rate */
    int64_t warmup_steps;
    int64_t decay_steps; /* MTP_LR_WSD: the last ones of max_steps */
    int64_t max_steps;   /* not used by MTP_LR_CONSTANT */
} mtp__schedule;

/* Learning rate of update `step`, which counts from 0. With W warm-up steps, N max_steps, r min_lr_ratio:
 *   step <  W: peak * (step + 1) / W, so the first update already learns
 *   constant : peak
 *   linear   : peak * (r + (1 - r) * (1 - p)),                p = (step - W) / (N - W)
 *   cosine   : peak * (r + (1 - r) * (1 + cos(pi p)) / 2)
 *   wsd      : peak until N - decay_steps, then linear with p = (step - (N - decay_steps)) / decay_steps
 *              (warm-up, stable, decay: Hu et al., "MiniCPM", 2024)
 * From step N on the decayed value r * peak. */
double mtp__schedule_lr(const mtp__schedule *schedule, int64_t step);
/* MTP_LR_WSD: this share of the steps, rounded to the nearest, at least one. */
int64_t mtp__schedule_decay_steps(double ratio, int64_t max_steps);

#endif
