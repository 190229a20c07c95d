/* Internal to lib/model: sizes rounded up, so that what is made for a size (graphs, memory) serves many. */
#ifndef MTP_MODEL_SIZES_H
#define MTP_MODEL_SIZES_H

#include <stdint.h>

enum { MTP__SMALLEST_STRIDE = 8 };

/* n rounded up to a multiple of `stride`, but no more than `most` (n <= most). */
static inline int64_t mtp__size_in_strides(int64_t n, int64_t stride, int64_t most)
{
    if (stride < MTP__SMALLEST_STRIDE) stride = MTP__SMALLEST_STRIDE;
    const int64_t rest = n % stride;
    return rest == 0 ? n : n > most - (stride - rest) ? most : n + (stride - rest);
}

/* The next of eight sizes an octave: at most an eighth more than n. */
static inline int64_t mtp__size_above(int64_t n, int64_t most)
{
    int64_t octave = 1;
    while (octave <= n / 2) octave *= 2;
    return mtp__size_in_strides(n, octave / 8, most);
}

#endif
