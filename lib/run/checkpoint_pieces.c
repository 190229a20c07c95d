/* What a checkpoint holds of drafter and optimizer, and which rank writes what of it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/text.h"
#include "run/checkpoint.h"

/* Ranges that the ranks cut begin at a multiple of so many values. */
enum { GRAIN = 64 };

/* ---- what the shards do not hold ------------------------------------------------------------------------------ */

static void add_integer(uint64_t *hash, int64_t value)
{
    *hash = mtp__fnv1a(*hash, &value, sizeof value);
}

static void add_real(uint64_t *hash, double value)
{
    *hash = mtp__fnv1a(*hash, &value, sizeof value);
}

/* Weights mean something else under another geometry, rotation or order of the tokens, in the same shapes. */
uint64_t mtp__checkpoint_computation(const mtp_drafter *drafter)
{
    const mtp_drafter_config *c = &drafter->config;
    const int64_t integers[] = {c->vocab_size,    c->hidden_size,   c->backbone_hidden_size, c->intermediate_size,
                                c->num_heads,     c->num_layers,    c->sliding_window,       c->ordered,
                                c->num_centroids, c->centroid_top_k};
    uint64_t hash = MTP__FNV_START;
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) add_integer(&hash, integers[i]);
    for (int64_t i = 0; i < c->num_layers; i++) add_integer(&hash, c->layer_types[i]);
    add_real(&hash, c->rms_norm_eps);
    for (int i = 0; i < MTP_LAYER_TYPES; i++) {
        const mtp_layer_geometry *g = &c->geometry[i];
        add_integer(&hash, g->head_dim);
        add_integer(&hash, g->num_kv_heads);
        add_integer(&hash, g->proportional);
        add_real(&hash, g->rope_theta);
        add_real(&hash, g->partial_rotary_factor);
        add_real(&hash, g->rope_factor);
    }
    if (drafter->token_ordering)
        hash = mtp__fnv1a(hash, drafter->token_ordering, (size_t)c->vocab_size * sizeof *drafter->token_ordering);
    return hash;
}

/* ---- pieces --------------------------------------------------------------------------------------------------- */

static mtp_status no_memory(void)
{
    return MTP_FAIL(MTP_E_MEMORY, "out of memory for a checkpoint");
}

static mtp_status add(mtp__pieces *p, const char *key, const mtp_view *view)
{
    if (p->count == p->capacity) {
        const int64_t capacity = p->capacity ? 2 * p->capacity : 64;
        mtp__piece *grown = realloc(p->items, (size_t)capacity * sizeof *grown);
        if (!grown) return no_memory();
        p->items = grown;
        p->capacity = capacity;
    }
    p->items[p->count] = (mtp__piece){.key = strdup(key), .view = *view};
    if (!p->items[p->count].key) return no_memory();
    p->count++;
    p->num_bytes += (size_t)mtp_view_count(*view) * mtp_dtype_size(view->dtype);
    return MTP_OK;
}

/* Values [first, end) of a tensor of `total` values; `data` is that of value `first`. */
static mtp_status add_range(mtp__pieces *p, const char *prefix, const char *name, const mtp_view *whole, void *data,
                            int64_t first, int64_t end, int64_t total)
{
    mtp__text key = {0};
    mtp__text_add(&key, "%s%s", prefix, name);
    if (end - first < total) mtp__text_add(&key, "[%lld:%lld]", (long long)first, (long long)end);
    mtp_status status = mtp__text_check(&key);
    const int64_t length = end - first;
    mtp_view view = end - first < total ? mtp_view_nd(data, whole->dtype, 1, &length) : *whole;
    view.data = data;
    if (status == MTP_OK) status = add(p, key.data, &view);
    mtp__text_free(&key);
    return status;
}

/* Values that all ranks hold, one tensor behind the other: those of this rank's range are added. */
typedef struct cutter {
    int64_t begin, end; /* the range */
    int64_t at;         /* values passed */
} cutter;

static cutter cut(int64_t total, const mtp__share *share)
{
    const int64_t grains = (total + GRAIN - 1) / GRAIN;
    const int64_t begin =
        grains / share->world_size * share->rank + grains % share->world_size * share->rank / share->world_size;
    const int64_t next = share->rank + 1;
    const int64_t end = grains / share->world_size * next + grains % share->world_size * next / share->world_size;
    return (cutter){.begin = begin * GRAIN, .end = end * GRAIN < total ? end * GRAIN : total};
}

static mtp_status pass(cutter *c, mtp__pieces *p, const char *prefix, const char *name, const mtp_view *view)
{
    const int64_t total = mtp_view_count(*view), at = c->at;
    const int64_t first = c->begin > at ? c->begin - at : 0, end = c->end - at < total ? c->end - at : total;
    c->at += total;
    if (first >= end) return MTP_OK;
    char *data = (char *)view->data + (size_t)first * mtp_dtype_size(view->dtype);
    return add_range(p, prefix, name, view, data, first, end, total);
}

static const mtp__param *param_of(const mtp_drafter *drafter, const char *name)
{
    for (int64_t i = 0; i < drafter->num_params; i++)
        if (strcmp(drafter->params[i].name, name) == 0) return &drafter->params[i];
    return NULL;
}

/* The moments that this rank alone holds. */
static mtp_status add_own_moments(mtp__pieces *p, const mtp_drafter *drafter, const mtp__optimizer *o)
{
    for (int64_t i = 0; i < o->num_tensors; i++) {
        const mtp__optim_tensor *t = &o->tensors[i];
        const mtp__param *param = param_of(drafter, t->name);
        const int64_t count = mtp_view_count(o->exp_avg[i]), end = t->first + count;
        if (!param || end > param->count)
            return MTP_FAIL(MTP_E_INTERNAL, "the optimizer's part of %s is no part of the drafter's", t->name);
        MTP_TRY(add_range(p, MTP__CHECKPOINT_EXP_AVG, t->name, &o->exp_avg[i], o->exp_avg[i].data, t->first, end,
                          param->count));
        MTP_TRY(add_range(p, MTP__CHECKPOINT_EXP_AVG_SQ, t->name, &o->exp_avg_sq[i], o->exp_avg_sq[i].data, t->first,
                          end, param->count));
    }
    return MTP_OK;
}

static mtp_status add_shared(mtp__pieces *p, const mtp_drafter *drafter, const mtp__optimizer *o,
                             const mtp__share *share)
{
    int64_t total = 0;
    for (int64_t i = 0; i < drafter->num_params; i++) total += drafter->params[i].count;
    for (int64_t i = 0; !share->sharded_moments && i < o->num_tensors; i++) total += 2 * mtp_view_count(o->exp_avg[i]);
    cutter c = cut(total, share);
    for (int64_t i = 0; i < drafter->num_params; i++) {
        const mtp_view view = mtp__param_value(&drafter->params[i]);
        MTP_TRY(pass(&c, p, MTP__CHECKPOINT_PARAM, drafter->params[i].name, &view));
    }
    for (int64_t i = 0; !share->sharded_moments && i < o->num_tensors; i++) {
        MTP_TRY(pass(&c, p, MTP__CHECKPOINT_EXP_AVG, o->tensors[i].name, &o->exp_avg[i]));
        MTP_TRY(pass(&c, p, MTP__CHECKPOINT_EXP_AVG_SQ, o->tensors[i].name, &o->exp_avg_sq[i]));
    }
    return MTP_OK;
}

mtp_status mtp__pieces_collect(const mtp_drafter *drafter, const mtp__optimizer *o, const mtp__share *share,
                               mtp__pieces *pieces)
{
    MTP_REQUIRE(share->rank >= 0 && share->rank < share->world_size);
    *pieces = (mtp__pieces){.context = drafter->context};
    MTP_TRY(add_shared(pieces, drafter, o, share));
    return share->sharded_moments ? add_own_moments(pieces, drafter, o) : MTP_OK;
}

void mtp__pieces_free(mtp__pieces *pieces)
{
    for (int64_t i = 0; i < pieces->count; i++) free(pieces->items[i].key);
    free(pieces->items);
    *pieces = (mtp__pieces){0};
}

uint64_t mtp__checkpoint_bytes(const mtp_drafter *drafter)
{
    uint64_t bytes = 65536;
    for (int64_t i = 0; i < drafter->num_params; i++) {
        const mtp__param *param = &drafter->params[i];
        bytes += (uint64_t)param->count * mtp_dtype_size(param->dtype);
        if (param->trained) bytes += (uint64_t)param->count * 2 * sizeof(float);
    }
    return bytes;
}
