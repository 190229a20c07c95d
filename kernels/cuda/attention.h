/* What the two attention paths share: the problem as kernels take it and the list of tiles that is built on the device.
 * Internal to kernels/cuda.
 *
 * A tile is a number of consecutive positions of one document times the query heads that share one K/V head (or some of
 * them, when there are more than a tile has rows). It walks the keys in blocks counted from the document's first token.
 * Tiles are listed longest first; blocks of threads pull them from the list until it is empty. */
#ifndef MTP_KERNELS_CUDA_ATTENTION_H
#define MTP_KERNELS_CUDA_ATTENTION_H

#include "cuda/cuda.h"

namespace mtp
{

/* Strides in elements. */
struct attention_problem {
    const void *q, *kv;
    const int *key_begin, *key_end, *doc_begin;
    void *o;
    float *lse;
    const void *dout;
    void *dq;
    int64_t q_row, q_head, o_row, o_head, lse_row, dout_row, dout_head, dq_row, dq_head;
    int64_t kv_token, kv_which, kv_head;
    int R, S, NH, NKV, D;
    int group;       /* query heads of a K/V head */
    int heads;       /* of them in a tile */
    int positions;   /* of a full tile */
    int head_tiles;  /* tiles of the same positions */
    int stored_bf16; /* q, o, dout, dq are bf16; else fp32 */
};

struct attention_tile {
    int row, num_rows;          /* positions */
    int doc;                    /* first token of the document */
    int begin, end;             /* keys that one of its rows sees */
    int inner_begin, inner_end; /* keys that all of them see */
};

constexpr int ATTENTION_BUCKETS = 256;
struct attention_list {
    attention_tile *tiles; /* sorted */
    int *count;            /* tiles */
    int *next;             /* first item that no block has pulled; an item is a tile and its heads */
};

/* Positions, heads and tiles of a problem for tiles of `rows` rows. */
inline void attention_cut(attention_problem *p, int rows)
{
    p->heads = p->group < rows ? p->group : rows;
    p->positions = rows / p->heads;
    p->head_tiles = (p->group + p->heads - 1) / p->heads * p->NKV;
}

/* Bytes of scratch of the list for R rows, and the launches that fill it. */
size_t attention_list_bytes(int64_t R);
mtp_status attention_list_build(mtp_device *device, const char *op, const attention_problem *p, void *scratch,
                                attention_list *list);

/* The fused path, attention_fused.cu: bf16 tensor cores. */
mtp_status attention_fused(mtp_device *device, const char *op, attention_problem p, void *scratch, bool backward);

/* ---- in kernels -------------------------------------------------------------------------------------------------- */

/* Element i of q, o, dout or dq. */
__device__ __forceinline__ float attention_get(const attention_problem &p, const void *data, int64_t i)
{
    return p.stored_bf16 ? to_float(static_cast<const bf16 *>(data)[i]) : static_cast<const float *>(data)[i];
}

/* First block of keys at `first` or later of which a row of the tile sees something; the end of the tile's keys after
 * the last. All lanes of a warp call. */
__device__ inline int attention_next_block(const attention_problem &p, const attention_tile &tile, int first, int keys)
{
    const int lane = (int)threadIdx.x % WARP;
    for (; first < tile.end; first += keys) {
        bool seen = first >= tile.inner_begin && first < tile.inner_end;
        for (int i = lane; i < tile.num_rows && !seen; i += WARP)
            seen = p.key_begin[tile.row + i] < first + keys && p.key_end[tile.row + i] > first;
        if (__any_sync(ALL_LANES, seen)) return first;
    }
    return tile.end;
}

__device__ inline int attention_first_block(const attention_problem &p, const attention_tile &tile, int keys)
{
    return attention_next_block(p, tile, tile.doc + (tile.begin - tile.doc) / keys * keys, keys);
}

/* Row `slot` of a tile: its position and head; false when the tile has no such row. */
struct attention_row {
    int row, head;
    bool valid;
};
__device__ inline attention_row attention_row_of(const attention_problem &p, const attention_tile &tile, int head_tile,
                                                 int slot)
{
    const int tiles = p.head_tiles / p.NKV, g = head_tile / tiles,
              within = head_tile % tiles * p.heads + slot % p.heads;
    const int position = slot / p.heads;
    return {tile.row + position, g * p.group + within, position < tile.num_rows && within < p.group};
}

/* What a block of threads works at, in shared memory. */
struct attention_work {
    attention_tile tile;
    int head_tile;
};

/* The next tile and heads of the list; false at its end. All threads of the block call. */
__device__ inline bool attention_pull(const attention_problem &p, const attention_list &list, attention_work *work)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        const int item = atomicAdd(list.next, 1), tile = item / p.head_tiles;
        const bool some = tile < *list.count;
        work->head_tile = some ? item % p.head_tiles : -1;
        if (some) work->tile = list.tiles[tile];
    }
    __syncthreads();
    return work->head_tile >= 0;
}

} // namespace mtp

#endif
