/* Shared and device memory: out of bounds, misaligned, never written, gone. */
#include "planted.h"

static __global__ void static_overrun(float *out, int at)
{
    MTP_SHARED(float, box, [32]);
    box[static_cast<int>(threadIdx.x) + at] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = box[31 - threadIdx.x];
}

static __global__ void dynamic_overrun(float *out, int at)
{
    MTP_DYNAMIC_SHARED(float, box);
    box[threadIdx.x] = 0.0f;
    __syncthreads();
    if (threadIdx.x == 3) box[at] = 1.0f;
    out[threadIdx.x] = box[threadIdx.x];
}

static __global__ void far_overrun(float *out)
{
    MTP_DYNAMIC_SHARED(float, box);
    out[threadIdx.x] = box[threadIdx.x + 500];
}

static __global__ void never_written(float *out)
{
    MTP_SHARED(float, box, [32]);
    if (threadIdx.x > 0) box[threadIdx.x] = 1.0f;
    __syncthreads();
    float sum = 0.0f;
    for (float x : box) sum += x;
    out[threadIdx.x] = sum;
}

static __global__ void misaligned_load(float *out)
{
    const float4 x = __ldg(reinterpret_cast<const float4 *>(out + 1));
    out[0] = x.x;
}

static __global__ void misaligned_store(float *out)
{
    mtp::store_16(out + 2, make_uint4(1, 2, 3, 4));
}

static __global__ void misaligned_plain(float *out)
{
    float4 *vectors = reinterpret_cast<float4 *>(out + 1);
    vectors[threadIdx.x % 8] = vectors[7];
}

static __global__ void misaligned_shared(float *out)
{
    MTP_SHARED(float, box, [80]);
    unsigned x[4];
    for (unsigned i = threadIdx.x; i < 80; i += 32) box[i] = 0.0f;
    __syncthreads();
    mtp::load_matrices(x, box + 1);
    out[threadIdx.x] = static_cast<float>(x[0]);
}

static __global__ void behind_the_end(float *out)
{
    out[threadIdx.x + 1024] = 1.0f;
}

static __global__ void just_behind_the_end(float *out)
{
    out[threadIdx.x + 1] = 1.0f;
}

static __global__ void through_a_table(float **table)
{
    table[0][threadIdx.x] = 1.0f;
}

static __global__ void large_locals(float *out)
{
    volatile char local[300 * 1024];
    for (int i = 0; i < static_cast<int>(sizeof local); i += 512) local[i] = 1;
    out[threadIdx.x] = local[512];
}

static __global__ void too_much_static(float *out)
{
    MTP_SHARED(float, box, [49 * 256]);
    box[threadIdx.x] = 1.0f;
    out[threadIdx.x] = box[threadIdx.x];
}

template <class K, class... A>
static int run(K kernel, size_t shared, A... a)
{
    float *out = zeros(64);
    MTP_LAUNCH(kernel, 1, 32, shared, nullptr, out, a...);
    return finish(out);
}

static int freed_in_a_table()
{
    float *gone = zeros(64), **table = nullptr;
    if (cudaMalloc(reinterpret_cast<void **>(&table), sizeof *table) != cudaSuccess) return 0;
    cudaMemcpy(table, &gone, sizeof gone, cudaMemcpyHostToDevice);
    cudaFree(gone);
    MTP_LAUNCH(through_a_table, 1, 32, 0, nullptr, table);
    cudaDeviceSynchronize();
    return 0;
}

const Planted memory_bugs[] = {
    {"static_overrun", [] { return run(static_overrun, 0, 1); }},
    {"static_underrun", [] { return run(static_overrun, 0, -1); }},
    {"dynamic_overrun", [] { return run(dynamic_overrun, 33 * sizeof(float), 33); }},
    {"dynamic_underrun", [] { return run(dynamic_overrun, 33 * sizeof(float), -1); }},
    {"far_overrun", [] { return run(far_overrun, 32 * sizeof(float)); }},
    {"never_written", [] { return run(never_written, 0); }},
    {"misaligned_load", [] { return run(misaligned_load, 0); }},
    {"misaligned_store", [] { return run(misaligned_store, 0); }},
    {"misaligned_plain", [] { return run(misaligned_plain, 0); }},
    {"misaligned_shared", [] { return run(misaligned_shared, 0); }},
    {"behind_the_end", [] { return run(behind_the_end, 0); }},
    {"just_behind_the_end",
     [] {
         float *out = zeros(32);
         MTP_LAUNCH(just_behind_the_end, 1, 32, 0, nullptr, out);
         return finish(out);
     }},
    {"freed_in_a_table", freed_in_a_table},
    {"large_locals", [] { return run(large_locals, 0); }},
    {"too_much_static", [] { return run(too_much_static, 0); }},
    {nullptr, nullptr},
};
