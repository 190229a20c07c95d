/* Times the three products of a linear layer: y = x w^T, dx = dy w, dw = dy^T x, of --rows rows from --in to --out
 * values. Depth 256: --in 256; depth 1024: --in 1024; of the head: --out 262144. Weights are bf16 in bf16 mode, as
 * products take them there. */
#include "kernel_bench.h"

static int64_t rows = 8192, in = 1024, out = 1024;

enum { CHECKED = 8 }; /* elements of each result */

typedef struct set {
    mtp_linear_args fwd, dx, dw;
} set;

typedef struct gemm {
    kernel_bench b;
    set sets[KERNEL_SETS_MOST];
    float *x, *w; /* of the first set, on the host */
} gemm;

static mtp_status forward(void *context, int64_t i)
{
    gemm *g = context;
    return g->b.base.ops->linear_fwd(g->b.base.device, &g->sets[i].fwd);
}

static mtp_status input_gradient(void *context, int64_t i)
{
    gemm *g = context;
    return g->b.base.ops->linear_dx(g->b.base.device, &g->sets[i].dx);
}

static mtp_status weight_gradient(void *context, int64_t i)
{
    gemm *g = context;
    return g->b.base.ops->linear_dw(g->b.base.device, &g->sets[i].dw);
}

/* The result of the forward product serves as dy. */
static void make_set(gemm *g, int64_t i)
{
    kernel_bench *b = &g->b;
    const mtp_backend *ops = b->base.ops;
    set *s = &g->sets[i];
    const mtp_view x = kernel_matrix(b, rows, in, b->stored, 1, i ? NULL : &g->x);
    const mtp_view w = kernel_matrix(b, out, in, b->fp32 ? MTP_F32 : MTP_BF16, 2 / sqrtf((float)in), i ? NULL : &g->w);
    const mtp_view y = kernel_result(b, rows, out, b->stored);
    s->fwd = (mtp_linear_args){.x = x, .w = w, .y = y};
    s->dx = (mtp_linear_args){.x = kernel_result(b, rows, in, b->stored), .w = w, .y = y};
    s->dw = (mtp_linear_args){.x = x, .w = kernel_result(b, out, in, MTP_F32), .y = y};
    const size_t bytes[] = {ops->linear_fwd_scratch(b->base.device, &s->fwd),
                            ops->linear_dx_scratch(b->base.device, &s->dx),
                            ops->linear_dw_scratch(b->base.device, &s->dw)};
    mtp_scratch scratch = {.size = 0};
    for (int n = 0; n < 3; n++) scratch.size = bytes[n] > scratch.size ? bytes[n] : scratch.size;
    scratch.data = bench_alloc(&b->base, (int64_t)scratch.size, 1);
    s->fwd.scratch = s->dx.scratch = s->dw.scratch = scratch;
}

/* ---- the check --------------------------------------------------------------------------------------------------- */

/* Element (r, c) of a result against the dot product of two rows of numbers. What bf16 mode multiplies is what it is
 * given, except that activations which are not stored in bf16 are rounded first. */
static void check_element(const gemm *g, const char *what, mtp_view result, int64_t r, int64_t c, const float *a,
                          int64_t a_step, const float *b, int64_t b_step, int64_t n)
{
    double want = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        want += (double)a[i * a_step] * (double)b[i * b_step];
        size += fabs((double)a[i * a_step] * (double)b[i * b_step]);
    }
    float *got = kernel_values(&g->b, result, r * result.shape[1] + c, 1);
    const double root = sqrt((double)n), factors = !g->b.fp32 && g->b.stored == MTP_F32 ? 8 * 0x1p-8 / root : 0;
    const double sums = 2e-6 + 2e-8 * root; /* tensor cores cut what fp32 would round */
    kernel_check(what, (double)*got, want, fabs(want) * kernel_rounding(result.dtype) + size * (factors + sums), 1);
    free(got);
}

static void check(gemm *g)
{
    const set *s = &g->sets[0];
    const kernel_bench *b = &g->b;
    bench_need(forward(g, 0));
    bench_need(input_gradient(g, 0));
    bench_need(weight_gradient(g, 0));
    float *column = kernel_host((size_t)rows * sizeof *column);
    for (int64_t i = 0; i < CHECKED; i++) {
        const int64_t r = (rows - 1) * i / (CHECKED - 1), m = (in - 1) * (CHECKED - 1 - i) / (CHECKED - 1);
        const int64_t n = (out - 1) * ((5 * i) % CHECKED) / (CHECKED - 1);
        check_element(g, "y", s->fwd.y, r, n, g->x + r * in, 1, g->w + n * in, 1, in);
        float *dy = kernel_values(b, s->fwd.y, r * out, out);
        check_element(g, "dx", s->dx.x, r, m, dy, 1, g->w + m, in, out);
        free(dy);
        for (int64_t row = 0; row < rows; row++) {
            float *value = kernel_values(b, s->fwd.y, row * out + n, 1);
            column[row] = *value;
            free(value);
        }
        check_element(g, "dw", s->dw.w, n, m, column, 1, g->x + m, in, rows);
    }
    free(column);
}

int main(int argc, char **argv)
{
    const kernel_option options[] = {
        {"rows", &rows, 1, "rows"},
        {"in", &in, 1, "inputs of the layer"},
        {"out", &out, 1, "outputs of the layer"},
    };
    static gemm g;
    g.b = kernel_open(argc, argv, options, sizeof options / sizeof *options);
    for (int64_t i = 0; i < g.b.sets; i++) make_set(&g, i);
    check(&g);
    char shape[96];
    snprintf(shape, sizeof shape, "%lld rows, %lld to %lld", (long long)rows, (long long)in, (long long)out);
    const double flop = 2 * (double)rows * (double)in * (double)out;
    const double activation = (double)mtp_dtype_size(g.b.stored), weight = g.b.fp32 ? 4 : 2;
    const double x = activation * (double)(rows * in), y = activation * (double)(rows * out);
    const double w = weight * (double)(out * in);
    const set *s = g.sets;
    kernel_report(&g.b, "linear_fwd", shape, kernel_time(&g.b, forward, &g, s->fwd.y.data), flop, x + w + y);
    kernel_report(&g.b, "linear_dx", shape, kernel_time(&g.b, input_gradient, &g, s->dx.x.data), flop, x + w + y);
    kernel_report(&g.b, "linear_dw", shape, kernel_time(&g.b, weight_gradient, &g, s->dw.w.data), flop,
                  x + y + 4 * (double)(out * in));
    for (int64_t i = 0; i < g.b.sets; i++) {
        void *const memory[] = {g.sets[i].fwd.x.data, g.sets[i].fwd.w.data, g.sets[i].fwd.y.data,
                                g.sets[i].dx.x.data,  g.sets[i].dw.w.data,  g.sets[i].fwd.scratch.data};
        for (size_t n = 0; n < sizeof memory / sizeof *memory; n++) bench_free(&g.b.base, memory[n]);
    }
    free(g.x);
    free(g.w);
    g.b.base.ops->device_close(g.b.base.device);
    return 0;
}
