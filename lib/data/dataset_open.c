/* Opening a data set: all paths, what holds for them together, and the side of a split. */
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/text.h"
#include "data/dataset_open.h"

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
    mtp_log(logger, MTP_LOG_INFO, "data: %lld sample%s, %lld tokens, %lld supervised", (long long)dataset->count,
            mtp__plural(dataset->count), (long long)dataset->num_tokens, (long long)supervised);
    if (without)
        mtp_log(logger, MTP_LOG_WARNING, "data: %lld sample%s no token that could be a target", (long long)without,
                without == 1 ? " has" : "s have");
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
    const mtp__dataset_opening how = {options->hidden_norm, &sidecar, quarantine, options->logger};
    char *known = NULL;
    mtp_status status = mtp__dataset_create_sources(made, paths, num_paths, options->weights);
    for (int64_t i = 0; i < num_paths && status == MTP_OK; i++) {
        made->sources[i].first = made->count;
        status = mtp__dataset_add_path(made, paths[i], &how, &known);
        made->sources[i].count = made->count - made->sources[i].first;
    }
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
    if (status == MTP_OK) status = mtp__dataset_split_sources(made);
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
