/* Protects: capture and replay of graphs by the runtime API: what a graph does when, and what a capture forbids. */
#include "emu/test_kernels.h"
#include "emu/testing.h"

#include <functional>
#include <thread>

/* Two streams, forked and joined by events; replayed, it reads what is in memory then. */
static void replay(void **)
{
    const cudaStream_t stream = new_stream(), side = new_stream();
    const Device<float> sum(std::vector<float>{0, 0, 0, 0}), in(std::vector<float>{1, 2, 3, 4}), twice(4);
    const Pinned out(4);
    cudaEvent_t fork, join;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaStreamCaptureStatus status;
    assert_cuda(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    assert_cuda(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    assert_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    assert_cuda(cudaStreamIsCapturing(stream, &status));
    assert_int_equal(status, cudaStreamCaptureStatusActive);
    assert_cuda(cudaEventRecord(fork, stream));
    assert_cuda(cudaStreamWaitEvent(side, fork, 0));
    assert_cuda(cudaMemcpyAsync(twice.get(), in.get(), 16, cudaMemcpyDeviceToDevice, side));
    assert_cuda(MTP_LAUNCH(add, 1, 32, 0, side, twice.get(), in.get(), 4));
    assert_cuda(cudaEventRecord(join, side));
    assert_cuda(cudaStreamWaitEvent(stream, join, 0));
    assert_cuda(MTP_LAUNCH(add, 1, 32, 0, stream, sum.get(), twice.get(), 4));
    assert_cuda(cudaMemcpyAsync(out.at, sum.get(), 16, cudaMemcpyDeviceToHost, stream));
    assert_cuda(cudaStreamEndCapture(stream, &graph));
    assert_true(sum.read()[1] == 0.0f); /* nothing has run */
    size_t count = 0;
    assert_cuda(cudaGraphGetNodes(graph, nullptr, &count));
    assert_int_equal(count, 4);
    std::vector<cudaGraphNode_t> nodes(count);
    assert_cuda(cudaGraphGetNodes(graph, nodes.data(), &count));
    cudaGraphNodeType type;
    assert_cuda(cudaGraphNodeGetType(nodes[0], &type));
    assert_int_equal(type, cudaGraphNodeTypeMemcpy);
    assert_cuda(cudaGraphNodeGetType(nodes[2], &type));
    assert_int_equal(type, cudaGraphNodeTypeKernel);
    assert_cuda(cudaGraphInstantiate(&exec, graph, 0));
    assert_cuda(cudaGraphDestroy(graph));
    for (int i = 0; i < 3; i++) assert_cuda(cudaGraphLaunch(exec, stream));
    assert_cuda(cudaStreamSynchronize(stream));
    for (int i = 0; i < 4; i++) assert_true(out.at[i] == 6.0f * static_cast<float>(i + 1));
    assert_cuda(MTP_LAUNCH(set, 1, 32, 0, stream, in.get(), 1.0f, 4));
    assert_cuda(cudaGraphLaunch(exec, stream));
    assert_cuda(cudaStreamSynchronize(stream));
    for (int i = 0; i < 4; i++) assert_true(out.at[i] == 6.0f * static_cast<float>(i + 1) + 2.0f);
    assert_cuda(cudaGraphExecDestroy(exec));
    assert_int_equal(cudaGraphLaunch(exec, stream), cudaErrorInvalidValue);
    assert_cuda(cudaEventDestroy(fork));
    assert_cuda(cudaEventDestroy(join));
    assert_cuda(cudaStreamDestroy(stream));
    assert_cuda(cudaStreamDestroy(side));
    cudaGetLastError();
}

/* What waits, allocates or leaves the capture breaks it. */
static void broken_captures(void **)
{
    const cudaStream_t stream = new_stream(), other = new_stream();
    const Device<float> data(4);
    cudaEvent_t event;
    cudaGraph_t graph;
    void *memory = nullptr;
    assert_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    assert_int_equal(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal), cudaErrorStreamCaptureUnsupported);

    assert_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    assert_int_equal(cudaMalloc(&memory, 8), cudaErrorStreamCaptureUnsupported);
    assert_int_equal(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
    assert_int_equal(MTP_LAUNCH(set, 1, 4, 0, stream, data.get(), 1.0f, 4), cudaErrorStreamCaptureInvalidated);
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);

    assert_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal)); /* a fork that is not joined */
    assert_cuda(cudaEventRecord(event, stream));
    assert_cuda(cudaStreamWaitEvent(other, event, 0));
    assert_cuda(MTP_LAUNCH(set, 1, 4, 0, other, data.get(), 1.0f, 4));
    assert_int_equal(cudaStreamEndCapture(other, &graph), cudaErrorStreamCaptureUnmatched);
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureUnjoined);

    assert_cuda(cudaEventRecord(event, other)); /* an event from outside */
    assert_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    assert_int_equal(cudaStreamWaitEvent(stream, event, 0), cudaErrorStreamCaptureIsolation);
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);

    assert_cuda(MTP_LAUNCH(set, 1, 4, 0, stream, data.get(), 2.0f, 4)); /* and all is as before */
    assert_cuda(cudaStreamSynchronize(stream));
    assert_true(data.read()[0] == 2.0f);
    assert_cuda(cudaEventDestroy(event));
    assert_cuda(cudaStreamDestroy(stream));
    assert_cuda(cudaStreamDestroy(other));
    cudaGetLastError();
}

/* Host memory of copies is read and written at every launch; results are undefined until the device gets there. */
static void copies_at_launch(void **)
{
    const cudaStream_t stream = new_stream();
    const Device<float> data(2);
    const Pinned in(2), out(2);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    assert_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    assert_cuda(cudaMemsetAsync(data.get(), 0, 8, stream));
    assert_cuda(cudaMemcpyAsync(data.get(), in.at, 4, cudaMemcpyHostToDevice, stream));
    assert_cuda(cudaMemcpyAsync(out.at, data.get(), 8, cudaMemcpyDeviceToHost, stream));
    assert_cuda(cudaStreamEndCapture(stream, &graph));
    assert_cuda(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 2; i++) {
        out.at[1] = 7.0f;
        in.at[0] = static_cast<float>(i);
        assert_cuda(cudaGraphLaunch(exec, stream));
        assert_true(out.at[1] != out.at[1]);
        assert_cuda(cudaStreamSynchronize(stream));
        assert_true(out.at[0] == static_cast<float>(i) && out.at[1] == 0.0f);
    }
    assert_cuda(cudaGraphExecDestroy(exec));
    assert_cuda(cudaGraphDestroy(graph));
    assert_cuda(cudaStreamDestroy(stream));
}

/* Calls that are not safe while a thread captures, and each of them breaks its capture. */
static void forbidden(void **)
{
    const cudaStream_t stream = new_stream(), other = new_stream();
    const Device<float> data(4);
    const Pinned pinned(4);
    float pageable[4] = {};
    cudaEvent_t event;
    void *memory = nullptr;
    assert_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    assert_cuda(cudaEventRecord(event, other));
    const std::function<cudaError_t()> calls[] = {
        [&] { return cudaMalloc(&memory, 8); },
        [&] { return cudaFree(data.get()); },
        [&] { return cudaMallocHost(&memory, 8); },
        [&] { return cudaFreeHost(pinned.at); },
        [&] { return cudaHostRegister(pageable, sizeof pageable, 0); },
        [&] { return cudaMemcpy(data.get(), pageable, 4, cudaMemcpyHostToDevice); },
        [&] { return cudaMemset(data.get(), 0, 4); },
        [&] { return cudaStreamSynchronize(other); },
        [&] { return cudaStreamQuery(other); },
        [&] { return cudaEventSynchronize(event); },
        [&] { return cudaEventQuery(event); },
        [&] { return cudaDeviceSynchronize(); },
    };
    cudaGraph_t graph;
    for (const auto &call : calls) {
        assert_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        assert_int_equal(call(), cudaErrorStreamCaptureUnsupported);
        cudaStreamCaptureStatus status;
        assert_cuda(cudaStreamIsCapturing(stream, &status));
        assert_int_equal(status, cudaStreamCaptureStatusInvalidated);
        assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
        assert_null(graph);
    }
    cudaGetLastError();
    assert_cuda(cudaEventDestroy(event));
    assert_cuda(cudaStreamDestroy(stream));
    assert_cuda(cudaStreamDestroy(other));
}

/* Whom a capture concerns: its thread, all threads, or nobody. */
static void modes(void **)
{
    const struct {
        cudaStreamCaptureMode mode;
        cudaError_t own, others;
    } cases[] = {{cudaStreamCaptureModeThreadLocal, cudaErrorStreamCaptureUnsupported, cudaSuccess},
                 {cudaStreamCaptureModeGlobal, cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureUnsupported},
                 {cudaStreamCaptureModeRelaxed, cudaSuccess, cudaSuccess}};
    const cudaStream_t stream = new_stream(), other = new_stream();
    for (const auto &one : cases) {
        cudaGraph_t graph = nullptr;
        cudaError_t there = cudaSuccess, end = cudaSuccess;
        assert_cuda(cudaStreamBeginCapture(stream, one.mode));
        std::thread([&] {
            there = cudaStreamSynchronize(other);
            end = one.mode == cudaStreamCaptureModeThreadLocal ? cudaStreamEndCapture(stream, &graph)
                                                               : cudaErrorStreamCaptureWrongThread;
        }).join();
        assert_int_equal(there, one.others);
        assert_int_equal(end, cudaErrorStreamCaptureWrongThread);
        assert_int_equal(cudaStreamSynchronize(other), one.own);
        const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
        assert_int_equal(ended, one.own == cudaSuccess ? cudaSuccess : cudaErrorStreamCaptureInvalidated);
        if (graph) assert_cuda(cudaGraphDestroy(graph));
    }
    cudaGetLastError();
    assert_cuda(cudaStreamDestroy(stream));
    assert_cuda(cudaStreamDestroy(other));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(replay),    cmocka_unit_test(broken_captures), cmocka_unit_test(copies_at_launch),
        cmocka_unit_test(forbidden), cmocka_unit_test(modes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
