/* What is put into the device's streams beside the ops: copies, marks, and graphs of captured work. The only places of
 * the backend that wait for the device. */
#include <stdio.h>
#include <stdlib.h>

#include "cuda/cuda.h"

mtp_status mtp__cuda_enter(const mtp_device *device)
{
    MTP_CUDA_TRY("cuda backend", cudaSetDevice(device->ordinal));
    return MTP_OK;
}

mtp_status mtp__cuda_wait(mtp_device *device, const char *what)
{
    device->counts.waits++;
    MTP_CUDA_TRY(what, cudaStreamSynchronize(device->stream));
    return MTP_OK;
}

/* ---- what kernels note about indices ----------------------------------------------------------------------------- */

mtp_status mtp__cuda_report(mtp_device *device, const mtp::fault *fault)
{
    static const char *const views[] = {"",
                                        "embed_fwd: ids",
                                        "gather_rows: index",
                                        "scatter_rows: index",
                                        "rope_table: positions",
                                        "attention: key_begin or key_end",
                                        "head: target",
                                        "head: selected",
                                        "head: order or slot_of",
                                        "tally: index / rows_per_step"};
    if (fault->op == mtp::FAULT_NONE) return MTP_OK;
    MTP_CUDA_TRY("clearing a note", cudaMemsetAsync(device->fault, 0, sizeof *fault, device->stream));
    const int op = fault->op > 0 && fault->op < (int)(sizeof views / sizeof *views) ? fault->op : 0;
    char at[24] = "";
    if (fault->at >= 0) snprintf(at, sizeof at, "[%d]", fault->at);
    return MTP_FAIL(MTP_E_ARGUMENT, "%s%s is %d, outside [0, %d) (found by a kernel, said when results are read)",
                    views[op], at, fault->index, fault->limit);
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

mtp_status mtp__cuda_upload(mtp_device *device, void *memory, const void *host, size_t bytes)
{
    MTP_REQUIRE((memory != NULL && host != NULL) || bytes == 0);
    if (bytes == 0) return MTP_OK;
    MTP_TRY(mtp__cuda_enter(device));
    MTP_CUDA_TRY("upload", cudaMemcpyAsync(memory, host, bytes, cudaMemcpyHostToDevice, device->stream));
    return mtp__cuda_wait(device, "upload");
}

mtp_status mtp__cuda_download(mtp_device *device, void *host, const void *memory, size_t bytes)
{
    MTP_REQUIRE((memory != NULL && host != NULL) || bytes == 0);
    if (bytes == 0) return MTP_OK;
    MTP_TRY(mtp__cuda_enter(device));
    mtp::fault fault = {};
    MTP_CUDA_TRY("download", cudaMemcpyAsync(host, memory, bytes, cudaMemcpyDeviceToHost, device->stream));
    MTP_CUDA_TRY("download",
                 cudaMemcpyAsync(&fault, device->fault, sizeof fault, cudaMemcpyDeviceToHost, device->stream));
    MTP_TRY(mtp__cuda_wait(device, "download"));
    return mtp__cuda_report(device, &fault);
}

static mtp_status is_pinned(const void *host, bool *pinned)
{
    cudaPointerAttributes attributes;
    MTP_CUDA_TRY("an asynchronous copy", cudaPointerGetAttributes(&attributes, host));
    *pinned = attributes.type == cudaMemoryTypeHost;
    return MTP_OK;
}

/* Other memory than pinned is read into a buffer of CUDA's before the call returns; a graph would read it later. */
mtp_status mtp__cuda_upload_async(mtp_device *device, void *memory, const void *host, size_t bytes)
{
    MTP_REQUIRE((memory != NULL && host != NULL) || bytes == 0);
    if (bytes == 0) return MTP_OK;
    MTP_TRY(mtp__cuda_enter(device));
    bool pinned = false;
    if (device->capturing) MTP_TRY(is_pinned(host, &pinned));
    if (device->capturing && !pinned)
        return MTP_FAIL(MTP_E_ARGUMENT, "upload_async: a graph copies from memory of host_alloc only");
    MTP_CUDA_TRY("upload_async", cudaMemcpyAsync(memory, host, bytes, cudaMemcpyHostToDevice, device->stream));
    return MTP_OK;
}

mtp_status mtp__cuda_download_async(mtp_device *device, void *host, const void *memory, size_t bytes)
{
    MTP_REQUIRE((memory != NULL && host != NULL) || bytes == 0);
    if (bytes == 0) return MTP_OK;
    MTP_TRY(mtp__cuda_enter(device));
    bool pinned = false;
    MTP_TRY(is_pinned(host, &pinned));
    if (!pinned) return MTP_FAIL(MTP_E_ARGUMENT, "download_async: the destination is not memory of host_alloc");
    MTP_CUDA_TRY("download_async", cudaMemcpyAsync(host, memory, bytes, cudaMemcpyDeviceToHost, device->stream));
    return MTP_OK;
}

/* ---- marks ------------------------------------------------------------------------------------------------------- */

struct mtp_mark {
    cudaEvent_t event;
    mtp::fault *fault; /* pinned: what was noted until here */
};

static mtp_status create_mark(mtp_device *device, mtp_mark *mark)
{
    MTP_CUDA_TRY("mark", cudaEventCreateWithFlags(&mark->event, cudaEventDisableTiming));
    device->counts.allocations++;
    MTP_CUDA_TRY("mark", cudaHostAlloc((void **)&mark->fault, sizeof *mark->fault, cudaHostAllocDefault));
    return MTP_OK;
}

mtp_status mtp__cuda_mark(mtp_device *device, mtp_mark **mark)
{
    MTP_REQUIRE(mark != NULL);
    MTP_TRY(mtp__cuda_enter(device));
    if (!*mark) {
        mtp_mark *made = (mtp_mark *)calloc(1, sizeof *made);
        if (!made) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a mark");
        const mtp_status status = create_mark(device, made);
        if (status != MTP_OK) {
            mtp__cuda_mark_free(device, made);
            return status;
        }
        *mark = made;
    }
    MTP_CUDA_TRY("mark", cudaMemcpyAsync((*mark)->fault, device->fault, sizeof *(*mark)->fault, cudaMemcpyDeviceToHost,
                                         device->stream));
    MTP_CUDA_TRY("mark", cudaEventRecord((*mark)->event, device->stream));
    return MTP_OK;
}

mtp_status mtp__cuda_mark_wait(mtp_device *device, mtp_mark *mark)
{
    MTP_REQUIRE(mark != NULL);
    MTP_TRY(mtp__cuda_enter(device));
    const cudaError_t state = cudaEventQuery(mark->event);
    if (state == cudaErrorNotReady) {
        cudaGetLastError(); /* it is no error, but may be taken for the next launch's */
        device->counts.waits++;
        MTP_CUDA_TRY("mark_wait", cudaEventSynchronize(mark->event));
    } else {
        MTP_CUDA_TRY("mark_wait", state);
    }
    const mtp::fault noted = *mark->fault;
    *mark->fault = mtp::fault{};
    return mtp__cuda_report(device, &noted);
}

void mtp__cuda_mark_free(mtp_device *device, mtp_mark *mark)
{
    if (!mark) return;
    cudaSetDevice(device->ordinal);
    if (mark->event) cudaEventDestroy(mark->event);
    if (mark->fault) cudaFreeHost(mark->fault); /* waits for a copy into it */
    free(mark);
}

/* ---- uploads beside the ops -------------------------------------------------------------------------------------- */

mtp_status mtp__cuda_upload_beside(mtp_device *device, void *memory, const void *host, size_t bytes, mtp_mark *after)
{
    MTP_REQUIRE((memory != NULL && host != NULL) || bytes == 0);
    MTP_REQUIRE(!device->capturing);
    if (bytes == 0) return MTP_OK;
    MTP_TRY(mtp__cuda_enter(device));
    if (after) MTP_CUDA_TRY("upload_beside", cudaStreamWaitEvent(device->copies, after->event, 0));
    MTP_CUDA_TRY("upload_beside", cudaMemcpyAsync(memory, host, bytes, cudaMemcpyHostToDevice, device->copies));
    return MTP_OK;
}

mtp_status mtp__cuda_uploads_join(mtp_device *device)
{
    MTP_REQUIRE(!device->capturing);
    MTP_TRY(mtp__cuda_enter(device));
    MTP_CUDA_TRY("uploads_join", cudaEventRecord(device->copied, device->copies));
    MTP_CUDA_TRY("uploads_join", cudaStreamWaitEvent(device->stream, device->copied, 0));
    return MTP_OK;
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

struct mtp_graph {
    cudaGraphExec_t exec;
    size_t nodes;
};

/* Threads that load data or sum over ranks go on with their own calls: the capture concerns this one. */
static mtp_status capture_begin(mtp_device *device)
{
    MTP_TRY(mtp__cuda_enter(device));
    MTP_CUDA_TRY("capture_begin", cudaStreamBeginCapture(device->stream, cudaStreamCaptureModeThreadLocal));
    device->capturing = true;
    return MTP_OK;
}

static mtp_status instantiate(cudaGraph_t captured, mtp_graph *graph)
{
    MTP_CUDA_TRY("capture_end", cudaGraphGetNodes(captured, NULL, &graph->nodes));
    MTP_CUDA_TRY("capture_end", cudaGraphInstantiate(&graph->exec, captured, 0));
    return MTP_OK;
}

static mtp_status capture_end(mtp_device *device, mtp_graph **graph)
{
    MTP_REQUIRE(graph != NULL);
    *graph = NULL;
    MTP_TRY(mtp__cuda_enter(device));
    cudaGraph_t captured = NULL;
    device->capturing = false;
    MTP_CUDA_TRY("capture_end", cudaStreamEndCapture(device->stream, &captured));
    mtp_graph *made = (mtp_graph *)calloc(1, sizeof *made);
    const mtp_status status = made ? instantiate(captured, made) : MTP_FAIL(MTP_E_MEMORY, "out of memory for a graph");
    cudaGraphDestroy(captured);
    if (status == MTP_OK)
        *graph = made;
    else
        free(made);
    return status;
}

static mtp_status launch(mtp_device *device, mtp_graph *graph)
{
    MTP_REQUIRE(graph != NULL);
    MTP_TRY(mtp__cuda_enter(device));
    device->counts.launches++;
    MTP_CUDA_TRY("launching a graph", cudaGraphLaunch(graph->exec, device->stream));
    return MTP_OK;
}

static int64_t num_nodes(const mtp_graph *graph)
{
    return (int64_t)graph->nodes;
}

static void free_graph(mtp_device *device, mtp_graph *graph)
{
    if (!graph) return;
    cudaSetDevice(device->ordinal);
    (void)mtp__cuda_wait(device, "freeing a graph"); /* it may be at work */
    cudaGraphExecDestroy(graph->exec);
    free(graph);
}

const mtp_graph_ops mtp__cuda_graph = {capture_begin, capture_end, launch, num_nodes, free_graph};
