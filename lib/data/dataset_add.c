/* What a path adds to a data set: sample files, directories of them, shards, stores. */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "data/dataset_open.h"
#include "data/store_dir.h"

/* ---- one sample ----------------------------------------------------------------------------------------------- */

static mtp_status resolve_norm(mtp_hidden_norm label, mtp_hidden_norm setting, bool *normalise)
{
    static const char *const names[] = {"unset", "pre", "post"};
    if (label == MTP_HIDDEN_UNSET && setting == MTP_HIDDEN_UNSET)
        return MTP_FAIL(MTP_E_CONFIG,
                        "the file does not say whether hidden_states are before or after the verifier's final norm. "
                        "Set hidden_norm = \"pre\" (before it, as vLLM's extraction writes them; the norm is applied "
                        "when they are read) or hidden_norm = \"post\" (after it)");
    if (label != MTP_HIDDEN_UNSET && setting != MTP_HIDDEN_UNSET && label != setting)
        return MTP_FAIL(MTP_E_CONFIG,
                        "the file says hidden_norm \"%s\" but the setting is hidden_norm = \"%s\"; remove the setting, "
                        "or correct the file's metadata",
                        names[label], names[setting]);
    *normalise = (label == MTP_HIDDEN_UNSET ? setting : label) == MTP_HIDDEN_PRE;
    return MTP_OK;
}

static mtp_status fill_entry(const mtp_dataset *dataset, const mtp_safetensors *file, mtp_hidden_norm setting,
                             mtp__sidecar *sidecar, mtp__dataset_entry *entry)
{
    mtp__sample sample;
    MTP_TRY(mtp__sample_describe(file, mtp_verifier_get_config(dataset->verifier), &sample));
    entry->num_tokens = sample.num_tokens;
    entry->hidden_dtype = sample.hidden.dtype;
    for (int type = 0; type < MTP_LAYER_TYPES; type++) entry->kv_dtype[type] = mtp__dataset_kv_dtype(sample.kv[type]);
    MTP_TRY(resolve_norm(sample.label, setting, &entry->normalise));
    uint8_t *mask = malloc((size_t)sample.num_tokens);
    if (!mask) return MTP_FAIL(MTP_E_MEMORY, "no memory for %lld tokens", (long long)sample.num_tokens);
    const mtp_status status = mtp__dataset_find_mask(&sample, sidecar, entry, mask);
    free(mask);
    entry->sample_id = mtp__sample_hash(&sample);
    return status;
}

/* ---- parts ---------------------------------------------------------------------------------------------------- */

static mtp_status add_part(mtp_dataset *dataset, mtp__shard *shard)
{
    mtp__dataset_part *parts = realloc(dataset->parts, (size_t)(dataset->num_parts + 1) * sizeof *parts);
    if (!parts) return MTP_FAIL(MTP_E_MEMORY, "no memory for a list of shards");
    dataset->parts = parts;
    parts[dataset->num_parts++] =
        (mtp__dataset_part){.first = dataset->count, .entry = dataset->num_entries, .shard = shard};
    return MTP_OK;
}

static bool needs_part(const mtp_dataset *dataset)
{
    return dataset->num_parts == 0 || dataset->parts[dataset->num_parts - 1].shard;
}

/* What K of shards that hold V alone is made with. */
static mtp_status need_key(mtp_dataset *dataset)
{
    if (dataset->key) return MTP_OK;
    dataset->key = calloc(1, sizeof *dataset->key);
    if (!dataset->key) return MTP_FAIL(MTP_E_MEMORY, "out of memory");
    MTP_TRY(mtp__verifier_key_read(dataset->verifier, MTP_LAYER_FULL, dataset->key));
    return mtp__verifier_key_check(dataset->key, mtp_verifier_directory(dataset->verifier));
}

static mtp_status too_many(void)
{
    return MTP_FAIL(MTP_E_DATA, "more than %u samples", UINT32_MAX / 2);
}

static mtp_status add_shard(mtp_dataset *dataset, const char *path, mtp_hidden_norm setting)
{
    mtp__shard *shard = NULL;
    bool normalise;
    MTP_TRY_AT(resolve_norm(MTP_HIDDEN_POST, setting, &normalise), "%s", path);
    MTP_TRY(mtp__shard_open(path, &shard));
    mtp_status status = mtp__shard_check_verifier(shard, mtp_verifier_get_config(dataset->verifier));
    if (status == MTP_OK && shard->layout.global_v_only) status = need_key(dataset);
    if (status == MTP_OK && shard->num_samples >= UINT32_MAX / 2 - dataset->count) status = too_many();
    if (status == MTP_OK) status = add_part(dataset, shard);
    if (status != MTP_OK) {
        mtp__shard_close(shard);
        return status;
    }
    dataset->parts[dataset->num_parts - 1].count = shard->num_samples;
    dataset->count += shard->num_samples;
    return MTP_OK;
}

static mtp_status add_store(mtp_dataset *dataset, const char *directory, mtp_hidden_norm setting)
{
    mtp__name_list names;
    MTP_TRY(mtp__store_dir_shards(directory, &names));
    mtp_status status = MTP_OK;
    for (size_t i = 0; i < names.count && status == MTP_OK; i++) {
        char *path = NULL;
        status = mtp__path_join(directory, names.names[i], &path);
        if (status == MTP_OK) status = add_shard(dataset, path, setting);
        free(path);
    }
    mtp__name_list_free(&names);
    return status;
}

/* ---- files ---------------------------------------------------------------------------------------------------- */

static mtp_status grow(mtp_dataset *dataset)
{
    if (dataset->num_entries < dataset->capacity) return MTP_OK;
    if (dataset->count >= UINT32_MAX / 2) return too_many();
    const int64_t capacity = dataset->capacity ? 2 * dataset->capacity : 64;
    mtp__dataset_entry *entries = realloc(dataset->entries, (size_t)capacity * sizeof *entries);
    if (!entries) return MTP_FAIL(MTP_E_MEMORY, "no memory for %lld samples", (long long)capacity);
    dataset->entries = entries;
    dataset->capacity = capacity;
    return MTP_OK;
}

static void drop_entry(mtp_dataset *dataset)
{
    mtp__dataset_entry *entry = &dataset->entries[--dataset->num_entries];
    dataset->count--;
    dataset->parts[dataset->num_parts - 1].count--;
    free(entry->path);
    free(entry->sidecar_mask);
}

/* Is it the sample that is wrong, and not the system or the settings? */
static bool is_bad_sample(mtp_status status)
{
    return status == MTP_E_DATA || status == MTP_E_FORMAT || status == MTP_E_VERSION || status == MTP_E_NOT_FOUND;
}

static mtp_status add_sample(mtp_dataset *dataset, const char *path, const mtp__dataset_opening *how)
{
    mtp_safetensors *file = NULL;
    if (needs_part(dataset)) MTP_TRY(add_part(dataset, NULL));
    MTP_TRY(grow(dataset));
    mtp__dataset_entry *entry = &dataset->entries[dataset->num_entries];
    *entry = (mtp__dataset_entry){.path = strdup(path)};
    if (!entry->path) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
    dataset->num_entries++; /* from here on mtp_dataset_close frees it */
    dataset->count++;
    dataset->parts[dataset->num_parts - 1].count++;
    mtp_status status = mtp_safetensors_open(path, &file);
    if (status == MTP_OK) {
        status = fill_entry(dataset, file, how->hidden_norm, how->sidecar, entry);
        if (status != MTP_OK) status = mtp__fail_prefix(status, "%s", path);
    }
    mtp_safetensors_close(file);
    if (!how->quarantine || !is_bad_sample(status)) return status;
    drop_entry(dataset);
    (void)mtp__sidecar_find(how->sidecar, mtp__path_name(path)); /* a line for a bad sample is not without a file */
    how->quarantine->refuse(how->quarantine->user, path, mtp_last_error());
    return MTP_OK;
}

/* ---- paths ---------------------------------------------------------------------------------------------------- */

static mtp_status add_directory(mtp_dataset *dataset, const char *directory, const mtp__dataset_opening *how)
{
    mtp__name_list names;
    MTP_TRY(mtp__dir_list(directory, MTP__LIST_FILES, ".safetensors", &names));
    mtp_status status = MTP_OK;
    if (names.count == 0)
        status = MTP_FAIL(MTP_E_NOT_FOUND,
                          "%s: no *.safetensors files in this directory (subdirectories are not "
                          "searched)",
                          directory);
    for (size_t i = 0; i < names.count && status == MTP_OK; i++) {
        char *path = NULL;
        status = mtp__path_join(directory, names.names[i], &path);
        if (status == MTP_OK) status = add_sample(dataset, path, how);
        free(path);
    }
    mtp__name_list_free(&names);
    return status;
}

/* The directory a file is in; free() it. */
static mtp_status directory_of(const char *path, char **directory)
{
    const size_t length = (size_t)(mtp__path_name(path) - path);
    *directory = length == 0 ? strdup(".") : strndup(path, length);
    return *directory ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
}

static void warn_unused(const mtp__sidecar *sidecar, const mtp_logger *logger)
{
    size_t unused = 0, first = 0;
    for (size_t i = sidecar->count; i-- > 0;)
        if (!sidecar->entries[i].used) unused++, first = i;
    if (unused)
        mtp_log(logger, MTP_LOG_WARNING, "%s: %s is not there (%zu such lines in the sidecars of its directory)",
                sidecar->entries[first].origin, sidecar->entries[first].file, unused);
}

mtp_status mtp__dataset_add_path(mtp_dataset *dataset, const char *path, const mtp__dataset_opening *how, char **known)
{
    const bool whole = mtp__dir_exists(path);
    mtp__sidecar *sidecar = how->sidecar;
    char *directory = NULL;
    if (!mtp__path_exists(path)) return MTP_FAIL(MTP_E_NOT_FOUND, "%s: no such file or directory", path);
    if (whole && mtp__store_dir_is(path)) return add_store(dataset, path, how->hidden_norm);
    if (!whole && mtp__store_is_shard_name(path)) return add_shard(dataset, path, how->hidden_norm);
    if (whole)
        directory = strdup(path);
    else
        MTP_TRY(directory_of(path, &directory));
    if (!directory) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
    mtp_status status = MTP_OK;
    if (*known && strcmp(*known, directory) == 0) {
        free(directory);
    } else {
        mtp__sidecar_free(sidecar);
        free(*known);
        *known = directory;
        status = mtp__sidecar_read(sidecar, directory);
    }
    if (status != MTP_OK) return status;
    if (!whole) return add_sample(dataset, path, how);
    MTP_TRY(add_directory(dataset, path, how));
    warn_unused(sidecar, how->logger);
    return MTP_OK;
}
