/* Arithmetic, bit and conversion intrinsics. The approximate ones of the device (__expf and the like) are exact here.
 */
#ifndef MTP_EMU_INTRINSICS_H
#define MTP_EMU_INTRINSICS_H

#include "emu/block.h"

#include <cmath>
#include <type_traits>

#include <math.h>

/* ---- min and max, with the usual conversions of mixed arguments -------------------------------------------------- */

template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b)
{
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return std::fmin(static_cast<T>(a), static_cast<T>(b));
    else
        return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b)
{
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return std::fmax(static_cast<T>(a), static_cast<T>(b));
    else
        return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

/* ---- fp32 -------------------------------------------------------------------------------------------------------- */

inline float rsqrtf(float x)
{
    return 1.0f / sqrtf(x);
}
inline float rcbrtf(float x)
{
    return 1.0f / cbrtf(x);
}
inline float __expf(float x)
{
    return expf(x);
}
inline float __exp10f(float x)
{
    return powf(10.0f, x);
}
inline float __logf(float x)
{
    return logf(x);
}
inline float __log2f(float x)
{
    return log2f(x);
}
inline float __log10f(float x)
{
    return log10f(x);
}
inline float __powf(float x, float y)
{
    return powf(x, y);
}
inline float __sinf(float x)
{
    return sinf(x);
}
inline float __cosf(float x)
{
    return cosf(x);
}
inline float __tanf(float x)
{
    return tanf(x);
}
inline void __sincosf(float x, float *sine, float *cosine)
{
    *sine = sinf(x);
    *cosine = cosf(x);
}
inline float __fdividef(float x, float y)
{
    return x / y;
}
inline float __fdiv_rn(float x, float y)
{
    return x / y;
}
inline float __frcp_rn(float x)
{
    return 1.0f / x;
}
inline float __frsqrt_rn(float x)
{
    return static_cast<float>(1.0 / sqrt(static_cast<double>(x)));
}
inline float __fsqrt_rn(float x)
{
    return sqrtf(x);
}
inline float __fadd_rn(float x, float y)
{
    return x + y;
}
inline float __fsub_rn(float x, float y)
{
    return x - y;
}
inline float __fmul_rn(float x, float y)
{
    return x * y;
}
inline float __fmaf_rn(float x, float y, float z)
{
    return fmaf(x, y, z);
}
inline float __saturatef(float x)
{
    return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; /* NaN becomes 0 */
}
inline double __dadd_rn(double x, double y)
{
    return x + y;
}
inline double __dmul_rn(double x, double y)
{
    return x * y;
}
inline double rsqrt(double x)
{
    return 1.0 / sqrt(x);
}

/* ---- bits -------------------------------------------------------------------------------------------------------- */

namespace emu
{

template <class To, class From>
inline To bit_cast(From from)
{
    static_assert(sizeof(To) == sizeof(From), "the same size");
    To to;
    memcpy(static_cast<void *>(&to), &from, sizeof to);
    return to;
}

} // namespace emu

inline unsigned __float_as_uint(float x)
{
    return emu::bit_cast<unsigned>(x);
}
inline int __float_as_int(float x)
{
    return emu::bit_cast<int>(x);
}
inline float __uint_as_float(unsigned x)
{
    return emu::bit_cast<float>(x);
}
inline float __int_as_float(int x)
{
    return emu::bit_cast<float>(x);
}
inline long long __double_as_longlong(double x)
{
    return emu::bit_cast<long long>(x);
}
inline double __longlong_as_double(long long x)
{
    return emu::bit_cast<double>(x);
}
inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
inline int __popcll(unsigned long long x)
{
    return __builtin_popcountll(x);
}
inline int __clz(int x)
{
    return x ? __builtin_clz(static_cast<unsigned>(x)) : 32;
}
inline int __clzll(long long x)
{
    return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64;
}
inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
inline int __ffsll(long long x)
{
    return __builtin_ffsll(x);
}
inline unsigned __brev(unsigned x)
{
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (x >> i & 1u) << (31 - i);
    return reversed;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector)
{
    const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
    unsigned picked = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned s = selector >> (4 * i) & 15u, byte = static_cast<unsigned>(bytes >> (8 * (s & 7u))) & 255u;
        picked |= (s & 8u ? (byte & 128u ? 255u : 0u) : byte) << (8 * i); /* bit 3 spreads the sign */
    }
    return picked;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift)
{
    const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
    return static_cast<unsigned>(both << (shift & 31u) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift)
{
    const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
    return static_cast<unsigned>(both >> (shift & 31u));
}
inline unsigned __umulhi(unsigned x, unsigned y)
{
    return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
}
inline int __mulhi(int x, int y)
{
    return static_cast<int>(static_cast<long long>(x) * y >> 32);
}
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y)
{
    __extension__ typedef unsigned __int128 wide;
    return static_cast<unsigned long long>(static_cast<wide>(x) * y >> 64);
}

/* ---- conversions: out of range saturates, NaN becomes 0 -----------------------------------------------------------
 */

namespace emu
{

inline int to_int(float rounded)
{
    if (rounded != rounded) return 0;
    return rounded >= 2147483648.0f    ? 2147483647
           : rounded <= -2147483648.0f ? -2147483647 - 1
                                       : static_cast<int>(rounded);
}
inline unsigned to_unsigned(float rounded)
{
    return rounded > 0.0f ? (rounded >= 4294967296.0f ? 4294967295u : static_cast<unsigned>(rounded)) : 0u;
}

} // namespace emu

inline int __float2int_rn(float x)
{
    return emu::to_int(nearbyintf(x));
}
inline int __float2int_rz(float x)
{
    return emu::to_int(truncf(x));
}
inline int __float2int_rd(float x)
{
    return emu::to_int(floorf(x));
}
inline int __float2int_ru(float x)
{
    return emu::to_int(ceilf(x));
}
inline unsigned __float2uint_rn(float x)
{
    return emu::to_unsigned(nearbyintf(x));
}
inline unsigned __float2uint_rz(float x)
{
    return emu::to_unsigned(truncf(x));
}
inline unsigned __float2uint_rd(float x)
{
    return emu::to_unsigned(floorf(x));
}
inline unsigned __float2uint_ru(float x)
{
    return emu::to_unsigned(ceilf(x));
}
inline float __int2float_rn(int x)
{
    return static_cast<float>(x);
}
inline float __uint2float_rn(unsigned x)
{
    return static_cast<float>(x);
}
inline float __ll2float_rn(long long x)
{
    return static_cast<float>(x);
}

/* ---- bf16 and fp16 arithmetic that the official headers give to device code only ----------------------------------
 */

inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c)
{
    return __float2bfloat16_rn(fmaf(__bfloat162float(a), __bfloat162float(b), __bfloat162float(c)));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c)
{
    return __nv_bfloat162(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
inline __half __hfma(__half a, __half b, __half c)
{
    return __float2half_rn(fmaf(__half2float(a), __half2float(b), __half2float(c)));
}

/* ---- the rest ---------------------------------------------------------------------------------------------------- */

inline void __nanosleep(unsigned)
{
}
[[noreturn]] inline void __trap(MTP_EMU_WHERE)
{
    emu::kernel_fault(file, line, "__trap()");
}

#endif
