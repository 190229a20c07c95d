/* Numbers of NCCL 2's interface, so that its header is not needed; tests/emu/nccl_header.cpp compares them with it. */
#ifndef MTP_KERNELS_CUDA_NCCL_NUMBERS_H
#define MTP_KERNELS_CUDA_NCCL_NUMBERS_H

enum {
    NCCL_ID_BYTES = 128,
    /* results */
    NCCL_SUCCESS = 0,
    NCCL_SYSTEM_ERROR = 2,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_INVALID_USAGE = 5,
    NCCL_REMOTE_ERROR = 6,
    NCCL_IN_PROGRESS = 7,
    /* types and reductions */
    NCCL_INT8 = 0,
    NCCL_FLOAT32 = 7,
    NCCL_BFLOAT16 = 9,
    NCCL_SUM = 0
};

#endif
