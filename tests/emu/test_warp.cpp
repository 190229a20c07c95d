/* Protects: shuffles, votes, match and reductions of a warp against plain loops. */
#include "emu/testing.h"

#include <algorithm>

static __global__ void shuffles(int *out, int width)
{
    const int lane = static_cast<int>(threadIdx.x) % 32, value = 100 + lane;
    int *mine = out + 4 * static_cast<int>(threadIdx.x);
    mine[0] = __shfl_sync(~0u, value, lane * 7 + 3, width);
    mine[1] = __shfl_xor_sync(~0u, value, 5, width);
    mine[2] = __shfl_up_sync(~0u, value, 3, width);
    mine[3] = __shfl_down_sync(~0u, value, 2, width);
}

static void shuffles_of_every_width(void **)
{
    for (int width : {2, 4, 8, 16, 32}) {
        Device<int> out(4 * 64);
        assert_cuda(MTP_LAUNCH(shuffles, 1, 64, 0, nullptr, out.get(), width));
        const std::vector<int> got = out.read();
        for (int i = 0; i < 64; i++) {
            const int lane = i % 32, first = lane / width * width, in = lane % width;
            const int *mine = &got[static_cast<size_t>(4 * i)];
            assert_int_equal(mine[0], 100 + first + (lane * 7 + 3) % width);
            const int other = lane ^ 5; /* beyond the segment a later one is not read, an earlier one is */
            assert_int_equal(mine[1], 100 + (other / width > lane / width ? lane : other));
            assert_int_equal(mine[2], 100 + (in >= 3 ? lane - 3 : lane));
            assert_int_equal(mine[3], 100 + (in + 2 < width ? lane + 2 : lane));
        }
    }
}

static __global__ void typed(double *d, float *f, unsigned *pairs)
{
    const int lane = static_cast<int>(threadIdx.x);
    d[lane] = __shfl_xor_sync(~0u, 1.0 / (lane + 1), 1);
    f[lane] = __shfl_sync(~0u, 0.5f * static_cast<float>(lane), 31 - lane);
    const __nv_bfloat162 pair = __floats2bfloat162_rn(static_cast<float>(lane), 1.0f);
    unsigned bits;
    memcpy(&bits, &pair, sizeof bits);
    pairs[lane] = __shfl_sync(~0u, bits, 9);
}

static void values_of_4_and_8_bytes(void **)
{
    Device<double> d(32);
    Device<float> f(32);
    Device<unsigned> pairs(32);
    assert_cuda(MTP_LAUNCH(typed, 1, 32, 0, nullptr, d.get(), f.get(), pairs.get()));
    for (size_t i = 0; i < 32; i++) {
        assert_true(d.read()[i] == 1.0 / static_cast<double>((i ^ 1) + 1));
        assert_true(f.read()[i] == 0.5f * static_cast<float>(31 - i));
        assert_int_equal(pairs.read()[i], 0x3f804110u); /* (9, 1) in bf16 */
    }
}

/* Both halves of a warp, each with its own mask, in loops of different lengths. */
static __global__ void halves(int *out)
{
    const int lane = static_cast<int>(threadIdx.x);
    const unsigned mask = lane < 16 ? 0xffffu : 0xffff0000u;
    int sum = 0;
    for (int i = 0; i < (lane < 16 ? 3 : 5); i++) sum += __shfl_sync(mask, lane, i, 16);
    sum += __shfl_sync(~0u, 1000 * (lane == 20), 20);
    out[lane] = sum;
}

static void masks_apart(void **)
{
    Device<int> out(32);
    assert_cuda(MTP_LAUNCH(halves, 1, 32, 0, nullptr, out.get()));
    const std::vector<int> got = out.read();
    for (size_t i = 0; i < 32; i++) assert_int_equal(got[i], 1000 + (i < 16 ? 0 + 1 + 2 : 16 + 17 + 18 + 19 + 20));
}

static __global__ void votes(unsigned *out)
{
    const unsigned lane = threadIdx.x;
    unsigned *mine = out + 8 * lane;
    int all;
    mine[0] = __ballot_sync(~0u, lane % 3 == 1);
    mine[1] = static_cast<unsigned>(__any_sync(~0u, lane == 31)) | static_cast<unsigned>(__any_sync(~0u, 0)) << 1;
    mine[2] = static_cast<unsigned>(__all_sync(~0u, 1)) | static_cast<unsigned>(__all_sync(~0u, lane != 4)) << 1;
    mine[3] = __match_any_sync(~0u, lane / 5);
    mine[4] = __match_all_sync(~0u, 7, &all);
    mine[5] = static_cast<unsigned>(all);
    mine[6] = __match_all_sync(~0u, lane / 31, &all);
    mine[7] = static_cast<unsigned>(all);
}

static void votes_and_matches(void **)
{
    Device<unsigned> out(8 * 32);
    assert_cuda(MTP_LAUNCH(votes, 1, 32, 0, nullptr, out.get()));
    const std::vector<unsigned> got = out.read();
    for (unsigned lane = 0; lane < 32; lane++) {
        unsigned thirds = 0, same = 0;
        for (unsigned i = 0; i < 32; i++) {
            thirds |= (i % 3 == 1 ? 1u : 0u) << i;
            same |= (i / 5 == lane / 5 ? 1u : 0u) << i;
        }
        const unsigned *mine = &got[8 * lane];
        assert_int_equal(mine[0], thirds);
        assert_int_equal(mine[1], 1);
        assert_int_equal(mine[2], 1);
        assert_int_equal(mine[3], same);
        assert_int_equal(mine[4], ~0u);
        assert_int_equal(mine[5], 1);
        assert_int_equal(mine[6], 0);
        assert_int_equal(mine[7], 0);
    }
}

static __global__ void reductions(unsigned *out)
{
    const unsigned lane = threadIdx.x, value = lane * 2654435761u;
    const int sign = static_cast<int>(lane) * 7 - 100;
    if (lane % 2 == 0) return; /* lanes that have ended are not waited for */
    unsigned *mine = out + 9 * lane;
    mine[0] = __reduce_add_sync(~0u, value);
    mine[1] = __reduce_min_sync(~0u, value);
    mine[2] = __reduce_max_sync(~0u, value);
    mine[3] = __reduce_and_sync(~0u, value);
    mine[4] = __reduce_or_sync(~0u, value);
    mine[5] = __reduce_xor_sync(~0u, value);
    mine[6] = static_cast<unsigned>(__reduce_add_sync(~0u, sign));
    mine[7] = static_cast<unsigned>(__reduce_min_sync(~0u, sign));
    mine[8] = static_cast<unsigned>(__reduce_max_sync(~0u, sign));
}

static void reductions_of_a_warp(void **)
{
    Device<unsigned> out(9 * 32);
    assert_cuda(MTP_LAUNCH(reductions, 1, 32, 0, nullptr, out.get()));
    const std::vector<unsigned> got = out.read();
    unsigned want[9] = {0, ~0u, 0, ~0u, 0, 0, 0, 0x7fffffffu, 0x80000000u};
    for (unsigned lane = 1; lane < 32; lane += 2) {
        const unsigned value = lane * 2654435761u;
        const int sign = static_cast<int>(lane) * 7 - 100;
        want[0] += value;
        want[1] = std::min(want[1], value);
        want[2] = std::max(want[2], value);
        want[3] &= value;
        want[4] |= value;
        want[5] ^= value;
        want[6] += static_cast<unsigned>(sign);
        want[7] = static_cast<unsigned>(std::min(static_cast<int>(want[7]), sign));
        want[8] = static_cast<unsigned>(std::max(static_cast<int>(want[8]), sign));
    }
    for (unsigned lane = 1; lane < 32; lane += 2)
        for (unsigned i = 0; i < 9; i++) assert_int_equal(got[9 * lane + i], want[i]);
}

/* __syncwarp orders memory among the lanes. */
static __global__ void through_memory(int *out)
{
    MTP_SHARED(int, box, [32]);
    const int lane = static_cast<int>(threadIdx.x);
    int value = lane;
    for (int step = 1; step < 32; step *= 2) {
        box[lane] = value;
        __syncwarp();
        value += box[lane ^ step];
        __syncwarp();
    }
    out[lane] = value;
}

static void memory_of_a_warp(void **)
{
    Device<int> out(32);
    assert_cuda(MTP_LAUNCH(through_memory, 1, 32, 0, nullptr, out.get()));
    for (int got : out.read()) assert_int_equal(got, 31 * 16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shuffles_of_every_width),
        cmocka_unit_test(values_of_4_and_8_bytes),
        cmocka_unit_test(masks_apart),
        cmocka_unit_test(votes_and_matches),
        cmocka_unit_test(reductions_of_a_warp),
        cmocka_unit_test(memory_of_a_warp),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
