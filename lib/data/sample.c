/* The header of a sample file: which variant it is, and whether it belongs to the verifier. */
#include "data/sample.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/text.h"

static const struct {
    const char *separate[MTP__KV], *stacked;
} kv_keys[MTP_LAYER_TYPES] = {
    {{"kv_last_local_k", "kv_last_local_v"}, "verifier_kv_last_local"},
    {{"kv_last_global_k", "kv_last_global_v"}, "verifier_kv_last_global"},
};

/* ---- shapes --------------------------------------------------------------------------------------------------- */

typedef struct shape_text {
    char text[160];
} shape_text;

/* "BF16 [198, 2, 32]" */
static shape_text describe(const mtp_safetensors_entry *entry)
{
    shape_text out;
    int used = snprintf(out.text, sizeof out.text, "%s [", mtp_dtype_name(entry->dtype));
    for (int32_t i = 0; i < entry->rank && used < 120; i++)
        used += snprintf(out.text + used, sizeof out.text - (size_t)used, "%s%lld", i ? ", " : "",
                         (long long)entry->shape[i]);
    snprintf(out.text + used, sizeof out.text - (size_t)used, "]");
    return out;
}

/* A tensor [S, ...] without its batch axis, of which one place of axis 1 may be selected. */
typedef struct layout {
    const int64_t *shape;
    int32_t rank;
    int64_t select; /* index in axis 1; -1: there is no such axis */
    bool batched;   /* an axis of length 1 stood in front */
} layout;

static int64_t product(const int64_t *shape, int32_t from, int32_t to)
{
    int64_t count = 1;
    for (int32_t i = from; i < to; i++) count *= shape[i];
    return count;
}

/* ---- fp8 scales ----------------------------------------------------------------------------------------------- */

/* Do the scales cover leading axes of the tensor (axes of length 1 at the end do not count)? *axes is how many. */
static bool covers(const layout *tensor, const int64_t *shape, int32_t rank, int32_t *axes)
{
    while (rank > 1 && shape[rank - 1] == 1) rank--;
    if (rank < 1 || rank >= tensor->rank) return false;
    for (int32_t i = 0; i < rank; i++)
        if (shape[i] != tensor->shape[i]) return false;
    *axes = rank;
    return true;
}

static mtp_status find_scales(const mtp_safetensors *file, const layout *tensor, mtp__field *field)
{
    char key[64];
    int32_t axes = 0;
    const char *name = field->entry->name;
    snprintf(key, sizeof key, "%s_scales", name);
    const mtp_safetensors_entry *scales = mtp_safetensors_find(file, key);
    const mtp_dtype dtype = field->entry->dtype;
    if (mtp_dtype_is_compute(dtype)) {
        if (scales)
            return MTP_FAIL(MTP_E_DATA, "%s is %s and has %s; only F8_E4M3 takes scales", name, mtp_dtype_name(dtype),
                            key);
        field->dtype = dtype;
        return MTP_OK;
    }
    if (dtype != MTP_F8_E4M3)
        return MTP_FAIL(MTP_E_DATA, "%s is %s; F32, BF16, F16 and F8_E4M3 with scales can be read", name,
                        mtp_dtype_name(dtype));
    if (!scales)
        return MTP_FAIL(MTP_E_DATA, "%s is F8_E4M3 but there is no %s: without its scales it means nothing", name, key);
    if (!mtp_dtype_is_compute(scales->dtype))
        return MTP_FAIL(MTP_E_DATA, "%s is %s; F32, BF16 and F16 can be read", key, mtp_dtype_name(scales->dtype));
    const int64_t *shape = scales->shape;
    bool found = covers(tensor, shape, scales->rank, &axes);
    if (!found && tensor->batched && scales->rank > 1 && shape[0] == 1)
        found = covers(tensor, shape + 1, scales->rank - 1, &axes);
    if (!found)
        return MTP_FAIL(MTP_E_DATA, "%s is %s, which is neither one scale a token nor one a token and head of %s %s",
                        key, describe(scales).text, name, describe(field->entry).text);
    const int32_t first = tensor->select >= 0 ? 2 : 1; /* first axis of what a row holds */
    field->scales = scales;
    field->scale_stride = product(tensor->shape, 1, axes);
    field->num_scales = axes > first ? product(tensor->shape, first, axes) : 1;
    field->scale_offset = axes > 1 && tensor->select >= 0 ? tensor->select * field->num_scales : 0;
    field->dtype = MTP_F32;
    return MTP_OK;
}

/* ---- fields --------------------------------------------------------------------------------------------------- */

static mtp_status check_length(const mtp_safetensors_entry *entry, const layout *tensor, int64_t num_tokens)
{
    if (tensor->rank >= 1 && tensor->shape[0] == num_tokens) return MTP_OK;
    return MTP_FAIL(MTP_E_DATA, "%s is %s, but token_ids has %lld tokens; every key must have the same length",
                    entry->name, describe(entry).text, (long long)num_tokens);
}

static mtp_status lay_out(const mtp_safetensors *file, const mtp_safetensors_entry *entry, const layout *tensor,
                          int64_t heads, mtp__field *field)
{
    const int32_t first = tensor->select >= 0 ? 2 : 1;
    const int64_t values = product(tensor->shape, first, tensor->rank);
    *field = (mtp__field){.entry = entry, .heads = heads, .width = values / heads};
    field->row_stride = product(tensor->shape, 1, tensor->rank);
    field->row_offset = tensor->select >= 0 ? tensor->select * values : 0;
    return find_scales(file, tensor, field);
}

/* [S, Hb], or [S, L, Hb], of which the last layer counts. */
static mtp_status find_hidden(const mtp_verifier_config *verifier, mtp__sample *sample)
{
    const mtp_safetensors_entry *entry = mtp_safetensors_find(sample->file, "hidden_states");
    layout tensor = {.shape = entry->shape, .rank = entry->rank, .select = -1};
    if ((tensor.rank != 2 && tensor.rank != 3) || tensor.shape[tensor.rank - 1] != verifier->hidden_size ||
        (tensor.rank == 3 && tensor.shape[1] < 1))
        return MTP_FAIL(MTP_E_DATA,
                        "hidden_states is %s; expected [S, %lld] or [S, layers, %lld], the verifier's hidden_size",
                        describe(entry).text, (long long)verifier->hidden_size, (long long)verifier->hidden_size);
    MTP_TRY(check_length(entry, &tensor, sample->num_tokens));
    if (tensor.rank == 3) tensor.select = tensor.shape[1] - 1;
    return lay_out(sample->file, entry, &tensor, 1, &sample->hidden);
}

/* K or V of one type: [S, NKV, D] of its own, or place `part` of [S, 2, NKV, D]; a batch axis of 1 may stand in
 * front. */
static mtp_status find_kv(const mtp_verifier_config *verifier, mtp_layer_type type, int part, mtp__sample *sample)
{
    const int64_t heads = verifier->num_kv_heads[type], head_dim = verifier->head_dim[type];
    const mtp_safetensors_entry *entry = mtp_safetensors_find(sample->file, kv_keys[type].stacked);
    const bool stacked = entry != NULL;
    if (!stacked) entry = mtp_safetensors_find(sample->file, kv_keys[type].separate[part]);
    const int32_t rank = stacked ? 4 : 3;
    layout tensor = {.shape = entry->shape, .rank = entry->rank, .select = stacked ? part : -1};
    if (tensor.rank == rank + 1 && tensor.shape[0] == 1) {
        tensor.batched = true;
        tensor.shape++;
        tensor.rank--;
    }
    if (tensor.rank != rank || (stacked && tensor.shape[1] != MTP__KV) || tensor.shape[rank - 2] != heads ||
        tensor.shape[rank - 1] != head_dim)
        return MTP_FAIL(MTP_E_DATA,
                        "%s is %s; expected [S, %s%lld, %lld], the K/V geometry of the verifier's layer %lld",
                        entry->name, describe(entry).text, stacked ? "2, " : "", (long long)heads, (long long)head_dim,
                        (long long)verifier->kv_layer[type]);
    MTP_TRY(check_length(entry, &tensor, sample->num_tokens));
    return lay_out(sample->file, entry, &tensor, heads, &sample->kv[type][part]);
}

static mtp_status find_ids(mtp__sample *sample)
{
    const mtp_safetensors_entry *entry = mtp_safetensors_find(sample->file, "token_ids");
    if ((entry->dtype != MTP_I64 && entry->dtype != MTP_I32) || entry->rank != 1)
        return MTP_FAIL(MTP_E_DATA, "token_ids is %s; expected I64 or I32 [S]", describe(entry).text);
    if (entry->shape[0] == 0) return MTP_FAIL(MTP_E_DATA, "the sample is empty: token_ids has no tokens");
    if (entry->shape[0] > INT32_MAX)
        return MTP_FAIL(MTP_E_DATA, "token_ids has %lld tokens; at most %d are read", (long long)entry->shape[0],
                        INT32_MAX);
    sample->token_ids = entry;
    sample->num_tokens = entry->shape[0];
    return MTP_OK;
}

static mtp_status find_mask(mtp__sample *sample)
{
    const mtp_safetensors_entry *entry = mtp_safetensors_find(sample->file, "loss_mask");
    sample->loss_mask = entry;
    if (!entry) return MTP_OK;
    if ((entry->dtype != MTP_U8 && entry->dtype != MTP_BOOL && entry->dtype != MTP_I64) || entry->rank != 1)
        return MTP_FAIL(MTP_E_DATA, "loss_mask is %s; expected U8, BOOL or I64 [S]", describe(entry).text);
    const layout tensor = {.shape = entry->shape, .rank = 1, .select = -1};
    return check_length(entry, &tensor, sample->num_tokens);
}

/* ---- keys ----------------------------------------------------------------------------------------------------- */

static void problem(mtp__text *list, const char *what, const char *key)
{
    mtp__text_add(list, "%s%s %s", list->length ? "; " : "", what, key);
}

static void check_kv_keys(const mtp_safetensors *file, mtp_layer_type type, mtp__text *list)
{
    const bool stacked = mtp_safetensors_find(file, kv_keys[type].stacked) != NULL;
    for (int part = 0; part < MTP__KV; part++) {
        const char *key = kv_keys[type].separate[part];
        const bool found = mtp_safetensors_find(file, key) != NULL;
        if (!found && !stacked) problem(list, "missing", key);
        if (found && stacked)
            mtp__text_add(list, "%sboth %s and %s", list->length ? "; " : "", key, kv_keys[type].stacked);
    }
}

static bool is_used(const mtp__sample *sample, const mtp_safetensors_entry *entry)
{
    if (entry == sample->token_ids || entry == sample->loss_mask) return true;
    if (entry == sample->hidden.entry || entry == sample->hidden.scales) return true;
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        for (int part = 0; part < MTP__KV; part++)
            if (entry == sample->kv[type][part].entry || entry == sample->kv[type][part].scales) return true;
    return false;
}

static mtp_status finish_list(mtp__text *list, const char *advice)
{
    mtp_status status = mtp__text_check(list);
    if (status == MTP_OK && list->length) status = MTP_FAIL(MTP_E_DATA, "%s%s", mtp__text_get(list), advice);
    mtp__text_free(list);
    return status;
}

static mtp_status check_required(const mtp_safetensors *file, const mtp_verifier_config *verifier)
{
    mtp__text list = {0};
    if (!mtp_safetensors_find(file, "token_ids")) problem(&list, "missing", "token_ids");
    if (!mtp_safetensors_find(file, "hidden_states")) problem(&list, "missing", "hidden_states");
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        if (verifier->kv_layer[type] >= 0) check_kv_keys(file, (mtp_layer_type)type, &list);
    return finish_list(&list, ": not a complete sample");
}

/* A misspelt loss_mask or scale must not go unnoticed. */
static mtp_status refuse_unknown(const mtp__sample *sample)
{
    mtp__text list = {0};
    for (size_t i = 0; i < mtp_safetensors_count(sample->file); i++) {
        const mtp_safetensors_entry *entry = mtp_safetensors_at(sample->file, i);
        if (!is_used(sample, entry)) problem(&list, "unknown tensor", entry->name);
    }
    return finish_list(&list, ": a sample of this verifier has no such keys; rename or remove them");
}

/* ---- metadata ------------------------------------------------------------------------------------------------- */

static mtp_status read_metadata(const mtp_verifier_config *verifier, mtp__sample *sample)
{
    static const char family[] = "mtp-sample-";
    const char *format = mtp_safetensors_metadata(sample->file, "format");
    if (format && strncmp(format, family, sizeof family - 1) == 0 && strcmp(format + sizeof family - 1, "1") != 0)
        return MTP_FAIL(MTP_E_VERSION, "the metadata says format %s; this program reads mtp-sample-1", format);
    const char *window = mtp_safetensors_metadata(sample->file, "window");
    if (window && verifier->kv_layer[MTP_LAYER_SLIDING] >= 0) {
        char expected[24];
        snprintf(expected, sizeof expected, "%lld", (long long)verifier->sliding_window);
        if (strcmp(window, expected) != 0)
            return MTP_FAIL(MTP_E_DATA, "the metadata says window %s, the verifier's sliding_window is %s", window,
                            expected);
    }
    const char *norm = mtp_safetensors_metadata(sample->file, "hidden_norm");
    if (!norm) return MTP_OK;
    if (strcmp(norm, "pre") != 0 && strcmp(norm, "post") != 0)
        return MTP_FAIL(MTP_E_DATA, "the metadata says hidden_norm \"%s\"; \"pre\" or \"post\" is expected", norm);
    sample->label = strcmp(norm, "pre") == 0 ? MTP_HIDDEN_PRE : MTP_HIDDEN_POST;
    return MTP_OK;
}

mtp_status mtp__sample_describe(const mtp_safetensors *file, const mtp_verifier_config *verifier, mtp__sample *sample)
{
    *sample = (mtp__sample){.file = file, .label = MTP_HIDDEN_UNSET};
    MTP_TRY(check_required(file, verifier));
    MTP_TRY(find_ids(sample));
    MTP_TRY(find_hidden(verifier, sample));
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        if (verifier->kv_layer[type] < 0) continue;
        for (int part = 0; part < MTP__KV; part++) MTP_TRY(find_kv(verifier, (mtp_layer_type)type, part, sample));
    }
    MTP_TRY(find_mask(sample));
    MTP_TRY(refuse_unknown(sample));
    return read_metadata(verifier, sample);
}
