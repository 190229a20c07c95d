/* Reading the tensors of a checkpoint into device memory, whoever wrote which part of them. */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/real.h"
#include "base/text.h"
#include "model/slots.h"
#include "mtp/safetensors.h"
#include "run/checkpoint.h"

static mtp_status no_memory(void)
{
    return MTP_FAIL(MTP_E_MEMORY, "out of memory for a checkpoint");
}

/* ---- the shards ----------------------------------------------------------------------------------------------- */

/* A tensor of a shard, or a part of one. */
typedef struct part {
    const char *key; /* its name without the range; not terminated */
    size_t length;   /* of the key */
    bool whole;
    int64_t first, end;
    const mtp_safetensors_entry *entry;
} part;

typedef struct shard_set {
    const mtp__manifest *manifest;
    mtp_safetensors **files;
    part *parts; /* sorted by key and first */
    size_t count;
    mtp__text *problems; /* one line each */
} shard_set;

static void close_shards(shard_set *set)
{
    for (int64_t i = 0; set->files && i < set->manifest->num_shards; i++) mtp_safetensors_close(set->files[i]);
    free(set->files);
    free(set->parts);
}

/* "[<first>:<end>]" at the end of a name. False when there is none. */
static bool range_of(const char *name, part *p)
{
    const char *open = strrchr(name, '['), *digits = "0123456789";
    if (!open) return false;
    const size_t first = strspn(open + 1, digits);
    const char *colon = open + 1 + first;
    if (first < 1 || first > 18 || *colon != ':') return false;
    const size_t end = strspn(colon + 1, digits);
    if (end < 1 || end > 18 || strcmp(colon + 1 + end, "]") != 0) return false;
    p->first = strtoll(open + 1, NULL, 10);
    p->end = strtoll(colon + 1, NULL, 10);
    p->length = (size_t)(open - name);
    return true;
}

static part part_of(const mtp_safetensors_entry *entry)
{
    part p = {.key = entry->name, .entry = entry};
    if (range_of(entry->name, &p)) return p;
    p.length = strlen(entry->name);
    p.whole = true;
    p.end = entry->count;
    return p;
}

static int compare_keys(const part *a, const char *key, size_t length)
{
    const int order = strncmp(a->key, key, a->length < length ? a->length : length);
    return order ? order : (a->length > length) - (a->length < length);
}

static int compare_parts(const void *a, const void *b)
{
    const part *x = a, *y = b;
    const int order = compare_keys(x, y->key, y->length);
    return order ? order : (x->first > y->first) - (x->first < y->first);
}

static mtp_status list_parts(shard_set *set)
{
    size_t total = 0;
    for (int64_t i = 0; i < set->manifest->num_shards; i++) total += mtp_safetensors_count(set->files[i]);
    set->parts = calloc(total + 1, sizeof *set->parts);
    if (!set->parts) return no_memory();
    for (int64_t i = 0; i < set->manifest->num_shards; i++)
        for (size_t j = 0; j < mtp_safetensors_count(set->files[i]); j++)
            set->parts[set->count++] = part_of(mtp_safetensors_at(set->files[i], j));
    qsort(set->parts, set->count, sizeof *set->parts, compare_parts);
    return MTP_OK;
}

static mtp_status open_shards(const mtp__manifest *manifest, mtp__text *problems, shard_set *set)
{
    *set = (shard_set){.manifest = manifest, .problems = problems};
    set->files = calloc((size_t)manifest->num_shards, sizeof *set->files);
    mtp_status status = set->files ? MTP_OK : no_memory();
    for (int64_t i = 0; status == MTP_OK && i < manifest->num_shards; i++) {
        char *path = NULL;
        status = mtp__path_join(manifest->directory, manifest->shards[i].file, &path);
        if (status == MTP_OK) status = mtp_safetensors_open(path, &set->files[i]);
        free(path);
    }
    if (status == MTP_OK) status = list_parts(set);
    if (status != MTP_OK) close_shards(set);
    return status;
}

/* ---- one tensor ----------------------------------------------------------------------------------------------- */

/* Where values [first, first + count(view)) of a tensor of `whole`'s shape go. */
typedef struct target {
    const char *prefix, *name;
    const mtp__param *param; /* the tensor's, or the one whose moments it is */
    bool is_weight;
    const mtp_view *whole;
    mtp_view view;
    int64_t first;
    const part *parts; /* [count], found by look_up */
    size_t count;
} target;

static bool same_shape(const mtp_safetensors_entry *entry, const mtp_view *view)
{
    bool same = entry->rank == view->rank;
    for (int32_t i = 0; same && i < view->rank; i++) same = entry->shape[i] == view->shape[i];
    return same;
}

/* Does a part have the form that its range says. */
static bool well_formed(const part *p, const mtp_view *whole, bool may_be_bf16)
{
    /* 16 bits become 32 without a loss; a run whose master weights change their type is a new one */
    if (p->entry->dtype != MTP_F32 && (!may_be_bf16 || p->entry->dtype != MTP_BF16)) return false;
    if (p->whole) return same_shape(p->entry, whole);
    return p->entry->rank == 1 && p->first < p->end && p->end <= mtp_view_count(*whole) &&
           p->entry->count == p->end - p->first;
}

/* Find the parts of a tensor, which must be every value of it once; a line about what is wrong with them otherwise. */
static void look_up(const shard_set *set, target *t)
{
    mtp__text key = {0};
    mtp__text_add(&key, "%s%s", t->prefix, t->name);
    if (key.failed) set->problems->failed = true;
    const char *name = mtp__text_get(&key);
    size_t low = 0, high = set->count;
    while (low < high) { /* the first part that is not before the key */
        const size_t middle = low + (high - low) / 2;
        if (compare_keys(&set->parts[middle], name, key.length) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    t->parts = set->parts + low;
    int64_t covered = 0;
    bool fits = true;
    for (; low < set->count && compare_keys(&set->parts[low], name, key.length) == 0; low++, t->count++) {
        fits = fits && well_formed(&set->parts[low], t->whole, t->is_weight) && set->parts[low].first == covered;
        covered = set->parts[low].end;
    }
    if (t->count == 0)
        mtp__text_add(set->problems, "\n  %s is missing", name);
    else if (!fits && t->count == 1)
        mtp__text_add(set->problems, "\n  %s has another shape or dtype", name);
    else if (!fits || covered != mtp_view_count(*t->whole))
        mtp__text_add(set->problems, "\n  %s: its parts have another shape or dtype, or are not all of it once", name);
    mtp__text_free(&key);
}

/* Entries under `prefix` whose names the owner does not know. */
static void find_unknown(const shard_set *set, const char *prefix, const mtp_drafter *drafter,
                         bool (*known)(const mtp__param *param))
{
    const size_t length = strlen(prefix);
    for (size_t i = 0; i < set->count; i++) {
        const part *p = &set->parts[i];
        bool found = false;
        if (p->length < length || strncmp(p->key, prefix, length) != 0) continue;
        for (int64_t j = 0; !found && j < drafter->num_params; j++)
            found = known(&drafter->params[j]) && strlen(drafter->params[j].name) == p->length - length &&
                    strncmp(drafter->params[j].name, p->key + length, p->length - length) == 0;
        if (!found) mtp__text_add(set->problems, "\n  %s is unknown", p->entry->name);
    }
}

static mtp_status judge(const shard_set *set, const char *whose)
{
    MTP_TRY(mtp__text_check(set->problems));
    if (set->problems->length == 0) return MTP_OK;
    return MTP_FAIL(MTP_E_DATA, "checkpoint %s does not fit %s:%s", set->manifest->directory, whose,
                    set->problems->data);
}

/* Values [first, first + count) of the tensor as its parts have them. */
static mtp_status read_parts(void *user, int64_t first, int64_t count, float *values)
{
    const target *t = user;
    size_t low = 0, high = t->count; /* the part that has the first value */
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (t->parts[middle].first <= first)
            low = middle;
        else
            high = middle;
    }
    for (const part *p = &t->parts[low]; count > 0; p++) {
        const int64_t n = p->end - first < count ? p->end - first : count;
        const size_t at = (size_t)(first - p->first) * mtp_dtype_size(p->entry->dtype);
        mtp__real_to_f32(values, (const char *)p->entry->data + at, p->entry->dtype, n);
        values += n;
        first += n;
        count -= n;
    }
    return MTP_OK;
}

/* Values [first, first + count) of a tensor in the order of memory. */
static mtp_status put(const mtp_drafter *drafter, const target *t, int64_t first, const float *values, int64_t count)
{
    const mtp_context *context = drafter->context;
    if (t->is_weight) return mtp__param_write(drafter, t->param, first, values, count);
    return context->ops->upload(context->device, (float *)t->view.data + (first - t->first), values,
                                (size_t)count * sizeof *values);
}

static mtp_status upload(const shard_set *set, const mtp_drafter *drafter, target *t)
{
    enum { STRETCH = 1 << 18 };
    const bool by_token = t->param->by_slot && set->manifest->version < MTP__CHECKPOINT_BY_SLOT;
    const int64_t end = t->first + mtp_view_count(t->view);
    mtp_status status = MTP_OK;
    float *staging = malloc(STRETCH * sizeof *staging);
    if (!staging) return no_memory();
    for (int64_t i = t->first; status == MTP_OK && i < end; i += STRETCH) {
        const int64_t n = end - i < STRETCH ? end - i : STRETCH;
        status = by_token ? mtp__values_in_memory_order(drafter, t->param, i, n, read_parts, t, staging)
                          : read_parts(t, i, n, staging);
        if (status == MTP_OK) status = put(drafter, t, i, staging, n);
    }
    free(staging);
    return status == MTP_OK ? MTP_OK : mtp__fail_prefix(status, "checkpoint %s", set->manifest->directory);
}

/* ---- the drafter ---------------------------------------------------------------------------------------------- */

static bool any(const mtp__param *param)
{
    (void)param;
    return true;
}

static mtp_status load_weights(const shard_set *set, mtp_drafter *drafter, target *targets, mtp_view *views)
{
    const int64_t count = drafter->num_params;
    for (int64_t i = 0; i < count; i++) {
        views[i] = mtp__param_value(&drafter->params[i]);
        targets[i] = (target){.prefix = MTP__CHECKPOINT_PARAM,
                              .name = drafter->params[i].name,
                              .param = &drafter->params[i],
                              .is_weight = true,
                              .whole = &views[i],
                              .view = views[i]};
        look_up(set, &targets[i]);
    }
    find_unknown(set, MTP__CHECKPOINT_PARAM, drafter, any);
    MTP_TRY(judge(set, "the drafter"));
    if (set->manifest->computation != mtp__checkpoint_computation(drafter))
        return MTP_FAIL(
            MTP_E_DATA,
            "checkpoint %s does not fit the drafter %s: its config.json or its token_ordering is not the one "
            "that these weights were trained with; put back what was there",
            set->manifest->directory, drafter->directory);
    for (int64_t i = 0; i < count; i++) MTP_TRY(upload(set, drafter, &targets[i]));
    return MTP_OK;
}

mtp_status mtp__checkpoint_load_weights(const mtp__manifest *manifest, mtp_drafter *drafter)
{
    shard_set set;
    mtp__text problems = {0};
    MTP_TRY(open_shards(manifest, &problems, &set));
    target *targets = calloc((size_t)drafter->num_params, sizeof *targets);
    mtp_view *views = calloc((size_t)drafter->num_params, sizeof *views);
    const mtp_status status = targets && views ? load_weights(&set, drafter, targets, views) : no_memory();
    free(targets);
    free(views);
    mtp__text_free(&problems);
    close_shards(&set);
    return status;
}

/* ---- the optimizer -------------------------------------------------------------------------------------------- */

static bool is_trained(const mtp__param *param)
{
    return param->trained;
}

static const mtp__param *param_of(const mtp_drafter *drafter, const char *name)
{
    for (int64_t i = 0; i < drafter->num_params; i++)
        if (strcmp(drafter->params[i].name, name) == 0) return &drafter->params[i];
    return NULL;
}

static mtp_status load_moments(const shard_set *set, const mtp_drafter *drafter, mtp__optimizer *o, target *targets,
                               mtp_view *views)
{
    for (int64_t i = 0; i < o->num_tensors; i++) {
        const mtp__optim_tensor *tensor = &o->tensors[i];
        const mtp__param *param = param_of(drafter, tensor->name);
        if (!param) return MTP_FAIL(MTP_E_INTERNAL, "the optimizer's %s is no parameter of the drafter", tensor->name);
        views[i] = mtp__param_value(param);
        target t = {.name = tensor->name, .param = param, .whole = &views[i], .first = tensor->first};
        t.prefix = MTP__CHECKPOINT_EXP_AVG;
        t.view = o->exp_avg[i];
        targets[2 * i] = t;
        t.prefix = MTP__CHECKPOINT_EXP_AVG_SQ;
        t.view = o->exp_avg_sq[i];
        targets[2 * i + 1] = t;
        look_up(set, &targets[2 * i]);
        look_up(set, &targets[2 * i + 1]);
    }
    find_unknown(set, MTP__CHECKPOINT_EXP_AVG, drafter, is_trained);
    find_unknown(set, MTP__CHECKPOINT_EXP_AVG_SQ, drafter, is_trained);
    MTP_TRY(judge(set, "the trained parameters"));
    for (int64_t i = 0; i < 2 * o->num_tensors; i++) MTP_TRY(upload(set, drafter, &targets[i]));
    return mtp__optimizer_set_step(o, set->manifest->step - set->manifest->bad_steps);
}

mtp_status mtp__checkpoint_load_optimizer(const mtp__manifest *manifest, const mtp_drafter *drafter,
                                          mtp__optimizer *optimizer)
{
    shard_set set;
    mtp__text problems = {0};
    MTP_TRY(open_shards(manifest, &problems, &set));
    target *targets = calloc(2 * (size_t)optimizer->num_tensors, sizeof *targets);
    mtp_view *views = calloc((size_t)optimizer->num_tensors, sizeof *views);
    const mtp_status status = targets && views ? load_moments(&set, drafter, optimizer, targets, views) : no_memory();
    free(targets);
    free(views);
    mtp__text_free(&problems);
    close_shards(&set);
    return status;
}
