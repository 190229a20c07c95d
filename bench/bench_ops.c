/* Times the ops of the CPU backend at the sizes of the E2B drafter: linear layers in percent of the measured FMA peak,
 * the others in bytes a second.
 *
 * usage: bench_ops [threads [repeats]]
 * The first line says what the machine can do, the others are one case each; seconds are the best of the repeats. */
#include "bench.h"
#include "peak.h"

typedef struct measured {
    const char *op;
    char shape[64];
    double flops, bytes; /* of one call; one of them */
} measured;

static void report(const measured *m, double peak, double seconds)
{
    printf("{\"op\": \"%s\", \"case\": \"%s\", \"seconds\": %.6f, ", m->op, m->shape, seconds);
    if (m->flops > 0)
        printf("\"gflops\": %.1f, \"percent_of_peak\": %.1f}\n", 1e-9 * m->flops / seconds,
               100e-9 * m->flops / seconds / peak);
    else
        printf("\"gbytes\": %.1f}\n", 1e-9 * m->bytes / seconds);
    fflush(stdout);
}

#define MEASURE(b, peak, m, call)        \
    do {                                 \
        double seconds;                  \
        BENCH_BEST(*(b), seconds, call); \
        report((m), (peak), seconds);    \
    } while (0)

static void linear(const bench *b, double peak, int64_t rows, int64_t in, int64_t out)
{
    float *x = bench_floats(b, rows * in, 0.5f), *w = bench_floats(b, out * in, 0.5f),
          *y = bench_floats(b, rows * out, 0.5f);
    mtp_linear_args a = {.x = mtp_view_2d(x, MTP_F32, rows, in),
                         .w = mtp_view_2d(w, MTP_F32, out, in),
                         .y = mtp_view_2d(y, MTP_F32, rows, out)};
    const size_t sizes[3] = {b->ops->linear_fwd_scratch(b->device, &a), b->ops->linear_dx_scratch(b->device, &a),
                             b->ops->linear_dw_scratch(b->device, &a)};
    for (int i = 0; i < 3; i++)
        if (sizes[i] > a.scratch.size) a.scratch.size = sizes[i];
    a.scratch.data = bench_alloc(b, (int64_t)a.scratch.size, 1);
    measured m = {.op = "linear_fwd", .flops = 2.0 * (double)rows * (double)in * (double)out};
    snprintf(m.shape, sizeof m.shape, "%lldx%lldx%lld", (long long)rows, (long long)in, (long long)out);
    MEASURE(b, peak, &m, b->ops->linear_fwd(b->device, &a));
    m.op = "linear_dx";
    MEASURE(b, peak, &m, b->ops->linear_dx(b->device, &a));
    m.op = "linear_dw";
    MEASURE(b, peak, &m, b->ops->linear_dw(b->device, &a));
    void *const all[] = {x, w, y, a.scratch.data};
    for (int i = 0; i < 4; i++) bench_free(b, all[i]);
}

static void norms(const bench *b, double peak, int64_t rows, int64_t width)
{
    const int64_t n = rows * width;
    float *x = bench_floats(b, n, 0.5f), *residual = bench_floats(b, n, 0.5f), *y = bench_floats(b, n, 0.5f),
          *dy = bench_floats(b, n, 0.5f), *dx = bench_floats(b, n, 0.5f);
    float *w = bench_floats(b, width, 0.5f), *dw = bench_floats(b, width, 0.5f), *rstd = bench_floats(b, rows, 0.5f);
    mtp_residual_norm_args a = {.residual = mtp_view_2d(residual, MTP_F32, rows, width),
                                .x = mtp_view_2d(x, MTP_F32, rows, width),
                                .w = mtp_view_1d(w, MTP_F32, width),
                                .y = mtp_view_2d(y, MTP_F32, rows, width),
                                .rstd = mtp_view_1d(rstd, MTP_F32, rows),
                                .eps = 1e-6f,
                                .dy = mtp_view_2d(dy, MTP_F32, rows, width),
                                .dresidual = mtp_view_2d(y, MTP_F32, rows, width),
                                .dx = mtp_view_2d(dx, MTP_F32, rows, width),
                                .dw = mtp_view_1d(dw, MTP_F32, width)};
    a.scratch.size = b->ops->residual_norm_bwd_scratch(b->device, &a);
    a.scratch.data = bench_alloc(b, (int64_t)a.scratch.size, 1);
    measured m = {.op = "residual_norm_fwd", .bytes = 12.0 * (double)n};
    snprintf(m.shape, sizeof m.shape, "%lldx%lld", (long long)rows, (long long)width);
    MEASURE(b, peak, &m, b->ops->residual_norm_fwd(b->device, &a));
    m.op = "residual_norm_bwd";
    m.bytes = 16.0 * (double)n;
    MEASURE(b, peak, &m, b->ops->residual_norm_bwd(b->device, &a));
    void *const all[] = {x, residual, y, dy, dx, w, dw, rstd, a.scratch.data};
    for (int i = 0; i < 9; i++) bench_free(b, all[i]);
}

static void geglu(const bench *b, double peak, int64_t rows, int64_t width)
{
    const int64_t n = rows * width;
    float *data[6];
    mtp_view views[6];
    for (int i = 0; i < 6; i++) views[i] = mtp_view_2d(data[i] = bench_floats(b, n, 0.5f), MTP_F32, rows, width);
    const mtp_geglu_args a = {
        .gate = views[0], .up = views[1], .y = views[2], .dy = views[3], .dgate = views[4], .dup = views[5]};
    measured m = {.op = "geglu_fwd", .bytes = 12.0 * (double)n};
    snprintf(m.shape, sizeof m.shape, "%lldx%lld", (long long)rows, (long long)width);
    MEASURE(b, peak, &m, b->ops->geglu_fwd(b->device, &a));
    m.op = "geglu_bwd";
    m.bytes = 24.0 * (double)n;
    MEASURE(b, peak, &m, b->ops->geglu_bwd(b->device, &a));
    for (int i = 0; i < 6; i++) bench_free(b, data[i]);
}

static void optimizer(const bench *b, double peak, int64_t n)
{
    float *data[4];
    for (int i = 0; i < 4; i++) data[i] = bench_floats(b, n, 0.5f);
    for (int64_t i = 0; i < n; i++) data[2][i] *= data[2][i]; /* v is not negative */
    double *control = bench_alloc(b, MTP_CONTROL, sizeof *control);
    memset(control, 0, MTP_CONTROL * sizeof *control);
    const mtp_view block = mtp_view_1d(control, MTP_F64, MTP_CONTROL);
    mtp_sumsq_args s = {.x = mtp_view_1d(data[3], MTP_F32, n),
                        .result = mtp_view_1d(control + MTP_CONTROL_SUM, MTP_F64, 1)};
    s.scratch.size = b->ops->sumsq_scratch(b->device, &s);
    s.scratch.data = bench_alloc(b, (int64_t)s.scratch.size, 1);
    measured m = {.op = "sumsq", .bytes = 4.0 * (double)n};
    snprintf(m.shape, sizeof m.shape, "%lld", (long long)n);
    MEASURE(b, peak, &m, b->ops->sumsq(b->device, &s));
    const mtp_clip_args c = {.control = block, .lr = 1e-4, .max_norm = 1, .beta1 = 0.9, .beta2 = 0.999};
    bench_need(b->ops->clip(b->device, &c));
    mtp_adamw_args a = {.p = mtp_view_1d(data[0], MTP_F32, n),
                        .m = mtp_view_1d(data[1], MTP_F32, n),
                        .v = mtp_view_1d(data[2], MTP_F32, n),
                        .g = s.x,
                        .control = block,
                        .beta1 = 0.9,
                        .beta2 = 0.999,
                        .eps = 1e-8};
    m.op = "adamw";
    m.bytes = 28.0 * (double)n;
    MEASURE(b, peak, &m, b->ops->adamw(b->device, &a));
    memset(data[0], 0, (size_t)n * sizeof(uint16_t));
    a.p.dtype = MTP_BF16;
    m.op = "adamw, bf16 rounded stochastically";
    m.bytes = 24.0 * (double)n;
    MEASURE(b, peak, &m, b->ops->adamw(b->device, &a));
    bench_free(b, control);
    for (int i = 0; i < 4; i++) bench_free(b, data[i]);
    bench_free(b, s.scratch.data);
}

int main(int argc, char **argv)
{
    static const int64_t rows[] = {256, 512, 1536};
    static const int64_t sizes[][2] = {{3072, 256}, {256, 2048}, {2048, 256}, {256, 1024}, {1024, 256}, {256, 1536}};
    const bench b = bench_open(argc, argv);
    const mtp_device_info *info = b.ops->device_info(b.device);
    const double peak = bench_peak_gflops(info->num_threads);
    printf("{\"isa\": \"%s\", \"blas\": \"%s\", \"threads\": %d, \"peak_gflops\": %.1f}\n", info->isa, info->blas,
           info->num_threads, peak);
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) linear(&b, peak, rows[r], sizes[i][0], sizes[i][1]);
    norms(&b, peak, 1536, 256);
    geglu(&b, peak, 1536, 2048);
    optimizer(&b, peak, 20 * 1000 * 1000);
    b.ops->device_close(b.device);
    return 0;
}
