/* Devices, properties of functions, launches: what the profile refuses. */
#include "emu/block.h"
#include "emu/device_memory.h"
#include "emu/fault.h"
#include "emu/launch.h"
#include "emu/profile.h"
#include "emu/scheduler.h"
#include "emu/stream.h"

#include <algorithm>
#include <cstdlib>
#include <map>

#include <sys/mman.h>

using namespace emu;

namespace
{

constexpr size_t RESERVED = 1024; /* bytes of shared memory a block that the system takes, beside its own */

/* Dynamic shared memory that a kernel may have, where cudaFuncSetAttribute was called. */
std::map<const void *, size_t> &allowed()
{
    static auto *map = new std::map<const void *, size_t>;
    return *map;
}

size_t allowed_for(const void *kernel)
{
    const auto found = allowed().find(kernel);
    return found == allowed().end() ? profile().shared_static : found->second;
}

bool mapped(uintptr_t address)
{
    unsigned char in_core;
    return mincore(reinterpret_cast<void *>(address / 4096 * 4096), 4096, &in_core) == 0;
}

/* An address that a kernel must not have: of host memory that is not pinned, or of device memory that is gone. */
void check_address(const Launch &launch, size_t argument, const void *pointer, bool surely)
{
    if (!pointer || is_pinned(pointer)) return;
    char where[160];
    const uintptr_t number = reinterpret_cast<uintptr_t>(pointer);
    /* A word of a struct may also be two numbers beside each other, or one and padding that still holds part of an old
     * address: a low half that is a small number is taken for one. */
    const uint32_t low = static_cast<uint32_t>(number);
    if (!surely && (low < 1u << 24 || low >= ~0u << 24)) return;
    if (device_address(pointer)) {
        if (is_device(pointer, 0)) return;
        device_describe(pointer, where, sizeof where);
        host_fault("kernel %s: argument %zu points to %s", launch.name, argument + 1, where);
    }
    /* below 2^46 nothing of the host's lies but the tables of the sanitizers */
    const bool like_address = number >= uintptr_t(1) << 46 && number < uintptr_t(1) << 47;
    if (surely || (like_address && mapped(number)))
        host_fault("kernel %s: argument %zu %s a host address, %p", launch.name, argument + 1, surely ? "is" : "holds",
                   pointer);
}

void check_arguments(const Launch &launch, const Argument *arguments, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const Argument &a = arguments[i];
        for (size_t at = 0; at + sizeof(void *) <= a.bytes; at += sizeof(void *)) {
            const void *pointer;
            memcpy(&pointer, static_cast<const char *>(a.value) + at, sizeof pointer);
            check_address(launch, i, pointer, a.pointer);
        }
    }
}

cudaError_t check_shape(const Launch &l)
{
    const uint64_t threads = static_cast<uint64_t>(l.block.x) * l.block.y * l.block.z;
    if (threads == 0 || threads > MAX_THREADS || l.block.z > 64) return cudaErrorInvalidConfiguration;
    if (l.grid.x == 0 || l.grid.x > 0x7fffffffu || l.grid.y == 0 || l.grid.y > 65535 || l.grid.z == 0 ||
        l.grid.z > 65535)
        return cudaErrorInvalidConfiguration;
    if (l.shared > allowed_for(l.kernel)) return cudaErrorInvalidValue;
    if (l.bound && threads > l.bound) return cudaErrorInvalidValue;
    return cudaSuccess;
}

} // namespace

cudaError_t emu::launch_call(const Launch &launch, cudaStream_t stream, const Argument *arguments, size_t count)
{
    const Lock lock(api_mutex());
    const cudaError_t error = check_shape(launch);
    if (error != cudaSuccess) return result(error);
    check_arguments(launch, arguments, count);
    return result(enqueue(stream, WorkKind::KERNEL, launch.name, [launch] { grid_run(launch); }));
}

extern "C" {

cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute attribute, int value)
{
    const Lock lock(api_mutex());
    if (!function) return result(cudaErrorInvalidDeviceFunction);
    switch (attribute) {
    case cudaFuncAttributeMaxDynamicSharedMemorySize:
        if (value < 0 || static_cast<size_t>(value) > profile().shared_optin) return result(cudaErrorInvalidValue);
        allowed()[function] = static_cast<size_t>(value);
        return cudaSuccess;
    case cudaFuncAttributePreferredSharedMemoryCarveout:
        return value >= -1 && value <= 100 ? cudaSuccess : result(cudaErrorInvalidValue);
    default:
        return result(cudaErrorInvalidValue);
    }
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *function)
{
    const Lock lock(api_mutex());
    if (!attributes || !function) return result(cudaErrorInvalidValue);
    *attributes = cudaFuncAttributes();
    attributes->maxThreadsPerBlock = static_cast<int>(MAX_THREADS);
    attributes->maxDynamicSharedSizeBytes = static_cast<int>(allowed_for(function));
    attributes->binaryVersion = attributes->ptxVersion = 10 * profile().major + profile().minor;
    return cudaSuccess;
}

/* Block clusters, cooperative grids and the other attributes of a launch are not here. */
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **)
{
    const Lock lock(api_mutex());
    return result(cudaErrorNotSupported);
}

cudaError_t cudaLaunchCooperativeKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t)
{
    const Lock lock(api_mutex());
    return result(cudaErrorNotSupported);
}

/* By threads, blocks and shared memory; registers are not known here. */
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared)
{
    const Lock lock(api_mutex());
    if (!blocks || !function || threads <= 0) return result(cudaErrorInvalidValue);
    const Profile &p = profile();
    if (threads > static_cast<int>(MAX_THREADS) || shared > allowed_for(function)) {
        *blocks = 0;
        return cudaSuccess;
    }
    const int warps = (threads + 31) / 32, by_shared = static_cast<int>(p.shared_processor / (shared + RESERVED));
    *blocks = std::min({p.threads_processor / (32 * warps), p.blocks_processor, by_shared});
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    if (!count) return result(cudaErrorInvalidValue);
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    return device == 0 ? cudaSuccess : result(cudaErrorInvalidDevice);
}

cudaError_t cudaGetDevice(int *device)
{
    if (!device) return result(cudaErrorInvalidValue);
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int device)
{
    if (!prop) return result(cudaErrorInvalidValue);
    if (device != 0) return result(cudaErrorInvalidDevice);
    const Profile &p = profile();
    *prop = cudaDeviceProp();
    snprintf(prop->name, sizeof prop->name, "emulated %s", p.name);
    prop->totalGlobalMem = options().memory_bytes;
    prop->sharedMemPerBlock = p.shared_static;
    prop->sharedMemPerBlockOptin = p.shared_optin;
    prop->sharedMemPerMultiprocessor = p.shared_processor;
    prop->reservedSharedMemPerBlock = RESERVED;
    prop->regsPerBlock = prop->regsPerMultiprocessor = 65536;
    prop->warpSize = static_cast<int>(WARP);
    prop->maxThreadsPerBlock = static_cast<int>(MAX_THREADS);
    prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = static_cast<int>(MAX_THREADS);
    prop->maxThreadsDim[2] = 64;
    prop->maxGridSize[0] = 0x7fffffff;
    prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
    prop->major = p.major;
    prop->minor = p.minor;
    prop->multiProcessorCount = p.processors;
    prop->maxThreadsPerMultiProcessor = p.threads_processor;
    prop->maxBlocksPerMultiProcessor = p.blocks_processor;
    prop->l2CacheSize = p.l2_bytes;
    prop->unifiedAddressing = 1;
    prop->asyncEngineCount = 2;
    prop->concurrentKernels = 1;
    prop->canMapHostMemory = 1;
    prop->textureAlignment = 512;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device)
{
    if (!value) return result(cudaErrorInvalidValue);
    cudaDeviceProp prop;
    if (const cudaError_t error = cudaGetDeviceProperties(&prop, device)) return error;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
        *value = prop.maxThreadsPerBlock;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = static_cast<int>(prop.sharedMemPerBlock);
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = static_cast<int>(prop.sharedMemPerBlockOptin);
        break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = static_cast<int>(prop.sharedMemPerMultiprocessor);
        break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
        *value = static_cast<int>(prop.reservedSharedMemPerBlock);
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = prop.multiProcessorCount;
        break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = prop.maxThreadsPerMultiProcessor;
        break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
        *value = prop.maxBlocksPerMultiProcessor;
        break;
    case cudaDevAttrComputeCapabilityMajor:
        *value = prop.major;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = prop.minor;
        break;
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrClusterLaunch:
        *value = 0;
        break;
    case cudaDevAttrL2CacheSize:
        *value = prop.l2CacheSize;
        break;
    case cudaDevAttrWarpSize:
        *value = prop.warpSize;
        break;
    case cudaDevAttrClockRate:
        *value = 1000000;
        break;
    case cudaDevAttrMemoryClockRate:
        *value = 1000000;
        break;
    case cudaDevAttrGlobalMemoryBusWidth:
        *value = 4096;
        break;
    default:
        return result(cudaErrorNotSupported);
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device)
{
    if (!text || bytes < 13) return result(cudaErrorInvalidValue);
    if (device != 0) return result(cudaErrorInvalidDevice);
    snprintf(text, static_cast<size_t>(bytes), "0000:00:00.0");
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    if (!version) return result(cudaErrorInvalidValue);
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    return cudaDriverGetVersion(version);
}

const char *cudaGetErrorName(cudaError_t error)
{
#define MTP_EMU_NAME(e) \
    case e:             \
        return #e
    switch (error) {
        MTP_EMU_NAME(cudaSuccess);
        MTP_EMU_NAME(cudaErrorInvalidValue);
        MTP_EMU_NAME(cudaErrorMemoryAllocation);
        MTP_EMU_NAME(cudaErrorInvalidConfiguration);
        MTP_EMU_NAME(cudaErrorInvalidMemcpyDirection);
        MTP_EMU_NAME(cudaErrorInsufficientDriver);
        MTP_EMU_NAME(cudaErrorNoDevice);
        MTP_EMU_NAME(cudaErrorInvalidDevice);
        MTP_EMU_NAME(cudaErrorInvalidDeviceFunction);
        MTP_EMU_NAME(cudaErrorInvalidResourceHandle);
        MTP_EMU_NAME(cudaErrorIllegalState);
        MTP_EMU_NAME(cudaErrorNotReady);
        MTP_EMU_NAME(cudaErrorNotSupported);
        MTP_EMU_NAME(cudaErrorHostMemoryAlreadyRegistered);
        MTP_EMU_NAME(cudaErrorHostMemoryNotRegistered);
        MTP_EMU_NAME(cudaErrorStreamCaptureUnsupported);
        MTP_EMU_NAME(cudaErrorStreamCaptureInvalidated);
        MTP_EMU_NAME(cudaErrorStreamCaptureMerge);
        MTP_EMU_NAME(cudaErrorStreamCaptureUnmatched);
        MTP_EMU_NAME(cudaErrorStreamCaptureUnjoined);
        MTP_EMU_NAME(cudaErrorStreamCaptureIsolation);
        MTP_EMU_NAME(cudaErrorStreamCaptureImplicit);
        MTP_EMU_NAME(cudaErrorStreamCaptureWrongThread);
        MTP_EMU_NAME(cudaErrorCapturedEvent);
    default:
        return "unrecognized error code";
    }
#undef MTP_EMU_NAME
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaSuccess ? "no error" : cudaGetErrorName(error);
}

} // extern "C"
