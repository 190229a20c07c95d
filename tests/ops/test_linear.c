/* Protects: linear layers are the products they claim to be, for every dtype, stride and odd size, in fp32 and as a
 * device stores; each row of y and dx has the same bits alone, at every place and with any number of threads; bad
 * arguments are refused by name. */
#include "ops_check.h"

typedef mtp_status (*linear_op)(mtp_device *device, const mtp_linear_args *a);
typedef size_t (*linear_scratch)(const mtp_device *device, const mtp_linear_args *a);

typedef enum which { FWD, DX, DW } which;

static mtp_status run(mtp_device *device, which op, mtp_linear_args *a)
{
    const linear_op ops[] = {ops_backend()->linear_fwd, ops_backend()->linear_dx, ops_backend()->linear_dw};
    const linear_scratch sizes[] = {ops_backend()->linear_fwd_scratch, ops_backend()->linear_dx_scratch,
                                    ops_backend()->linear_dw_scratch};
    a->scratch = ops_scratch(sizes[op](device, a));
    return ops[op](device, a);
}

typedef struct shape {
    int64_t rows, in, out;
} shape;

/* The product in double precision, from the values of the three tensors before the op. */
static double *expected(which op, const ops_tensor *x, const ops_tensor *w, const ops_tensor *y, mtp_write write)
{
    const int64_t rows = x->view.shape[0], in = x->view.shape[1], out = w->view.shape[0];
    const ops_tensor *to = op == FWD ? y : op == DX ? x : w;
    const int64_t to_rows = to->view.shape[0], to_cols = to->view.shape[1];
    double *want = ops_doubles(to_rows * to_cols);
    if (write == MTP_ACCUMULATE)
        for (int64_t i = 0; i < to_rows * to_cols; i++) want[i] = (double)to->values[i];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t n = 0; n < out; n++)
            for (int64_t m = 0; m < in; m++) {
                const double vx = (double)x->values[r * in + m], vw = (double)w->values[n * in + m];
                const double vy = (double)y->values[r * out + n];
                if (op == FWD) want[r * out + n] += vx * vw;
                if (op == DX) want[r * in + m] += vy * vw;
                if (op == DW) want[n * in + m] += vy * vx;
            }
    return want;
}

static void check(mtp_device *device, which op, shape s, mtp_dtype dtype, int64_t gap, mtp_write write)
{
    static const char *const names[] = {"y", "dx", "dw"};
    test_rng rng = {7};
    const ops_tensor x = ops_random(&rng, op == DX ? MTP_F32 : dtype, s.rows, s.in, gap, 1.0f);
    const ops_tensor w = ops_random(&rng, op == DW ? MTP_F32 : dtype, s.out, s.in, 2 * gap, 1.0f);
    const ops_tensor y = ops_random(&rng, MTP_F32, s.rows, s.out, gap, 1.0f);
    mtp_linear_args a = {.x = x.view, .w = w.view, .y = y.view, .write = write};
    assert_ok(run(device, op, &a));
    ops_expect(names[op], op == FWD ? &y : op == DX ? &x : &w, expected(op, &x, &w, &y, write), 3e-6);
}

static void products_are_right(mtp_device *device)
{
    static const shape shapes[] = {{1, 5, 3},     {1, 256, 130},   {63, 48, 17},  {64, 64, 64},
                                   {65, 300, 70}, {130, 200, 192}, {257, 130, 33}};
    static const mtp_dtype dtypes[] = {MTP_F32, MTP_BF16, MTP_F16};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int op = FWD; op <= DW; op++)
            for (int d = 0; d < 3; d++) {
                check(device, (which)op, shapes[i], dtypes[d], 0, MTP_OVERWRITE);
                check(device, (which)op, shapes[i], dtypes[d], 5, MTP_ACCUMULATE);
                ops_release_buffers();
            }
}

static void products_are_right_on_every_isa(void **state)
{
    (void)state;
    ops_each_isa(products_are_right);
}

/* Tiles of several sizes, more rows than a converted chunk, several column blocks. */
static void large_products_are_right(void **state)
{
    (void)state;
    static const shape shapes[] = {{700, 320, 128}, {530, 128, 256}};
    mtp_device *device = ops_open(NULL, 3);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int op = FWD; op <= DW; op++) {
            check(device, (which)op, shapes[i], MTP_F32, 0, MTP_ACCUMULATE);
            check(device, (which)op, shapes[i], MTP_BF16, 3, MTP_OVERWRITE);
        }
    ops_release();
}

/* Factors as the device stores them, the result stored or F32. Where they are BF16 the sums are the only rounding
 * before that of the result. */
static void check_stored(mtp_device *device, which op, shape s, int64_t gap, mtp_dtype factors, mtp_dtype result,
                         mtp_write write)
{
    static const char *const names[] = {"y", "dx", "dw"};
    test_rng rng = {8};
    const ops_tensor x = ops_random(&rng, op == DX ? result : factors, s.rows, s.in, gap, 1.0f);
    const ops_tensor w = ops_random(&rng, op == DW ? MTP_F32 : factors, s.out, s.in, 2 * gap, 1.0f);
    const ops_tensor y = ops_random(&rng, op == FWD ? result : factors, s.rows, s.out, gap, 1.0f);
    mtp_linear_args a = {.x = x.view, .w = w.view, .y = y.view, .write = write};
    const double *want = expected(op, &x, &w, &y, write);
    assert_ok(run(device, op, &a));
    ops_expect_stored(names[op], op == FWD ? &y : op == DX ? &x : &w, want, 3e-6);
}

static void products_of_stored_views(void **state)
{
    (void)state;
    static const shape shapes[] = {{1, 5, 3}, {63, 48, 17}, {65, 304, 72}, {130, 200, 192}};
    mtp_device *device = ops_open_bf16();
    const mtp_dtype stored = ops_stored(device);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int op = FWD; op <= DW; op++) {
            check_stored(device, (which)op, shapes[i], 0, stored, stored, MTP_OVERWRITE);
            check_stored(device, (which)op, shapes[i], 3, stored, op == DW ? MTP_F32 : stored, MTP_OVERWRITE);
            check_stored(device, (which)op, shapes[i], 8, stored, MTP_F32, MTP_ACCUMULATE);
            check_stored(device, (which)op, shapes[i], 1, stored, op == DW ? MTP_F32 : stored, MTP_ACCUMULATE);
            ops_release_buffers();
        }
    ops_release();
}

/* What a dry run asks for: nothing to convert when factors are as the products take them. */
static void stored_factors_are_not_converted(void **state)
{
    (void)state;
    mtp_device *device = ops_open_bf16();
    const mtp_dtype stored = ops_stored(device);
    if (stored == MTP_F32) {
        ops_release();
        skip();
    }
    mtp_linear_args large = {.x = mtp_view_2d(NULL, stored, 4096, 1024), .w = mtp_view_2d(NULL, stored, 2048, 1024)},
                    small = {.x = mtp_view_2d(NULL, stored, 1, 8), .w = mtp_view_2d(NULL, stored, 8, 8)};
    large.y = mtp_view_2d(NULL, stored, 4096, 2048);
    small.y = mtp_view_2d(NULL, stored, 1, 8);
    const mtp_backend *ops = ops_backend();
    assert_true(ops->linear_fwd_scratch(device, &large) == ops->linear_fwd_scratch(device, &small));
    assert_true(ops->linear_dx_scratch(device, &large) == ops->linear_dx_scratch(device, &small));
    assert_true(ops->linear_dw_scratch(device, &large) == ops->linear_dw_scratch(device, &small));
    large.x.dtype = MTP_F32;
    assert_true(ops->linear_fwd_scratch(device, &large) == ops->linear_fwd_scratch(device, &small) + 2 * 4096 * 1024);
    test_rng rng = {9};
    const ops_tensor x = ops_random(&rng, stored, 4, 6, 0, 1.0f), w = ops_random(&rng, stored, 5, 6, 0, 1.0f);
    const ops_tensor y = ops_random(&rng, MTP_F16, 4, 5, 0, 1.0f);
    mtp_linear_args a = {.x = x.view, .w = w.view, .y = y.view};
    assert_fails(run(device, FWD, &a), MTP_E_ARGUMENT, "linear_fwd: y is F16 [4, 5]; it must be F32 [4, 5]");
    ops_release();
}

static void a_column_block_of_w_is_its_own_matrix(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 2);
    test_rng rng = {3};
    enum { rows = 70, in = 40, out = 24 };
    const ops_tensor x = ops_random(&rng, MTP_F32, rows, in, 0, 1.0f);
    const ops_tensor wide = ops_random(&rng, MTP_F32, out, 2 * in, 0, 1.0f);
    const ops_tensor y = ops_random(&rng, MTP_F32, rows, out, 0, 1.0f);
    double *want = ops_doubles(rows * out);
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < out; n++)
            for (int m = 0; m < in; m++)
                want[r * out + n] += (double)x.values[r * in + m] * (double)wide.values[n * 2 * in + in + m];
    mtp_linear_args a = {.x = x.view, .w = mtp_view_cols(wide.view, in, in), .y = y.view, .write = MTP_OVERWRITE};
    assert_ok(run(device, FWD, &a));
    ops_expect("y", &y, want, 3e-6);
    ops_release();
}

static uint64_t hash_of_all(mtp_device *device)
{
    static const shape shapes[] = {{300, 128, 256}, {200, 256, 512}, {900, 64, 40}, {513, 320, 256}};
    static const mtp_dtype dtypes[] = {MTP_F32, MTP_BF16};
    uint64_t hash = 0;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int op = FWD; op <= DW; op++)
            for (int d = 0; d < 2; d++) {
                test_rng rng = {11};
                const shape s = shapes[i];
                const ops_tensor x = ops_random(&rng, op == DX ? MTP_F32 : dtypes[d], s.rows, s.in, 0, 1.0f);
                const ops_tensor w = ops_random(&rng, op == DW ? MTP_F32 : dtypes[d], s.out, s.in, 0, 1.0f);
                const ops_tensor y = ops_random(&rng, MTP_F32, s.rows, s.out, 0, 1.0f);
                mtp_linear_args a = {.x = x.view, .w = w.view, .y = y.view, .write = MTP_ACCUMULATE};
                assert_ok(run(device, (which)op, &a));
                hash = ops_hash(op == FWD ? &y : op == DX ? &x : &w, hash);
                ops_release_buffers();
            }
    return hash;
}

static void threads_do_not_change_bits(void **state)
{
    (void)state;
    ops_same_bits(hash_of_all);
}

/* y (or dx) of the rows [first, first + count) of x (or dy), computed with nothing else. */
static const float *rows_alone(mtp_device *device, which op, const ops_tensor *from, const ops_tensor *w, int64_t first,
                               int64_t count)
{
    const int64_t width = op == FWD ? w->view.shape[0] : w->view.shape[1];
    float *to = ops_bytes((size_t)(count * width) * sizeof(float));
    const mtp_view rows = mtp_view_rows(from->view, first, count), result = mtp_view_2d(to, MTP_F32, count, width);
    mtp_linear_args a = {.x = op == FWD ? rows : result, .w = w->view, .y = op == FWD ? result : rows};
    assert_ok(run(device, op, &a));
    return to;
}

/* All rows at once, each row alone, and groups of several sizes at several places: the same bits. */
static void check_independence(mtp_device *device, which op, shape s, mtp_dtype dtype)
{
    test_rng rng = {5};
    const ops_tensor from = ops_random(&rng, op == FWD ? dtype : MTP_F32, s.rows, op == FWD ? s.in : s.out, 3, 1.0f);
    const ops_tensor w = ops_random(&rng, dtype, s.out, s.in, 0, 1.0f);
    const int64_t width = op == FWD ? s.out : s.in;
    const float *all = rows_alone(device, op, &from, &w, 0, s.rows);
    static const int64_t counts[] = {1, 7, 64, 65, 128, 200, 257, 300};
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++)
        for (int64_t first = 0; first + counts[k] <= s.rows; first += counts[k] < 64 ? 37 : 101) {
            const float *part = rows_alone(device, op, &from, &w, first, counts[k]);
            if (memcmp(part, all + first * width, (size_t)(counts[k] * width) * sizeof(float)) != 0)
                fail_msg("op %d, %dx%d: %d rows from row %d have other bits than among all", (int)op, (int)s.in,
                         (int)s.out, (int)counts[k], (int)first);
        }
    ops_release_buffers();
}

static void rows_are_independent(void **state)
{
    (void)state;
    static const shape shapes[] = {{900, 256, 128}, {400, 70, 33}, {330, 16, 24}, {420, 500, 130}, {320, 64, 900}};
    mtp_device *device = ops_open(NULL, 2);
    if (!ops_backend()->device_info(device)->rows_exact) {
        print_message("this BLAS does not keep the bits of a row: %s\n", ops_backend()->device_info(device)->rows_note);
        ops_release();
        skip();
    }
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int op = FWD; op <= DX; op++) {
            check_independence(device, (which)op, shapes[i], MTP_F32);
            check_independence(device, (which)op, shapes[i], MTP_BF16);
        }
    ops_release();
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    test_rng rng = {1};
    const ops_tensor x = ops_random(&rng, MTP_F32, 4, 6, 0, 1.0f), w = ops_random(&rng, MTP_F32, 5, 6, 0, 1.0f);
    const ops_tensor y = ops_random(&rng, MTP_F32, 4, 5, 0, 1.0f), half = ops_random(&rng, MTP_BF16, 4, 5, 0, 1.0f);
    const mtp_linear_args good = {.x = x.view, .w = w.view, .y = y.view};
    mtp_linear_args a = good;
    a.y.data = NULL;
    assert_fails(run(device, FWD, &a), MTP_E_ARGUMENT, "linear_fwd: y is missing");
    a = good;
    a.y = half.view;
    assert_fails(run(device, DX, &a), MTP_E_ARGUMENT, "linear_dx: y");
    a = good;
    a.w.shape[1] = 7;
    assert_fails(run(device, DW, &a), MTP_E_ARGUMENT, "linear_dw: w");
    a = good;
    a.x.stride[0] = 5;
    assert_fails(run(device, FWD, &a), MTP_E_ARGUMENT, "x has stride 5");
    a = good;
    a.scratch = (mtp_scratch){.data = ops_bytes(64), .size = 64};
    assert_fails(ops_backend()->linear_fwd(device, &a), MTP_E_ARGUMENT, "linear_fwd: scratch has 64 bytes");
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_are_right_on_every_isa),
        cmocka_unit_test(large_products_are_right),
        cmocka_unit_test(products_of_stored_views),
        cmocka_unit_test(stored_factors_are_not_converted),
        cmocka_unit_test(a_column_block_of_w_is_its_own_matrix),
        cmocka_unit_test(threads_do_not_change_bits),
        cmocka_unit_test(rows_are_independent),
        cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
