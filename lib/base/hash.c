#include "base/hash.h"

/* Four bits at a time: a table of 16 words is a constant of the source, so nothing is built at start. */
static const uint32_t nibble[16] = {
    0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3, 0x61c69362, 0x7198540d,
    0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9, 0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75,
};

#if defined(__x86_64__) && defined(__GNUC__)
#include <string.h>

/* The processor's own instruction for this polynomial; the same value, twenty times as fast. */
__attribute__((target("sse4.2"))) static uint32_t by_instruction(uint32_t crc, const unsigned char *byte, size_t size)
{
    uint64_t running = ~crc;
    for (; size >= 8; size -= 8, byte += 8) {
        uint64_t word;
        memcpy(&word, byte, sizeof word);
        running = __builtin_ia32_crc32di(running, word);
    }
    for (; size > 0; size--, byte++) running = __builtin_ia32_crc32qi((uint32_t)running, *byte);
    return ~(uint32_t)running;
}
#endif

uint32_t mtp__crc32c(uint32_t crc, const void *data, size_t size)
{
    const unsigned char *byte = data;
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("sse4.2")) return by_instruction(crc, byte, size);
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
