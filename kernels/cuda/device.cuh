/* The one header that every kernel file includes: the same .cu source is compiled by nvcc for the device, and by the
 * host compiler against the emulator (tests/emu, MTP_EMULATOR).
 *
 * Rules that keep kernels emulatable: launches go through MTP_LAUNCH, shared memory through MTP_SHARED and
 * MTP_DYNAMIC_SHARED, inline PTX stands in ptx.cuh only; nothing assumes that the lanes of a warp run in lockstep;
 * collectives name the lanes that take part, and all of those reach them; no whole kernel is guarded by an
 * architecture. */
#ifndef MTP_KERNELS_CUDA_DEVICE_CUH
#define MTP_KERNELS_CUDA_DEVICE_CUH

#ifdef MTP_EMULATOR
#include "emu/device.h" /* CUDA's names on the host, and the three macros below */
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
/* Static shared memory: MTP_SHARED(float, tile, [32][33]); */
#define MTP_SHARED(type, name, ...) __shared__ type name __VA_ARGS__
/* MTP_LAUNCH(kernel, grid, block, bytes of dynamic shared memory, stream, arguments...): a cudaError_t. A kernel
 * template with more than one parameter is put in parentheses. */
#define MTP_LAUNCH(kernel, grid, block, shared, stream, ...) \
    (kernel<<<(grid), (block), (shared), (stream)>>>(__VA_ARGS__), cudaGetLastError())
/* Declares `type *name`: the dynamic shared memory of the block, aligned to 128 bytes. */
#define MTP_DYNAMIC_SHARED(type, name)                                \
    extern __shared__ __align__(128) unsigned char mtp_shared_raw_[]; \
    type *name = reinterpret_cast<type *>(mtp_shared_raw_)
#endif

#include <stdint.h>

namespace mtp
{

using bf16 = __nv_bfloat16;
using f16 = __half;

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

/* ---- real-valued elements: fp32, bf16, f16 ----------------------------------------------------------------------- */

__device__ __forceinline__ float to_float(float x)
{
    return x;
}
__device__ __forceinline__ float to_float(bf16 x)
{
    return __bfloat162float(x);
}
__device__ __forceinline__ float to_float(f16 x)
{
    return __half2float(x);
}

/* Rounds to nearest even. */
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x)
{
    return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x)
{
    return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float x)
{
    return __float2half_rn(x);
}

/* N neighbouring elements as fp32, N = 1, 4 or 8, loaded and stored 16 bytes at a time (less where they have less).
 * With more than one the address is a multiple of such an access. */
template <int N>
struct pack {
    float v[N];
};

/* Elements of type T of one access of a pack of N. */
template <int N, typename T>
constexpr int ACCESS = N *(int)sizeof(T) > 16 ? 16 / (int)sizeof(T) : N;

template <int N, typename T>
struct alignas(N * sizeof(T)) neighbours {
    T v[N];
};

template <int N, typename T>
__device__ __forceinline__ pack<N> load(const T *p)
{
    constexpr int M = ACCESS<N, T>;
    pack<N> out;
#pragma unroll
    for (int i = 0; i < N; i += M) {
        const neighbours<M, T> x = *reinterpret_cast<const neighbours<M, T> *>(p + i);
#pragma unroll
        for (int j = 0; j < M; j++) out.v[i + j] = to_float(x.v[j]);
    }
    return out;
}

template <int N, typename T>
__device__ __forceinline__ void store(T *p, const pack<N> &x)
{
    constexpr int M = ACCESS<N, T>;
#pragma unroll
    for (int i = 0; i < N; i += M) {
        neighbours<M, T> y;
#pragma unroll
        for (int j = 0; j < M; j++) y.v[j] = from_float<T>(x.v[i + j]);
        *reinterpret_cast<neighbours<M, T> *>(p + i) = y;
    }
}

/* ---- reductions: a fixed order, the result in every thread ------------------------------------------------------- */

template <typename T>
__device__ __forceinline__ T warp_sum(T x)
{
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x)
{
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

/* For blocks of a multiple of 32 threads, all of which call; `shared` holds 32 elements, free again on return. */
template <typename T>
__device__ __forceinline__ T block_sum(T x, T *shared)
{
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    x = warp_sum(x);
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? shared[lane] : T(0));
    __syncthreads();
    return x;
}

__device__ __forceinline__ float block_max(float x, float *shared)
{
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    x = warp_max(x);
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = warp_max(shared[lane < warps ? lane : 0]);
    __syncthreads();
    return x;
}

/* ---- indices that come from data --------------------------------------------------------------------------------- */

/* Which op met an index out of its range. The kernel skips the row and notes the first one; the next download reports
 * it (an op does not wait for the device, so it cannot say so itself). */
enum fault_op {
    FAULT_NONE,
    FAULT_EMBED,
    FAULT_GATHER,
    FAULT_SCATTER,
    FAULT_POSITION,
    FAULT_RANGE,
    FAULT_TARGET,
    FAULT_SELECTED,
    FAULT_ORDER,
    FAULT_TALLY
};
struct fault {
    int op;    /* fault_op */
    int index; /* the value */
    int limit; /* it must be in [0, limit) */
    int at;    /* where it stands in its view; -1: not said */
};

/* Is index, which stands at `at` of its view, in [0, limit)? If not, say so in `fault`. */
__device__ __forceinline__ bool in_range(fault *fault, fault_op op, int index, int limit, int at = -1)
{
    if (index >= 0 && index < limit) return true;
    if (atomicCAS(&fault->op, (int)FAULT_NONE, (int)op) == (int)FAULT_NONE) {
        fault->index = index;
        fault->limit = limit;
        fault->at = at;
    }
    return false;
}

/* The slot of a head's target (ops.h), a row of e; -1, and noted, when there is none. Without `order` slots are tokens.
 */
__device__ __forceinline__ int target_slot(fault *fault, const int *order, const int *slot_of, int target, int V,
                                           int row)
{
    if (!in_range(fault, FAULT_TARGET, target, V, row)) return -1;
    if (!order) return target;
    const int slot = slot_of[target];
    if (slot >= 0 && slot < V && order[slot] == target) return slot;
    in_range(fault, FAULT_ORDER, slot, 0, target);
    return -1;
}

} // namespace mtp

#endif
