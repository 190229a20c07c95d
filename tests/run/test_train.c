/* Protects: a training run does what its configuration says: exact length, exact normalisation over micro-batches,
 * frozen parameters, early end, orderly stop, nothing written by a rehearsal; steps whose numbers blow up are skipped,
 * and too many of them end the run naming the cause. */
#include "support.h"

#include <jansson.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mtp/safetensors.h"
#include "run/checkpoint.h"
#include "run/run_dir.h"
#include "samples.h"
#include "train.h"

static const char *eval_file(void)
{
    return test_path("eval_data=[\"%s/sample/eval/sample_0100.safetensors\"]", MTP_TEST_DATA);
}

static bool exists(const char *run, const char *name)
{
    return access(test_path("%s/%s", run, name), F_OK) == 0;
}

/* Lines of a kind in metrics.jsonl, and the sum of an integer key over them. */
static int64_t count_lines(const char *run, const char *kind, const char *key, int64_t *sum)
{
    char *text = test_read(test_path("%s/metrics.jsonl", run), NULL), *rest = NULL;
    int64_t count = 0;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        json_t *value = json_loads(line, 0, NULL);
        assert_non_null(value);
        if (strcmp(json_string_value(json_object_get(value, "kind")), kind) == 0) {
            count++;
            if (sum) *sum += json_integer_value(json_object_get(value, key));
        }
        json_decref(value);
    }
    free(text);
    return count;
}

static double last_loss(const char *run)
{
    char *text = test_read(test_path("%s/metrics.jsonl", run), NULL), *rest = NULL;
    double loss = 0;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        json_t *value = json_loads(line, 0, NULL);
        if (json_object_get(value, "loss")) loss = json_real_value(json_object_get(value, "loss"));
        json_decref(value);
    }
    free(text);
    return loss;
}

static void trains_and_writes_all_of_it(void **state)
{
    (void)state;
    static const char *const names[] = {"run.json",
                                        "config.toml",
                                        "metrics.jsonl",
                                        "tb",
                                        "checkpoints/step-00000006",
                                        "export/model.safetensors",
                                        "export/config.json"};
    const char *run = test_path("%s/run", test_dir());
    const mtp_train_result result = test_run_training(run, eval_file());
    assert_int_equal(result.step, 6);
    assert_int_equal(result.total_steps, 6);
    assert_int_equal(result.resumed_from, -1);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!exists(run, names[i])) fail_msg("%s is missing", names[i]);
    assert_int_equal(count_lines(run, "train", NULL, NULL), 6);
    assert_int_equal(count_lines(run, "eval", NULL, NULL), 2);
    assert_true(last_loss(run) == result.loss);
    assert_true(result.loss < 9.5); /* it begins at 10.2 */
    mtp_train_config *config = NULL;
    assert_ok(mtp_train_config_load(test_path("%s/config.toml", run), NULL, 0, &config));
    assert_int_equal(config->max_steps, 6);
    mtp_train_config_free(config);
}

/* Three micro-batches an epoch: the run ends inside the second and third epoch, not at their ends. */
static void length_in_steps_is_exact(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    assert_int_equal(test_run_training(run, "max_steps=5").step, 5);
    assert_int_equal(count_lines(run, "train", NULL, NULL), 5);
    run = test_path("%s/two", test_dir());
    assert_int_equal(test_run_training(run, "max_steps=4", "gradient_accumulation_steps=2").step, 4);
}

/* Two passes over six documents are each document twice, whatever the accumulation; the last update takes what is left.
 */
static void length_in_epochs_is_exact(void **state)
{
    (void)state;
    int64_t tokens[2] = {0}, rows[2] = {0};
    for (int i = 0; i < 2; i++) {
        const char *run = test_path("%s/run%d", test_dir(), i);
        const char *accumulation = i ? "gradient_accumulation_steps=4" : "gradient_accumulation_steps=1";
        const mtp_train_result result =
            test_run_training(run, "max_steps=0", "num_train_epochs=2", accumulation, "lr_scheduler_type=\"linear\"");
        assert_int_equal(result.step, result.total_steps);
        assert_int_equal(count_lines(run, "train", "tokens", &tokens[i]), result.total_steps);
        count_lines(run, "train", "rows", &rows[i]);
        if (i) assert_true(result.total_steps == 2);
    }
    assert_int_equal(tokens[0], tokens[1]);
    assert_int_equal(rows[0], rows[1]);
    int64_t once = 0;
    const char *run = test_path("%s/once", test_dir());
    test_run_training(run, "max_steps=1", "tokens_per_batch=100000");
    count_lines(run, "train", "tokens", &once);
    assert_int_equal(tokens[0], 2 * once);
}

/* The six documents as one batch, and as several micro-batches of one update. */
static void accumulation_equals_the_larger_batch(void **state)
{
    (void)state;
    const char *one = test_path("%s/one", test_dir()), *many = test_path("%s/many", test_dir());
    test_run_training(one, "max_steps=4", "shuffle=false", "tokens_per_batch=100000");
    /* micro-batches of one epoch: with num_train_epochs an update never reaches into the next */
    test_run_training(many, "max_steps=0", "num_train_epochs=4", "shuffle=false", "tokens_per_batch=640",
                      "gradient_accumulation_steps=3");
    assert_int_equal(count_lines(many, "train", NULL, NULL), 4);
    const double a = last_loss(one), b = last_loss(many);
    if (fabs(a - b) > 1e-6 * a) fail_msg("one batch %.9g, micro-batches %.9g", a, b);
}

static float *tensor_of(const char *path, const char *name, size_t *size)
{
    mtp_safetensors *file = NULL;
    const mtp_safetensors_entry *entry = NULL;
    assert_ok(mtp_safetensors_open(path, &file));
    assert_ok(mtp_safetensors_get(file, name, &entry));
    float *copy = malloc(entry->size);
    assert_non_null(copy);
    memcpy(copy, entry->data, entry->size);
    *size = entry->size;
    mtp_safetensors_close(file);
    return copy;
}

static bool same_tensor(const char *run, const char *name)
{
    size_t a_size, b_size;
    float *a = tensor_of(test_path("%s/export/model.safetensors", run), name, &a_size);
    float *b = tensor_of(MTP_TEST_DATA "/sample/drafter_init/model.safetensors", name, &b_size);
    const bool same = a_size == b_size && memcmp(a, b, a_size) == 0;
    free(a);
    free(b);
    return same;
}

static void frozen_parameters_do_not_move(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    test_run_training(run, "max_steps=2",
                      "freeze=[\"*.layer_scalar\", \"model.layers.1.*\", \"model.embed_tokens.weight\"]",
                      "weight_decay=0.1");
    assert_true(same_tensor(run, "model.layers.1.mlp.gate_proj.weight"));
    assert_true(same_tensor(run, "model.layers.2.layer_scalar"));
    assert_true(same_tensor(run, "model.embed_tokens.weight"));
    assert_false(same_tensor(run, "model.layers.2.mlp.gate_proj.weight"));
    mtp_train_config *config = test_config(run, "freeze=[\"nothing.*\"]", "resume=auto");
    assert_fails(test_train(config, NULL), MTP_E_CONFIG, "freeze: ");
    mtp_train_config_free(config);
    config = test_config(test_path("%s/other", test_dir()), "freeze=[\"*\"]");
    assert_fails(test_train(config, NULL), MTP_E_CONFIG, "every parameter is frozen");
    mtp_train_config_free(config);
    config = test_config(test_path("%s/other", test_dir()), "no_decay=[\"nothing.*\"]");
    assert_fails(test_train(config, NULL), MTP_E_CONFIG, "no_decay: pattern \"nothing.*\" matches no parameter");
    mtp_train_config_free(config);
}

/* A rate of zero and no decay: the export is the file it came from. */
static void nothing_trained_is_nothing_changed(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    test_run_training(run, "max_steps=2", "learning_rate=0.0");
    size_t a_size, b_size;
    char *a = test_read(test_path("%s/export/model.safetensors", run), &a_size);
    char *b = test_read(MTP_TEST_DATA "/sample/drafter_init/model.safetensors", &b_size);
    assert_int_equal(a_size, b_size);
    assert_memory_equal(a, b, a_size);
    free(a);
    free(b);
}

static void patience_ends_the_run_and_the_best_is_exported(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    const mtp_train_result result = test_run_training(run, "max_steps=50", "learning_rate=0.0", "eval_steps=2",
                                                      eval_file(), "patience=2", "keep_best=true", "keep_last=1");
    assert_true(result.stopped_early);
    assert_int_equal(result.step, 6);
    assert_int_equal(result.best_step, 2);
    assert_int_equal(count_lines(run, "eval", NULL, NULL), 4);
    assert_true(exists(run, "checkpoints/step-00000002"));
    assert_true(exists(run, "checkpoints/step-00000006"));
    assert_true(exists(run, "checkpoints/best/manifest.json"));
    /* resumed, it knows that it is over */
    const mtp_train_result again = test_run_training(run, "max_steps=50", "learning_rate=0.0", "eval_steps=2",
                                                     eval_file(), "patience=2", "keep_best=true", "resume=auto");
    assert_true(again.stopped_early);
    assert_int_equal(again.step, 6);
    assert_int_equal(again.best_step, 2);
}

typedef struct stopper {
    int64_t asked, stop_at;
} stopper;

static bool stop_at(void *user)
{
    stopper *s = user;
    return ++s->asked >= s->stop_at;
}

/* Stop at the nth time that the run asks, whatever it does then; resume until it is done. */
static void a_stopped_run_goes_on_as_if_it_never_stopped(void **state)
{
    (void)state;
    const char *whole = test_path("%s/whole", test_dir());
    const char *const overrides[] = {"resume=auto", "eval_steps=2", "max_steps=4", eval_file(), NULL};
    test_train_ok(whole, overrides);
    char *expected = test_train_metrics(whole);
    for (int64_t nth = 2; nth <= 8; nth++) {
        const char *run = test_path("%s/run%lld", test_dir(), (long long)nth);
        mtp_train_config *config = test_train_config(run, overrides);
        stopper s = {.stop_at = nth};
        const mtp_train_options options = {.stop = stop_at, .user = &s};
        mtp_train_result result;
        const mtp_status status = mtp_train(config, &options, &result);
        if (status == MTP_E_INTERRUPTED && result.step > 0)
            assert_non_null(strstr(mtp_last_error()->message, "--resume auto goes on from it"));
        assert_ok(test_train(config, &result));
        mtp_train_config_free(config);
        test_same_checkpoint(test_path("%s/checkpoints/step-00000004", whole),
                             test_path("%s/checkpoints/step-00000004", run));
        char *metrics = test_train_metrics(run);
        assert_string_equal(metrics, expected);
        free(metrics);
    }
    free(expected);
}

static void a_rehearsal_writes_nothing(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    mtp_train_config *config = test_config(run, eval_file());
    const mtp_train_options options = {.dry_run = true};
    mtp_train_result result;
    assert_ok(mtp_train(config, &options, &result));
    assert_int_equal(result.total_steps, 6);
    assert_false(exists(run, ""));
    mtp_train_config_free(config);
    config = test_config(run, "tokens_per_batch=100"); /* but it finds what a run would find */
    assert_fails(mtp_train(config, &options, &result), MTP_E_DATA, "100");
    assert_false(exists(run, ""));
    mtp_train_config_free(config);
}

static void numbers_that_blow_up_name_step_and_samples(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    const char *data = test_path("train_data=[\"%s\"]", test_huge_sample(3));
    mtp_train_config *config = test_config(run, data, "max_bad_steps=0");
    assert_fails(test_train(config, NULL), MTP_E_DATA, "step 1: loss");
    assert_non_null(strstr(mtp_last_error()->message, "not finite. The samples of its batch: huge.safetensors"));
    mtp_train_config_free(config);
    assert_false(exists(run, "checkpoints"));
    char *lines = test_read(test_path("%s/bad_steps.jsonl", run), NULL);
    assert_non_null(strstr(lines, "huge.safetensors"));
    free(lines);
    /* two are skipped, the third ends it */
    run = test_path("%s/three", test_dir());
    config = test_config(run, data, "max_bad_steps=2");
    mtp_train_result result;
    assert_fails(test_train(config, &result), MTP_E_DATA, "Skipped before it: 2, max_bad_steps is");
    assert_int_equal(result.bad_steps, 3);
    assert_int_equal(result.step, 2);
    assert_int_equal(count_lines(run, "bad_step", NULL, NULL), 3);
    mtp_train_config_free(config);
    /* a run of bad steps alone has trained nothing, whatever it may skip */
    config = test_config(test_path("%s/all", test_dir()), data);
    assert_fails(test_train(config, NULL), MTP_E_DATA, "all 6 steps were skipped");
    mtp_train_config_free(config);
}

/* The overrides of a run in which the batch of one of seven documents is bad, once an epoch of four batches. */
static const char *const *with_a_bad_step(const char *more)
{
    static const char *overrides[8];
    const char *const sample = MTP_TEST_DATA "/sample/train/sample_000";
    const char *const fixed[] = {
        test_path("train_data=[\"%s0.safetensors\", \"%s1.safetensors\", \"%s2.safetensors\", \"%s4.safetensors\", "
                  "\"%s\"]",
                  sample, sample, sample, sample, test_huge_sample(3)),
        "max_steps=8",
        "save_steps=1",
        "keep_last=0",
        "resume=auto",
        more,
        NULL};
    memcpy(overrides, fixed, sizeof fixed);
    return overrides;
}

static int64_t bad_step_of(const char *run)
{
    int64_t step = 0;
    json_t *line = NULL;
    char *text = test_read(test_path("%s/bad_steps.jsonl", run), NULL);
    line = json_loads(text, JSON_DISABLE_EOF_CHECK, NULL);
    assert_non_null(line);
    step = json_integer_value(json_object_get(line, "step"));
    assert_true(json_is_null(json_object_get(line, "loss")));
    json_decref(line);
    free(text);
    return step;
}

/* Every tensor of the two checkpoints is the same, bit for bit. */
static void assert_same_tensors(const char *run, int64_t one, int64_t other)
{
    static const char form[] = "%s/checkpoints/step-%08lld/shard-00000-of-00001.safetensors";
    size_t a_size, b_size;
    char *a = test_read(test_path(form, run, (long long)one), &a_size);
    char *b = test_read(test_path(form, run, (long long)other), &b_size);
    assert_int_equal(a_size, b_size);
    assert_memory_equal(a, b, a_size);
    free(a);
    free(b);
}

static void a_bad_step_is_skipped_and_changes_nothing(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    const mtp_train_result result = test_train_ok(run, with_a_bad_step("seed=3"));
    assert_int_equal(result.step, 8);
    assert_true(result.bad_steps >= 1 && result.bad_steps < 8);
    assert_true(isfinite(result.loss));
    assert_int_equal(count_lines(run, "bad_step", NULL, NULL), result.bad_steps);
    assert_int_equal(count_lines(run, "train", NULL, NULL), 8 - result.bad_steps);
    const int64_t bad = bad_step_of(run);
    assert_true(bad > 1); /* of this seed: there is a checkpoint before it */
    assert_same_tensors(run, bad - 1, bad);
    /* resumed before and after it, the run is the same: the count of updates that AdamW corrects its moments by too */
    char *expected = test_train_metrics(run);
    for (int64_t at = bad - 1; at <= bad; at++) {
        const char *again = test_path("%s/again%lld", test_dir(), (long long)at);
        const char *const *overrides = with_a_bad_step("seed=3");
        mtp_train_config *config = test_train_config(again, overrides);
        config->max_steps = at;
        assert_ok(test_train(config, NULL));
        config->max_steps = 8;
        mtp_train_result resumed;
        assert_ok(test_train(config, &resumed));
        assert_int_equal(resumed.resumed_from, at);
        assert_int_equal(resumed.bad_steps, result.bad_steps);
        mtp_train_config_free(config);
        test_same_checkpoint(test_path("%s/checkpoints/step-00000008", run),
                             test_path("%s/checkpoints/step-00000008", again));
        char *metrics = test_train_metrics(again);
        assert_string_equal(metrics, expected);
        free(metrics);
    }
    free(expected);
}

/* The run is one of certain documents: without the bad one it does not go on, with it repaired it is the same. */
static void a_bad_sample_is_repaired_in_place(void **state)
{
    (void)state;
    const char *data = test_dir(), *run = test_path("%s/run", test_dir()), *whole = test_path("%s/whole", test_dir());
    const char *last = test_path("%s/sample_0002.safetensors", data);
    for (int i = 0; i < 3; i++) {
        test_sample sample = test_sample_load(test_path("%s/sample/train/sample_000%d.safetensors", MTP_TEST_DATA, i));
        test_sample_write(&sample, test_path("%s/sample_000%d.safetensors", data, i));
        test_sample_free(&sample);
    }
    const char *const overrides[] = {test_path("train_data=[\"%s\"]", data),
                                     "shuffle=false",
                                     "tokens_per_batch=400",
                                     "max_steps=3",
                                     "save_steps=1",
                                     "resume=auto",
                                     NULL};
    test_train_ok(whole, overrides);
    test_sample good = test_sample_load(last), bad = test_sample_load(last);
    test_tensor_set(test_sample_find(&bad, "hidden_states"), 1, NAN);
    test_sample_write(&bad, last);
    mtp_train_config *config = test_train_config(run, overrides);
    assert_fails(test_train(config, NULL), MTP_E_DATA, "goes on from it once that is repaired in place");
    assert_int_equal(unlink(last), 0);
    assert_fails(test_train(config, NULL), MTP_E_CONFIG, "the training data: 3 samples");
    test_sample_write(&good, last);
    assert_ok(test_train(config, NULL));
    test_same_checkpoint(test_path("%s/checkpoints/step-00000003", whole),
                         test_path("%s/checkpoints/step-00000003", run));
    mtp_train_config_free(config);
    test_sample_free(&good);
    test_sample_free(&bad);
}

static void one_process_a_run(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    mtp__run_dir first, second;
    assert_ok(mtp__run_dir_open(run, true, &first));
    assert_fails(mtp__run_dir_open(run, false, &second), MTP_E_EXISTS, "another process is training in");
    mtp__run_dir_close(&first);
    assert_ok(mtp__run_dir_open(run, false, &second));
    mtp__run_dir_close(&second);
    assert_fails(mtp__run_dir_open(run, true, &second), MTP_E_EXISTS, "another process has begun a run");
    static const char newer[] = "{\"format\": \"mtp-run\", \"version\": 9}";
    test_write(test_path("%s/run.json", run), newer, strlen(newer));
    bool is_run;
    assert_fails(mtp__run_dir_inspect(run, &is_run), MTP_E_VERSION, "version 9, written by a newer mtp");
}

/* What a killed process was writing goes away at the next start of the run; what is not ours stays. */
static void leftovers_of_a_killed_run_are_removed(void **state)
{
    (void)state;
    static const char *const left[] = {".config.toml.tmp-17-0", ".metrics.jsonl.tmp-17-12", ".run.json.tmp-9-0"};
    static const char *const others[] = {".notes.tmp-17-0", ".config.toml.tmp-mine", "config.toml.tmp-17-0"};
    const char *run = test_path("%s/run", test_dir());
    test_run_training(run, "max_steps=1");
    for (size_t i = 0; i < 3; i++) test_write(test_path("%s/%s", run, left[i]), "x", 1);
    for (size_t i = 0; i < 3; i++) test_write(test_path("%s/%s", run, others[i]), "x", 1);
    assert_int_equal(mkdir(test_path("%s/.export.tmp-17-0", run), 0777), 0);
    test_write(test_path("%s/.export.tmp-17-0/model.safetensors", run), "x", 1);
    test_run_training(run, "max_steps=2", "resume=auto");
    for (size_t i = 0; i < 3; i++) assert_false(exists(run, left[i]));
    for (size_t i = 0; i < 3; i++) assert_true(exists(run, others[i]));
    assert_false(exists(run, ".export.tmp-17-0"));
}

static void a_disk_that_is_too_small_is_seen_before(void **state)
{
    (void)state;
    const char *missing = test_path("%s/a/b/c", test_dir());
    assert_ok(mtp__run_dir_check_space(missing, 1, "a byte"));
    assert_fails(mtp__run_dir_check_space(missing, UINT64_MAX / 2, "4 checkpoints"), MTP_E_IO, "4 checkpoints");
    /* so many checkpoints that their bytes would begin again at zero */
    mtp_context *context = NULL;
    mtp_drafter *drafter = NULL;
    assert_ok(mtp_context_create(&(mtp_context_options){.num_threads = 1}, &context));
    assert_ok(mtp_drafter_load(context, MTP_TEST_DATA "/sample/drafter_init", &drafter));
    const unsigned long long steps = UINT64_MAX / mtp__checkpoint_bytes(drafter);
    mtp_drafter_free(drafter);
    mtp_context_free(context);
    mtp_train_config *config =
        test_config(missing, test_path("max_steps=%llu", steps), "save_steps=1", "keep_last=0", "freeze=[]");
    const mtp_train_options options = {.dry_run = true};
    assert_fails(mtp_train(config, &options, NULL), MTP_E_IO, "the run will need about");
    mtp_train_config_free(config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(trains_and_writes_all_of_it),
        cmocka_unit_test(length_in_steps_is_exact),
        cmocka_unit_test(length_in_epochs_is_exact),
        cmocka_unit_test(accumulation_equals_the_larger_batch),
        cmocka_unit_test(frozen_parameters_do_not_move),
        cmocka_unit_test(nothing_trained_is_nothing_changed),
        cmocka_unit_test(patience_ends_the_run_and_the_best_is_exported),
        cmocka_unit_test(a_stopped_run_goes_on_as_if_it_never_stopped),
        cmocka_unit_test(a_rehearsal_writes_nothing),
        cmocka_unit_test(numbers_that_blow_up_name_step_and_samples),
        cmocka_unit_test(a_bad_step_is_skipped_and_changes_nothing),
        cmocka_unit_test(a_bad_sample_is_repaired_in_place),
        cmocka_unit_test(one_process_a_run),
        cmocka_unit_test(leftovers_of_a_killed_run_are_removed),
        cmocka_unit_test(a_disk_that_is_too_small_is_seen_before),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
