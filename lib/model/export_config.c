/* config.json of an export: the source's, with the keys that some engine needs. */
#include <string.h>

#include "model/config.h"
#include "model/export.h"

const char *mtp__export_architecture(const char *model_type)
{
    if (!model_type) return NULL;
    if (strcmp(model_type, "gemma4_assistant") == 0) return "Gemma4AssistantForCausalLM";
    if (strcmp(model_type, "gemma4_unified_assistant") == 0) return "Gemma4UnifiedAssistantForCausalLM";
    return NULL;
}

/* Takes over `value`; equal values are left alone. False when out of memory. */
static bool set(json_t *object, const char *key, json_t *value)
{
    if (!value) return false;
    if (json_equal(json_object_get(object, key), value)) {
        json_decref(value);
        return true;
    }
    return json_object_set_new(object, key, value) == 0;
}

static bool set_when_absent(json_t *object, const char *key, json_t *value)
{
    json_t *present = json_object_get(object, key);
    if (!value) return false;
    if (!present || json_is_null(present)) return set(object, key, value);
    json_decref(value);
    return true;
}

/* bfloat16 wherever a dtype is named, and at the top in any case. */
static bool set_dtype(json_t *root, json_t *text)
{
    bool done = set(root, "dtype", json_string("bfloat16"));
    json_t *const objects[] = {root, text, text};
    static const char *const keys[] = {"torch_dtype", "torch_dtype", "dtype"};
    for (size_t i = 0; i < 3; i++)
        if (json_object_get(objects[i], keys[i])) done = done && set(objects[i], keys[i], json_string("bfloat16"));
    return done;
}

static bool same_geometry(const mtp_drafter_config *a, const mtp_drafter_config *b)
{
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        const mtp_layer_geometry *x = &a->geometry[type], *y = &b->geometry[type];
        if (x->head_dim != y->head_dim || x->num_kv_heads != y->num_kv_heads) return false;
    }
    return true;
}

/* head_dim and num_key_value_heads are those of sliding layers where there are any, else what the source says. */
static bool write_old_keys(json_t *text, const mtp_drafter_config *config)
{
    const mtp_layer_geometry *sliding = &config->geometry[MTP_LAYER_SLIDING], *full = &config->geometry[MTP_LAYER_FULL];
    bool done = true;
    if (sliding->head_dim)
        done = set(text, "head_dim", json_integer(sliding->head_dim)) &&
               set(text, "num_key_value_heads", json_integer(sliding->num_kv_heads));
    if (!full->head_dim) return done;
    done = done && set(text, "global_head_dim", json_integer(full->head_dim));
    if (full->num_kv_heads != json_integer_value(json_object_get(text, "num_key_value_heads")))
        return done && set(text, "num_global_key_value_heads", json_integer(full->num_kv_heads));
    return done && (json_object_get(text, "num_global_key_value_heads") ||
                    set(text, "num_global_key_value_heads", json_null()));
}

/* Replace per_layer_config by the old keys where they can say the same; otherwise it stays, and with it what it says.
 */
static mtp_status rewrite_geometry(json_t *root, const mtp_drafter_config *config)
{
    json_t *trial = json_deep_copy(root), *text = json_object_get(trial, "text_config");
    mtp_drafter_config again = {0};
    mtp_status status = MTP_OK;
    if (!trial || !write_old_keys(text, config)) {
        json_decref(trial);
        return MTP_FAIL(MTP_E_MEMORY, "out of memory for config.json");
    }
    json_object_del(text, "per_layer_config");
    if (mtp__drafter_config_parse(trial, "config.json", &again) == MTP_OK && same_geometry(config, &again)) {
        json_t *copy = json_deep_copy(text);
        if (!copy || json_object_set_new(root, "text_config", copy) != 0)
            status = MTP_FAIL(MTP_E_MEMORY, "out of memory for config.json");
    }
    mtp_drafter_config_free(&again);
    json_decref(trial);
    return status;
}

mtp_status mtp__export_config(json_t *json, const mtp_drafter_config *config)
{
    MTP_TRY(rewrite_geometry(json, config));
    json_t *text = json_object_get(json, "text_config");
    const char *type = json_string_value(json_object_get(json, "model_type"));
    bool done = set_dtype(json, text) && set_when_absent(json, "tie_word_embeddings", json_true()) &&
                set_when_absent(text, "hidden_size_per_layer_input", json_integer(0)) &&
                set_when_absent(text, "vocab_size_per_layer_input", json_integer(0)) &&
                set(text, "num_kv_shared_layers", json_integer(config->num_layers)) &&
                set(json, "architectures", json_pack("[s]", mtp__export_architecture(type)));
    if (config->ordered)
        done = done && set_when_absent(json, "num_centroids", json_integer(config->num_centroids)) &&
               set_when_absent(json, "centroid_intermediate_top_k", json_integer(config->centroid_top_k));
    return done ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory for config.json");
}
