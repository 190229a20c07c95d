/* The counting sort of (row, slot) pairs by centroid, on the device. It is stable, because the gradient of a centroid's
 * tokens adds up its pairs in their order: parts of PART_ROWS rows are counted apart, a part's pairs come after those
 * of the parts before it, and a warp places the rows of a part one after the other. A row names a centroid at most
 * once, so the counters that its lanes move are different ones. */
#include "cuda/centroid.h"

namespace mtp
{
namespace
{

enum { THREADS = 256, SCAN_THREADS = 512 };

/* The centroid of every slot into place, and the counts of the parts. A warp has a row. */
__global__ void __launch_bounds__(THREADS, 4) name_centroids(grouped g)
{
    const int row = (int)blockIdx.x * (THREADS / WARP) + (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    if (row >= g.R) return;
    const int slot = g.target ? target_slot(g.fault, g.order, g.slot_of, g.target[row], g.V, row) : -1;
    const int own = slot < 0 ? -1 : slot / g.P;
    int *place = g.place + (int64_t)row * g.slots, *count = g.count + (int64_t)(row / PART_ROWS) * g.C;
    bool found = false;
    for (int s = lane; s < g.k; s += WARP) {
        const int centroid = g.selected[row * g.selected_row + s];
        const bool valid = in_range(g.fault, FAULT_SELECTED, centroid, g.C, row);
        place[s] = valid ? centroid : -1;
        if (valid) atomicAdd(&count[centroid], 1);
        found = found || centroid == own;
    }
    found = __any_sync(ALL_LANES, found);
    if (lane) return;
    g.own[row] = slot;
    place[g.k] = found ? -1 : own;
    if (!found && own >= 0) atomicAdd(&count[own], 1);
}

/* Counts of the parts into places within the centroid. begin[c] becomes the centroid's number of pairs, of which
 * scan_centroids makes its first pair. */
__global__ void __launch_bounds__(THREADS, 4) scan_parts(grouped g)
{
    const int c = (int)(blockIdx.x * THREADS + threadIdx.x);
    if (c >= g.C) return;
    int sum = 0;
#pragma unroll 8
    for (int part = 0; part < g.parts; part++) {
        int *count = &g.count[(int64_t)part * g.C + c];
        const int n = *count;
        *count = sum;
        sum += n;
    }
    g.begin[c] = sum;
}

/* Exclusive prefix sum over the threads of a block of SCAN_THREADS; *total is the sum. */
__device__ int scan_block(int x, int *shared, int *total)
{
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    int sum = x;
    for (int offset = 1; offset < WARP; offset *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, sum, offset);
        if (lane >= offset) sum += other;
    }
    if (lane == WARP - 1) shared[warp] = sum;
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < SCAN_THREADS / WARP; w++) {
        before += w < warp ? shared[w] : 0;
        all += shared[w];
    }
    __syncthreads();
    *total = all;
    return before + sum - x;
}

/* Numbers of pairs into first pairs, first tiles, first segments and first parts. One block. */
__global__ void __launch_bounds__(SCAN_THREADS) scan_centroids(grouped g, int tile_rows)
{
    MTP_SHARED(int, shared, [SCAN_THREADS / WARP]);
    int *const begins[] = {g.begin, g.tile_begin, g.segment_begin, g.part_begin};
    int sums[4] = {0, 0, 0, 0};
    for (int first = 0; first < g.C; first += SCAN_THREADS) {
        const int c = first + (int)threadIdx.x;
        const int pairs = c < g.C ? g.begin[c] : 0, segments = (pairs + SEGMENT_PAIRS - 1) / SEGMENT_PAIRS;
        const int numbers[] = {pairs, (pairs + tile_rows - 1) / tile_rows, c < g.C ? max(segments, 1) : 0,
                               segments > 1 ? segments : 0};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int all;
            const int before = scan_block(numbers[i], shared, &all);
            if (c < g.C) begins[i][c] = sums[i] + before;
            sums[i] += all;
        }
    }
    if (threadIdx.x == 0)
#pragma unroll
        for (int i = 0; i < 4; i++) begins[i][g.C] = sums[i];
}

/* The centroids of the tiles and of the segments. */
__global__ void __launch_bounds__(THREADS, 4) list_work(grouped g)
{
    const int c = (int)(blockIdx.x * THREADS + threadIdx.x);
    if (c >= g.C) return;
    for (int tile = g.tile_begin[c]; tile < g.tile_begin[c + 1]; tile++) g.tile_of[tile] = c;
    for (int segment = g.segment_begin[c]; segment < g.segment_begin[c + 1]; segment++) g.segment_of[segment] = c;
}

/* A warp has a part. */
__global__ void __launch_bounds__(WARP) place_pairs(grouped g)
{
    const int part = (int)blockIdx.x;
    const int end = min(g.R, (part + 1) * PART_ROWS);
    int *next = g.count + (int64_t)part * g.C;
    for (int row = part * PART_ROWS; row < end; row++) {
        int *place = g.place + (int64_t)row * g.slots;
        for (int s = (int)threadIdx.x; s < g.slots; s += WARP) {
            const int centroid = place[s];
            if (centroid < 0) continue;
            const int pair = g.begin[centroid] + atomicAdd(&next[centroid], 1);
            place[s] = pair;
            g.row_of[pair] = row;
            g.number_of[pair] = s;
        }
        __syncwarp();
    }
}

} // namespace

mtp_status grouped_sort(mtp_device *device, const char *op, const grouped &g, int tile_rows)
{
    const unsigned row_blocks = (unsigned)divide_up(g.R, THREADS / WARP);
    const unsigned centroid_blocks = (unsigned)divide_up(g.C, THREADS);
    const size_t bytes = (size_t)g.parts * (size_t)g.C * sizeof(int);
    MTP_CUDA_TRY(op, cudaMemsetAsync(g.count, 0, bytes, device->stream));
    MTP_CUDA_TRY(op, MTP_LAUNCH(name_centroids, row_blocks, THREADS, 0, device->stream, g));
    MTP_CUDA_TRY(op, MTP_LAUNCH(scan_parts, centroid_blocks, THREADS, 0, device->stream, g));
    MTP_CUDA_TRY(op, MTP_LAUNCH(scan_centroids, 1, SCAN_THREADS, 0, device->stream, g, tile_rows));
    MTP_CUDA_TRY(op, MTP_LAUNCH(list_work, centroid_blocks, THREADS, 0, device->stream, g));
    MTP_CUDA_TRY(op, MTP_LAUNCH(place_pairs, (unsigned)g.parts, WARP, 0, device->stream, g));
    return MTP_OK;
}

} // namespace mtp
