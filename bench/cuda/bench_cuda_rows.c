/* Times what works on rows value by value: GeGLU forward and backward of --rows rows of --width values, and RoPE
 * forward and backward of the same rows as --width / --head heads. */
#include "kernel_bench.h"

static int64_t rows = 24576, width = 2048, head = 256;

enum { CHECKED = 5 }; /* rows of each result */

typedef struct set {
    mtp_geglu_args geglu;
    mtp_rope_args rope, unrope;
} set;

typedef struct work {
    kernel_bench b;
    set sets[KERNEL_SETS_MOST];
} work;

#define CALL(name, op, field)                                          \
    static mtp_status name(void *context, int64_t i)                   \
    {                                                                  \
        work *w = context;                                             \
        return w->b.base.ops->op(w->b.base.device, &w->sets[i].field); \
    }
CALL(geglu_forward, geglu_fwd, geglu)
CALL(geglu_backward, geglu_bwd, geglu)
CALL(rope_forward, rope_fwd, rope)
CALL(rope_backward, rope_bwd, unrope)

static mtp_view heads_of(mtp_view matrix)
{
    return mtp_view_3d(matrix.data, matrix.dtype, rows, width / head, head);
}

static void make_set(work *w, set *s)
{
    kernel_bench *b = &w->b;
    s->geglu = (mtp_geglu_args){.gate = kernel_matrix(b, rows, width, b->stored, 3, NULL),
                                .up = kernel_matrix(b, rows, width, b->stored, 1, NULL),
                                .y = kernel_result(b, rows, width, b->stored),
                                .dy = kernel_matrix(b, rows, width, b->stored, 1, NULL),
                                .dgate = kernel_result(b, rows, width, b->stored),
                                .dup = kernel_result(b, rows, width, b->stored)};
    /* any pair of numbers turns values as well as a sine and cosine do */
    s->rope = (mtp_rope_args){.x = heads_of(s->geglu.gate),
                              .cos = kernel_matrix(b, rows, head / 2, MTP_F32, 1, NULL),
                              .sin = kernel_matrix(b, rows, head / 2, MTP_F32, 1, NULL),
                              .y = heads_of(kernel_result(b, rows, width, b->stored))};
    s->unrope = s->rope;
    s->unrope.x = heads_of(s->geglu.up);
    s->unrope.y = heads_of(kernel_result(b, rows, width, b->stored));
}

/* ---- the check --------------------------------------------------------------------------------------------------- */

/* gelu_tanh and its derivative. */
static double gelu(double g, double *slope)
{
    const double c = sqrt(2 / 3.14159265358979323846), t = tanh(c * (g + 0.044715 * g * g * g));
    *slope = 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * c * (1 + 3 * 0.044715 * g * g);
    return 0.5 * g * (1 + t);
}

static void same(const char *what, mtp_dtype dtype, float got, double want)
{
    kernel_check(what, (double)got, want, fabs(want) * kernel_rounding(dtype) + 2e-6 * (1 + fabs(want)), 1);
}

static void check_geglu(const kernel_bench *b, const mtp_geglu_args *a, int64_t r)
{
    const mtp_view views[] = {a->gate, a->up, a->dy, a->y, a->dgate, a->dup};
    float *v[6];
    for (int i = 0; i < 6; i++) v[i] = kernel_values(b, views[i], r * width, width);
    for (int64_t i = 0; i < width; i++) {
        double slope;
        const double value = gelu((double)v[0][i], &slope), up = (double)v[1][i], dy = (double)v[2][i];
        same("y of geglu", a->y.dtype, v[3][i], value * up);
        same("dgate", a->y.dtype, v[4][i], dy * up * slope);
        same("dup", a->y.dtype, v[5][i], dy * value);
    }
    for (int i = 0; i < 6; i++) free(v[i]);
}

/* direction 1: forward, -1: backward. */
static void check_rope(const kernel_bench *b, const mtp_rope_args *a, int64_t r, double direction)
{
    const int64_t half = head / 2;
    float *x = kernel_values(b, a->x, r * width, width), *y = kernel_values(b, a->y, r * width, width);
    float *c = kernel_values(b, a->cos, r * half, half), *s = kernel_values(b, a->sin, r * half, half);
    for (int64_t first = 0; first < width; first += head)
        for (int64_t i = 0; i < half; i++) {
            const double one = (double)x[first + i], other = (double)x[first + half + i];
            const double cosine = (double)c[i], sine = direction * (double)s[i];
            same("rope", a->y.dtype, y[first + i], one * cosine - other * sine);
            same("rope", a->y.dtype, y[first + half + i], other * cosine + one * sine);
        }
    free(x), free(y), free(c), free(s);
}

static void check(work *w)
{
    const set *s = &w->sets[0];
    bench_need(geglu_forward(w, 0));
    bench_need(geglu_backward(w, 0));
    bench_need(rope_forward(w, 0));
    bench_need(rope_backward(w, 0));
    for (int64_t i = 0; i < CHECKED; i++) {
        const int64_t r = (rows - 1) * i / (CHECKED - 1);
        check_geglu(&w->b, &s->geglu, r);
        check_rope(&w->b, &s->rope, r, 1);
        check_rope(&w->b, &s->unrope, r, -1);
    }
}

int main(int argc, char **argv)
{
    const kernel_option options[] = {{"rows", &rows, 1, "rows"},
                                     {"width", &width, 2, "values of a row"},
                                     {"head", &head, 2, "values of a head, even, a divisor of the width"}};
    const size_t count = sizeof options / sizeof *options;
    static work w;
    w.b = kernel_open(argc, argv, options, count);
    if (width % head || head % 2) kernel_usage(argv[0], options, count);
    for (int64_t i = 0; i < w.b.sets; i++) make_set(&w, &w.sets[i]);
    check(&w);
    char shape[96];
    snprintf(shape, sizeof shape, "%lld rows of %lld, heads of %lld", (long long)rows, (long long)width,
             (long long)head);
    const double bytes = (double)(rows * width) * (double)mtp_dtype_size(w.b.stored), table = 4 * (double)(rows * head);
    const set *s = w.sets;
    kernel_report(&w.b, "geglu_fwd", shape, kernel_time(&w.b, geglu_forward, &w, s->geglu.y.data), 0, 3 * bytes);
    kernel_report(&w.b, "geglu_bwd", shape, kernel_time(&w.b, geglu_backward, &w, s->geglu.dup.data), 0, 6 * bytes);
    kernel_report(&w.b, "rope_fwd", shape, kernel_time(&w.b, rope_forward, &w, s->rope.y.data), 0, 2 * bytes + table);
    kernel_report(&w.b, "rope_bwd", shape, kernel_time(&w.b, rope_backward, &w, s->unrope.y.data), 0,
                  2 * bytes + table);
    for (int64_t i = 0; i < w.b.sets; i++) {
        const mtp_geglu_args *a = &w.sets[i].geglu;
        const set *each = &w.sets[i];
        void *const memory[] = {a->gate.data,      a->up.data,         a->y.data,           a->dy.data,
                                a->dgate.data,     a->dup.data,        each->rope.cos.data, each->rope.sin.data,
                                each->rope.y.data, each->unrope.y.data};
        for (size_t m = 0; m < sizeof memory / sizeof *memory; m++) bench_free(&w.b.base, memory[m]);
    }
    w.b.base.ops->device_close(w.b.base.device);
    return 0;
}
