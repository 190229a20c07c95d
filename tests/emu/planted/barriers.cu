/* Barriers and collectives that are not reached as they must be, and those that are missing. */
#include "planted.h"

static __global__ void some_threads(float *out)
{
    if (threadIdx.x < 7) __syncthreads();
    out[threadIdx.x] = 1.0f;
    __syncthreads();
}

static __global__ void two_branches(float *out)
{
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        out[threadIdx.x] = 1.0f;
        __syncthreads();
    }
}

static __global__ void half_a_warp(float *out)
{
    float x = 1.0f;
    if (threadIdx.x < 16)
        x = __shfl_xor_sync(0xffffffffu, x, 1);
    else
        __syncthreads();
    out[threadIdx.x] = x;
}

static __global__ void outside_of_mask(float *out)
{
    out[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 0);
}

static __global__ void two_collectives(float *out)
{
    if (threadIdx.x < 16)
        out[threadIdx.x] = __shfl_sync(0xffffffffu, 1.0f, 0);
    else
        out[threadIdx.x] = static_cast<float>(__ballot_sync(0xffffffffu, 1));
}

static __global__ void named_count(float *out)
{
    out[threadIdx.x] = 1.0f;
    emu::named_barrier(1, threadIdx.x < 32 ? 64 : 32, true, __FILE__, __LINE__);
}

static __global__ void no_barrier(float *out)
{
    MTP_SHARED(float, box, [64]);
    box[threadIdx.x] = static_cast<float>(threadIdx.x);
    out[threadIdx.x] = box[63 - threadIdx.x]; /* the missing barrier */
}

static __global__ void no_second_barrier(float *out)
{
    MTP_SHARED(float, box, [64]);
    float sum = 0.0f;
    for (int i = 0; i < 3; i++) {
        box[threadIdx.x] = static_cast<float>(i);
        __syncthreads();
        sum += box[63 - threadIdx.x];
    }
    out[threadIdx.x] = sum;
}

/* A shuffle does not order memory. */
static __global__ void no_syncwarp(float *out)
{
    MTP_SHARED(float, box, [32]);
    box[threadIdx.x] = 1.0f;
    const float x = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
    out[threadIdx.x] = box[31 - threadIdx.x] + x;
}

static __global__ void two_blocks(float *out)
{
    out[threadIdx.x] = static_cast<float>(blockIdx.x);
}

/* The last block takes what the first one left: right in natural order only. */
static __global__ void order_of_blocks(float *out)
{
    if (threadIdx.x != 0) return;
    if (blockIdx.x == gridDim.x - 1)
        out[0] = out[1] == 1.0f ? 0.0f : __int_as_float(0x7fffffff);
    else if (blockIdx.x == 0)
        out[1] = 1.0f;
}

template <class K>
static int run(K kernel, unsigned blocks, unsigned threads)
{
    float *out = zeros(64);
    MTP_LAUNCH(kernel, blocks, threads, 0, nullptr, out);
    return finish(out);
}

const Planted barrier_bugs[] = {
    {"some_threads", [] { return run(some_threads, 1, 64); }},
    {"two_branches", [] { return run(two_branches, 1, 64); }},
    {"half_a_warp", [] { return run(half_a_warp, 1, 32); }},
    {"outside_of_mask", [] { return run(outside_of_mask, 1, 32); }},
    {"two_collectives", [] { return run(two_collectives, 1, 32); }},
    {"named_count", [] { return run(named_count, 1, 64); }},
    {"no_barrier", [] { return run(no_barrier, 1, 64); }},
    {"no_second_barrier", [] { return run(no_second_barrier, 1, 64); }},
    {"no_syncwarp", [] { return run(no_syncwarp, 1, 32); }},
    {"two_blocks", [] { return run(two_blocks, 2, 32); }},
    {"order_of_blocks", [] { return run(order_of_blocks, 6, 32); }},
    {nullptr, nullptr},
};
