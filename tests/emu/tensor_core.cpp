/* mma.sync and ldmatrix: the fragments of the lanes, as the PTX manual draws them. */
#include "emu/scheduler.h"

namespace emu
{

static void need_all(unsigned mask)
{
    if (mask != ~0u)
        kernel_fault(nullptr, 0, "a tensor core instruction by lanes %08x: all 32 take part, always", mask);
}

static unsigned word(const Thread *lane, unsigned i)
{
    return static_cast<unsigned>(lane->in[i / 2] >> (32 * (i % 2)));
}

static void set_word(Thread *lane, unsigned i, unsigned value)
{
    const unsigned shift = 32 * (i % 2);
    lane->out[i / 2] = (lane->out[i / 2] & ~(uint64_t(0xffffffffu) << shift)) | uint64_t(value) << shift;
}

static float from_bits(unsigned bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float bf16_value(unsigned bits)
{
    return from_bits(bits << 16);
}

/* in: A as words 0..3, B as 4..5, C as 6..9; out: D as words 0..3. Each register holds two neighbours along k. */
static void do_mma_bf16(Thread *const *lanes, unsigned mask)
{
    need_all(mask);
    float a[16][16], b[8][16]; /* b[n][k] */
    for (unsigned lane = 0; lane < WARP; lane++) {
        const unsigned group = lane / 4, k = 2 * (lane % 4);
        for (unsigned i = 0; i < 4; i++) {
            const unsigned w = word(lanes[lane], i), row = group + 8 * (i % 2), col = k + 8 * (i / 2);
            a[row][col] = bf16_value(w & 0xffffu);
            a[row][col + 1] = bf16_value(w >> 16);
        }
        for (unsigned i = 0; i < 2; i++) {
            const unsigned w = word(lanes[lane], 4 + i), row = k + 8 * i;
            b[group][row] = bf16_value(w & 0xffffu);
            b[group][row + 1] = bf16_value(w >> 16);
        }
    }
    for (unsigned lane = 0; lane < WARP; lane++) {
        for (unsigned i = 0; i < 4; i++) {
            const unsigned row = lane / 4 + 8 * (i / 2), col = 2 * (lane % 4) + i % 2;
            float sum = from_bits(word(lanes[lane], 6 + i));
            for (unsigned k = 0; k < 16; k++) sum += a[row][k] * b[col][k];
            unsigned bits;
            memcpy(&bits, &sum, sizeof bits);
            set_word(lanes[lane], i, bits);
        }
    }
}

/* Lane 8 i + r has read row r of matrix i, 8 values of 16 bits, into in[0..1]; in[2] is how many matrices. Lane l gets
 * of every matrix the elements (l / 4, 2 (l % 4)) and the one beside it, or those of the transposed matrix. */
static void give_matrices(Thread *const *lanes, bool transposed)
{
    const unsigned matrices = static_cast<unsigned>(lanes[0]->in[2]);
    for (unsigned m = 0; m < matrices; m++) {
        uint16_t at[8][8];
        for (unsigned r = 0; r < 8; r++) memcpy(at[r], lanes[8 * m + r]->in, sizeof at[r]);
        for (unsigned lane = 0; lane < WARP; lane++) {
            const unsigned row = lane / 4, col = 2 * (lane % 4);
            const unsigned low = transposed ? at[col][row] : at[row][col];
            const unsigned high = transposed ? at[col + 1][row] : at[row][col + 1];
            set_word(lanes[lane], m, low | high << 16);
        }
    }
}

static void do_load(Thread *const *lanes, unsigned mask)
{
    need_all(mask);
    give_matrices(lanes, false);
}

static void do_load_trans(Thread *const *lanes, unsigned mask)
{
    need_all(mask);
    give_matrices(lanes, true);
}

const Collective mma_bf16_16816 = {"mma.m16n8k16.bf16", do_mma_bf16, false};
const Collective load_matrix = {"ldmatrix", do_load, false};
const Collective load_matrix_trans = {"ldmatrix.trans", do_load_trans, false};

} // namespace emu
