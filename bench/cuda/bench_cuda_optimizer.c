/* Times AdamW and the sum of squares of the gradients over --values parameters in one block: with fp32 master weights
 * (in bf16 mode with the bf16 shadow that products take), and with bf16 ones, rounded stochastically. */
#include "kernel_bench.h"

static int64_t values = 77730000;

enum { CHECKED = 100 }; /* values, all over the block */
static const double lr = 1e-3, max_norm = 1, beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, weight_decay = 0.01;

typedef struct set {
    float *p, *m, *v, *g; /* host, of the first set */
    mtp_sumsq_args sumsq;
    mtp_clip_args clip;
    mtp_adamw_args fp32, bf16;
} set;

typedef struct optimizer {
    kernel_bench b;
    set sets[KERNEL_SETS_MOST];
} optimizer;

static mtp_status sum_of_squares(void *context, int64_t i)
{
    optimizer *o = context;
    return o->b.base.ops->sumsq(o->b.base.device, &o->sets[i].sumsq);
}

static mtp_status update_fp32(void *context, int64_t i)
{
    optimizer *o = context;
    return o->b.base.ops->adamw(o->b.base.device, &o->sets[i].fp32);
}

static mtp_status update_bf16(void *context, int64_t i)
{
    optimizer *o = context;
    return o->b.base.ops->adamw(o->b.base.device, &o->sets[i].bf16);
}

/* A vector of random numbers, squared where they must not be negative; *host keeps them, or NULL. */
static mtp_view vector(kernel_bench *b, mtp_dtype dtype, float scale, bool squared, float **host)
{
    float *x = kernel_floats(b, values, scale, dtype == MTP_BF16);
    for (int64_t i = 0; squared && i < values; i++) x[i] *= x[i];
    const mtp_view view = mtp_view_1d(kernel_upload_as(b, x, values, dtype), dtype, values);
    if (host)
        *host = x;
    else
        free(x);
    return view;
}

/* The bf16 parameters have moments of their own, with the same numbers. */
static void make_set(optimizer *o, set *s, bool keep)
{
    kernel_bench *b = &o->b;
    const mtp_backend *ops = b->base.ops;
    double *control = bench_alloc(&b->base, MTP_CONTROL, sizeof *control);
    float *host[4];
    const mtp_view p = vector(b, MTP_BF16, 1, false, &host[0]), m = vector(b, MTP_F32, 1e-3f, false, &host[1]);
    const mtp_view v = vector(b, MTP_F32, 1e-2f, true, &host[2]), g = vector(b, MTP_F32, 1e-2f, false, &host[3]);
    s->sumsq = (mtp_sumsq_args){.x = g, .result = mtp_view_1d(control + MTP_CONTROL_SUM, MTP_F64, 1)};
    s->sumsq.scratch.size = ops->sumsq_scratch(b->base.device, &s->sumsq);
    s->sumsq.scratch.data = bench_alloc(&b->base, (int64_t)s->sumsq.scratch.size, 1);
    s->clip = (mtp_clip_args){.control = mtp_view_1d(control, MTP_F64, MTP_CONTROL),
                              .lr = lr,
                              .max_norm = max_norm,
                              .beta1 = beta1,
                              .beta2 = beta2};
    s->bf16 = (mtp_adamw_args){.p = p,
                               .m = m,
                               .v = v,
                               .g = g,
                               .control = s->clip.control,
                               .beta1 = beta1,
                               .beta2 = beta2,
                               .eps = epsilon,
                               .weight_decay = weight_decay,
                               .seed = 1};
    s->fp32 = s->bf16;
    s->fp32.p = mtp_view_1d(kernel_upload_as(b, host[0], values, MTP_F32), MTP_F32, values);
    s->fp32.m = mtp_view_1d(kernel_upload_as(b, host[1], values, MTP_F32), MTP_F32, values);
    s->fp32.v = mtp_view_1d(kernel_upload_as(b, host[2], values, MTP_F32), MTP_F32, values);
    if (!b->fp32) s->fp32.shadow = mtp_view_1d(kernel_upload_as(b, NULL, values, MTP_BF16), MTP_BF16, values);
    if (keep) {
        s->p = host[0], s->m = host[1], s->v = host[2], s->g = host[3];
    } else {
        for (int i = 0; i < 4; i++) free(host[i]);
    }
}

/* ---- the check --------------------------------------------------------------------------------------------------- */

/* What a value should be, and the size of the numbers that it is the sum of. */
typedef struct wanted {
    double value, size;
} wanted;

/* The first update of value i. */
static void expected(const set *s, double factor, int64_t i, wanted *p, wanted *m, wanted *v)
{
    const double g = factor * (double)s->g[i], old_m = beta1 * (double)s->m[i], old_v = beta2 * (double)s->v[i];
    *m = (wanted){old_m + (1 - beta1) * g, fabs(old_m) + (1 - beta1) * fabs(g)};
    *v = (wanted){old_v + (1 - beta2) * g * g, old_v + (1 - beta2) * g * g};
    const double rate = lr / (1 - beta1) / (sqrt(v->value) / sqrt(1 - beta2) + epsilon);
    const double old_p = (double)s->p[i] * (1 - lr * weight_decay);
    *p = (wanted){old_p - rate * m->value, fabs(old_p) + rate * m->size};
}

static void check_value(const kernel_bench *b, const char *what, mtp_view view, int64_t i, wanted want, double rounding)
{
    float *got = kernel_values(b, view, i, 1);
    kernel_check(what, (double)*got, want.value, 1e-6 * want.size + rounding * (fabs(want.value) + 1e-6 * want.size),
                 1);
    free(got);
}

static void check(optimizer *o)
{
    const kernel_bench *b = &o->b;
    const set *s = &o->sets[0];
    double sum = 0, want = 0;
    wanted p, m, v;
    for (int64_t i = 0; i < values; i++) want += (double)s->g[i] * (double)s->g[i];
    bench_need(sum_of_squares(o, 0));
    bench_need(b->base.ops->clip(b->base.device, &s->clip));
    bench_need(update_fp32(o, 0));
    bench_need(update_bf16(o, 0));
    bench_need(b->base.ops->download(b->base.device, &sum, s->sumsq.result.data, sizeof sum));
    kernel_check("the sum of squares", sum, want, want, 1e-9);
    const double norm = sqrt(want), factor = norm > max_norm ? max_norm / (norm + 1e-6) : 1;
    for (int64_t n = 0; n < CHECKED; n++) {
        const int64_t i = (values - 1) * n / (CHECKED - 1);
        expected(s, factor, i, &p, &m, &v);
        check_value(b, "an fp32 parameter", s->fp32.p, i, p, 0);
        check_value(b, "a first moment", s->fp32.m, i, m, 0);
        check_value(b, "a second moment", s->fp32.v, i, v, 0);
        if (s->fp32.shadow.data) check_value(b, "a shadow", s->fp32.shadow, i, p, 0x1p-8);
        check_value(b, "a bf16 parameter", s->bf16.p, i, p, 0x1p-7); /* one of its two neighbours */
        check_value(b, "a second moment of a bf16 parameter", s->bf16.v, i, v, 0);
    }
}

int main(int argc, char **argv)
{
    const kernel_option options[] = {{"values", &values, 2, "parameters"}};
    static optimizer o;
    o.b = kernel_open(argc, argv, options, sizeof options / sizeof *options);
    for (int64_t i = 0; i < o.b.sets; i++) make_set(&o, &o.sets[i], i == 0);
    check(&o);
    for (int64_t i = 1; i < o.b.sets; i++) { /* their control blocks */
        bench_need(sum_of_squares(&o, i));
        bench_need(o.b.base.ops->clip(o.b.base.device, &o.sets[i].clip));
    }
    char shape[64];
    snprintf(shape, sizeof shape, "%lld values", (long long)values);
    const double n = (double)values;
    const set *first = &o.sets[0];
    kernel_report(&o.b, "sumsq", shape, kernel_time(&o.b, sum_of_squares, &o, first->sumsq.result.data), 0, 4 * n);
    kernel_report(&o.b, o.b.fp32 ? "adamw" : "adamw with a bf16 shadow", shape,
                  kernel_time(&o.b, update_fp32, &o, first->fp32.p.data), 0, (o.b.fp32 ? 28 : 30) * n);
    kernel_report(&o.b, "adamw of bf16 parameters", shape, kernel_time(&o.b, update_bf16, &o, first->bf16.p.data), 0,
                  24 * n);
    for (int64_t i = 0; i < o.b.sets; i++) {
        const set *s = &o.sets[i];
        void *const memory[] = {s->fp32.p.data,       s->fp32.m.data,       s->fp32.v.data, s->fp32.shadow.data,
                                s->bf16.p.data,       s->bf16.m.data,       s->bf16.v.data, s->bf16.g.data,
                                s->clip.control.data, s->sumsq.scratch.data};
        for (size_t m = 0; m < sizeof memory / sizeof *memory; m++) bench_free(&o.b.base, memory[m]);
    }
    const set *s = &o.sets[0];
    free(s->p), free(s->m), free(s->v), free(s->g);
    o.b.base.ops->device_close(o.b.base.device);
    return 0;
}
