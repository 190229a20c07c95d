/* What the benchmarks of single kernels share: options, the device, several sets of inputs, timing. Ops are called
 * through the table of a backend, so the same program runs on a GPU, under the emulator and on the CPU.
 *
 * Every program makes `--sets` sets of inputs and goes through them in turn, so that none is found in a cache; it
 * checks the result of the first one against double precision, ends with 1 when it is wrong, and only then measures. A
 * sample is a number of calls in turn, closed by a read that waits for the device: so many that the read does not
 * count, and in a graph, so that launching them does not. The median of `--repeats` samples is reported, as one JSON
 * line, with percent of what the device can do at most: by its data sheet, or as --peak-gflops and --peak-gbytes say.
 */
#ifndef MTP_BENCH_CUDA_KERNEL_BENCH_H
#define MTP_BENCH_CUDA_KERNEL_BENCH_H

#include <math.h>

#include "base/backends.h"
#include "base/error.h"
#include "base/real.h"
#include "bench.h"
#include "device_peak.h"

enum { KERNEL_SETS_MOST = 64, KERNEL_REPEATS_MOST = 1000 };

typedef struct kernel_option {
    const char *name; /* "tokens": given as --tokens N */
    int64_t *value;
    int64_t least;
    const char *help;
} kernel_option;

typedef struct kernel_bench {
    bench base;
    const char *device_name;
    int64_t sets, repeats, fp32;
    int64_t peak_gflops, peak_gbytes; /* 0: not known */
    mtp_dtype stored;                 /* of activations and their gradients */
    uint64_t random;
} kernel_bench;

static inline void kernel_usage(const char *program, const kernel_option *options, size_t count)
{
    fprintf(stderr,
            "usage: %s [--device cuda|cuda:N|cpu] [--sets N] [--repeats N] [--fp32 0|1] [--peak-gflops N] "
            "[--peak-gbytes N]",
            program);
    for (size_t i = 0; i < count; i++) fprintf(stderr, " [--%s N]", options[i].name);
    fprintf(stderr, "\n");
    for (size_t i = 0; i < count; i++)
        fprintf(stderr, "  --%-10s %s (%lld)\n", options[i].name, options[i].help, (long long)*options[i].value);
    exit(2);
}

static inline bool kernel_take(const kernel_option *options, size_t count, const char *name, const char *text)
{
    for (size_t i = 0; i < count; i++) {
        if (strcmp(options[i].name, name) != 0) continue;
        char *end;
        *options[i].value = strtoll(text, &end, 10);
        return end != text && !*end && *options[i].value >= options[i].least;
    }
    return false;
}

/* Options, then the device. */
static inline kernel_bench kernel_open(int argc, char **argv, const kernel_option *options, size_t count)
{
    kernel_bench b = {.device_name = "cuda", .sets = 3, .repeats = 20, .random = 88172645463325252u};
    const kernel_option common[] = {{"sets", &b.sets, 1, ""},
                                    {"repeats", &b.repeats, 1, ""},
                                    {"fp32", &b.fp32, 0, ""},
                                    {"peak-gflops", &b.peak_gflops, 0, ""},
                                    {"peak-gbytes", &b.peak_gbytes, 0, ""}};
    const size_t num_common = sizeof common / sizeof *common;
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc || strncmp(argv[i], "--", 2) != 0) kernel_usage(argv[0], options, count);
        if (strcmp(argv[i], "--device") == 0)
            b.device_name = argv[i + 1];
        else if (!kernel_take(common, num_common, argv[i] + 2, argv[i + 1]) &&
                 !kernel_take(options, count, argv[i] + 2, argv[i + 1]))
            kernel_usage(argv[0], options, count);
    }
    if (b.sets > KERNEL_SETS_MOST || b.repeats > KERNEL_REPEATS_MOST) kernel_usage(argv[0], options, count);
    mtp_device_options device = {.bf16 = !b.fp32};
    bench_need(mtp__backend_of(b.device_name, &b.base.ops, &device.index));
    bench_need(b.base.ops->device_open(&device, &b.base.device));
    const mtp_device_info *info = b.base.ops->device_info(b.base.device);
    const bench_device_peak peak = bench_device_peak_of(info->isa);
    b.stored = info->stored;
    if (!b.peak_gflops && !b.fp32) b.peak_gflops = (int64_t)peak.gflops;
    if (!b.peak_gbytes) b.peak_gbytes = (int64_t)peak.gbytes;
    return b;
}

/* Device memory with a copy of `host`. */
static inline void *kernel_upload(const kernel_bench *b, const void *host, size_t bytes)
{
    void *memory = bench_alloc(&b->base, (int64_t)bytes, 1);
    bench_need(b->base.ops->upload(b->base.device, memory, host, bytes));
    return memory;
}

static inline void *kernel_host(size_t bytes)
{
    void *memory = malloc(bytes ? bytes : 1);
    if (memory) return memory;
    fprintf(stderr, "error: no memory for %zu bytes on the host\n", bytes);
    exit(1);
}

/* count floats in (-scale, scale) on the host, other ones at every call; bf16: those that bf16 can hold. */
static inline float *kernel_floats(kernel_bench *b, int64_t count, float scale, bool bf16)
{
    float *x = kernel_host((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++) {
        x[i] = scale * ((float)(bench_random(&b->random) >> 40) * 0x1p-23f - 1.0f);
        if (!bf16) continue;
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bits &= 0xffff0000u;
        memcpy(&x[i], &bits, sizeof bits);
    }
    return x;
}

/* Floats that bf16 can hold, as bf16 on the device. */
static inline void *kernel_upload_bf16(const kernel_bench *b, const float *x, int64_t count)
{
    uint16_t *half = kernel_host((size_t)count * sizeof *half);
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        half[i] = (uint16_t)(bits >> 16);
    }
    void *memory = kernel_upload(b, half, (size_t)count * sizeof *half);
    free(half);
    return memory;
}

/* count floats as a vector of the device in this dtype; those of `x` must fit it. x NULL: not set. */
static inline void *kernel_upload_as(const kernel_bench *b, const float *x, int64_t count, mtp_dtype dtype)
{
    if (!x) return bench_alloc(&b->base, count, mtp_dtype_size(dtype));
    return dtype == MTP_BF16 ? kernel_upload_bf16(b, x, count) : kernel_upload(b, x, (size_t)count * sizeof *x);
}

/* A matrix of the device, and random numbers in it that its dtype holds: *host, when it is asked for, keeps them. */
static inline mtp_view kernel_matrix(kernel_bench *b, int64_t rows, int64_t width, mtp_dtype dtype, float scale,
                                     float **host)
{
    float *x = kernel_floats(b, rows * width, scale, dtype == MTP_BF16);
    const mtp_view view = mtp_view_2d(kernel_upload_as(b, x, rows * width, dtype), dtype, rows, width);
    if (host)
        *host = x;
    else
        free(x);
    return view;
}

/* A matrix of the device for a result. */
static inline mtp_view kernel_result(const kernel_bench *b, int64_t rows, int64_t width, mtp_dtype dtype)
{
    return mtp_view_2d(kernel_upload_as(b, NULL, rows * width, dtype), dtype, rows, width);
}

static inline void *kernel_download(const kernel_bench *b, const void *memory, size_t bytes)
{
    void *host = kernel_host(bytes);
    bench_need(b->base.ops->download(b->base.device, host, memory, bytes));
    return host;
}

/* `count` values of a matrix or vector of the device from element `first` on, as floats. */
static inline float *kernel_values(const kernel_bench *b, mtp_view view, int64_t first, int64_t count)
{
    const size_t size = mtp_dtype_size(view.dtype);
    void *raw = kernel_download(b, (const char *)view.data + (size_t)first * size, (size_t)count * size);
    float *x = kernel_host((size_t)count * sizeof *x);
    mtp__real_to_f32(x, raw, view.dtype, count);
    free(raw);
    return x;
}

/* Half the distance of two neighbours of this dtype, relative to them. */
static inline double kernel_rounding(mtp_dtype dtype)
{
    return dtype == MTP_BF16 ? 0x1p-8 : 0x1p-24;
}

/* |got - want| <= tolerance * largest, else the program ends: a wrong kernel is not timed. */
static inline void kernel_check(const char *what, double got, double want, double largest, double tolerance)
{
    if (fabs(got - want) <= tolerance * largest) return;
    fprintf(stderr, "error: %s is %.9g, must be %.9g (largest %.3g, tolerance %.1g of it): not timed\n", what, got,
            want, largest, tolerance);
    exit(1);
}

static inline int kernel_compare_seconds(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* What a sample consists of: `launches` times `rounds` rounds through all sets; the rounds are one graph where the
 * device has graphs, so that the time to launch an op does not count. */
typedef struct kernel_work {
    mtp_status (*call)(void *context, int64_t set);
    void *context;
    const void *memory; /* any of the device: a read of it waits */
    mtp_graph *graph;   /* NULL: calls are made one by one */
    int64_t rounds, launches;
} kernel_work;

static inline void kernel_rounds(const kernel_bench *b, const kernel_work *work)
{
    for (int64_t round = 0; round < work->rounds; round++)
        for (int64_t set = 0; set < b->sets; set++) bench_need(work->call(work->context, set));
}

/* Seconds of one call, in the mean over a sample. */
static inline double kernel_sample(const kernel_bench *b, const kernel_work *work)
{
    const mtp_backend *ops = b->base.ops;
    char byte;
    const double start = bench_now();
    for (int64_t launch = 0; launch < work->launches; launch++) {
        if (work->graph)
            bench_need(ops->graph->launch(b->base.device, work->graph));
        else
            kernel_rounds(b, work);
    }
    bench_need(ops->download(b->base.device, &byte, work->memory, 1));
    return (bench_now() - start) / (double)(work->launches * work->rounds * b->sets);
}

static inline void kernel_capture(const kernel_bench *b, kernel_work *work)
{
    const mtp_graph_ops *graphs = b->base.ops->graph;
    if (!graphs) return;
    graphs->free(b->base.device, work->graph);
    bench_need(graphs->capture_begin(b->base.device));
    kernel_rounds(b, work);
    bench_need(graphs->capture_end(b->base.device, &work->graph));
}

/* Median seconds of one call; call(context, set) runs the op on one set of inputs. A sample takes 10 ms, a thousand
 * times the wait at its end. With one repeat nothing is meant to be measured: one round. */
static inline double kernel_time(const kernel_bench *b, mtp_status (*call)(void *context, int64_t set), void *context,
                                 const void *memory)
{
    enum { GRAPH_CALLS = 256 };
    double samples[KERNEL_REPEATS_MOST];
    kernel_work work = {.call = call, .context = context, .memory = memory, .rounds = 1, .launches = 1};
    kernel_sample(b, &work); /* warms up: what is run for the first time cannot be captured */
    kernel_capture(b, &work);
    if (b->repeats > 1) {
        const double calls = 0.01 / kernel_sample(b, &work), most = GRAPH_CALLS / (double)b->sets;
        const double rounds = calls / (double)b->sets;
        work.rounds = rounds < 1 ? 1 : rounds > most ? (int64_t)most + 1 : (int64_t)rounds;
        kernel_capture(b, &work);
        const double launches = rounds / (double)work.rounds;
        work.launches = launches < 1 ? 1 : launches > 1000 ? 1000 : (int64_t)launches;
    }
    for (int64_t i = 0; i < b->repeats; i++) samples[i] = kernel_sample(b, &work);
    if (work.graph) b->base.ops->graph->free(b->base.device, work.graph);
    qsort(samples, (size_t)b->repeats, sizeof *samples, kernel_compare_seconds);
    return samples[b->repeats / 2];
}

/* ", "name": value", or null when the peak is not known. */
static inline void kernel_percent(const char *name, double rate, double peak)
{
    if (peak > 0 && rate > 0)
        printf(", \"%s\": %.1f", name, 100 * rate / peak);
    else
        printf(", \"%s\": null", name);
}

static inline void kernel_report(const kernel_bench *b, const char *op, const char *shape, double seconds, double flop,
                                 double bytes)
{
    printf("{\"op\": \"%s\", \"case\": \"%s\", \"device\": \"%s\", \"mode\": \"%s\", \"seconds\": %.9f, "
           "\"tflops\": %.3f, \"gbytes_per_second\": %.1f",
           op, shape, b->device_name, b->fp32 ? "fp32" : "bf16", seconds, 1e-12 * flop / seconds,
           1e-9 * bytes / seconds);
    kernel_percent("percent_of_peak_flops", 1e-9 * flop / seconds, (double)b->peak_gflops);
    kernel_percent("percent_of_peak_bytes", 1e-9 * bytes / seconds, (double)b->peak_gbytes);
    printf("}\n");
    fflush(stdout);
}

/* In place of a report: why there are no numbers. */
static inline void kernel_refused(const kernel_bench *b, const char *op, const char *shape, const char *why)
{
    printf("{\"op\": \"%s\", \"case\": \"%s\", \"device\": \"%s\", \"refused\": \"", op, shape, b->device_name);
    for (; *why; why++)
        if (*why == '"' || *why == '\\')
            printf("\\%c", *why);
        else
            putchar((unsigned char)*why < ' ' ? ' ' : *why);
    printf("\"}\n");
    fflush(stdout);
}

#endif
