/* Real numbers of files, on the host: F32, BF16 and F16 to fp32 and back. Internal.
 *
 * What the device's `convert` op does for tensors in device memory, for what is read and written by files. */
#ifndef MTP_BASE_REAL_H
#define MTP_BASE_REAL_H

#include <stdint.h>

#include "mtp/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* n elements; `src` need not be aligned for its dtype. The dtype must be F32, BF16 or F16 (mtp_dtype_is_compute).
 * Exact. */
void mtp__real_to_f32(float *dst, const void *src, mtp_dtype src_dtype, int64_t n);
/* n elements, rounded to nearest, ties to even; beyond the largest finite value to infinity; NaN stays NaN. `dst` need
 * not be aligned. */
void mtp__real_from_f32(void *dst, mtp_dtype dst_dtype, const float *src, int64_t n);
/* n elements of float8_e4m3fn (4 exponent bits with bias 7, 3 fraction bits, no infinity, 0x7f and 0xff are NaN).
 * Exact. */
void mtp__real_from_f8_e4m3(float *dst, const void *src, int64_t n);
/* Index of the first NaN or infinity; -1 when there is none. */
int64_t mtp__real_find_nonfinite(const float *x, int64_t n);
/* The same of n numbers of a real dtype. */
int64_t mtp__real_find_nonfinite_in(const void *data, mtp_dtype dtype, int64_t n);

#ifdef __cplusplus
}
#endif
#endif
