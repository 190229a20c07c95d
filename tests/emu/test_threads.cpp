/* Protects: what a block of threads sees of itself, its barriers and its shared memory, in every order of blocks and
 * threads. */
#include "emu/profile.h"
#include "emu/testing.h"

#include <algorithm>
#include <numeric>

static __global__ void write_places(int *out, int per_block)
{
    const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y), z = static_cast<int>(threadIdx.z);
    const int bx = static_cast<int>(blockIdx.x), by = static_cast<int>(blockIdx.y), bz = static_cast<int>(blockIdx.z);
    const int dx = static_cast<int>(blockDim.x), dy = static_cast<int>(blockDim.y);
    const int gx = static_cast<int>(gridDim.x), gy = static_cast<int>(gridDim.y);
    const int thread = (z * dy + y) * dx + x, block = (bz * gy + by) * gx + bx;
    out[block * per_block + thread] = block * per_block + thread;
}

static void places(void **)
{
    const dim3 grid(3, 2, 2), block(5, 3, 4);
    const int per_block = 60, all = 12 * per_block;
    Device<int> out(std::vector<int>(all, -1));
    assert_cuda(MTP_LAUNCH(write_places, grid, block, 0, nullptr, out.get(), per_block));
    const std::vector<int> got = out.read();
    for (int i = 0; i < all; i++) assert_int_equal(got[static_cast<size_t>(i)], i);
}

/* Every thread adds up what all wrote, between two barriers: wrong without either. */
static __global__ void rounds(int *out, int count)
{
    MTP_SHARED(int, values, [96]);
    MTP_SHARED(int, total);
    const int me = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    int result = 0;
    for (int round = 0; round < count; round++) {
        values[me] = me * (round + 1);
        __syncthreads();
        if (me == round % threads) {
            total = 0;
            for (int i = 0; i < threads; i++) total += values[i];
        }
        __syncthreads();
        result += total;
    }
    out[static_cast<int>(blockIdx.x) * threads + me] = result;
}

static void barriers(void **)
{
    for (int threads : {1, 31, 64, 96}) {
        Device<int> out(static_cast<size_t>(5 * threads));
        assert_cuda(MTP_LAUNCH(rounds, 5, static_cast<unsigned>(threads), 0, nullptr, out.get(), 7));
        for (int got : out.read()) assert_int_equal(got, threads * (threads - 1) / 2 * 28);
    }
}

static __global__ void counts(int *out)
{
    const int me = static_cast<int>(threadIdx.x);
    const int a = __syncthreads_count(me % 3 == 0), b = __syncthreads_and(me < 100), c = __syncthreads_or(me == 99);
    const int d = __syncthreads_and(me < 99), e = __syncthreads_or(me == 100);
    if (me == 57) out[0] = a, out[1] = b, out[2] = c, out[3] = d, out[4] = e;
}

static void counting_barriers(void **)
{
    Device<int> out(5);
    assert_cuda(MTP_LAUNCH(counts, 1, 100, 0, nullptr, out.get()));
    const std::vector<int> got = out.read();
    assert_int_equal(got[0], 34);
    assert_true(got[1] != 0 && got[2] != 0);
    assert_true(got[3] == 0 && got[4] == 0);
}

/* Threads that have ended are not waited for, as on devices since sm_70. */
static __global__ void early(int *out)
{
    MTP_SHARED(int, seen, [64]);
    const int me = static_cast<int>(threadIdx.x);
    if (me >= 40) return;
    seen[me] = me;
    __syncthreads();
    out[me] = seen[39 - me];
}

static void early_exits(void **)
{
    Device<int> out(40);
    assert_cuda(MTP_LAUNCH(early, 1, 64, 0, nullptr, out.get()));
    const std::vector<int> got = out.read();
    for (size_t i = 0; i < 40; i++) assert_int_equal(got[i], 39 - static_cast<int>(i));
}

/* Two warps hand values to the other two through named barriers: bar.arrive on one side, bar.sync on the other. */
static __global__ void hand_over(int *out)
{
    MTP_SHARED(int, box, [64]);
    const unsigned me = threadIdx.x;
    for (int round = 0; round < 3; round++) {
        if (me < 64) {
            if (round > 0) emu::named_barrier(2, 128, true, __FILE__, __LINE__);
            box[me] = 1000 * round + static_cast<int>(me);
            emu::named_barrier(1, 128, false, __FILE__, __LINE__);
        } else {
            emu::named_barrier(1, 128, true, __FILE__, __LINE__);
            out[64 * round + static_cast<int>(me - 64)] = box[127 - me];
            if (round < 2) emu::named_barrier(2, 128, false, __FILE__, __LINE__);
        }
    }
}

static void named_barriers(void **)
{
    Device<int> out(192);
    assert_cuda(MTP_LAUNCH(hand_over, 1, 128, 0, nullptr, out.get()));
    const std::vector<int> got = out.read();
    for (int i = 0; i < 192; i++) assert_int_equal(got[static_cast<size_t>(i)], i / 64 * 1000 + 63 - i % 64);
}

/* Shared memory starts as NaN in every block, whatever the block before left there. */
static __global__ void stale(float *out)
{
    MTP_SHARED(float, fixed, [8]);
    MTP_DYNAMIC_SHARED(float, dynamic);
    const unsigned me = threadIdx.x;
    out[2 * (blockIdx.x * blockDim.x + me)] = fixed[me];
    out[2 * (blockIdx.x * blockDim.x + me) + 1] = dynamic[me];
    fixed[me] = dynamic[me] = 1.0f;
}

static void shared_is_poisoned(void **)
{
    Device<float> out(48);
    assert_cuda(MTP_LAUNCH(stale, 3, 8, 8 * sizeof(float), nullptr, out.get()));
    for (float got : out.read()) assert_true(got != got);
}

template <int A, class T>
static __global__ void of_template(T *out, T x)
{
    MTP_SHARED(T, one);
    one = x;
    out[0] = static_cast<T>(one + static_cast<T>(A));
}

static void templates(void **)
{
    Device<float> out(1);
    assert_cuda(MTP_LAUNCH((of_template<2, float>), 1, 1, 0, nullptr, out.get(), 1.5f));
    assert_true(out.read()[0] == 3.5f);
}

/* The order in which blocks ran, as an atomic counter saw it. */
static __global__ void note_order(int *order, int *next)
{
    if (threadIdx.x == 0) order[atomicAdd(next, 1)] = static_cast<int>(blockIdx.x);
}

static std::vector<int> order_of_blocks()
{
    Device<int> order(20), next(std::vector<int>{0});
    assert_cuda(MTP_LAUNCH(note_order, 20, 32, 0, nullptr, order.get(), next.get()));
    return order.read();
}

static void orders(void **)
{
    std::vector<int> natural(20), sorted;
    std::iota(natural.begin(), natural.end(), 0);
    const emu::Options before = emu::options();
    emu::options().workers = 1;
    emu::options().seed = 0;
    assert_true(order_of_blocks() == natural);
    emu::options().seed = 5;
    sorted = order_of_blocks();
    assert_true(sorted != natural);
    std::sort(sorted.begin(), sorted.end());
    assert_true(sorted == natural);
    emu::options().workers = 2;
    sorted = order_of_blocks();
    std::sort(sorted.begin(), sorted.end());
    assert_true(sorted == natural);
    emu::options() = before;
}

static int in_order(void **)
{
    return 0;
}

static int permuted(void **)
{
    emu::options().seed = 77;
    return 0;
}

static int parallel(void **)
{
    emu::options().workers = 2;
    return 0;
}

static int natural(void **)
{
    emu::options().seed = 0;
    emu::options().workers = 1;
    return 0;
}

#define EVERYWHERE(setup)                                                   \
    cmocka_unit_test_setup_teardown(places, setup, natural),                \
        cmocka_unit_test_setup_teardown(barriers, setup, natural),          \
        cmocka_unit_test_setup_teardown(counting_barriers, setup, natural), \
        cmocka_unit_test_setup_teardown(early_exits, setup, natural),       \
        cmocka_unit_test_setup_teardown(named_barriers, setup, natural),    \
        cmocka_unit_test_setup_teardown(shared_is_poisoned, setup, natural)

int main(void)
{
    const struct CMUnitTest tests[] = {EVERYWHERE(in_order), EVERYWHERE(permuted), EVERYWHERE(parallel),
                                       cmocka_unit_test(templates), cmocka_unit_test(orders)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
