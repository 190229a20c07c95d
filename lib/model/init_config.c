/* The config.json of a new drafter: what the verifier fixes, what the caller chose, and the keys that are the same in
 * every drafter. */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "model/init.h"

/* Keys taken over from the verifier's text configuration when it has them. */
static const char *const inherited[] = {"bos_token_id", "eos_token_id",   "pad_token_id", "max_position_embeddings",
                                        "rms_norm_eps", "rope_parameters"};
static const char *const media[] = {"image_token_id", "audio_token_id", "video_token_id", "boi_token_id",
                                    "eoi_token_id",   "boa_token_id",   "eoa_token_id"};

typedef struct sizes {
    int64_t hidden, intermediate, layers, heads, centroids, top_k;
} sizes;

static int64_t otherwise(int64_t value, int64_t fallback)
{
    return value ? value : fallback;
}

static mtp_status choose_sizes(const mtp_verifier_config *verifier, const mtp_init_geometry *geometry, sizes *chosen)
{
    const int64_t twice = 2 * verifier->num_kv_heads[MTP_LAYER_SLIDING];
    *chosen = (sizes){.hidden = otherwise(geometry->hidden_size, 256),
                      .layers = otherwise(geometry->num_hidden_layers, 4),
                      .heads = otherwise(geometry->num_attention_heads, twice > 4 ? twice : 4),
                      .centroids = geometry->num_centroids};
    chosen->intermediate = otherwise(geometry->intermediate_size, 8 * chosen->hidden);
    if (geometry->centroid_intermediate_top_k && !chosen->centroids)
        return MTP_FAIL(MTP_E_CONFIG, "centroid_intermediate_top_k needs num_centroids: a dense head has none");
    chosen->top_k = otherwise(geometry->centroid_intermediate_top_k, 32);
    if (chosen->centroids && verifier->vocab_size % chosen->centroids != 0)
        return MTP_FAIL(
            MTP_E_CONFIG,
            "num_centroids %lld does not divide the vocabulary of %lld: every centroid owns the same number "
            "of tokens",
            (long long)chosen->centroids, (long long)verifier->vocab_size);
    if (chosen->centroids && chosen->top_k > chosen->centroids)
        return MTP_FAIL(MTP_E_CONFIG,
                        "centroid_intermediate_top_k %lld is above num_centroids %lld (default 32; mtp init "
                        "--centroid-top-k)",
                        (long long)chosen->top_k, (long long)chosen->centroids);
    return MTP_OK;
}

/* Sliding layers with a full one last; all full when the verifier has no sliding layer that gives K/V. */
static json_t *layer_types(const mtp_verifier_config *verifier, int64_t count)
{
    json_t *types = json_array();
    for (int64_t i = 0; i < count; i++) {
        const bool full = i == count - 1 || verifier->num_kv_heads[MTP_LAYER_SLIDING] == 0;
        if (json_array_append_new(types, json_string(full ? "full_attention" : "sliding_attention")) != 0) {
            json_decref(types);
            return NULL;
        }
    }
    return types;
}

static json_t *text_config(const mtp_verifier_config *verifier, const sizes *chosen, bool unified)
{
    const int64_t full_heads = verifier->num_kv_heads[MTP_LAYER_FULL];
    const bool sliding = verifier->num_kv_heads[MTP_LAYER_SLIDING] != 0;
    const int64_t heads = sliding ? verifier->num_kv_heads[MTP_LAYER_SLIDING] : full_heads;
    const int64_t head_dim = verifier->head_dim[sliding ? MTP_LAYER_SLIDING : MTP_LAYER_FULL];
    const bool other = full_heads != heads;
    return json_pack(
        "{s:s, s:b, s:f, s:b, s:s, s:b, s:n, s:I, s:I, s:s, s:I, s:i, s:i, s:f, s:I, s:o, s:I, s:I, s:I, s:I, "
        "s:o, s:I, s:b, s:b, s:b, s:I}",
        "model_type", unified ? "gemma4_unified_text" : "gemma4_text", "attention_bias", 0, "attention_dropout", 0.0,
        "attention_k_eq_v", other, "dtype", "bfloat16", "enable_moe_block", 0, "final_logit_softcapping", "head_dim",
        (json_int_t)head_dim, "global_head_dim", (json_int_t)verifier->head_dim[MTP_LAYER_FULL], "hidden_activation",
        "gelu_pytorch_tanh", "hidden_size", (json_int_t)chosen->hidden, "hidden_size_per_layer_input", 0,
        "vocab_size_per_layer_input", 0, "initializer_range", 0.02, "intermediate_size",
        (json_int_t)chosen->intermediate, "layer_types", layer_types(verifier, chosen->layers), "num_attention_heads",
        (json_int_t)chosen->heads, "num_hidden_layers", (json_int_t)chosen->layers, "num_key_value_heads",
        (json_int_t)heads, "num_kv_shared_layers", (json_int_t)chosen->layers, "num_global_key_value_heads",
        other ? json_integer((json_int_t)full_heads) : json_null(), "sliding_window",
        (json_int_t)(verifier->sliding_window ? verifier->sliding_window : 1), "tie_word_embeddings", 1, "use_cache", 1,
        "use_double_wide_mlp", 0, "vocab_size", (json_int_t)verifier->vocab_size);
}

static bool inherit(json_t *to, const json_t *from, const char *const *keys, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        json_t *value = json_object_get(from, keys[i]);
        if (value && json_object_set_new(to, keys[i], json_deep_copy(value)) != 0) return false;
    }
    return true;
}

static json_t *build(const json_t *source, const mtp_verifier_config *verifier, const sizes *chosen)
{
    const json_t *source_text = json_object_get(source, "text_config");
    const char *type = json_string_value(json_object_get(source, "model_type"));
    const bool unified = type && strncmp(type, "gemma4_unified", strlen("gemma4_unified")) == 0;
    json_t *text = text_config(verifier, chosen, unified);
    json_t *root = json_pack("{s:[s], s:s, s:I, s:s, s:b, s:b, s:o}", "architectures",
                             unified ? "Gemma4UnifiedAssistantForCausalLM" : "Gemma4AssistantForCausalLM", "model_type",
                             unified ? "gemma4_unified_assistant" : "gemma4_assistant", "backbone_hidden_size",
                             (json_int_t)verifier->hidden_size, "dtype", "bfloat16", "tie_word_embeddings", 1,
                             "use_ordered_embeddings", chosen->centroids != 0, "text_config", text);
    bool done = root &&
                inherit(text, source_text ? source_text : source, inherited, sizeof inherited / sizeof *inherited) &&
                inherit(root, source, media, sizeof media / sizeof *media);
    if (done && chosen->centroids)
        done = json_object_set_new(root, "num_centroids", json_integer((json_int_t)chosen->centroids)) == 0 &&
               json_object_set_new(root, "centroid_intermediate_top_k", json_integer((json_int_t)chosen->top_k)) == 0;
    if (done) return root;
    json_decref(root);
    return NULL;
}

mtp_status mtp__init_config(const mtp_verifier_config *verifier, const char *directory,
                            const mtp_init_geometry *geometry, json_t **json)
{
    char *path = NULL;
    json_t *source = NULL;
    sizes chosen;
    *json = NULL;
    MTP_TRY(choose_sizes(verifier, geometry, &chosen));
    if (verifier->num_kv_heads[MTP_LAYER_FULL] == 0)
        return MTP_FAIL(MTP_E_DATA,
                        "%s has no full_attention layer that gives K/V: the last layer of a drafter needs one",
                        directory);
    MTP_TRY(mtp__path_join(directory, "config.json", &path));
    mtp_status status = mtp__json_read(path, &source);
    if (status == MTP_OK && !(*json = build(source, verifier, &chosen)))
        status = MTP_FAIL(MTP_E_MEMORY, "out of memory for a configuration");
    json_decref(source);
    free(path);
    return status;
}
