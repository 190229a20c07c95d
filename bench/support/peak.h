/* What the machine can do at most: the yardstick that benchmark results are given in percent of. */
#ifndef MTP_BENCH_PEAK_H
#define MTP_BENCH_PEAK_H

/* fp32 GFLOP/s of `num_threads` threads doing nothing but fused multiply-adds in registers, with the widest instruction
 * set of this machine: the best of several tries. */
double bench_peak_gflops(int num_threads);

#endif
