/* What the files of the CUDA backend share on the host side: the device, its errors, the choice of a kernel by dtype.
 * Internal to kernels/cuda. Ops are launched on device->stream; no op waits for the device. */
#ifndef MTP_KERNELS_CUDA_H
#define MTP_KERNELS_CUDA_H

#include <cublasLt.h>

#include <type_traits>

#include "base/error.h"
#include "check.h"
#include "check_args.h"
#include "cuda/device.cuh"
#include "ops.h"

struct mtp__cuda_plans; /* linear.cu: the cuBLASLt algorithm of every shape seen */

struct mtp_device {
    int ordinal;
    cudaStream_t stream;
    cudaStream_t copies; /* uploads beside the ops */
    cudaEvent_t copied;  /* behind those that uploads_join joins */
    cublasLtHandle_t lt;
    struct mtp__cuda_plans *plans;
    bool bf16;      /* products take their factors rounded to bf16 (accumulated in fp32); else all is fp32 */
    int capability; /* 10 * major + minor: 80, 86, 90, 100, 120 */
    int multiprocessors;
    int shared_block;     /* bytes of shared memory that one block may have */
    int shared_processor; /* and a multiprocessor */
    int l2_bytes;
    mtp::fault *fault; /* device memory, zero until a kernel meets a bad index */
    bool capturing;    /* between capture_begin and capture_end */
    mtp_device_counts counts;
    mtp_device_info info;
    char name[160];
    char library[96];
};

/* ---- errors ------------------------------------------------------------------------------------------------------ */

mtp_status mtp__cuda_failed(cudaError_t error, const char *what, const char *file, int line);
mtp_status mtp__cublas_failed(cublasStatus_t status, const char *what, const char *file, int line);

/* Forward an error of the CUDA runtime; `what` is the op or what was being done. */
#define MTP_CUDA_TRY(what, call)                                                                                  \
    do {                                                                                                          \
        const cudaError_t mtp_cuda_error_ = (call);                                                               \
        if (mtp_cuda_error_ != cudaSuccess) return mtp__cuda_failed(mtp_cuda_error_, (what), __FILE__, __LINE__); \
    } while (0)
#define MTP_CUBLAS_TRY(what, call)                                                     \
    do {                                                                               \
        const cublasStatus_t mtp_cublas_status_ = (call);                              \
        if (mtp_cublas_status_ != CUBLAS_STATUS_SUCCESS)                               \
            return mtp__cublas_failed(mtp_cublas_status_, (what), __FILE__, __LINE__); \
    } while (0)

/* ---- the device's functions of the table that stand in queue.cu ---------------------------------------------------
 */

/* The current device belongs to the thread; a context may be used by another thread than the one that opened it. */
mtp_status mtp__cuda_enter(const mtp_device *device);
/* Waits for all that was launched; `what` is what asks for it. */
mtp_status mtp__cuda_wait(mtp_device *device, const char *what);
/* MTP_OK, or what a kernel noted about an index: then the note is cleared. */
mtp_status mtp__cuda_report(mtp_device *device, const mtp::fault *fault);
mtp_status mtp__cuda_upload(mtp_device *device, void *memory, const void *host, size_t bytes);
mtp_status mtp__cuda_download(mtp_device *device, void *host, const void *memory, size_t bytes);
mtp_status mtp__cuda_upload_async(mtp_device *device, void *memory, const void *host, size_t bytes);
mtp_status mtp__cuda_download_async(mtp_device *device, void *host, const void *memory, size_t bytes);
mtp_status mtp__cuda_upload_beside(mtp_device *device, void *memory, const void *host, size_t bytes, mtp_mark *after);
mtp_status mtp__cuda_uploads_join(mtp_device *device);
mtp_status mtp__cuda_mark(mtp_device *device, mtp_mark **mark);
mtp_status mtp__cuda_mark_wait(mtp_device *device, mtp_mark *mark);
void mtp__cuda_mark_free(mtp_device *device, mtp_mark *mark);
extern const mtp_graph_ops mtp__cuda_graph;

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

namespace mtp
{

template <typename T>
struct type_of {
    using type = T;
};

/* Calls body(type_of<T>()) with the element type of a view that was checked to be MTP__REAL:
 *     return dispatch(a->x.dtype, [&](auto tag) { using T = typename decltype(tag)::type; ... }); */
template <typename Body>
inline auto dispatch(mtp_dtype dtype, Body body)
{
    if (dtype == MTP_BF16) return body(type_of<bf16>());
    if (dtype == MTP_F16) return body(type_of<f16>());
    return body(type_of<float>());
}

/* The same for a view that is stored: F32 or BF16. */
template <typename Body>
inline auto dispatch_stored(mtp_dtype dtype, Body body)
{
    if (dtype == MTP_BF16) return body(type_of<bf16>());
    return body(type_of<float>());
}

/* Elements of a pack of rows in these types where packs fit: 16 bytes of the narrowest. */
template <typename... T>
constexpr int wide_pack()
{
    return ((sizeof(T) == 2) || ...) ? 8 : 4;
}

inline int64_t divide_up(int64_t n, int64_t by)
{
    return (n + by - 1) / by;
}

/* Blocks of a grid-stride loop over n items: enough to fill the device, no more. */
inline unsigned blocks_for(const mtp_device *device, int64_t n, int threads)
{
    const int64_t needed = divide_up(n, threads), most = (int64_t)device->multiprocessors * (2048 / threads);
    return (unsigned)(needed < most ? needed : most);
}

/* May rows of `width` elements of all these views (absent ones do not count) be loaded and stored in packs of N? */
template <int N, typename... Views>
inline bool packs_fit(int64_t width, const Views &...views)
{
    bool fit = width % N == 0;
    auto look = [&](const mtp_view &view) {
        if (!view.data) return;
        const size_t size = mtp_dtype_size(view.dtype), bytes = N * size < 16 ? N * size : 16; /* of one access */
        fit = fit && (uintptr_t)view.data % bytes == 0;
        for (int32_t axis = 0; axis + 1 < view.rank; axis++)
            fit = fit && (view.stride[axis] * (int64_t)size % (int64_t)bytes == 0 || view.shape[axis] == 1);
    };
    (look(views), ...);
    return fit;
}

/* body(std::integral_constant<int, N, or 1 where packs do not fit>()) */
template <int N, typename Body>
inline auto with_pack(bool fit, Body body)
{
    if (fit) return body(std::integral_constant<int, N>());
    return body(std::integral_constant<int, 1>());
}

/* 4 where packs of 4 fit, else 1; and body(std::integral_constant<int, 4 or 1>()) of it. */
template <typename... Views>
inline int pack_of(int64_t width, const Views &...views)
{
    return packs_fit<4>(width, views...) ? 4 : 1;
}
template <typename Body>
inline auto with_pack(int pack, Body body)
{
    return with_pack<4>(pack == 4, body);
}

/* Kernels that want more than 48 KiB of dynamic shared memory must ask for it once. */
template <typename Kernel>
inline cudaError_t allow_shared(Kernel kernel, size_t bytes)
{
    if (bytes <= 48 * 1024) return cudaSuccess;
    return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                (int)bytes);
}

} // namespace mtp

/* C[m, n] = beta C + op(A) op(B), row-major, by cuBLASLt: op(A) is [m, k], op(B) [k, n]; A and B have one dtype (F32 or
 * BF16), C is F32, or BF16 like A and B; ld are elements between rows. beta is 0 or 1. The workspace
 * needs mtp__cuda_gemm_workspace() bytes. `batch` products with strides in elements (1 and 0 for one). */
typedef struct mtp__gemm {
    bool trans_a, trans_b;
    int64_t m, n, k;
    const void *a;
    int64_t lda, stride_a;
    const void *b;
    int64_t ldb, stride_b;
    float beta;
    void *c;
    int64_t ldc, stride_c;
    int64_t batch;
    mtp_dtype dtype;   /* of A and B */
    mtp_dtype c_dtype; /* of C; zero: MTP_F32 */
} mtp__gemm;
size_t mtp__cuda_gemm_workspace(const mtp_device *device);
mtp_status mtp__cuda_gemm(mtp_device *device, const char *op, const mtp__gemm *gemm, void *workspace);

/* dst = src converted, contiguous rows of `width` elements out of a matrix view: rows.cu. */
mtp_status mtp__cuda_convert_matrix(mtp_device *device, const char *op, const mtp_view *src, void *dst, mtp_dtype to);

/* Ops of the table, one file a subject: cuda/<subject>.cu. */
#define MTP__CUDA_DECLARE_0(op, args) mtp_status mtp__cuda_##op(mtp_device *device, const args *a);
#define MTP__CUDA_DECLARE_1(op, args)                             \
    mtp_status mtp__cuda_##op(mtp_device *device, const args *a); \
    size_t mtp__cuda_##op##_scratch(const mtp_device *device, const args *a);
#define MTP__CUDA_DECLARE(op, args, scratch) MTP__CUDA_DECLARE_##scratch(op, args)
extern "C" {
MTP_OP_LIST(MTP__CUDA_DECLARE)
}
#undef MTP__CUDA_DECLARE
#undef MTP__CUDA_DECLARE_0
#undef MTP__CUDA_DECLARE_1

#endif
