#include "base/rng.h"

#include <math.h>

mtp__philox mtp__philox_block(uint64_t seed, uint64_t stream, uint64_t counter)
{
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    mtp__philox c = {{(uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)stream, (uint32_t)(stream >> 32)}};
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c.word[0];
        const uint64_t p1 = (uint64_t)0xCD9E8D57u * c.word[2];
        c = (mtp__philox){{(uint32_t)(p1 >> 32) ^ c.word[1] ^ key0, (uint32_t)p1,
                           (uint32_t)(p0 >> 32) ^ c.word[3] ^ key1, (uint32_t)p0}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}

uint32_t mtp__rng_u32(mtp__rng *rng)
{
    const uint64_t index = rng->next++;
    return mtp__philox_block(rng->seed, rng->stream, index / 4).word[index % 4];
}

uint64_t mtp__rng_below(mtp__rng *rng, uint64_t n)
{
    const uint64_t limit = UINT64_MAX - UINT64_MAX % n;
    for (;;) {
        const uint64_t high = mtp__rng_u32(rng);
        const uint64_t x = high << 32 | mtp__rng_u32(rng);
        if (x < limit) return x % n;
    }
}

float mtp__rng_uniform(mtp__rng *rng)
{
    return (float)(mtp__rng_u32(rng) >> 8) * 0x1p-24f;
}

float mtp__rng_normal(mtp__rng *rng)
{
    const double u = ((double)mtp__rng_u32(rng) + 0.5) * 0x1p-32;
    const double v = (double)mtp__rng_u32(rng) * 0x1p-32;
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

void mtp__rng_permutation(mtp__rng *rng, uint32_t n, uint32_t *order)
{
    for (uint32_t i = 0; i < n; i++) order[i] = i;
    for (uint32_t i = n; i > 1; i--) {
        const uint32_t j = (uint32_t)mtp__rng_below(rng, i);
        const uint32_t last = order[i - 1];
        order[i - 1] = order[j];
        order[j] = last;
    }
}
