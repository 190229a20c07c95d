/* Arenas cut one block of memory into views. Internal.
 *
 * An arena hands out 64-byte aligned pieces and takes none back. It has two lives with the same code: in the measuring
 * one it returns NULL pointers and counts; in the real one it serves from a block of the measured size, which stays its
 * owner's. So the dry run of a training step is the step's own layout function, and `mtp plan` prints what it counted,
 * by label, before anything is allocated. In sanitizer builds what was not handed out is poisoned, and pieces have
 * redzones. */
#ifndef MTP_BASE_ARENA_H
#define MTP_BASE_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mtp/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mtp__arena_label {
    const char *label; /* a string literal or one that outlives the arena */
    size_t bytes;
} mtp__arena_label;

enum { MTP__ARENA_LABELS = 48, MTP__ARENA_ALIGN = 64 };

typedef struct mtp__arena {
    char *base; /* NULL while measuring */
    size_t capacity;
    size_t used;
    bool measuring;
    mtp_status failure; /* sticky: MTP_E_MEMORY after a take that did not fit, so callers check once at the end */
    int32_t num_labels;
    mtp__arena_label labels[MTP__ARENA_LABELS];
} mtp__arena;

/* A measuring arena: counts only. */
void mtp__arena_measure(mtp__arena *arena);
/* A real arena over `memory` (64-byte aligned, such as a block of device memory), which must outlive it. */
void mtp__arena_wrap(mtp__arena *arena, void *memory, size_t capacity);
/* Before the memory is freed. Accepts a zeroed struct and a measuring arena. */
void mtp__arena_unwrap(mtp__arena *arena);

/* `bytes` (0 allowed) under `label`; the content is what the memory held. NULL while measuring, and when full (then
 * `failure` is set). */
void *mtp__arena_take(mtp__arena *arena, const char *label, size_t bytes);
/* A contiguous fp32 (or other) tensor; data is NULL while measuring. */
mtp_view mtp__arena_view(mtp__arena *arena, const char *label, mtp_dtype dtype, int32_t rank, const int64_t *shape);

#ifdef __cplusplus
}
#endif
#endif
