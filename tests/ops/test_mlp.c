/* Protects: GeGLU and its gradients, against the formula in double and central differences, in place, strided, in both
 * dtypes of stored views. */
#include "ops_check.h"

static double sigmoid2y(double g)
{
    return 1.0 / (1.0 + exp(-2.0 * sqrt(2.0 / acos(-1.0)) * (g + 0.044715 * g * g * g)));
}

static double slope_of(double g)
{
    const double s = sigmoid2y(g);
    return s + g * s * (1.0 - s) * 2.0 * sqrt(2.0 / acos(-1.0)) * (1.0 + 3.0 * 0.044715 * g * g);
}

typedef struct layer {
    mtp_device *device;
    ops_tensor gate, up, y, dy, dgate, dup;
    mtp_geglu_args args;
} layer;

static layer make(mtp_device *device, mtp_dtype dtype, int64_t rows, int64_t width, int64_t gap)
{
    test_rng rng = {21};
    layer l = {.device = device};
    ops_tensor *const tensors[] = {&l.gate, &l.up, &l.y, &l.dy, &l.dgate, &l.dup};
    for (int i = 0; i < 6; i++) *tensors[i] = ops_random(&rng, dtype, rows, width, gap * i, i == 0 ? 4.0f : 1.0f);
    l.args = (mtp_geglu_args){
        .gate = l.gate.view, .up = l.up.view, .y = l.y.view, .dy = l.dy.view, .dgate = l.dgate.view, .dup = l.dup.view};
    return l;
}

static void check(mtp_device *device, mtp_dtype dtype, int64_t rows, int64_t width, int64_t gap)
{
    const layer l = make(device, dtype, rows, width, gap);
    double *y = ops_doubles(rows * width), *dgate = ops_doubles(rows * width), *dup = ops_doubles(rows * width);
    for (int64_t i = 0; i < rows * width; i++) {
        const double g = (double)l.gate.values[i], u = (double)l.up.values[i], d = (double)l.dy.values[i];
        y[i] = g * sigmoid2y(g) * u;
        dgate[i] = d * u * slope_of(g);
        dup[i] = d * g * sigmoid2y(g);
    }
    assert_ok(ops_backend()->geglu_fwd(device, &l.args));
    ops_expect_stored("y", &l.y, y, 1e-6);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < width; i++) ops_put(&l.y.view, r * l.y.view.stride[0] + i, 0.0f);
    assert_ok(ops_backend()->geglu_bwd(device, &l.args));
    ops_expect_stored("y again", &l.y, y, 1e-6);
    ops_expect_stored("dgate", &l.dgate, dgate, 1e-6);
    ops_expect_stored("dup", &l.dup, dup, 1e-6);
    /* in place: dgate over gate, dup over up, y over dy */
    mtp_geglu_args a = l.args;
    a.y = a.dy;
    a.dgate = a.gate;
    a.dup = a.up;
    assert_ok(ops_backend()->geglu_bwd(device, &a));
    ops_expect_stored("y over dy", &l.dy, y, 1e-6);
    ops_expect_stored("dgate over gate", &l.gate, dgate, 1e-6);
    ops_expect_stored("dup over up", &l.up, dup, 1e-6);
}

static void formulas(mtp_device *device)
{
    check(device, MTP_F32, 1, 1, 0);
    check(device, MTP_F32, 7, 37, 3);
    check(device, MTP_F32, 64, 128, 0);
}

static void formulas_of_stored_views(void **state)
{
    (void)state;
    mtp_device *device = ops_open_bf16();
    check(device, ops_stored(device), 1, 1, 0);
    check(device, ops_stored(device), 7, 37, 3);
    check(device, ops_stored(device), 33, 2304, 8);
    ops_release();
}

/* gate and up as the halves of one product, and their gradients as the halves of its gradient. */
static void halves_of_one_matrix(void **state)
{
    (void)state;
    enum { rows = 9, width = 48 };
    mtp_device *device = ops_open_bf16();
    const mtp_dtype dtype = ops_stored(device);
    const layer l = make(device, dtype, rows, width, 0);
    test_rng rng = {22};
    const ops_tensor both = ops_random(&rng, dtype, rows, 2 * width, 0, 2.0f);
    for (int64_t i = 0; i < rows * width; i++) {
        ops_put(&l.gate.view, i, both.values[i / width * 2 * width + i % width]);
        ops_put(&l.up.view, i, both.values[i / width * 2 * width + width + i % width]);
    }
    assert_ok(ops_backend()->geglu_fwd(device, &l.args));
    assert_ok(ops_backend()->geglu_bwd(device, &l.args));
    mtp_geglu_args a = l.args;
    const ops_tensor y = ops_random(&rng, dtype, rows, width, 0, 1.0f);
    a.y = y.view;
    a.gate = a.dgate = mtp_view_cols(both.view, 0, width);
    a.up = a.dup = mtp_view_cols(both.view, width, width);
    assert_ok(ops_backend()->geglu_fwd(device, &a));
    assert_true(ops_hash(&y, 0) == ops_hash(&l.y, 0));
    assert_ok(ops_backend()->geglu_bwd(device, &a));
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < width; i++) {
            assert_true(ops_at(&both, r, i) == ops_at(&l.dgate, r, i));
            assert_true(ops_at(&both, r, width + i) == ops_at(&l.dup, r, i));
        }
    ops_release();
}

static void formulas_on_every_isa(void **state)
{
    (void)state;
    ops_each_isa(formulas);
}

static double loss(void *context)
{
    const layer *l = context;
    assert_ok(ops_backend()->geglu_fwd(l->device, &l->args));
    return ops_weighted_sum(&l->y, l->dy.values);
}

static void gradients_are_differences(void **state)
{
    (void)state;
    enum { rows = 3, width = 19 };
    layer l = make(ops_open(NULL, 1), MTP_F32, rows, width, 0);
    double *dgate = ops_doubles(rows * width), *dup = ops_doubles(rows * width);
    ops_differences(loss, &l, l.gate.view.data, rows * width, dgate);
    ops_differences(loss, &l, l.up.view.data, rows * width, dup);
    assert_ok(ops_backend()->geglu_bwd(l.device, &l.args));
    ops_expect("dgate", &l.dgate, dgate, 3e-4);
    ops_expect("dup", &l.dup, dup, 3e-4);
    ops_release();
}

static uint64_t hash_of_all(mtp_device *device)
{
    const layer l = make(device, MTP_F32, 133, 70, 1);
    assert_ok(ops_backend()->geglu_fwd(device, &l.args));
    const uint64_t hash = ops_hash(&l.y, 0);
    assert_ok(ops_backend()->geglu_bwd(device, &l.args));
    return ops_hash(&l.dup, ops_hash(&l.dgate, hash));
}

static void threads_do_not_change_bits(void **state)
{
    (void)state;
    ops_same_bits(hash_of_all);
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    const layer l = make(ops_open(NULL, 1), MTP_F32, 4, 6, 0);
    mtp_geglu_args a = l.args;
    a.up.shape[1] = 5;
    assert_fails(ops_backend()->geglu_fwd(l.device, &a), MTP_E_ARGUMENT, "geglu_fwd: up");
    a = l.args;
    a.dy.data = NULL;
    assert_fails(ops_backend()->geglu_bwd(l.device, &a), MTP_E_ARGUMENT, "geglu_bwd: dy is missing");
    a = l.args;
    a.dup.dtype = MTP_BF16;
    assert_fails(ops_backend()->geglu_bwd(l.device, &a), MTP_E_ARGUMENT, "geglu_bwd: dup");
    a = l.args;
    a.y.data = a.dgate.data = a.dup.data = NULL;
    assert_ok(ops_backend()->geglu_bwd(l.device, &a));
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(formulas_on_every_isa),      cmocka_unit_test(formulas_of_stored_views),
        cmocka_unit_test(halves_of_one_matrix),       cmocka_unit_test(gradients_are_differences),
        cmocka_unit_test(threads_do_not_change_bits), cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
