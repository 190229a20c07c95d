/* Protects: reading a drafter's config.json: the five official geometries, both spellings of the layer geometry, any
 * number and order of layers, and refusal by key and reason of everything libmtp does not compute. */
#include "support.h"

#include <jansson.h>

#include "base/error.h"
#include "model/config.h"

typedef struct official {
    const char *name;
    int64_t Hb, H, I, NH, NKV, global_NKV, W, positions;
    bool k_eq_v, ordered, unified;
} official;

/* semantics: the official checkpoints */
static const official sizes[] = {
    {"E2B", 1536, 256, 2048, 4, 1, 0, 512, 131072, false, true, false},
    {"E4B", 2560, 256, 2048, 4, 2, 0, 512, 131072, false, true, false},
    {"12B", 3840, 1024, 8192, 16, 8, 1, 1024, 262144, true, false, true},
    {"26B-A4B", 2816, 1024, 8192, 16, 8, 2, 1024, 262144, true, false, false},
    {"31B", 5376, 1024, 8192, 32, 16, 4, 1024, 262144, true, false, false},
};

static json_t *make_config(const official *size)
{
    const char *unified = size->unified ? "unified_" : "";
    char text[4096], global[32] = "null";
    if (size->global_NKV) snprintf(global, sizeof global, "%d", (int)size->global_NKV);
    snprintf(text, sizeof text,
             "{'architectures':['Gemma4AssistantForCausalLM'],'model_type':'gemma4_%sassistant',"
             "'backbone_hidden_size':%d,'use_ordered_embeddings':%s,'num_centroids':2048,"
             "'centroid_intermediate_top_k':32,'tie_word_embeddings':true,'dtype':'bfloat16','text_config':{"
             "'model_type':'gemma4_%stext','attention_bias':false,'attention_k_eq_v':%s,'enable_moe_block':false,"
             "'final_logit_softcapping':null,'head_dim':256,'global_head_dim':512,"
             "'hidden_activation':'gelu_pytorch_tanh','hidden_size':%d,'hidden_size_per_layer_input':0,"
             "'intermediate_size':%d,'vocab_size_per_layer_input':0,"
             "'layer_types':['sliding_attention','sliding_attention','sliding_attention','full_attention'],"
             "'max_position_embeddings':%d,'num_attention_heads':%d,'num_key_value_heads':%d,"
             "'num_global_key_value_heads':%s,'num_hidden_layers':4,'num_kv_shared_layers':4,'rms_norm_eps':1e-6,"
             "'rope_parameters':{'full_attention':{'rope_type':'proportional','rope_theta':1000000.0,"
             "'partial_rotary_factor':0.25},'sliding_attention':{'rope_type':'default','rope_theta':10000.0}},"
             "'sliding_window':%d,'use_double_wide_mlp':false,'vocab_size':262144}}",
             unified, (int)size->Hb, size->ordered ? "true" : "false", unified, size->k_eq_v ? "true" : "false",
             (int)size->H, (int)size->I, (int)size->positions, (int)size->NH, (int)size->NKV, global, (int)size->W);
    for (char *c = text; *c; c++)
        if (*c == '\'') *c = '"';
    json_error_t error;
    json_t *json = json_loads(text, 0, &error);
    if (!json) fail_msg("%s", error.text);
    return json;
}

static json_t *text_of(json_t *json)
{
    return json_object_get(json, "text_config");
}

static json_t *parse_value(const char *text)
{
    json_t *value = json_loads(text, JSON_DECODE_ANY, NULL);
    if (!value) fail_msg("not JSON: %s", text);
    return value;
}

static void test_official(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const official *size = &sizes[i];
        json_t *json = make_config(size);
        const char *directory = test_dir();
        mtp_drafter_config config;
        json_dump_file(json, test_path("%s/config.json", directory), 0);
        assert_ok(mtp_drafter_config_read(directory, &config));
        assert_int_equal(config.unified, size->unified);
        assert_int_equal(config.vocab_size, 262144);
        assert_int_equal(config.hidden_size, size->H);
        assert_int_equal(config.backbone_hidden_size, size->Hb);
        assert_int_equal(config.intermediate_size, size->I);
        assert_int_equal(config.num_heads, size->NH);
        assert_int_equal(config.num_layers, 4);
        assert_int_equal(config.layer_types[2], MTP_LAYER_SLIDING);
        assert_int_equal(config.layer_types[3], MTP_LAYER_FULL);
        assert_int_equal(config.sliding_window, size->W);
        assert_int_equal(config.max_position_embeddings, size->positions);
        assert_true(config.rms_norm_eps == 1e-6);
        assert_int_equal(config.ordered, size->ordered);
        assert_int_equal(config.num_centroids, size->ordered ? 2048 : 0);
        assert_int_equal(config.centroid_top_k, size->ordered ? 32 : 0);
        assert_int_equal(config.dtype, MTP_BF16);
        const mtp_layer_geometry *sliding = &config.geometry[MTP_LAYER_SLIDING],
                                 *full = &config.geometry[MTP_LAYER_FULL];
        assert_int_equal(sliding->head_dim, 256);
        assert_int_equal(sliding->num_kv_heads, size->NKV);
        assert_true(sliding->rope_theta == 1e4 && sliding->partial_rotary_factor == 1 && !sliding->proportional);
        assert_int_equal(full->head_dim, 512);
        assert_int_equal(full->num_kv_heads, size->k_eq_v ? size->global_NKV : size->NKV);
        assert_true(full->rope_theta == 1e6 && full->partial_rotary_factor == 0.25 && full->proportional);
        mtp_drafter_config_free(&config);
        json_decref(json);
    }
}

/* attention_k_eq_v decides whether num_global_key_value_heads counts. */
static void test_k_eq_v(void **state)
{
    (void)state;
    json_t *json = make_config(&sizes[4]);
    mtp_drafter_config config;
    json_object_set_new(text_of(json), "attention_k_eq_v", json_false());
    assert_ok(mtp__drafter_config_parse(json, "c", &config));
    assert_int_equal(config.geometry[MTP_LAYER_FULL].num_kv_heads, 16);
    mtp_drafter_config_free(&config);
    json_object_set_new(text_of(json), "attention_k_eq_v", json_true());
    json_object_set_new(text_of(json), "num_global_key_value_heads", json_null());
    assert_ok(mtp__drafter_config_parse(json, "c", &config));
    assert_int_equal(config.geometry[MTP_LAYER_FULL].num_kv_heads, 16);
    mtp_drafter_config_free(&config);
    json_decref(json);
}

/* The spelling of newest transformers: the same geometry from per_layer_config. */
static void test_per_layer_config(void **state)
{
    (void)state;
    json_t *json = make_config(&sizes[2]);
    json_t *text = text_of(json);
    mtp_drafter_config config;
    json_object_del(text, "global_head_dim");
    json_object_del(text, "num_global_key_value_heads");
    json_object_set_new(text, "per_layer_config",
                        parse_value("{\"3\": {\"head_dim\": 512, \"num_key_value_heads\": 1}}"));
    assert_ok(mtp__drafter_config_parse(json, "c", &config));
    assert_int_equal(config.geometry[MTP_LAYER_SLIDING].head_dim, 256);
    assert_int_equal(config.geometry[MTP_LAYER_SLIDING].num_kv_heads, 8);
    assert_int_equal(config.geometry[MTP_LAYER_FULL].head_dim, 512);
    assert_int_equal(config.geometry[MTP_LAYER_FULL].num_kv_heads, 1);
    mtp_drafter_config_free(&config);
    /* without an entry a full layer is like the others */
    json_object_set_new(text, "per_layer_config", parse_value("{}"));
    assert_ok(mtp__drafter_config_parse(json, "c", &config));
    assert_int_equal(config.geometry[MTP_LAYER_FULL].head_dim, 256);
    assert_int_equal(config.geometry[MTP_LAYER_FULL].num_kv_heads, 8);
    mtp_drafter_config_free(&config);
    json_object_set_new(text, "per_layer_config", parse_value("{\"0\": {\"head_dim\": 128}}"));
    assert_fails(mtp__drafter_config_parse(json, "c", &config), MTP_E_DATA, "layer 1 has head_dim 256");
    json_object_set_new(text, "per_layer_config", parse_value("{\"4\": {\"head_dim\": 128}}"));
    assert_fails(mtp__drafter_config_parse(json, "c", &config), MTP_E_DATA, "\"4\" is not the index");
    json_object_set_new(text, "per_layer_config", parse_value("{\"3\": {\"sliding_window\": 128}}"));
    assert_fails(mtp__drafter_config_parse(json, "c", &config), MTP_E_DATA, "\"sliding_window\" is not supported");
    json_object_set_new(text, "per_layer_config", parse_value("{\"3\": {\"head_dim\": 128}}"));
    json_object_set_new(text, "global_head_dim", json_integer(512));
    assert_fails(mtp__drafter_config_parse(json, "c", &config), MTP_E_DATA, "contradicts global_head_dim 512");
    json_object_del(text, "global_head_dim");
    json_object_del(text, "per_layer_config");
    assert_fails(mtp__drafter_config_parse(json, "c", &config), MTP_E_NOT_FOUND, "global_head_dim");
    json_decref(json);
}

static void test_other_layouts(void **state)
{
    (void)state;
    json_t *json = make_config(&sizes[0]);
    json_t *text = text_of(json);
    mtp_drafter_config config;
    json_object_set_new(text, "num_hidden_layers", json_integer(7));
    json_object_set_new(text, "num_kv_shared_layers", json_integer(7));
    json_t *types = json_array();
    for (int i = 0; i < 7; i++)
        json_array_append_new(types, json_string(i % 3 ? "sliding_attention" : "full_attention"));
    json_object_set_new(text, "layer_types", types);
    assert_ok(mtp__drafter_config_parse(json, "c", &config));
    assert_int_equal(config.num_layers, 7);
    assert_int_equal(config.layer_types[0], MTP_LAYER_FULL);
    assert_int_equal(config.layer_types[6], MTP_LAYER_FULL);
    mtp_drafter_config_free(&config);
    /* one type only: the other has no geometry, and its rope_parameters are not asked for */
    json_object_set_new(text, "num_hidden_layers", json_integer(1));
    json_object_set_new(text, "num_kv_shared_layers", json_integer(0));
    json_object_set_new(text, "layer_types", parse_value("[\"full_attention\"]"));
    json_object_del(json_object_get(text, "rope_parameters"), "sliding_attention");
    assert_ok(mtp__drafter_config_parse(json, "c", &config));
    assert_int_equal(config.geometry[MTP_LAYER_SLIDING].head_dim, 0);
    assert_int_equal(config.geometry[MTP_LAYER_FULL].head_dim, 512);
    mtp_drafter_config_free(&config);
    json_decref(json);
}

/* What engines take when a key is absent, as documented; nothing else has a default. */
static void test_defaults(void **state)
{
    (void)state;
    json_t *json = make_config(&sizes[0]);
    mtp_drafter_config config;
    json_object_del(json, "num_centroids");
    json_object_del(json, "centroid_intermediate_top_k");
    json_object_del(json, "tie_word_embeddings");
    json_object_del(text_of(json), "num_kv_shared_layers");
    assert_ok(mtp__drafter_config_parse(json, "c", &config));
    assert_int_equal(config.num_centroids, 2048);
    assert_int_equal(config.centroid_top_k, 32);
    mtp_drafter_config_free(&config);
    json_object_del(json, "dtype");
    json_object_set_new(json, "torch_dtype", json_string("float16"));
    assert_ok(mtp__drafter_config_parse(json, "c", &config));
    assert_int_equal(config.dtype, MTP_F16);
    mtp_drafter_config_free(&config);
    json_object_set_new(json_object_get(json_object_get(text_of(json), "rope_parameters"), "full_attention"), "factor",
                        json_real(4));
    assert_ok(mtp__drafter_config_parse(json, "c", &config));
    assert_true(config.geometry[MTP_LAYER_FULL].rope_factor == 4);
    mtp_drafter_config_free(&config);
    json_decref(json);
}

static void test_missing(void **state)
{
    (void)state;
    static const char *const top[] = {"model_type", "text_config", "backbone_hidden_size", "use_ordered_embeddings",
                                      "dtype"};
    static const char *const inner[] = {"attention_k_eq_v",    "head_dim",
                                        "hidden_activation",   "hidden_size",
                                        "intermediate_size",   "layer_types",
                                        "num_attention_heads", "num_hidden_layers",
                                        "num_key_value_heads", "rms_norm_eps",
                                        "rope_parameters",     "sliding_window",
                                        "vocab_size",          "max_position_embeddings"};
    mtp_drafter_config config;
    for (size_t i = 0; i < sizeof top / sizeof *top; i++) {
        json_t *json = make_config(&sizes[0]);
        json_object_del(json, top[i]);
        assert_fails(mtp__drafter_config_parse(json, "c", &config), MTP_E_NOT_FOUND, top[i]);
        assert_null(config.layer_types);
        json_decref(json);
    }
    for (size_t i = 0; i < sizeof inner / sizeof *inner; i++) {
        json_t *json = make_config(&sizes[0]);
        json_object_del(text_of(json), inner[i]);
        assert_fails(mtp__drafter_config_parse(json, "c", &config), MTP_E_NOT_FOUND, inner[i]);
        assert_null(config.layer_types);
        json_decref(json);
    }
}

/* Set one key, expect this refusal naming the key (or what `says` says). */
typedef struct refusal {
    const char *key;
    const char *value;
    mtp_status status;
    const char *says;
} refusal;

static const refusal text_refusals[] = {
    {"final_logit_softcapping", "30.0", MTP_E_DATA, "text_config.final_logit_softcapping: must be null"},
    {"attn_logit_softcapping", "50.0", MTP_E_DATA, "attn_logit_softcapping"},
    {"attention_bias", "true", MTP_E_DATA, "attention_bias"},
    {"attention_bias", "0", MTP_E_FORMAT, "attention_bias"},
    {"enable_moe_block", "true", MTP_E_DATA, "enable_moe_block"},
    {"use_double_wide_mlp", "true", MTP_E_DATA, "use_double_wide_mlp"},
    {"hidden_size_per_layer_input", "256", MTP_E_DATA, "hidden_size_per_layer_input"},
    {"vocab_size_per_layer_input", "262144", MTP_E_DATA, "vocab_size_per_layer_input"},
    {"hidden_activation", "\"silu\"", MTP_E_DATA, "gelu_pytorch_tanh"},
    {"tie_word_embeddings", "false", MTP_E_DATA, "tie_word_embeddings"},
    {"model_type", "\"gemma3_text\"", MTP_E_DATA, "gemma4_text"},
    {"model_type", "\"gemma4_unified_text\"", MTP_E_DATA, "gemma4_text"},
    {"num_key_value_heads", "0", MTP_E_FORMAT, "num_key_value_heads"},
    {"num_key_value_heads", "3", MTP_E_DATA, "K/V heads"},
    {"hidden_size", "-256", MTP_E_FORMAT, "hidden_size"},
    {"hidden_size", "9223372036854775807", MTP_E_FORMAT, "hidden_size"},
    {"hidden_size", "256.0", MTP_E_FORMAT, "hidden_size"},
    {"hidden_size", "\"256\"", MTP_E_FORMAT, "hidden_size"},
    {"vocab_size", "1000000000000", MTP_E_FORMAT, "vocab_size"},
    {"vocab_size", "262145", MTP_E_DATA, "does not divide vocab_size"},
    {"head_dim", "255", MTP_E_DATA, "odd"},
    {"head_dim", "14", MTP_E_DATA, "head_dim 14 of layer 0"},
    {"global_head_dim", "514", MTP_E_DATA, "head_dim 514 of layer 3"},
    {"num_hidden_layers", "5", MTP_E_DATA, "num_hidden_layers is 5"},
    {"num_hidden_layers", "1000000", MTP_E_FORMAT, "num_hidden_layers"},
    {"num_kv_shared_layers", "2", MTP_E_DATA, "num_kv_shared_layers"},
    {"layer_types", "[\"full_attention\",\"full_attention\",\"full_attention\",\"chunked_attention\"]", MTP_E_DATA,
     "layer_types[3]"},
    {"layer_types", "\"full_attention\"", MTP_E_FORMAT, "layer_types"},
    {"sliding_window", "0", MTP_E_FORMAT, "sliding_window"},
    {"sliding_window", "null", MTP_E_FORMAT, "sliding_window"},
    {"rms_norm_eps", "0", MTP_E_DATA, "rms_norm_eps"},
    {"rms_norm_eps", "-1e-6", MTP_E_DATA, "rms_norm_eps"},
    {"rms_norm_eps", "1e300", MTP_E_DATA, "outside the range of float"},
    {"rope_parameters", "{\"rope_type\":\"default\",\"rope_theta\":10000.0}", MTP_E_NOT_FOUND, "sliding_attention"},
    {"per_layer_config", "[]", MTP_E_FORMAT, "per_layer_config"},
};

static const refusal top_refusals[] = {
    {"model_type", "\"gemma4\"", MTP_E_DATA, "not a drafter"},
    {"model_type", "\"gemma4_unified_assistant\"", MTP_E_DATA, "text_config.model_type"},
    {"use_ordered_embeddings", "1", MTP_E_FORMAT, "use_ordered_embeddings"},
    {"tie_word_embeddings", "false", MTP_E_DATA, "tie_word_embeddings"},
    {"num_centroids", "2047", MTP_E_DATA, "num_centroids 2047"},
    {"num_centroids", "0", MTP_E_FORMAT, "num_centroids"},
    {"centroid_intermediate_top_k", "2049", MTP_E_DATA, "centroid_intermediate_top_k"},
    {"backbone_hidden_size", "0", MTP_E_FORMAT, "backbone_hidden_size"},
    {"dtype", "\"float8_e4m3fn\"", MTP_E_DATA, "float8_e4m3fn"},
    {"text_config", "[]", MTP_E_FORMAT, "text_config"},
};

static const refusal rope_refusals[] = {
    {"rope_type", "\"yarn\"", MTP_E_DATA, "full_attention.rope_type: \"yarn\""},
    {"rope_theta", "0", MTP_E_DATA, "rope_theta"},
    {"rope_theta", "1e-300", MTP_E_DATA, "outside the range of float"},
    {"rope_theta", "\"1e6\"", MTP_E_FORMAT, "rope_theta"},
    {"partial_rotary_factor", "1.5", MTP_E_DATA, "above 1"},
    {"partial_rotary_factor", "null", MTP_E_FORMAT, "partial_rotary_factor"},
    {"factor", "0", MTP_E_DATA, "factor"},
    {"rope_type", "\"default\"", MTP_E_DATA, "need rope_type \"proportional\""},
    {"beta_fast", "32.0", MTP_E_DATA, "\"beta_fast\" is not supported"},
};

static void refuse_all(const refusal *refusals, size_t count, json_t *(*where)(json_t *))
{
    mtp_drafter_config config;
    for (size_t i = 0; i < count; i++) {
        json_t *json = make_config(&sizes[0]);
        json_object_set_new(where ? where(json) : json, refusals[i].key, parse_value(refusals[i].value));
        const mtp_status status = mtp__drafter_config_parse(json, "dir/config.json", &config);
        if (status != refusals[i].status || !strstr(mtp_last_error()->message, refusals[i].says) ||
            !strstr(mtp_last_error()->message, "dir/config.json"))
            fail_msg("%s = %s: %s: %s", refusals[i].key, refusals[i].value, mtp_status_name(status),
                     mtp_last_error()->message);
        assert_null(config.layer_types);
        json_decref(json);
    }
}

static json_t *full_rope_of(json_t *json)
{
    return json_object_get(json_object_get(text_of(json), "rope_parameters"), "full_attention");
}

static void test_refused(void **state)
{
    (void)state;
    refuse_all(text_refusals, sizeof text_refusals / sizeof *text_refusals, text_of);
    refuse_all(top_refusals, sizeof top_refusals / sizeof *top_refusals, NULL);
    refuse_all(rope_refusals, sizeof rope_refusals / sizeof *rope_refusals, full_rope_of);
}

static void test_files(void **state)
{
    (void)state;
    mtp_drafter_config config;
    const char *directory = test_dir();
    assert_fails(mtp_drafter_config_read(directory, &config), MTP_E_NOT_FOUND, "config.json");
    assert_fails(mtp_drafter_config_read(test_path("%s/nowhere", directory), &config), MTP_E_NOT_FOUND, "nowhere");
    test_write(test_path("%s/config.json", directory), "{\"model_type\": ", 15);
    assert_fails(mtp_drafter_config_read(directory, &config), MTP_E_FORMAT, "config.json:1");
    test_write(test_path("%s/config.json", directory), "[]", 2);
    assert_fails(mtp_drafter_config_read(directory, &config), MTP_E_FORMAT, "expected an object");
    assert_ok(mtp_drafter_config_read(MTP_TEST_DATA "/sample/drafter_init", &config));
    assert_int_equal(config.geometry[MTP_LAYER_FULL].num_kv_heads, 1);
    mtp_drafter_config_free(&config);
    assert_fails(mtp_drafter_config_read(MTP_TEST_DATA "/sample/verifier", &config), MTP_E_DATA, "not a drafter");
    mtp_drafter_config_free(&config);
    mtp_drafter_config_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_official),      cmocka_unit_test(test_k_eq_v),   cmocka_unit_test(test_per_layer_config),
        cmocka_unit_test(test_other_layouts), cmocka_unit_test(test_defaults), cmocka_unit_test(test_missing),
        cmocka_unit_test(test_refused),       cmocka_unit_test(test_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
