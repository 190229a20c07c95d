/* Protects: `mtp inspect` explains, `--strict` refuses a faulty export with exit code 3 and all reasons, and `--json`
 * is one JSON object. */
#include "edit.h"

#include <jansson.h>

#define SAMPLE MTP_TEST_DATA "/sample/"
#define VERIFIER SAMPLE "verifier"

static json_t *json_of(test_run run, int exit_code)
{
    json_t *json = json_loads(run.out, JSON_REJECT_DUPLICATES, NULL);
    if (!json || run.exit_code != exit_code) fail_msg("exit %d: %s%s", run.exit_code, run.out, run.err);
    test_run_free(&run);
    return json;
}

static void test_explains(void **state)
{
    (void)state;
    test_expect(test_mtp("inspect", SAMPLE "drafter_init"), 0, "a drafter", "");
    test_expect(test_mtp("inspect", VERIFIER), 0, "a verifier", "");
    test_expect(test_mtp("inspect", SAMPLE "eval/sample_0100.safetensors", "--verifier", VERIFIER), 0,
                "a stored sample", "");
    test_expect(test_mtp("inspect", SAMPLE "raw"), 0, "with_sidecar_line      6\n", "");
    json_t *json = json_of(test_mtp("inspect", "--json", SAMPLE "train"), 0);
    assert_string_equal(json_string_value(json_object_get(json, "kind")), "samples");
    json_decref(json);
    const char *directory = test_dir();
    test_expect(test_mtp("inspect", directory), 3, "", "no directory that mtp knows");
    test_expect(test_mtp("inspect", test_path("%s/no", directory)), 3, "", "no such file");
    test_expect(test_mtp("inspect", "/dev/null"), 3, "", "/dev/null");
    test_expect(test_mtp("inspect"), 2, "", "PATH");
    test_expect(test_mtp("inspect", SAMPLE "train", SAMPLE "eval"), 2, "", "");
}

/* Weights that are no numbers are said; what is not looked at is said too. */
static void test_values(void **state)
{
    (void)state;
    const char *directory = test_path("%s/drafter", test_dir()),
               *weights = test_path("%s/model.safetensors", directory);
    test_expect(test_mtp("inspect", SAMPLE "drafter_init"), 0, "nonfinite              none in ", "");
    test_expect(test_mtp("inspect", VERIFIER), 0, "nonfinite              not looked for\n", "");
    test_copy(SAMPLE "drafter_init", directory);
    test_tensors file = test_tensors_open(weights);
    uint16_t *norm = test_tensors_put(&file, "model.norm.weight", MTP_BF16, 1, (int64_t[]){64});
    norm[5] = 0x7fc0;
    test_tensors_write(&file, weights);
    test_tensors_close(&file);
    test_expect(test_mtp("inspect", directory), 3,
                "problem: model.norm.weight holds NaN or infinity, first at element 5\n", "");
    test_expect(test_mtp("inspect", weights), 3, "problem: model.norm.weight holds NaN or infinity", "");
}

static void test_strict(void **state)
{
    (void)state;
    const char *directory = test_path("%s/export", test_dir()), *weights = test_path("%s/model.safetensors", directory);
    test_expect(test_mtp("inspect", "--strict", SAMPLE "drafter_init", "--verifier", VERIFIER), 0,
                "ready for every engine", "");
    test_expect(test_mtp("inspect", "--strict", SAMPLE "drafter_init"), 0, "note: ", "");
    test_copy(SAMPLE "drafter_init", directory);
    test_tensors file = test_tensors_open(weights);
    test_tensors_drop(&file, "model.layers.0.layer_scalar");
    test_tensors_put(&file, "lm_head.weight", MTP_BF16, 2, (int64_t[]){2048, 64});
    test_tensors_write(&file, weights);
    test_tensors_close(&file);
    test_expect(test_mtp("inspect", "--strict", directory, "--verifier", VERIFIER), 3,
                "refused: model.safetensors: model.layers.0.layer_scalar is missing [vLLM (silently takes 1.0)", "");
    test_expect(test_mtp("inspect", "--strict", directory, "--verifier", VERIFIER), 3,
                "refused: model.safetensors: lm_head.weight", "");
    test_expect(test_mtp("inspect", directory), 3, "problem: ", "");
    json_t *json = json_of(test_mtp("inspect", "--strict", "--json", directory, "--verifier", VERIFIER), 3);
    assert_true(json_is_false(json_object_get(json, "ready")));
    assert_int_equal(json_array_size(json_object_get(json, "findings")), 2);
    json_decref(json);
    test_expect(test_mtp("inspect", "--strict", test_path("%s/no", directory)), 3, "", "no such directory");
}

/* A reason stands once, and of a directory of another kind only what it is. */
static void test_strict_other_kinds(void **state)
{
    (void)state;
    test_expect(test_mtp("inspect", "--strict", VERIFIER), 3,
                "refused: config.json model_type: \"gemma4_text\" is not a drafter", "");
    test_run run = test_mtp("inspect", "--strict", VERIFIER);
    assert_null(strstr(run.out, "per_layer_input"));
    test_run_free(&run);
    test_expect(test_mtp("inspect", "--strict", test_dir()), 3, "refused: config.json cannot open: ", "");
    test_expect(test_mtp("inspect", "--strict", test_dir()), 3, "refused: model.safetensors cannot open: ", "");
}

/* The settings of a run stand one a line, as a configuration has them. */
static void test_run_is_readable(void **state)
{
    (void)state;
    const char *directory = test_dir(), *run_dir = test_path("%s/run", directory);
    const char *data = SAMPLE "train/sample_0000.safetensors";
    const char *config = test_path("%s/run.toml", directory);
    const char *text = test_path("model.drafter = \"%s\"\nmodel.verifier = \"%s\"\ndata.train_data = [\"%s\"]\n"
                                 "train.max_steps = 1\noutput.output_dir = \"%s\"\n",
                                 SAMPLE "drafter_init", VERIFIER, data, run_dir);
    test_write(config, text, strlen(text));
    test_expect(test_mtp("train", config), 0, "", "");
    test_run run = test_mtp("inspect", run_dir);
    assert_int_equal(run.exit_code, 0);
    assert_non_null(strstr(run.out, "\n    train.max_steps = 1\n"));
    for (char *line = strtok(run.out, "\n"); line; line = strtok(NULL, "\n")) assert_true(strlen(line) < 512);
    test_run_free(&run);
    json_t *json = json_of(test_mtp("inspect", "--json", run_dir), 0);
    const json_t *settings = json_object_get(json_object_get(json, "facts"), "settings");
    assert_string_equal(json_string_value(json_object_get(settings, "train.max_steps")), "1");
    json_decref(json);
    test_expect(test_mtp("eval", "--model", run_dir, "--verifier", VERIFIER, "--data", data), 3, "", "is no drafter: ");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_explains), cmocka_unit_test(test_values),
                                       cmocka_unit_test(test_strict), cmocka_unit_test(test_strict_other_kinds),
                                       cmocka_unit_test(test_run_is_readable)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
