/* The grouped head as its kernels take it. Internal to kernels/cuda.
 *
 * A pair is a (row, slot): slot s < k stands for the row's s-th selected centroid, slot k for the target's centroid
 * when it was not selected. Pairs are numbered by centroid, and by row within one. */
#ifndef MTP_KERNELS_CUDA_CENTROID_H
#define MTP_KERNELS_CUDA_CENTROID_H

#include "cuda/cuda.h"

namespace mtp
{

/* Strides in elements; rows are those of one chunk. */
struct grouped {
    int R, H, V, C, P;
    int k;             /* selected centroids of a row */
    int slots;         /* k + 1 */
    int parts;         /* of the chunk's rows, for the sort */
    const void *x, *e; /* of the type of the products' factors */
    int64_t x_row, e_row;
    const int *order, *slot_of;
    const int *selected;
    int64_t selected_row;
    const int *target; /* optional, as all of the following */
    const float *scale;
    float *loss;
    int *argmax;
    uint8_t *miss;
    float *logits;
    int64_t logits_row;
    float *dx;
    int64_t dx_row;
    float *de;
    int64_t de_row;
    bool dx_add, de_add;
    bool backward; /* z becomes dz */
    mtp::fault *fault;

    /* scratch */
    int *place;      /* [rows, slots]: the slot's centroid, then its pair; -1: none */
    int *row_of;     /* [pairs] */
    int *count;      /* [parts, C]: pairs of a centroid in a part, then the place of the next one within the centroid */
    int *begin;      /* [C + 1]: first pair of each centroid */
    int *tile_begin; /* [C + 1]: first tile of each centroid */
    int *segment_begin; /* [C + 1]: first segment of each centroid's pairs; one without pairs has one, to be cleared */
    int *part_begin;    /* [C + 1]: first part of each centroid that has more than one segment */
    float *part_de;     /* [parts of sums, P, H] */
    float *z;           /* [pairs, P]: logits, then dz */
    float *slot_dx;     /* [pairs, H] */
    void *x_copy;       /* [rows, H], when x is not of the factors' type */
    void *e_copy;       /* [V, H], when e is not */
};

constexpr int PART_ROWS = 64;       /* of the sort */
constexpr int SEGMENT_PAIRS = 2048; /* of a centroid that one block adds up */

/* centroid_sort.cu: fills place, row_of and the four arrays [C + 1], for tiles of `tile_rows` pairs. */
mtp_status grouped_sort(mtp_device *device, const char *op, const grouped &g, int tile_rows);

} // namespace mtp

#endif
