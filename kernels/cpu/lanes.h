/* Vectors of the instruction set that a translation unit is compiled for, and the functions on them that cpu/vec.c is
 * built from. Included by cpu/vec.c alone. */
#ifndef MTP_KERNELS_LANES_H
#define MTP_KERNELS_LANES_H

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
enum { LANES = VECTOR_BYTES / 4, FLOATS_OF_A_BLOCK = 64, VECTORS_OF_A_BLOCK = FLOATS_OF_A_BLOCK / LANES };

typedef float vf __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VECTOR_BYTES)));
typedef double vd __attribute__((vector_size(VECTOR_BYTES)));
typedef float vf_half __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint16_t vh __attribute__((vector_size(VECTOR_BYTES / 2)));
/* the same in memory, where nothing is aligned beyond its element */
typedef float vf_mem __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef float vf_half_mem __attribute__((vector_size(VECTOR_BYTES / 2), aligned(4), may_alias));
typedef uint16_t vh_mem __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));

#define LANE_FUNCTION static inline __attribute__((always_inline))

LANE_FUNCTION vf load(const float *x)
{
    return *(const vf_mem *)x;
}

LANE_FUNCTION void store(float *x, vf v)
{
    *(vf_mem *)x = v;
}

LANE_FUNCTION vf splat(float x)
{
    return x - (vf){0}; /* x - 0, not x + 0: keeps -0 */
}

LANE_FUNCTION vf as_float(vu x)
{
    return (vf)x;
}

LANE_FUNCTION vf choose(vi mask, vf yes, vf no)
{
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}

LANE_FUNCTION vf larger(vf x, vf y)
{
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return choose(x > y, x, y);
#endif
}

LANE_FUNCTION vf square_root(vf x)
{
#if defined(__AVX512F__)
    return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (vf)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
    return (vf)_mm_sqrt_ps((__m128)x);
#else
    vf y;
    for (int i = 0; i < LANES; i++) y[i] = __builtin_sqrtf(x[i]);
    return y;
#endif
}

/* exp. x = n ln2 + r, |r| <= ln2 / 2; exp(r) = 1 + r + r^2 q(r), q of degree 4 interpolated at Chebyshev nodes
 * (relative error below 0.1 ulp before rounding); the factor 2^n is applied in two halves, so that results down to the
 * smallest denormal and up to infinity come out right. NaN stays NaN. */
LANE_FUNCTION vf exponential(vf x)
{
    const vf shifter = splat(0x1.8p+23f); /* adding it rounds to an integer and leaves that in the low bits */
    x = choose(x > 89.0f, splat(89.0f), x);
    x = choose(x < -104.0f, splat(-104.0f), x);
    const vf shifted = x * 0x1.715476p+0f + shifter;
    const vf n = shifted - shifter;
    vf r = x - n * 0x1.62e4p-1f; /* exact: this part of ln2 has 16 bits */
    r = r - n * 0x1.7f7d1cp-20f;
    vf q = splat(0x1.6d117cp-10f);
    q = q * r + 0x1.120be2p-7f;
    q = q * r + 0x1.555518p-5f;
    q = q * r + 0x1.5554dcp-3f;
    q = q * r + 0x1p-1f;
    const vf p = (r + r * r * q) + 1.0f;
    const vi exponent = (vi)((vu)shifted - (vu)shifter);
    const vi half = exponent >> 1;
    const vf first = as_float((vu)(half + 127) << 23);
    const vf second = as_float((vu)(exponent - half + 127) << 23);
    return p * first * second;
}

/* sigmoid(z) and 1 - sigmoid(z), both to a few ulp everywhere: with e = exp(-|z|) neither cancels. */
LANE_FUNCTION void sigmoid_pair(vf z, vf *sigmoid, vf *complement)
{
    const vi negative = z < 0.0f;
    const vf e = exponential(choose(negative, z, -z));
    const vf large = 1.0f / (1.0f + e);
    const vf small = e * large;
    *sigmoid = choose(negative, small, large);
    *complement = choose(negative, large, small);
}

/* gelu_tanh(g) = g sigmoid(2y), y = sqrt(2/pi) (g + 0.044715 g^3), because 0.5 (1 + tanh(y)) = sigmoid(2y); and its
 * derivative sigmoid + g 2y' sigmoid (1 - sigmoid). Beyond |g| = 16 the sigmoid is 0 or 1 in fp32, and the argument is
 * held there so that the cube cannot overflow. */
LANE_FUNCTION void gelu(vf g, vf *value, vf *slope)
{
    vf held = choose(g > 16.0f, splat(16.0f), g);
    held = choose(held < -16.0f, splat(-16.0f), held);
    const vf square = held * held;
    const vf z = held * (1.5957691216f + 0.07135481283f * square);
    vf sigmoid, complement;
    sigmoid_pair(z, &sigmoid, &complement);
    *value = g * sigmoid;
    *slope = sigmoid + held * (1.5957691216f + 0.21406443848f * square) * (sigmoid * complement);
}

/* ---- 16-bit floating point --------------------------------------------------------------------------------------- */

LANE_FUNCTION vf from_bf16(vh x)
{
    return as_float(__builtin_convertvector(x, vu) << 16);
}

LANE_FUNCTION vh to_bf16(vf x)
{
    const vu bits = (vu)x;
    const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const vu nan = (bits >> 16) | 0x40u; /* rounding could carry a NaN into infinity */
    const vu is_nan = (vu)((bits & 0x7fffffffu) > 0x7f800000u);
    return __builtin_convertvector((is_nan & nan) | (~is_nan & rounded), vh);
}

LANE_FUNCTION vf from_f16(vh x)
{
    const vu bits = __builtin_convertvector(x, vu);
    const vu sign = (bits & 0x8000u) << 16;
    const vf magnitude = as_float((bits & 0x7fffu) << 13) * 0x1p+112f; /* rebias; exact for denormals as well */
    const vu special = (vu)((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return as_float((vu)magnitude | special | sign);
}

LANE_FUNCTION vh to_f16(vf x)
{
    const vu bits = (vu)x;
    const vu sign = (bits >> 16) & 0x8000u;
    const vu magnitude = bits & 0x7fffffffu;
    /* normal: drop 13 bits with round to nearest even and rebias by -112 */
    const vu normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    /* denormal: adding 0.5 makes the unit of the last place 2^-24, that of f16 */
    const vu denormal = (vu)(as_float(magnitude) + 0.5f) - 0x3f000000u;
    const vu is_denormal = (vu)(magnitude < 0x38800000u); /* below 2^-14 */
    const vu is_large = (vu)(magnitude >= 0x477ff000u);   /* 65520 and up: infinity or NaN */
    const vu is_nan = (vu)(magnitude > 0x7f800000u);
    const vu large = 0x7c00u | (is_nan & (0x200u | ((magnitude >> 13) & 0x3ffu)));
    const vu finite = (is_denormal & denormal) | (~is_denormal & normal);
    return __builtin_convertvector(((is_large & large) | (~is_large & finite)) | sign, vh);
}

#endif
