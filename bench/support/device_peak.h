/* What GPUs can do at most, as their makers' data sheets say: the yardstick of benchmark results in percent. */
#ifndef MTP_BENCH_DEVICE_PEAK_H
#define MTP_BENCH_DEVICE_PEAK_H

typedef struct bench_device_peak {
    const char *name;
    double gflops; /* dense bf16 products added in fp32 */
    double gbytes; /* of memory, a second */
} bench_device_peak;

/* By what stands in the name that the device reports; zeros for one that is not known. */
bench_device_peak bench_device_peak_of(const char *name);

#endif
