/* Which instruction set's inner loops to run. */
#include "cpu/vec.h"

#include <string.h>

#if defined(__x86_64__)
static const mtp__vec *if_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? &mtp__vec_avx512
               : NULL;
}

static const mtp__vec *if_avx2(void)
{
    /* every CPU with AVX2 and FMA has F16C */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &mtp__vec_avx2 : NULL;
}
#endif

const mtp__vec *mtp__vec_choose(const char *isa)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    const mtp__vec *found = NULL;
    if (!isa || strcmp(isa, "avx512") == 0) found = if_avx512();
    if (!found && (!isa || strcmp(isa, "avx2") == 0)) found = if_avx2();
    if (found) return found;
#endif
    return !isa || strcmp(isa, "plain") == 0 ? &mtp__vec_plain : NULL;
}
