/* Protects: mtp_inspect recognises every kind of path, says what is in it and what is wrong, for people and as JSON. */
#include "edit.h"

#include <jansson.h>

#include "base/context.h"
#include "mtp/inspect.h"
#include "run/checkpoint.h"
#include "run/trained.h"

#define SAMPLE MTP_TEST_DATA "/sample/"
#define VERIFIER SAMPLE "verifier"

static mtp_inspection inspect(const char *path, const char *verifier, mtp_inspect_kind kind, int64_t problems)
{
    mtp_inspection inspection;
    assert_ok(mtp_inspect(path, verifier, &inspection));
    if (inspection.num_problems != problems) fail_msg("%d problems: %s", (int)inspection.num_problems, inspection.text);
    assert_int_equal(inspection.kind, kind);
    json_t *json = json_loads(inspection.json, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(json);
    assert_string_equal(json_string_value(json_object_get(json, "path")), path);
    assert_int_equal(json_array_size(json_object_get(json, "problems")), problems);
    assert_true(json_object_size(json_object_get(json, "facts")) > 0 || problems > 0);
    json_decref(json);
    assert_null(strchr(inspection.json, '\n'));
    return inspection;
}

static void says(mtp_inspection *inspection, const char *const *texts)
{
    for (; *texts; texts++)
        if (!strstr(inspection->text, *texts)) fail_msg("does not say \"%s\": %s", *texts, inspection->text);
    mtp_inspection_free(inspection);
    assert_null(inspection->text);
}
#define SAYS(inspection, ...) says(&(inspection), (const char *const[]){__VA_ARGS__, NULL})

static void test_drafter(void **state)
{
    (void)state;
    mtp_inspection got = inspect(SAMPLE "drafter_init", VERIFIER, MTP_INSPECT_DRAFTER, 0);
    SAYS(got, ": a drafter", "gemma4_assistant", "hidden_size            64",
         "3 layers, head_dim 32, 4 query and 2 K/V heads",
         "1 layers, head_dim 64, 4 query and 1 K/V heads, rope proportional theta 1e+06",
         "the best 8 of 64 centroids of 32 tokens", "\"BF16\": 49", "\"I64\": 1", "{\"format\": \"pt\"}",
         "ready for every engine");
    got = inspect(SAMPLE "drafter_init_dense", NULL, MTP_INSPECT_DRAFTER, 0);
    SAYS(got, "dense", "not compared with a verifier");
    got = inspect(SAMPLE "drafter_init/model.safetensors", NULL, MTP_INSPECT_DRAFTER, 0);
    SAYS(got, "weights alone", "tensors                50");

    const char *directory = test_path("%s/d", test_dir()), *weights = test_path("%s/model.safetensors", directory);
    test_copy(SAMPLE "drafter_init", directory);
    test_tensors file = test_tensors_open(weights);
    test_tensors_drop(&file, "model.norm.weight");
    test_tensors_write(&file, weights);
    test_tensors_close(&file);
    test_json_set(test_path("%s/config.json", directory), "text_config.num_key_value_heads", "4");
    got = inspect(directory, VERIFIER, MTP_INSPECT_DRAFTER, 2);
    SAYS(got, "problem: ", "model.norm.weight is missing", "num_key_value_heads", "not ready: 2 things");
    test_json_set(test_path("%s/config.json", directory), "text_config.hidden_size", NULL);
    got = inspect(directory, NULL, MTP_INSPECT_DRAFTER, 1);
    SAYS(got, "problem: ", "hidden_size");
}

static void test_verifier(void **state)
{
    (void)state;
    mtp_inspection got = inspect(VERIFIER, NULL, MTP_INSPECT_VERIFIER, 0);
    SAYS(got, ": a verifier", "layer 3 of 6, 2 heads of 32", "layer 2 of 6, 1 heads of 64", "BF16 [2048, 128]",
         "final_logit_softcapping 30");
    const char *directory = test_path("%s/v", test_dir());
    test_copy(VERIFIER, directory);
    assert_int_equal(remove(test_path("%s/model.safetensors", directory)), 0);
    got = inspect(directory, NULL, MTP_INSPECT_VERIFIER, 1);
    SAYS(got, "problem: ");
}

static void test_samples(void **state)
{
    (void)state;
    mtp_inspection got = inspect(SAMPLE "train/sample_0000.safetensors", VERIFIER, MTP_INSPECT_SAMPLE, 0);
    SAYS(got, ": a stored sample", "tokens                 198", "BF16 [198, 128]", "hidden_norm            post",
         "supervised");
    got = inspect(SAMPLE "raw/sample_0000.safetensors", NULL, MTP_INSPECT_SAMPLE, 0);
    SAYS(got, "not labelled: set data.hidden_norm", "no loss_mask in the file");
    got = inspect(SAMPLE "raw", VERIFIER, MTP_INSPECT_SAMPLES, 0);
    SAYS(got, ": a directory of samples", "samples                6", "with_hidden_norm       0");

    const char *directory = test_dir(), *path = test_path("%s/s.safetensors", directory);
    test_tensors file = test_tensors_open(SAMPLE "train/sample_0000.safetensors");
    static const char *const kv[] = {"kv_last_local_k", "kv_last_local_v", "kv_last_global_k", "kv_last_global_v"};
    for (int i = 0; i < 4; i++) test_tensors_drop(&file, kv[i]);
    test_tensors_put(&file, "loss_mask", MTP_U8, 1, (int64_t[]){198});
    test_tensors_write(&file, path);
    test_tensors_close(&file);
    got = inspect(path, NULL, MTP_INSPECT_SAMPLE, 2);
    SAYS(got, "problem: no K/V", "supervises nothing");
    got = inspect(path, VERIFIER, MTP_INSPECT_SAMPLE, 3);
    SAYS(got, "kv_last_local");
    test_write(test_path("%s/broken.safetensors", directory), "12345678", 8);
    got = inspect(directory, NULL, MTP_INSPECT_SAMPLES, 1);
    SAYS(got, "broken.safetensors", "samples                1");
}

static void test_other_files(void **state)
{
    (void)state;
    mtp_inspection got = inspect(MTP_TEST_DATA "/goldens/adamw/steps.safetensors", NULL, MTP_INSPECT_SAFETENSORS, 0);
    SAYS(got, ": a safetensors file", "dtypes", "more");
    const char *directory = test_dir();
    mtp_inspection none;
    assert_fails(mtp_inspect(test_path("%s/nothing", directory), NULL, &none), MTP_E_NOT_FOUND, "nothing");
    assert_fails(mtp_inspect(directory, NULL, &none), MTP_E_FORMAT, "no directory that mtp knows");
    test_write(test_path("%s/x", directory), "garbage garbage garbage", 23);
    assert_fails(mtp_inspect(test_path("%s/x", directory), NULL, &none), MTP_E_FORMAT, "x");
    test_write(test_path("%s/config.json", directory), "{}", 2);
    assert_fails(mtp_inspect(directory, NULL, &none), MTP_E_NOT_FOUND, "model_type");
    assert_null(none.text);
}

/* A run with checkpoints: the newest is described, a damaged one is a problem. */
static void test_runs(void **state)
{
    (void)state;
    mtp_context *context;
    mtp_drafter *drafter;
    mtp__optimizer *optimizer;
    const mtp_context_options options = {.num_threads = 1};
    const char *run = test_path("%s/run", test_dir());
    assert_ok(mtp_context_create(&options, &context));
    assert_ok(mtp_drafter_load(context, SAMPLE "drafter_init_dense", &drafter));
    assert_ok(mtp__drafter_alloc_grads(drafter));
    mtp__optim_tensor *tensors = calloc((size_t)drafter->num_params, sizeof *tensors);
    const mtp_adamw_config adamw = {.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8};
    const int64_t count = mtp__trained_tensors(drafter, tensors);
    assert_ok(mtp__optimizer_create(context, tensors, count, &adamw, NULL, &optimizer));
    test_run made = test_execute((const char *const[]){"/bin/mkdir", "-p", test_path("%s/checkpoints", run), NULL});
    assert_int_equal(made.exit_code, 0);
    test_run_free(&made);
    test_write(test_path("%s/run.json", run), "{}", 2);
    mtp_inspection got = inspect(run, NULL, MTP_INSPECT_RUN, 1);
    SAYS(got, ": a run", "has no checkpoint yet");
    for (int64_t step = 10; step <= 20; step += 10) {
        mtp__manifest *manifest = mtp__manifest_create();
        manifest->step = step;
        manifest->total_steps = 20;
        manifest->drafter = strdup(SAMPLE "drafter_init_dense");
        manifest->best_step = -1;
        assert_ok(mtp__manifest_add_setting(manifest, "optimizer.learning_rate", "0.001"));
        assert_ok(mtp__checkpoint_save(run, manifest, drafter, optimizer));
        mtp__manifest_free(manifest);
    }
    got = inspect(run, NULL, MTP_INSPECT_RUN, 0);
    SAYS(got, "step                   20", "step-00000010", "optimizer.learning_rate", "drafter_init_dense");
    const char *newest = test_path("%s/checkpoints/step-00000020", run);
    got = inspect(newest, NULL, MTP_INSPECT_CHECKPOINT, 0);
    SAYS(got, ": a checkpoint", "shards                 1");
    const char *shard = test_path("%s/shard-00000-of-00001.safetensors", newest);
    size_t size;
    char *data = test_read(shard, &size);
    data[size - 1] ^= 1;
    test_write(shard, data, size);
    free(data);
    got = inspect(newest, NULL, MTP_INSPECT_CHECKPOINT, 1);
    SAYS(got, "problem: ", "shard-00000-of-00001.safetensors");
    got = inspect(run, NULL, MTP_INSPECT_RUN, 1);
    SAYS(got, "step                   10", "problem: ", "step-00000020");
    mtp__optimizer_free(optimizer);
    free(tensors);
    mtp_drafter_free(drafter);
    mtp_context_free(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_drafter),     cmocka_unit_test(test_verifier), cmocka_unit_test(test_samples),
        cmocka_unit_test(test_other_files), cmocka_unit_test(test_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
