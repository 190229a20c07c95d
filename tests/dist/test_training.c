/* Protects: several processes train as one: the same losses for any number of ranks and any accumulation with the same
 * global batch, with uneven rows and with ranks that have none; the same bits for the same number of ranks; an
 * evaluation is the same bits for any number; a run goes on at another number of ranks with the next sample; signals,
 * bad steps and failures of one rank reach all, named. */
#include "support.h"

#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "samples.h"
#include "train.h"

enum { DOCUMENTS = 144, TOKENS = 8, GLOBAL = 72 /* documents of a global batch */, STEPS = 20 };

#define VERIFIER MTP_TEST_DATA "/sample/verifier" /* V 2048, Hb 128, local K/V 2 x 32, global 1 x 64 */
#define DRAFTER MTP_TEST_DATA "/sample/drafter_init"

static const char *data, *eval_data, *config;

static void fill(test_sample *sample, const char *name, test_rng *rng, int64_t heads, int64_t width)
{
    test_tensor *tensor = heads ? test_sample_put(sample, name, MTP_BF16, TOKENS, heads, width)
                                : test_sample_put(sample, name, MTP_BF16, TOKENS, width);
    for (int64_t i = 0; i < tensor->count; i++) test_tensor_set(tensor, i, (double)test_uniform(rng));
}

/* TOKENS random tokens of the shipped verifier's geometry, supervised from `prompt_len` on. */
static test_sample make_sample(int64_t prompt_len, uint64_t seed)
{
    test_sample sample = {.metadata = {{"hidden_norm", "post"}}, .num_metadata = 1};
    test_rng rng = {seed};
    test_tensor *ids = test_sample_put(&sample, "token_ids", MTP_I64, TOKENS);
    for (int64_t i = 0; i < TOKENS; i++) test_tensor_set(ids, i, (double)test_below(&rng, 2048));
    fill(&sample, "hidden_states", &rng, 0, 128);
    fill(&sample, "kv_last_local_k", &rng, 2, 32);
    fill(&sample, "kv_last_local_v", &rng, 2, 32);
    fill(&sample, "kv_last_global_k", &rng, 1, 64);
    fill(&sample, "kv_last_global_v", &rng, 1, 64);
    test_tensor *mask = test_sample_put(&sample, "loss_mask", MTP_U8, TOKENS);
    for (int64_t i = prompt_len; i < TOKENS; i++) test_tensor_set(mask, i, 1);
    return sample;
}

/* Documents of the same length, so that a budget of tokens is a number of documents, and of many different numbers of
 * supervised rows. */
static const char *make_data(int count, uint64_t seed)
{
    const char *dir = test_dir();
    for (int i = 0; i < count; i++) {
        test_sample sample = make_sample(1 + (i * 5) % (TOKENS - 2), seed + (uint64_t)i);
        test_sample_write(&sample, test_path("%s/sample_%04d.safetensors", dir, i));
        test_sample_free(&sample);
    }
    return dir;
}

static int setup(void **state)
{
    (void)state;
#ifndef MTP_TEST_GLOO
    print_message("skipped: this build has no Gloo (MTP_GLOO=OFF)\n");
    return 0;
#endif
    data = make_data(DOCUMENTS, 100);
    eval_data = make_data(7, 900);
    config = test_path("%s/run.toml", test_dir());
    const char *text = test_path("[model]\ndrafter = \"%s\"\nverifier = \"%s\"\n"
                                 "[data]\ntrain_data = [\"%s\"]\n"
                                 "[loss]\nnum_speculative_steps = 2\n"
                                 "[optimizer]\nlearning_rate = 1e-3\nlr_scheduler_type = \"constant\"\n"
                                 "[train]\nmax_steps = %d\nseed = 5\n"
                                 "[output]\noutput_dir = \"unset\"\nlogging_steps = 1\nsave_steps = 0\n"
                                 "[device]\nnum_threads = 1\n",
                                 DRAFTER, VERIFIER, data, STEPS);
    test_write(config, text, strlen(text));
    return 0;
}

static void needs_gloo(void)
{
#ifndef MTP_TEST_GLOO
    skip();
#endif
}

/* ---- runs ----------------------------------------------------------------------------------------------------- */

enum { ARGUMENTS = 64 };

/* mtprun with so many ranks, `wrap` in front of mtp when it is not NULL. */
static test_run launch(int ranks, const char *wrap, const char *out, const char *const *overrides)
{
    const char *argv[ARGUMENTS] = {MTP_TEST_LAUNCHER, "--nproc-per-node", test_path("%d", ranks)};
    int count = 3;
    if (wrap) {
        argv[count++] = "sh";
        argv[count++] = "-c";
        argv[count++] = wrap;
        argv[count++] = MTP_TEST_PROGRAM; /* "$0" of the script; "$@" is what follows */
    } else {
        argv[count++] = MTP_TEST_PROGRAM;
    }
    argv[count++] = "train";
    argv[count++] = config;
    argv[count++] = "--set";
    argv[count++] = test_path("output_dir=%s", out);
    for (; *overrides; overrides++) {
        if (count > ARGUMENTS - 3) fail_msg("too many arguments");
        argv[count++] = "--set";
        argv[count++] = *overrides;
    }
    return test_execute(argv);
}

/* A run of `ranks` ranks that succeeds; returns its directory. */
static const char *train(int ranks, const char *const *overrides)
{
    const char *out = test_path("%s/run", test_dir());
    test_run run = launch(ranks, NULL, out, overrides);
    if (run.exit_code != 0) fail_msg("%d ranks: exit code %d:\n%s%s", ranks, run.exit_code, run.out, run.err);
    test_run_free(&run);
    return out;
}
#define train_with(ranks, ...) train((ranks), (const char *const[]){__VA_ARGS__, NULL})

static const char *budget(int documents)
{
    return test_path("tokens_per_batch=%d", documents * TOKENS);
}

static const char *accumulation(int steps)
{
    return test_path("gradient_accumulation_steps=%d", steps);
}

static const char *max_steps(int steps)
{
    return test_path("max_steps=%d", steps);
}

/* Lines of metrics.jsonl of a kind, as an array; json_decref. */
static json_t *lines_of(const char *run, const char *kind)
{
    char *text = test_read(test_path("%s/metrics.jsonl", run), NULL), *rest = NULL;
    json_t *lines = json_array();
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        json_t *value = json_loads(line, 0, NULL);
        assert_non_null(value);
        json_object_del(value, "time");
        if (strcmp(json_string_value(json_object_get(value, "kind")), kind) == 0)
            json_array_append_new(lines, value);
        else
            json_decref(value);
    }
    free(text);
    return lines;
}

static double number(const json_t *line, const char *key)
{
    return json_number_value(json_object_get(line, key));
}

/* The same steps: whole numbers are equal, losses agree to 1e-6. */
static void assert_same_training(const char *one, const char *other, size_t steps)
{
    static const char *const whole[] = {"step", "epoch", "rows", "tokens", "supervised"};
    json_t *a = lines_of(one, "train"), *b = lines_of(other, "train");
    assert_int_equal(json_array_size(a), steps);
    assert_int_equal(json_array_size(b), steps);
    for (size_t i = 0; i < steps; i++) {
        const json_t *x = json_array_get(a, i), *y = json_array_get(b, i);
        for (size_t j = 0; j < sizeof whole / sizeof *whole; j++)
            if (!json_equal(json_object_get(x, whole[j]), json_object_get(y, whole[j])))
                fail_msg("step %zu of %s and %s: %s differs", i + 1, one, other, whole[j]);
        const double loss = number(x, "loss");
        assert_true(isfinite(loss) && loss > 0);
        if (fabs(loss - number(y, "loss")) > 1e-6 * loss)
            fail_msg("step %zu of %s and %s: loss %.9g and %.9g", i + 1, one, other, loss, number(y, "loss"));
    }
    json_decref(a);
    json_decref(b);
}

static void assert_same_bits(const char *one, const char *other)
{
    char *a = test_train_metrics(one), *b = test_train_metrics(other);
    assert_string_equal(a, b);
    free(a);
    free(b);
}

/* ---- losses --------------------------------------------------------------------------------------------------- */

static void any_world_and_accumulation(void **state)
{
    (void)state;
    needs_gloo();
    const char *reference = train_with(1, budget(GLOBAL));
    json_t *lines = lines_of(reference, "train");
    const double first = number(json_array_get(lines, 0), "loss"),
                 last = number(json_array_get(lines, STEPS - 1), "loss");
    assert_true(last < 0.95 * first); /* it learns: the steps are not all the same */
    json_decref(lines);
    for (int world = 1; world <= 4; world++)
        for (int steps = 1; steps <= 3; steps++) {
            if (world * steps == 1) continue;
            const char *run = train_with(world, budget(GLOBAL / (world * steps)), accumulation(steps));
            assert_same_training(reference, run, STEPS);
        }
}

/* Nine micro-batches an epoch, four an update: the last update has one, so three ranks of four have none. */
static void the_last_update_may_leave_ranks_without_rows(void **state)
{
    (void)state;
    needs_gloo();
    const char *const epochs[] = {"num_train_epochs=1", "max_steps=0", budget(16), accumulation(4), NULL};
    const char *reference = train(1, epochs);
    const int worlds[] = {2, 4};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        const char *run =
            train_with(worlds[i], "num_train_epochs=1", "max_steps=0", budget(16), accumulation(4 / worlds[i]));
        assert_same_training(reference, run, 3);
    }
    /* more ranks than the run has micro-batches */
    reference = train_with(1, "num_train_epochs=1", "max_steps=0", budget(48), accumulation(4));
    assert_same_training(reference, train_with(4, "num_train_epochs=1", "max_steps=0", budget(48)), 1);
}

/* ---- bits ----------------------------------------------------------------------------------------------------- */

static void the_same_number_of_ranks_gives_the_same_bits(void **state)
{
    (void)state;
    needs_gloo();
    const char *const overrides[] = {max_steps(6), budget(8), "save_steps=3", "keep_last=0", NULL};
    const char *one = train(3, overrides), *other = train(3, overrides);
    assert_same_bits(one, other);
    for (int step = 3; step <= 6; step += 3)
        test_same_checkpoint(test_path("%s/checkpoints/step-%08d", one, step),
                             test_path("%s/checkpoints/step-%08d", other, step));
}

static void an_evaluation_is_the_same_for_any_number_of_ranks(void **state)
{
    (void)state;
    needs_gloo();
    const char *eval = test_path("eval_data=[\"%s\"]", eval_data);
    json_t *alone = NULL;
    for (int world = 1; world <= 3; world++) {
        const char *run = train_with(world, max_steps(1), budget(12), eval);
        json_t *lines = lines_of(run, "eval");
        assert_int_equal(json_array_size(lines), 2);
        json_t *before = json_incref(json_array_get(lines, 0)); /* of the drafter before the first step */
        json_decref(lines);
        if (!alone)
            alone = before;
        else if (!json_equal(alone, before))
            fail_msg("%d ranks: %s\nalone: %s", world, json_dumps(before, 0), json_dumps(alone, 0));
        if (alone != before) json_decref(before);
    }
    assert_true(number(json_object_get(alone, "rounds"), "count") > 7);
    json_decref(alone);
}

/* ---- going on ------------------------------------------------------------------------------------------------- */

static void a_run_goes_on_at_another_number_of_ranks(void **state)
{
    (void)state;
    needs_gloo();
    const char *reference = train_with(1, max_steps(9), budget(12), accumulation(6));
    const int worlds[][2] = {{2, 3}, {3, 2}, {1, 6}};
    const char *out = test_path("%s/run", test_dir());
    for (int part = 0; part < 3; part++) {
        const char *const overrides[] = {max_steps(3 * (part + 1)), budget(12), accumulation(worlds[part][1]),
                                         "resume=auto", NULL};
        test_run run = launch(worlds[part][0], NULL, out, overrides);
        if (run.exit_code != 0) fail_msg("part %d: %s", part, run.err);
        test_run_free(&run);
    }
    assert_same_training(reference, out, 9);
    /* another global batch is another run */
    const char *const overrides[] = {max_steps(10), budget(12), accumulation(2), "resume=auto", NULL};
    test_expect(launch(2, NULL, out, overrides), 2, "",
                "gradient_accumulation_steps: 6 then, 2 now (on 1 ranks then, 2 now)");
    /* but more or fewer ranks may go on: what they take then is what is left */
    const char *const fewer[] = {max_steps(10), budget(12), accumulation(6), "resume=auto", NULL};
    test_expect(launch(2, NULL, out, fewer), 0, "", "the checkpoint is of 1 ranks, now there are 2");
    json_t *lines = lines_of(out, "train");
    assert_int_equal((int)number(json_array_get(lines, 9), "tokens"), 2 * GLOBAL * TOKENS);
    json_decref(lines);
}

/* An epoch of 18 micro-batches: four updates of two, then the rest by three ranks at a time. */
static void a_run_of_epochs_goes_on_at_another_number_of_ranks(void **state)
{
    (void)state;
    needs_gloo();
    const char *out = test_path("%s/run", test_dir());
    const char *const overrides[] = {budget(8), "resume=auto", max_steps(4), NULL};
    test_expect(launch(2, NULL, out, overrides), 0, "", "");
    const char *const rest[] = {budget(8), "resume=auto", "num_train_epochs=1", "max_steps=0", NULL};
    test_expect(launch(3, NULL, out, rest), 0, "", "");
    json_t *lines = lines_of(out, "train");
    double tokens = 0;
    for (size_t i = 0; i < json_array_size(lines); i++) tokens += number(json_array_get(lines, i), "tokens");
    assert_int_equal(json_array_size(lines), 4 + 4); /* 10 are left: 3, 3, 3, 1 */
    assert_int_equal((int)tokens, DOCUMENTS * TOKENS);
    json_decref(lines);
}

/* ---- one rank has something to say ---------------------------------------------------------------------------- */

static void wait_for(const char *path)
{
    for (int i = 0; i < 2000 && access(path, F_OK) != 0; i++) nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    if (access(path, F_OK) != 0) fail_msg("%s did not appear", path);
}

/* A signal to one rank alone: all end at the same step, with a checkpoint of it. */
static void a_signal_to_one_rank_stops_all(void **state)
{
    (void)state;
    needs_gloo();
    const char *dir = test_dir(), *out = test_path("%s/run", dir), *err = test_path("%s/err", dir);
    const char *wrap = test_path("echo $$ > %s/pid$RANK; exec \"$0\" \"$@\"", dir);
    const char *const argv[] = {MTP_TEST_LAUNCHER,
                                "--nproc-per-node=2",
                                "sh",
                                "-c",
                                wrap,
                                MTP_TEST_PROGRAM,
                                "train",
                                config,
                                "--set",
                                test_path("output_dir=%s", out),
                                "--set",
                                "max_steps=1000000",
                                "--set",
                                budget(4),
                                "--set",
                                "save_steps=1",
                                NULL};
    const pid_t pid = fork();
    if (pid == 0) {
        const int fd = open(err, O_WRONLY | O_CREAT | O_TRUNC, 0666);
        dup2(fd, 2);
        execv(argv[0], (char *const *)argv);
        _exit(127);
    }
    assert_true(pid > 0);
    wait_for(test_path("%s/checkpoints/step-00000001", out));
    char *text = test_read(test_path("%s/pid1", dir), NULL);
    assert_int_equal(kill((pid_t)atoi(text), SIGTERM), 0);
    free(text);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    text = test_read(err, NULL);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 130) fail_msg("status %d:\n%s", status, text);
    long long step[2] = {-1, -2};
    for (int rank = 0; rank < 2; rank++) {
        const char *said = strstr(text, test_path("[%d] mtp: error: interrupted at step ", rank));
        if (!said) fail_msg("rank %d did not say where it stopped:\n%s", rank, text);
        step[rank] = atoll(said + strlen("[0] mtp: error: interrupted at step "));
    }
    assert_int_equal(step[0], step[1]);
    assert_int_equal(access(test_path("%s/checkpoints/step-%08lld/manifest.json", out, step[0]), F_OK), 0);
    free(text);
}

/* Rank 1 has another setting, or other data: named, before anything is written. */
static void ranks_that_differ_are_named(void **state)
{
    (void)state;
    needs_gloo();
    const struct {
        const char *more, *says;
    } cases[] = {{"--set seed=6", "rank 1: train.seed"},
                 {test_path("--set train_data=%s", eval_data), "rank 1: the training data"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *out = test_path("%s/run", test_dir());
        const char *wrap =
            test_path("if [ $RANK = 1 ]; then exec \"$0\" \"$@\" %s; fi; exec \"$0\" \"$@\"", cases[i].more);
        const char *const overrides[] = {budget(12), NULL};
        test_expect(launch(2, wrap, out, overrides), 2, "", cases[i].says);
        assert_int_equal(access(out, F_OK), -1);
    }
}

/* A sample that only rank 1 reads in the first step is damaged. */
static void a_failure_of_one_rank_is_told_to_all(void **state)
{
    (void)state;
    needs_gloo();
    const char *bad = test_dir();
    for (int i = 0; i < 2; i++) {
        test_sample sample = make_sample(2, 70 + (uint64_t)i);
        if (i == 1) test_tensor_set(test_sample_find(&sample, "hidden_states"), 5, (double)NAN);
        test_sample_write(&sample, test_path("%s/%s.safetensors", bad, i ? "damaged" : "good"));
        test_sample_free(&sample);
    }
    const char *const overrides[] = {budget(1), "shuffle=false", test_path("train_data=%s", bad), NULL};
    /* "damaged" comes before "good": rank 0 has it */
    test_run run = launch(2, NULL, test_path("%s/run", test_dir()), overrides);
    assert_int_equal(run.exit_code, 3);
    const char *own = strstr(run.err, "[0] mtp: error: "), *other = strstr(run.err, "[1] mtp: error: rank 0: ");
    if (!own || !other || !strstr(own, "damaged.safetensors") || !strstr(other, "damaged.safetensors"))
        fail_msg("not told:\n%s", run.err);
    test_run_free(&run);
}

/* An infinity in the gradients of one rank: the step is skipped on all, and the samples of all ranks are written down.
 */
static void a_bad_step_of_one_rank_is_one_of_all(void **state)
{
    (void)state;
    needs_gloo();
    const char *dir = test_dir(), *out = test_path("%s/run", test_dir());
    for (int i = 0; i < 4; i++) {
        test_sample sample = make_sample(2, 70 + (uint64_t)i);
        test_tensor *hidden = test_sample_find(&sample, "hidden_states");
        for (int64_t j = 0; i == 1 && j < hidden->count; j++) test_tensor_set(hidden, j, j % 2 ? 3e38 : -3e38);
        test_sample_write(&sample, test_path("%s/%d.safetensors", dir, i));
        test_sample_free(&sample);
    }
    /* steps of two batches: the odd ones have the bad sample, on rank 1 */
    const char *const overrides[] = {budget(1), "shuffle=false", max_steps(4), test_path("train_data=%s", dir), NULL};
    test_run run = launch(2, NULL, out, overrides);
    if (run.exit_code != 0) fail_msg("exit code %d:\n%s", run.exit_code, run.err);
    assert_null(strstr(run.err, "[1] mtp: warning: step"));
    test_run_free(&run);
    json_t *lines = lines_of(out, "bad_step");
    assert_int_equal(json_array_size(lines), 2);
    assert_int_equal((int)number(json_array_get(lines, 0), "step"), 1);
    assert_int_equal((int)number(json_array_get(lines, 1), "step"), 3);
    json_decref(lines);
    lines = lines_of(out, "train");
    assert_int_equal(json_array_size(lines), 2);
    json_decref(lines);
    char *text = test_read(test_path("%s/bad_steps.jsonl", out), NULL);
    if (!strstr(text, "\"samples\": [\"0.safetensors\", \"1.safetensors\"]")) fail_msg("not both:\n%s", text);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_world_and_accumulation),
        cmocka_unit_test(the_last_update_may_leave_ranks_without_rows),
        cmocka_unit_test(the_same_number_of_ranks_gives_the_same_bits),
        cmocka_unit_test(an_evaluation_is_the_same_for_any_number_of_ranks),
        cmocka_unit_test(a_run_goes_on_at_another_number_of_ranks),
        cmocka_unit_test(a_run_of_epochs_goes_on_at_another_number_of_ranks),
        cmocka_unit_test(a_signal_to_one_rank_stops_all),
        cmocka_unit_test(ranks_that_differ_are_named),
        cmocka_unit_test(a_failure_of_one_rank_is_told_to_all),
        cmocka_unit_test(a_bad_step_of_one_rank_is_one_of_all),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
