#include "base/pages.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { ALIGNMENT = 64 };
static const size_t HUGE_PAGE = (size_t)2 << 20;

void *mtp__pages_alloc(size_t size)
{
    const size_t unit = size < 2 * HUGE_PAGE ? ALIGNMENT : HUGE_PAGE;
    if (size > SIZE_MAX - unit) return NULL;
    size = (size + unit - 1) / unit * unit;
    void *memory = aligned_alloc(unit, size);
    if (memory && unit == HUGE_PAGE) madvise(memory, size, MADV_HUGEPAGE);
    return memory;
}
