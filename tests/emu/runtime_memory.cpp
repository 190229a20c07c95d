/* Memory of the runtime API: allocation, copies, sets. */
#include "emu/block.h"
#include "emu/device_memory.h"
#include "emu/fault.h"
#include "emu/profile.h"
#include "emu/stream.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include <unistd.h>

using namespace emu;

namespace
{

struct Range {
    const void *at;
    size_t pitch, width, rows;
};

/* All of a range in one live allocation, or the process ends: on a device it would be an error later, or none at all.
 */
void must_be_device(const char *call, const char *what, const Range &r)
{
    const size_t bytes = r.rows ? (r.rows - 1) * r.pitch + r.width : 0;
    if (bytes == 0 || is_device(r.at, bytes)) return;
    char where[160];
    device_describe(r.at, where, sizeof where);
    host_fault("%s: %s, %zu bytes at %s, is not within live device memory", call, what, bytes, where);
}

void move_rows(const Range &to, const Range &from)
{
    for (size_t i = 0; i < to.rows; i++)
        memmove(static_cast<char *>(const_cast<void *>(to.at)) + i * to.pitch,
                static_cast<const char *>(from.at) + i * from.pitch, to.width);
}

void poison(const Range &to)
{
    for (size_t i = 0; i < to.rows; i++)
        memset(static_cast<char *>(const_cast<void *>(to.at)) + i * to.pitch, 0xff, to.width);
}

/* What the documentation says of asynchronous copies: pageable host memory is read before the call returns, and is
 * written before the call returns; pinned memory is read and written when the stream gets there. */
cudaError_t copy(const char *call, Range to, Range from, cudaMemcpyKind kind, cudaStream_t stream, bool wait)
{
    Stream *queue = stream_of(stream);
    if (!queue) return cudaErrorInvalidResourceHandle;
    if (to.width == 0 || to.rows == 0) return cudaSuccess;
    if (!to.at || !from.at || to.width > to.pitch || from.width > from.pitch) return cudaErrorInvalidValue;
    const bool to_device = device_address(to.at), from_device = device_address(from.at);
    const cudaMemcpyKind is = to_device ? (from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
                                        : (from_device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost);
    if (kind != cudaMemcpyDefault && kind != is) return cudaErrorInvalidMemcpyDirection;
    if (to_device) must_be_device(call, "the destination", to);
    if (from_device) must_be_device(call, "the source", from);
    if (const cudaError_t error = wait ? refuse_while_capturing() : cudaSuccess) return error;
    if (!from_device && !is_pinned(from.at) && !queue->capture) {
        auto staged = std::make_shared<std::vector<char>>(from.width * from.rows);
        Range stage = {staged->data(), from.width, from.width, from.rows};
        move_rows(stage, from);
        const cudaError_t error = enqueue(stream, WorkKind::COPY, call, [to, stage, staged] { move_rows(to, stage); });
        if (error != cudaSuccess) return error;
    } else {
        const bool undefined = !to_device && is_pinned(to.at) && from.at != to.at; /* until the copy happens */
        if (undefined && !queue->capture) poison(to);
        const cudaError_t error = enqueue(stream, WorkKind::COPY, call, [to, from] { move_rows(to, from); });
        if (error != cudaSuccess) return error;
        if (undefined && queue->capture) capture_at_launch(*queue, [to] { poison(to); });
    }
    if (wait || (!to_device && !is_pinned(to.at) && !queue->capture)) run_stream(*queue);
    return cudaSuccess;
}

cudaError_t set(const char *call, Range to, int value, cudaStream_t stream, bool wait)
{
    Stream *queue = stream_of(stream);
    if (!queue) return cudaErrorInvalidResourceHandle;
    if (to.width == 0 || to.rows == 0) return cudaSuccess;
    if (!to.at || to.width > to.pitch) return cudaErrorInvalidValue;
    if (!device_address(to.at)) host_fault("%s: %p is host memory", call, to.at);
    must_be_device(call, "the destination", to);
    if (const cudaError_t error = wait ? refuse_while_capturing() : cudaSuccess) return error;
    const cudaError_t error = enqueue(stream, WorkKind::SET, call, [=] {
        for (size_t i = 0; i < to.rows; i++)
            memset(static_cast<char *>(const_cast<void *>(to.at)) + i * to.pitch, value, to.width);
    });
    if (error == cudaSuccess && wait) run_stream(*queue);
    return error;
}

/* What was still allocated when the process ended, and how it ended. */
void leaks_at_exit(int status, void *)
{
    const size_t leaks = status == 0 ? device_leaks(stderr) : 0;
    if (!leaks) return;
    fflush(stdout);
    fprintf(stderr, "emu: leak: %zu device allocations were never freed\n", leaks);
    fflush(stderr);
    _exit(86);
}

} // namespace

extern "C" {

cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    const Lock lock(api_mutex());
    static const int watch = on_exit(leaks_at_exit, nullptr);
    (void)watch;
    if (!pointer) return result(cudaErrorInvalidValue);
    *pointer = nullptr;
    if (const cudaError_t error = refuse_while_capturing()) return result(error);
    if (bytes == 0) return cudaSuccess;
    fault_watch();
    *pointer = device_allocate(bytes);
    return *pointer ? cudaSuccess : result(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *pointer)
{
    const Lock lock(api_mutex());
    if (!pointer) return cudaSuccess;
    if (const cudaError_t error = refuse_while_capturing()) return result(error);
    run_all(); /* it waits for the device */
    return device_free(pointer) ? cudaSuccess : result(cudaErrorInvalidValue);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
    const Lock lock(api_mutex());
    const unsigned known = cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
    if (!pointer || (flags & ~known)) return result(cudaErrorInvalidValue);
    *pointer = nullptr;
    if (const cudaError_t error = refuse_while_capturing()) return result(error);
    *pointer = bytes ? pinned_allocate(bytes) : nullptr;
    return *pointer || !bytes ? cudaSuccess : result(cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes)
{
    return cudaHostAlloc(pointer, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void *pointer)
{
    const Lock lock(api_mutex());
    if (!pointer) return cudaSuccess;
    if (const cudaError_t error = refuse_while_capturing()) return result(error);
    run_all();
    return pinned_free(pointer) ? cudaSuccess : result(cudaErrorInvalidValue);
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned)
{
    const Lock lock(api_mutex());
    if (!pointer || !bytes) return result(cudaErrorInvalidValue);
    if (const cudaError_t error = refuse_while_capturing()) return result(error);
    return pinned_register(pointer, bytes) ? cudaSuccess : result(cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void *pointer)
{
    const Lock lock(api_mutex());
    if (const cudaError_t error = refuse_while_capturing()) return result(error);
    run_all();
    return pinned_unregister(pointer) ? cudaSuccess : result(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    const Lock lock(api_mutex());
    if (!free_bytes || !total) return result(cudaErrorInvalidValue);
    *total = options().memory_bytes;
    *free_bytes = *total - std::min(*total, device_memory_used());
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream)
{
    const Lock lock(api_mutex());
    return result(copy("cudaMemcpyAsync", {to, bytes, bytes, 1}, {from, bytes, bytes, 1}, kind, stream, false));
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
    const Lock lock(api_mutex());
    return result(copy("cudaMemcpy", {to, bytes, bytes, 1}, {from, bytes, bytes, 1}, kind, nullptr, true));
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows,
                              cudaMemcpyKind kind, cudaStream_t stream)
{
    const Lock lock(api_mutex());
    return result(
        copy("cudaMemcpy2DAsync", {to, to_pitch, width, rows}, {from, from_pitch, width, rows}, kind, stream, false));
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows,
                         cudaMemcpyKind kind)
{
    const Lock lock(api_mutex());
    return result(
        copy("cudaMemcpy2D", {to, to_pitch, width, rows}, {from, from_pitch, width, rows}, kind, nullptr, true));
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    const Lock lock(api_mutex());
    return result(set("cudaMemsetAsync", {to, bytes, bytes, 1}, value, stream, false));
}

cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    const Lock lock(api_mutex());
    return result(set("cudaMemset", {to, bytes, bytes, 1}, value, nullptr, true));
}

cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t rows, cudaStream_t stream)
{
    const Lock lock(api_mutex());
    return result(set("cudaMemset2DAsync", {to, pitch, width, rows}, value, stream, false));
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer)
{
    const Lock lock(api_mutex());
    if (!attributes) return result(cudaErrorInvalidValue);
    *attributes = cudaPointerAttributes();
    attributes->type = is_device(pointer, 1) ? cudaMemoryTypeDevice
                       : is_pinned(pointer)  ? cudaMemoryTypeHost
                                             : cudaMemoryTypeUnregistered;
    if (attributes->type == cudaMemoryTypeDevice) attributes->devicePointer = const_cast<void *>(pointer);
    if (attributes->type != cudaMemoryTypeDevice) attributes->hostPointer = const_cast<void *>(pointer);
    return cudaSuccess;
}

} // extern "C"
