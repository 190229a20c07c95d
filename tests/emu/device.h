/* CUDA's device language on the host: what kernels/cuda/device.cuh includes when MTP_EMULATOR is defined. A .cu file is
 * then C++17, each CUDA thread runs as a fiber, and the official headers give the types and the host API.
 *
 * Shared memory is declared through two macros, so that every block has its own, of known size and address:
 *     MTP_SHARED(float, partial, [4][33]);    __shared__ float partial[4][33];
 *     MTP_DYNAMIC_SHARED(float, tile);        extern __shared__ float tile[];
 * and a launch is MTP_LAUNCH(kernel, grid, block, shared_bytes, stream, arguments...), a cudaError_t. */
#ifndef MTP_EMU_DEVICE_H
#define MTP_EMU_DEVICE_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "emu/block.h"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __constant__
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define MTP_EMU_BOUNDS /* launch.h */
#define MTP_EMU_WARPS(threads, ...) (((threads) + 31) / 32)
#define __launch_bounds__(...) \
    __attribute__((patchable_function_entry(MTP_EMU_WARPS(__VA_ARGS__, 0), MTP_EMU_WARPS(__VA_ARGS__, 0))))
#else
#define __launch_bounds__(...)
#endif
#define __shared__ shared_memory_is_declared_with_MTP_SHARED

#define threadIdx (emu::here.thread->index)
#define blockIdx (const_cast<const uint3 &>(emu::here.block_index))
#define blockDim (const_cast<const uint3 &>(emu::here.block_dim))
#define gridDim (const_cast<const uint3 &>(emu::here.grid_dim))
constexpr int warpSize = 32;

#define MTP_SHARED(type, name, ...)                              \
    using mtp_shared_##name = type __VA_ARGS__;                  \
    static const char mtp_shared_key_##name = 0;                 \
    mtp_shared_##name &name = *static_cast<mtp_shared_##name *>( \
        emu::static_shared(&mtp_shared_key_##name, #name, sizeof(mtp_shared_##name), alignof(mtp_shared_##name)))
#define MTP_DYNAMIC_SHARED(type, name) type *name = static_cast<type *>(emu::here.dynamic_shared)
#define MTP_LAUNCH(kernel, grid, block, shared, stream, ...) \
    emu::launch(#kernel, kernel, dim3(grid), dim3(block), static_cast<size_t>(shared), stream, __VA_ARGS__)

#include "emu/atomics.h"
#include "emu/intrinsics.h"
#include "emu/launch.h"
#include "emu/loads.h"
#include "emu/warp.h"

#endif
