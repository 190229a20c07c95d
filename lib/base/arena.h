/* Arenas own, views borrow. Internal.
 *
 * An arena hands out 64-byte aligned blocks and frees them all at once. It has two lives with the same code: in the
 * measuring one it owns nothing, returns NULL pointers and counts; in the real one it serves from one buffer of the
 * measured size. So the dry run of a training step is the step's own layout function, and `mtp plan` prints what it
 * counted, by label, before anything is allocated. */
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
    size_t bytes;      /* the most that was alive under this label at one time */
    size_t alive;
} mtp__arena_label;

enum { MTP__ARENA_LABELS = 48, MTP__ARENA_ALIGN = 64 };

typedef struct mtp__arena {
    char *base; /* NULL while measuring */
    size_t capacity;
    size_t used;
    size_t high_water;
    bool measuring;
    bool borrowed;      /* base belongs to somebody else: wrap */
    mtp_status failure; /* sticky: MTP_E_MEMORY after a take that did not fit, so callers check once at the end */
    int32_t num_labels;
    mtp__arena_label labels[MTP__ARENA_LABELS];
} mtp__arena;

/* A measuring arena: counts only. */
void mtp__arena_measure(mtp__arena *arena);
/* A real arena of `capacity` bytes of fresh zeroed host memory. */
mtp_status mtp__arena_create(mtp__arena *arena, size_t capacity);
/* A real arena over memory of somebody else, such as a block of device memory, which must outlive it. */
void mtp__arena_wrap(mtp__arena *arena, void *memory, size_t capacity);
/* Free everything (of a wrapped one: nothing). Accepts a zeroed struct and a measuring arena. */
void mtp__arena_destroy(mtp__arena *arena);

/* `bytes` (0 allowed) under `label`. NULL while measuring, and when full (then `failure` is set). Not zeroed when the
 * memory was released before. */
void *mtp__arena_take(mtp__arena *arena, const char *label, size_t bytes);
/* A contiguous fp32 (or other) tensor; data is NULL while measuring. */
mtp_view mtp__arena_view(mtp__arena *arena, const char *label, mtp_dtype dtype, int32_t rank, const int64_t *shape);

/* Stack discipline for scratch: everything taken after `mark` goes back at `release`. In sanitizer builds released
 * memory is poisoned, and blocks have redzones. */
size_t mtp__arena_mark(const mtp__arena *arena);
void mtp__arena_release(mtp__arena *arena, size_t mark);

#ifdef __cplusplus
}
#endif
#endif
