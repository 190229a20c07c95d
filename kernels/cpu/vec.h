/* Inner loops of the CPU backend, compiled once per instruction set (cpu/vec.c) and reached through this table.
 *
 * They are written with 16-lane vectors of the compiler (GNU C vector_size), so every instruction set adds in the same
 * lane order; results may differ between instruction sets only where one contracts a * b + c. No loop peels by
 * alignment: the bits never depend on an address. Lengths may be any n >= 0; nothing is read or written past n. */
#ifndef MTP_KERNELS_VEC_H
#define MTP_KERNELS_VEC_H

#include <stddef.h>
#include <stdint.h>

#include "mtp/tensor.h"

/* The numbers of one AdamW step: rest = 1 - beta, decay = 1 - lr * weight_decay, step_size = lr / bias1,
 * inv_root_bias2 = 1 / sqrt(bias2). */
typedef struct mtp__vec_adamw {
    float grad_scale, decay, beta1, rest1, beta2, rest2, step_size, inv_root_bias2, eps;
} mtp__vec_adamw;

typedef struct mtp__vec {
    const char *isa;
    /* ---- conversions: n elements of a real dtype to fp32 and back (round to nearest even) */
    void (*to_f32)(float *dst, const void *src, mtp_dtype src_dtype, int64_t n);
    void (*from_f32)(void *dst, mtp_dtype dst_dtype, const float *src, int64_t n);
    /* dst = round(factor * src) with the product rounded to the dtype of src */
    void (*scale_rounded)(float *dst, const void *src, mtp_dtype src_dtype, float factor, int64_t n);
    /* ---- sums */
    float (*dot)(const float *x, const float *y, int64_t n);
    float (*dot3)(const float *x, const float *w, const float *y, int64_t n); /* sum of x w y */
    float (*max)(const float *x, int64_t n);                                  /* -inf for n == 0 */
    double (*sumsq)(const float *x, int64_t n);
    /* ---- elementwise; outputs may be an input */
    void (*axpy)(float *y, float alpha, const float *x, int64_t n);                    /* y += alpha x */
    void (*scale)(float *y, float alpha, const float *x, int64_t n);                   /* y = alpha x */
    void (*mul)(float *y, const float *x, const float *w, float alpha, int64_t n);     /* y = alpha x w */
    void (*mul_add)(float *y, const float *x, const float *w, float alpha, int64_t n); /* y += alpha x w */
    /* y = factor (base + alpha x w) */
    void (*add_mul)(float *y, const float *base, const float *x, const float *w, float alpha, float factor, int64_t n);
    /* dx = alpha w dy - beta x */
    void (*norm_dx)(float *dx, const float *x, const float *w, const float *dy, float alpha, float beta, int64_t n);
    /* y[i] = x[i] c[i] - x[half + i] s[i], y[half + i] = x[half + i] c[i] + x[i] s[i], s = sign * sine */
    void (*rotate)(float *y, const float *x, const float *cosine, const float *sine, float sign, int64_t half);
    /* ---- exponentials */
    /* x[i] = exp(x[i] - shift); returns the sum. exp is accurate to 2 ulp, exp(-inf) = 0 */
    float (*exp_shift_sum)(float *x, float shift, int64_t n);
    /* sum of exp(x[i] - shift), x unchanged */
    float (*sum_exp)(const float *x, float shift, int64_t n);
    /* p[i] = scale * exp(x[i] - lse); may be in place */
    void (*softmax_scaled)(float *p, const float *x, float lse, float scale, int64_t n);
    /* g[i] = exp(s[i] - lse) * (g[i] - d): the dS of attention */
    void (*attention_ds)(float *g, const float *s, float lse, float d, int64_t n);
    void (*geglu)(float *y, const float *gate, const float *up, int64_t n);
    /* any output may be NULL */
    void (*geglu_bwd)(float *y, float *dgate, float *dup, const float *gate, const float *up, const float *dy,
                      int64_t n);
    /* index of the largest element, the lowest index among equals; n >= 1 */
    int64_t (*argmax)(const float *x, int64_t n);
    void (*adamw)(float *p, float *m, float *v, const float *g, int64_t n, const mtp__vec_adamw *step);
    /* fp32 to bf16, up or down by the random numbers of an update (philox.h); place: of the first, a multiple of 8 */
    void (*round_stochastic)(uint16_t *dst, const float *src, int64_t n, uint64_t seed, uint64_t step, uint64_t place);
} mtp__vec;

/* The table of an instruction set; NULL when this build or this machine does not have it. NULL name: the best there is.
 */
const mtp__vec *mtp__vec_choose(const char *isa);

extern const mtp__vec mtp__vec_plain;
#if defined(__x86_64__)
extern const mtp__vec mtp__vec_avx2;
extern const mtp__vec mtp__vec_avx512;
#endif

#endif
