#include "base/hash.h"

/* Four bits at a time: a table of 16 words is a constant of the source, so nothing is built at start. */
static const uint32_t nibble[16] = {
    0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3, 0x61c69362, 0x7198540d,
    0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9, 0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75,
};

#if defined(__x86_64__) && defined(__GNUC__)
#include <string.h>
#include <wmmintrin.h>

static inline uint64_t word_at(const unsigned char *byte)
{
    uint64_t word;
    memcpy(&word, byte, sizeof word);
    return word;
}

/* The processor's own instruction for this polynomial; the same value, twenty times as fast. */
__attribute__((target("sse4.2"))) static uint32_t by_instruction(uint32_t crc, const unsigned char *byte, size_t size)
{
    uint64_t running = crc;
    for (; size >= 8; size -= 8, byte += 8) running = __builtin_ia32_crc32di(running, word_at(byte));
    for (; size > 0; size--, byte++) running = __builtin_ia32_crc32qi((uint32_t)running, *byte);
    return (uint32_t)running;
}

/* That instruction waits three cycles for itself, so three stretches of LANE bytes are run beside each other. The value
 * of a stretch that has n bytes behind it is multiplied by x^(8 n) modulo the polynomial: times the constant x^(8 n -
 * 33) without carries, then the instruction, which multiplies by x^32 and reduces (Gopal et al., "Fast CRC computation
 * for iSCSI polynomial using CRC32 instruction", 2011). */
enum { LANE = 4096 };

__attribute__((target("sse4.2,pclmul"))) static uint32_t join(uint64_t a, uint64_t b, uint64_t c)
{
    const __m128i shift_two = _mm_cvtsi64_si128(0x54a86326), shift_one = _mm_cvtsi64_si128(0x82f89c77);
    const __m128i first = _mm_clmulepi64_si128(_mm_cvtsi64_si128((int64_t)a), shift_two, 0);
    const __m128i second = _mm_clmulepi64_si128(_mm_cvtsi64_si128((int64_t)b), shift_one, 0);
    const uint64_t sum = (uint64_t)_mm_cvtsi128_si64(_mm_xor_si128(first, second));
    return (uint32_t)(__builtin_ia32_crc32di(0, sum) ^ c);
}

__attribute__((target("sse4.2,pclmul"))) static uint32_t by_lanes(uint32_t crc, const unsigned char *byte, size_t size)
{
    for (; size >= 3 * LANE; size -= 3 * LANE, byte += 3 * LANE) {
        uint64_t a = crc, b = 0, c = 0;
        for (size_t i = 0; i < LANE; i += 8) {
            a = __builtin_ia32_crc32di(a, word_at(byte + i));
            b = __builtin_ia32_crc32di(b, word_at(byte + LANE + i));
            c = __builtin_ia32_crc32di(c, word_at(byte + 2 * LANE + i));
        }
        crc = join(a, b, c);
    }
    return by_instruction(crc, byte, size);
}
#endif

uint32_t mtp__crc32c(uint32_t crc, const void *data, size_t size)
{
    const unsigned char *byte = data;
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("sse4.2"))
        return ~(__builtin_cpu_supports("pclmul") ? by_lanes(~crc, byte, size) : by_instruction(~crc, byte, size));
#endif
    crc = ~crc;
    for (size_t i = 0; i < size; i++) {
        crc ^= byte[i];
        crc = crc >> 4 ^ nibble[crc & 15];
        crc = crc >> 4 ^ nibble[crc & 15];
    }
    return ~crc;
}

uint64_t mtp__fnv1a(uint64_t hash, const void *data, size_t size)
{
    const unsigned char *byte = data;
    for (size_t i = 0; i < size; i++) hash = (hash ^ byte[i]) * 0x100000001b3u;
    return hash;
}
