/* Protects: rotary angles are fp32 products and libm's cosf and sinf of them; the rotation, its inverse as gradient,
 * both in place and on strided heads, in both dtypes of stored views. */
#include "ops_check.h"

static void table_is_fp32(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 2);
    enum { rows = 5, half = 21 };
    const int32_t positions[rows] = {0, 1, 4095, 262143, 1 << 24};
    test_rng rng = {1};
    ops_tensor cosine = ops_random(&rng, MTP_F32, rows, half, 2, 1.0f),
               sine = ops_random(&rng, MTP_F32, rows, half, 0, 1.0f);
    float inv_freq[half];
    for (int i = 0; i < half; i++) inv_freq[i] = i < 18 ? powf(10000.0f, -(float)i / half) : 0.0f;
    const mtp_rope_table_args a = {.positions = mtp_view_1d((void *)(uintptr_t)positions, MTP_I32, rows),
                                   .inv_freq = mtp_view_1d(inv_freq, MTP_F32, half),
                                   .cos = cosine.view,
                                   .sin = sine.view};
    assert_ok(ops_backend()->rope_table(device, &a));
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < half; i++) {
            const float angle = (float)positions[r] * inv_freq[i];
            assert_true(ops_row(&cosine, r)[i] == cosf(angle));
            assert_true(ops_row(&sine, r)[i] == sinf(angle));
            assert_true(fabs((double)ops_row(&cosine, r)[i] - cos((double)angle)) < 1e-7);
        }
    assert_true(ops_row(&cosine, 4)[20] == 1.0f && ops_row(&sine, 4)[20] == 0.0f); /* frequency 0 does not rotate */
    mtp_rope_table_args bad = a;
    const int32_t beyond[rows] = {0, 0, (1 << 24) + 1, 0, 0}, below[rows] = {0, 0, 0, 0, -1};
    bad.positions.data = (void *)(uintptr_t)beyond;
    assert_fails(ops_backend()->rope_table(device, &bad), MTP_E_ARGUMENT, "positions[2] is 16777217");
    bad.positions.data = (void *)(uintptr_t)below;
    assert_fails(ops_backend()->rope_table(device, &bad), MTP_E_ARGUMENT, "positions[4] is -1");
    ops_release();
}

typedef struct heads {
    mtp_device *device;
    ops_tensor x, cosine, sine, y;
    int64_t rows, count, width;
    mtp_rope_args args;
} heads;

static heads make(mtp_device *device, mtp_dtype dtype, int64_t rows, int64_t count, int64_t width, int64_t gap)
{
    test_rng rng = {31};
    heads h = {.device = device, .rows = rows, .count = count, .width = width};
    h.x = ops_random(&rng, dtype, rows, count * width, gap, 1.0f);
    h.y = ops_random(&rng, dtype, rows, count * width, 2 * gap, 1.0f);
    h.cosine = ops_random(&rng, MTP_F32, rows, width / 2, gap, 1.0f);
    h.sine = ops_random(&rng, MTP_F32, rows, width / 2, 0, 1.0f);
    h.args = (mtp_rope_args){.x = mtp_view_3d(h.x.view.data, dtype, rows, count, width),
                             .y = mtp_view_3d(h.y.view.data, dtype, rows, count, width),
                             .cos = h.cosine.view,
                             .sin = h.sine.view};
    h.args.x.stride[0] = h.x.view.stride[0];
    h.args.y.stride[0] = h.y.view.stride[0];
    return h;
}

static double *rotated(const heads *h, double sign)
{
    double *want = ops_doubles(h->rows * h->count * h->width);
    const int64_t half = h->width / 2;
    for (int64_t k = 0; k < h->rows * h->count; k++)
        for (int64_t i = 0; i < half; i++) {
            const double c = (double)h->cosine.values[k / h->count * half + i];
            const double s = sign * (double)h->sine.values[k / h->count * half + i];
            const double x1 = (double)h->x.values[k * h->width + i], x2 = (double)h->x.values[k * h->width + half + i];
            want[k * h->width + i] = x1 * c - x2 * s;
            want[k * h->width + half + i] = x2 * c + x1 * s;
        }
    return want;
}

static void check(mtp_device *device, mtp_dtype dtype, int64_t rows, int64_t count, int64_t width, int64_t gap)
{
    heads h = make(device, dtype, rows, count, width, gap);
    assert_ok(ops_backend()->rope_fwd(device, &h.args));
    ops_expect_stored("y", &h.y, rotated(&h, 1.0), 1e-6);
    assert_ok(ops_backend()->rope_bwd(device, &h.args));
    ops_expect_stored("dx", &h.y, rotated(&h, -1.0), 1e-6);
    h.args.y = h.args.x;
    assert_ok(ops_backend()->rope_fwd(device, &h.args));
    ops_expect_stored("y in place", &h.x, rotated(&h, 1.0), 1e-6);
}

static void rotations(mtp_device *device)
{
    check(device, MTP_F32, 1, 1, 2, 0);
    check(device, MTP_F32, 5, 3, 38, 7);
    check(device, MTP_F32, 9, 4, 256, 0);
}

static void rotations_of_stored_views(void **state)
{
    (void)state;
    mtp_device *device = ops_open_bf16();
    check(device, ops_stored(device), 1, 1, 2, 0);
    check(device, ops_stored(device), 5, 3, 38, 7);
    check(device, ops_stored(device), 9, 4, 256, 8);
    ops_release();
}

static void rotations_on_every_isa(void **state)
{
    (void)state;
    ops_each_isa(rotations);
}

static double loss(void *context)
{
    const heads *h = context;
    assert_ok(ops_backend()->rope_fwd(h->device, &h->args));
    return ops_weighted_sum(&h->y, h->y.values);
}

static void the_gradient_is_the_inverse_rotation(void **state)
{
    (void)state;
    heads h = make(ops_open(NULL, 1), MTP_F32, 2, 2, 10, 0);
    double *differences = ops_doubles(40);
    ops_differences(loss, &h, h.x.view.data, 40, differences);
    memcpy(h.x.view.data, h.y.values, 40 * sizeof(float)); /* the weights of the loss are dy */
    assert_ok(ops_backend()->rope_bwd(h.device, &h.args));
    ops_expect("dx", &h.y, differences, 1e-4);
    ops_release();
}

static uint64_t hash_of_all(mtp_device *device)
{
    const heads h = make(device, MTP_F32, 77, 3, 34, 1);
    assert_ok(ops_backend()->rope_fwd(device, &h.args));
    return ops_hash(&h.y, 0);
}

static void threads_do_not_change_bits(void **state)
{
    (void)state;
    ops_same_bits(hash_of_all);
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    const heads h = make(ops_open(NULL, 1), MTP_F32, 3, 2, 8, 0);
    mtp_rope_args a = h.args;
    a.x.shape[2] = 7;
    assert_fails(ops_backend()->rope_fwd(h.device, &a), MTP_E_ARGUMENT, "must be even");
    a = h.args;
    a.cos.shape[1] = 3;
    assert_fails(ops_backend()->rope_bwd(h.device, &a), MTP_E_ARGUMENT, "rope_bwd: cos");
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(table_is_fp32),
        cmocka_unit_test(rotations_on_every_isa),
        cmocka_unit_test(rotations_of_stored_views),
        cmocka_unit_test(the_gradient_is_the_inverse_rotation),
        cmocka_unit_test(threads_do_not_change_bits),
        cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
