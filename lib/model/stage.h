/* Internal to lib/model: what a step reads of host memory, brought to the device. Hidden states and K/V of a batch and
 * the verifier's embedding table are host memory (the table is mapped from its file). Where device memory is ordinary
 * memory they are passed to the ops as they are; elsewhere K/V are uploaded once a batch, and of the two tables the
 * rows that a chunk needs are gathered on the host and uploaded. */
#ifndef MTP_MODEL_STAGE_H
#define MTP_MODEL_STAGE_H

#include "base/arena.h"
#include "base/context.h"
#include "mtp/data.h"
#include "mtp/drafter.h"

typedef struct mtp__stage {
    const mtp_context *context;
    bool direct;               /* host views are passed on */
    int64_t Rc;                /* rows at a time, at most */
    void *host;                /* rows gathered; NULL when direct */
    void *rows;                /* device: the same */
    mtp_view index;            /* device I32 [Rc]: 0, 1, 2, ... */
    void *kv[MTP_LAYER_TYPES]; /* device: K/V of the batch at hand, as large as the largest so far */
    size_t kv_size[MTP_LAYER_TYPES];
} mtp__stage;

/* The parts that live in the step's arena, for up to Rc rows at a time of up to `width` elements. */
void mtp__stage_layout(mtp__stage *stage, const mtp_context *context, int64_t Rc, int64_t width, mtp__arena *arena);
/* After the layout, with real memory. */
mtp_status mtp__stage_create(mtp__stage *stage, int64_t width);
void mtp__stage_release(mtp__stage *stage); /* accepts a zeroed struct */
/* K/V of a batch as the ops take them, [B * S, 2, NKV, D] in `flat`; types without layers stay empty views. */
mtp_status mtp__stage_kv(mtp__stage *stage, const mtp_batch *batch, mtp_view flat[MTP_LAYER_TYPES]);
/* Rows ids[0..count) of a host table [N, width]. An op that is given *table and *index then reads them: the table
 * itself and `ids_device` (the same ids), or the staged rows. */
mtp_status mtp__stage_rows(mtp__stage *stage, mtp_view host_table, const int32_t *ids, mtp_view ids_device,
                           int64_t count, mtp_view *table, mtp_view *index);

#endif
