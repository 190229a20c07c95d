/* Barriers of a block, shuffles, votes, match and reductions of a warp, with CUDA's names. */
#ifndef MTP_EMU_WARP_H
#define MTP_EMU_WARP_H

#include "emu/block.h"

inline void __syncthreads(MTP_EMU_WHERE)
{
    emu::barrier(emu::Vote::NONE, 0, file, line);
}
inline int __syncthreads_count(int predicate, MTP_EMU_WHERE)
{
    return emu::barrier(emu::Vote::COUNT, predicate, file, line);
}
inline int __syncthreads_and(int predicate, MTP_EMU_WHERE)
{
    return emu::barrier(emu::Vote::AND, predicate, file, line);
}
inline int __syncthreads_or(int predicate, MTP_EMU_WHERE)
{
    return emu::barrier(emu::Vote::OR, predicate, file, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, MTP_EMU_WHERE)
{
    emu::collective(emu::syncwarp, mask, file, line);
}

namespace emu
{

/* The value of lane `source` of the warp; the own one where the source is outside of the segment. */
template <class T>
inline T shuffle_from(unsigned mask, T value, unsigned source, const char *file, int line)
{
    static_assert(sizeof(T) <= 8, "shuffles take 4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    give(0, bits);
    give(1, source);
    collective(shuffle, mask, file, line);
    bits = got(0);
    memcpy(static_cast<void *>(&value), &bits, sizeof(T));
    return value;
}

inline uint64_t vote(const Collective &what, unsigned mask, uint64_t value, const char *file, int line)
{
    give(0, value);
    collective(what, mask, file, line);
    return got(0);
}

template <class T>
inline uint64_t bits_of(T value)
{
    static_assert(sizeof(T) <= 8, "4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
}

} // namespace emu

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, MTP_EMU_WHERE)
{
    const unsigned lane = emu::here.thread->lane, w = static_cast<unsigned>(width);
    return emu::shuffle_from(mask, value, (lane & ~(w - 1)) | (static_cast<unsigned>(source) & (w - 1)), file, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, MTP_EMU_WHERE)
{
    const unsigned lane = emu::here.thread->lane, w = static_cast<unsigned>(width);
    const unsigned source = lane ^ static_cast<unsigned>(bits);
    return emu::shuffle_from(mask, value, (source & ~(w - 1)) > (lane & ~(w - 1)) ? lane : source, file, line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, MTP_EMU_WHERE)
{
    const unsigned lane = emu::here.thread->lane, w = static_cast<unsigned>(width);
    return emu::shuffle_from(mask, value, (lane & (w - 1)) + delta < w ? lane + delta : lane, file, line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, MTP_EMU_WHERE)
{
    const unsigned lane = emu::here.thread->lane, w = static_cast<unsigned>(width);
    return emu::shuffle_from(mask, value, (lane & (w - 1)) >= delta ? lane - delta : lane, file, line);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, MTP_EMU_WHERE)
{
    return static_cast<unsigned>(emu::vote(emu::ballot, mask, predicate != 0, file, line));
}
inline int __any_sync(unsigned mask, int predicate, MTP_EMU_WHERE)
{
    return emu::vote(emu::ballot, mask, predicate != 0, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, MTP_EMU_WHERE)
{
    return emu::vote(emu::ballot, mask, predicate == 0, file, line) == 0;
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, MTP_EMU_WHERE)
{
    return static_cast<unsigned>(emu::vote(emu::match_any, mask, emu::bits_of(value), file, line));
}
template <class T>
inline unsigned __match_all_sync(unsigned mask, T value, int *all, MTP_EMU_WHERE)
{
    const unsigned same = static_cast<unsigned>(emu::vote(emu::match_all, mask, emu::bits_of(value), file, line));
    *all = same != 0;
    return same;
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned value, MTP_EMU_WHERE)
{
    return static_cast<unsigned>(emu::vote(emu::reduce_add, mask, value, file, line));
}
inline int __reduce_add_sync(unsigned mask, int value, MTP_EMU_WHERE)
{
    return static_cast<int>(emu::vote(emu::reduce_add, mask, static_cast<unsigned>(value), file, line));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value, MTP_EMU_WHERE)
{
    return static_cast<unsigned>(emu::vote(emu::reduce_min, mask, value, file, line));
}
inline int __reduce_min_sync(unsigned mask, int value, MTP_EMU_WHERE)
{
    return static_cast<int>(emu::vote(emu::reduce_min_signed, mask, static_cast<unsigned>(value), file, line));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, MTP_EMU_WHERE)
{
    return static_cast<unsigned>(emu::vote(emu::reduce_max, mask, value, file, line));
}
inline int __reduce_max_sync(unsigned mask, int value, MTP_EMU_WHERE)
{
    return static_cast<int>(emu::vote(emu::reduce_max_signed, mask, static_cast<unsigned>(value), file, line));
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value, MTP_EMU_WHERE)
{
    return static_cast<unsigned>(emu::vote(emu::reduce_and, mask, value, file, line));
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, MTP_EMU_WHERE)
{
    return static_cast<unsigned>(emu::vote(emu::reduce_or, mask, value, file, line));
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned value, MTP_EMU_WHERE)
{
    return static_cast<unsigned>(emu::vote(emu::reduce_xor, mask, value, file, line));
}

#endif
