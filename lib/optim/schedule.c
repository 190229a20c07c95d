#include "optim/schedule.h"

#include <math.h>

static const double pi = 3.14159265358979323846;

/* Share of the way down, 0 at the start of the decay and 1 at its end. */
static double progress(const mtp__schedule *s, int64_t step, int64_t begin)
{
    if (step >= s->max_steps) return 1.0;
    if (step <= begin) return 0.0;
    return (double)(step - begin) / (double)(s->max_steps - begin);
}

double mtp__schedule_lr(const mtp__schedule *s, int64_t step)
{
    if (step < s->warmup_steps) return s->learning_rate * ((double)(step + 1) / (double)s->warmup_steps);
    double height = 1.0;
    switch (s->type) {
    case MTP_LR_CONSTANT:
        return s->learning_rate;
    case MTP_LR_LINEAR:
        height = 1.0 - progress(s, step, s->warmup_steps);
        break;
    case MTP_LR_COSINE:
        height = 0.5 * (1.0 + cos(pi * progress(s, step, s->warmup_steps)));
        break;
    case MTP_LR_WSD:
        height = 1.0 - progress(s, step, s->max_steps - s->decay_steps);
        break;
    }
    return s->learning_rate * (s->min_lr_ratio + (1.0 - s->min_lr_ratio) * height);
}

int64_t mtp__schedule_decay_steps(double ratio, int64_t max_steps)
{
    const int64_t steps = (int64_t)llround(ratio * (double)max_steps);
    return steps < 1 ? 1 : steps;
}
