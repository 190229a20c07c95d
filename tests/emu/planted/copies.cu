/* cp.async whose wait is missing or counts wrongly, and copies of streams that nobody waited for. */
#include "planted.h"

/* PENDING 1 waits for all but the last group, which is the one that is read. */
template <int PENDING, bool WAIT>
static __global__ void staged(float *out, const float *in)
{
    MTP_SHARED(float4, box, [32]);
    mtp::copy_async(&box[threadIdx.x], in + 4 * threadIdx.x, true);
    mtp::copy_commit();
    if (WAIT) mtp::copy_wait<PENDING>();
    __syncthreads();
    out[threadIdx.x] = box[31 - threadIdx.x].x;
}

static __global__ void beyond_shared(float *out, const float *in)
{
    MTP_SHARED(float4, box, [32]);
    mtp::copy_async(&box[threadIdx.x + 1], in + 4 * threadIdx.x, true);
    mtp::copy_commit();
    mtp::copy_wait<0>();
    out[threadIdx.x] = box[threadIdx.x].x;
}

static __global__ void no_barrier_after(float *out, const float *in)
{
    MTP_SHARED(float4, box, [32]);
    mtp::copy_async(&box[threadIdx.x], in + 4 * threadIdx.x, true);
    mtp::copy_commit();
    mtp::copy_wait<0>();
    out[threadIdx.x] = box[31 - threadIdx.x].x;
}

static __global__ void set(float *out, float value)
{
    out[threadIdx.x] = value;
}

template <class K>
static int run(K kernel)
{
    float *out = zeros(32), *in = zeros(128);
    MTP_LAUNCH(kernel, 1, 32, 0, nullptr, out, static_cast<const float *>(in));
    const int bad = finish(out);
    cudaFree(in);
    return bad;
}

/* Pinned memory that is read before anybody waited for the copy into it. */
static int unawaited_copy()
{
    float *out = zeros(32), *host = nullptr;
    cudaStream_t stream;
    if (cudaMallocHost(reinterpret_cast<void **>(&host), 32 * sizeof(float)) != cudaSuccess) return 0;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return 0;
    host[0] = 0.0f;
    MTP_LAUNCH(set, 1, 32, 0, stream, out, 1.0f);
    cudaMemcpyAsync(host, out, 32 * sizeof(float), cudaMemcpyDeviceToHost, stream);
    const float early = host[0];
    cudaStreamDestroy(stream);
    cudaFreeHost(host);
    cudaFree(out);
    if (early == early) return 0;
    fprintf(stderr, "planted: the result is NaN\n");
    return 1;
}

/* A stream that reads what another one writes, without an event between them. */
static int unordered_streams()
{
    float *data = nullptr, *out = zeros(32);
    cudaStream_t first, second;
    if (cudaMalloc(reinterpret_cast<void **>(&data), 32 * sizeof(float)) != cudaSuccess) return 0;
    if (cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking) != cudaSuccess) return 0;
    if (cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking) != cudaSuccess) return 0;
    MTP_LAUNCH(set, 1, 32, 0, first, data, 1.0f);
    cudaMemcpyAsync(out, data, 32 * sizeof(float), cudaMemcpyDeviceToDevice, second);
    cudaStreamSynchronize(second);
    const int bad = finish(out);
    cudaStreamDestroy(first);
    cudaStreamDestroy(second);
    cudaFree(data);
    return bad;
}

const Planted copy_bugs[] = {
    {"no_wait", [] { return run(staged<0, false>); }},
    {"wrong_wait", [] { return run(staged<1, true>); }},
    {"copy_beyond_shared", [] { return run(beyond_shared); }},
    {"no_barrier_after_wait", [] { return run(no_barrier_after); }},
    {"unawaited_copy", unawaited_copy},
    {"unordered_streams", unordered_streams},
    {nullptr, nullptr},
};
