#include "base/arena.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"

#if defined(__SANITIZE_ADDRESS__)
#define ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ASAN 1
#endif
#endif
#ifdef ASAN
#include <sanitizer/asan_interface.h>
enum { REDZONE = 64 };
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
enum { REDZONE = 0 };
#endif

static size_t round_up(size_t bytes)
{
    return (bytes + MTP__ARENA_ALIGN - 1) / MTP__ARENA_ALIGN * MTP__ARENA_ALIGN;
}

void mtp__arena_measure(mtp__arena *arena)
{
    *arena = (mtp__arena){.measuring = true};
}

mtp_status mtp__arena_create(mtp__arena *arena, size_t capacity)
{
    *arena = (mtp__arena){0};
    capacity = round_up(capacity ? capacity : 1);
    char *base = aligned_alloc(MTP__ARENA_ALIGN, capacity);
    if (!base) return MTP_FAIL(MTP_E_MEMORY, "cannot allocate %.1f MiB", (double)capacity / (1 << 20));
    memset(base, 0, capacity);
    ASAN_POISON_MEMORY_REGION(base, capacity);
    arena->base = base;
    arena->capacity = capacity;
    return MTP_OK;
}

void mtp__arena_wrap(mtp__arena *arena, void *memory, size_t capacity)
{
    *arena = (mtp__arena){.base = memory, .capacity = capacity, .borrowed = true};
    ASAN_POISON_MEMORY_REGION(memory, capacity);
}

void mtp__arena_destroy(mtp__arena *arena)
{
    if (arena->base) ASAN_UNPOISON_MEMORY_REGION(arena->base, arena->capacity);
    if (!arena->borrowed) free(arena->base);
    *arena = (mtp__arena){0};
}

static void count_label(mtp__arena *arena, const char *label, size_t bytes)
{
    int32_t i = 0;
    while (i < arena->num_labels && strcmp(arena->labels[i].label, label) != 0) i++;
    if (i == MTP__ARENA_LABELS) i = MTP__ARENA_LABELS - 1; /* the last label collects what has no row of its own */
    if (i == arena->num_labels) arena->labels[arena->num_labels++] = (mtp__arena_label){.label = label};
    mtp__arena_label *row = &arena->labels[i];
    row->alive += bytes;
    if (row->alive > row->bytes) row->bytes = row->alive;
}

void *mtp__arena_take(mtp__arena *arena, const char *label, size_t bytes)
{
    if (bytes > SIZE_MAX / 2 - 2 * (size_t)MTP__ARENA_ALIGN || arena->used > SIZE_MAX / 2 - bytes) {
        arena->failure = MTP_FAIL(MTP_E_MEMORY, "%s: %zu bytes is more than can be addressed", label, bytes);
        return NULL;
    }
    const size_t size = round_up(bytes) + (size_t)REDZONE;
    if (!arena->measuring && size > arena->capacity - arena->used) {
        arena->failure = MTP_FAIL(MTP_E_MEMORY, "%s: needs %zu bytes, the arena has %zu of %zu left", label, size,
                                  arena->capacity - arena->used, arena->capacity);
        return NULL;
    }
    char *block = arena->measuring ? NULL : arena->base + arena->used;
    arena->used += size;
    if (arena->used > arena->high_water) arena->high_water = arena->used;
    count_label(arena, label, size);
    if (block) ASAN_UNPOISON_MEMORY_REGION(block, bytes);
    return block;
}

mtp_view mtp__arena_view(mtp__arena *arena, const char *label, mtp_dtype dtype, int32_t rank, const int64_t *shape)
{
    mtp_view view = mtp_view_nd(NULL, dtype, rank, shape);
    view.data = mtp__arena_take(arena, label, (size_t)mtp_view_count(view) * mtp_dtype_size(dtype));
    return view;
}

size_t mtp__arena_mark(const mtp__arena *arena)
{
    return arena->used;
}

void mtp__arena_release(mtp__arena *arena, size_t mark)
{
    if (arena->base) ASAN_POISON_MEMORY_REGION(arena->base + mark, arena->used - mark);
    /* Labels keep their high water; what is alive under them is not tracked across a release, so scratch labels start
     * again from zero. Labels that live below the mark are only taken once, before any mark. */
    if (mark < arena->used)
        for (int32_t i = 0; i < arena->num_labels; i++) arena->labels[i].alive = 0;
    arena->used = mark;
}
