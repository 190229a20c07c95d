/* For the tests of the emulator: cmocka from C++, arrays in device memory. */
#ifndef MTP_EMU_TESTING_H
#define MTP_EMU_TESTING_H

#include "emu/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

extern "C" {
#include <cmocka.h>
}

#include <initializer_list>
#include <vector>

#define assert_cuda(call) assert_int_equal((call), cudaSuccess)

template <class T>
class Device
{
  public:
    explicit Device(size_t count) : count_(count)
    {
        assert_cuda(cudaMalloc(reinterpret_cast<void **>(&data_), count * sizeof(T)));
    }
    Device(const std::vector<T> &values) : Device(values.size())
    {
        assert_cuda(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~Device()
    {
        cudaFree(data_);
    }
    Device(const Device &) = delete;
    Device &operator=(const Device &) = delete;

    T *get() const
    {
        return data_;
    }
    std::vector<T> read() const
    {
        std::vector<T> values(count_);
        assert_cuda(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }

  private:
    T *data_ = nullptr;
    size_t count_;
};

inline cudaStream_t new_stream()
{
    cudaStream_t stream;
    assert_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

/* Pinned host memory. */
struct Pinned {
    float *at;
    explicit Pinned(size_t n)
    {
        assert_cuda(cudaMallocHost(reinterpret_cast<void **>(&at), n * sizeof(float)));
    }
    ~Pinned()
    {
        cudaFreeHost(at);
    }
};

/* Pseudo-random numbers in [-1, 1) that are the same everywhere. */
inline std::vector<float> numbers(size_t count, unsigned seed)
{
    std::vector<float> values(count);
    for (float &value : values) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<float>(seed >> 8) / 8388608.0f - 1.0f;
    }
    return values;
}

#endif
