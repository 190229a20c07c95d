/* The verifier's config.json: widths, and which layers give the K/V that a drafter reads.
 *
 * Source of the rules: transformers, configuration_gemma4.py and modeling_gemma4.py. K/V of a type come from the last
 * layer of that type among the first num_hidden_layers - num_kv_shared_layers. Its geometry is written in one of two
 * ways: older files have head_dim and num_key_value_heads for sliding layers, global_head_dim for full ones and
 * num_global_key_value_heads for full ones with attention_k_eq_v; newer ones have per_layer_config, which overrides
 * head_dim and num_key_value_heads by layer index. */
#include "data/verifier_config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "formats/json.h"

enum { MAX_LAYERS = 4096, MAX_WIDTH = 1 << 20, MAX_HEADS = 1 << 12, MAX_HEAD_DIM = 1 << 13, MAX_VOCAB = 1 << 28 };

const char *mtp__layer_type_name(mtp_layer_type type)
{
    return type == MTP_LAYER_SLIDING ? "sliding_attention" : "full_attention";
}

/* A number that may be null or absent. */
static mtp_status optional_int(const mtp__json_node *object, const char *key, int64_t min, int64_t max, int64_t *value,
                               bool *present)
{
    *present = mtp__json_has(object, key);
    return *present ? mtp__json_get_int64(object, key, min, max, value) : MTP_OK;
}

/* The object that describes the text model, or an error for a directory that is no verifier. */
static mtp_status find_text_config(const mtp__json_node *root, mtp__json_node *text)
{
    MTP_TRY(mtp__json_as_object(root));
    if (mtp__json_has(root, "model_type")) {
        const char *type = NULL;
        MTP_TRY(mtp__json_get_string(root, "model_type", &type));
        if (strstr(type, "assistant"))
            return mtp__json_fail(root, MTP_E_DATA,
                                  "model_type is \"%s\": this is a drafter; give the directory of its verifier", type);
        if (strncmp(type, "gemma4", 6) != 0)
            return mtp__json_fail(root, MTP_E_DATA,
                                  "model_type is \"%s\", which is no Gemma 4 model (gemma4, gemma4_text, "
                                  "gemma4_unified, gemma4_unified_text)",
                                  type);
    }
    if (mtp__json_has(root, "text_config")) return mtp__json_get_object(root, "text_config", text);
    *text = *root;
    return MTP_OK;
}

/* kv_layer of each type from layer_types. */
static mtp_status find_kv_layers(const mtp__json_node *text, mtp_verifier_config *config)
{
    mtp__json_node types;
    size_t count = 0;
    MTP_TRY(mtp__json_get_int64(text, "num_hidden_layers", 1, MAX_LAYERS, &config->num_layers));
    MTP_TRY(mtp__json_get_array(text, "layer_types", &types, &count));
    if ((int64_t)count != config->num_layers)
        return mtp__json_fail(&types, MTP_E_DATA, "has %zu entries, but num_hidden_layers is %lld", count,
                              (long long)config->num_layers);
    int64_t shared = 0;
    bool present;
    MTP_TRY(optional_int(text, "num_kv_shared_layers", 0, config->num_layers - 1, &shared, &present));
    for (int type = 0; type < MTP_LAYER_TYPES; type++) config->kv_layer[type] = -1;
    for (size_t i = 0; i < count; i++) {
        const mtp__json_node item = mtp__json_item(&types, i);
        const char *name = NULL;
        MTP_TRY(mtp__json_as_string(&item, &name));
        mtp_layer_type type = MTP_LAYER_SLIDING;
        while (type < MTP_LAYER_TYPES && strcmp(name, mtp__layer_type_name(type)) != 0) type++;
        if (type == MTP_LAYER_TYPES)
            return mtp__json_fail(&item, MTP_E_DATA, "\"%s\" is neither \"%s\" nor \"%s\"", name,
                                  mtp__layer_type_name(MTP_LAYER_SLIDING), mtp__layer_type_name(MTP_LAYER_FULL));
        if ((int64_t)i < config->num_layers - shared) config->kv_layer[type] = (int64_t)i;
    }
    return MTP_OK;
}

/* One width of K/V layer `layer`: `key`; for full layers `global_key` where there is one (NULL: there is none);
 * overridden by per_layer_config. The two overrides may not contradict each other. */
static mtp_status read_width(const mtp__json_node *text, int64_t layer, const char *key, const char *global_key,
                             int64_t max, int64_t *value)
{
    mtp__json_node all, own;
    char index[24];
    int64_t global = 0, local = 0;
    bool has_global = false, has_own = false;
    MTP_TRY(mtp__json_get_int64(text, key, 1, max, value));
    if (global_key) MTP_TRY(optional_int(text, global_key, 1, max, &global, &has_global));
    if (mtp__json_has(text, "per_layer_config")) {
        MTP_TRY(mtp__json_get_object(text, "per_layer_config", &all));
        snprintf(index, sizeof index, "%lld", (long long)layer);
        if (mtp__json_has(&all, index)) {
            MTP_TRY(mtp__json_get_object(&all, index, &own));
            MTP_TRY(optional_int(&own, key, 1, max, &local, &has_own));
        }
    }
    if (has_global && has_own && global != local)
        return mtp__json_fail(&own, MTP_E_DATA, "%s %lld contradicts %s %lld; remove one of them", key,
                              (long long)local, global_key, (long long)global);
    if (has_global) *value = global;
    if (has_own) *value = local;
    return MTP_OK;
}

static mtp_status read_geometry(const mtp__json_node *text, mtp_verifier_config *config)
{
    bool k_eq_v = false;
    if (mtp__json_has(text, "attention_k_eq_v")) MTP_TRY(mtp__json_get_bool(text, "attention_k_eq_v", &k_eq_v));
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        const int64_t layer = config->kv_layer[type];
        if (layer < 0) continue;
        const bool full = type == MTP_LAYER_FULL;
        MTP_TRY(read_width(text, layer, "head_dim", full ? "global_head_dim" : NULL, MAX_HEAD_DIM,
                           &config->head_dim[type]));
        MTP_TRY(read_width(text, layer, "num_key_value_heads", full && k_eq_v ? "num_global_key_value_heads" : NULL,
                           MAX_HEADS, &config->num_kv_heads[type]));
    }
    if (config->kv_layer[MTP_LAYER_SLIDING] < 0) return MTP_OK;
    return mtp__json_get_int64(text, "sliding_window", 1, INT32_MAX, &config->sliding_window);
}

static mtp_status parse(const mtp__json_node *root, mtp_verifier_config *config)
{
    mtp__json_node text;
    MTP_TRY(find_text_config(root, &text));
    MTP_TRY(mtp__json_get_int64(&text, "vocab_size", 1, MAX_VOCAB, &config->vocab_size));
    MTP_TRY(mtp__json_get_int64(&text, "hidden_size", 1, MAX_WIDTH, &config->hidden_size));
    MTP_TRY(find_kv_layers(&text, config));
    MTP_TRY(read_geometry(&text, config));
    MTP_TRY(mtp__json_get_double(&text, "rms_norm_eps", &config->rms_norm_eps));
    if (!(config->rms_norm_eps > 0 && config->rms_norm_eps < 1))
        return mtp__json_fail(&text, MTP_E_DATA, "rms_norm_eps %g is not between 0 and 1", config->rms_norm_eps);
    if (!mtp__json_has(&text, "final_logit_softcapping")) return MTP_OK;
    MTP_TRY(mtp__json_get_double(&text, "final_logit_softcapping", &config->final_logit_softcapping));
    if (!(config->final_logit_softcapping > 0) || !isfinite(config->final_logit_softcapping))
        return mtp__json_fail(&text, MTP_E_DATA, "final_logit_softcapping %g is not a positive number (null: none)",
                              config->final_logit_softcapping);
    return MTP_OK;
}

mtp_status mtp__verifier_config_read(const char *directory, mtp_verifier_config *config)
{
    char *path = NULL;
    json_t *tree = NULL;
    *config = (mtp_verifier_config){0};
    MTP_TRY(mtp__path_join(directory, "config.json", &path));
    mtp_status status = mtp__json_read(path, &tree);
    if (status == MTP_OK) {
        const mtp__json_node root = mtp__json_root(tree, path);
        status = parse(&root, config);
        json_decref(tree);
    }
    free(path);
    return status;
}
