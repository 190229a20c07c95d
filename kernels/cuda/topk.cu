/* The centroids of a row: the k largest of its scores, ties by the lowest id. */
#include "cuda/cuda.h"

namespace mtp
{
namespace
{

enum { TOPK_WARPS = 4, DIGITS = 256 };

struct topk_rows {
    const float *scores;
    int64_t scores_row;
    int *selected;
    int64_t selected_row;
    int *unsorted; /* [R, k] */
    int R, C, k;
};

/* A number that orders as the score does: -0 as 0, NaN as -infinity. */
__device__ unsigned order_of(float score)
{
    if (!(score == score)) score = -INFINITY;
    const unsigned bits = __float_as_uint(score == 0.0f ? 0.0f : score);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The k-th largest order of a row, digit by digit from the top; *equal: how many of those that have it are taken. */
__device__ unsigned threshold_of(const topk_rows &a, const float *x, int *histogram, int *equal)
{
    const int lane = (int)threadIdx.x % WARP;
    unsigned prefix = 0, mask = 0;
    int needed = a.k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = lane; i < DIGITS; i += WARP) histogram[i] = 0;
        __syncwarp();
        for (int i = lane; i < a.C; i += WARP) {
            const unsigned order = order_of(x[i]);
            if ((order & mask) == prefix) atomicAdd(&histogram[order >> shift & 255u], 1);
        }
        __syncwarp();
        /* lane l has the digits [8 l, 8 l + 8); those of higher lanes come first */
        int own = 0;
        for (int i = 0; i < DIGITS / WARP; i++) own += histogram[lane * (DIGITS / WARP) + i];
        int above = own; /* of this lane and the higher ones */
        for (int offset = 1; offset < WARP; offset *= 2) {
            const int other = __shfl_down_sync(ALL_LANES, above, offset);
            if (lane + offset < WARP) above += other;
        }
        above -= own;
        int digit = -1, rest = 0;
        if (above < needed && above + own >= needed) {
            rest = needed - above;
            digit = (lane + 1) * (DIGITS / WARP) - 1;
            while (histogram[digit] < rest) rest -= histogram[digit--];
        }
        const int holder = __ffs((int)__ballot_sync(ALL_LANES, digit >= 0)) - 1;
        digit = __shfl_sync(ALL_LANES, digit, holder);
        needed = __shfl_sync(ALL_LANES, rest, holder);
        prefix |= (unsigned)digit << shift;
        mask |= 255u << shift;
        __syncwarp(); /* the histogram was read */
    }
    *equal = needed;
    return prefix;
}

/* The ids of the selected scores in the order of the ids. */
__device__ void collect(const topk_rows &a, const float *x, unsigned threshold, int equal, int *id)
{
    const int lane = (int)threadIdx.x % WARP;
    const unsigned below = (1u << lane) - 1;
    int taken = 0, ties = 0;
    for (int first = 0; first < a.C; first += WARP) {
        const unsigned order = first + lane < a.C ? order_of(x[first + lane]) : 0;
        const unsigned tied = __ballot_sync(ALL_LANES, first + lane < a.C && order == threshold);
        const bool take = order > threshold || ((tied >> lane & 1u) && ties + __popc(tied & below) < equal);
        const unsigned all = __ballot_sync(ALL_LANES, first + lane < a.C && take);
        if (all >> lane & 1u) id[taken + __popc(all & below)] = first + lane;
        taken += __popc(all);
        ties += __popc(tied);
    }
}

/* A warp has a row: the threshold, the ids above it, and the place of each by counting those that come before. */
__global__ void __launch_bounds__(TOPK_WARPS *WARP, 8) topk_kernel(topk_rows a)
{
    MTP_SHARED(int, histogram, [TOPK_WARPS][DIGITS]);
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    const int64_t row = (int64_t)blockIdx.x * TOPK_WARPS + warp;
    if (row >= a.R) return;
    const float *x = a.scores + row * a.scores_row;
    int *id = a.unsorted + row * a.k;
    int equal;
    const unsigned threshold = threshold_of(a, x, histogram[warp], &equal);
    collect(a, x, threshold, equal, id);
    __syncwarp();
    for (int i = lane; i < a.k; i += WARP) {
        const unsigned own = order_of(x[id[i]]);
        int rank = 0;
        for (int j = 0; j < a.k; j++) {
            const unsigned other = order_of(x[id[j]]);
            rank += other > own || (other == own && j < i);
        }
        a.selected[row * a.selected_row + rank] = id[i];
    }
}

mtp_status topk(mtp_device *device, const mtp_topk_args *a)
{
    const char *op = "topk";
    MTP__CHECK(op, scores, MTP_F32, -1, -1);
    const int64_t R = a->scores.shape[0], C = a->scores.shape[1];
    MTP__CHECK(op, selected, MTP_I32, R, -1);
    const int64_t k = a->selected.shape[1];
    if (k > C || C > INT32_MAX / 2 || R > INT32_MAX)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: selected asks for %lld of the %lld scores of a row", op, (long long)k,
                        (long long)C);
    MTP_TRY(mtp__check_scratch(op, &a->scratch, mtp__cuda_topk_scratch(device, a)));
    topk_rows t = {};
    t.scores = (const float *)a->scores.data;
    t.scores_row = a->scores.stride[0];
    t.selected = (int *)a->selected.data;
    t.selected_row = a->selected.stride[0];
    t.unsorted = (int *)a->scratch.data;
    t.R = (int)R;
    t.C = (int)C;
    t.k = (int)k;
    const unsigned blocks = (unsigned)divide_up(R, TOPK_WARPS);
    MTP_CUDA_TRY(op, MTP_LAUNCH(topk_kernel, blocks, TOPK_WARPS * WARP, 0, device->stream, t));
    return MTP_OK;
}

} // namespace
} // namespace mtp

mtp_status mtp__cuda_topk(mtp_device *device, const mtp_topk_args *a)
{
    return mtp::topk(device, a);
}

size_t mtp__cuda_topk_scratch(const mtp_device *, const mtp_topk_args *a)
{
    mtp__carver carver = {};
    mtp__carve(&carver, a->scores.shape[0] * a->selected.shape[1], sizeof(int));
    return carver.used;
}
