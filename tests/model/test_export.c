/* Protects: an export is byte for byte its source when nothing was trained, has the one form that every engine reads
 * whatever spelling the source has, appears whole or not at all, and never costs a user a directory. */
#include "edit.h"

#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "model/export.h"
#include "mtp/export.h"
#include "run/checkpoint.h"
#include "run/trained.h"

#define SAMPLE MTP_TEST_DATA "/sample/"
#define VERIFIER SAMPLE "verifier"

static mtp_context *context;

static int setup(void **state)
{
    (void)state;
    const mtp_context_options options = {.num_threads = 1};
    return mtp_context_create(&options, &context) == MTP_OK ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    mtp_context_free(context);
    return 0;
}

static size_t count_files(const char *directory)
{
    mtp__name_list list;
    assert_ok(mtp__dir_list(directory, MTP__LIST_FILES, NULL, &list));
    const size_t count = list.count;
    mtp__name_list_free(&list);
    return count;
}

static size_t count_directories(const char *directory)
{
    mtp__name_list list;
    assert_ok(mtp__dir_list(directory, MTP__LIST_DIRECTORIES, NULL, &list));
    const size_t count = list.count;
    mtp__name_list_free(&list);
    return count;
}

static mtp_status export_to(const char *source, const char *output, bool force)
{
    mtp_export_result result;
    const mtp_export_options options = {.source = source, .output = output, .verifier = VERIFIER, .force = force};
    const mtp_status status = mtp_export(context, &options, &result);
    if (status == MTP_OK) mtp_export_result_free(&result);
    return status;
}

static void test_identical(void **state)
{
    (void)state;
    static const char *const names[] = {"drafter_init", "drafter_init_dense", "drafter_reference"};
    static const char *const files[] = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                                        "tokenizer_config.json"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *directory = test_dir(), *output = test_path("%s/deep/er/out", directory);
        mtp_export_result result;
        const mtp_export_options options = {
            .source = test_path(SAMPLE "%s", names[i]), .output = test_path("%s/", output), .verifier = VERIFIER};
        assert_ok(mtp_export(context, &options, &result));
        for (size_t j = 0; j < sizeof files / sizeof *files; j++)
            assert_true(
                test_same_file(test_path("%s/%s", output, files[j]), test_path(SAMPLE "%s/%s", names[i], files[j])));
        assert_int_equal(count_files(output), 5);
        assert_int_equal(count_directories(test_path("%s/deep/er", directory)), 1);
        assert_int_equal(result.num_speculative_tokens, 3);
        assert_int_equal(result.report.num_findings, 0);
        char verifier[4096], expected[9000];
        assert_non_null(realpath(VERIFIER, verifier));
        snprintf(expected, sizeof expected,
                 "vllm serve %s --speculative-config '{\"method\": \"mtp\", \"model\": \"%s\", "
                 "\"num_speculative_tokens\": 3}'",
                 verifier, output);
        assert_string_equal(result.serve_line, expected);
        mtp_export_result_free(&result);
    }
}

/* The newest spelling, fp32 weights and missing keys come out in the common form, and other keys stay. */
static void test_normalised(void **state)
{
    (void)state;
    const char *source = test_model_copy("drafter_init"), *config = test_path("%s/config.json", source);
    const char *weights = test_path("%s/model.safetensors", source), *output = test_path("%s/../out", source);
    test_json_set(config, "text_config.global_head_dim", NULL);
    test_json_set(config, "text_config.num_global_key_value_heads", NULL);
    test_json_set(config, "text_config.per_layer_config", "{\"3\": {\"head_dim\": 64, \"num_key_value_heads\": 1}}");
    test_json_set(config, "text_config.hidden_size_per_layer_input", NULL);
    test_json_set(config, "text_config.vocab_size_per_layer_input", NULL);
    test_json_set(config, "text_config.num_kv_shared_layers", "0");
    test_json_set(config, "text_config.dtype", "\"float32\"");
    test_json_set(config, "dtype", "\"float32\"");
    test_json_set(config, "architectures", "[\"Gemma4MTPModel\"]");
    test_json_set(config, "tie_word_embeddings", NULL);
    test_json_set(config, "boi_token_id", "255999");
    test_tensors file = test_tensors_open(weights);
    for (size_t i = 0; i < file.count; i++)
        if (file.items[i].dtype == MTP_BF16) test_tensors_convert(&file, file.items[i].name, MTP_F32);
    test_tensors_write(&file, weights);
    test_tensors_close(&file);
    assert_ok(export_to(source, output, false));
    assert_true(test_same_file(test_path("%s/model.safetensors", output), SAMPLE "drafter_init/model.safetensors"));
    static const char *const want[][2] = {
        {"text_config.global_head_dim", "64"},
        {"text_config.num_global_key_value_heads", "1"},
        {"text_config.head_dim", "32"},
        {"text_config.num_key_value_heads", "2"},
        {"text_config.per_layer_config", NULL},
        {"text_config.hidden_size_per_layer_input", "0"},
        {"text_config.vocab_size_per_layer_input", "0"},
        {"text_config.num_kv_shared_layers", "4"},
        {"text_config.dtype", "\"bfloat16\""},
        {"dtype", "\"bfloat16\""},
        {"architectures", "[\"Gemma4AssistantForCausalLM\"]"},
        {"tie_word_embeddings", "true"},
        {"boi_token_id", "255999"},
        {"text_config.pad_token_id", "0"},
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        char *got = test_json_get(test_path("%s/config.json", output), want[i][0]);
        if ((got == NULL) != (want[i][1] == NULL) || (got && strcmp(got, want[i][1]) != 0))
            fail_msg("%s is %s", want[i][0], got ? got : "absent");
        free(got);
    }
    char *text = test_read(test_path("%s/config.json", output), NULL);
    assert_non_null(strstr(text, "\"model_type\": \"gemma4_assistant\""));
    free(text);
    /* once in that form, it stays as it is */
    const char *again = test_path("%s/../again", source);
    assert_ok(export_to(output, again, false));
    assert_true(test_same_file(test_path("%s/config.json", output), test_path("%s/config.json", again)));
}

/* A geometry that the old keys cannot say keeps per_layer_config; the validator knows that not all readers follow. */
static void test_config_not_representable(void **state)
{
    (void)state;
    const char *source = test_model_copy("drafter_init"), *path = test_path("%s/config.json", source);
    test_json_set(path, "text_config.attention_k_eq_v", "false");
    test_json_set(path, "text_config.global_head_dim", NULL);
    test_json_set(path, "text_config.num_global_key_value_heads", NULL);
    test_json_set(path, "text_config.per_layer_config", "{\"3\": {\"head_dim\": 64, \"num_key_value_heads\": 1}}");
    mtp_drafter_config config, again;
    json_t *json;
    assert_ok(mtp_drafter_config_read(source, &config));
    assert_ok(mtp__json_read(path, &json));
    assert_ok(mtp__export_config(json, &config));
    assert_non_null(json_object_get(json_object_get(json, "text_config"), "per_layer_config"));
    assert_ok(mtp__json_write(path, json, 0));
    assert_ok(mtp_drafter_config_read(source, &again));
    assert_int_equal(again.geometry[MTP_LAYER_FULL].num_kv_heads, 1);
    assert_int_equal(again.geometry[MTP_LAYER_FULL].head_dim, 64);
    mtp_drafter_config_free(&config);
    mtp_drafter_config_free(&again);
    json_decref(json);
}

static void test_other_files(void **state)
{
    (void)state;
    const char *source = test_model_copy("drafter_init"), *output = test_path("%s/../out", source);
    test_write(test_path("%s/chat_template.jinja", source), "{{ x }}", 7);
    test_write(test_path("%s/README.md", source), "notes", 5);
    assert_ok(export_to(source, output, false));
    assert_true(
        test_same_file(test_path("%s/chat_template.jinja", output), test_path("%s/chat_template.jinja", source)));
    assert_false(mtp__file_exists(test_path("%s/README.md", output)));

    /* no tokenizer: the verifier's; no generation_config: written with the K asked for */
    source = test_model_copy("drafter_init_dense");
    output = test_path("%s/../out", source);
    assert_int_equal(remove(test_path("%s/tokenizer.json", source)), 0);
    assert_int_equal(remove(test_path("%s/tokenizer_config.json", source)), 0);
    assert_int_equal(remove(test_path("%s/generation_config.json", source)), 0);
    assert_fails(export_to(source, output, false), MTP_E_CONFIG, "--num-speculative-tokens");
    mtp_export_options options = {.source = source, .output = output, .num_speculative_tokens = 5};
    mtp_export_result result;
    assert_fails(mtp_export(context, &options, &result), MTP_E_NOT_FOUND, "tokenizer.json");
    assert_false(mtp__path_exists(output));
    options.verifier = VERIFIER;
    assert_ok(mtp_export(context, &options, &result));
    assert_non_null(strstr(result.serve_line, "\"num_speculative_tokens\": 5}"));
    assert_true(test_same_file(test_path("%s/tokenizer.json", output), VERIFIER "/tokenizer.json"));
    static const char *const want[][2] = {
        {"is_assistant", "true"}, {"num_assistant_tokens", "5"}, {"num_assistant_tokens_schedule", "\"constant\""}};
    for (size_t i = 0; i < 3; i++) {
        char *got = test_json_get(test_path("%s/generation_config.json", output), want[i][0]);
        assert_string_equal(got, want[i][1]);
        free(got);
    }
    mtp_export_result_free(&result);
}

static void test_overwriting(void **state)
{
    (void)state;
    const char *directory = test_dir(), *output = test_path("%s/out", directory);
    const char *weights = test_path("%s/model.safetensors", output);
    assert_int_equal(mkdir(output, 0777), 0);
    assert_ok(export_to(SAMPLE "drafter_init", output, false)); /* an empty directory holds nothing to lose */
    assert_fails(export_to(SAMPLE "drafter_reference", output, false), MTP_E_EXISTS, "--force");
    assert_true(test_same_file(weights, SAMPLE "drafter_init/model.safetensors"));
    assert_ok(export_to(SAMPLE "drafter_reference", output, true));
    assert_true(test_same_file(weights, SAMPLE "drafter_reference/model.safetensors"));
    assert_int_equal(count_directories(directory), 1);
    assert_fails(export_to(output, output, true), MTP_E_CONFIG, "is the source");

    const char *other = test_path("%s/thesis", directory);
    assert_int_equal(mkdir(other, 0777), 0);
    test_write(test_path("%s/chapter1.tex", other), "x", 1);
    assert_fails(export_to(SAMPLE "drafter_init", other, true), MTP_E_EXISTS, "not a drafter");
    assert_true(mtp__file_exists(test_path("%s/chapter1.tex", other)));
    assert_fails(export_to(SAMPLE "drafter_init", test_path("%s/chapter1.tex", other), true), MTP_E_EXISTS,
                 "not a directory");
    assert_fails(export_to(SAMPLE "drafter_init", test_path("%s/.", directory), true), MTP_E_CONFIG,
                 "name a directory");
    assert_fails(export_to(SAMPLE "drafter_init", test_path("%s/chapter1.tex/out", other), false), MTP_E_IO,
                 "chapter1.tex");
    assert_fails(export_to(test_path("%s/nothing", directory), output, true), MTP_E_NOT_FOUND, "nothing");
}

/* A drafter that is not the verifier's, or whose weights diverged: refused, and nothing is left behind. */
static void test_refused_whole(void **state)
{
    (void)state;
    const char *source = test_model_copy("drafter_init"), *directory = test_dir(),
               *output = test_path("%s/out", directory);
    test_json_set(test_path("%s/config.json", source), "text_config.num_key_value_heads", "4");
    assert_fails(export_to(source, output, false), MTP_E_DATA, "num_key_value_heads");
    assert_int_equal(count_directories(directory) + count_files(directory), 0);

    mtp_drafter *drafter;
    mtp_export_result result;
    const float infinite = 1.0f / 0.0f;
    const mtp__export_request request = {.source = SAMPLE "drafter_init", .output = output, .verifier = VERIFIER};
    assert_ok(mtp_drafter_load(context, SAMPLE "drafter_init", &drafter));
    assert_ok(context->ops->upload(context->device, drafter->embed->value, &infinite, sizeof infinite));
    assert_fails(mtp__export_drafter(drafter, &request, &result), MTP_E_DATA, "model.embed_tokens.weight holds inf");
    assert_int_equal(count_directories(directory) + count_files(directory), 0);
    mtp_drafter_free(drafter);
}

static void test_quoting(void **state)
{
    (void)state;
    const char *directory = test_dir(), *output = test_path("%s/it's \"mine\"", directory);
    mtp_export_result result;
    const mtp_export_options options = {.source = SAMPLE "drafter_init", .output = output};
    assert_ok(mtp_export(context, &options, &result));
    const char *expected = test_path("vllm serve VERIFIER --speculative-config '{\"method\": \"mtp\", \"model\": "
                                     "\"%s/it'\\''s \\\"mine\\\"\", \"num_speculative_tokens\": 3}'",
                                     directory);
    assert_string_equal(result.serve_line, expected);
    mtp_export_result_free(&result);
}

/* ---- checkpoints and runs ------------------------------------------------------------------------------------- */

/* A run at `directory` with one checkpoint: drafter_init with one weight changed. */
static void make_run(const char *directory, const char *drafter_directory)
{
    mtp_drafter *drafter;
    mtp__optimizer *optimizer;
    const float changed = 0.5f;
    assert_ok(mtp_drafter_load(context, drafter_directory, &drafter));
    assert_ok(mtp_drafter_freeze(drafter, "[!p]*")); /* only the projections are trained */
    assert_ok(mtp__drafter_alloc_grads(drafter));
    mtp__optim_tensor tensors[2];
    mtp__param *const params[2] = {drafter->post_projection, drafter->pre_projection};
    for (int i = 0; i < 2; i++) tensors[i] = mtp__trained_tensor(params[i]);
    const mtp_adamw_config config = {.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8};
    assert_ok(mtp__optimizer_create(context, tensors, 2, &config, NULL, &optimizer));
    assert_ok(mtp__param_write(drafter, drafter->pre_projection, 7, &changed, 1));
    mtp__manifest *manifest = mtp__manifest_create();
    manifest->step = 12;
    manifest->total_steps = 12;
    manifest->drafter = strdup(drafter_directory);
    manifest->best_step = -1;
    assert_ok(mtp__manifest_add_setting(manifest, "loss.num_speculative_steps", "4"));
    assert_ok(mtp__manifest_add_setting(manifest, "model.verifier", "\"" VERIFIER "\""));
    assert_ok(mtp__dir_create(test_path("%s/checkpoints", directory)));
    test_write(test_path("%s/run.json", directory), "{}", 2);
    assert_ok(mtp__checkpoint_save(directory, manifest, drafter, optimizer));
    mtp__manifest_free(manifest);
    mtp__optimizer_free(optimizer);
    mtp_drafter_free(drafter);
}

static void test_runs(void **state)
{
    (void)state;
    const char *source = test_model_copy("drafter_init"), *directory = test_path("%s/run", test_dir());
    assert_int_equal(remove(test_path("%s/generation_config.json", source)), 0);
    make_run(directory, source);
    const char *const sources[] = {directory, test_path("%s/checkpoints/step-00000012", directory)};
    for (int i = 0; i < 2; i++) {
        const char *output = test_path("%s/out", test_dir());
        mtp_export_result result;
        const mtp_export_options options = {.source = sources[i], .output = output};
        assert_ok(mtp_export(context, &options, &result));
        assert_int_equal(result.num_speculative_tokens, 4); /* the K it was trained with */
        assert_non_null(strstr(result.serve_line, "/sample/verifier "));
        assert_int_equal(result.report.num_findings, 0); /* so it was compared with the verifier of the run */
        mtp_export_result_free(&result);
        assert_true(test_same_file(test_path("%s/config.json", output), SAMPLE "drafter_init/config.json"));
        test_tensors got = test_tensors_open(test_path("%s/model.safetensors", output));
        test_tensors before = test_tensors_open(SAMPLE "drafter_init/model.safetensors");
        for (size_t j = 0; j < before.count; j++) {
            const mtp_safetensors_source *a = test_tensors_find(&before, got.items[j].name), *b = &got.items[j];
            const size_t size = mtp_safetensors_find(before.file, a->name)->size;
            const bool same = memcmp(a->data, b->data, size) == 0;
            assert_int_equal(same, strcmp(a->name, "pre_projection.weight") != 0);
        }
        assert_int_equal(((const uint16_t *)test_tensors_find(&got, "pre_projection.weight")->data)[7], 0x3f00);
        test_tensors_close(&got);
        test_tensors_close(&before);
    }
    assert_int_equal(rename(source, test_path("%s.gone", source)), 0);
    assert_fails(export_to(directory, test_path("%s/out", test_dir()), false), MTP_E_NOT_FOUND,
                 "the drafter that the run started from");
    assert_fails(export_to(VERIFIER "/..", test_path("%s/out", test_dir()), false), MTP_E_NOT_FOUND, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_identical),
        cmocka_unit_test(test_normalised),
        cmocka_unit_test(test_config_not_representable),
        cmocka_unit_test(test_other_files),
        cmocka_unit_test(test_overwriting),
        cmocka_unit_test(test_refused_whole),
        cmocka_unit_test(test_quoting),
        cmocka_unit_test(test_runs),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
