/* Host and device memory mixed up, and memory that is not given back. */
#include "planted.h"

static __global__ void set(float *out, const float *in)
{
    out[threadIdx.x] = in[threadIdx.x];
}

struct pair {
    int count;
    const float *in;
};

static __global__ void set_by_struct(float *out, pair p)
{
    out[threadIdx.x] = p.in[threadIdx.x];
}

static int leak()
{
    return zeros(1000) == nullptr;
}

static int host_argument()
{
    float *out = zeros(32);
    static const float in[32] = {};
    MTP_LAUNCH(set, 1, 32, 0, nullptr, out, in);
    return finish(out);
}

static int host_in_struct()
{
    float *out = zeros(32);
    static const float in[32] = {};
    MTP_LAUNCH(set_by_struct, 1, 32, 0, nullptr, out, (pair{32, in}));
    return finish(out);
}

static int freed_argument()
{
    float *out = zeros(32), *in = zeros(32);
    cudaFree(in);
    MTP_LAUNCH(set, 1, 32, 0, nullptr, out, static_cast<const float *>(in));
    return finish(out);
}

static int host_reads()
{
    volatile float *data = zeros(32);
    return data[5] != 0.0f;
}

static int copy_behind_the_end()
{
    float *data = zeros(32), host[64] = {};
    cudaMemcpy(data, host, sizeof host, cudaMemcpyHostToDevice);
    return finish(data);
}

const Planted host_bugs[] = {
    {"leak", leak},
    {"host_argument", host_argument},
    {"host_in_struct", host_in_struct},
    {"freed_argument", freed_argument},
    {"host_reads", host_reads},
    {"copy_behind_the_end", copy_behind_the_end},
    {nullptr, nullptr},
};
