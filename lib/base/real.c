#include "base/real.h"

#include <string.h>

#include "base/convert.h"

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
        dst[i] = src_dtype == MTP_BF16 ? mtp__bf16_to_f32(word) : mtp__f16_to_f32(word);
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
        const uint16_t word = dst_dtype == MTP_BF16 ? mtp__f32_to_bf16(src[i]) : mtp__f32_to_f16(src[i]);
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
        if ((mtp__bits_of_f32(x[i]) & 0x7f800000) == 0x7f800000) return i;
    return -1;
}
