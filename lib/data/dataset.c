/* A data set: the headers of all samples, checked once, and where each loss mask comes from. */
#include "data/dataset.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/hash.h"
#include "data/sidecar.h"
#include "data/store_dir.h"

/* What is the same for all samples of a directory. */
typedef struct opening {
    mtp_hidden_norm hidden_norm;
    mtp__sidecar *sidecar;
    const mtp__dataset_quarantine *quarantine;
    const mtp_logger *logger;
} opening;

/* ---- masks ---------------------------------------------------------------------------------------------------- */

static mtp_status missing_mask(const char *path, const mtp__sidecar *sidecar)
{
    if (sidecar->count > 0)
        return MTP_FAIL(MTP_E_DATA,
                        "no loss mask: it has none itself, and none of the %zu lines in the *.jsonl files beside it is "
                        "for \"file\": \"%s\" (%s is for \"%s\")",
                        sidecar->count, mtp__path_name(path), sidecar->entries[0].origin, sidecar->entries[0].file);
    return MTP_FAIL(MTP_E_DATA,
                    "no loss mask. Either put loss_mask (U8 [S]) into the file, or put a line {\"file\": \"%s\", "
                    "\"prompt_len\": N} (or \"loss_mask\": [0, 1, ...]) into a *.jsonl file beside it",
                    mtp__path_name(path));
}

/* The sidecar's entry against the number of tokens, and against the file's own mask when it has one. */
static mtp_status check_sidecar(const mtp__sidecar_entry *side, int64_t num_tokens, const uint8_t *file_mask)
{
    if (side->mask && side->mask_length != num_tokens)
        return MTP_FAIL(MTP_E_DATA, "%s: loss_mask has %lld entries, the sample has %lld tokens", side->origin,
                        (long long)side->mask_length, (long long)num_tokens);
    if (!side->mask && side->prompt_len > num_tokens)
        return MTP_FAIL(MTP_E_DATA, "%s: prompt_len is %lld, the sample has %lld tokens", side->origin,
                        (long long)side->prompt_len, (long long)num_tokens);
    for (int64_t i = 0; file_mask && i < num_tokens; i++)
        if (mtp__sidecar_supervises(side, i) != (file_mask[i] != 0))
            return MTP_FAIL(MTP_E_DATA,
                            "%s: loss_mask of the file says %d for token %lld, the sidecar says %d; remove one",
                            side->origin, file_mask[i], (long long)i, !file_mask[i]);
    return MTP_OK;
}

static void summarise(mtp__dataset_entry *entry, const uint8_t *mask)
{
    entry->num_supervised = entry->last_target = 0;
    entry->prompt_len = entry->first_target = entry->num_tokens;
    for (int64_t i = entry->num_tokens - 1; i >= 0; i--) {
        if (!mask[i]) continue;
        entry->num_supervised++;
        entry->prompt_len = i;
        if (i < 2) continue;
        entry->first_target = i;
        if (entry->last_target == 0) entry->last_target = i + 1;
    }
}

/* Where the mask comes from, and what it holds. `mask` is scratch [num_tokens]. */
static mtp_status find_mask(const mtp__sample *sample, mtp__sidecar *sidecar, mtp__dataset_entry *entry, uint8_t *mask)
{
    const mtp__sidecar_entry *side = mtp__sidecar_find(sidecar, mtp__path_name(entry->path));
    entry->sidecar_prompt_len = -1;
    if (!side && !sample->loss_mask) return missing_mask(entry->path, sidecar);
    if (sample->loss_mask) MTP_TRY(mtp__sample_read_mask(sample, entry->num_tokens, mask));
    if (side) MTP_TRY(check_sidecar(side, entry->num_tokens, sample->loss_mask ? mask : NULL));
    if (side && !sample->loss_mask) {
        for (int64_t i = 0; i < entry->num_tokens; i++) mask[i] = mtp__sidecar_supervises(side, i);
        entry->sidecar_prompt_len = side->prompt_len;
        if (side->mask) {
            entry->sidecar_mask = malloc((size_t)entry->num_tokens);
            if (!entry->sidecar_mask) return MTP_FAIL(MTP_E_MEMORY, "no memory for a loss mask");
            memcpy(entry->sidecar_mask, mask, (size_t)entry->num_tokens);
        }
    }
    summarise(entry, mask);
    return MTP_OK;
}

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

static mtp_dtype kv_dtype_of(const mtp__field kv[MTP__KV])
{
    if (!kv[MTP__K].entry) return MTP_F32;
    return kv[MTP__K].dtype == kv[MTP__V].dtype ? kv[MTP__K].dtype : MTP_F32;
}

static mtp_status fill_entry(const mtp_dataset *dataset, const mtp_safetensors *file, mtp_hidden_norm setting,
                             mtp__sidecar *sidecar, mtp__dataset_entry *entry)
{
    mtp__sample sample;
    MTP_TRY(mtp__sample_describe(file, mtp_verifier_get_config(dataset->verifier), &sample));
    entry->num_tokens = sample.num_tokens;
    entry->hidden_dtype = sample.hidden.dtype;
    for (int type = 0; type < MTP_LAYER_TYPES; type++) entry->kv_dtype[type] = kv_dtype_of(sample.kv[type]);
    MTP_TRY(resolve_norm(sample.label, setting, &entry->normalise));
    uint8_t *mask = malloc((size_t)sample.num_tokens);
    if (!mask) return MTP_FAIL(MTP_E_MEMORY, "no memory for %lld tokens", (long long)sample.num_tokens);
    const mtp_status status = find_mask(&sample, sidecar, entry, mask);
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

static mtp__dataset_entry entry_of_row(mtp__shard *shard, int64_t i)
{
    const mtp__store_row *row = &shard->rows[i];
    const mtp_dtype kv = shard->layout.fp8 ? MTP_F32 : MTP_BF16;
    mtp__dataset_entry entry = {.path = shard->path,
                                .sample_id = row->sample_id,
                                .num_tokens = row->num_tokens,
                                .prompt_len = row->prompt_len,
                                .first_target = row->first_target,
                                .last_target = row->last_target,
                                .num_supervised = row->num_supervised,
                                .hidden_dtype = MTP_BF16,
                                .sidecar_prompt_len = -1,
                                .shard = shard,
                                .row = i};
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        entry.kv_dtype[type] = shard->layout.num_kv_heads[type] ? kv : MTP_F32;
    return entry;
}

mtp__dataset_entry mtp__dataset_at(const mtp_dataset *dataset, int64_t index)
{
    if (dataset->selected) index = dataset->selected[index];
    int64_t low = 0, high = dataset->num_parts - 1; /* the last part that begins at or before the index */
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (dataset->parts[middle].first <= index)
            low = middle;
        else
            high = middle - 1;
    }
    const mtp__dataset_part *part = &dataset->parts[low];
    if (part->shard) return entry_of_row(part->shard, index - part->first);
    return dataset->entries[part->entry + index - part->first];
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

static mtp_status add_sample(mtp_dataset *dataset, const char *path, const opening *how)
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

static mtp_status add_directory(mtp_dataset *dataset, const char *directory, const opening *how)
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

/* One path. The sidecar of the directory read last is kept, so that files listed one by one do not read it again. */
static mtp_status add_path(mtp_dataset *dataset, const char *path, const opening *how, char **known)
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

/* ---- the whole ------------------------------------------------------------------------------------------------ */

static int by_path(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static mtp_status resolve(const char *path, char **real)
{
    *real = realpath(path, NULL);
    return *real ? MTP_OK : MTP_FAIL(MTP_E_IO, "%s: cannot resolve the path", path);
}

/* No sample file and no shard twice. */
static mtp_status refuse_duplicates(const mtp_dataset *dataset)
{
    const int64_t most = dataset->num_entries + dataset->num_parts;
    char **real = calloc((size_t)most + 1, sizeof *real);
    if (!real) return MTP_FAIL(MTP_E_MEMORY, "no memory for %lld paths", (long long)most);
    mtp_status status = MTP_OK;
    int64_t count = 0;
    for (int64_t i = 0; i < dataset->num_entries && status == MTP_OK; i++)
        status = resolve(dataset->entries[i].path, &real[count++]);
    for (int64_t i = 0; i < dataset->num_parts && status == MTP_OK; i++)
        if (dataset->parts[i].shard) status = resolve(dataset->parts[i].shard->path, &real[count++]);
    if (status == MTP_OK) qsort(real, (size_t)count, sizeof *real, by_path);
    for (int64_t i = 1; i < count && status == MTP_OK; i++)
        if (strcmp(real[i - 1], real[i]) == 0)
            status = MTP_FAIL(MTP_E_CONFIG, "%s is given twice; name each directory or file once", real[i]);
    for (int64_t i = 0; i < count; i++) free(real[i]);
    free(real);
    return status;
}

/* How wide a batch's values can be: the type of all samples when they agree, else fp32. */
static void widen(size_t *size, mtp_dtype dtype, mtp_dtype first)
{
    const size_t needed = dtype == first ? mtp_dtype_size(dtype) : 4;
    if (needed > *size) *size = needed;
}

/* One sample stands for all of a shard, so that this takes no time with a packed store. */
static void measure(mtp_dataset *dataset)
{
    if (dataset->count == 0) return;
    const mtp__dataset_entry first = mtp__dataset_at(dataset, 0);
    for (int64_t p = 0; p < dataset->num_parts; p++) {
        const mtp__dataset_part *part = &dataset->parts[p];
        const mtp__shard *shard = part->shard;
        for (int64_t i = 0; i < (shard && part->count > 1 ? 1 : part->count); i++) {
            const mtp__dataset_entry entry = mtp__dataset_at(dataset, part->first + i);
            widen(&dataset->hidden_size, entry.hidden_dtype, first.hidden_dtype);
            for (int type = 0; type < MTP_LAYER_TYPES; type++)
                widen(&dataset->kv_size[type], entry.kv_dtype[type], first.kv_dtype[type]);
            if (!shard) dataset->num_tokens += entry.num_tokens;
        }
        if (shard) dataset->num_tokens += shard->sample_tokens;
        dataset->fp8 = dataset->fp8 || (shard && shard->layout.fp8);
    }
}

static void report(const mtp_dataset *dataset, const mtp_logger *logger)
{
    int64_t supervised = 0, without = 0;
    for (int64_t i = 0; i < dataset->num_entries; i++) {
        supervised += dataset->entries[i].num_supervised;
        without += dataset->entries[i].first_target == dataset->entries[i].num_tokens;
    }
    for (int64_t p = 0; p < dataset->num_parts; p++)
        if (dataset->parts[p].shard) supervised += dataset->parts[p].shard->num_supervised;
    mtp_log(logger, MTP_LOG_INFO, "data: %lld samples, %lld tokens, %lld supervised", (long long)dataset->count,
            (long long)dataset->num_tokens, (long long)supervised);
    if (without)
        mtp_log(logger, MTP_LOG_WARNING, "data: %lld samples have no token that could be a target", (long long)without);
}

/* Keep the documents of one side. A hash is compared, so nothing depends on what else there is. */
static mtp_status split(mtp_dataset *dataset, const mtp_dataset_options *options)
{
    if (options->split == MTP_SPLIT_NONE) return MTP_OK;
    uint32_t *selected = malloc((size_t)dataset->count * sizeof *selected + 1);
    if (!selected) return MTP_FAIL(MTP_E_MEMORY, "no memory to split %lld samples", (long long)dataset->count);
    int64_t count = 0, tokens = 0;
    for (int64_t i = 0; i < dataset->count; i++) {
        const mtp__dataset_entry entry = mtp__dataset_at(dataset, i);
        const uint64_t mixed = mtp__fnv1a(MTP__FNV_START, &entry.sample_id, sizeof entry.sample_id);
        const bool held_out = (double)(mixed >> 11) * 0x1p-53 < options->validation_share;
        if (held_out != (options->split == MTP_SPLIT_VALIDATION)) continue;
        selected[count++] = (uint32_t)i;
        tokens += entry.num_tokens;
    }
    mtp_log(options->logger, MTP_LOG_INFO, "data: %lld of %lld samples are for %s", (long long)count,
            (long long)dataset->count, options->split == MTP_SPLIT_VALIDATION ? "validation" : "training");
    dataset->selected = selected;
    dataset->num_tokens = tokens;
    dataset->count = count;
    if (count > 0) return MTP_OK;
    return MTP_FAIL(MTP_E_DATA, "validation_share %g leaves no sample on this side", options->validation_share);
}

mtp_status mtp__dataset_open(const char *const *paths, int64_t num_paths, const mtp_verifier *verifier,
                             const mtp_dataset_options *options, const mtp__dataset_quarantine *quarantine,
                             mtp_dataset **dataset)
{
    *dataset = NULL;
    mtp_dataset *made = calloc(1, sizeof *made);
    if (!made) return MTP_FAIL(MTP_E_MEMORY, "out of memory");
    made->verifier = verifier;
    mtp__sidecar sidecar = {0};
    const opening how = {options->hidden_norm, &sidecar, quarantine, options->logger};
    char *known = NULL;
    mtp_status status = MTP_OK;
    for (int64_t i = 0; i < num_paths && status == MTP_OK; i++) status = add_path(made, paths[i], &how, &known);
    mtp__sidecar_free(&sidecar);
    free(known);
    if (status == MTP_OK) status = refuse_duplicates(made);
    if (status == MTP_OK && made->count == 0 && !quarantine)
        status = MTP_FAIL(MTP_E_DATA, "%s: the store holds no sample; all were refused when it was packed", paths[0]);
    if (status != MTP_OK) {
        mtp_dataset_close(made);
        return status;
    }
    measure(made);
    report(made, options->logger);
    status = split(made, options);
    if (status != MTP_OK) {
        mtp_dataset_close(made);
        return status;
    }
    *dataset = made;
    return MTP_OK;
}

mtp_status mtp_dataset_open(const char *const *paths, int64_t num_paths, const mtp_verifier *verifier,
                            const mtp_dataset_options *options, mtp_dataset **dataset)
{
    MTP_REQUIRE(paths && num_paths >= 1 && verifier && options && dataset);
    MTP_REQUIRE(options->hidden_norm >= MTP_HIDDEN_UNSET && options->hidden_norm <= MTP_HIDDEN_POST);
    MTP_REQUIRE(options->split == MTP_SPLIT_NONE || (options->validation_share > 0 && options->validation_share < 1));
    return mtp__dataset_open(paths, num_paths, verifier, options, NULL, dataset);
}

void mtp_dataset_close(mtp_dataset *dataset)
{
    if (!dataset) return;
    for (int64_t i = 0; i < dataset->num_entries; i++) {
        free(dataset->entries[i].path);
        free(dataset->entries[i].sidecar_mask);
    }
    for (int64_t i = 0; i < dataset->num_parts; i++) mtp__shard_close(dataset->parts[i].shard);
    free(dataset->entries);
    free(dataset->parts);
    free(dataset->selected);
    free(dataset);
}

int64_t mtp_dataset_size(const mtp_dataset *dataset)
{
    return dataset->count;
}

mtp_sample_info mtp_dataset_sample(const mtp_dataset *dataset, int64_t index)
{
    if (index < 0 || index >= dataset->count) return (mtp_sample_info){0};
    const mtp__dataset_entry entry = mtp__dataset_at(dataset, index);
    return (mtp_sample_info){.path = entry.path,
                             .name =
                                 entry.shard ? mtp__shard_source(entry.shard, entry.row) : mtp__path_name(entry.path),
                             .num_tokens = entry.num_tokens,
                             .prompt_len = entry.prompt_len,
                             .num_supervised = entry.num_supervised};
}

uint64_t mtp_dataset_fingerprint(const mtp_dataset *dataset)
{
    uint64_t hash = MTP__FNV_START;
    for (int64_t i = 0; i < dataset->count; i++) {
        const mtp__dataset_entry entry = mtp__dataset_at(dataset, i);
        const uint64_t numbers[5] = {entry.sample_id, (uint64_t)entry.num_tokens, (uint64_t)entry.num_supervised,
                                     (uint64_t)entry.prompt_len, (uint64_t)entry.first_target};
        hash = mtp__fnv1a(hash, numbers, sizeof numbers);
    }
    return hash;
}

mtp_status mtp__dataset_describe_sample(const mtp_dataset *dataset, int64_t index, const mtp_safetensors *file,
                                        mtp__sample *sample)
{
    const mtp__dataset_entry found = mtp__dataset_at(dataset, index), *entry = &found;
    MTP_TRY_AT(mtp__sample_describe(file, mtp_verifier_get_config(dataset->verifier), sample), "%s", entry->path);
    bool same = sample->num_tokens == entry->num_tokens && sample->hidden.dtype == entry->hidden_dtype;
    same = same && (sample->loss_mask || entry->sidecar_mask || entry->sidecar_prompt_len >= 0);
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        same = same && kv_dtype_of(sample->kv[type]) == entry->kv_dtype[type];
    if (same) return MTP_OK;
    return MTP_FAIL(MTP_E_DATA, "%s: the file changed since the data set was opened", entry->path);
}

mtp_status mtp__dataset_open_sample(const mtp_dataset *dataset, int64_t index, mtp_safetensors **file,
                                    mtp__sample *sample)
{
    MTP_TRY(mtp_safetensors_open(mtp__dataset_at(dataset, index).path, file));
    const mtp_status status = mtp__dataset_describe_sample(dataset, index, *file, sample);
    if (status == MTP_OK) return MTP_OK;
    mtp_safetensors_close(*file);
    *file = NULL;
    return status;
}
