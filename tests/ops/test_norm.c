/* Protects: RMSNorm and the residual post-norm with their gradients, against the formula in double and central
 * differences, for every dtype, of inputs and of stored views, without a weight, in place, accumulating; weight
 * gradients with the same bits for any threads. */
#include "ops_check.h"

static const float eps = 1e-3f; /* large enough to show when it is left out */

/* ---- RMSNorm ----------------------------------------------------------------------------------------------------- */

typedef struct norm {
    mtp_device *device;
    ops_tensor x, w, y, rstd, dy, dx, dw;
    mtp_rmsnorm_args args;
} norm;

/* `stored`: of y, dy and, where x has it too, dx. */
static norm make_norm(mtp_device *device, mtp_dtype dtype, mtp_dtype stored, int64_t rows, int64_t width, int64_t gap,
                      bool weight)
{
    test_rng rng = {51};
    norm n = {.device = device};
    n.x = ops_random(&rng, dtype, rows, width, gap, 2.0f);
    n.w = ops_random_vector(&rng, dtype, width, 1.5f);
    n.y = ops_random(&rng, stored, rows, width, 2 * gap, 1.0f);
    n.rstd = ops_random_vector(&rng, MTP_F32, rows, 1.0f);
    n.dy = ops_random(&rng, stored, rows, width, gap, 1.0f);
    n.dx = ops_random(&rng, dtype == stored ? stored : MTP_F32, rows, width, gap, 1.0f);
    n.dw = ops_random_vector(&rng, MTP_F32, width, 1.0f);
    n.args = (mtp_rmsnorm_args){.x = n.x.view,
                                .w = n.w.view,
                                .y = n.y.view,
                                .rstd = n.rstd.view,
                                .eps = eps,
                                .dy = n.dy.view,
                                .dx = n.dx.view,
                                .dw = n.dw.view};
    if (!weight) n.args.w.data = NULL;
    n.args.scratch = ops_scratch(ops_backend()->rmsnorm_bwd_scratch(device, &n.args));
    return n;
}

static double rstd_of(const float *x, int64_t width)
{
    double squares = 0;
    for (int64_t i = 0; i < width; i++) squares += (double)x[i] * (double)x[i];
    return 1.0 / sqrt(squares / (double)width + (double)eps);
}

typedef struct results {
    double *y, *rstd, *dx, *dw;
} results;

/* The formulas of ops.h; dx and dw are added to what was there when `write` says so. */
static results norm_results(const norm *n, mtp_write write)
{
    const int64_t rows = n->x.view.shape[0], width = n->x.view.shape[1];
    results e = {ops_doubles(rows * width), ops_doubles(rows), ops_doubles(rows * width), ops_doubles(width)};
    for (int64_t i = 0; write == MTP_ACCUMULATE && i < width; i++) e.dw[i] = (double)n->dw.values[i];
    for (int64_t r = 0; r < rows; r++) {
        const float *x = n->x.values + r * width, *dy = n->dy.values + r * width;
        const double rstd = e.rstd[r] = rstd_of(x, width);
        double sum = 0;
        for (int64_t i = 0; i < width; i++)
            sum += (double)x[i] * (n->args.w.data ? (double)n->w.values[i] : 1.0) * (double)dy[i];
        for (int64_t i = 0; i < width; i++) {
            const double w = n->args.w.data ? (double)n->w.values[i] : 1.0;
            const double before = write == MTP_ACCUMULATE ? (double)n->dx.values[r * width + i] : 0.0;
            e.y[r * width + i] = (double)x[i] * rstd * w;
            e.dx[r * width + i] =
                before + rstd * w * (double)dy[i] - (double)x[i] * rstd * rstd * rstd / (double)width * sum;
            e.dw[i] += (double)x[i] * rstd * (double)dy[i];
        }
    }
    return e;
}

static void check_norm(mtp_device *device, mtp_dtype dtype, mtp_dtype stored, int64_t rows, int64_t width, int64_t gap,
                       bool weight, mtp_write write)
{
    norm n = make_norm(device, dtype, stored, rows, width, gap, weight);
    const results e = norm_results(&n, write);
    n.args.dx_write = n.args.dw_write = write;
    assert_ok(ops_backend()->rmsnorm_fwd(device, &n.args));
    ops_expect_stored("y", &n.y, e.y, 1e-6);
    ops_expect("rstd", &n.rstd, e.rstd, 2e-7);
    assert_ok(ops_backend()->rmsnorm_bwd(device, &n.args));
    ops_expect_stored("dx", &n.dx, e.dx, 2e-6);
    ops_expect("dw", &n.dw, e.dw, 2e-6);
    if (write == MTP_ACCUMULATE) return;
    n.args.dx = n.args.dy; /* in place, without dw */
    n.args.dw.data = NULL;
    assert_ok(ops_backend()->rmsnorm_bwd(device, &n.args));
    ops_expect_stored("dx over dy", &n.dy, e.dx, 2e-6);
    if (dtype != stored) return;
    n = make_norm(device, dtype, stored, rows, width, gap, weight); /* the same values again */
    n.args.y = n.args.x;
    assert_ok(ops_backend()->rmsnorm_fwd(device, &n.args));
    ops_expect_stored("y over x", &n.x, e.y, 1e-6);
    n = make_norm(device, dtype, stored, rows, width, gap, weight);
    n.args.rstd.data = NULL;
    assert_ok(ops_backend()->rmsnorm_fwd(device, &n.args));
    ops_expect_stored("y without rstd", &n.y, e.y, 1e-6);
    n.args.rstd = n.rstd.view;
    assert_ok(ops_backend()->rmsnorm_fwd(device, &n.args));
    n.args.dx = n.args.x;
    assert_ok(ops_backend()->rmsnorm_bwd(device, &n.args));
    ops_expect_stored("dx over x", &n.x, e.dx, 2e-6);
    ops_expect("dw with dx over x", &n.dw, e.dw, 2e-6);
}

static void norms(mtp_device *device)
{
    static const mtp_dtype dtypes[] = {MTP_F32, MTP_BF16, MTP_F16};
    for (int d = 0; d < 3; d++)
        for (int write = MTP_OVERWRITE; write <= MTP_ACCUMULATE; write++) {
            check_norm(device, dtypes[d], MTP_F32, 1, 5, 0, true, (mtp_write)write);
            check_norm(device, dtypes[d], MTP_F32, 3, 37, 4, true, (mtp_write)write);
            check_norm(device, dtypes[d], MTP_F32, 131, 70, 0, true, (mtp_write)write);
            check_norm(device, dtypes[d], MTP_F32, 5, 2100, 1, true, (mtp_write)write);
            check_norm(device, dtypes[d], MTP_F32, 66, 32, 0, false, (mtp_write)write);
        }
}

static void norms_of_stored_views(void **state)
{
    (void)state;
    static const mtp_dtype dtypes[] = {MTP_F32, MTP_BF16, MTP_F16};
    mtp_device *device = ops_open_bf16();
    const mtp_dtype stored = ops_stored(device);
    for (int d = 0; d < 3; d++) {
        check_norm(device, dtypes[d], stored, 3, 37, 4, true, MTP_OVERWRITE);
        check_norm(device, dtypes[d], stored, 66, 1032, 8, true, MTP_OVERWRITE);
        check_norm(device, dtypes[d], stored, 35, 64, 0, false, MTP_OVERWRITE);
        ops_release_buffers();
    }
    if (stored != MTP_F32) check_norm(device, MTP_F32, stored, 35, 64, 0, true, MTP_ACCUMULATE);
    ops_release();
}

static void norms_on_every_isa(void **state)
{
    (void)state;
    ops_each_isa(norms);
}

static double norm_loss(void *context)
{
    const norm *n = context;
    assert_ok(ops_backend()->rmsnorm_fwd(n->device, &n->args));
    return ops_weighted_sum(&n->y, n->dy.values);
}

static void norm_gradients_are_differences(void **state)
{
    (void)state;
    enum { rows = 3, width = 21 };
    norm n = make_norm(ops_open(NULL, 1), MTP_F32, MTP_F32, rows, width, 0, true);
    double *dx = ops_doubles(rows * width), *dw = ops_doubles(width);
    ops_differences(norm_loss, &n, n.x.view.data, rows * width, dx);
    ops_differences(norm_loss, &n, n.w.view.data, width, dw);
    assert_ok(ops_backend()->rmsnorm_fwd(n.device, &n.args));
    assert_ok(ops_backend()->rmsnorm_bwd(n.device, &n.args));
    ops_expect("dx", &n.dx, dx, 3e-4);
    ops_expect("dw", &n.dw, dw, 3e-4);
    ops_release();
}

/* ---- y = scalar (residual + RMSNorm(x)) -------------------------------------------------------------------------- */

typedef struct post {
    mtp_device *device;
    ops_tensor residual, x, w, scalar, y, rstd, dy, dresidual, dx, dw, dscalar;
    mtp_residual_norm_args args;
} post;

/* `dtype`: of w; `stored`: of x and dx. */
static post make_post(mtp_device *device, mtp_dtype dtype, mtp_dtype stored, int64_t rows, int64_t width, int64_t gap,
                      bool scalar)
{
    test_rng rng = {61};
    post p = {.device = device};
    ops_tensor *const matrices[] = {&p.residual, &p.x, &p.y, &p.dy, &p.dresidual, &p.dx};
    for (int i = 0; i < 6; i++)
        *matrices[i] = ops_random(&rng, i == 1 || i == 5 ? stored : MTP_F32, rows, width, i * gap, 2.0f);
    p.w = ops_random_vector(&rng, dtype, width, 1.5f);
    p.scalar = ops_random_vector(&rng, MTP_F32, 1, 0.7f);
    p.rstd = ops_random_vector(&rng, MTP_F32, rows, 1.0f);
    p.dw = ops_random_vector(&rng, MTP_F32, width, 1.0f);
    p.dscalar = ops_random_vector(&rng, MTP_F32, 1, 1.0f);
    p.args = (mtp_residual_norm_args){.residual = p.residual.view,
                                      .x = p.x.view,
                                      .w = p.w.view,
                                      .scalar = p.scalar.view,
                                      .y = p.y.view,
                                      .rstd = p.rstd.view,
                                      .eps = eps,
                                      .dy = p.dy.view,
                                      .dresidual = p.dresidual.view,
                                      .dx = p.dx.view,
                                      .dw = p.dw.view,
                                      .dscalar = p.dscalar.view};
    if (!scalar) p.args.scalar.data = NULL;
    p.args.scratch = ops_scratch(ops_backend()->residual_norm_bwd_scratch(device, &p.args));
    return p;
}

typedef struct post_results {
    double *y, *dresidual, *dx, *dw, *dscalar;
} post_results;

static post_results formulas_of_post(const post *p, mtp_write write)
{
    const int64_t rows = p->x.view.shape[0], width = p->x.view.shape[1];
    post_results e = {ops_doubles(rows * width), ops_doubles(rows * width), ops_doubles(rows * width),
                      ops_doubles(width), ops_doubles(1)};
    const double s = p->args.scalar.data ? (double)p->scalar.values[0] : 1.0;
    const double keep = write == MTP_ACCUMULATE ? 1.0 : 0.0;
    e.dscalar[0] = keep * (double)p->dscalar.values[0];
    for (int64_t i = 0; i < width; i++) e.dw[i] = keep * (double)p->dw.values[i];
    for (int64_t r = 0; r < rows; r++) {
        const float *x = p->x.values + r * width, *dy = p->dy.values + r * width;
        const double rstd = rstd_of(x, width);
        double sum = 0;
        for (int64_t i = 0; i < width; i++) sum += (double)x[i] * (double)p->w.values[i] * (double)dy[i];
        for (int64_t i = 0; i < width; i++) {
            const int64_t k = r * width + i;
            const double w = (double)p->w.values[i], d = (double)dy[i],
                         inner = (double)p->residual.values[k] + (double)x[i] * rstd * w;
            e.y[k] = s * inner;
            e.dresidual[k] = keep * (double)p->dresidual.values[k] + s * d;
            e.dx[k] = s * (rstd * w * d - (double)x[i] * rstd * rstd * rstd / (double)width * sum);
            e.dw[i] += s * (double)x[i] * rstd * d;
            e.dscalar[0] += d * inner;
        }
    }
    return e;
}

static void check_post(mtp_device *device, mtp_dtype dtype, mtp_dtype stored, int64_t rows, int64_t width, int64_t gap,
                       bool scalar, mtp_write write)
{
    post p = make_post(device, dtype, stored, rows, width, gap, scalar);
    const post_results e = formulas_of_post(&p, write);
    p.args.dresidual_write = p.args.dw_write = p.args.dscalar_write = write;
    assert_ok(ops_backend()->residual_norm_fwd(device, &p.args));
    ops_expect("y", &p.y, e.y, 1e-6);
    assert_ok(ops_backend()->residual_norm_bwd(device, &p.args));
    ops_expect("dresidual", &p.dresidual, e.dresidual, 1e-6);
    ops_expect_stored("dx", &p.dx, e.dx, 2e-6);
    ops_expect("dw", &p.dw, e.dw, 2e-6);
    ops_expect("dscalar", &p.dscalar, e.dscalar, 1e-4); /* relative to itself, and it may cancel */
    if (write == MTP_ACCUMULATE) return;
    p.args.dresidual = p.args.dy; /* in place */
    p.args.dw.data = p.args.dscalar.data = NULL;
    assert_ok(ops_backend()->residual_norm_bwd(device, &p.args));
    ops_expect("dresidual over dy", &p.dy, e.dresidual, 1e-6);
    p.args.y = p.args.residual;
    assert_ok(ops_backend()->residual_norm_fwd(device, &p.args));
    ops_expect("y over residual", &p.residual, e.y, 1e-6);
    p = make_post(device, dtype, stored, rows, width, gap, scalar); /* the same values again */
    assert_ok(ops_backend()->residual_norm_fwd(device, &p.args));
    p.args.dx = p.args.x;
    p.args.dresidual = p.args.dy;
    assert_ok(ops_backend()->residual_norm_bwd(device, &p.args));
    ops_expect_stored("dx over x", &p.x, e.dx, 2e-6);
    ops_expect("dresidual over dy", &p.dy, e.dresidual, 1e-6);
    ops_expect("dw with dx over x", &p.dw, e.dw, 2e-6);
    ops_expect("dscalar with dx over x", &p.dscalar, e.dscalar, 1e-4);
}

static void posts(mtp_device *device)
{
    static const mtp_dtype dtypes[] = {MTP_F32, MTP_BF16, MTP_F16};
    for (int d = 0; d < 3; d++)
        for (int write = MTP_OVERWRITE; write <= MTP_ACCUMULATE; write++) {
            check_post(device, dtypes[d], MTP_F32, 1, 3, 0, true, (mtp_write)write);
            check_post(device, dtypes[d], MTP_F32, 130, 45, 2, true, (mtp_write)write);
            check_post(device, dtypes[d], MTP_F32, 4, 1030, 0, false, (mtp_write)write);
        }
}

static void posts_of_stored_views(void **state)
{
    (void)state;
    mtp_device *device = ops_open_bf16();
    for (int write = MTP_OVERWRITE; write <= MTP_ACCUMULATE; write++) {
        check_post(device, MTP_BF16, ops_stored(device), 33, 45, 2, true, (mtp_write)write);
        check_post(device, MTP_F32, ops_stored(device), 4, 1032, 8, false, (mtp_write)write);
    }
    ops_release();
}

static void posts_on_every_isa(void **state)
{
    (void)state;
    ops_each_isa(posts);
}

static double post_loss(void *context)
{
    const post *p = context;
    assert_ok(ops_backend()->residual_norm_fwd(p->device, &p->args));
    return ops_weighted_sum(&p->y, p->dy.values);
}

static void post_gradients_are_differences(void **state)
{
    (void)state;
    enum { rows = 3, width = 21 };
    post p = make_post(ops_open(NULL, 1), MTP_F32, MTP_F32, rows, width, 0, true);
    double *dx = ops_doubles(rows * width), *dw = ops_doubles(width), *ds = ops_doubles(1),
           *dr = ops_doubles(rows * width);
    ops_differences(post_loss, &p, p.x.view.data, rows * width, dx);
    ops_differences(post_loss, &p, p.residual.view.data, rows * width, dr);
    ops_differences(post_loss, &p, p.w.view.data, width, dw);
    ops_differences(post_loss, &p, p.scalar.view.data, 1, ds);
    assert_ok(ops_backend()->residual_norm_fwd(p.device, &p.args));
    assert_ok(ops_backend()->residual_norm_bwd(p.device, &p.args));
    ops_expect("dx", &p.dx, dx, 3e-4);
    ops_expect("dresidual", &p.dresidual, dr, 3e-4);
    ops_expect("dw", &p.dw, dw, 3e-4);
    ops_expect("dscalar", &p.dscalar, ds, 3e-4);
    ops_release();
}

/* ---- bits and arguments ------------------------------------------------------------------------------------------ */

static uint64_t hash_of_all(mtp_device *device)
{
    const norm n = make_norm(device, MTP_BF16, MTP_F32, 1000, 48, 0, true);
    assert_ok(ops_backend()->rmsnorm_fwd(device, &n.args));
    assert_ok(ops_backend()->rmsnorm_bwd(device, &n.args));
    const uint64_t hash = ops_hash(&n.dw, ops_hash(&n.dx, ops_hash(&n.y, 0)));
    const post p = make_post(device, MTP_F32, MTP_F32, 777, 130, 0, true);
    assert_ok(ops_backend()->residual_norm_fwd(device, &p.args));
    assert_ok(ops_backend()->residual_norm_bwd(device, &p.args));
    return ops_hash(&p.dscalar, ops_hash(&p.dw, ops_hash(&p.dx, ops_hash(&p.y, hash))));
}

static void threads_do_not_change_bits(void **state)
{
    (void)state;
    ops_same_bits(hash_of_all);
}

static void rows_are_independent(void **state)
{
    (void)state;
    enum { rows = 70, width = 45 };
    mtp_device *device = ops_open(NULL, 2);
    const norm n = make_norm(device, MTP_BF16, MTP_F32, rows, width, 0, true);
    assert_ok(ops_backend()->rmsnorm_fwd(device, &n.args));
    assert_ok(ops_backend()->rmsnorm_bwd(device, &n.args));
    test_rng rng = {1};
    const ops_tensor y = ops_random(&rng, MTP_F32, 1, width, 0, 1.0f),
                     dx = ops_random(&rng, MTP_F32, 1, width, 0, 1.0f);
    for (int r = 0; r < rows; r++) {
        mtp_rmsnorm_args a = n.args;
        a.x = mtp_view_rows(a.x, r, 1);
        a.dy = mtp_view_rows(a.dy, r, 1);
        a.rstd = mtp_view_rows(a.rstd, r, 1);
        a.y = y.view;
        a.dx = dx.view;
        assert_ok(ops_backend()->rmsnorm_fwd(device, &a));
        assert_ok(ops_backend()->rmsnorm_bwd(device, &a));
        assert_memory_equal(ops_row(&y, 0), ops_row(&n.y, r), width * sizeof(float));
        assert_memory_equal(ops_row(&dx, 0), ops_row(&n.dx, r), width * sizeof(float));
    }
    ops_release();
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    const norm n = make_norm(device, MTP_F32, MTP_F32, 4, 6, 0, true);
    mtp_rmsnorm_args a = n.args;
    a.w.shape[0] = 5;
    assert_fails(ops_backend()->rmsnorm_fwd(device, &a), MTP_E_ARGUMENT, "rmsnorm_fwd: w");
    a = n.args;
    a.rstd.data = NULL;
    assert_fails(ops_backend()->rmsnorm_bwd(device, &a), MTP_E_ARGUMENT, "rmsnorm_bwd: rstd is missing");
    a = n.args;
    a.dx = a.dy;
    a.dx_write = MTP_ACCUMULATE;
    assert_fails(ops_backend()->rmsnorm_bwd(device, &a), MTP_E_ARGUMENT, "dx may be dy only when it is overwritten");
    a.dx = a.x;
    assert_fails(ops_backend()->rmsnorm_bwd(device, &a), MTP_E_ARGUMENT, "dx may be x only when it is overwritten");
    a = n.args;
    a.scratch.size = 8;
    assert_fails(ops_backend()->rmsnorm_bwd(device, &a), MTP_E_ARGUMENT, "scratch has 8 bytes");
    const post p = make_post(device, MTP_F32, MTP_F32, 4, 6, 0, true);
    mtp_residual_norm_args b = p.args;
    b.scalar.dtype = MTP_BF16;
    assert_fails(ops_backend()->residual_norm_fwd(device, &b), MTP_E_ARGUMENT, "residual_norm_fwd: scalar");
    b = p.args;
    b.residual.data = NULL;
    assert_fails(ops_backend()->residual_norm_bwd(device, &b), MTP_E_ARGUMENT,
                 "residual_norm_bwd: residual is missing");
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norms_on_every_isa),
        cmocka_unit_test(norms_of_stored_views),
        cmocka_unit_test(norm_gradients_are_differences),
        cmocka_unit_test(posts_on_every_isa),
        cmocka_unit_test(posts_of_stored_views),
        cmocka_unit_test(post_gradients_are_differences),
        cmocka_unit_test(threads_do_not_change_bits),
        cmocka_unit_test(rows_are_independent),
        cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
