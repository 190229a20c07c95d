/* Kernels of the tests of streams and graphs. */
#ifndef EMU_TEST_KERNELS_H
#define EMU_TEST_KERNELS_H

#include "emu/testing.h"

static __global__ void add(float *to, const float *from, int n)
{
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) to[i] += from[i];
}

static __global__ void set(float *to, float value, int n)
{
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) to[i] = value;
}

#endif
