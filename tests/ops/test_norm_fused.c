/* Protects: norms that do the work of their neighbours in one pass, the norm of heads with RoPE behind it and the
 * post-norm with the norm that reads its result: results and gradients against the formulas in double and central
 * differences, as stored in either dtype, with each optional part left out. */
#include "ops_check.h"

static const float eps = 1e-3f;

static double rstd_of(const double *x, int64_t width)
{
    double squares = 0;
    for (int64_t i = 0; i < width; i++) squares += x[i] * x[i];
    return 1.0 / sqrt(squares / (double)width + (double)eps);
}

/* dx += RMSNorm'(dy), dw += x rstd dy */
static void norm_bwd(const double *x, const float *w, const double *dy, double rstd, int64_t width, double *dx,
                     double *dw)
{
    double sum = 0;
    for (int64_t i = 0; i < width; i++) sum += x[i] * (double)w[i] * dy[i];
    for (int64_t i = 0; i < width; i++) {
        dx[i] += rstd * (double)w[i] * dy[i] - x[i] * rstd * rstd * rstd / (double)width * sum;
        dw[i] += x[i] * rstd * dy[i];
    }
}

static double *as_doubles(const float *x, int64_t n)
{
    double *y = ops_doubles(n);
    for (int64_t i = 0; i < n; i++) y[i] = (double)x[i];
    return y;
}

/* ---- heads: norm, then RoPE -------------------------------------------------------------------------------------- */

typedef struct heads {
    mtp_device *device;
    int64_t rows, count, width; /* tokens, heads of each */
    ops_tensor x, w, y, rstd, dy, dx, dw, cosine, sine;
    mtp_rmsnorm_args args;
} heads;

static heads make_heads(mtp_device *device, mtp_dtype stored, int64_t rows, int64_t count, int64_t width, int64_t gap)
{
    test_rng rng = {41};
    heads h = {.device = device, .rows = rows, .count = count, .width = width};
    ops_tensor *const matrices[] = {&h.x, &h.y, &h.dy, &h.dx};
    for (int i = 0; i < 4; i++) *matrices[i] = ops_random(&rng, stored, rows * count, width, gap, 1.5f);
    h.w = ops_random_vector(&rng, MTP_F32, width, 1.5f);
    h.dw = ops_random_vector(&rng, MTP_F32, width, 1.0f);
    h.rstd = ops_random_vector(&rng, MTP_F32, rows * count, 1.0f);
    h.cosine = ops_random(&rng, MTP_F32, rows, width / 2, gap, 1.0f);
    h.sine = ops_random(&rng, MTP_F32, rows, width / 2, 0, 1.0f);
    h.args = (mtp_rmsnorm_args){.x = h.x.view,
                                .w = h.w.view,
                                .y = h.y.view,
                                .rstd = h.rstd.view,
                                .eps = eps,
                                .cos = h.cosine.view,
                                .sin = h.sine.view,
                                .dy = h.dy.view,
                                .dx = h.dx.view,
                                .dw = h.dw.view};
    h.args.scratch = ops_scratch(ops_backend()->rmsnorm_bwd_scratch(device, &h.args));
    return h;
}

typedef struct heads_results {
    double *y, *rstd, *dx, *dw;
} heads_results;

/* to = the rotation of `from`, or its inverse, by the angles of row r. */
static void rotate(const heads *h, int64_t r, double sign, const double *from, double *to)
{
    const int64_t half = h->width / 2, at = r / h->count * half;
    for (int64_t i = 0; i < half; i++) {
        const double c = (double)h->cosine.values[at + i], s = sign * (double)h->sine.values[at + i];
        to[i] = from[i] * c - from[half + i] * s;
        to[half + i] = from[half + i] * c + from[i] * s;
    }
}

static heads_results formulas_of_heads(const heads *h, mtp_write dw_write)
{
    const int64_t n = h->rows * h->count, width = h->width;
    heads_results e = {ops_doubles(n * width), ops_doubles(n), ops_doubles(n * width),
                       dw_write == MTP_ACCUMULATE ? as_doubles(h->dw.values, width) : ops_doubles(width)};
    double *normed = ops_doubles(width), *turned = ops_doubles(width);
    const double *all_x = as_doubles(h->x.values, n * width), *all_dy = as_doubles(h->dy.values, n * width);
    for (int64_t r = 0; r < n; r++) {
        const double *x = all_x + r * width;
        e.rstd[r] = rstd_of(x, width);
        for (int64_t i = 0; i < width; i++) normed[i] = x[i] * e.rstd[r] * (double)h->w.values[i];
        rotate(h, r, 1.0, normed, e.y + r * width);
        rotate(h, r, -1.0, all_dy + r * width, turned);
        norm_bwd(x, h->w.values, turned, e.rstd[r], width, e.dx + r * width, e.dw);
    }
    return e;
}

static void check_heads(mtp_device *device, mtp_dtype stored, int64_t rows, int64_t count, int64_t width, int64_t gap)
{
    heads h = make_heads(device, stored, rows, count, width, gap);
    h.args.dw_write = MTP_ACCUMULATE;
    heads_results e = formulas_of_heads(&h, MTP_ACCUMULATE);
    assert_ok(ops_backend()->rmsnorm_fwd(device, &h.args));
    ops_expect_stored("y", &h.y, e.y, 2e-6);
    ops_expect("rstd", &h.rstd, e.rstd, 3e-7);
    assert_ok(ops_backend()->rmsnorm_bwd(device, &h.args));
    ops_expect_stored("dx", &h.dx, e.dx, 3e-6);
    ops_expect("dw", &h.dw, e.dw, 3e-6);
    mtp_rmsnorm_args a = h.args; /* over dy, then over x, where everything else is the same */
    a.dx = a.dy;
    a.dw.data = NULL;
    assert_ok(ops_backend()->rmsnorm_bwd(device, &a));
    ops_expect_stored("dx over dy", &h.dy, e.dx, 3e-6);
    h = make_heads(device, stored, rows, count, width, gap);
    e = formulas_of_heads(&h, MTP_OVERWRITE);
    assert_ok(ops_backend()->rmsnorm_fwd(device, &h.args));
    h.args.dx = h.args.x;
    assert_ok(ops_backend()->rmsnorm_bwd(device, &h.args));
    ops_expect_stored("dx over x", &h.x, e.dx, 3e-6);
    ops_expect("dw with dx over x", &h.dw, e.dw, 3e-6);
    h = make_heads(device, stored, rows, count, width, gap);
    h.args.y = h.args.x;
    h.args.rstd.data = NULL;
    assert_ok(ops_backend()->rmsnorm_fwd(device, &h.args));
    ops_expect_stored("y over x", &h.x, e.y, 2e-6);
    ops_release_buffers();
}

static void heads_of(mtp_device *device, mtp_dtype stored)
{
    check_heads(device, stored, 1, 1, 2, 0);
    check_heads(device, stored, 5, 3, 38, 3);
    check_heads(device, stored, 11, 4, 256, 0); /* the widths of the official drafters */
    check_heads(device, stored, 5, 2, 512, 8);
}

static void heads_in_fp32(mtp_device *device)
{
    heads_of(device, MTP_F32);
}

/* ---- post-norm, then the norm of its result ---------------------------------------------------------------------- */

typedef struct post {
    mtp_device *device;
    int64_t rows, width;
    ops_tensor residual, x, w, scalar, y, rstd, next_w, next_y, next_rstd, next_dy, next_dw, dy, dresidual, dx, dw,
        dscalar;
    mtp_residual_norm_args args;
} post;

static post make_post(mtp_device *device, mtp_dtype stored, int64_t rows, int64_t width, int64_t gap)
{
    test_rng rng = {43};
    post p = {.device = device, .rows = rows, .width = width};
    ops_tensor *const streams[] = {&p.residual, &p.y, &p.dy, &p.dresidual};
    ops_tensor *const stored_views[] = {&p.x, &p.next_y, &p.next_dy, &p.dx};
    ops_tensor *const weights[] = {&p.w, &p.next_w, &p.dw, &p.next_dw};
    for (int i = 0; i < 4; i++) *streams[i] = ops_random(&rng, MTP_F32, rows, width, i * gap, 1.0f);
    for (int i = 0; i < 4; i++) *stored_views[i] = ops_random(&rng, stored, rows, width, i * gap, 1.0f);
    for (int i = 0; i < 4; i++) *weights[i] = ops_random_vector(&rng, i == 1 ? MTP_BF16 : MTP_F32, width, 1.5f);
    p.scalar = ops_random_vector(&rng, MTP_F32, 1, 0.7f);
    p.dscalar = ops_random_vector(&rng, MTP_F32, 1, 1.0f);
    p.rstd = ops_random_vector(&rng, MTP_F32, rows, 1.0f);
    p.next_rstd = ops_random_vector(&rng, MTP_F32, rows, 1.0f);
    p.args = (mtp_residual_norm_args){.residual = p.residual.view,
                                      .x = p.x.view,
                                      .w = p.w.view,
                                      .scalar = p.scalar.view,
                                      .y = p.y.view,
                                      .rstd = p.rstd.view,
                                      .eps = eps,
                                      .next_w = p.next_w.view,
                                      .next_y = p.next_y.view,
                                      .next_rstd = p.next_rstd.view,
                                      .next_dy = p.next_dy.view,
                                      .next_dw = p.next_dw.view,
                                      .dy = p.dy.view,
                                      .dresidual = p.dresidual.view,
                                      .dx = p.dx.view,
                                      .dw = p.dw.view,
                                      .dscalar = p.dscalar.view};
    p.args.scratch = ops_scratch(ops_backend()->residual_norm_bwd_scratch(device, &p.args));
    return p;
}

typedef struct post_results {
    double *y, *rstd, *next_y, *next_rstd, *dresidual, *dx, *dw, *next_dw, *dscalar;
} post_results;

static post_results formulas_of_post(const post *p, mtp_write write)
{
    const int64_t n = p->rows * p->width, width = p->width;
    const bool add = write == MTP_ACCUMULATE;
    post_results e = {.y = ops_doubles(n),
                      .rstd = ops_doubles(p->rows),
                      .next_y = ops_doubles(n),
                      .next_rstd = ops_doubles(p->rows),
                      .dresidual = add ? as_doubles(p->dresidual.values, n) : ops_doubles(n),
                      .dx = ops_doubles(n),
                      .dw = add ? as_doubles(p->dw.values, width) : ops_doubles(width),
                      .next_dw = add ? as_doubles(p->next_dw.values, width) : ops_doubles(width),
                      .dscalar = add ? as_doubles(p->dscalar.values, 1) : ops_doubles(1)};
    const double s = p->args.scalar.data ? (double)p->scalar.values[0] : 1.0;
    const double *x = as_doubles(p->x.values, n), *next_dy = as_doubles(p->next_dy.values, n);
    const double *dy = p->args.dy.data ? as_doubles(p->dy.values, n) : ops_doubles(n);
    double *g = ops_doubles(width), *scaled = ops_doubles(width);
    for (int64_t r = 0; r < p->rows; r++) {
        const int64_t at = r * width;
        e.rstd[r] = rstd_of(x + at, width);
        for (int64_t i = 0; i < width; i++)
            e.y[at + i] = s * ((double)p->residual.values[at + i] + x[at + i] * e.rstd[r] * (double)p->w.values[i]);
        e.next_rstd[r] = rstd_of(e.y + at, width);
        for (int64_t i = 0; i < width; i++)
            e.next_y[at + i] = e.y[at + i] * e.next_rstd[r] * (double)p->next_w.values[i];
        memcpy(g, dy + at, (size_t)width * sizeof *g);
        norm_bwd(e.y + at, p->next_w.values, next_dy + at, e.next_rstd[r], width, g, e.next_dw);
        for (int64_t i = 0; i < width; i++) {
            e.dscalar[0] += g[i] * e.y[at + i] / s;
            scaled[i] = s * g[i];
            e.dresidual[at + i] += scaled[i];
        }
        norm_bwd(x + at, p->w.values, scaled, e.rstd[r], width, e.dx + at, e.dw);
    }
    return e;
}

static void expect_post(const post *p, const post_results *e)
{
    ops_expect("dresidual", &p->dresidual, e->dresidual, 3e-6);
    ops_expect_stored("dx", &p->dx, e->dx, 4e-6);
    ops_expect("dw", &p->dw, e->dw, 4e-6);
    ops_expect("next_dw", &p->next_dw, e->next_dw, 4e-6);
    ops_expect("dscalar", &p->dscalar, e->dscalar, 1e-4); /* relative to itself, and it may cancel */
}

static void check_post(mtp_device *device, mtp_dtype stored, int64_t rows, int64_t width, int64_t gap, mtp_write write)
{
    post p = make_post(device, stored, rows, width, gap);
    post_results e = formulas_of_post(&p, write);
    p.args.dresidual_write = p.args.dw_write = p.args.dscalar_write = write;
    assert_ok(ops_backend()->residual_norm_fwd(device, &p.args));
    ops_expect("y", &p.y, e.y, 1e-6);
    ops_expect("rstd", &p.rstd, e.rstd, 3e-7);
    ops_expect_stored("next_y", &p.next_y, e.next_y, 2e-6);
    ops_expect("next_rstd", &p.next_rstd, e.next_rstd, 5e-7);
    assert_ok(ops_backend()->residual_norm_bwd(device, &p.args));
    expect_post(&p, &e);
    ops_release_buffers();
    if (write == MTP_ACCUMULATE) return;
    p = make_post(device, stored, rows, width, gap); /* everything in place */
    e = formulas_of_post(&p, write);
    p.args.y = p.args.residual;
    p.args.dscalar.data = NULL; /* it needs the residual */
    assert_ok(ops_backend()->residual_norm_fwd(device, &p.args));
    ops_expect("y over residual", &p.residual, e.y, 1e-6);
    p.args.dx = p.args.x;
    p.args.dresidual = p.args.dy;
    assert_ok(ops_backend()->residual_norm_bwd(device, &p.args));
    ops_expect_stored("dx over x", &p.x, e.dx, 4e-6);
    ops_expect("dresidual over dy", &p.dy, e.dresidual, 3e-6);
    ops_expect("dw", &p.dw, e.dw, 4e-6);
    ops_release_buffers();
    p = make_post(device, stored, rows, width, gap); /* without dy and scalar, and without the branch's weight */
    p.args.dy.data = p.args.scalar.data = NULL;
    e = formulas_of_post(&p, write);
    p.args.dw.data = NULL;
    assert_ok(ops_backend()->residual_norm_fwd(device, &p.args));
    assert_ok(ops_backend()->residual_norm_bwd(device, &p.args));
    ops_expect("dresidual without dy", &p.dresidual, e.dresidual, 3e-6);
    ops_expect("next_dw alone", &p.next_dw, e.next_dw, 4e-6);
    ops_release_buffers();
}

static void posts_of(mtp_device *device, mtp_dtype stored)
{
    for (int write = MTP_OVERWRITE; write <= MTP_ACCUMULATE; write++) {
        check_post(device, stored, 1, 3, 0, (mtp_write)write);
        check_post(device, stored, 37, 45, 2, (mtp_write)write);
        check_post(device, stored, 5, 1032, 8, (mtp_write)write);
    }
}

static void posts_in_fp32(mtp_device *device)
{
    posts_of(device, MTP_F32);
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

static void formulas_on_every_isa(void **state)
{
    (void)state;
    ops_each_isa(heads_in_fp32);
    ops_each_isa(posts_in_fp32);
}

static void formulas_of_stored_views(void **state)
{
    (void)state;
    mtp_device *device = ops_open_bf16();
    heads_of(device, ops_stored(device));
    posts_of(device, ops_stored(device));
    ops_release();
}

static double heads_loss(void *context)
{
    const heads *h = context;
    assert_ok(ops_backend()->rmsnorm_fwd(h->device, &h->args));
    return ops_weighted_sum(&h->y, h->dy.values);
}

static double post_loss(void *context)
{
    const post *p = context;
    assert_ok(ops_backend()->residual_norm_fwd(p->device, &p->args));
    return ops_weighted_sum(&p->y, p->dy.values) + ops_weighted_sum(&p->next_y, p->next_dy.values);
}

static void gradients_are_differences(void **state)
{
    (void)state;
    enum { rows = 3, width = 14 };
    mtp_device *device = ops_open(NULL, 1);
    const heads h = make_heads(device, MTP_F32, rows, 2, width, 0);
    double *dx = ops_doubles(2 * rows * width), *dw = ops_doubles(width);
    ops_differences(heads_loss, (void *)(uintptr_t)&h, h.x.view.data, 2 * rows * width, dx);
    ops_differences(heads_loss, (void *)(uintptr_t)&h, h.w.view.data, width, dw);
    assert_ok(ops_backend()->rmsnorm_fwd(device, &h.args));
    assert_ok(ops_backend()->rmsnorm_bwd(device, &h.args));
    ops_expect("dx of heads", &h.dx, dx, 3e-4);
    ops_expect("dw of heads", &h.dw, dw, 3e-4);
    const post p = make_post(device, MTP_F32, rows, width, 0);
    double *dresidual = ops_doubles(rows * width), *dscalar = ops_doubles(1);
    *(float *)p.scalar.view.data = 0.9f; /* a step is small against it */
    ops_differences(post_loss, (void *)(uintptr_t)&p, p.residual.view.data, rows * width, dresidual);
    ops_differences(post_loss, (void *)(uintptr_t)&p, p.x.view.data, rows * width, dx);
    ops_differences(post_loss, (void *)(uintptr_t)&p, p.w.view.data, width, dw);
    ops_differences(post_loss, (void *)(uintptr_t)&p, p.scalar.view.data, 1, dscalar);
    assert_ok(ops_backend()->residual_norm_fwd(device, &p.args));
    assert_ok(ops_backend()->residual_norm_bwd(device, &p.args));
    ops_expect("dresidual", &p.dresidual, dresidual, 4e-4);
    ops_expect("dx", &p.dx, dx, 4e-4);
    ops_expect("dw", &p.dw, dw, 4e-4);
    ops_expect("dscalar", &p.dscalar, dscalar, 4e-4);
    ops_release();
}

static uint64_t hash_of_all(mtp_device *device)
{
    const heads h = make_heads(device, MTP_F32, 45, 3, 34, 0);
    assert_ok(ops_backend()->rmsnorm_fwd(device, &h.args));
    assert_ok(ops_backend()->rmsnorm_bwd(device, &h.args));
    const uint64_t hash = ops_hash(&h.dw, ops_hash(&h.dx, ops_hash(&h.y, 0)));
    const post p = make_post(device, MTP_F32, 130, 70, 0);
    assert_ok(ops_backend()->residual_norm_fwd(device, &p.args));
    assert_ok(ops_backend()->residual_norm_bwd(device, &p.args));
    return ops_hash(&p.next_dw, ops_hash(&p.dw, ops_hash(&p.dx, ops_hash(&p.next_y, hash))));
}

static void threads_do_not_change_bits(void **state)
{
    (void)state;
    ops_same_bits(hash_of_all);
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    const heads h = make_heads(device, MTP_F32, 3, 2, 8, 0);
    mtp_rmsnorm_args a = h.args;
    a.cos.shape[0] = a.sin.shape[0] = 4;
    assert_fails(ops_backend()->rmsnorm_fwd(device, &a), MTP_E_ARGUMENT, "x has 6 rows, cos 4");
    a = h.args;
    a.dx_write = MTP_ACCUMULATE;
    assert_fails(ops_backend()->rmsnorm_bwd(device, &a), MTP_E_ARGUMENT, "with cos dx is overwritten");
    a = h.args;
    a.sin.data = NULL;
    assert_fails(ops_backend()->rmsnorm_bwd(device, &a), MTP_E_ARGUMENT, "sin is missing");
    const post p = make_post(device, MTP_F32, 3, 8, 0);
    mtp_residual_norm_args b = p.args;
    b.next_y.data = NULL;
    assert_fails(ops_backend()->residual_norm_fwd(device, &b), MTP_E_ARGUMENT, "next_y is missing");
    b = p.args;
    b.y.data = NULL;
    assert_fails(ops_backend()->residual_norm_bwd(device, &b), MTP_E_ARGUMENT, "residual_norm_bwd: y is missing");
    b = p.args;
    b.next_w.data = b.dy.data = NULL;
    assert_fails(ops_backend()->residual_norm_bwd(device, &b), MTP_E_ARGUMENT, "dy is missing");
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(formulas_on_every_isa),     cmocka_unit_test(formulas_of_stored_views),
        cmocka_unit_test(gradients_are_differences), cmocka_unit_test(threads_do_not_change_bits),
        cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
