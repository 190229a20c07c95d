/* The numbers of kernels/cuda/nccl_numbers.h are those of NCCL's header, where there is one. */
#include "../../kernels/cuda/nccl_numbers.h"

#if __has_include(<nccl.h>)
#include <nccl.h>

constexpr bool same(int ours, int theirs)
{
    return ours == theirs;
}

static_assert(NCCL_MAJOR == 2 && sizeof(ncclUniqueId) == NCCL_ID_BYTES, "the interface of NCCL 2");
static_assert(same(NCCL_SUCCESS, ncclSuccess) && same(NCCL_IN_PROGRESS, ncclInProgress), "results");
static_assert(same(NCCL_SYSTEM_ERROR, ncclSystemError) && same(NCCL_REMOTE_ERROR, ncclRemoteError), "results");
static_assert(same(NCCL_INVALID_ARGUMENT, ncclInvalidArgument) && same(NCCL_INVALID_USAGE, ncclInvalidUsage),
              "results");
static_assert(same(NCCL_INT8, ncclInt8) && same(NCCL_FLOAT32, ncclFloat32), "types");
static_assert(same(NCCL_BFLOAT16, ncclBfloat16) && same(NCCL_SUM, ncclSum), "types and reductions");
#endif
