/* Times RMSNorm and the residual with its post-norm, forward and backward, of --rows rows of --width values. */
#include "kernel_bench.h"

static int64_t rows = 24576, width = 1024;

enum { CHECKED = 5 }; /* rows of each result */
static const float eps = 1e-6f;

typedef struct set {
    mtp_rmsnorm_args norm;
    mtp_residual_norm_args residual;
} set;

typedef struct norms {
    kernel_bench b;
    set sets[KERNEL_SETS_MOST];
} norms;

#define CALL(name, op, field)                                          \
    static mtp_status name(void *context, int64_t i)                   \
    {                                                                  \
        norms *n = context;                                            \
        return n->b.base.ops->op(n->b.base.device, &n->sets[i].field); \
    }
CALL(norm_forward, rmsnorm_fwd, norm)
CALL(norm_backward, rmsnorm_bwd, norm)
CALL(residual_forward, residual_norm_fwd, residual)
CALL(residual_backward, residual_norm_bwd, residual)

static mtp_view vector(kernel_bench *b, int64_t n, float scale)
{
    const mtp_view view = scale > 0 ? kernel_matrix(b, 1, n, MTP_F32, scale, NULL) : kernel_result(b, 1, n, MTP_F32);
    return mtp_view_1d(view.data, MTP_F32, n);
}

static void make_set(norms *n, set *s)
{
    kernel_bench *b = &n->b;
    const mtp_backend *ops = b->base.ops;
    s->norm = (mtp_rmsnorm_args){.x = kernel_matrix(b, rows, width, MTP_F32, 1, NULL),
                                 .w = vector(b, width, 2),
                                 .y = kernel_result(b, rows, width, b->stored),
                                 .rstd = vector(b, rows, 0),
                                 .eps = eps,
                                 .dy = kernel_matrix(b, rows, width, b->stored, 1, NULL),
                                 .dx = kernel_result(b, rows, width, MTP_F32),
                                 .dw = vector(b, width, 0)};
    s->residual = (mtp_residual_norm_args){.residual = s->norm.x,
                                           .x = kernel_matrix(b, rows, width, b->stored, 1, NULL),
                                           .w = s->norm.w,
                                           .y = kernel_result(b, rows, width, MTP_F32),
                                           .rstd = vector(b, rows, 0),
                                           .eps = eps,
                                           .dy = kernel_matrix(b, rows, width, MTP_F32, 1, NULL),
                                           .dresidual = kernel_result(b, rows, width, MTP_F32),
                                           .dx = kernel_result(b, rows, width, b->stored),
                                           .dw = vector(b, width, 0)};
    s->norm.scratch.size = ops->rmsnorm_bwd_scratch(b->base.device, &s->norm);
    s->norm.scratch.data = bench_alloc(&b->base, (int64_t)s->norm.scratch.size, 1);
    s->residual.scratch.size = ops->residual_norm_bwd_scratch(b->base.device, &s->residual);
    s->residual.scratch.data = bench_alloc(&b->base, (int64_t)s->residual.scratch.size, 1);
}

/* ---- the check --------------------------------------------------------------------------------------------------- */

typedef struct row {
    const float *x, *w, *dy;
    double rstd, inner; /* sum of x w dy */
} row;

static row row_of(const float *x, const float *w, const float *dy)
{
    double squares = 0, inner = 0;
    for (int64_t i = 0; i < width; i++) {
        squares += (double)x[i] * (double)x[i];
        inner += (double)x[i] * (double)w[i] * (double)dy[i];
    }
    return (row){x, w, dy, 1 / sqrt(squares / (double)width + (double)eps), inner};
}

static double normed(const row *r, int64_t i)
{
    return (double)r->x[i] * r->rstd * (double)r->w[i];
}

static double gradient(const row *r, int64_t i)
{
    return r->rstd * (double)r->w[i] * (double)r->dy[i] -
           (double)r->x[i] * r->rstd * r->rstd * r->rstd / (double)width * r->inner;
}

static void compare(const kernel_bench *b, const char *what, mtp_view result, int64_t at, const row *r,
                    double (*expected)(const row *r, int64_t i), const float *plus)
{
    float *got = kernel_values(b, result, at * width, width);
    for (int64_t i = 0; i < width; i++) {
        const double want = expected(r, i) + (plus ? (double)plus[i] : 0);
        kernel_check(what, (double)got[i], want, fabs(want) * kernel_rounding(result.dtype) + 1e-5, 1);
    }
    free(got);
}

static void check_row(const kernel_bench *b, const set *s, int64_t r)
{
    float *x = kernel_values(b, s->norm.x, r * width, width), *w = kernel_values(b, s->norm.w, 0, width);
    float *dy = kernel_values(b, s->norm.dy, r * width, width), *z = kernel_values(b, s->residual.x, r * width, width);
    float *dz = kernel_values(b, s->residual.dy, r * width, width);
    const row norm = row_of(x, w, dy), post = row_of(z, w, dz);
    compare(b, "y of rmsnorm", s->norm.y, r, &norm, normed, NULL);
    compare(b, "dx of rmsnorm", s->norm.dx, r, &norm, gradient, NULL);
    compare(b, "y of residual_norm", s->residual.y, r, &post, normed, x);
    compare(b, "dx of residual_norm", s->residual.dx, r, &post, gradient, NULL);
    free(x), free(w), free(dy), free(z), free(dz);
}

/* The sum over rows of x rstd dy, for one value. */
static void check_weight(const kernel_bench *b, const char *what, mtp_view x, mtp_view dy, mtp_view rstd, mtp_view dw,
                         int64_t i)
{
    float *all_x = kernel_values(b, x, 0, rows * width), *all_dy = kernel_values(b, dy, 0, rows * width);
    float *all_rstd = kernel_values(b, rstd, 0, rows), *got = kernel_values(b, dw, i, 1);
    double want = 0, size = 0;
    for (int64_t r = 0; r < rows; r++) {
        const double part = (double)all_x[r * width + i] * (double)all_rstd[r] * (double)all_dy[r * width + i];
        want += part;
        size += fabs(part);
    }
    kernel_check(what, (double)*got, want, size, 1e-5);
    free(all_x), free(all_dy), free(all_rstd), free(got);
}

static void check(norms *n)
{
    const set *s = &n->sets[0];
    bench_need(norm_forward(n, 0));
    bench_need(norm_backward(n, 0));
    bench_need(residual_forward(n, 0));
    bench_need(residual_backward(n, 0));
    for (int64_t i = 0; i < CHECKED; i++) check_row(&n->b, s, (rows - 1) * i / (CHECKED - 1));
    check_weight(&n->b, "dw of rmsnorm", s->norm.x, s->norm.dy, s->norm.rstd, s->norm.dw, width / 3);
    check_weight(&n->b, "dw of residual_norm", s->residual.x, s->residual.dy, s->residual.rstd, s->residual.dw,
                 width - 1);
}

static void release(norms *n)
{
    for (int64_t i = 0; i < n->b.sets; i++) {
        const mtp_rmsnorm_args *a = &n->sets[i].norm;
        const mtp_residual_norm_args *c = &n->sets[i].residual;
        void *const memory[] = {a->x.data,  a->w.data,  a->y.data,       a->rstd.data,   a->dy.data, a->dx.data,
                                a->dw.data, c->x.data,  c->y.data,       c->rstd.data,   c->dy.data, c->dresidual.data,
                                c->dx.data, c->dw.data, a->scratch.data, c->scratch.data};
        for (size_t m = 0; m < sizeof memory / sizeof *memory; m++) bench_free(&n->b.base, memory[m]);
    }
    n->b.base.ops->device_close(n->b.base.device);
}

int main(int argc, char **argv)
{
    const kernel_option options[] = {{"rows", &rows, 1, "rows"}, {"width", &width, 1, "values of a row"}};
    static norms n;
    n.b = kernel_open(argc, argv, options, sizeof options / sizeof *options);
    for (int64_t i = 0; i < n.b.sets; i++) make_set(&n, &n.sets[i]);
    check(&n);
    char shape[64];
    snprintf(shape, sizeof shape, "%lld rows of %lld", (long long)rows, (long long)width);
    const double values = (double)(rows * width), f = 4, s = (double)mtp_dtype_size(n.b.stored);
    const set *first = n.sets;
    kernel_report(&n.b, "rmsnorm_fwd", shape, kernel_time(&n.b, norm_forward, &n, first->norm.y.data), 0,
                  values * (f + s));
    kernel_report(&n.b, "rmsnorm_bwd", shape, kernel_time(&n.b, norm_backward, &n, first->norm.dx.data), 0,
                  values * (f + s + f));
    kernel_report(&n.b, "residual_norm_fwd", shape, kernel_time(&n.b, residual_forward, &n, first->residual.y.data), 0,
                  values * (f + s + f));
    kernel_report(&n.b, "residual_norm_bwd", shape, kernel_time(&n.b, residual_backward, &n, first->residual.dx.data),
                  0, values * (f + s + f + s));
    release(&n);
    return 0;
}
