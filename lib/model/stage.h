/* Internal to lib/model: what a step reads of host memory, brought to the device. Hidden states and K/V of a batch, the
 * verifier's embedding table (mapped from its file) and the numbers that describe a chunk's rows are host memory. Where
 * device memory is ordinary memory they are passed to the ops as they are. Elsewhere a batch's views are copied once a
 * batch, all of them: the way to a device is wider than the one to a store. With two sets of device memory for them,
 * one is filled while the device works with the other. What a chunk needs beside them is put together in a block of
 * pinned memory and copied at once.
 *
 * Nothing here waits for the device, but for the block of two chunks ago, if that has not been copied yet. */
#ifndef MTP_MODEL_STAGE_H
#define MTP_MODEL_STAGE_H

#include "base/arena.h"
#include "base/context.h"
#include "mtp/data.h"
#include "mtp/drafter.h"

#define MTP__STAGE_LABEL "rows on their way to the device" /* of the block, in a step's plan */

enum { MTP__STAGE_BLOCKS = 2, MTP__STAGE_SETS = 2, MTP__STAGE_HIDDEN = MTP_LAYER_TYPES, MTP__STAGE_VIEWS };

typedef struct mtp__stage {
    const mtp_context *context;
    bool direct; /* host views are passed on */

    /* Of a chunk: the block on the device, and those that it is copied from in turn (direct: `device` itself). */
    size_t size;
    char *device;
    void *host[MTP__STAGE_BLOCKS];
    mtp_mark *copied[MTP__STAGE_BLOCKS];
    int turn;

    /* Of batches: device memory as large as the largest so far, K/V of the layer types and hidden states, in up to
     * MTP__STAGE_SETS sets that take turns. */
    int num_sets, set;
    struct mtp__stage_set {
        void *memory[MTP__STAGE_VIEWS];
        size_t size[MTP__STAGE_VIEWS];
        mtp_view views[MTP__STAGE_VIEWS]; /* as handed out last */
        mtp_mark *used;                   /* behind the work on the batch that it held last */
    } sets[MTP__STAGE_SETS];
    int64_t generation; /* raised whenever a set hands out another view than before */
} mtp__stage;

/* The block of up to `size` bytes, in the step's arena; `sets` of memory for batches. */
void mtp__stage_layout(mtp__stage *stage, const mtp_context *context, size_t size, int sets, mtp__arena *arena);
/* After the layout, with real memory. */
mtp_status mtp__stage_create(mtp__stage *stage);
void mtp__stage_release(mtp__stage *stage); /* accepts a zeroed struct */

/* The batch as ops take it: K/V [S, 2, NKV, D] (types without layers stay empty views) and hidden states [S, Hb], S
 * being all tokens of the batch or, in device memory, all that there is room for; in the next set. The batch's memory
 * must stay as it is until the device has passed a mark behind what is launched after this. */
mtp_status mtp__stage_batch(mtp__stage *stage, const mtp_batch *batch, mtp_view kv[MTP_LAYER_TYPES], mtp_view *hidden);
/* All that reads the batch is launched. */
mtp_status mtp__stage_batch_done(mtp__stage *stage);
/* How much device memory is taken for a view of so many bytes. */
size_t mtp__stage_reserved(size_t bytes);

/* The block to fill, which the device does not read. */
mtp_status mtp__stage_open(mtp__stage *stage, char **host);
/* Bytes [begin, end) of it to the device, behind what was launched before; with `last` it is not filled any more. */
mtp_status mtp__stage_send(mtp__stage *stage, size_t begin, size_t end, bool last);

#endif
