/* Scalar conversions between the stored float types and fp32. Internal.
 *
 * To fp32 is exact. From fp32 rounds to nearest, ties to even; NaN stays NaN (quiet), what is too large becomes Inf. */
#ifndef MTP_BASE_CONVERT_H
#define MTP_BASE_CONVERT_H

#include <stdint.h>
#include <string.h>

static inline float mtp__f32_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline uint32_t mtp__bits_of_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float mtp__bf16_to_f32(uint16_t x)
{
    return mtp__f32_of_bits((uint32_t)x << 16);
}
static inline uint16_t mtp__f32_to_bf16(float value)
{
    const uint32_t bits = mtp__bits_of_f32(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* 1 sign, 5 exponent (bias 15), 10 fraction bits. */
static inline float mtp__f16_to_f32(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000u) << 16, exponent = x >> 10 & 0x1fu, fraction = x & 0x3ffu;
    if (exponent == 0) { /* fraction * 2^-24, exact */
        const float magnitude = (float)fraction * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    if (exponent == 31) return mtp__f32_of_bits(sign | 0x7f800000u | fraction << 13);
    return mtp__f32_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}
static inline uint16_t mtp__f32_to_f16(float value)
{
    const uint32_t bits = mtp__bits_of_f32(value);
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and more */
    if (magnitude < 0x38800000u) {                                   /* below 2^-14: the addition rounds to 2^-24 */
        const float shifted = mtp__f32_of_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (mtp__bits_of_f32(shifted) - 0x3f000000u));
    }
    return (uint16_t)(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

/* float8_e4m3fn: 1 sign, 4 exponent (bias 7), 3 fraction bits, no Inf, 0x7f and 0xff are NaN. */
static inline float mtp__f8_e4m3_to_f32(uint8_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x80u) << 24, exponent = x >> 3 & 0xfu, fraction = x & 7u;
    if (exponent == 0) { /* fraction * 2^-9 */
        const float magnitude = (float)fraction * 0x1p-9f;
        return sign ? -magnitude : magnitude;
    }
    if (exponent == 15 && fraction == 7) return mtp__f32_of_bits(sign | 0x7fc00000u);
    return mtp__f32_of_bits(sign | (exponent + 120) << 23 | fraction << 20);
}

#endif
