/* config.json of a drafter: parsing and every check that needs no weights.
 *
 * Keys as transformers names them (Gemma4AssistantConfig, Gemma4TextConfig). Both spellings of the geometry of full
 * layers are read: global_head_dim with num_global_key_value_heads, and the newer per_layer_config. A key that would
 * change the computation in a way that libmtp does not do is refused by name. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "data/verifier_config.h"
#include "model/config.h"

static const int64_t MAX_WIDTH = 1 << 20, MAX_VOCAB = 1 << 28, MAX_LAYERS = 1024, MAX_HEADS = 1 << 12,
                     MAX_HEAD_DIM = 1 << 13, MAX_POSITIONS = INT64_C(1) << 31;
static const int64_t MIN_ATTENTION_DIM = 16, MAX_ATTENTION_DIM = 512; /* head widths that kernels/ops.h knows */

/* ---- keys that must have one value ---------------------------------------------------------------------------- */

/* A flag that must be false; absent and null count as false. */
static mtp_status require_off(const mtp__json_node *object, const char *key)
{
    bool value;
    if (!mtp__json_has(object, key)) return MTP_OK;
    MTP_TRY(mtp__json_get_bool(object, key, &value));
    mtp__json_node child;
    MTP_TRY(mtp__json_get(object, key, &child));
    return value ? mtp__json_fail(&child, MTP_E_DATA, "true is not supported: no Gemma-4 drafter has it") : MTP_OK;
}

/* A key that must be absent or null. */
static mtp_status require_null(const mtp__json_node *object, const char *key, const char *why)
{
    mtp__json_node child;
    if (!mtp__json_has(object, key)) return MTP_OK;
    MTP_TRY(mtp__json_get(object, key, &child));
    return mtp__json_fail(&child, MTP_E_DATA, "must be null: %s", why);
}

/* An integer that must be 0; absent and null count as 0. */
static mtp_status require_zero(const mtp__json_node *object, const char *key)
{
    int64_t value;
    if (!mtp__json_has(object, key)) return MTP_OK;
    MTP_TRY(mtp__json_get_int64(object, key, INT64_MIN, INT64_MAX, &value));
    mtp__json_node child;
    MTP_TRY(mtp__json_get(object, key, &child));
    return value != 0 ? mtp__json_fail(&child, MTP_E_DATA, "must be 0: a drafter has no per-layer embeddings") : MTP_OK;
}

/* tie_word_embeddings may be absent (both engines that read it take true then), never false. */
static mtp_status require_tied(const mtp__json_node *object)
{
    bool value = true;
    if (!mtp__json_has(object, "tie_word_embeddings")) return MTP_OK;
    MTP_TRY(mtp__json_get_bool(object, "tie_word_embeddings", &value));
    mtp__json_node child;
    MTP_TRY(mtp__json_get(object, "tie_word_embeddings", &child));
    return value ? MTP_OK
                 : mtp__json_fail(&child, MTP_E_DATA,
                                  "must be true: the head of a drafter is its model.embed_tokens.weight");
}

static mtp_status refuse_unsupported(const mtp__json_node *root, const mtp__json_node *text)
{
    const char *activation;
    mtp__json_node child;
    MTP_TRY(require_tied(root));
    MTP_TRY(require_tied(text));
    MTP_TRY(require_null(text, "final_logit_softcapping", "engines disagree on a soft-cap of a drafter's logits"));
    MTP_TRY(require_null(text, "attn_logit_softcapping", "attention scores of a drafter have no soft-cap"));
    MTP_TRY(require_off(text, "attention_bias"));
    MTP_TRY(require_off(text, "enable_moe_block"));
    MTP_TRY(require_off(text, "use_double_wide_mlp"));
    MTP_TRY(require_zero(text, "hidden_size_per_layer_input"));
    MTP_TRY(require_zero(text, "vocab_size_per_layer_input"));
    MTP_TRY(mtp__json_get_string(text, "hidden_activation", &activation));
    if (strcmp(activation, "gelu_pytorch_tanh") != 0) {
        MTP_TRY(mtp__json_get(text, "hidden_activation", &child));
        return mtp__json_fail(&child, MTP_E_DATA, "\"%s\" is not supported; only \"gelu_pytorch_tanh\" is", activation);
    }
    return MTP_OK;
}

/* ---- kinds and dtypes ----------------------------------------------------------------------------------------- */

static mtp_status read_kind(const mtp__json_node *root, const mtp__json_node *text, mtp_drafter_config *config)
{
    const char *type, *text_type;
    mtp__json_node child;
    MTP_TRY(mtp__json_get_string(root, "model_type", &type));
    config->unified = strcmp(type, "gemma4_unified_assistant") == 0;
    if (!config->unified && strcmp(type, "gemma4_assistant") != 0) {
        MTP_TRY(mtp__json_get(root, "model_type", &child));
        return mtp__json_fail(&child, MTP_E_DATA,
                              "\"%s\" is not a drafter: expected \"gemma4_assistant\" or \"gemma4_unified_assistant\"",
                              type);
    }
    if (!mtp__json_has(text, "model_type")) return MTP_OK;
    const char *expected = config->unified ? "gemma4_unified_text" : "gemma4_text";
    MTP_TRY(mtp__json_get_string(text, "model_type", &text_type));
    MTP_TRY(mtp__json_get(text, "model_type", &child));
    if (strcmp(text_type, expected) != 0)
        return mtp__json_fail(&child, MTP_E_DATA, "\"%s\" does not go with model_type \"%s\", which needs \"%s\"",
                              text_type, type, expected);
    return MTP_OK;
}

/* "dtype", or its older name "torch_dtype", of the whole, else of the text part. */
static mtp_status read_dtype(const mtp__json_node *root, const mtp__json_node *text, mtp_dtype *dtype)
{
    static const char *const keys[] = {"dtype", "torch_dtype"};
    static const struct {
        const char *name;
        mtp_dtype dtype;
    } names[] = {{"float32", MTP_F32}, {"bfloat16", MTP_BF16}, {"float16", MTP_F16}};
    for (size_t i = 0; i < 4; i++) {
        const mtp__json_node *object = i < 2 ? root : text;
        const char *key = keys[i % 2], *name;
        mtp__json_node child;
        if (!mtp__json_has(object, key)) continue;
        MTP_TRY(mtp__json_get_string(object, key, &name));
        for (size_t j = 0; j < sizeof names / sizeof *names; j++) {
            *dtype = names[j].dtype;
            if (strcmp(name, names[j].name) == 0) return MTP_OK;
        }
        MTP_TRY(mtp__json_get(object, key, &child));
        return mtp__json_fail(&child, MTP_E_DATA, "\"%s\" is not supported; float32, bfloat16 and float16 are", name);
    }
    return mtp__json_fail(root, MTP_E_NOT_FOUND,
                          "no key dtype, neither here nor in text_config (such as \"bfloat16\")");
}

/* ---- layers and their attention geometry ---------------------------------------------------------------------- */

static mtp_status read_layer_types(const mtp__json_node *text, mtp_drafter_config *config)
{
    mtp__json_node array;
    size_t count;
    MTP_TRY(mtp__json_get_int64(text, "num_hidden_layers", 1, MAX_LAYERS, &config->num_layers));
    MTP_TRY(mtp__json_get_array(text, "layer_types", &array, &count));
    if (count != (size_t)config->num_layers)
        return mtp__json_fail(&array, MTP_E_DATA, "has %zu entries, but num_hidden_layers is %lld", count,
                              (long long)config->num_layers);
    config->layer_types = calloc(count, sizeof *config->layer_types);
    if (!config->layer_types) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %zu layer types", count);
    for (size_t i = 0; i < count; i++) {
        const mtp__json_node item = mtp__json_item(&array, i);
        const char *name;
        MTP_TRY(mtp__json_as_string(&item, &name));
        if (strcmp(name, mtp__layer_type_name(MTP_LAYER_FULL)) == 0)
            config->layer_types[i] = MTP_LAYER_FULL;
        else if (strcmp(name, mtp__layer_type_name(MTP_LAYER_SLIDING)) == 0)
            config->layer_types[i] = MTP_LAYER_SLIDING;
        else
            return mtp__json_fail(&item, MTP_E_DATA, "\"%s\" is neither \"sliding_attention\" nor \"full_attention\"",
                                  name);
    }
    if (mtp__json_has(text, "num_kv_shared_layers")) {
        int64_t shared;
        MTP_TRY(mtp__json_get_int64(text, "num_kv_shared_layers", 0, MAX_LAYERS, &shared));
        MTP_TRY(mtp__json_get(text, "num_kv_shared_layers", &array));
        if (shared != 0 && shared != config->num_layers)
            return mtp__json_fail(&array, MTP_E_DATA,
                                  "is %lld, but every one of the %lld layers of a drafter reads the verifier's K/V",
                                  (long long)shared, (long long)config->num_layers);
    }
    return MTP_OK;
}

/* The entry of a layer in per_layer_config; child->value is NULL when there is none. */
static mtp_status find_layer_entry(const mtp__json_node *per_layer, int64_t layer, mtp__json_node *child)
{
    char key[32];
    snprintf(key, sizeof key, "%lld", (long long)layer);
    child->value = NULL;
    if (!per_layer->value || !json_object_get(per_layer->value, key)) return MTP_OK;
    /* the node must not point to the key on this stack */
    const char *stored = NULL, *name;
    json_t *value;
    json_object_foreach(per_layer->value, name, value) if (strcmp(name, key) == 0) stored = name;
    return mtp__json_get_object(per_layer, stored, child);
}

static mtp_status check_per_layer_keys(const mtp__json_node *per_layer, int64_t num_layers)
{
    const char *key, *inner;
    json_t *value, *inner_value;
    json_object_foreach(per_layer->value, key, value)
    {
        char *end;
        mtp__json_node entry;
        const long long layer = strtoll(key, &end, 10);
        if (key[0] < '0' || key[0] > '9' || *end || layer >= num_layers)
            return mtp__json_fail(per_layer, MTP_E_DATA, "\"%s\" is not the index of one of the %lld layers", key,
                                  (long long)num_layers);
        MTP_TRY(mtp__json_get_object(per_layer, key, &entry));
        json_object_foreach(entry.value, inner, inner_value)
        {
            if (strcmp(inner, "head_dim") != 0 && strcmp(inner, "num_key_value_heads") != 0)
                return mtp__json_fail(&entry, MTP_E_DATA,
                                      "\"%s\" is not supported; head_dim and num_key_value_heads are", inner);
        }
    }
    return MTP_OK;
}

/* What the keys outside per_layer_config say about full layers; 0 where they say nothing. */
typedef struct full_defaults {
    int64_t head_dim, num_kv_heads;
} full_defaults;

static mtp_status read_full_defaults(const mtp__json_node *text, full_defaults *full)
{
    bool k_eq_v;
    *full = (full_defaults){0, 0};
    MTP_TRY(mtp__json_get_bool(text, "attention_k_eq_v", &k_eq_v));
    if (mtp__json_has(text, "global_head_dim"))
        MTP_TRY(mtp__json_get_int64(text, "global_head_dim", 1, MAX_HEAD_DIM, &full->head_dim));
    if (k_eq_v && mtp__json_has(text, "num_global_key_value_heads"))
        MTP_TRY(mtp__json_get_int64(text, "num_global_key_value_heads", 1, MAX_HEADS, &full->num_kv_heads));
    return MTP_OK;
}

/* Head width and K/V heads of one layer. per_layer_config speaks first; where the older keys say something else about a
 * full layer, neither is believed. */
static mtp_status read_layer_geometry(const mtp__json_node *text, const mtp__json_node *per_layer,
                                      const full_defaults *full, mtp_layer_type type, int64_t layer, int64_t *head_dim,
                                      int64_t *num_kv_heads)
{
    mtp__json_node entry;
    MTP_TRY(mtp__json_get_int64(text, "head_dim", 1, MAX_HEAD_DIM, head_dim));
    MTP_TRY(mtp__json_get_int64(text, "num_key_value_heads", 1, MAX_HEADS, num_kv_heads));
    MTP_TRY(find_layer_entry(per_layer, layer, &entry));
    const bool own_dim = entry.value && mtp__json_has(&entry, "head_dim");
    const bool own_heads = entry.value && mtp__json_has(&entry, "num_key_value_heads");
    if (type == MTP_LAYER_FULL) {
        if (!per_layer->value && full->head_dim == 0)
            return mtp__json_fail(text, MTP_E_NOT_FOUND,
                                  "no key global_head_dim (nor per_layer_config): the head width of the full_attention "
                                  "layers is not said");
        if (full->head_dim) *head_dim = full->head_dim;
        if (full->num_kv_heads) *num_kv_heads = full->num_kv_heads;
    }
    const int64_t said_dim = *head_dim, said_heads = *num_kv_heads;
    if (own_dim) MTP_TRY(mtp__json_get_int64(&entry, "head_dim", 1, MAX_HEAD_DIM, head_dim));
    if (own_heads) MTP_TRY(mtp__json_get_int64(&entry, "num_key_value_heads", 1, MAX_HEADS, num_kv_heads));
    if (type == MTP_LAYER_FULL && full->head_dim && *head_dim != said_dim)
        return mtp__json_fail(&entry, MTP_E_DATA, "head_dim %lld contradicts global_head_dim %lld; remove one of them",
                              (long long)*head_dim, (long long)said_dim);
    if (type == MTP_LAYER_FULL && full->num_kv_heads && *num_kv_heads != said_heads)
        return mtp__json_fail(
            &entry, MTP_E_DATA,
            "num_key_value_heads %lld contradicts num_global_key_value_heads %lld; remove one of them",
            (long long)*num_kv_heads, (long long)said_heads);
    return MTP_OK;
}

static mtp_status read_geometry(const mtp__json_node *text, mtp_drafter_config *config)
{
    mtp__json_node per_layer = {0};
    full_defaults full;
    if (mtp__json_has(text, "per_layer_config")) {
        MTP_TRY(mtp__json_get_object(text, "per_layer_config", &per_layer));
        MTP_TRY(check_per_layer_keys(&per_layer, config->num_layers));
    }
    MTP_TRY(read_full_defaults(text, &full));
    for (int64_t layer = 0; layer < config->num_layers; layer++) {
        const mtp_layer_type type = config->layer_types[layer];
        mtp_layer_geometry *geometry = &config->geometry[type];
        int64_t head_dim, num_kv_heads;
        MTP_TRY(read_layer_geometry(text, &per_layer, &full, type, layer, &head_dim, &num_kv_heads));
        if (geometry->head_dim && (geometry->head_dim != head_dim || geometry->num_kv_heads != num_kv_heads))
            return mtp__json_fail(text, MTP_E_DATA,
                                  "layer %lld has head_dim %lld and num_key_value_heads %lld, but an earlier %s layer "
                                  "has %lld and %lld; layers of one type read the same K/V",
                                  (long long)layer, (long long)head_dim, (long long)num_kv_heads,
                                  mtp__layer_type_name(type), (long long)geometry->head_dim,
                                  (long long)geometry->num_kv_heads);
        geometry->head_dim = head_dim;
        geometry->num_kv_heads = num_kv_heads;
        if (head_dim % 2 != 0)
            return mtp__json_fail(text, MTP_E_DATA, "head_dim %lld of layer %lld is odd; rotary embedding needs pairs",
                                  (long long)head_dim, (long long)layer);
        if (head_dim < MIN_ATTENTION_DIM || head_dim > MAX_ATTENTION_DIM)
            return mtp__json_fail(text, MTP_E_DATA, "head_dim %lld of layer %lld: attention is computed for %d to %d",
                                  (long long)head_dim, (long long)layer, (int)MIN_ATTENTION_DIM,
                                  (int)MAX_ATTENTION_DIM);
        if (config->num_heads % num_kv_heads != 0)
            return mtp__json_fail(text, MTP_E_DATA,
                                  "num_attention_heads %lld is no multiple of the %lld K/V heads of layer %lld",
                                  (long long)config->num_heads, (long long)num_kv_heads, (long long)layer);
    }
    return MTP_OK;
}

/* ---- rotary embedding ----------------------------------------------------------------------------------------- */

static mtp_status read_positive(const mtp__json_node *object, const char *key, double *value)
{
    mtp__json_node child;
    MTP_TRY(mtp__json_get_double(object, key, value));
    MTP_TRY(mtp__json_get(object, key, &child));
    if (!(*value > 0) || !isfinite(*value))
        return mtp__json_fail(&child, MTP_E_DATA, "%g is not a positive number", *value);
    if (*value < FLT_MIN || *value > FLT_MAX) /* 0 or infinity in the arithmetic of every engine */
        return mtp__json_fail(&child, MTP_E_DATA, "%g is outside the range of float", *value);
    return MTP_OK;
}

static mtp_status read_rope_type(const mtp__json_node *rope, mtp_layer_geometry *geometry)
{
    const char *name, *key;
    json_t *value;
    mtp__json_node child;
    MTP_TRY(mtp__json_get_string(rope, "rope_type", &name));
    MTP_TRY(mtp__json_get(rope, "rope_type", &child));
    geometry->proportional = strcmp(name, "proportional") == 0;
    if (!geometry->proportional && strcmp(name, "default") != 0)
        return mtp__json_fail(&child, MTP_E_DATA, "\"%s\" is not supported; \"default\" and \"proportional\" are",
                              name);
    json_object_foreach(rope->value, key, value)
    {
        if (json_is_null(value) || strcmp(key, "rope_type") == 0 || strcmp(key, "rope_theta") == 0) continue;
        if (strcmp(key, "partial_rotary_factor") == 0 || strcmp(key, "factor") == 0) continue;
        return mtp__json_fail(rope, MTP_E_DATA, "key \"%s\" is not supported with rope_type \"%s\"", key, name);
    }
    return MTP_OK;
}

static mtp_status read_rope(const mtp__json_node *text, mtp_drafter_config *config)
{
    mtp__json_node parameters, rope;
    MTP_TRY(mtp__json_get_object(text, "rope_parameters", &parameters));
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        mtp_layer_geometry *geometry = &config->geometry[type];
        if (geometry->head_dim == 0) continue;
        MTP_TRY(mtp__json_get_object(&parameters, mtp__layer_type_name((mtp_layer_type)type), &rope));
        MTP_TRY(read_rope_type(&rope, geometry));
        MTP_TRY(read_positive(&rope, "rope_theta", &geometry->rope_theta));
        geometry->partial_rotary_factor = geometry->rope_factor = 1;
        if (geometry->proportional || mtp__json_has(&rope, "partial_rotary_factor"))
            MTP_TRY(read_positive(&rope, "partial_rotary_factor", &geometry->partial_rotary_factor));
        if (mtp__json_has(&rope, "factor")) MTP_TRY(read_positive(&rope, "factor", &geometry->rope_factor));
        if (geometry->partial_rotary_factor > 1)
            return mtp__json_fail(&rope, MTP_E_DATA, "partial_rotary_factor %g is above 1",
                                  geometry->partial_rotary_factor);
        if (!geometry->proportional && (geometry->partial_rotary_factor != 1 || geometry->rope_factor != 1))
            return mtp__json_fail(&rope, MTP_E_DATA,
                                  "partial_rotary_factor and factor other than 1 need rope_type \"proportional\"");
    }
    return MTP_OK;
}

/* ---- the head ------------------------------------------------------------------------------------------------- */

/* num_centroids and centroid_intermediate_top_k may be absent: engines take 2048 and 32 then. */
static mtp_status read_head(const mtp__json_node *root, mtp_drafter_config *config)
{
    MTP_TRY(mtp__json_get_bool(root, "use_ordered_embeddings", &config->ordered));
    if (!config->ordered) return MTP_OK;
    config->num_centroids = 2048;
    config->centroid_top_k = 32;
    if (mtp__json_has(root, "num_centroids"))
        MTP_TRY(mtp__json_get_int64(root, "num_centroids", 1, MAX_VOCAB, &config->num_centroids));
    if (mtp__json_has(root, "centroid_intermediate_top_k"))
        MTP_TRY(mtp__json_get_int64(root, "centroid_intermediate_top_k", 1, MAX_VOCAB, &config->centroid_top_k));
    if (config->vocab_size % config->num_centroids != 0)
        return mtp__json_fail(root, MTP_E_DATA,
                              "num_centroids %lld does not divide vocab_size %lld: every centroid owns the same number "
                              "of tokens",
                              (long long)config->num_centroids, (long long)config->vocab_size);
    if (config->centroid_top_k > config->num_centroids)
        return mtp__json_fail(root, MTP_E_DATA, "centroid_intermediate_top_k %lld is above num_centroids %lld",
                              (long long)config->centroid_top_k, (long long)config->num_centroids);
    return MTP_OK;
}

/* ---- the whole ------------------------------------------------------------------------------------------------ */

static mtp_status parse(json_t *json, const char *origin, mtp_drafter_config *config)
{
    mtp__json_node root = mtp__json_root(json, origin), text, child;
    MTP_TRY(mtp__json_as_object(&root));
    MTP_TRY(
        mtp__json_get(&root, "model_type", &child)); /* said first: what is not a drafter often has no text_config */
    if (!mtp__json_has(&root, "text_config")) {
        const mtp__json_node none = {.value = NULL};
        MTP_TRY(read_kind(&root, &none, config));
    }
    MTP_TRY(mtp__json_get_object(&root, "text_config", &text));
    MTP_TRY(read_kind(&root, &text, config));
    MTP_TRY(refuse_unsupported(&root, &text));
    MTP_TRY(mtp__json_get_int64(&root, "backbone_hidden_size", 1, MAX_WIDTH, &config->backbone_hidden_size));
    MTP_TRY(mtp__json_get_int64(&text, "vocab_size", 1, MAX_VOCAB, &config->vocab_size));
    MTP_TRY(mtp__json_get_int64(&text, "hidden_size", 1, MAX_WIDTH, &config->hidden_size));
    MTP_TRY(mtp__json_get_int64(&text, "intermediate_size", 1, MAX_WIDTH, &config->intermediate_size));
    MTP_TRY(mtp__json_get_int64(&text, "num_attention_heads", 1, MAX_HEADS, &config->num_heads));
    MTP_TRY(mtp__json_get_int64(&text, "sliding_window", 1, MAX_POSITIONS, &config->sliding_window));
    MTP_TRY(mtp__json_get_int64(&text, "max_position_embeddings", 1, MAX_POSITIONS, &config->max_position_embeddings));
    MTP_TRY(read_positive(&text, "rms_norm_eps", &config->rms_norm_eps));
    MTP_TRY(read_layer_types(&text, config));
    MTP_TRY(read_geometry(&text, config));
    MTP_TRY(read_rope(&text, config));
    MTP_TRY(read_head(&root, config));
    return read_dtype(&root, &text, &config->dtype);
}

mtp_status mtp__drafter_config_parse(json_t *json, const char *origin, mtp_drafter_config *config)
{
    *config = (mtp_drafter_config){0};
    const mtp_status status = parse(json, origin, config);
    if (status != MTP_OK) mtp_drafter_config_free(config);
    return status;
}

mtp_status mtp_drafter_config_read(const char *directory, mtp_drafter_config *config)
{
    MTP_REQUIRE(directory && config);
    char *path = NULL;
    json_t *json = NULL;
    *config = (mtp_drafter_config){0};
    MTP_TRY(mtp__path_join(directory, "config.json", &path));
    mtp_status status = MTP_OK;
    if (mtp__dir_exists(directory) && !mtp__path_exists(path))
        status = MTP_FAIL(MTP_E_NOT_FOUND,
                          "%s is no drafter: it has no config.json. The drafter that a run trained is in its directory "
                          "export; mtp export makes one of any checkpoint",
                          directory);
    if (status == MTP_OK) status = mtp__json_read(path, &json);
    if (status == MTP_OK) status = mtp__drafter_config_parse(json, path, config);
    json_decref(json);
    free(path);
    return status;
}

void mtp_drafter_config_free(mtp_drafter_config *config)
{
    if (!config) return;
    free(config->layer_types);
    *config = (mtp_drafter_config){0};
}
