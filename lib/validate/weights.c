/* What the verifier's directory says about how K is made: k_norm's weight, rotary frequencies, attention_k_eq_v. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/real.h"
#include "formats/json.h"
#include "mtp/safetensors.h"
#include "validate/check.h"

static const char *const layer_keys[MTP_LAYER_TYPES] = {"sliding_attention", "full_attention"};

/* ---- rotary frequencies --------------------------------------------------------------------------------------- */

/* theta^(-2 i / D); "proportional" turns only the first partial_rotary_factor of the pairs. *known is false for a
 * scheme that is neither that nor "default". */
static mtp_status read_rope(const mtp__json_node *rope, mtp__check_key *key, bool *known)
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

static mtp_status read_config(const mtp__json_node *root, mtp_check *check)
{
    mtp__json_node text = *root, all, own;
    if (mtp__json_has(root, "text_config")) MTP_TRY(mtp__json_get_object(root, "text_config", &text));
    if (mtp__json_has(&text, "attention_k_eq_v"))
        MTP_TRY(mtp__json_get_bool(&text, "attention_k_eq_v", &check->k_is_v));
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        mtp__check_key *key = &check->keys[type];
        bool known = false;
        if (key->heads == 0) continue;
        if (mtp__json_has(&text, "rope_parameters")) {
            MTP_TRY(mtp__json_get_object(&text, "rope_parameters", &all));
            if (mtp__json_has(&all, layer_keys[type])) {
                MTP_TRY(mtp__json_get_object(&all, layer_keys[type], &own));
                MTP_TRY(read_rope(&own, key, &known));
            }
        }
    }
    return MTP_OK;
}

/* ---- k_norm --------------------------------------------------------------------------------------------------- */

static mtp_status read_norm(mtp_safetensors_index *index, int64_t layer, mtp__check_key *key)
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

/* ---- what can be tested with them ----------------------------------------------------------------------------- */

/* Do K of position and of position + 1 look different? Turning a pair changes the RMS over the weights only where the
 * two weights of the pair differ: mean over pairs of sin(f)^2 times the relative difference of squared weights. */
static double power_of(const mtp__check_key *key)
{
    const int64_t pairs = key->width / 2;
    double sum = 0;
    for (int64_t i = 0; i < pairs; i++) {
        const double a = (double)key->norm[i] * (double)key->norm[i];
        const double b = (double)key->norm[i + pairs] * (double)key->norm[i + pairs];
        const double turned = sin(key->frequency[i]) * (a / b - b / a) / 2;
        sum += turned * turned;
    }
    return sqrt(sum) / (double)key->width;
}

static void note_key(mtp_check *check, int type)
{
    static const char *const tests[MTP_LAYER_TYPES] = {"positions of local K", "positions of global K"};
    mtp__check_key *key = &check->keys[type];
    if (!key->norm || !key->frequency) {
        mtp__check_note(check, tests[type], false, "the verifier's directory has no %s for this layer",
                        key->norm ? "rope_parameters that are known" : "k_norm weight");
        return;
    }
    for (int64_t i = 0; i < key->width; i++)
        if (fabsf(key->norm[i]) < 1e-6f) {
            free(key->norm);
            key->norm = NULL;
            mtp__check_note(check, tests[type], false, "a weight of k_norm is zero");
            return;
        }
    const double power = power_of(key);
    /* the noise of bf16 is 0.0006, see README */
    mtp__check_note(check, tests[type], power > 0.003,
                    power > 0.003 ? "k_norm's weights tell a turn by one position (%.2g)"
                                  : "k_norm's weights are too equal to tell a turn by one position (%.2g)",
                    power);
}

mtp_status mtp__check_read_weights(mtp_check *check)
{
    const mtp_verifier_config *config = mtp_verifier_get_config(check->verifier);
    const char *directory = mtp_verifier_directory(check->verifier);
    mtp_safetensors_index *index = NULL;
    json_t *tree = NULL;
    char *path = NULL;
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        if (config->kv_layer[type] < 0) continue;
        check->keys[type].heads = config->num_kv_heads[type];
        check->keys[type].width = config->head_dim[type];
    }
    if (check->options.structure_only) return MTP_OK;
    MTP_TRY(mtp__path_join(directory, "config.json", &path));
    mtp_status status = mtp__json_read(path, &tree);
    if (status == MTP_OK) {
        const mtp__json_node root = mtp__json_root(tree, path);
        status = read_config(&root, check);
        json_decref(tree);
    }
    free(path);
    if (status == MTP_OK) status = mtp_safetensors_index_open(directory, &index);
    for (int type = 0; type < MTP_LAYER_TYPES && status == MTP_OK; type++)
        if (check->keys[type].heads) status = read_norm(index, config->kv_layer[type], &check->keys[type]);
    mtp_safetensors_index_close(index);
    if (status != MTP_OK) return mtp__fail_prefix(status, "verifier %s", directory);
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        if (check->keys[type].heads) note_key(check, type);
    return MTP_OK;
}
