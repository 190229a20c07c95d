/* AdamW and what it needs to know of all gradients together (formulas: ops.h). */
#include <math.h>

#include "check.h"
#include "check_args.h"
#include "cpu/cpu.h"

/* ---- AdamW ------------------------------------------------------------------------------------------------------- */

/* What is updated at once: a multiple of 16 values, few enough to pass through a buffer on the stack. */
enum { BLOCK = 1 << 14, PIECE = 1 << 11, DECAY_GRAIN = 16 };

typedef struct span {
    const mtp_adamw_args *args;
    const mtp__vec *vec;
    uint64_t step;
    mtp__vec_adamw decayed, plain; /* where weight decay applies, and where not */
} span;

static span span_of(const mtp_adamw_args *a, const mtp__vec *vec)
{
    const double *control = a->control.data;
    const double lr = control[MTP_CONTROL_LR];
    span s = {.args = a, .vec = vec, .step = (uint64_t)control[MTP_CONTROL_STEP]};
    s.plain = (mtp__vec_adamw){
        .grad_scale = (float)control[MTP_CONTROL_FACTOR],
        .decay = 1,
        .beta1 = (float)a->beta1,
        .rest1 = (float)(1 - a->beta1),
        .beta2 = (float)a->beta2,
        .rest2 = (float)(1 - a->beta2),
        .step_size = (float)(lr / control[MTP_CONTROL_BIAS1]),
        .inv_root_bias2 = (float)(1 / sqrt(control[MTP_CONTROL_BIAS2])),
        .eps = (float)a->eps,
    };
    s.decayed = s.plain;
    s.decayed.decay = (float)(1 - lr * a->weight_decay);
    return s;
}

/* Values [first, end), with `p` for the first of them. */
static void update(const span *s, float *p, int64_t first, int64_t end)
{
    const mtp_adamw_args *a = s->args;
    float *m = a->m.data, *v = a->v.data;
    const float *g = a->g.data;
    const uint8_t *decays = a->decays.data;
    for (int64_t i = first, next; i < end; i = next) {
        const bool decay = !decays || decays[i / DECAY_GRAIN];
        next = decays ? i + DECAY_GRAIN : end;
        while (next < end && (decays[next / DECAY_GRAIN] != 0) == decay) next += DECAY_GRAIN;
        if (next > end) next = end;
        s->vec->adamw(p + (i - first), m + i, v + i, g + i, next - i, decay ? &s->decayed : &s->plain);
    }
}

static void update_f32(const span *s, int64_t first, int64_t end)
{
    float *p = (float *)s->args->p.data + first;
    uint16_t *shadow = s->args->shadow.data;
    update(s, p, first, end);
    if (shadow) s->vec->from_f32(shadow + first, MTP_BF16, p, end - first);
}

static void update_bf16(const span *s, int64_t first, int64_t end)
{
    uint16_t *p = s->args->p.data;
    float piece[PIECE];
    for (int64_t i = first; i < end; i += PIECE) {
        const int64_t n = end - i < PIECE ? end - i : PIECE;
        s->vec->to_f32(piece, p + i, MTP_BF16, n);
        update(s, piece, i, i + n);
        s->vec->round_stochastic(p + i, piece, n, s->args->seed, s->step, (uint64_t)(s->args->place + i));
    }
}

mtp_status mtp__cpu_adamw(mtp_device *device, const mtp_adamw_args *a)
{
    MTP_TRY(mtp__check_adamw("adamw", a));
    const double *control = a->control.data;
    if (control[MTP_CONTROL_SKIP] != 0) return MTP_OK;
    const span s = span_of(a, device->vec);
    const int64_t n = mtp_view_count(a->p);
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t i = 0; i < n; i += BLOCK) {
        const int64_t end = n - i < BLOCK ? n : i + BLOCK;
        if (a->p.dtype == MTP_BF16)
            update_bf16(&s, i, end);
        else
            update_f32(&s, i, end);
    }
    return MTP_OK;
}

/* ---- sum of squares: one double a block, added in order ---------------------------------------------------------- */

enum { SUM_BLOCK = 1 << 16 };

static int64_t num_blocks(int64_t n)
{
    return (n + SUM_BLOCK - 1) / SUM_BLOCK;
}

size_t mtp__cpu_sumsq_scratch(const mtp_device *device, const mtp_sumsq_args *a)
{
    (void)device;
    return (size_t)num_blocks(mtp_view_count(a->x)) * sizeof(double);
}

mtp_status mtp__cpu_sumsq(mtp_device *device, const mtp_sumsq_args *a)
{
    MTP_TRY(mtp__check_sumsq("sumsq", a));
    MTP_TRY(mtp__check_scratch("sumsq", &a->scratch, mtp__cpu_sumsq_scratch(device, a)));
    const float *x = a->x.data;
    double *sums = a->scratch.data, *result = a->result.data;
    const int64_t n = mtp_view_count(a->x), blocks = num_blocks(n);
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t first = i * SUM_BLOCK;
        sums[i] = device->vec->sumsq(x + first, n - first < SUM_BLOCK ? n - first : SUM_BLOCK);
    }
    double total = 0;
    for (int64_t i = 0; i < blocks; i++) total += sums[i];
    *result = a->write == MTP_ACCUMULATE ? *result + total : total;
    return MTP_OK;
}

/* ---- the decision ------------------------------------------------------------------------------------------------ */

mtp_status mtp__cpu_clip(mtp_device *device, const mtp_clip_args *a)
{
    (void)device;
    MTP_TRY(mtp__check_clip("clip", a));
    double *control = a->control.data;
    const double norm = sqrt(control[MTP_CONTROL_SUM]);
    const double *watch = a->watch.data;
    bool good = isfinite(norm) && !a->skip;
    for (int64_t i = 0; watch && i < a->watch.shape[0]; i++) good = good && isfinite(watch[i]);
    control[MTP_CONTROL_LR] = a->lr;
    control[MTP_CONTROL_NORM] = norm;
    control[MTP_CONTROL_FACTOR] = a->max_norm > 0 ? fmin(1, a->max_norm / (norm + 1e-6)) : 1;
    control[MTP_CONTROL_SKIP] = !good;
    if (good) control[MTP_CONTROL_STEP] += 1;
    control[MTP_CONTROL_BIAS1] = 1 - pow(a->beta1, control[MTP_CONTROL_STEP]);
    control[MTP_CONTROL_BIAS2] = 1 - pow(a->beta2, control[MTP_CONTROL_STEP]);
    return MTP_OK;
}
