/* Protects: the conversions by which every weight enters and leaves a file, over all 65536 half patterns and their
 * midpoints, and the growing text in which problems are listed. */
#include "support.h"

#include <math.h>

#include "base/real.h"
#include "base/text.h"

static uint16_t to_word(mtp_dtype dtype, float value)
{
    uint16_t word;
    mtp__real_from_f32(&word, dtype, &value, 1);
    return word;
}

static float to_float(mtp_dtype dtype, uint16_t word)
{
    float value;
    mtp__real_to_f32(&value, &word, dtype, 1);
    return value;
}

/* The value of a pattern from the definition of the formats, in double. */
static double meaning(mtp_dtype dtype, uint16_t word)
{
    const int bits = dtype == MTP_BF16 ? 7 : 10, bias = dtype == MTP_BF16 ? 127 : 15;
    const int exponent = (word & 0x7fff) >> bits, mantissa = word & ((1 << bits) - 1);
    const double sign = word & 0x8000 ? -1 : 1;
    if (exponent == (dtype == MTP_BF16 ? 255 : 31)) return mantissa ? (double)NAN : sign * (double)INFINITY;
    const double fraction = (double)mantissa / (1 << bits);
    return sign * (exponent ? ldexp(1 + fraction, exponent - bias) : ldexp(fraction, 1 - bias));
}

static void every_pattern(mtp_dtype dtype)
{
    for (uint32_t i = 0; i < 65536; i++) {
        const uint16_t word = (uint16_t)i;
        const float value = to_float(dtype, word);
        const double expected = meaning(dtype, word);
        if (isnan(expected)) {
            assert_true(isnan(value));
            assert_true(isnan(to_float(dtype, to_word(dtype, value))));
            continue;
        }
        assert_true((double)value == expected);
        assert_int_equal(to_word(dtype, value), word);
    }
}

/* Halfway between neighbours goes to the even one, a hair beside it to the nearer one. */
static void every_midpoint(mtp_dtype dtype)
{
    const uint16_t last = dtype == MTP_BF16 ? 0x7f7f : 0x7bff;
    for (uint16_t word = 0; word < last; word++) {
        const double low = meaning(dtype, word), high = meaning(dtype, (uint16_t)(word + 1));
        const float middle = (float)((low + high) / 2);
        if ((double)middle != (low + high) / 2) continue; /* below fp32's own subnormals */
        const uint16_t even = (uint16_t)(word + (word & 1));
        assert_int_equal(to_word(dtype, middle), even);
        assert_int_equal(to_word(dtype, -middle), even | 0x8000);
        assert_int_equal(to_word(dtype, nextafterf(middle, 0)), word);
        assert_int_equal(to_word(dtype, nextafterf(middle, INFINITY)), word + 1);
    }
}

static void test_bf16(void **state)
{
    (void)state;
    every_pattern(MTP_BF16);
    every_midpoint(MTP_BF16);
    assert_int_equal(to_word(MTP_BF16, 3.4e38f), 0x7f80); /* beyond the largest finite value */
}

static void test_f16(void **state)
{
    (void)state;
    every_pattern(MTP_F16);
    every_midpoint(MTP_F16);
    assert_int_equal(to_word(MTP_F16, 65519.996f), 0x7bff);
    assert_int_equal(to_word(MTP_F16, 65520.0f), 0x7c00);
    assert_int_equal(to_word(MTP_F16, -1e30f), 0xfc00);
    assert_int_equal(to_word(MTP_F16, 1e-30f), 0);
}

static void test_unaligned_and_nonfinite(void **state)
{
    (void)state;
    const float source[3] = {1.5f, -2.0f, 3.0f};
    char bytes[13];
    float back[3];
    mtp__real_from_f32(bytes + 1, MTP_BF16, source, 3);
    mtp__real_to_f32(back, bytes + 1, MTP_BF16, 3);
    assert_memory_equal(back, source, sizeof source);
    mtp__real_from_f32(bytes + 1, MTP_F32, source, 3);
    mtp__real_to_f32(back, bytes + 1, MTP_F32, 3);
    assert_memory_equal(back, source, sizeof source);
    const float bad[4] = {1, 3e38f, -INFINITY, NAN};
    assert_int_equal(mtp__real_find_nonfinite(bad, 2), -1);
    assert_int_equal(mtp__real_find_nonfinite(bad, 4), 2);
    assert_int_equal(mtp__real_find_nonfinite(bad + 3, 1), 0);
}

static void test_f8_e4m3(void **state)
{
    (void)state;
    uint8_t bytes[256];
    float values[256];
    for (int i = 0; i < 256; i++) bytes[i] = (uint8_t)i;
    mtp__real_from_f8_e4m3(values, bytes, 256);
    for (int i = 0; i < 256; i++) {
        const int exponent = i >> 3 & 15, mantissa = i & 7;
        const double magnitude = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
        if ((i & 0x7f) == 0x7f)
            assert_true(isnan(values[i]));
        else
            assert_true((double)values[i] == (i & 0x80 ? -magnitude : magnitude));
        assert_int_equal(!signbit(values[i]), !(i & 0x80));
    }
    assert_true(values[0x7e] == 448.0f); /* the largest, as the definition of the format gives it */
}

static void test_text_grows(void **state)
{
    (void)state;
    mtp__text text = {0};
    assert_string_equal(mtp__text_get(&text), "");
    for (int i = 0; i < 1000; i++) mtp__text_add(&text, "%03d,", i);
    assert_ok(mtp__text_check(&text));
    assert_int_equal(text.length, 4000);
    assert_int_equal(strlen(mtp__text_get(&text)), 4000);
    assert_memory_equal(mtp__text_get(&text) + 3996, "999,", 5);
    mtp__text_free(&text);
    assert_null(text.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bf16), cmocka_unit_test(test_f16),
                                       cmocka_unit_test(test_f8_e4m3), cmocka_unit_test(test_unaligned_and_nonfinite),
                                       cmocka_unit_test(test_text_grows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
