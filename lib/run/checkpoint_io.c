/* The tensors of a checkpoint: from and to device memory. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/text.h"
#include "mtp/safetensors.h"
#include "run/checkpoint.h"

static const char value_prefix[] = "param.", first_prefix[] = "exp_avg.", second_prefix[] = "exp_avg_sq.";

static mtp_status no_memory(void)
{
    return MTP_FAIL(MTP_E_MEMORY, "out of memory for a checkpoint");
}

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
static uint64_t computation_of(const mtp_drafter *drafter)
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

/* ---- saving --------------------------------------------------------------------------------------------------- */

typedef struct device_tensor {
    mtp_context *context;
    const char *memory;
} device_tensor;

static mtp_status download(void *user, size_t offset, void *buffer, size_t size)
{
    const device_tensor *tensor = user;
    return tensor->context->ops->download(tensor->context->device, buffer, tensor->memory + offset, size);
}

typedef struct shard_writer {
    mtp_safetensors_source *sources;
    device_tensor *tensors;
    char **names;
    size_t count;
} shard_writer;

static mtp_status add(shard_writer *w, mtp_context *context, const char *prefix, const char *name, const mtp_view *view)
{
    mtp__text text = {0};
    mtp__text_add(&text, "%s%s", prefix, name);
    MTP_TRY(mtp__text_check(&text));
    w->names[w->count] = text.data;
    w->tensors[w->count] = (device_tensor){context, view->data};
    w->sources[w->count] = (mtp_safetensors_source){.name = text.data,
                                                    .dtype = MTP_F32,
                                                    .rank = view->rank,
                                                    .shape = view->shape,
                                                    .fill = download,
                                                    .user = &w->tensors[w->count]};
    w->count++;
    return MTP_OK;
}

static mtp_status collect(shard_writer *w, const mtp_view *values, const mtp_drafter *drafter, const mtp__optimizer *o)
{
    for (int64_t i = 0; i < drafter->num_params; i++)
        MTP_TRY(add(w, drafter->context, value_prefix, drafter->params[i].name, &values[i]));
    for (int64_t i = 0; i < o->num_tensors; i++) {
        MTP_TRY(add(w, o->context, first_prefix, o->tensors[i].name, &o->exp_avg[i]));
        MTP_TRY(add(w, o->context, second_prefix, o->tensors[i].name, &o->exp_avg_sq[i]));
    }
    return MTP_OK;
}

static mtp_status write_tensors(const char *path, const mtp_drafter *drafter, const mtp__optimizer *o)
{
    const size_t most = (size_t)(drafter->num_params + 2 * o->num_tensors);
    shard_writer w = {.sources = calloc(most, sizeof *w.sources),
                      .tensors = calloc(most, sizeof *w.tensors),
                      .names = calloc(most, sizeof *w.names)};
    mtp_view *values = calloc((size_t)drafter->num_params, sizeof *values);
    mtp_status status = w.sources && w.tensors && w.names && values ? MTP_OK : no_memory();
    for (int64_t i = 0; status == MTP_OK && i < drafter->num_params; i++)
        values[i] = mtp__param_value(&drafter->params[i]);
    if (status == MTP_OK) status = collect(&w, values, drafter, o);
    if (status == MTP_OK) status = mtp_safetensors_write(path, NULL, 0, w.sources, w.count);
    for (size_t i = 0; w.names && i < w.count; i++) free(w.names[i]);
    free(values);
    free(w.sources);
    free(w.tensors);
    free(w.names);
    return status;
}

/* The file as it was written, read back: size and checksum of what a later load will find. */
static mtp_status describe_shard(const char *path, const char *name, mtp__manifest *manifest)
{
    mtp__file_map map = {0};
    mtp__shard *shard = calloc(1, sizeof *shard);
    if (!shard) return no_memory();
    for (int64_t i = 0; i < manifest->num_shards; i++) free(manifest->shards[i].file);
    free(manifest->shards);
    manifest->shards = shard;
    manifest->num_shards = 1;
    manifest->world_size = 1;
    shard->file = strdup(name);
    if (!shard->file) return no_memory();
    MTP_TRY(mtp__file_map_open(&map, path));
    shard->bytes = map.size;
    shard->crc32c = mtp__crc32c(0, map.data, map.size);
    mtp__file_map_close(&map);
    return MTP_OK;
}

static mtp_status fill_directory(const char *directory, mtp__manifest *manifest, const mtp_drafter *drafter,
                                 const mtp__optimizer *optimizer)
{
    static const char name[] = "shard-00000-of-00001.safetensors";
    char *shard = NULL, *path = NULL;
    manifest->computation = computation_of(drafter);
    mtp_status status = mtp__path_join(directory, name, &shard);
    if (status == MTP_OK) status = mtp__path_join(directory, "manifest.json", &path);
    if (status == MTP_OK) status = write_tensors(shard, drafter, optimizer);
    if (status == MTP_OK) status = describe_shard(shard, name, manifest);
    if (status == MTP_OK) status = mtp__manifest_write(manifest, path);
    free(shard);
    free(path);
    return status;
}

/* Give the finished directory its name. One that has it already is moved out of the way first and removed last. */
static mtp_status publish(const char *parent, const char *temporary, const char *path, const char *old)
{
    if (mtp__path_exists(path)) {
        MTP_TRY(mtp__checkpoint_remove(old));
        if (rename(path, old) != 0)
            return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s cannot be moved away: %s", path, strerror(errno));
    }
    if (rename(temporary, path) != 0)
        return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s cannot be renamed to %s: %s", temporary, path, strerror(errno));
    MTP_TRY(mtp__dir_sync(parent));
    return mtp__checkpoint_remove(old);
}

static mtp_status save(const char *parent, const char *path, mtp__manifest *manifest, const mtp_drafter *drafter,
                       const mtp__optimizer *optimizer)
{
    mtp__text temporary = {0}, old = {0};
    mtp__text_add(&temporary, "%s/.%s.tmp-%ld", parent, mtp__path_name(path), (long)getpid());
    mtp__text_add(&old, "%s/.%s.old-%ld", parent, mtp__path_name(path), (long)getpid());
    mtp_status status = mtp__text_check(&temporary);
    if (status == MTP_OK) status = mtp__text_check(&old);
    if (status == MTP_OK) status = mtp__checkpoint_remove(temporary.data);
    if (status == MTP_OK) status = mtp__dir_create(temporary.data);
    if (status == MTP_OK) {
        status = fill_directory(temporary.data, manifest, drafter, optimizer);
        if (status == MTP_OK) status = publish(parent, temporary.data, path, old.data);
        if (status != MTP_OK) {
            char *message = strdup(mtp_last_error()->message); /* the reason outlives a failing clean-up */
            mtp__checkpoint_remove(temporary.data);
            if (message) status = MTP_FAIL(status, "%s", message);
            free(message);
        }
    }
    mtp__text_free(&temporary);
    mtp__text_free(&old);
    return status;
}

mtp_status mtp__checkpoint_save(const char *run_directory, mtp__manifest *manifest, const mtp_drafter *drafter,
                                const mtp__optimizer *optimizer)
{
    char *parent = NULL, *path = NULL;
    mtp_status status = mtp__path_join(run_directory, "checkpoints", &parent);
    if (status == MTP_OK) status = mtp__checkpoint_path(run_directory, manifest->step, &path);
    if (status == MTP_OK) status = mtp__dir_create(parent);
    if (status == MTP_OK) status = save(parent, path, manifest, drafter, optimizer);
    if (status != MTP_OK)
        status = mtp__fail_prefix(status, "checkpoint of step %lld not saved", (long long)manifest->step);
    free(parent);
    free(path);
    return status;
}

uint64_t mtp__checkpoint_bytes(const mtp_drafter *drafter)
{
    uint64_t bytes = 65536;
    for (int64_t i = 0; i < drafter->num_params; i++) {
        const mtp__param *param = &drafter->params[i];
        bytes += (uint64_t)param->count * sizeof(float) * (param->trained ? 3 : 1);
    }
    return bytes;
}

/* ---- loading -------------------------------------------------------------------------------------------------- */

typedef struct shard_set {
    const mtp__manifest *manifest;
    mtp_safetensors **files;
} shard_set;

static void close_shards(shard_set *set)
{
    for (int64_t i = 0; set->files && i < set->manifest->num_shards; i++) mtp_safetensors_close(set->files[i]);
    free(set->files);
}

static mtp_status open_shards(const mtp__manifest *manifest, shard_set *set)
{
    set->manifest = manifest;
    set->files = calloc((size_t)manifest->num_shards, sizeof *set->files);
    mtp_status status = set->files ? MTP_OK : no_memory();
    for (int64_t i = 0; status == MTP_OK && i < manifest->num_shards; i++) {
        char *path = NULL;
        status = mtp__path_join(manifest->directory, manifest->shards[i].file, &path);
        if (status == MTP_OK) status = mtp_safetensors_open(path, &set->files[i]);
        free(path);
    }
    if (status != MTP_OK) close_shards(set);
    return status;
}

static const mtp_safetensors_entry *find(const shard_set *set, const char *prefix, const char *name)
{
    mtp__text key = {0};
    const mtp_safetensors_entry *entry = NULL;
    mtp__text_add(&key, "%s%s", prefix, name);
    for (int64_t i = 0; !key.failed && !entry && i < set->manifest->num_shards; i++)
        entry = mtp_safetensors_find(set->files[i], key.data);
    mtp__text_free(&key);
    return entry;
}

static bool fits(const mtp_safetensors_entry *entry, const mtp_view *view)
{
    bool same = entry->dtype == MTP_F32 && entry->rank == view->rank;
    for (int32_t i = 0; same && i < view->rank; i++) same = entry->shape[i] == view->shape[i];
    return same;
}

/* Put the entry of `prefix``name` into `*found`, or a line about it into `problems`. */
static void look_up(const shard_set *set, const char *prefix, const char *name, const mtp_view *view,
                    const mtp_safetensors_entry **found, mtp__text *problems)
{
    *found = find(set, prefix, name);
    if (!*found)
        mtp__text_add(problems, "\n  %s%s is missing", prefix, name);
    else if (!fits(*found, view))
        mtp__text_add(problems, "\n  %s%s has another shape or dtype", prefix, name);
}

/* Entries under `prefix` whose names the owner does not know. */
static void find_unknown(const shard_set *set, const char *prefix, const void *owner,
                         bool (*known)(const void *owner, const char *name), mtp__text *problems)
{
    const size_t length = strlen(prefix);
    for (int64_t i = 0; i < set->manifest->num_shards; i++)
        for (size_t j = 0; j < mtp_safetensors_count(set->files[i]); j++) {
            const char *name = mtp_safetensors_at(set->files[i], j)->name;
            if (strncmp(name, prefix, length) == 0 && !known(owner, name + length))
                mtp__text_add(problems, "\n  %s is unknown", name);
        }
}

static mtp_status judge(const mtp__manifest *manifest, const mtp__text *problems, const char *whose)
{
    MTP_TRY(mtp__text_check(problems));
    if (problems->length == 0) return MTP_OK;
    return MTP_FAIL(MTP_E_DATA, "checkpoint %s does not fit %s:%s", manifest->directory, whose, problems->data);
}

static mtp_status upload(mtp_context *context, const mtp_safetensors_entry *entry, const mtp_view *view)
{
    return context->ops->upload(context->device, view->data, entry->data, entry->size);
}

static bool drafter_has(const void *owner, const char *name)
{
    const mtp_drafter *drafter = owner;
    for (int64_t i = 0; i < drafter->num_params; i++)
        if (strcmp(drafter->params[i].name, name) == 0) return true;
    return false;
}

static mtp_status load_weights(const shard_set *set, mtp_drafter *drafter, const mtp_safetensors_entry **entries,
                               mtp__text *problems)
{
    for (int64_t i = 0; i < drafter->num_params; i++) {
        const mtp_view view = mtp__param_value(&drafter->params[i]);
        look_up(set, value_prefix, drafter->params[i].name, &view, &entries[i], problems);
    }
    find_unknown(set, value_prefix, drafter, drafter_has, problems);
    MTP_TRY(judge(set->manifest, problems, "the drafter"));
    if (set->manifest->computation != computation_of(drafter))
        return MTP_FAIL(
            MTP_E_DATA,
            "checkpoint %s does not fit the drafter %s: its config.json or its token_ordering is not the one "
            "that these weights were trained with; put back what was there",
            set->manifest->directory, drafter->directory);
    for (int64_t i = 0; i < drafter->num_params; i++) {
        const mtp_view view = mtp__param_value(&drafter->params[i]);
        MTP_TRY_AT(upload(drafter->context, entries[i], &view), "checkpoint %s", set->manifest->directory);
    }
    return MTP_OK;
}

mtp_status mtp__checkpoint_load_weights(const mtp__manifest *manifest, mtp_drafter *drafter)
{
    shard_set set;
    mtp__text problems = {0};
    MTP_TRY(open_shards(manifest, &set));
    const mtp_safetensors_entry **entries = calloc((size_t)drafter->num_params, sizeof *entries);
    const mtp_status status = entries ? load_weights(&set, drafter, entries, &problems) : no_memory();
    free(entries);
    mtp__text_free(&problems);
    close_shards(&set);
    return status;
}

static bool optimizer_has(const void *owner, const char *name)
{
    const mtp__optimizer *o = owner;
    for (int64_t i = 0; i < o->num_tensors; i++)
        if (strcmp(o->tensors[i].name, name) == 0) return true;
    return false;
}

static mtp_status load_moments(const shard_set *set, mtp__optimizer *o, const mtp_safetensors_entry **entries,
                               mtp__text *problems)
{
    for (int64_t i = 0; i < o->num_tensors; i++) {
        look_up(set, first_prefix, o->tensors[i].name, &o->exp_avg[i], &entries[2 * i], problems);
        look_up(set, second_prefix, o->tensors[i].name, &o->exp_avg_sq[i], &entries[2 * i + 1], problems);
    }
    find_unknown(set, first_prefix, o, optimizer_has, problems);
    find_unknown(set, second_prefix, o, optimizer_has, problems);
    MTP_TRY(judge(set->manifest, problems, "the trained parameters"));
    for (int64_t i = 0; i < o->num_tensors; i++) {
        MTP_TRY(upload(o->context, entries[2 * i], &o->exp_avg[i]));
        MTP_TRY(upload(o->context, entries[2 * i + 1], &o->exp_avg_sq[i]));
    }
    o->step = set->manifest->step - set->manifest->bad_steps;
    return MTP_OK;
}

mtp_status mtp__checkpoint_load_optimizer(const mtp__manifest *manifest, mtp__optimizer *optimizer)
{
    shard_set set;
    mtp__text problems = {0};
    MTP_TRY(open_shards(manifest, &set));
    const mtp_safetensors_entry **entries = calloc(2 * (size_t)optimizer->num_tensors, sizeof *entries);
    const mtp_status status = entries ? load_moments(&set, optimizer, entries, &problems) : no_memory();
    free(entries);
    mtp__text_free(&problems);
    close_shards(&set);
    return status;
}
