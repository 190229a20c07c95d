/* Atomic operations. They are sequentially consistent here; what a device needs beside them (__threadfence) is not
 * checked. */
#ifndef MTP_EMU_ATOMICS_H
#define MTP_EMU_ATOMICS_H

#include "emu/block.h"

#include <type_traits>

namespace emu
{

template <class T>
struct integer_of {
    using type = std::conditional_t<sizeof(T) == 8, unsigned long long,
                                    std::conditional_t<sizeof(T) == 4, unsigned, unsigned short>>;
};

/* *p = change(*p) in one piece; the value before. */
template <class T, class F>
inline T atomic_change(T *p, F change, const char *file, int line)
{
    using I = typename integer_of<T>::type;
    check_aligned(p, "atomic operation", file, line);
    I *word = reinterpret_cast<I *>(p), before = __atomic_load_n(word, __ATOMIC_SEQ_CST), after;
    T value;
    do {
        memcpy(static_cast<void *>(&value), &before, sizeof value);
        const T next = change(value);
        memcpy(&after, &next, sizeof after);
    } while (!__atomic_compare_exchange_n(word, &before, after, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return value;
}

template <class T>
struct same_type {
    using type = T;
};
template <class T>
using same_t = typename same_type<T>::type; /* the second argument converts to the type of the first */

} // namespace emu

template <class T>
inline T atomicAdd(T *p, emu::same_t<T> value, MTP_EMU_WHERE)
{
    return emu::atomic_change(
        p, [=](T old) { return static_cast<T>(old + value); }, file, line);
}
template <class T>
inline T atomicSub(T *p, emu::same_t<T> value, MTP_EMU_WHERE)
{
    return emu::atomic_change(
        p, [=](T old) { return static_cast<T>(old - value); }, file, line);
}
template <class T>
inline T atomicMin(T *p, emu::same_t<T> value, MTP_EMU_WHERE)
{
    return emu::atomic_change(
        p, [=](T old) { return value < old ? value : old; }, file, line);
}
template <class T>
inline T atomicMax(T *p, emu::same_t<T> value, MTP_EMU_WHERE)
{
    return emu::atomic_change(
        p, [=](T old) { return old < value ? value : old; }, file, line);
}
template <class T>
inline T atomicAnd(T *p, emu::same_t<T> value, MTP_EMU_WHERE)
{
    return emu::atomic_change(
        p, [=](T old) { return static_cast<T>(old & value); }, file, line);
}
template <class T>
inline T atomicOr(T *p, emu::same_t<T> value, MTP_EMU_WHERE)
{
    return emu::atomic_change(
        p, [=](T old) { return static_cast<T>(old | value); }, file, line);
}
template <class T>
inline T atomicXor(T *p, emu::same_t<T> value, MTP_EMU_WHERE)
{
    return emu::atomic_change(
        p, [=](T old) { return static_cast<T>(old ^ value); }, file, line);
}
template <class T>
inline T atomicExch(T *p, emu::same_t<T> value, MTP_EMU_WHERE)
{
    return emu::atomic_change(
        p, [=](T) { return value; }, file, line);
}
template <class T>
inline T atomicCAS(T *p, emu::same_t<T> expected, emu::same_t<T> value, MTP_EMU_WHERE)
{
    return emu::atomic_change(
        p, [=](T old) { return old == expected ? value : old; }, file, line);
}
inline unsigned atomicInc(unsigned *p, unsigned limit, MTP_EMU_WHERE)
{
    return emu::atomic_change(
        p, [=](unsigned old) { return old >= limit ? 0u : old + 1u; }, file, line);
}
inline unsigned atomicDec(unsigned *p, unsigned limit, MTP_EMU_WHERE)
{
    return emu::atomic_change(
        p, [=](unsigned old) { return old == 0u || old > limit ? limit : old - 1u; }, file, line);
}

inline void __threadfence()
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence_block()
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence_system()
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

#endif
