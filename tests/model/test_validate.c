/* Protects: the export validator refuses every alteration of an export that was measured to fail, or to be silently
 * wrong, in some engine, names file, key or tensor and the engine, and takes what loads everywhere. */
#include "edit.h"

#include "mtp/export.h"

#define SAMPLE MTP_TEST_DATA "/sample/"
#define VERIFIER SAMPLE "verifier"

static const char *copy_of(const char *name)
{
    const char *directory = test_path("%s/export", test_dir());
    test_copy(test_path(SAMPLE "%s", name), directory);
    return directory;
}

static void refused(const char *directory, const char *where, const char *engine)
{
    mtp_export_report report;
    assert_fails(mtp_validate_export(directory, VERIFIER, &report), MTP_E_DATA, where);
    bool named = false;
    for (int64_t i = 0; i < report.num_findings; i++)
        named = named || (report.findings[i].fatal && strstr(report.findings[i].where, where) &&
                          strstr(report.findings[i].engines, engine) && *report.findings[i].message);
    if (!named) fail_msg("no fatal finding for \"%s\" that names %s: %s", where, engine, mtp_last_error()->message);
    assert_true(report.num_fatal >= 1);
    mtp_export_report_free(&report);
}

static void accepted(const char *directory, int64_t warnings)
{
    mtp_export_report report;
    assert_ok(mtp_validate_export(directory, VERIFIER, &report));
    assert_int_equal(report.num_fatal, 0);
    if (report.num_findings != warnings)
        fail_msg("%d findings, first: %s %s", (int)report.num_findings, report.findings[0].where,
                 report.findings[0].message);
    mtp_export_report_free(&report);
}

/* ---- what every engine loads ---------------------------------------------------------------------------------- */

static void test_good(void **state)
{
    (void)state;
    accepted(SAMPLE "drafter_init", 0);
    accepted(SAMPLE "drafter_init_dense", 0);
    accepted(SAMPLE "drafter_reference", 0);
    assert_ok(mtp_validate_export(SAMPLE "drafter_init", VERIFIER, NULL));
    mtp_export_report report;
    assert_ok(mtp_validate_export(SAMPLE "drafter_init", NULL, &report)); /* and says what it could not check */
    assert_int_equal(report.num_findings, 1);
    assert_non_null(strstr(report.findings[0].message, "none was given"));
    mtp_export_report_free(&report);
    assert_fails(mtp_validate_export("/nowhere/at/all", NULL, NULL), MTP_E_NOT_FOUND, "/nowhere/at/all");
}

/* The last row of the table: no generation_config, fp32 weights, no format metadata, unified names. */
static void test_unusual_but_fine(void **state)
{
    (void)state;
    const char *directory = copy_of("drafter_init_dense");
    assert_int_equal(remove(test_path("%s/generation_config.json", directory)), 0);
    accepted(directory, 1);

    const char *weights = test_path("%s/model.safetensors", directory);
    test_tensors file = test_tensors_open(weights);
    for (size_t i = 0; i < file.count; i++) test_tensors_convert(&file, file.items[i].name, MTP_F32);
    const char *plain = test_path("%s.plain", weights);
    assert_ok(mtp_safetensors_write(plain, NULL, 0, file.items, file.count));
    test_tensors_close(&file);
    assert_int_equal(rename(plain, weights), 0);
    accepted(directory, 1);

    const char *config = test_path("%s/config.json", directory);
    test_json_set(config, "model_type", "\"gemma4_unified_assistant\"");
    test_json_set(config, "architectures", "[\"Gemma4UnifiedAssistantForCausalLM\"]");
    test_json_set(config, "text_config.model_type", "\"gemma4_unified_text\"");
    accepted(directory, 1);
}

/* ---- altered tensors ------------------------------------------------------------------------------------------ */

typedef void tensor_edit(test_tensors *file);

static void extra_lm_head(test_tensors *file)
{
    test_tensors_put(file, "lm_head.weight", MTP_BF16, 2, (int64_t[]){2048, 64});
}
static void nested_pre_projection(test_tensors *file)
{
    test_tensors_rename(file, "pre_projection.weight", "model.pre_projection.weight");
}
static void nested_post_projection(test_tensors *file)
{
    test_tensors_rename(file, "post_projection.weight", "model.post_projection.weight");
}
static void no_layer_scalar(test_tensors *file)
{
    test_tensors_drop(file, "model.layers.1.layer_scalar");
}
static void flat_layer_scalar(test_tensors *file)
{
    *(uint16_t *)test_tensors_put(file, "model.layers.1.layer_scalar", MTP_BF16, 0, NULL) = 0x3f80;
}
static void ordering_int32(test_tensors *file)
{
    int32_t *ids = test_tensors_put(file, "masked_embedding.token_ordering", MTP_I32, 1, (int64_t[]){2048});
    for (int32_t i = 0; i < 2048; i++) ids[i] = i;
}
static void ordering_bf16(test_tensors *file)
{
    test_tensors_put(file, "masked_embedding.token_ordering", MTP_BF16, 1, (int64_t[]){2048});
}
static void ordering_twice(test_tensors *file)
{
    int64_t *ids = test_tensors_put(file, "masked_embedding.token_ordering", MTP_I64, 1, (int64_t[]){2048});
    for (int64_t i = 0; i < 2048; i++) ids[i] = i == 9 ? 8 : i;
}
static void no_centroids(test_tensors *file)
{
    test_tensors_drop(file, "masked_embedding.centroids.weight");
}
static void no_ordering(test_tensors *file)
{
    test_tensors_drop(file, "masked_embedding.token_ordering");
}
static void extra_k_proj(test_tensors *file)
{
    test_tensors_put(file, "model.layers.0.self_attn.k_proj.weight", MTP_BF16, 2, (int64_t[]){64, 64});
}
static void extra_unknown(test_tensors *file)
{
    test_tensors_put(file, "optimizer.step", MTP_F32, 1, (int64_t[]){1});
}
static void no_norm(test_tensors *file)
{
    test_tensors_drop(file, "model.norm.weight");
}
static void wrong_shape(test_tensors *file)
{
    test_tensors_put(file, "model.embed_tokens.weight", MTP_BF16, 2, (int64_t[]){2048, 128});
}
static void integer_weight(test_tensors *file)
{
    test_tensors_put(file, "pre_projection.weight", MTP_I8, 2, (int64_t[]){64, 256});
}
static void nan_weight(test_tensors *file)
{
    uint16_t *values = test_tensors_put(file, "post_projection.weight", MTP_BF16, 2, (int64_t[]){128, 64});
    values[8191] = 0xffc0;
}

static void test_tensors_refused(void **state)
{
    (void)state;
    static const struct {
        tensor_edit *edit;
        const char *where, *engine;
    } rows[] = {
        {extra_lm_head, "model.safetensors: lm_head.weight", "llama.cpp"},
        {nested_pre_projection, "model.safetensors: model.pre_projection.weight", "llama.cpp"},
        {nested_post_projection, "model.safetensors: model.post_projection.weight", "llama.cpp"},
        {no_layer_scalar, "model.safetensors: model.layers.1.layer_scalar", "vLLM (silently"},
        {flat_layer_scalar, "model.safetensors: model.layers.1.layer_scalar", "transformers, vLLM"},
        {ordering_int32, "masked_embedding.token_ordering", "vLLM (silently"},
        {ordering_bf16, "masked_embedding.token_ordering", "vLLM (silently"},
        {ordering_twice, "masked_embedding.token_ordering", "vLLM"},
        {no_centroids, "masked_embedding.centroids.weight", "transformers, vLLM"},
        {no_ordering, "masked_embedding.token_ordering", "transformers, vLLM"},
        {extra_k_proj, "model.layers.0.self_attn.k_proj.weight", "vLLM, llama.cpp"},
        {extra_unknown, "optimizer.step", "vLLM"},
        {no_norm, "model.norm.weight", "all"},
        {wrong_shape, "model.embed_tokens.weight", "all"},
        {integer_weight, "pre_projection.weight", "all"},
        {nan_weight, "post_projection.weight", "all"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *directory = copy_of("drafter_init"), *path = test_path("%s/model.safetensors", directory);
        test_tensors file = test_tensors_open(path);
        rows[i].edit(&file);
        test_tensors_write(&file, path);
        test_tensors_close(&file);
        refused(directory, rows[i].where, rows[i].engine);
    }
}

/* ---- altered config.json -------------------------------------------------------------------------------------- */

static void test_config_refused(void **state)
{
    (void)state;
    static const struct {
        const char *key, *value, *where, *engine;
    } rows[] = {
        {"use_ordered_embeddings", "false", "masked_embedding.centroids.weight", "vLLM"},
        {"text_config.hidden_size_per_layer_input", NULL, "hidden_size_per_layer_input",
         "transformers, vLLM, llama.cpp"},
        {"text_config.vocab_size_per_layer_input", NULL, "vocab_size_per_layer_input", "transformers, vLLM, llama.cpp"},
        {"text_config.hidden_size_per_layer_input", "256", "hidden_size_per_layer_input", "transformers"},
        {"text_config.vocab_size_per_layer_input", "2048", "vocab_size_per_layer_input", "transformers"},
        {"tie_word_embeddings", "false", "config.json: tie_word_embeddings", "vLLM (silently"},
        {"text_config.tie_word_embeddings", "false", "config.json: text_config.tie_word_embeddings", "vLLM (silently"},
        {"text_config.num_key_value_heads", "1", "config.json", "llama.cpp aborts at run"},
        {"text_config.num_global_key_value_heads", "2", "config.json", "llama.cpp aborts at run"},
        {"architectures", "[\"Gemma4MTPModel\"]", "config.json: architectures", "llama.cpp"},
        {"architectures", "[\"Gemma4UnifiedAssistantForCausalLM\"]", "config.json: architectures", "llama.cpp"},
        {"architectures", NULL, "config.json: architectures", "llama.cpp"},
        {"text_config.global_head_dim", NULL, "config.json", "all"},
        {"text_config.num_kv_shared_layers", "0", "num_kv_shared_layers", "transformers"},
        {"text_config.enable_moe_block", "true", "config.json", "all"},
        {"text_config.final_logit_softcapping", "30.0", "config.json", "all"},
        {"text_config.vocab_size", "4096", "config.json", "all"},
        {"text_config.sliding_window", "32", "config.json", "all"},
        {"backbone_hidden_size", "256", "config.json", "all"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *directory = copy_of("drafter_init");
        test_json_set(test_path("%s/config.json", directory), rows[i].key, rows[i].value);
        refused(directory, rows[i].where, rows[i].engine);
    }
    /* the newer spelling of the geometry alone */
    const char *directory = copy_of("drafter_init"), *config = test_path("%s/config.json", directory);
    test_json_set(config, "text_config.global_head_dim", NULL);
    test_json_set(config, "text_config.num_global_key_value_heads", NULL);
    test_json_set(config, "text_config.per_layer_config", "{\"3\": {\"head_dim\": 64, \"num_key_value_heads\": 1}}");
    refused(directory, "text_config.global_head_dim", "mlx-vlm");
    refused(directory, "text_config.num_global_key_value_heads", "mlx-vlm");
}

/* What lies in the geometry cannot be put right, so it is said but not refused. */
static void test_warnings(void **state)
{
    (void)state;
    const char *directory = copy_of("drafter_init"), *config = test_path("%s/config.json", directory);
    test_json_set(config, "text_config.rope_parameters.full_attention",
                  "{\"rope_type\": \"default\", \"rope_theta\": 1000000.0}");
    accepted(directory, 1);
    assert_int_equal(remove(test_path("%s/tokenizer_config.json", directory)), 0);
    accepted(directory, 2);
}

/* ---- altered files -------------------------------------------------------------------------------------------- */

static bool has_fatal(const char *directory, const char *where)
{
    mtp_export_report report = {0};
    bool found = false;
    assert_fails(mtp_validate_export(directory, NULL, &report), MTP_E_DATA, ""); /* its tensors have other shapes */
    for (int64_t i = 0; i < report.num_findings; i++)
        found = found || (report.findings[i].fatal && strcmp(report.findings[i].where, where) == 0);
    mtp_export_report_free(&report);
    return found;
}

/* Without a verifier, the hidden size of a published one tells how many K/V heads there must be. */
static void test_heads_of_published_verifiers(void **state)
{
    (void)state;
    static const char *const where = "config.json: text_config.num_key_value_heads";
    const char *directory = copy_of("drafter_init"), *config = test_path("%s/config.json", directory);
    test_json_set(config, "backbone_hidden_size", "2560"); /* E4B: two heads in both types */
    test_json_set(config, "text_config.num_global_key_value_heads", "null");
    test_json_set(config, "text_config.num_key_value_heads", "2");
    assert_false(has_fatal(directory, where));
    test_json_set(config, "text_config.num_key_value_heads", "1");
    assert_true(has_fatal(directory, where));
}

static void test_files_refused(void **state)
{
    (void)state;
    static const char *const needed[][2] = {
        {"tokenizer.json", "llama.cpp"}, {"config.json", "all"}, {"model.safetensors", "all"}};
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        const char *directory = copy_of("drafter_init"), *path = test_path("%s/%s", directory, needed[i][0]);
        assert_int_equal(remove(path), 0);
        refused(directory, needed[i][0], needed[i][1]);
        test_write(path, "{\"a\": ", 6);
        refused(directory, needed[i][0], needed[i][1]);
    }
    const char *directory = copy_of("drafter_init");
    test_copy(test_path("%s/model.safetensors", directory), test_path("%s/extra.safetensors", directory));
    refused(directory, "extra.safetensors", "loaders");
    directory = copy_of("drafter_init");
    test_write(test_path("%s/model.safetensors.index.json", directory), "{}", 2);
    refused(directory, "model.safetensors.index.json", "loaders");
}

/* Several faults are told at once. */
static void test_all_at_once(void **state)
{
    (void)state;
    const char *directory = copy_of("drafter_init"), *path = test_path("%s/model.safetensors", directory);
    test_tensors file = test_tensors_open(path);
    no_layer_scalar(&file);
    extra_lm_head(&file);
    test_tensors_write(&file, path);
    test_tensors_close(&file);
    test_json_set(test_path("%s/config.json", directory), "architectures", "[\"Gemma4MTPModel\"]");
    assert_int_equal(remove(test_path("%s/tokenizer.json", directory)), 0);
    mtp_export_report report;
    assert_fails(mtp_validate_export(directory, VERIFIER, &report), MTP_E_DATA, "lm_head.weight");
    assert_int_equal(report.num_fatal, 4);
    mtp_export_report_free(&report);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good),
        cmocka_unit_test(test_unusual_but_fine),
        cmocka_unit_test(test_tensors_refused),
        cmocka_unit_test(test_config_refused),
        cmocka_unit_test(test_warnings),
        cmocka_unit_test(test_heads_of_published_verifiers),
        cmocka_unit_test(test_files_refused),
        cmocka_unit_test(test_all_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
