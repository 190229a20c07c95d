/* The CUDA backend: devices, their memory, and the table. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cuda.h"

mtp_status mtp__cuda_plans_create(struct mtp__cuda_plans **plans);
void mtp__cuda_plans_free(struct mtp__cuda_plans *plans);

/* ---- errors ------------------------------------------------------------------------------------------------------ */

mtp_status mtp__cuda_failed(cudaError_t error, const char *what, const char *file, int line)
{
    cudaGetLastError(); /* errors that are not sticky are reported once */
    const mtp_status status = error == cudaErrorMemoryAllocation ? MTP_E_MEMORY : MTP_E_BACKEND;
    return mtp__fail(status, (int)error, file, line, "%s: CUDA reports %s: %s", what, cudaGetErrorName(error),
                     cudaGetErrorString(error));
}

mtp_status mtp__cublas_failed(cublasStatus_t status, const char *what, const char *file, int line)
{
    return mtp__fail(MTP_E_BACKEND, (int)status, file, line, "%s: cuBLASLt reports %s: %s", what,
                     cublasLtGetStatusName(status), cublasLtGetStatusString(status));
}

/* ---- which devices there are ------------------------------------------------------------------------------------- */

enum { OLDEST = 80 };

static void version_text(char *text, size_t size, int version)
{
    snprintf(text, size, "%d.%d", version / 1000, version % 1000 / 10);
}

/* Why the runtime does not start, with what to do. */
static mtp_status fail_no_devices(cudaError_t error)
{
    int driver = 0;
    char runtime[16], have[16];
    version_text(runtime, sizeof runtime, CUDART_VERSION);
    const bool known = cudaDriverGetVersion(&driver) == cudaSuccess;
    cudaGetLastError();
    if (error == cudaErrorInsufficientDriver && known && driver == 0)
        return MTP_FAIL_FOREIGN(MTP_E_CONFIG, (int)error,
                                "device \"cuda\": no NVIDIA driver is installed; install one that supports CUDA %s, or "
                                "use device = \"cpu\"",
                                runtime);
    if (error == cudaErrorInsufficientDriver) {
        version_text(have, sizeof have, driver);
        return MTP_FAIL_FOREIGN(MTP_E_CONFIG, (int)error,
                                "device \"cuda\": the NVIDIA driver supports CUDA %s, this build needs %s (CUDA 13 "
                                "needs driver 580 or newer); update the driver, or use device = \"cpu\"",
                                have, runtime);
    }
    if (error == cudaErrorNoDevice || error == cudaSuccess)
        return MTP_FAIL_FOREIGN(MTP_E_CONFIG, (int)error,
                                "device \"cuda\": the driver finds no CUDA device (is CUDA_VISIBLE_DEVICES empty?); "
                                "use device = \"cpu\"");
    return MTP_FAIL_FOREIGN(MTP_E_BACKEND, (int)error, "device \"cuda\": CUDA does not start: %s: %s",
                            cudaGetErrorName(error), cudaGetErrorString(error));
}

static mtp_status count_devices(int *count)
{
    const cudaError_t error = cudaGetDeviceCount(count);
    return error == cudaSuccess && *count > 0 ? MTP_OK : fail_no_devices(error);
}

static mtp_status attribute(int *value, cudaDeviceAttr which, int index)
{
    MTP_CUDA_TRY("reading a device's properties", cudaDeviceGetAttribute(value, which, index));
    return MTP_OK;
}

/* "NVIDIA H200, sm_90, 132 multiprocessors" */
static mtp_status describe(int index, char *name, size_t size, int *capability, int *multiprocessors, uint64_t *memory)
{
    cudaDeviceProp properties;
    MTP_CUDA_TRY("reading a device's properties", cudaGetDeviceProperties(&properties, index));
    *capability = 10 * properties.major + properties.minor;
    *multiprocessors = properties.multiProcessorCount;
    *memory = properties.totalGlobalMem;
    snprintf(name, size, "%.80s, sm_%d, %d multiprocessors", properties.name, *capability, *multiprocessors);
    return MTP_OK;
}

static mtp_status cuda_list(mtp_device_row *rows, int capacity, int *count)
{
    MTP_TRY(count_devices(count));
    for (int i = 0; i < *count && i < capacity; i++) {
        mtp_device_row *row = &rows[i];
        int capability = 0, multiprocessors = 0;
        memset(row, 0, sizeof *row);
        MTP_TRY(describe(i, row->name, sizeof row->name, &capability, &multiprocessors, &row->memory));
        row->usable = capability >= OLDEST;
        if (!row->usable) snprintf(row->why_not, sizeof row->why_not, "older than sm_%d", (int)OLDEST);
    }
    return MTP_OK;
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

static void cuda_close(mtp_device *device)
{
    if (!device) return;
    cudaSetDevice(device->ordinal);
    if (device->copies) cudaStreamSynchronize(device->copies);
    if (device->stream) cudaStreamSynchronize(device->stream);
    mtp__cuda_plans_free(device->plans);
    if (device->lt) cublasLtDestroy(device->lt);
    if (device->fault) cudaFree(device->fault);
    if (device->copied) cudaEventDestroy(device->copied);
    if (device->copies) cudaStreamDestroy(device->copies);
    if (device->stream) cudaStreamDestroy(device->stream);
    free(device);
}

static mtp_status read_properties(mtp_device *device)
{
    uint64_t memory = 0;
    MTP_TRY(describe(device->ordinal, device->name, sizeof device->name, &device->capability, &device->multiprocessors,
                     &memory));
    if (device->capability < OLDEST)
        return MTP_FAIL(MTP_E_CONFIG,
                        "device \"cuda:%d\" is %s; the cuda backend needs sm_%d (Ampere) or newer: choose another "
                        "device (`mtp devices` lists them), or use device = \"cpu\"",
                        device->ordinal, device->name, (int)OLDEST);
    MTP_TRY(attribute(&device->shared_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device->ordinal));
    MTP_TRY(attribute(&device->shared_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device->ordinal));
    return attribute(&device->l2_bytes, cudaDevAttrL2CacheSize, device->ordinal);
}

static void fill_info(mtp_device *device)
{
    const size_t version = cublasLtGetVersion(); /* 130100: 13.1.0 */
    snprintf(device->library, sizeof device->library, "cuBLASLt %zu.%zu.%zu, products in %s", version / 10000,
             version / 100 % 100, version % 100, device->bf16 ? "bf16 with fp32 sums" : "fp32");
    device->info.backend = "cuda";
    device->info.isa = device->name;
    device->info.blas = device->library;
    device->info.num_threads = 1;
    device->info.factors = device->bf16 ? MTP_BF16 : MTP_F32;
    device->info.stored = device->bf16 ? MTP_BF16 : MTP_F32;
    device->info.stream = device->stream;
    device->info.rows_exact = false;
    device->info.rows_note = "cuBLASLt chooses its algorithm by the number of rows, so a row computed among others "
                             "equals the row alone to float rounding; the same packing gives the same bits";
}

static mtp_status open_device(const mtp_device_options *options, mtp_device *device)
{
    int count = 0;
    MTP_TRY(count_devices(&count));
    device->ordinal = options ? options->index : 0;
    device->bf16 = options && options->bf16;
    if (device->ordinal < 0 || device->ordinal >= count)
        return MTP_FAIL(
            MTP_E_CONFIG,
            "device \"cuda:%d\": this process sees %d device%s, cuda:0%s; `mtp devices` lists what is there",
            device->ordinal, count, count == 1 ? "" : "s", count == 1 ? "" : " and up");
    MTP_TRY(read_properties(device));
    MTP_CUDA_TRY("opening a CUDA device", cudaSetDevice(device->ordinal));
    MTP_CUDA_TRY("opening a CUDA device", cudaStreamCreateWithFlags(&device->stream, cudaStreamNonBlocking));
    MTP_CUDA_TRY("opening a CUDA device", cudaStreamCreateWithFlags(&device->copies, cudaStreamNonBlocking));
    MTP_CUDA_TRY("opening a CUDA device", cudaEventCreateWithFlags(&device->copied, cudaEventDisableTiming));
    MTP_CUDA_TRY("opening a CUDA device", cudaMalloc((void **)&device->fault, sizeof *device->fault));
    MTP_CUDA_TRY("opening a CUDA device", cudaMemsetAsync(device->fault, 0, sizeof *device->fault, device->stream));
    MTP_CUBLAS_TRY("opening a CUDA device", cublasLtCreate(&device->lt));
    MTP_TRY(mtp__cuda_plans_create(&device->plans));
    fill_info(device);
    return MTP_OK;
}

static mtp_status cuda_open(const mtp_device_options *options, mtp_device **device)
{
    MTP_REQUIRE(device != NULL);
    *device = NULL;
    mtp_device *opened = (mtp_device *)calloc(1, sizeof *opened);
    if (!opened) return MTP_FAIL(MTP_E_MEMORY, "out of memory opening the cuda backend");
    const mtp_status status = open_device(options, opened);
    if (status != MTP_OK)
        cuda_close(opened);
    else
        *device = opened;
    return status;
}

static const mtp_device_info *cuda_info(const mtp_device *device)
{
    return &device->info;
}

static mtp_device_counts cuda_counts(const mtp_device *device)
{
    return device->counts;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static mtp_status cuda_alloc(mtp_device *device, size_t bytes, void **memory)
{
    MTP_REQUIRE(memory != NULL);
    *memory = NULL;
    MTP_TRY(mtp__cuda_enter(device));
    device->counts.allocations++;
    if (bytes > (size_t)PTRDIFF_MAX - 64)
        return MTP_FAIL(MTP_E_MEMORY, "cuda backend: cannot allocate %zu bytes", bytes);
    const cudaError_t error = cudaMalloc(memory, bytes == 0 ? 64 : (bytes + 63) / 64 * 64);
    if (error == cudaSuccess) return MTP_OK;
    cudaGetLastError();
    if (error != cudaErrorMemoryAllocation) return mtp__cuda_failed(error, "memory_alloc", __FILE__, __LINE__);
    size_t left = 0, total = 0;
    if (cudaMemGetInfo(&left, &total) != cudaSuccess) left = total = 0;
    return MTP_FAIL_FOREIGN(MTP_E_MEMORY, (int)error,
                            "cuda backend: out of memory allocating %zu bytes (%.1f MiB) on %s: %.1f of %.1f MiB are "
                            "free; `mtp plan` prints who needs how much",
                            bytes, (double)bytes / 1048576, device->name, (double)left / 1048576,
                            (double)total / 1048576);
}

static void cuda_free(mtp_device *device, void *memory)
{
    if (!memory) return;
    cudaSetDevice(device->ordinal);
    cudaFree(memory);
}

/* Pinned: the copy engine reads it as it is, where other memory is copied to such pages first. */
static mtp_status cuda_host_alloc(mtp_device *device, size_t bytes, void **memory)
{
    MTP_REQUIRE(memory != NULL);
    *memory = NULL;
    MTP_TRY(mtp__cuda_enter(device));
    device->counts.allocations++;
    const cudaError_t error = cudaHostAlloc(memory, bytes == 0 ? 64 : bytes, cudaHostAllocDefault);
    if (error == cudaSuccess) return MTP_OK;
    cudaGetLastError();
    *memory = NULL;
    if (error != cudaErrorMemoryAllocation) return mtp__cuda_failed(error, "host_alloc", __FILE__, __LINE__);
    return MTP_FAIL_FOREIGN(MTP_E_MEMORY, (int)error, "cuda backend: cannot pin %zu bytes (%.1f MiB) of host memory",
                            bytes, (double)bytes / 1048576);
}

static void cuda_host_free(mtp_device *device, void *memory)
{
    if (!memory) return;
    cudaSetDevice(device->ordinal);
    cudaFreeHost(memory);
}

static mtp_status cuda_zero(mtp_device *device, void *memory, size_t bytes)
{
    MTP_REQUIRE(memory != NULL || bytes == 0);
    if (bytes == 0) return MTP_OK;
    MTP_TRY(mtp__cuda_enter(device));
    MTP_CUDA_TRY("memory_zero", cudaMemsetAsync(memory, 0, bytes, device->stream));
    return MTP_OK;
}

static mtp_status cuda_memory_info(mtp_device *device, uint64_t *left, uint64_t *total)
{
    MTP_REQUIRE(left != NULL && total != NULL);
    MTP_TRY(mtp__cuda_enter(device));
    size_t free_bytes = 0, all = 0;
    MTP_CUDA_TRY("memory_info", cudaMemGetInfo(&free_bytes, &all));
    *left = free_bytes;
    *total = all;
    return MTP_OK;
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

#define ENTER_0(op, args)                                           \
    static mtp_status enter_##op(mtp_device *device, const args *a) \
    {                                                               \
        MTP_TRY(mtp__cuda_enter(device));                           \
        return mtp__cuda_##op(device, a);                           \
    }
#define ENTER(op, args, scratch) ENTER_0(op, args)
MTP_OP_LIST(ENTER)

#define ROW_0(op) enter_##op,
#define ROW_1(op) enter_##op, mtp__cuda_##op##_scratch,
#define ROW(op, args, scratch) ROW_##scratch(op)
extern const mtp_group_ops mtp__cuda_group; /* group.cu */
extern const mtp_backend mtp__backend_cuda;
const mtp_backend mtp__backend_cuda = {"cuda",
                                       false,
                                       cuda_list,
                                       cuda_open,
                                       cuda_close,
                                       cuda_info,
                                       cuda_counts,
                                       cuda_alloc,
                                       cuda_free,
                                       cuda_zero,
                                       cuda_host_alloc,
                                       cuda_host_free,
                                       mtp__cuda_upload,
                                       mtp__cuda_download,
                                       mtp__cuda_upload_async,
                                       mtp__cuda_download_async,
                                       mtp__cuda_upload_beside,
                                       mtp__cuda_uploads_join,
                                       mtp__cuda_mark,
                                       mtp__cuda_mark_wait,
                                       mtp__cuda_mark_free,
                                       cuda_memory_info,
                                       &mtp__cuda_graph,
                                       &mtp__cuda_group,
                                       MTP_OP_LIST(ROW)};
