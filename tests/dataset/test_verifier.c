/* Protects: the verifier's directory is understood as transformers writes it (both spellings of the geometry, wrappers,
 * prefixes, shards), what training cannot use is refused by name, and a drafter made for another verifier is not bound.
 */
#include "support.h"

#include "mtp/safetensors.h"
#include "mtp/verifier.h"

#define SAMPLE_VERIFIER MTP_TEST_DATA "/sample/verifier"

/* ---- tiny verifiers ------------------------------------------------------------------------------------------- */

enum { VOCAB = 6, WIDTH = 4 };

static const char plain_config[] =
    "{\"model_type\": \"gemma4_text\", \"vocab_size\": 6, \"hidden_size\": 4, \"num_hidden_layers\": 4, \"head_dim\": "
    "8, "
    "\"layer_types\": [\"sliding_attention\", \"full_attention\", \"sliding_attention\", \"full_attention\"], "
    "\"num_key_value_heads\": 2, \"sliding_window\": 16, \"rms_norm_eps\": 1e-06%s}";

static const char *write_config(const char *extra)
{
    const char *dir = test_dir();
    const char *text = test_path(plain_config, extra);
    test_write(test_path("%s/config.json", dir), text, strlen(text));
    return dir;
}

static void write_tensors(const char *path, const char *embed, mtp_dtype dtype, int64_t rows, int64_t cols,
                          const char *norm)
{
    static const float zeros[256];
    static const float ones[WIDTH] = {1, 2, 3, 4};
    const int64_t table[2] = {rows, cols}, width = WIDTH;
    mtp_safetensors_source tensors[2] = {{.name = embed, .dtype = dtype, .rank = 2, .shape = table, .data = zeros},
                                         {.name = norm, .dtype = MTP_F32, .rank = 1, .shape = &width, .data = ones}};
    if (embed)
        assert_ok(mtp_safetensors_write(path, NULL, 0, tensors, norm ? 2 : 1));
    else
        assert_ok(mtp_safetensors_write(path, NULL, 0, tensors + 1, 1));
}

static const char *make_verifier(const char *extra, const char *prefix)
{
    const char *dir = write_config(extra);
    write_tensors(test_path("%s/model.safetensors", dir), test_path("%sembed_tokens.weight", prefix), MTP_BF16, VOCAB,
                  WIDTH, test_path("%snorm.weight", prefix));
    return dir;
}

static mtp_verifier_config config_of(const char *dir)
{
    mtp_verifier *verifier = NULL;
    assert_ok(mtp_verifier_open(dir, NULL, &verifier));
    const mtp_verifier_config config = *mtp_verifier_get_config(verifier);
    mtp_verifier_close(verifier);
    return config;
}

static void refuses(const char *dir, mtp_status expected, const char *text)
{
    mtp_verifier *verifier = NULL;
    assert_fails(mtp_verifier_open(dir, NULL, &verifier), expected, text);
    assert_null(verifier);
}

/* ---- geometry ------------------------------------------------------------------------------------------------- */

static void sample_verifier_opens(void **state)
{
    (void)state;
    mtp_verifier *verifier = NULL;
    assert_ok(mtp_verifier_open(SAMPLE_VERIFIER, NULL, &verifier));
    const mtp_verifier_config *config = mtp_verifier_get_config(verifier);
    /* layers S S F S | S F: the last two share K/V */
    assert_int_equal(config->kv_layer[MTP_LAYER_SLIDING], 3);
    assert_int_equal(config->kv_layer[MTP_LAYER_FULL], 2);
    assert_int_equal(config->num_kv_heads[MTP_LAYER_SLIDING], 2);
    assert_int_equal(config->head_dim[MTP_LAYER_SLIDING], 32);
    assert_int_equal(config->num_kv_heads[MTP_LAYER_FULL], 1);
    assert_int_equal(config->head_dim[MTP_LAYER_FULL], 64);
    assert_int_equal(config->sliding_window, 64);
    assert_true(config->final_logit_softcapping == 30.0);
    const mtp_view table = mtp_verifier_embedding(verifier);
    assert_int_equal(table.dtype, MTP_BF16);
    assert_int_equal(table.shape[0], 2048);
    assert_int_equal(table.shape[1], 128);
    assert_non_null(table.data);
    assert_true(mtp_verifier_norm(verifier)[0] != 0.0f);
    assert_string_equal(mtp_verifier_directory(verifier), SAMPLE_VERIFIER);
    mtp_verifier_close(verifier);
    mtp_verifier_close(NULL);
}

static void golden_verifiers_have_their_geometry(void **state)
{
    static const struct {
        const char *name;
        int64_t heads[MTP_LAYER_TYPES], head_dim[MTP_LAYER_TYPES];
    } cases[] = {{"e2b_flat", {1, 1}, {16, 32}},        {"e2b_bf16_data", {1, 1}, {16, 32}},
                 {"e4b_masked", {2, 2}, {16, 32}},      {"m12b_flat", {4, 1}, {16, 32}},
                 {"m26b_flat", {4, 2}, {16, 32}},       {"m31b_flat_k5", {8, 4}, {16, 32}},
                 {"real_head_dims", {1, 1}, {256, 512}}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const mtp_verifier_config config = config_of(test_path(MTP_TEST_DATA "/goldens/%s/verifier", cases[i].name));
        for (int type = 0; type < MTP_LAYER_TYPES; type++) {
            assert_int_equal(config.num_kv_heads[type], cases[i].heads[type]);
            assert_int_equal(config.head_dim[type], cases[i].head_dim[type]);
        }
    }
}

static void old_keys_and_per_layer_config(void **state)
{
    (void)state;
    mtp_verifier_config config = config_of(make_verifier("", "model."));
    assert_int_equal(config.head_dim[MTP_LAYER_FULL], 8);
    assert_int_equal(config.kv_layer[MTP_LAYER_FULL], 3);
    assert_true(config.final_logit_softcapping == 0.0);
    config = config_of(make_verifier(", \"global_head_dim\": 12, \"num_global_key_value_heads\": 1", "model."));
    assert_int_equal(config.head_dim[MTP_LAYER_FULL], 12);
    assert_int_equal(config.num_kv_heads[MTP_LAYER_FULL], 2); /* the key counts with attention_k_eq_v only */
    config = config_of(make_verifier(", \"num_global_key_value_heads\": 1, \"attention_k_eq_v\": true", "model."));
    assert_int_equal(config.num_kv_heads[MTP_LAYER_FULL], 1);
    assert_int_equal(config.num_kv_heads[MTP_LAYER_SLIDING], 2);
    /* the K/V layers are 0 and 1 here: entries of layers that share K/V do not count */
    config = config_of(make_verifier(", \"num_kv_shared_layers\": 2, \"per_layer_config\": {\"1\": {\"head_dim\": 32, "
                                     "\"num_key_value_heads\": 1}, \"3\": {\"head_dim\": 64}}",
                                     "model."));
    assert_int_equal(config.kv_layer[MTP_LAYER_FULL], 1);
    assert_int_equal(config.kv_layer[MTP_LAYER_SLIDING], 0);
    assert_int_equal(config.head_dim[MTP_LAYER_FULL], 32);
    assert_int_equal(config.num_kv_heads[MTP_LAYER_FULL], 1);
    assert_int_equal(config.head_dim[MTP_LAYER_SLIDING], 8);
    config = config_of(make_verifier(", \"num_kv_shared_layers\": 3", "model."));
    assert_int_equal(config.kv_layer[MTP_LAYER_FULL], -1);
    assert_int_equal(config.num_kv_heads[MTP_LAYER_FULL], 0);
}

static void bad_configs_are_named(void **state)
{
    static const struct {
        const char *extra, *text;
    } cases[] = {
        {", \"global_head_dim\": 12, \"per_layer_config\": {\"3\": {\"head_dim\": 32}}", "contradicts global_head_dim"},
        {", \"num_kv_shared_layers\": 4", "num_kv_shared_layers"},
        {", \"final_logit_softcapping\": -1", "final_logit_softcapping"},
        {", \"text_config\": {\"vocab_size\": 6}", "text_config"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mtp_verifier *verifier = NULL;
        const char *dir = make_verifier(cases[i].extra, "model.");
        assert_true(mtp_verifier_open(dir, NULL, &verifier) != MTP_OK);
        assert_non_null(strstr(mtp_last_error()->message, cases[i].text));
        assert_non_null(strstr(mtp_last_error()->message, "config.json"));
        assert_int_equal(mtp_status_exit_code(mtp_last_error()->status), 3);
    }
    refuses(MTP_TEST_DATA "/sample/drafter_init", MTP_E_DATA, "this is a drafter");
    refuses(test_path("%s/nowhere", test_dir()), MTP_E_NOT_FOUND, "config.json");
}

/* ---- tensors -------------------------------------------------------------------------------------------------- */

static void wrapper_and_prefixes(void **state)
{
    static const char *const prefixes[] = {"model.", "model.language_model.", "language_model.model."};
    (void)state;
    for (int i = 0; i < 3; i++) {
        const char *dir = make_verifier("", prefixes[i]);
        const char *inner = test_path(plain_config, "");
        const char *text = test_path("{\"model_type\": \"gemma4\", \"vision_config\": {}, \"text_config\": %s}", inner);
        test_write(test_path("%s/config.json", dir), text, strlen(text));
        mtp_verifier *verifier = NULL;
        assert_ok(mtp_verifier_open(dir, NULL, &verifier));
        assert_int_equal(mtp_verifier_get_config(verifier)->vocab_size, VOCAB);
        assert_true(mtp_verifier_norm(verifier)[2] == 3.0f);
        mtp_verifier_close(verifier);
    }
    const char *dir = write_config("");
    write_tensors(test_path("%s/model.safetensors", dir), "transformer.wte.weight", MTP_BF16, VOCAB, WIDTH, NULL);
    refuses(dir, MTP_E_NOT_FOUND, "no embedding table");
}

/* Shards that hold neither embedding nor norm need not even be there. */
static void only_two_tensors_of_a_sharded_model_are_opened(void **state)
{
    static const char index[] =
        "{\"metadata\": {}, \"weight_map\": {\"model.embed_tokens.weight\": \"model-00001-of-00003.safetensors\", "
        "\"model.layers.0.mlp.up_proj.weight\": \"model-00002-of-00003.safetensors\", "
        "\"model.norm.weight\": \"model-00003-of-00003.safetensors\"}}";
    (void)state;
    const char *dir = write_config("");
    test_write(test_path("%s/model.safetensors.index.json", dir), index, strlen(index));
    write_tensors(test_path("%s/model-00001-of-00003.safetensors", dir), "model.embed_tokens.weight", MTP_F16, VOCAB,
                  WIDTH, NULL);
    write_tensors(test_path("%s/model-00003-of-00003.safetensors", dir), NULL, MTP_F32, 0, 0, "model.norm.weight");
    mtp_verifier *verifier = NULL;
    assert_ok(mtp_verifier_open(dir, NULL, &verifier));
    assert_int_equal(mtp_verifier_embedding(verifier).dtype, MTP_F16);
    mtp_verifier_close(verifier);
}

/* Other writers may leave tensors where their type cannot be read in place. */
static void unaligned_tensors_are_copied(void **state)
{
    static const char header[] =
        "{\"pad\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
        "\"model.embed_tokens.weight\":{\"dtype\":\"BF16\",\"shape\":[6,4],\"data_offsets\":[1,49]},"
        "\"model.norm.weight\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[49,57]}}  ";
    (void)state;
    const char *dir = write_config("");
    unsigned char bytes[8 + sizeof header - 1 + 57] = {(sizeof header - 1) & 0xff, (sizeof header - 1) >> 8};
    memcpy(bytes + 8, header, sizeof header - 1);
    unsigned char *data = bytes + 8 + sizeof header - 1;
    assert_int_equal((sizeof header - 1) % 2, 0); /* so that byte 1 of the data is odd */
    for (int i = 0; i < VOCAB * WIDTH; i++) data[1 + 2 * i] = (unsigned char)i;
    for (int i = 0; i < WIDTH; i++) data[49 + 2 * i] = 0x80, data[50 + 2 * i] = 0x3f;
    test_write(test_path("%s/model.safetensors", dir), bytes, sizeof bytes);
    mtp_verifier *verifier = NULL;
    assert_ok(mtp_verifier_open(dir, NULL, &verifier));
    const mtp_view table = mtp_verifier_embedding(verifier);
    assert_int_equal((uintptr_t)table.data % 2, 0);
    for (int i = 0; i < VOCAB * WIDTH; i++) assert_int_equal(((const uint16_t *)table.data)[i], i);
    assert_true(mtp_verifier_norm(verifier)[3] == 1.0f);
    mtp_verifier_close(verifier);
}

static void quantised_embedding_needs_another_directory(void **state)
{
    static const struct {
        const char *name;
        mtp_dtype dtype;
    } cases[] = {{"model.embed_tokens.qweight", MTP_I32},       {"model.embed_tokens.weight", MTP_U8},
                 {"model.embed_tokens.weight", MTP_I8},         {"model.embed_tokens.weight", MTP_F8_E4M3},
                 {"model.embed_tokens.weight_packed", MTP_I32}, {"model.embed_tokens.weight.absmax", MTP_F32}};
    (void)state;
    const char *good = make_verifier("", "model.language_model.");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *dir = write_config(", \"quantization_config\": {\"quant_method\": \"x\"}");
        write_tensors(test_path("%s/model.safetensors", dir), cases[i].name, cases[i].dtype, VOCAB, WIDTH,
                      "model.norm.weight");
        refuses(dir, MTP_E_DATA, "set embedding_from");
        refuses(dir, MTP_E_DATA, cases[i].name);
        mtp_verifier *verifier = NULL;
        assert_ok(mtp_verifier_open(dir, good, &verifier));
        assert_int_equal(mtp_verifier_embedding(verifier).dtype, MTP_BF16);
        mtp_verifier_close(verifier);
    }
    /* a quantised model whose embedding is not is fine */
    (void)config_of(make_verifier(", \"quantization_config\": {\"quant_method\": \"awq\"}", "model."));
}

static void table_and_config_must_agree(void **state)
{
    (void)state;
    const char *dir = write_config("");
    write_tensors(test_path("%s/model.safetensors", dir), "model.embed_tokens.weight", MTP_BF16, VOCAB + 1, WIDTH,
                  "model.norm.weight");
    refuses(dir, MTP_E_DATA, "is [7, 4], but");
    refuses(dir, MTP_E_DATA, "vocab_size 6 and hidden_size 4");
    /* the same for embedding_from */
    mtp_verifier *verifier = NULL;
    assert_fails(mtp_verifier_open(make_verifier("", "model."), dir, &verifier), MTP_E_DATA, "is [7, 4]");
    write_tensors(test_path("%s/model.safetensors", dir), "model.embed_tokens.weight", MTP_BF16, VOCAB, WIDTH, NULL);
    refuses(dir, MTP_E_NOT_FOUND, "model.norm.weight");
}

/* ---- drafters ------------------------------------------------------------------------------------------------- */

static void drafter_must_fit(void **state)
{
    (void)state;
    mtp_verifier *verifier = NULL;
    mtp_drafter_config drafter;
    assert_ok(mtp_verifier_open(SAMPLE_VERIFIER, NULL, &verifier));
    assert_ok(mtp_drafter_config_read(MTP_TEST_DATA "/sample/drafter_init_dense", &drafter));
    assert_ok(mtp_verifier_check_drafter(verifier, &drafter));
    mtp_drafter_config other = drafter;
    other.backbone_hidden_size = 256;
    other.vocab_size = 100;
    other.sliding_window = 32;
    other.geometry[MTP_LAYER_SLIDING].head_dim = 16;
    other.geometry[MTP_LAYER_FULL].num_kv_heads = 4;
    const char *const named[] = {
        "backbone_hidden_size is 256, the verifier's is 128", "vocab_size is 100, the verifier's is 2048",
        "sliding_window is 32, the verifier's is 64", "head_dim of sliding_attention is 16, the verifier's is 32",
        "num_key_value_heads of full_attention is 4, the verifier's is 1"};
    for (size_t i = 0; i < sizeof named / sizeof *named; i++)
        assert_fails(mtp_verifier_check_drafter(verifier, &other), MTP_E_DATA, named[i]);
    other = drafter;
    other.ordered = true;
    other.num_centroids = 60;
    assert_fails(mtp_verifier_check_drafter(verifier, &other), MTP_E_DATA, "num_centroids 60 does not divide");
    mtp_verifier_close(verifier);
    assert_ok(mtp_verifier_open(make_verifier(", \"num_kv_shared_layers\": 3", "model."), NULL, &verifier));
    assert_fails(mtp_verifier_check_drafter(verifier, &drafter), MTP_E_DATA,
                 "there are full_attention layers, the verifier has none");
    mtp_verifier_close(verifier);
    mtp_drafter_config_free(&drafter);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sample_verifier_opens),
        cmocka_unit_test(golden_verifiers_have_their_geometry),
        cmocka_unit_test(old_keys_and_per_layer_config),
        cmocka_unit_test(bad_configs_are_named),
        cmocka_unit_test(wrapper_and_prefixes),
        cmocka_unit_test(only_two_tensors_of_a_sharded_model_are_opened),
        cmocka_unit_test(unaligned_tensors_are_copied),
        cmocka_unit_test(quantised_embedding_needs_another_directory),
        cmocka_unit_test(table_and_config_must_agree),
        cmocka_unit_test(drafter_must_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
