/* What the benchmarks share: the device, memory, numbers, timing. One JSON line a case goes to standard output. */
#ifndef MTP_BENCH_H
#define MTP_BENCH_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "mtp/status.h"
#include "ops.h"

typedef struct bench {
    const mtp_backend *ops;
    mtp_device *device;
    int repeats;
} bench;

static inline void bench_need(mtp_status status)
{
    if (status == MTP_OK) return;
    fprintf(stderr, "error: %s\n", mtp_last_error()->message);
    exit(1);
}

/* Arguments of every benchmark: [threads [repeats]]; 0 threads means all cores. */
static inline bench bench_open(int argc, char **argv)
{
    bench b = {.ops = mtp__backend_cpu(), .repeats = argc > 2 ? atoi(argv[2]) : 5};
    const mtp_device_options options = {.num_threads = argc > 1 ? atoi(argv[1]) : 0};
    if (argc > 3 || options.num_threads < 0 || b.repeats < 1) {
        fprintf(stderr, "usage: %s [threads [repeats]]\n", argv[0]);
        exit(2);
    }
    bench_need(b.ops->device_open(&options, &b.device));
    return b;
}

static inline void *bench_alloc(const bench *b, int64_t count, size_t element)
{
    void *memory = NULL;
    bench_need(b->ops->memory_alloc(b->device, (size_t)count * element, &memory));
    bench_need(b->ops->memory_zero(b->device, memory, (size_t)count * element));
    return memory;
}

static inline void bench_free(const bench *b, void *memory)
{
    b->ops->memory_free(b->device, memory);
}

static inline uint64_t bench_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* count floats in (-scale, scale). */
static inline float *bench_floats(const bench *b, int64_t count, float scale)
{
    float *x = bench_alloc(b, count, sizeof(float));
    uint64_t state = 88172645463325252u;
    for (int64_t i = 0; i < count; i++) x[i] = scale * ((float)(bench_random(&state) >> 40) * 0x1p-23f - 1.0f);
    return x;
}

static inline double bench_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Runs `call` once to warm up, then b.repeats times; `seconds` is the best. */
#define BENCH_BEST(b, seconds, call)                                 \
    do {                                                             \
        bench_need(call);                                            \
        (seconds) = 1e30;                                            \
        for (int bench_i_ = 0; bench_i_ < (b).repeats; bench_i_++) { \
            const double bench_start_ = bench_now();                 \
            bench_need(call);                                        \
            const double bench_took_ = bench_now() - bench_start_;   \
            if (bench_took_ < (seconds)) (seconds) = bench_took_;    \
        }                                                            \
    } while (0)

/* One line: the case, its name and shape, the best time and the rate of the useful work. */
static inline void bench_report(const bench *b, const char *op, const char *shape, double seconds, double flop)
{
    const mtp_device_info *info = b->ops->device_info(b->device);
    printf("{\"op\": \"%s\", \"case\": \"%s\", \"isa\": \"%s\", \"threads\": %d, \"seconds\": %.6f, "
           "\"gflops\": %.1f}\n",
           op, shape, info->isa, info->num_threads, seconds, 1e-9 * flop / seconds);
    fflush(stdout);
}

#endif
