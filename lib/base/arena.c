#include "base/arena.h"

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

void mtp__arena_wrap(mtp__arena *arena, void *memory, size_t capacity)
{
    *arena = (mtp__arena){.base = memory, .capacity = capacity};
    ASAN_POISON_MEMORY_REGION(memory, capacity);
}

void mtp__arena_unwrap(mtp__arena *arena)
{
    if (arena->base) ASAN_UNPOISON_MEMORY_REGION(arena->base, arena->capacity);
    *arena = (mtp__arena){0};
}

static void count_label(mtp__arena *arena, const char *label, size_t bytes)
{
    int32_t i = 0;
    while (i < arena->num_labels && strcmp(arena->labels[i].label, label) != 0) i++;
    if (i == MTP__ARENA_LABELS) i = MTP__ARENA_LABELS - 1; /* the last label collects what has no row of its own */
    if (i == arena->num_labels) arena->labels[arena->num_labels++] = (mtp__arena_label){.label = label};
    arena->labels[i].bytes += bytes;
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
