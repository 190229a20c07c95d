/* Times RMSNorm and the residual with its post-norm, forward and backward, of --rows rows of --width values; and what a
 * step does in one pass: the norm of heads with RoPE behind it, --heads of the rows at one position, and the post-norm
 * with the norm behind it. */
#include "kernel_bench.h"

static int64_t rows = 24576, width = 1024, heads = 4;

enum { CHECKED = 5 }; /* rows of each result */
static const float eps = 1e-6f;

typedef struct set {
    mtp_rmsnorm_args norm;
    mtp_residual_norm_args residual;
    mtp_rmsnorm_args turned;     /* with RoPE */
    mtp_residual_norm_args both; /* with the next norm */
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
CALL(turned_forward, rmsnorm_fwd, turned)
CALL(turned_backward, rmsnorm_bwd, turned)
CALL(both_forward, residual_norm_fwd, both)
CALL(both_backward, residual_norm_bwd, both)

static mtp_view vector(kernel_bench *b, int64_t n, float scale)
{
    const mtp_view view = scale > 0 ? kernel_matrix(b, 1, n, MTP_F32, scale, NULL) : kernel_result(b, 1, n, MTP_F32);
    return mtp_view_1d(view.data, MTP_F32, n);
}

static mtp_scratch scratch_of(const kernel_bench *b, size_t bytes)
{
    return (mtp_scratch){.data = bench_alloc(&b->base, (int64_t)bytes, 1), .size = bytes};
}

/* The fused ones, which share their inputs with the others. Any numbers turn values as well as sines and cosines do. */
static void make_fused(kernel_bench *b, set *s)
{
    const mtp_backend *ops = b->base.ops;
    s->turned = (mtp_rmsnorm_args){.x = s->residual.x,
                                   .w = s->norm.w,
                                   .y = kernel_result(b, rows, width, b->stored),
                                   .rstd = vector(b, rows, 0),
                                   .eps = eps,
                                   .cos = kernel_matrix(b, rows / heads, width / 2, MTP_F32, 1, NULL),
                                   .sin = kernel_matrix(b, rows / heads, width / 2, MTP_F32, 1, NULL),
                                   .dy = s->norm.dy,
                                   .dx = kernel_result(b, rows, width, b->stored),
                                   .dw = vector(b, width, 0)};
    s->both = s->residual;
    s->both.y = kernel_result(b, rows, width, MTP_F32);
    s->both.dw = vector(b, width, 0);
    s->both.next_w = vector(b, width, 1);
    s->both.next_y = kernel_result(b, rows, width, b->stored);
    s->both.next_rstd = vector(b, rows, 0);
    s->both.next_dy = s->norm.dy;
    s->both.next_dw = vector(b, width, 0);
    s->both.dx = kernel_result(b, rows, width, b->stored);
    s->turned.scratch = scratch_of(b, ops->rmsnorm_bwd_scratch(b->base.device, &s->turned));
    s->both.scratch = scratch_of(b, ops->residual_norm_bwd_scratch(b->base.device, &s->both));
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
    s->norm.scratch = scratch_of(b, ops->rmsnorm_bwd_scratch(b->base.device, &s->norm));
    s->residual.scratch = scratch_of(b, ops->residual_norm_bwd_scratch(b->base.device, &s->residual));
    make_fused(b, s);
}

/* ---- the check --------------------------------------------------------------------------------------------------- */

/* A row of RMSNorm in double; dy may be set later. */
typedef struct row {
    double *x, *w, *dy, *y, *dx;
} row;

static double *doubles(void)
{
    return kernel_host((size_t)width * sizeof(double));
}

static double *fetched(const kernel_bench *b, mtp_view view, int64_t r)
{
    float *values = kernel_values(b, view, r * width, width);
    double *x = doubles();
    for (int64_t i = 0; i < width; i++) x[i] = (double)values[i];
    free(values);
    return x;
}

static void norm_row(row *r)
{
    double squares = 0, inner = 0;
    for (int64_t i = 0; i < width; i++) {
        squares += r->x[i] * r->x[i];
        inner += r->x[i] * r->w[i] * r->dy[i];
    }
    const double rstd = 1 / sqrt(squares / (double)width + (double)eps);
    for (int64_t i = 0; i < width; i++) {
        r->y[i] = r->x[i] * rstd * r->w[i];
        r->dx[i] = rstd * r->w[i] * r->dy[i] - r->x[i] * rstd * rstd * rstd / (double)width * inner;
    }
}

static void free_row(row *r)
{
    double *const all[] = {r->x, r->w, r->dy, r->y, r->dx};
    for (int i = 0; i < 5; i++) free(all[i]);
}

static row row_of(const kernel_bench *b, mtp_view x, mtp_view w, mtp_view dy, int64_t r)
{
    row made = {fetched(b, x, r), fetched(b, w, 0), fetched(b, dy, r), doubles(), doubles()};
    norm_row(&made);
    return made;
}

static void compare(const kernel_bench *b, const char *what, mtp_view result, int64_t at, const double *want)
{
    float *got = kernel_values(b, result, at * width, width);
    for (int64_t i = 0; i < width; i++)
        kernel_check(what, (double)got[i], want[i], fabs(want[i]) * kernel_rounding(result.dtype) + 1e-5, 1);
    free(got);
}

/* Turns the pairs of a row; direction -1: back. */
static void turn(double *x, const float *cosine, const float *sine, double direction)
{
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        const double one = x[i], other = x[i + half], c = (double)cosine[i], s = direction * (double)sine[i];
        x[i] = one * c - other * s;
        x[i + half] = other * c + one * s;
    }
}

static void check_turned(const kernel_bench *b, const mtp_rmsnorm_args *a, int64_t r)
{
    float *c = kernel_values(b, a->cos, r / heads * (width / 2), width / 2);
    float *s = kernel_values(b, a->sin, r / heads * (width / 2), width / 2);
    row turned = row_of(b, a->x, a->w, a->dy, r);
    turn(turned.dy, c, s, -1);
    norm_row(&turned);
    turn(turned.y, c, s, 1);
    compare(b, "y of rmsnorm with RoPE", a->y, r, turned.y);
    compare(b, "dx of rmsnorm with RoPE", a->dx, r, turned.dx);
    free_row(&turned);
    free(c), free(s);
}

static void add(double *to, const double *x)
{
    for (int64_t i = 0; i < width; i++) to[i] += x[i];
}

static void check_row(const kernel_bench *b, const set *s, int64_t r)
{
    row norm = row_of(b, s->norm.x, s->norm.w, s->norm.dy, r);
    compare(b, "y of rmsnorm", s->norm.y, r, norm.y);
    compare(b, "dx of rmsnorm", s->norm.dx, r, norm.dx);
    row post = row_of(b, s->residual.x, s->residual.w, s->residual.dy, r);
    add(post.y, norm.x); /* the residual */
    compare(b, "y of residual_norm", s->residual.y, r, post.y);
    compare(b, "dx of residual_norm", s->residual.dx, r, post.dx);
    row next = row_of(b, s->both.y, s->both.next_w, s->both.next_dy, r);
    compare(b, "y of residual_norm with the next norm", s->both.y, r, post.y);
    compare(b, "next_y of residual_norm", s->both.next_y, r, next.y);
    add(post.dy, next.dx);
    norm_row(&post);
    compare(b, "dx of residual_norm with the next norm", s->both.dx, r, post.dx);
    free_row(&norm);
    free_row(&post);
    free_row(&next);
    check_turned(b, &s->turned, r);
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
    bench_need(turned_forward(n, 0));
    bench_need(turned_backward(n, 0));
    bench_need(both_forward(n, 0));
    bench_need(both_backward(n, 0));
    for (int64_t i = 0; i < CHECKED; i++) check_row(&n->b, s, (rows - 1) * i / (CHECKED - 1));
    check_weight(&n->b, "dw of rmsnorm", s->norm.x, s->norm.dy, s->norm.rstd, s->norm.dw, width / 3);
    check_weight(&n->b, "dw of residual_norm", s->residual.x, s->residual.dy, s->residual.rstd, s->residual.dw,
                 width - 1);
}

static void release(norms *n)
{
    for (int64_t i = 0; i < n->b.sets; i++) {
        const mtp_rmsnorm_args *a = &n->sets[i].norm;
        const mtp_residual_norm_args *c = &n->sets[i].residual, *e = &n->sets[i].both;
        const mtp_rmsnorm_args *d = &n->sets[i].turned;
        void *const memory[] = {a->x.data,       a->w.data,         a->y.data,       a->rstd.data, a->dy.data,
                                a->dx.data,      a->dw.data,        c->x.data,       c->y.data,    c->rstd.data,
                                c->dy.data,      c->dresidual.data, c->dx.data,      c->dw.data,   a->scratch.data,
                                c->scratch.data, d->y.data,         d->rstd.data,    d->cos.data,  d->sin.data,
                                d->dx.data,      d->dw.data,        d->scratch.data, e->y.data,    e->next_w.data,
                                e->next_y.data,  e->next_rstd.data, e->next_dw.data, e->dw.data,   e->dx.data,
                                e->scratch.data};
        for (size_t m = 0; m < sizeof memory / sizeof *memory; m++) bench_free(&n->b.base, memory[m]);
    }
    n->b.base.ops->device_close(n->b.base.device);
}

int main(int argc, char **argv)
{
    const kernel_option options[] = {{"rows", &rows, 1, "rows, a multiple of the heads"},
                                     {"width", &width, 2, "values of a row, even"},
                                     {"heads", &heads, 1, "rows at one position, for RoPE"}};
    static norms n;
    n.b = kernel_open(argc, argv, options, sizeof options / sizeof *options);
    if (width % 2 || rows % heads) kernel_usage(argv[0], options, sizeof options / sizeof *options);
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
    kernel_report(&n.b, "rmsnorm_fwd, RoPE", shape, kernel_time(&n.b, turned_forward, &n, first->turned.y.data), 0,
                  values * (s + s + f / (double)heads));
    kernel_report(&n.b, "rmsnorm_bwd, RoPE", shape, kernel_time(&n.b, turned_backward, &n, first->turned.dx.data), 0,
                  values * (s + s + s + f / (double)heads));
    kernel_report(&n.b, "residual_norm_fwd, next norm", shape, kernel_time(&n.b, both_forward, &n, first->both.y.data),
                  0, values * (f + s + f + s));
    kernel_report(&n.b, "residual_norm_bwd, next norm", shape,
                  kernel_time(&n.b, both_backward, &n, first->both.dx.data), 0, values * (f + s + f + s + f + s));
    release(&n);
    return 0;
}
