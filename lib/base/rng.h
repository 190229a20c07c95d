/* Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
 *
 * A number is a pure function of (seed, stream, counter), so a resumed run needs no generator state and threads need no
 * order. Internal. */
#ifndef MTP_BASE_RNG_H
#define MTP_BASE_RNG_H

#include <stdint.h>

typedef struct mtp__philox {
    uint32_t word[4];
} mtp__philox;

/* The four words of block `counter` of the sequence (seed, stream). */
mtp__philox mtp__philox_block(uint64_t seed, uint64_t stream, uint64_t counter);

/* A sequential reader of one (seed, stream) sequence; a plain value, copy it freely. */
typedef struct mtp__rng {
    uint64_t seed, stream, next; /* next: index of the next 32-bit word */
} mtp__rng;

static inline mtp__rng mtp__rng_make(uint64_t seed, uint64_t stream)
{
    return (mtp__rng){seed, stream, 0};
}
uint32_t mtp__rng_u32(mtp__rng *rng);
/* Uniform in [0, n), n >= 1, without bias (rejection). */
uint64_t mtp__rng_below(mtp__rng *rng, uint64_t n);
/* Uniform in [0, 1), 24 bits. */
float mtp__rng_uniform(mtp__rng *rng);
/* Standard normal (Box-Muller, two words each). */
float mtp__rng_normal(mtp__rng *rng);
/* A permutation of 0..n-1 (Fisher-Yates) written to `order`: the sampler's shuffle. */
void mtp__rng_permutation(mtp__rng *rng, uint32_t n, uint32_t *order);

#endif
