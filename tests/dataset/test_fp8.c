/* Protects: K/V in 8 bits: every byte is the nearest float8 of value / scale, the scale is finite and lets the largest
 * value in, and its squared error is not above that of the scale that just fits, and far below it on the whole. */
#include "support.h"

#include <math.h>

#include "base/real.h"
#include "data/store.h"

enum { HEADS = 300, MOST = 64 };

static float value_of(uint8_t byte)
{
    float value;
    mtp__real_from_f8_e4m3(&value, &byte, 1);
    return value;
}

/* Distance from y to the nearest of all float8. */
static double nearest(double y)
{
    double least = INFINITY;
    for (int byte = 0; byte < 256; byte++)
        if ((byte & 0x7f) != 0x7f) least = fmin(least, fabs((double)value_of((uint8_t)byte) - y));
    return least;
}

/* Sums of four uniform numbers: bells with a few large values, as K and V are. */
static void fill(test_rng *rng, float *values, int64_t n, float size)
{
    for (int64_t i = 0; i < n; i++) {
        values[i] = 0;
        for (int k = 0; k < 4; k++) values[i] += size * test_uniform(rng);
    }
}

static void bytes_are_nearest_and_scales_best(void **state)
{
    (void)state;
    test_rng rng = {7};
    double total = 0, total_fit = 0;
    for (int head = 0; head < HEADS; head++) {
        float values[MOST], scale = -1, largest = 0;
        uint8_t bytes[MOST];
        const int64_t n = head % 3 ? MOST : 1 + head % 13;
        fill(&rng, values, n, powf(10.0f, (float)(head % 9 - 4)));
        mtp__store_to_fp8(bytes, &scale, values, n);
        for (int64_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(values[i]));
        const double fit = (double)largest / 448;
        assert_true(isfinite(scale) && (double)scale > 0.999999 * fit && (double)scale < 2.000001 * fit);
        double error = 0, error_fit = 0;
        for (int64_t i = 0; i < n; i++) {
            const double y = (double)(values[i] / scale), off = fabs((double)value_of(bytes[i]) - y);
            assert_true((bytes[i] & 0x7f) != 0x7f);
            assert_true(off <= nearest(y) + 1e-12);
            error += off * off * (double)scale * (double)scale;
            error_fit += nearest((double)values[i] / fit) * nearest((double)values[i] / fit) * fit * fit;
        }
        if (error > 1.00001 * error_fit + 1e-8 * fit * fit)
            fail_msg("head %d: %g, with the scale that fits %g", head, error, error_fit);
        total += error / (fit * fit);
        total_fit += error_fit / (fit * fit);
    }
    printf("squared error %.2f of that with the scales that fit\n", total / total_fit);
    assert_true(total < 0.8 * total_fit);
}

static void special_heads(void **state)
{
    (void)state;
    float scale = -1, values[4] = {0, 0, 0, 0};
    uint8_t bytes[4];
    mtp__store_to_fp8(bytes, &scale, values, 4);
    assert_true(scale == 0 && bytes[0] == 0 && bytes[3] == 0);
    values[2] = 1e-45f; /* the scale underflows: as good as zero */
    mtp__store_to_fp8(bytes, &scale, values, 4);
    assert_true(scale == 0 && bytes[2] == 0);
    values[0] = 448;
    values[1] = -3.5f;
    values[2] = 0.25f; /* exact with scale 1, and with no other */
    mtp__store_to_fp8(bytes, &scale, values, 4);
    assert_true(scale == 1 && value_of(bytes[0]) == 448 && value_of(bytes[1]) == -3.5f && value_of(bytes[2]) == 0.25f);
    for (int i = 0; i < 4; i++) values[i] = (float)(i % 2 ? -1 : 1) * 3.38953139e38f; /* the largest bf16 */
    mtp__store_to_fp8(bytes, &scale, values, 4);
    for (int i = 0; i < 4; i++) assert_true(isfinite(scale * value_of(bytes[i])));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_nearest_and_scales_best),
        cmocka_unit_test(special_heads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
