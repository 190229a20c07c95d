#include "peak.h"

#include <omp.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Twelve independent accumulators hide the latency of two multiply-add pipes. The sums stay near zero, and `seed` keeps
 * the compiler from knowing it. Returns a value so that nothing is dropped. */
enum { ACCUMULATORS = 12 };
#define DEFINE_LOOP(name, vector, splat, multiply_add, attributes)                  \
    attributes static float name(long iterations, float seed)                       \
    {                                                                               \
        const vector x = splat(seed), y = splat(seed * 0.5f);                       \
        vector a[ACCUMULATORS];                                                     \
        for (int k = 0; k < ACCUMULATORS; k++) a[k] = x;                            \
        for (long i = 0; i < iterations; i++)                                       \
            for (int k = 0; k < ACCUMULATORS; k++) a[k] = multiply_add(a[k], x, y); \
        float sum = 0, lanes[sizeof(vector) / sizeof(float)];                       \
        for (int k = 0; k < ACCUMULATORS; k++) {                                    \
            memcpy(lanes, &a[k], sizeof lanes);                                     \
            sum += lanes[0];                                                        \
        }                                                                           \
        return sum;                                                                 \
    }

#if defined(__x86_64__)
DEFINE_LOOP(loop_avx512, __m512, _mm512_set1_ps, _mm512_fmadd_ps, __attribute__((target("avx512f"))))
DEFINE_LOOP(loop_avx2, __m256, _mm256_set1_ps, _mm256_fmadd_ps, __attribute__((target("avx2,fma"))))
#endif

typedef float four_floats __attribute__((vector_size(16)));
#define SPLAT(value) ((value) - (four_floats){0})
#define MULTIPLY_ADD(a, x, y) ((a) * (x) + (y))
DEFINE_LOOP(loop_plain, four_floats, SPLAT, MULTIPLY_ADD, )

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef float (*peak_loop)(long iterations, float seed);

static double run(peak_loop loop, int lanes, int num_threads)
{
    const long iterations = 20 * 1000 * 1000;
    double best = 0;
    for (int attempt = 0; attempt < 5; attempt++) {
        float sum = 0;
        const double start = now();
#pragma omp parallel num_threads(num_threads) reduction(+ : sum)
        sum += loop(iterations, 1e-4f * (float)(1 + omp_get_thread_num()));
        const double seconds = now() - start;
        const double gflops = 2.0 * ACCUMULATORS * lanes * (double)iterations * num_threads / seconds * 1e-9;
        if (sum > 0 && gflops > best) best = gflops;
    }
    return best;
}

double bench_peak_gflops(int num_threads)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return run(loop_avx512, 16, num_threads);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return run(loop_avx2, 8, num_threads);
#endif
    return run(loop_plain, 4, num_threads);
}
