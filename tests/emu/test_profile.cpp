/* Protects: what the device that MTP_EMU_DEVICE names has, and that it refuses what it has not. Run once for each of
 * them; the argument is its shared memory a block, in KiB. */
#include "emu/testing.h"

#include <cstdio>
#include <cstdlib>

static int shared_kib;

static __global__ void touch(int *out, int last)
{
    MTP_DYNAMIC_SHARED(int, box);
    box[last] = 7;
    out[0] = box[last];
}

/* Another kernel, whose attribute nobody sets. */
static __global__ void other(int *out)
{
    if (threadIdx.x == 0) out[0] = 1;
}

#ifdef MTP_EMU_BOUNDS /* known where GCC compiles: launch.h */
enum { TWO_WARPS = 64 };

static __global__ void __launch_bounds__(TWO_WARPS) bounded(int *out)
{
    if (threadIdx.x == 0) out[0] = 1;
}

struct Shape {
    enum { THREADS = 128 };
};

template <class T>
static __global__ void __launch_bounds__(T::THREADS, 2) bounded_by(int *out, T)
{
    if (threadIdx.x == 0) out[0] = 1;
}
#endif

static void properties(void **)
{
    cudaDeviceProp prop;
    int value = 0, count = 0;
    assert_cuda(cudaGetDeviceCount(&count));
    assert_int_equal(count, 1);
    assert_cuda(cudaGetDeviceProperties(&prop, 0));
    assert_int_equal(prop.sharedMemPerBlock, 48 * 1024);
    assert_int_equal(prop.sharedMemPerBlockOptin, shared_kib * 1024);
    char name[32];
    snprintf(name, sizeof name, "sm_%d", 10 * prop.major + prop.minor);
    assert_string_equal(name, getenv("MTP_EMU_DEVICE"));
    assert_cuda(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    assert_int_equal(value, shared_kib * 1024);
    assert_cuda(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
    assert_int_equal(value, prop.multiProcessorCount);
    assert_int_equal(cudaSetDevice(1), cudaErrorInvalidDevice);
    cudaGetLastError();
}

static void shared_memory(void **)
{
    const Device<int> out(1);
    const int most = shared_kib * 1024;
    const void *kernel = reinterpret_cast<const void *>(touch);
    assert_cuda(MTP_LAUNCH(touch, 1, 1, 48 * 1024, nullptr, out.get(), 48 * 256 - 1));
    assert_int_equal(MTP_LAUNCH(touch, 1, 1, 48 * 1024 + 4, nullptr, out.get(), 0), cudaErrorInvalidValue);
    assert_int_equal(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most + 1),
                     cudaErrorInvalidValue);
    assert_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    assert_cuda(MTP_LAUNCH(touch, 1, 1, static_cast<size_t>(most), nullptr, out.get(), most / 4 - 1));
    assert_int_equal(out.read()[0], 7);
    assert_int_equal(MTP_LAUNCH(touch, 1, 1, static_cast<size_t>(most) + 4, nullptr, out.get(), 0),
                     cudaErrorInvalidValue);
    assert_int_equal(MTP_LAUNCH(other, 1, 1, 48 * 1024 + 4, nullptr, out.get()), cudaErrorInvalidValue);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidValue);
}

static void shapes(void **)
{
    const Device<int> out(1);
    assert_cuda(MTP_LAUNCH(other, 1, 1024, 0, nullptr, out.get()));
    for (const dim3 &block : {dim3(1025), dim3(0), dim3(32, 33), dim3(1, 1, 65)})
        assert_int_equal(MTP_LAUNCH(other, 1, block, 0, nullptr, out.get()), cudaErrorInvalidConfiguration);
    for (const dim3 &grid : {dim3(0), dim3(1, 65536), dim3(1, 1, 65536)})
        assert_int_equal(MTP_LAUNCH(other, grid, 1, 0, nullptr, out.get()), cudaErrorInvalidConfiguration);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidConfiguration);
}

static void bounds(void **)
{
#ifdef MTP_EMU_BOUNDS
    const Device<int> out(1);
    assert_cuda(MTP_LAUNCH(bounded, 1, TWO_WARPS, 0, nullptr, out.get()));
    assert_cuda(MTP_LAUNCH(bounded, 1, dim3(8, 8), 0, nullptr, out.get()));
    assert_int_equal(MTP_LAUNCH(bounded, 1, TWO_WARPS + 1, 0, nullptr, out.get()), cudaErrorInvalidValue);
    assert_cuda(MTP_LAUNCH(bounded_by<Shape>, 1, 128, 0, nullptr, out.get(), Shape()));
    assert_int_equal(MTP_LAUNCH(bounded_by<Shape>, 1, dim3(64, 4), 0, nullptr, out.get(), Shape()),
                     cudaErrorInvalidValue);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidValue);
#else
    skip();
#endif
}

static void no_clusters(void **)
{
    const void *kernel = reinterpret_cast<const void *>(other);
    int value = 1;
    assert_cuda(cudaDeviceGetAttribute(&value, cudaDevAttrClusterLaunch, 0));
    assert_int_equal(value, 0);
    assert_int_equal(cudaLaunchCooperativeKernel(kernel, 1, 32, nullptr, 0, nullptr), cudaErrorNotSupported);
    const cudaLaunchConfig_t config = {};
    assert_int_equal(cudaLaunchKernelExC(&config, kernel, nullptr), cudaErrorNotSupported);
    assert_int_equal(cudaGetLastError(), cudaErrorNotSupported);
}

static void occupancy(void **)
{
    int blocks = -1;
    cudaDeviceProp prop;
    const void *kernel = reinterpret_cast<const void *>(touch);
    assert_cuda(cudaGetDeviceProperties(&prop, 0));
    assert_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 256, 0));
    assert_int_equal(blocks, prop.maxThreadsPerMultiProcessor / 256);
    assert_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 256, prop.sharedMemPerBlockOptin));
    assert_int_equal(blocks, 1);
    assert_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 256, prop.sharedMemPerBlockOptin + 1));
    assert_int_equal(blocks, 0);
}

int main(int count, char **words)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(properties), cmocka_unit_test(shared_memory), cmocka_unit_test(shapes),
        cmocka_unit_test(bounds),     cmocka_unit_test(no_clusters),   cmocka_unit_test(occupancy),
    };
    if (count != 2) return 2;
    shared_kib = atoi(words[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
