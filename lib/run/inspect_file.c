/* Inspecting safetensors files: samples, weights, shards, others; and directories of samples. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/real.h"
#include "data/sample.h"
#include "data/sidecar.h"
#include "data/verifier_config.h"
#include "model/tensors.h"
#include "run/inspect.h"

/* ---- any file ------------------------------------------------------------------------------------------------- */

static void add_dtypes(mtp__inspector *inspector, const mtp_safetensors *file)
{
    int64_t counts[MTP_DTYPE_COUNT] = {0};
    json_t *dtypes = json_object();
    for (size_t i = 0; i < mtp_safetensors_count(file); i++) counts[mtp_safetensors_at(file, i)->dtype]++;
    for (int dtype = 0; dtype < MTP_DTYPE_COUNT; dtype++)
        if (counts[dtype] && json_object_set_new(dtypes, mtp_dtype_name((mtp_dtype)dtype), json_integer(counts[dtype])))
            inspector->failed = true;
    mtp__fact(inspector, "dtypes", dtypes);
}

void mtp__inspect_tensors(mtp__inspector *inspector, const mtp_safetensors *file)
{
    int64_t values = 0, bytes = 0;
    for (size_t i = 0; i < mtp_safetensors_count(file); i++) {
        const mtp_safetensors_entry *entry = mtp_safetensors_at(file, i);
        values += entry->count;
        bytes += (int64_t)entry->size;
    }
    mtp__fact(inspector, "tensors", json_integer((json_int_t)mtp_safetensors_count(file)));
    mtp__fact(inspector, "values", json_integer(values));
    mtp__fact(inspector, "bytes", json_integer(bytes));
    add_dtypes(inspector, file);
    json_t *metadata = json_object();
    for (size_t i = 0; i < mtp_safetensors_metadata_count(file); i++) {
        const mtp_safetensors_pair pair = mtp_safetensors_metadata_at(file, i);
        if (json_object_set_new(metadata, pair.key, json_string(pair.value)) != 0) inspector->failed = true;
    }
    mtp__fact(inspector, "metadata", metadata);
}

void mtp__inspect_values(mtp__inspector *inspector, const mtp_safetensors *file)
{
    int64_t looked = 0, bad = 0, others = 0;
    for (size_t i = 0; i < mtp_safetensors_count(file); i++) {
        const mtp_safetensors_entry *entry = mtp_safetensors_at(file, i);
        const bool real = mtp_dtype_is_compute(entry->dtype);
        const int64_t index = real ? mtp__real_find_nonfinite_in(entry->data, entry->dtype, entry->count) : -1;
        looked += real;
        others += !real;
        if (index < 0) continue;
        if (bad++ == 0)
            mtp__problem(inspector, "%s holds NaN or infinity, first at element %lld", entry->name, (long long)index);
    }
    if (bad > 1) mtp__problem(inspector, "%lld more tensors hold NaN or infinity", (long long)bad - 1);
    if (bad == 0)
        mtp__fact_text(inspector, "nonfinite", "none in %lld tensors%s", (long long)looked,
                       others ? "; integers and 8-bit floats were not looked at" : "");
}

static void add_entry(mtp__inspector *inspector, const mtp_safetensors_entry *entry)
{
    char shape[256];
    mtp__fact_text(inspector, entry->name, "%s %s", mtp_dtype_name(entry->dtype),
                   mtp__shape_text(entry->rank, entry->shape, shape, sizeof shape));
}

/* ---- samples -------------------------------------------------------------------------------------------------- */

static bool is_sample(const mtp_safetensors *file)
{
    return mtp_safetensors_find(file, "token_ids") && mtp_safetensors_find(file, "hidden_states");
}

static void add_norm(mtp__inspector *inspector, const mtp_safetensors *file)
{
    const char *label = mtp_safetensors_metadata(file, "hidden_norm");
    mtp__fact_text(inspector, "hidden_norm", "%s",
                   label ? label : "not labelled: set data.hidden_norm to \"pre\" or \"post\" (vLLM writes \"pre\")");
}

static void add_mask(mtp__inspector *inspector, const mtp_safetensors_entry *mask, int64_t tokens)
{
    uint8_t *values = NULL;
    int64_t supervised = 0;
    mtp__sample sample = {.num_tokens = tokens, .loss_mask = mask};
    if (!mask) {
        mtp__fact_text(inspector, "supervised", "no loss_mask in the file: a *.jsonl beside it must give it");
        return;
    }
    if (mask->rank != 1 || mask->shape[0] != tokens) {
        mtp__problem(inspector, "loss_mask does not have one value a token");
        return;
    }
    if (!(values = malloc((size_t)tokens + 1)) || mtp__sample_read_mask(&sample, tokens, values) != MTP_OK) {
        mtp__problem_last(inspector);
    } else {
        for (int64_t i = 0; i < tokens; i++) supervised += values[i];
        mtp__fact(inspector, "supervised", json_integer(supervised));
        if (supervised == 0) mtp__problem(inspector, "loss_mask supervises nothing: this sample trains nothing");
    }
    free(values);
}

/* Full checks need the verifier's geometry; without one the keys and lengths alone are looked at. */
static mtp_status check_sample(mtp__inspector *inspector, const mtp_safetensors *file)
{
    mtp_verifier_config verifier;
    mtp__sample sample;
    if (!inspector->verifier) return MTP_OK;
    MTP_TRY(mtp__verifier_config_read(inspector->verifier, &verifier));
    if (mtp__sample_describe(file, &verifier, &sample) != MTP_OK) mtp__problem_last(inspector);
    return MTP_OK;
}

static mtp_status inspect_sample(mtp__inspector *inspector, const mtp_safetensors *file)
{
    const mtp_safetensors_entry *ids = mtp_safetensors_find(file, "token_ids");
    const mtp_safetensors_entry *hidden = mtp_safetensors_find(file, "hidden_states");
    const int64_t tokens = ids->rank == 1 ? ids->shape[0] : -1;
    bool kv = false;
    inspector->kind = MTP_INSPECT_SAMPLE;
    mtp__fact(inspector, "tokens", json_integer(tokens));
    for (size_t i = 0; i < mtp_safetensors_count(file); i++) {
        const mtp_safetensors_entry *entry = mtp_safetensors_at(file, i);
        kv = kv || strstr(entry->name, "kv_last_") != NULL;
        add_entry(inspector, entry);
    }
    add_norm(inspector, file);
    mtp__fact_text(inspector, "nonfinite", "not looked for: mtp check does");
    if (tokens < 0) {
        mtp__problem(inspector, "token_ids has %d axes, expected one", (int)ids->rank);
        return MTP_OK;
    }
    add_mask(inspector, mtp_safetensors_find(file, "loss_mask"), tokens);
    if (hidden->rank < 2 || hidden->shape[0] != tokens)
        mtp__problem(inspector, "hidden_states and token_ids have different lengths");
    if (!kv) mtp__problem(inspector, "no K/V: a drafter reads kv_last_local and kv_last_global");
    return check_sample(inspector, file);
}

mtp_status mtp__inspect_samples(mtp__inspector *inspector)
{
    mtp__name_list list = {0};
    mtp__sidecar sidecar = {0};
    int64_t tokens = 0, samples = 0, others = 0, labelled = 0, masked = 0, beside = 0;
    inspector->kind = MTP_INSPECT_SAMPLES;
    MTP_TRY(mtp__dir_list(inspector->path, MTP__LIST_FILES, ".safetensors", &list));
    if (mtp__sidecar_read(&sidecar, inspector->path) != MTP_OK) mtp__problem_last(inspector);
    mtp_status status = MTP_OK;
    for (size_t i = 0; i < list.count && status == MTP_OK; i++) {
        char *path = NULL;
        mtp_safetensors *file = NULL;
        status = mtp__path_join(inspector->path, list.names[i], &path);
        if (status == MTP_OK && mtp_safetensors_open(path, &file) != MTP_OK) {
            mtp__problem_last(inspector);
        } else if (status == MTP_OK && is_sample(file)) {
            samples++;
            tokens += mtp_safetensors_find(file, "token_ids")->count;
            labelled += mtp_safetensors_metadata(file, "hidden_norm") != NULL;
            masked += mtp_safetensors_find(file, "loss_mask") != NULL;
            beside += mtp__sidecar_find(&sidecar, list.names[i]) != NULL;
            status = check_sample(inspector, file);
        } else if (status == MTP_OK) {
            others++;
        }
        mtp_safetensors_close(file);
        free(path);
    }
    mtp__sidecar_free(&sidecar);
    mtp__name_list_free(&list);
    mtp__fact(inspector, "samples", json_integer(samples));
    mtp__fact(inspector, "tokens", json_integer(tokens));
    mtp__fact(inspector, "with_hidden_norm", json_integer(labelled));
    mtp__fact(inspector, "with_loss_mask", json_integer(masked));
    mtp__fact(inspector, "with_sidecar_line", json_integer(beside));
    mtp__fact_text(inspector, "nonfinite", "not looked for: mtp check does");
    if (others)
        mtp__problem(inspector, "%lld files are no samples (no token_ids and hidden_states)", (long long)others);
    return status;
}

/* ---- one file ------------------------------------------------------------------------------------------------- */

static mtp_status explain(mtp__inspector *inspector, const mtp_safetensors *file)
{
    enum { MOST_LISTED = 8 };
    const size_t count = mtp_safetensors_count(file);
    if (is_sample(file)) return inspect_sample(inspector, file);
    const bool drafter = mtp_safetensors_find(file, "pre_projection.weight") != NULL;
    inspector->kind = drafter ? MTP_INSPECT_DRAFTER : MTP_INSPECT_SAFETENSORS;
    mtp__inspect_tensors(inspector, file);
    mtp__inspect_values(inspector, file);
    if (drafter)
        mtp__fact_text(inspector, "note",
                       "weights alone; inspect the directory to have them compared with config.json");
    for (size_t i = 0; i < count && i < MOST_LISTED && !drafter; i++) add_entry(inspector, mtp_safetensors_at(file, i));
    if (count > MOST_LISTED && !drafter) mtp__fact_text(inspector, "...", "%zu more", count - MOST_LISTED);
    return MTP_OK;
}

mtp_status mtp__inspect_file(mtp__inspector *inspector)
{
    mtp_safetensors *file = NULL;
    MTP_TRY(mtp_safetensors_open(inspector->path, &file));
    const mtp_status status = explain(inspector, file);
    mtp_safetensors_close(file);
    return status;
}
