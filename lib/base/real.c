#include "base/real.h"

#include <string.h>

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float half_to_f32(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    if (exponent == 31) return from_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent != 0) return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    const float magnitude = (float)mantissa * 0x1p-24f; /* subnormal or zero: exact in fp32 */
    return sign ? -magnitude : magnitude;
}

static uint16_t f32_to_bf16(float value)
{
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40); /* quiet, and never rounded to Inf */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint16_t f32_to_half(float value)
{
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and above round to infinity */
    if (magnitude < 0x38800000) {
        /* below 2^-14: the spacing is 2^-24, so adding 0.5 (whose last place is 2^-24) rounds in the right place */
        return (uint16_t)(sign | (bits_of(from_bits(magnitude) + 0.5f) - bits_of(0.5f)));
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | (rounded - ((uint32_t)112 << 23)) >> 13);
}

void mtp__real_to_f32(float *dst, const void *src, mtp_dtype src_dtype, int64_t n)
{
    if (src_dtype == MTP_F32) {
        memcpy(dst, src, (size_t)n * sizeof *dst);
        return;
    }
    const char *bytes = src;
    for (int64_t i = 0; i < n; i++) {
        uint16_t word;
        memcpy(&word, bytes + 2 * i, sizeof word);
        dst[i] = src_dtype == MTP_BF16 ? from_bits((uint32_t)word << 16) : half_to_f32(word);
    }
}

void mtp__real_from_f32(void *dst, mtp_dtype dst_dtype, const float *src, int64_t n)
{
    if (dst_dtype == MTP_F32) {
        memcpy(dst, src, (size_t)n * sizeof *src);
        return;
    }
    char *bytes = dst;
    for (int64_t i = 0; i < n; i++) {
        const uint16_t word = dst_dtype == MTP_BF16 ? f32_to_bf16(src[i]) : f32_to_half(src[i]);
        memcpy(bytes + 2 * i, &word, sizeof word);
    }
}

void mtp__real_from_f8_e4m3(float *dst, const void *src, int64_t n)
{
    const uint8_t *bytes = src;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t sign = (uint32_t)(bytes[i] & 0x80) << 24, exponent = bytes[i] >> 3 & 15, mantissa = bytes[i] & 7;
        const uint32_t small = bits_of((float)mantissa * 0x1p-9f);
        const uint32_t normal = (exponent + 120) << 23 | mantissa << 20;
        dst[i] = from_bits(sign | (exponent == 0 ? small : (bytes[i] & 0x7f) == 0x7f ? 0x7fc00000 : normal));
    }
}

int64_t mtp__real_find_nonfinite(const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if ((bits_of(x[i]) & 0x7f800000) == 0x7f800000) return i;
    return -1;
}

int64_t mtp__real_find_nonfinite_in(const void *data, mtp_dtype dtype, int64_t n)
{
    enum { CHUNK = 4096 };
    float values[CHUNK];
    for (int64_t first = 0; first < n; first += CHUNK) {
        const int64_t count = n - first < CHUNK ? n - first : CHUNK;
        mtp__real_to_f32(values, (const char *)data + (size_t)first * mtp_dtype_size(dtype), dtype, count);
        const int64_t bad = mtp__real_find_nonfinite(values, count);
        if (bad >= 0) return first + bad;
    }
    return -1;
}
