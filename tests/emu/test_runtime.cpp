/* Protects: memory, copies, streams and events of the runtime API: what happens when, and what is refused. */
#include "emu/test_kernels.h"
#include "emu/testing.h"

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static void memory(void **)
{
    size_t left, total, after;
    void *p = nullptr, *q = nullptr;
    assert_cuda(cudaMemGetInfo(&left, &total));
    assert_cuda(cudaMalloc(&p, 100));
    assert_cuda(cudaMalloc(&q, size_t(3) << 20));
    assert_int_equal(reinterpret_cast<uintptr_t>(p) % 256, 0);
    assert_int_equal(reinterpret_cast<uintptr_t>(q) % 256, 0);
    assert_cuda(cudaMemGetInfo(&after, &total));
    assert_true(after <= left - (size_t(3) << 20));
    cudaPointerAttributes attributes;
    assert_cuda(cudaPointerGetAttributes(&attributes, p));
    assert_int_equal(attributes.type, cudaMemoryTypeDevice);
    assert_cuda(cudaPointerGetAttributes(&attributes, &left));
    assert_int_equal(attributes.type, cudaMemoryTypeUnregistered);
    assert_cuda(cudaFree(p));
    assert_cuda(cudaFree(q));
    assert_cuda(cudaFree(nullptr));
    assert_int_equal(cudaFree(p), cudaErrorInvalidValue);
    assert_int_equal(cudaFree(&left), cudaErrorInvalidValue);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidValue);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    assert_int_equal(cudaMalloc(&p, total + 1), cudaErrorMemoryAllocation);
    assert_null(p);
    assert_cuda(cudaMemGetInfo(&after, &total));
    assert_int_equal(after, left);
    cudaGetLastError();
}

static void copies(void **)
{
    const std::vector<float> in = numbers(60, 1);
    const Device<float> a(in), b(60);
    std::vector<float> out(60, 0.0f);
    assert_cuda(cudaMemcpy(b.get(), a.get(), 60 * sizeof(float), cudaMemcpyDeviceToDevice));
    assert_cuda(cudaMemcpy(out.data(), b.get(), 60 * sizeof(float), cudaMemcpyDefault));
    assert_true(out == in);
    /* 4 rows of 5 out of rows of 10 */
    assert_cuda(cudaMemcpy2D(out.data(), 5 * sizeof(float), b.get() + 2, 10 * sizeof(float), 5 * sizeof(float), 4,
                             cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < 20; i++) assert_true(out[i] == in[i / 5 * 10 + 2 + i % 5]);
    assert_cuda(cudaMemset2DAsync(b.get() + 1, 10 * sizeof(float), 0, 3 * sizeof(float), 6, nullptr));
    const std::vector<float> got = b.read();
    for (size_t i = 0; i < 60; i++) assert_true(got[i] == (i % 10 >= 1 && i % 10 < 4 ? 0.0f : in[i]));
    assert_int_equal(cudaMemcpy(out.data(), b.get(), 4, cudaMemcpyHostToDevice), cudaErrorInvalidMemcpyDirection);
    assert_int_equal(cudaMemcpy2D(out.data(), 4, b.get(), 40, 8, 2, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    cudaGetLastError();
}

/* Pageable memory is read when the call is made, pinned memory when the stream gets there. */
static void sources(void **)
{
    const cudaStream_t stream = new_stream();
    const Device<float> data(1);
    std::vector<float> pageable(1, 1.0f);
    assert_cuda(cudaMemcpyAsync(data.get(), pageable.data(), 4, cudaMemcpyHostToDevice, stream));
    pageable[0] = 2.0f;
    assert_cuda(cudaStreamSynchronize(stream));
    assert_true(data.read()[0] == 1.0f);
    const Pinned pinned(1);
    pinned.at[0] = 1.0f;
    assert_cuda(cudaMemcpyAsync(data.get(), pinned.at, 4, cudaMemcpyHostToDevice, stream));
    pinned.at[0] = 2.0f;
    assert_cuda(cudaStreamSynchronize(stream));
    assert_true(data.read()[0] == 2.0f);
    assert_cuda(cudaStreamDestroy(stream));
}

/* Results are in pinned memory after the synchronisation, not before; in pageable memory when the call returns. */
static void results(void **)
{
    const cudaStream_t stream = new_stream();
    const Device<float> data(8);
    const Pinned pinned(8);
    std::vector<float> pageable(8, 0.0f);
    assert_cuda(MTP_LAUNCH(set, 1, 32, 0, stream, data.get(), 3.0f, 8));
    pinned.at[7] = 0.0f;
    assert_cuda(cudaMemcpyAsync(pinned.at, data.get(), 32, cudaMemcpyDeviceToHost, stream));
    assert_true(pinned.at[7] != pinned.at[7]);
    assert_cuda(cudaStreamSynchronize(stream));
    assert_true(pinned.at[7] == 3.0f);
    assert_cuda(MTP_LAUNCH(set, 1, 32, 0, stream, data.get(), 4.0f, 8));
    assert_cuda(cudaMemcpyAsync(pageable.data(), data.get(), 32, cudaMemcpyDeviceToHost, stream));
    assert_true(pageable[7] == 4.0f);
    assert_cuda(cudaStreamDestroy(stream));
}

/* ---- streams and events ------------------------------------------------------------------------------------------ */

static void call_back(void *count)
{
    ++*static_cast<int *>(count);
}

static void queries(void **)
{
    const cudaStream_t stream = new_stream();
    cudaEvent_t event, never;
    int calls = 0, asked = 0;
    assert_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    assert_cuda(cudaEventCreate(&never));
    assert_cuda(cudaEventQuery(never));
    assert_cuda(cudaEventSynchronize(never));
    for (int i = 0; i < 3; i++) assert_cuda(cudaLaunchHostFunc(stream, call_back, &calls));
    assert_cuda(cudaEventRecord(event, stream));
    assert_int_equal(calls, 0);
    assert_int_equal(cudaStreamQuery(stream), cudaErrorNotReady);
    while (cudaEventQuery(event) == cudaErrorNotReady) asked++;
    assert_true(asked > 0);
    assert_int_equal(calls, 3);
    assert_cuda(cudaStreamQuery(stream));
    assert_int_equal(cudaGetLastError(), cudaSuccess); /* not ready is no error */
    assert_cuda(cudaEventDestroy(event));
    assert_cuda(cudaEventDestroy(never));
    assert_cuda(cudaStreamDestroy(stream));
    assert_int_equal(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
    assert_int_equal(cudaEventRecord(event, nullptr), cudaErrorInvalidResourceHandle);
    cudaGetLastError();
}

/* A wait for an event makes one stream see the work of the other; waiting for the second runs only what it needs. */
static void two_streams(void **)
{
    const cudaStream_t first = new_stream(), second = new_stream();
    const Device<float> data(4);
    cudaEvent_t event;
    int before = 0, after = 0;
    assert_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    assert_cuda(MTP_LAUNCH(set, 1, 4, 0, first, data.get(), 5.0f, 4));
    assert_cuda(cudaLaunchHostFunc(first, call_back, &before));
    assert_cuda(cudaEventRecord(event, first));
    assert_cuda(cudaLaunchHostFunc(first, call_back, &after));
    assert_cuda(cudaStreamWaitEvent(second, event, 0));
    assert_cuda(MTP_LAUNCH(add, 1, 4, 0, second, data.get(), data.get(), 4));
    assert_cuda(cudaStreamSynchronize(second));
    assert_true(before == 1 && after == 0);
    assert_cuda(cudaStreamSynchronize(first));
    assert_int_equal(after, 1);
    assert_true(data.read()[3] == 10.0f);
    assert_cuda(cudaEventDestroy(event));
    assert_cuda(cudaStreamDestroy(first));
    assert_cuda(cudaStreamDestroy(second));
}

/* The default stream waits for blocking streams, and they for it; not so the others. */
static void default_stream(void **)
{
    cudaStream_t blocking;
    const cudaStream_t apart = new_stream();
    int in_blocking = 0, in_default = 0, in_apart = 0;
    assert_cuda(cudaStreamCreate(&blocking));
    assert_cuda(cudaLaunchHostFunc(blocking, call_back, &in_blocking));
    assert_cuda(cudaLaunchHostFunc(apart, call_back, &in_apart));
    assert_cuda(cudaLaunchHostFunc(nullptr, call_back, &in_default));
    assert_cuda(cudaStreamSynchronize(nullptr));
    assert_true(in_blocking == 1 && in_default == 1 && in_apart == 0);
    assert_cuda(cudaLaunchHostFunc(nullptr, call_back, &in_default));
    assert_cuda(cudaLaunchHostFunc(blocking, call_back, &in_blocking));
    assert_cuda(cudaStreamSynchronize(blocking));
    assert_true(in_blocking == 2 && in_default == 2 && in_apart == 0);
    assert_cuda(cudaDeviceSynchronize());
    assert_int_equal(in_apart, 1);
    assert_cuda(cudaStreamDestroy(blocking));
    assert_cuda(cudaStreamDestroy(apart));
}

static void times(void **)
{
    cudaEvent_t from, to, untimed;
    float milliseconds = -1.0f;
    assert_cuda(cudaEventCreate(&from));
    assert_cuda(cudaEventCreate(&to));
    assert_cuda(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    assert_cuda(cudaEventRecord(from, nullptr));
    assert_cuda(cudaEventRecord(to, nullptr));
    assert_cuda(cudaEventRecord(untimed, nullptr));
    assert_int_equal(cudaEventElapsedTime(&milliseconds, from, to), cudaErrorNotReady);
    assert_cuda(cudaEventSynchronize(untimed));
    assert_cuda(cudaEventElapsedTime(&milliseconds, from, to));
    assert_true(milliseconds >= 0.0f);
    assert_int_equal(cudaEventElapsedTime(&milliseconds, from, untimed), cudaErrorInvalidResourceHandle);
    for (cudaEvent_t event : {from, to, untimed}) assert_cuda(cudaEventDestroy(event));
    cudaGetLastError();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory),         cmocka_unit_test(copies),  cmocka_unit_test(sources),
        cmocka_unit_test(results),        cmocka_unit_test(queries), cmocka_unit_test(two_streams),
        cmocka_unit_test(default_stream), cmocka_unit_test(times),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
