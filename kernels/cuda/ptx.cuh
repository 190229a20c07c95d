/* The PTX instructions that kernels use, one function an instruction. Every function has a twin of the same name and
 * meaning in tests/emu/ptx.h.
 *
 * Fragments of a warp, lane l, q = l / 4, p = l % 4 (PTX ISA, "Matrix fragments for mma.m16n8k16"):
 *   A [16, 16]: a[0] row q, columns 2p and 2p + 1; a[1] row q + 8; a[2] row q, columns + 8; a[3] row q + 8, columns + 8
 *   B [16, 8]:  b[0] rows 2p and 2p + 1, column q; b[1] rows + 8
 *   C [16, 8]:  c[0], c[1] row q, columns 2p and 2p + 1; c[2], c[3] row q + 8 */
#ifndef MTP_KERNELS_CUDA_PTX_CUH
#define MTP_KERNELS_CUDA_PTX_CUH

#include "cuda/device.cuh"

#ifdef MTP_EMULATOR
#include "emu/ptx.h"
#else

namespace mtp
{

/* c += a b: bf16 factors, two to a word, the first one in the low half; fp32 sums. */
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t shared_address(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* Matrices of 8 rows of 16 bytes: lane l names the row of matrix l / 8 that is number l % 8, 16-byte aligned, in shared
 * memory. x[i] is the lane's two elements of matrix i: row q, columns 2p and 2p + 1. */
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/* The same with every matrix transposed: rows 2p and 2p + 1, column q. */
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&x)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/* Starts a copy of 16 bytes from device to shared memory, both 16-byte aligned; with `valid` false nothing is read and
 * the destination becomes zero. Seen by the thread after copy_wait, by others after a barrier as well. */
__device__ __forceinline__ void copy_async(void *shared, const void *global, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

/* Closes the thread's group of copies started since the last call (it may be empty). */
__device__ __forceinline__ void copy_commit()
{
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

/* Waits until at most PENDING of the thread's groups are not done. */
template <int PENDING>
__device__ __forceinline__ void copy_wait()
{
    asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

/* 16 bytes at a 16-byte aligned address. Loads go through the read-only path and are not kept in L1. */
__device__ __forceinline__ uint4 load_16(const void *global)
{
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(__cvta_generic_to_global(global)));
    return x;
}

__device__ __forceinline__ void store_16(void *global, uint4 x)
{
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"l"(__cvta_generic_to_global(global)), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}

} // namespace mtp

#endif
#endif
