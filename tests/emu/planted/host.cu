/* Host and device memory mixed up, memory that is not given back, and graphs whose memory is not what it was. */
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

/* A graph of set(out, in) with `in` copied from pinned memory before. */
static cudaGraphExec_t graph_of(cudaStream_t stream, float *out, float *in, const float *pinned)
{
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    cudaMemcpyAsync(in, pinned, 32 * sizeof(float), cudaMemcpyHostToDevice, stream);
    MTP_LAUNCH(set, 1, 32, 0, stream, out, static_cast<const float *>(in));
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    return exec;
}

/* The host fills the block of the next launch while this one's copy has not happened. */
static int refilled_too_early()
{
    float *out = zeros(32), *in = zeros(32), *pinned = nullptr;
    cudaStream_t stream;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaMallocHost(reinterpret_cast<void **>(&pinned), 32 * sizeof(float));
    for (int i = 0; i < 32; i++) pinned[i] = 1.0f;
    const cudaGraphExec_t exec = graph_of(stream, out, in, pinned);
    cudaGraphLaunch(exec, stream);
    for (int i = 0; i < 32; i++) pinned[i] = __builtin_nanf("");
    cudaStreamSynchronize(stream);
    cudaGraphExecDestroy(exec);
    cudaFreeHost(pinned);
    cudaFree(in);
    return finish(out);
}

/* Memory that a graph reads is freed, as when a buffer grows, and the graph is launched once more. */
static int freed_in_a_graph()
{
    float *out = zeros(32), *in = zeros(32), *pinned = nullptr;
    cudaStream_t stream;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaMallocHost(reinterpret_cast<void **>(&pinned), 32 * sizeof(float));
    const cudaGraphExec_t exec = graph_of(stream, out, in, pinned);
    cudaFree(in);
    cudaGraphLaunch(exec, stream);
    cudaStreamSynchronize(stream);
    return finish(out);
}

const Planted host_bugs[] = {
    {"leak", leak},
    {"host_argument", host_argument},
    {"host_in_struct", host_in_struct},
    {"freed_argument", freed_argument},
    {"host_reads", host_reads},
    {"copy_behind_the_end", copy_behind_the_end},
    {"refilled_too_early", refilled_too_early},
    {"freed_in_a_graph", freed_in_a_graph},
    {nullptr, nullptr},
};
