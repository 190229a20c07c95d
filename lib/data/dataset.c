/* A data set: what is asked of it. Its samples are not held open; entries of packed ones are made when asked for. */
#include "data/dataset.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/hash.h"
#include "data/dataset_open.h"

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

mtp_dtype mtp__dataset_kv_dtype(const mtp__field kv[MTP__KV])
{
    if (!kv[MTP__K].entry) return MTP_F32;
    return kv[MTP__K].dtype == kv[MTP__V].dtype ? kv[MTP__K].dtype : MTP_F32;
}

void mtp_dataset_close(mtp_dataset *dataset)
{
    if (!dataset) return;
    for (int64_t i = 0; i < dataset->num_entries; i++) {
        free(dataset->entries[i].path);
        free(dataset->entries[i].sidecar_mask);
    }
    for (int64_t i = 0; i < dataset->num_parts; i++) mtp__shard_close(dataset->parts[i].shard);
    for (int64_t i = 0; i < dataset->num_sources; i++) free(dataset->sources[i].path);
    free(dataset->sources);
    if (dataset->key) mtp__verifier_key_free(dataset->key);
    free(dataset->key);
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
    for (int64_t i = 0; i < dataset->num_sources && dataset->mixed && dataset->num_sources > 1; i++) {
        hash = mtp__fnv1a(hash, &dataset->sources[i].count, sizeof dataset->sources[i].count);
        hash = mtp__fnv1a(hash, &dataset->sources[i].share, sizeof dataset->sources[i].share);
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
        same = same && mtp__dataset_kv_dtype(sample->kv[type]) == entry->kv_dtype[type];
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
