/* The grouped head as its kernels take it. Internal to kernels/cuda.
 *
 * A pair is a (row, slot): slot s < k stands for the row's s-th selected centroid, slot k for the target's centroid
 * when it was not selected. Pairs are numbered by centroid, and by row within one. */
#ifndef MTP_KERNELS_CUDA_CENTROID_H
#define MTP_KERNELS_CUDA_CENTROID_H

#include "cuda/cuda.h"

namespace mtp
{

/* What the P logits of a pair, or a tile's part of them, give to the sum over a row's slots. */
struct pair_part {
    float top, sum; /* maximum, sum of exp(z - top) */
    int best;       /* the lowest token among those at the maximum */
};

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
    bool de_even; /* rows of de are whole pairs of floats */
    mtp::fault *fault;

    /* scratch */
    int *place;         /* [rows, slots]: the slot's centroid, then its pair; -1: none */
    int *row_of;        /* [pairs] */
    int *number_of;     /* [pairs]: which slot of its row */
    int *own;           /* [rows]: the target's row of e; -1: none */
    int *count;         /* [parts, C]: pairs of a centroid in a part, then the place of the next one in the centroid */
    int *begin;         /* [C + 1]: first pair of each centroid */
    int *tile_begin;    /* [C + 1]: first tile of each centroid */
    int *segment_begin; /* [C + 1]: first segment of each centroid's pairs; one without pairs has one, to be cleared */
    int *part_begin;    /* [C + 1]: first part of each centroid that has more than one segment */
    int *tile_of, *segment_of; /* the centroid of each tile and of each segment */
    int columns;               /* tiles beside each other that have the P logits of a pair */
    pair_part *part;           /* [pairs, columns] */
    float *own_z;              /* [rows]: the target's logit */
    float *top;                /* [rows]: maximum of the logits */
    float *factor;             /* [rows]: scale / sum of exp(z - top) */
    float *part_de;            /* [parts of sums, P, H] */
    void *dz;                  /* [pairs, dz_row], of the factors' type, zeros behind P */
    float *slot_dx;            /* [pairs, line] */
    void *x_copy, *e_copy;     /* [rows, width], [V, width], where x and e cannot be taken as they are */
    int dz_row, line;          /* P and H up to a multiple of 16 bytes */
    int width;                 /* of what products take of a row of x and e: H; in bf16 line, zeros behind H */
};

constexpr int PART_ROWS = 64;       /* of the sort */
constexpr int SEGMENT_PAIRS = 2048; /* of a centroid that one block adds up */

/* centroid_sort.cu: fills what is there of rows, pairs, tiles and segments, for tiles of `tile_rows` pairs. */
mtp_status grouped_sort(mtp_device *device, const char *op, const grouped &g, int tile_rows);

} // namespace mtp

#endif
