/* Where the rows of a sample come from: a file of its own, or a shard of the packed store. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/real.h"
#include "validate/check.h"

const char *mtp__check_field_name(int field)
{
    static const char *const names[MTP__CHECK_FIELDS + 1] = {"kv_last_local_k", "kv_last_local_v", "kv_last_global_k",
                                                             "kv_last_global_v", "hidden_states"};
    return names[field];
}

static const mtp__field *field_of(const mtp__check_data *data, int field)
{
    return field == MTP__CHECK_HIDDEN ? &data->sample.hidden : &data->sample.kv[field / MTP__KV][field % MTP__KV];
}

double mtp__check_tolerance(const mtp__check_data *data, int field)
{
    const mtp__shard *shard = data->entry.shard;
    const bool coarse = shard ? shard->layout.fp8 && field != MTP__CHECK_HIDDEN : field_of(data, field)->scales != NULL;
    return coarse ? 0.1 : 0.02;
}

/* ---- opening -------------------------------------------------------------------------------------------------- */

/* A failure that is the sample's own becomes a finding. */
static mtp_status find_fault(const mtp__check_data *data, mtp_status status, mtp_check_finding *finding)
{
    if (status == MTP_OK || mtp_status_exit_code(status) != 3) return status;
    mtp__check_report_error(finding, data->entry.path, mtp_last_error());
    return MTP_OK;
}

mtp_status mtp__check_open(const mtp_check *check, int64_t index, const mtp_safetensors *file, mtp__check_data *data,
                           mtp_check_finding *finding)
{
    *data = (mtp__check_data){
        .index = index, .entry = mtp__dataset_at(check->dataset, index), .fd = -1, .key = check->dataset->key};
    data->num_tokens = data->entry.num_tokens;
    if (data->entry.shard) return find_fault(data, mtp__shard_file(data->entry.shard, &data->fd), finding);
    return find_fault(data,
                      file ? mtp__dataset_describe_sample(check->dataset, index, file, &data->sample)
                           : mtp__dataset_open_sample(check->dataset, index, &data->file, &data->sample),
                      finding);
}

void mtp__check_close(mtp__check_data *data)
{
    if (data->fd >= 0) close(data->fd);
    mtp_safetensors_close(data->file);
    free(data->ids);
    free(data->mask);
    free(data->hidden);
    for (int field = 0; field < MTP__CHECK_FIELDS; field++) free(data->kv[field]);
}

/* ---- integers ------------------------------------------------------------------------------------------------- */

static mtp_status read_mask(const mtp__check_data *data)
{
    const mtp__dataset_entry *entry = &data->entry;
    if (entry->shard)
        return mtp__shard_read(entry->shard, data->fd, entry->row, MTP__STORE_MASK, 0, data->num_tokens, data->mask);
    if (data->sample.loss_mask) return mtp__sample_read_mask(&data->sample, data->num_tokens, data->mask);
    for (int64_t i = 0; i < data->num_tokens; i++)
        data->mask[i] = entry->sidecar_mask ? entry->sidecar_mask[i] : i >= entry->sidecar_prompt_len;
    return MTP_OK;
}

static mtp_status read_ids(const mtp_check *check, const mtp__check_data *data, mtp_check_finding *finding)
{
    const int64_t vocab_size = mtp_verifier_get_config(check->verifier)->vocab_size, S = data->num_tokens;
    const mtp__dataset_entry *entry = &data->entry;
    if (entry->shard) {
        MTP_TRY(mtp__shard_read(entry->shard, data->fd, entry->row, MTP__STORE_IDS, 0, S, data->ids));
        for (int64_t i = 0; i < S && !finding->reason; i++)
            if (data->ids[i] < 0 || data->ids[i] >= vocab_size)
                mtp__check_report(finding, MTP_CHECK_IDS, i, "token_ids[%lld] is %d, outside the vocabulary of %lld",
                                  (long long)i, data->ids[i], (long long)vocab_size);
        return MTP_OK;
    }
    for (int64_t i = 0; i < S; i++) data->ids[i] = -1;
    if (mtp__sample_read_ids(&data->sample, vocab_size, S, data->ids) == MTP_OK) return MTP_OK;
    int64_t first = 0; /* the reading stopped there */
    while (first < S - 1 && data->ids[first] >= 0) first++;
    mtp__check_report(finding, MTP_CHECK_IDS, first, "%s", mtp_last_error()->message);
    return MTP_OK;
}

mtp_status mtp__check_read_integers(const mtp_check *check, const mtp__check_data *data, mtp_check_finding *finding)
{
    mtp_status status = read_ids(check, data, finding);
    if (status == MTP_OK && !finding->reason) status = read_mask(data);
    return find_fault(data, status, finding);
}

/* ---- rows ----------------------------------------------------------------------------------------------------- */

static void report_nonfinite(int field, int64_t first, int64_t count, int64_t n, const float *rows,
                             mtp_check_finding *finding)
{
    const char *name = mtp__check_field_name(field);
    const int64_t bad = mtp__real_find_nonfinite(rows, count * n);
    if (bad >= 0)
        mtp__check_report(finding, MTP_CHECK_NONFINITE, first + bad / n,
                          "%s: NaN or infinity at token %lld, value %lld", name, (long long)(first + bad / n),
                          (long long)(bad % n));
}

/* Values of one packed row, with fp8 the scales of its heads, as fp32. */
static void unpack(const char *from, const float *scales, int64_t heads, int64_t n, float *row)
{
    if (!scales) {
        mtp__real_to_f32(row, from, MTP_BF16, n);
        return;
    }
    mtp__real_from_f8_e4m3(row, from, n);
    for (int64_t i = 0; i < n; i++) row[i] *= scales[i / (n / heads)];
}

/* Packed: bf16, or for K/V fp8 with a scale for each head. A row of K/V is K and then V, or V alone, of which K is
 * made.
 */
static mtp_status read_packed(const mtp__check_data *data, int field, int64_t first, int64_t count, int64_t n,
                              float *rows, float *scratch)
{
    const mtp__dataset_entry *entry = &data->entry;
    const mtp__store_layout *layout = &entry->shard->layout;
    const bool hidden = field == MTP__CHECK_HIDDEN, fp8 = layout->fp8 && !hidden;
    const int type = hidden ? 0 : field / MTP__KV;
    const int64_t parts = hidden ? 1 : mtp__store_parts(layout, type);
    const bool alone = !hidden && parts == 1;
    const int64_t part = hidden || alone ? 0 : field % MTP__KV, heads = layout->num_kv_heads[type], size = fp8 ? 1 : 2;
    const mtp__store_field stored = hidden ? MTP__STORE_HIDDEN : (mtp__store_field)(MTP__STORE_KV + type);
    char *raw = malloc((size_t)(count * parts * n * size));
    float *scales = malloc((size_t)(count * parts * heads + 1) * sizeof *scales);
    mtp_status status = raw && scales ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "no memory for rows of a shard");
    if (status == MTP_OK)
        status = mtp__shard_read(entry->shard, data->fd, entry->row, stored, first, first + count, raw);
    if (status == MTP_OK && fp8)
        status = mtp__shard_read(entry->shard, data->fd, entry->row, (mtp__store_field)(MTP__STORE_SCALES + type),
                                 first, first + count, scales);
    for (int64_t t = 0; t < count && status == MTP_OK; t++) {
        float *row = rows + t * n;
        unpack(raw + (t * parts + part) * n * size, fp8 ? scales + (t * parts + part) * heads : NULL, heads, n, row);
        if (!alone || field % MTP__KV != MTP__K) continue;
        memcpy(scratch, row, (size_t)n * sizeof *row);
        mtp__verifier_key_of_value(data->key, first + t, scratch, row);
    }
    free(raw);
    free(scales);
    return status;
}

mtp_status mtp__check_read_rows(const mtp__check_data *data, int field, int64_t first, int64_t count, int64_t n,
                                float *rows, float *scratch, mtp_check_finding *finding)
{
    if (data->entry.shard) {
        const mtp_status status = read_packed(data, field, first, count, n, rows, scratch);
        if (status == MTP_OK) report_nonfinite(field, first, count, n, rows, finding);
        return find_fault(data, status, finding);
    }
    mtp__field part = *field_of(data, field);
    const mtp__final_norm none = {.weight = NULL};
    part.row_offset += first * part.row_stride;
    part.scale_offset += first * part.scale_stride;
    memset(rows, 0, (size_t)(count * n) * sizeof *rows);
    if (mtp__field_read(&part, count, none, false, MTP_F32, rows, n, scratch) == MTP_OK) return MTP_OK;
    report_nonfinite(field, first, count, n, rows, finding);
    if (!finding->reason)
        mtp__check_report(finding, MTP_CHECK_NONFINITE, first, "%s: a bad fp8 scale at or behind token %lld",
                          mtp__check_field_name(field), (long long)first);
    return MTP_OK;
}
