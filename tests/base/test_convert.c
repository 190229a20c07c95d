/* Protects: conversions of bf16, f16 and float8_e4m3fn are exact one way and round to nearest even the other, over all
 * bit patterns. */
#include "support.h"

#include <math.h>

#include "base/convert.h"

/* The value a float format defines, from its fields, in double. */
static double decode(unsigned bits, int exponent_bits, int fraction_bits, int bias, bool has_inf)
{
    const unsigned fraction = bits & ((1u << fraction_bits) - 1), top = (1u << exponent_bits) - 1;
    const unsigned exponent = bits >> fraction_bits & top;
    const double sign = bits >> (exponent_bits + fraction_bits) & 1u ? -1 : 1;
    if (exponent == top && has_inf) return fraction ? NAN : sign * INFINITY;
    if (exponent == top && !has_inf && fraction == (1u << fraction_bits) - 1) return NAN;
    if (exponent == 0) return sign * ldexp(fraction, 1 - bias - fraction_bits);
    return sign * ldexp(fraction + (1u << fraction_bits), (int)exponent - bias - fraction_bits);
}

static void same(double want, float got, unsigned bits)
{
    if (isnan(want) ? !isnan(got) : want != (double)got || !signbit(want) != !signbit(got))
        fail_msg("pattern 0x%x: got %a, want %a", bits, (double)got, want);
}

static void every_pattern_decodes(void **state)
{
    (void)state;
    for (unsigned i = 0; i < 65536; i++) {
        same(decode(i, 8, 7, 127, true), mtp__bf16_to_f32((uint16_t)i), i);
        same(decode(i, 5, 10, 15, true), mtp__f16_to_f32((uint16_t)i), i);
    }
    for (unsigned i = 0; i < 256; i++) same(decode(i, 4, 3, 7, false), mtp__f8_e4m3_to_f32((uint8_t)i), i);
}

/* Each finite pattern, the midpoint to the next one and both neighbours of the midpoint. */
static void check_rounding(uint16_t (*narrow)(float), float (*widen)(uint16_t), unsigned inf)
{
    for (unsigned sign = 0; sign <= 0x8000; sign += 0x8000) {
        for (unsigned i = 0; i < inf; i++) {
            const uint16_t here = (uint16_t)(sign | i), above = (uint16_t)(sign | (i + 1));
            const float low = widen(here);
            assert_int_equal(narrow(low), here);
            const double next =
                i + 1 == inf ? 2.0 * (double)low - (double)widen((uint16_t)(here - 1)) : (double)widen(above);
            const float middle = (float)(((double)low + next) / 2);
            assert_int_equal(narrow(middle), i % 2 ? above : here);
            assert_int_equal(narrow(nextafterf(middle, low)), here);
            assert_int_equal(narrow(nextafterf(middle, (float)next)), above);
        }
        assert_int_equal(narrow(sign ? -INFINITY : INFINITY), sign | inf);
    }
    assert_true(isnan(widen(narrow(NAN))));
    assert_true(isnan(widen(narrow(mtp__f32_of_bits(0x7f800001u))))); /* a payload that the narrow type cannot hold */
}

static void rounding_is_to_nearest_even(void **state)
{
    (void)state;
    check_rounding(mtp__f32_to_bf16, mtp__bf16_to_f32, 0x7f80);
    check_rounding(mtp__f32_to_f16, mtp__f16_to_f32, 0x7c00);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_pattern_decodes),
        cmocka_unit_test(rounding_is_to_nearest_even),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
