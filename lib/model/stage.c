#include "model/stage.h"

#include <string.h>

#include "base/error.h"
#include "model/sizes.h"

void mtp__stage_layout(mtp__stage *stage, const mtp_context *context, size_t size, int sets, mtp__arena *arena)
{
    stage->context = context;
    stage->direct = context->ops->memory_is_host;
    stage->size = size;
    stage->num_sets = sets;
    stage->device = mtp__arena_take(arena, MTP__STAGE_LABEL, size);
}

mtp_status mtp__stage_create(mtp__stage *stage)
{
    for (int i = 0; i < MTP__STAGE_BLOCKS && !stage->direct; i++)
        MTP_TRY_AT(stage->context->ops->host_alloc(stage->context->device, stage->size, &stage->host[i]),
                   "rows of a chunk");
    return MTP_OK;
}

void mtp__stage_release(mtp__stage *stage)
{
    if (!stage->context) return;
    const mtp_backend *ops = stage->context->ops;
    mtp_device *device = stage->context->device;
    for (int s = 0; s < MTP__STAGE_SETS; s++) {
        for (int i = 0; i < MTP__STAGE_VIEWS; i++) ops->memory_free(device, stage->sets[s].memory[i]);
        ops->mark_free(device, stage->sets[s].used);
    }
    for (int i = 0; i < MTP__STAGE_BLOCKS; i++) {
        ops->mark_free(device, stage->copied[i]);
        ops->host_free(device, stage->host[i]);
    }
    *stage = (mtp__stage){0};
}

/* ---- a batch ----------------------------------------------------------------------------------------------------- */

size_t mtp__stage_reserved(size_t bytes)
{
    return (size_t)mtp__size_above((int64_t)bytes, INT64_MAX);
}

/* Memory for one view: grows, in strides that make growing rare, and never shrinks. */
static mtp_status reserve(const mtp__stage *stage, struct mtp__stage_set *set, int which, size_t bytes)
{
    const mtp_backend *ops = stage->context->ops;
    if (bytes <= set->size[which]) return MTP_OK;
    ops->memory_free(stage->context->device, set->memory[which]);
    set->memory[which] = NULL;
    set->size[which] = 0;
    const size_t size = mtp__stage_reserved(bytes);
    MTP_TRY_AT(ops->memory_alloc(stage->context->device, size, &set->memory[which]),
               which == MTP__STAGE_HIDDEN ? "hidden states of a batch" : "K/V of a batch");
    set->size[which] = size;
    return MTP_OK;
}

/* `flat`: the batch's tokens in its first axis. */
static mtp_status bring(const mtp__stage *stage, struct mtp__stage_set *set, int which, mtp_view flat,
                        mtp_view *brought)
{
    const mtp_context *context = stage->context;
    const size_t bytes = (size_t)mtp_view_count(flat) * mtp_dtype_size(flat.dtype);
    *brought = flat;
    if (stage->direct) return MTP_OK;
    MTP_TRY(reserve(stage, set, which, bytes));
    MTP_TRY(context->ops->upload_beside(context->device, set->memory[which], flat.data, bytes, set->used));
    brought->data = set->memory[which];
    brought->shape[0] = (int64_t)(set->size[which] / (bytes / (size_t)flat.shape[0]));
    return MTP_OK;
}

static bool same_view(const mtp_view *a, const mtp_view *b)
{
    bool same = a->data == b->data && a->dtype == b->dtype && a->rank == b->rank;
    for (int32_t i = 0; same && i < a->rank; i++) same = a->shape[i] == b->shape[i] && a->stride[i] == b->stride[i];
    return same;
}

mtp_status mtp__stage_batch(mtp__stage *stage, const mtp_batch *batch, mtp_view kv[MTP_LAYER_TYPES], mtp_view *hidden)
{
    mtp_view now[MTP__STAGE_VIEWS] = {{0}};
    stage->set = (stage->set + 1) % stage->num_sets;
    struct mtp__stage_set *set = &stage->sets[stage->set];
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        const mtp_view of = batch->kv[type];
        if (!of.data) continue;
        const mtp_view flat = mtp_view_4d(of.data, of.dtype, of.shape[0] * of.shape[1], 2, of.shape[3], of.shape[4]);
        MTP_TRY(bring(stage, set, type, flat, &now[type]));
    }
    const mtp_view of = batch->hidden_states;
    const mtp_view flat = mtp_view_2d(of.data, of.dtype, of.shape[0] * of.shape[1], of.shape[2]);
    MTP_TRY(bring(stage, set, MTP__STAGE_HIDDEN, flat, &now[MTP__STAGE_HIDDEN]));
    bool same = true;
    for (int i = 0; i < MTP__STAGE_VIEWS && set->views[MTP__STAGE_HIDDEN].data; i++)
        same = same && same_view(&now[i], &set->views[i]);
    if (!same) stage->generation++;
    memcpy(set->views, now, sizeof now);
    memcpy(kv, now, MTP_LAYER_TYPES * sizeof *kv);
    *hidden = now[MTP__STAGE_HIDDEN];
    return stage->direct ? MTP_OK : stage->context->ops->uploads_join(stage->context->device);
}

mtp_status mtp__stage_batch_done(mtp__stage *stage)
{
    return stage->direct ? MTP_OK : stage->context->ops->mark(stage->context->device, &stage->sets[stage->set].used);
}

/* ---- a chunk ----------------------------------------------------------------------------------------------------- */

mtp_status mtp__stage_open(mtp__stage *stage, char **host)
{
    *host = stage->direct ? stage->device : stage->host[stage->turn];
    if (!stage->copied[stage->turn]) return MTP_OK;
    return stage->context->ops->mark_wait(stage->context->device, stage->copied[stage->turn]);
}

mtp_status mtp__stage_send(mtp__stage *stage, size_t begin, size_t end, bool last)
{
    const mtp_backend *ops = stage->context->ops;
    mtp_device *device = stage->context->device;
    if (stage->direct) return MTP_OK;
    const char *host = stage->host[stage->turn];
    if (end > begin) MTP_TRY(ops->upload_async(device, stage->device + begin, host + begin, end - begin));
    if (!last) return MTP_OK;
    MTP_TRY(ops->mark(device, &stage->copied[stage->turn]));
    stage->turn = (stage->turn + 1) % MTP__STAGE_BLOCKS;
    return MTP_OK;
}
