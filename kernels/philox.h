/* Random numbers that need no state: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC
 * 2011), a function of key and counter, the same on host and device; and the rounding to bf16 that is made with them.
 * Internal to kernels/. */
#ifndef MTP_KERNELS_PHILOX_H
#define MTP_KERNELS_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#define MTP__BOTH_SIDES __host__ __device__
#else
#define MTP__BOTH_SIDES
#endif

typedef struct mtp__philox {
    uint32_t word[4];
} mtp__philox;

#define MTP__PHILOX_ROUNDS 10
#define MTP__PHILOX_M0 0xD2511F53u
#define MTP__PHILOX_M1 0xCD9E8D57u
#define MTP__PHILOX_W0 0x9E3779B9u /* the golden ratio */
#define MTP__PHILOX_W1 0xBB67AE85u /* sqrt(3) - 1 */

/* Ten rounds. key: low word, high word. */
static inline MTP__BOTH_SIDES mtp__philox mtp__philox_10(mtp__philox x, uint32_t key0, uint32_t key1)
{
    for (int round = 0; round < MTP__PHILOX_ROUNDS; round++) {
        const uint64_t a = (uint64_t)MTP__PHILOX_M0 * x.word[0], b = (uint64_t)MTP__PHILOX_M1 * x.word[2];
        const uint32_t w1 = x.word[1], w3 = x.word[3];
        x.word[0] = (uint32_t)(b >> 32) ^ w1 ^ key0;
        x.word[1] = (uint32_t)b;
        x.word[2] = (uint32_t)(a >> 32) ^ w3 ^ key1;
        x.word[3] = (uint32_t)a;
        key0 += MTP__PHILOX_W0;
        key1 += MTP__PHILOX_W1;
    }
    return x;
}

/* The numbers that one update has for the values at 8 block .. 8 block + 7: 16 bits for each, see mtp__random_bits. */
static inline MTP__BOTH_SIDES mtp__philox mtp__random_block(uint64_t seed, uint64_t step, uint64_t block)
{
    const mtp__philox counter = {{(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)step, (uint32_t)(step >> 32)}};
    return mtp__philox_10(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
}

/* Of value i of a block, 0 <= i < 8. */
static inline MTP__BOTH_SIDES uint32_t mtp__random_bits(const mtp__philox *random, int i)
{
    return random->word[i / 2] >> (16 * (i % 2)) & 0xffffu;
}

/* The bits of an fp32 number, rounded to one of its two neighbours in bf16: up in magnitude with the probability that
 * makes the mean exact, `random` being uniform in [0, 2^16). Still as fp32, with the low half 0. NaN stays NaN, what
 * is representable stays as it is. */
static inline MTP__BOTH_SIDES uint32_t mtp__round_to_bf16(uint32_t bits, uint32_t random)
{
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits | 0x00400000u) & 0xffff0000u;
    return (bits + random) & 0xffff0000u;
}

#endif
