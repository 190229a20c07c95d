/* Loads and stores with cache hints; here they check their alignment, as a device does. */
#ifndef MTP_EMU_LOADS_H
#define MTP_EMU_LOADS_H

#include "emu/block.h"

namespace emu
{

template <class T>
inline T load(const T *p, const char *file, int line)
{
    check_aligned(p, "load", file, line);
    return *p;
}
template <class T>
inline void store(T *p, const T &value, const char *file, int line)
{
    check_aligned(p, "store", file, line);
    *p = value;
}

} // namespace emu

#define MTP_EMU_LOAD(name)                   \
    template <class T>                       \
    inline T name(const T *p, MTP_EMU_WHERE) \
    {                                        \
        return emu::load(p, file, line);     \
    }
#define MTP_EMU_STORE(name)                           \
    template <class T>                                \
    inline void name(T *p, const T &v, MTP_EMU_WHERE) \
    {                                                 \
        emu::store(p, v, file, line);                 \
    }
MTP_EMU_LOAD(__ldg)
MTP_EMU_LOAD(__ldca)
MTP_EMU_LOAD(__ldcg)
MTP_EMU_LOAD(__ldcs)
MTP_EMU_LOAD(__ldlu)
MTP_EMU_LOAD(__ldcv)
MTP_EMU_STORE(__stwb)
MTP_EMU_STORE(__stcg)
MTP_EMU_STORE(__stcs)
MTP_EMU_STORE(__stwt)
#undef MTP_EMU_LOAD
#undef MTP_EMU_STORE

inline size_t __cvta_generic_to_shared(const void *p)
{
    return reinterpret_cast<size_t>(p);
}
inline unsigned __isShared(const void *p)
{
    return emu::is_shared(p, 1);
}
inline unsigned __isGlobal(const void *p)
{
    return emu::is_device(p, 1);
}

#endif
