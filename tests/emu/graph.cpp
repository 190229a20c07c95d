#include "emu/graph.h"
#include "emu/device_memory.h"

#include <algorithm>

namespace emu
{

/* Those under way. */
static std::set<Capture *> &captures()
{
    static auto *set = new std::set<Capture *>;
    return *set;
}

void capture_add(Stream &stream, WorkKind kind, const char *name, std::function<void()> run)
{
    stream.capture->graph->nodes.push_back({kind, name, std::move(run), {}});
    stream.unjoined = &stream != stream.capture->origin;
}

void capture_at_launch(Stream &stream, std::function<void()> act)
{
    stream.capture->graph->nodes.back().at_launch = std::move(act);
}

cudaError_t capture_join(Stream &stream, const Moment &moment)
{
    if (moment.capture->broken) return cudaErrorStreamCaptureInvalidated;
    if (stream.capture && stream.capture != moment.capture) {
        stream.capture->broken = true;
        return cudaErrorStreamCaptureMerge;
    }
    if (!stream.capture) {
        stream.capture = moment.capture;
        moment.capture->streams.insert(&stream);
        stream.unjoined = true; /* it must be waited for even if it gets no work */
    }
    moment.place.stream->unjoined = false;
    return cudaSuccess;
}

static bool forbids(const Capture &capture)
{
    if (capture.mode == cudaStreamCaptureModeRelaxed) return false;
    return capture.mode == cudaStreamCaptureModeGlobal || capture.thread == std::this_thread::get_id();
}

cudaError_t refuse_while_capturing()
{
    bool refused = false;
    for (Capture *capture : captures()) {
        if (!forbids(*capture)) continue;
        capture->broken = refused = true;
    }
    return refused ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

bool thread_captures()
{
    for (const Capture *capture : captures())
        if (capture->thread == std::this_thread::get_id()) return true;
    return false;
}

static std::set<const Graph *> &graphs()
{
    static auto *set = new std::set<const Graph *>;
    return *set;
}

static const Graph *made(Graph *graph)
{
    graphs().insert(graph);
    return graph;
}

} // namespace emu

using namespace emu;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode)
{
    const Lock lock(api_mutex());
    Stream *stream = stream_of(handle);
    if (!stream) return result(cudaErrorInvalidResourceHandle);
    if (stream == stream_of(nullptr)) return result(cudaErrorStreamCaptureUnsupported);
    if (stream->capture) return result(cudaErrorIllegalState);
    stream->capture = new Capture{std::make_unique<Graph>(), stream, {stream}, mode, std::this_thread::get_id(), false};
    stream->unjoined = false;
    captures().insert(stream->capture);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph)
{
    const Lock lock(api_mutex());
    Stream *stream = stream_of(handle);
    if (!stream) return result(cudaErrorInvalidResourceHandle);
    if (!stream->capture || !graph) return result(cudaErrorInvalidValue);
    if (stream->capture->origin != stream) return result(cudaErrorStreamCaptureUnmatched);
    if (stream->capture->mode != cudaStreamCaptureModeRelaxed && stream->capture->thread != std::this_thread::get_id())
        return result(cudaErrorStreamCaptureWrongThread);
    const std::unique_ptr<Capture> capture(stream->capture);
    bool unjoined = false;
    for (Stream *one : capture->streams) {
        unjoined = unjoined || one->unjoined;
        one->capture = nullptr;
    }
    captures().erase(capture.get());
    *graph = nullptr;
    if (capture->broken) return result(cudaErrorStreamCaptureInvalidated);
    if (unjoined) return result(cudaErrorStreamCaptureUnjoined);
    *graph = reinterpret_cast<cudaGraph_t>(const_cast<Graph *>(made(capture->graph.release())));
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status)
{
    const Lock lock(api_mutex());
    const Stream *stream = stream_of(handle);
    if (!stream) return result(cudaErrorInvalidResourceHandle);
    if (!status) return result(cudaErrorInvalidValue);
    *status = !stream->capture          ? cudaStreamCaptureStatusNone
              : stream->capture->broken ? cudaStreamCaptureStatusInvalidated
                                        : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long)
{
    const Lock lock(api_mutex());
    const Graph *from = reinterpret_cast<const Graph *>(graph);
    if (!exec || !graphs().count(from)) return result(cudaErrorInvalidValue);
    *exec = reinterpret_cast<cudaGraphExec_t>(const_cast<Graph *>(made(new Graph(*from))));
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    const Lock lock(api_mutex());
    const Graph *graph = reinterpret_cast<const Graph *>(exec);
    if (!graphs().count(graph)) return result(cudaErrorInvalidValue);
    if (stream_of(stream) && stream_of(stream)->capture) return result(cudaErrorStreamCaptureUnsupported);
    for (const Node &node : graph->nodes)
        if (node.at_launch) node.at_launch();
    return result(enqueue(stream, WorkKind::OTHER, "a graph", [nodes = graph->nodes] {
        for (const Node &node : nodes) node.run();
    }));
}

/* Only kernels of this many nodes are of use to a caller that counts; the handles mean nothing else. */
cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t *nodes, size_t *count)
{
    const Lock lock(api_mutex());
    const Graph *graph = reinterpret_cast<const Graph *>(handle);
    if (!count || !graphs().count(graph)) return result(cudaErrorInvalidValue);
    if (!nodes) {
        *count = graph->nodes.size();
        return cudaSuccess;
    }
    *count = std::min(*count, graph->nodes.size());
    for (size_t i = 0; i < *count; i++)
        nodes[i] = reinterpret_cast<cudaGraphNode_t>(const_cast<Node *>(&graph->nodes[i]));
    return cudaSuccess;
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t handle, cudaGraphNodeType *type)
{
    const Lock lock(api_mutex());
    if (!handle || !type) return result(cudaErrorInvalidValue);
    switch (reinterpret_cast<const Node *>(handle)->kind) {
    case WorkKind::COPY:
        *type = cudaGraphNodeTypeMemcpy;
        break;
    case WorkKind::SET:
        *type = cudaGraphNodeTypeMemset;
        break;
    case WorkKind::HOST:
        *type = cudaGraphNodeTypeHost;
        break;
    default:
        *type = cudaGraphNodeTypeKernel;
        break; /* what libraries queue are kernels too */
    }
    return cudaSuccess;
}

static cudaError_t destroy(const void *handle)
{
    const Lock lock(api_mutex());
    const Graph *graph = static_cast<const Graph *>(handle);
    if (!graphs().erase(graph)) return result(cudaErrorInvalidValue);
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    return destroy(graph);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    return destroy(exec);
}

} // extern "C"
