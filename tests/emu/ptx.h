/* The emulated twins of kernels/cuda/ptx.cuh: one function per PTX instruction, the same names and arguments. Included
 * by it when MTP_EMULATOR is defined. */
#ifndef MTP_EMU_PTX_H
#define MTP_EMU_PTX_H

#include "emu/block.h"

namespace emu
{

/* Registers of 32 bits from word `first` of the lane on, an even number of them. */
template <class Register>
inline void words_in(unsigned first, const Register *values, unsigned count)
{
    static_assert(sizeof(Register) == 4, "registers of 32 bits");
    for (unsigned i = 0; i < count; i += 2) {
        uint64_t word;
        memcpy(&word, values + i, sizeof word);
        give((first + i) / 2, word);
    }
}

template <class Register>
inline void words_out(Register *values, unsigned count)
{
    for (unsigned i = 0; i < count; i += 2) {
        const uint64_t word = got(i / 2);
        memcpy(values + i, &word, count - i < 2 ? sizeof(Register) : sizeof word);
    }
}

/* D = A B + C of one warp; A 4 registers, B 2, C and D 4. */
inline void mma(const Collective &what, float *d, const unsigned *a, const unsigned *b, const float *c,
                const char *file, int line)
{
    words_in(0, a, 4);
    words_in(4, b, 2);
    words_in(6, c, 4);
    collective(what, ~0u, file, line);
    words_out(d, 4);
}

/* `row` is this lane's address: of row (lane % 8) of matrix (lane / 8); lanes behind the last matrix may give any. */
inline void load_matrices(bool transposed, unsigned matrices, unsigned *registers, const void *row, const char *file,
                          int line)
{
    Thread *me = here.thread;
    if (me->lane < 8 * matrices) {
        if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
            kernel_fault(file, line, "misaligned ldmatrix: a row of 16 bytes at %p", row);
        if (!is_shared(row, 16))
            kernel_fault(file, line,
                         "out of bounds: ldmatrix of 16 bytes at %p, which is not in the block's shared memory", row);
        const uint64_t *words = static_cast<const uint64_t *>(row);
        give(0, words[0]);
        give(1, words[1]);
    }
    give(2, matrices);
    collective(transposed ? load_matrix_trans : load_matrix, ~0u, file, line);
    words_out(registers, matrices);
}

/* An access of `bytes`, aligned to them, within live device memory. */
inline void check_global(const void *at, size_t bytes, const char *what, const char *file, int line)
{
    if (reinterpret_cast<uintptr_t>(at) % bytes != 0) kernel_fault(file, line, "misaligned %s at %p", what, at);
    if (!is_device(at, bytes))
        kernel_fault(file, line, "out of bounds: %s at %p, which is not in live device memory", what, at);
}

} // namespace emu

namespace mtp
{

/* c += a b: mma.m16n8k16, bf16 factors, fp32 sums. */
inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, MTP_EMU_WHERE)
{
    const unsigned b[2] = {b0, b1};
    emu::mma(emu::mma_bf16_16816, c, a, b, c, file, line);
}

/* ldmatrix.x4, plain and .trans. */
inline void load_matrices(unsigned (&x)[4], const void *row, MTP_EMU_WHERE)
{
    emu::load_matrices(false, 4, x, row, file, line);
}
inline void load_matrices_transposed(unsigned (&x)[4], const void *row, MTP_EMU_WHERE)
{
    emu::load_matrices(true, 4, x, row, file, line);
}

/* cp.async of 16 bytes; nothing is read, and zeros are written, where not valid. */
inline void copy_async(void *shared, const void *global, bool valid, MTP_EMU_WHERE)
{
    emu::copy_async(shared, global, 16, valid ? 16 : 0, file, line);
}
inline void copy_commit()
{
    emu::copy_commit();
}
template <int PENDING>
inline void copy_wait()
{
    static_assert(PENDING >= 0, "groups that may still be under way");
    emu::copy_wait(static_cast<unsigned>(PENDING));
}

/* ld.global.nc.v4 and st.global.v4. */
inline uint4 load_16(const void *global, MTP_EMU_WHERE)
{
    emu::check_global(global, 16, "16-byte load", file, line);
    return *static_cast<const uint4 *>(global);
}
inline void store_16(void *global, uint4 x, MTP_EMU_WHERE)
{
    emu::check_global(global, 16, "16-byte store", file, line);
    *static_cast<uint4 *>(global) = x;
}

} // namespace mtp

#endif
