/* The parts of the verifier's directory that say how K is made: k_norm's weight, rotary frequencies, attention_k_eq_v.
 */
#include "data/verifier_key.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/real.h"
#include "data/verifier_config.h"
#include "formats/json.h"
#include "mtp/safetensors.h"

/* ---- rotary frequencies --------------------------------------------------------------------------------------- */

/* theta^(-2 i / D); "proportional" turns only the first partial_rotary_factor of the pairs. *known is false for a
 * scheme that is neither that nor "default". */
static mtp_status read_rope(const mtp__json_node *rope, mtp__verifier_key *key, bool *known)
{
    const char *kind = NULL;
    double theta = 0, partial = 1;
    MTP_TRY(mtp__json_get_string(rope, "rope_type", &kind));
    MTP_TRY(mtp__json_get_double(rope, "rope_theta", &theta));
    const bool proportional = strcmp(kind, "proportional") == 0;
    *known = (proportional || strcmp(kind, "default") == 0) && !mtp__json_has(rope, "factor") && key->width % 2 == 0;
    if (!*known) return MTP_OK;
    if (mtp__json_has(rope, "partial_rotary_factor"))
        MTP_TRY(mtp__json_get_double(rope, "partial_rotary_factor", &partial));
    if (!(theta > 1) || !isfinite(theta) || !(partial > 0 && partial <= 1))
        return mtp__json_fail(rope, MTP_E_DATA, "rope_theta %g or partial_rotary_factor %g is out of range", theta,
                              partial);
    const int64_t pairs = key->width / 2;
    const int64_t turning = proportional ? (int64_t)(partial * (double)pairs) : pairs;
    key->frequency = malloc((size_t)pairs * sizeof *key->frequency);
    if (!key->frequency) return MTP_FAIL(MTP_E_MEMORY, "no memory for rotary frequencies");
    for (int64_t i = 0; i < pairs; i++)
        key->frequency[i] = i < turning ? pow(theta, -2 * (double)i / (double)key->width) : 0;
    return MTP_OK;
}

static mtp_status read_config(const mtp__json_node *root, mtp_layer_type type, mtp__verifier_key *key)
{
    mtp__json_node text = *root, all, own;
    bool known = false;
    if (mtp__json_has(root, "text_config")) MTP_TRY(mtp__json_get_object(root, "text_config", &text));
    if (type == MTP_LAYER_FULL && mtp__json_has(&text, "attention_k_eq_v"))
        MTP_TRY(mtp__json_get_bool(&text, "attention_k_eq_v", &key->is_value));
    if (!mtp__json_has(&text, "rope_parameters")) return MTP_OK;
    MTP_TRY(mtp__json_get_object(&text, "rope_parameters", &all));
    if (!mtp__json_has(&all, mtp__layer_type_name(type))) return MTP_OK;
    MTP_TRY(mtp__json_get_object(&all, mtp__layer_type_name(type), &own));
    return read_rope(&own, key, &known);
}

/* ---- k_norm --------------------------------------------------------------------------------------------------- */

static mtp_status read_norm(mtp_safetensors_index *index, int64_t layer, mtp__verifier_key *key)
{
    static const char *const prefixes[] = {"model.", "model.language_model.", "language_model.model."};
    const mtp_safetensors_entry *entry = NULL;
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes && !entry; i++) {
        char name[128];
        snprintf(name, sizeof name, "%slayers.%lld.self_attn.k_norm.weight", prefixes[i], (long long)layer);
        if (mtp_safetensors_index_has(index, name)) MTP_TRY(mtp_safetensors_index_get(index, name, &entry));
    }
    if (!entry) return MTP_OK;
    if (!mtp_dtype_is_compute(entry->dtype) || entry->rank != 1 || entry->shape[0] != key->width)
        return MTP_FAIL(MTP_E_DATA, "%s must be F32, BF16 or F16 [%lld]", entry->name, (long long)key->width);
    key->norm = malloc((size_t)key->width * sizeof *key->norm);
    if (!key->norm) return MTP_FAIL(MTP_E_MEMORY, "no memory for %s", entry->name);
    mtp__real_to_f32(key->norm, entry->data, entry->dtype, key->width);
    for (int64_t i = 0; i < key->width; i++)
        if (!isfinite(key->norm[i])) return MTP_FAIL(MTP_E_DATA, "%s[%lld] is not finite", entry->name, (long long)i);
    return MTP_OK;
}

/* ---- the whole ------------------------------------------------------------------------------------------------ */

static mtp_status read_key(const mtp_verifier *verifier, mtp_layer_type type, mtp__verifier_key *key)
{
    const char *directory = mtp_verifier_directory(verifier);
    mtp_safetensors_index *index = NULL;
    json_t *tree = NULL;
    char *path = NULL;
    MTP_TRY(mtp__path_join(directory, "config.json", &path));
    mtp_status status = mtp__json_read(path, &tree);
    if (status == MTP_OK) {
        const mtp__json_node root = mtp__json_root(tree, path);
        status = read_config(&root, type, key);
        json_decref(tree);
    }
    free(path);
    if (status != MTP_OK) return status;
    status = mtp_safetensors_index_open(directory, &index);
    if (status == MTP_OK) status = read_norm(index, mtp_verifier_get_config(verifier)->kv_layer[type], key);
    mtp_safetensors_index_close(index);
    /* weights that are not here, with the embedding from elsewhere or only its shard: what is not known is not tested
     */
    return status == MTP_E_NOT_FOUND ? MTP_OK : status;
}

mtp_status mtp__verifier_key_read(const mtp_verifier *verifier, mtp_layer_type type, mtp__verifier_key *key)
{
    const mtp_verifier_config *config = mtp_verifier_get_config(verifier);
    *key = (mtp__verifier_key){0};
    if (config->kv_layer[type] < 0) return MTP_OK;
    key->heads = config->num_kv_heads[type];
    key->width = config->head_dim[type];
    const mtp_status status = read_key(verifier, type, key);
    return status == MTP_OK ? MTP_OK : mtp__fail_prefix(status, "verifier %s", mtp_verifier_directory(verifier));
}

void mtp__verifier_key_free(mtp__verifier_key *key)
{
    free(key->norm);
    free(key->frequency);
    *key = (mtp__verifier_key){0};
}

mtp_status mtp__verifier_key_check(const mtp__verifier_key *key, const char *directory)
{
    const char *missing = key->heads == 0   ? "it has no full layer that owns K/V"
                          : !key->is_value  ? "config.json does not say attention_k_eq_v"
                          : !key->norm      ? "there is no k_norm weight of its last full layer"
                          : !key->frequency ? "the rotary scheme of its full layers is not known"
                                            : NULL;
    if (!missing) return MTP_OK;
    return MTP_FAIL(MTP_E_CONFIG, "%s: global K cannot be made of V: %s; store both", directory, missing);
}

void mtp__verifier_key_of_value(const mtp__verifier_key *key, int64_t position, const float *v, float *k)
{
    const int64_t pairs = key->width / 2;
    for (int64_t i = 0; i < pairs; i++) {
        const double angle = (double)position * key->frequency[i];
        const double c = angle == 0 ? 1 : cos(angle), s = angle == 0 ? 0 : sin(angle);
        for (int64_t head = 0; head < key->heads; head++) {
            const float *from = v + head * key->width;
            float *to = k + head * key->width;
            const double x = (double)key->norm[i] * (double)from[i];
            const double y = (double)key->norm[i + pairs] * (double)from[i + pairs];
            to[i] = (float)(x * c - y * s);
            to[i + pairs] = (float)(y * c + x * s);
        }
    }
}
