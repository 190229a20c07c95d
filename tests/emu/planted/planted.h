/* Programs with one bug each; the emulator, or the sanitizer of the build, must end them with the right words. */
#ifndef MTP_EMU_PLANTED_H
#define MTP_EMU_PLANTED_H

#include "emu/device.h"
#include "emu/ptx.h"

#include <cstdio>
#include <cstdlib>

struct Planted {
    const char *name;
    int (*run)(); /* what main() returns, if it gets that far: 1 if the result shows the bug */
};

extern const Planted barrier_bugs[], memory_bugs[], host_bugs[], copy_bugs[];

/* Device memory of n floats, all zero. */
inline float *zeros(size_t n)
{
    float *data = nullptr;
    if (cudaMalloc(reinterpret_cast<void **>(&data), n * sizeof(float)) != cudaSuccess) exit(2);
    if (cudaMemset(data, 0, n * sizeof(float)) != cudaSuccess) exit(2);
    return data;
}

/* Waits, frees, and says whether the first of n results is NaN. */
inline int finish(float *data)
{
    float first = 0;
    cudaMemcpy(&first, data, sizeof first, cudaMemcpyDeviceToHost);
    cudaFree(data);
    if (first == first) return 0;
    fprintf(stderr, "planted: the result is NaN\n");
    return 1;
}

#endif
