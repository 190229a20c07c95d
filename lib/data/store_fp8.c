/* bf16 K/V to 8 bits: float8_e4m3fn (4 exponent bits with bias 7, 3 fraction bits, largest 448), one scale a head. */
#include <math.h>

#include "data/store.h"

static const float LARGEST = 448.0f;

static uint8_t encode(float value)
{
    const uint8_t sign = signbit(value) ? 0x80 : 0;
    const float magnitude = fabsf(value);
    int exponent;
    if (magnitude == 0) return sign;
    frexpf(magnitude, &exponent);
    exponent -= 1;                    /* magnitude = 1.x * 2^exponent */
    if (exponent < -6) exponent = -6; /* subnormal: steps of 2^-9 */
    const float step = ldexpf(1.0f, exponent - 3);
    int steps = (int)nearbyintf(magnitude / step); /* the division by a power of two is exact */
    if (steps >= 16) {                             /* rounded up to the next power of two */
        steps = 8;
        exponent++;
    }
    if (exponent > 8 || (exponent == 8 && steps > 14)) return (uint8_t)(sign | 0x7e);
    if (steps < 8) return (uint8_t)(sign | steps);
    return (uint8_t)(sign | (exponent + 7) << 3 | (steps - 8));
}

void mtp__store_to_fp8(uint8_t *bytes, float *scale, const float *values, int64_t n)
{
    float largest = 0;
    for (int64_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(values[i]));
    *scale = largest / LARGEST;
    /* a scale that underflows to zero stands for a head of zeros */
    for (int64_t i = 0; i < n; i++) bytes[i] = *scale > 0 ? encode(values[i] / *scale) : 0;
}
