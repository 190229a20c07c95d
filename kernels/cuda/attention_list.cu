/* The list of attention tiles, built on the device: no count comes back to the host. A row starts a tile when the
 * number of rows of its document before it is a multiple of the tile's positions, so every row decides by itself; a
 * counting sort by the number of keys puts the long tiles first. The order of equal ones is not fixed; no result
 * depends on it. */
#include "cuda/attention.h"

namespace mtp
{
namespace
{

constexpr int LIST_THREADS = 256;

/* What the sort needs beside the list; zeroed before. */
struct list_counters {
    int count, next;
    int histogram[ATTENTION_BUCKETS];
    int cursor[ATTENTION_BUCKETS];
};

/* Longer ranges have higher buckets: exponent and three bits of mantissa of a length of 1 to 2^31 - 1. */
__device__ int bucket_of(const attention_tile &tile)
{
    return (int)(__float_as_uint((float)(tile.end - tile.begin)) >> 20) - (127 << 3);
}

__device__ int first_row_of_document(const attention_problem &p, int row)
{
    const int doc = p.doc_begin[row];
    int low = 0, high = row;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (p.doc_begin[middle] < doc)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* A row's range must name at least one key of its document, which ends where that of the next row begins. */
__device__ bool valid_range(const attention_problem &p, int row, fault *fault)
{
    const int doc = p.doc_begin[row], begin = p.key_begin[row], end = p.key_end[row];
    const int next = row + 1 < p.R ? p.doc_begin[row + 1] : doc;
    return in_range(fault, FAULT_RANGE, doc, p.S) && in_range(fault, FAULT_RANGE, end, p.S + 1) &&
           in_range(fault, FAULT_RANGE, begin - doc, end - doc) &&
           (next == doc || in_range(fault, FAULT_RANGE, end - 1, next));
}

__device__ attention_tile tile_at(const attention_problem &p, int row)
{
    attention_tile tile = {row, 0, p.doc_begin[row], p.S, 0, 0, p.S};
    for (int r = row; r < p.R && r < row + p.positions && p.doc_begin[r] == tile.doc; r++) {
        const int begin = max(p.key_begin[r], tile.doc), end = min(p.key_end[r], p.S);
        tile.num_rows++;
        tile.begin = min(tile.begin, begin);
        tile.end = max(tile.end, end);
        tile.inner_begin = max(tile.inner_begin, begin);
        tile.inner_end = min(tile.inner_end, end);
    }
    return tile;
}

__global__ void __launch_bounds__(LIST_THREADS)
    list_tiles(attention_problem p, attention_tile *unsorted, list_counters *counters, fault *fault)
{
    const int row = (int)(blockIdx.x * LIST_THREADS + threadIdx.x);
    if (row >= p.R) return;
    unsorted[row].num_rows = 0;
    if (!valid_range(p, row, fault)) return;
    if ((row - first_row_of_document(p, row)) % p.positions) return;
    const attention_tile tile = tile_at(p, row);
    if (tile.doc < 0 || tile.end <= tile.begin) return;
    unsorted[row] = tile;
    atomicAdd(&counters->histogram[bucket_of(tile)], 1);
    atomicAdd(&counters->count, 1);
}

__global__ void __launch_bounds__(LIST_THREADS)
    sort_tiles(int R, const attention_tile *unsorted, attention_tile *sorted, list_counters *counters)
{
    MTP_SHARED(int, begin, [ATTENTION_BUCKETS]); /* of each bucket in the list, the highest bucket first */
    static_assert(LIST_THREADS == ATTENTION_BUCKETS, "a thread counts one bucket");
    int before = 0;
    for (int b = (int)threadIdx.x + 1; b < ATTENTION_BUCKETS; b++) before += counters->histogram[b];
    begin[threadIdx.x] = before;
    __syncthreads();
    const int row = (int)(blockIdx.x * LIST_THREADS + threadIdx.x);
    if (row >= R || unsorted[row].num_rows == 0) return;
    const attention_tile tile = unsorted[row];
    const int bucket = bucket_of(tile);
    sorted[begin[bucket] + atomicAdd(&counters->cursor[bucket], 1)] = tile;
}

list_counters *carve(mtp__carver *carver, int64_t R, attention_tile **unsorted, attention_tile **sorted)
{
    *unsorted = (attention_tile *)mtp__carve(carver, R, sizeof(attention_tile));
    *sorted = (attention_tile *)mtp__carve(carver, R, sizeof(attention_tile));
    return (list_counters *)mtp__carve(carver, 1, sizeof(list_counters));
}

} // namespace

size_t attention_list_bytes(int64_t R)
{
    mtp__carver carver = {};
    attention_tile *unsorted, *sorted;
    carve(&carver, R, &unsorted, &sorted);
    return carver.used;
}

mtp_status attention_list_build(mtp_device *device, const char *op, const attention_problem *p, void *scratch,
                                attention_list *list)
{
    mtp__carver carver = {};
    carver.base = (char *)scratch;
    attention_tile *unsorted;
    list_counters *counters = carve(&carver, p->R, &unsorted, &list->tiles);
    list->count = &counters->count;
    list->next = &counters->next;
    const unsigned blocks = (unsigned)divide_up(p->R, LIST_THREADS);
    MTP_CUDA_TRY(op, cudaMemsetAsync(counters, 0, sizeof *counters, device->stream));
    MTP_CUDA_TRY(
        op, MTP_LAUNCH(list_tiles, blocks, LIST_THREADS, 0, device->stream, *p, unsorted, counters, device->fault));
    MTP_CUDA_TRY(
        op, MTP_LAUNCH(sort_tiles, blocks, LIST_THREADS, 0, device->stream, p->R, unsorted, list->tiles, counters));
    return MTP_OK;
}

} // namespace mtp
