/* Protects: what happens to one rank reaches all of them, named: a signal, another setting, bad data, a bad step. */
#include "dist.h"

#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

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
    dist_needs_gloo();
    const char *dir = test_dir(), *out = test_path("%s/run", dir), *err = test_path("%s/err", dir);
    const char *wrap = test_path("echo $$ > %s/pid$RANK; exec \"$0\" \"$@\"", dir);
    const char *const argv[] = {MTP_TEST_LAUNCHER,
                                "--nproc-per-node=2",
                                "sh",
                                "-c",
                                wrap,
                                MTP_TEST_PROGRAM,
                                "train",
                                dist_config(),
                                "--set",
                                test_path("output_dir=%s", out),
                                "--set",
                                "max_steps=1000000",
                                "--set",
                                dist_budget(4),
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
    dist_needs_gloo();
    const struct {
        const char *more, *says;
    } cases[] = {{"--set seed=6", "rank 1: train.seed"},
                 {test_path("--set train_data=%s", dist_data(7, 900)), "rank 1: the training data"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *out = test_path("%s/run", test_dir());
        const char *wrap =
            test_path("if [ $RANK = 1 ]; then exec \"$0\" \"$@\" %s; fi; exec \"$0\" \"$@\"", cases[i].more);
        const char *const overrides[] = {dist_budget(12), NULL};
        test_expect(dist_launch(2, wrap, out, overrides), 2, "", cases[i].says);
        assert_int_equal(access(out, F_OK), -1);
    }
}

/* Rank 1 looks into another directory. */
static void a_run_directory_of_its_own_is_named(void **state)
{
    (void)state;
    dist_needs_gloo();
    const char *here = test_dir(), *there = test_dir();
    const char *together = test_path("cd %s; exec \"$0\" \"$@\"", here);
    const char *apart = test_path("cd %s; if [ $RANK = 1 ]; then cd %s; fi; exec \"$0\" \"$@\"", here, there);
    const char *const first[] = {dist_budget(12), dist_max_steps(1), NULL};
    const char *const more[] = {dist_budget(12), dist_max_steps(2), "resume=auto", NULL};
    for (int i = 0; i < 2; i++) { /* at the begin of a run, and when it goes on */
        test_run run = dist_launch(2, apart, i ? "run" : "other", i ? more : first);
        if (run.exit_code == 0 || !strstr(run.err, "[0] mtp: error: rank 1: all ranks need to see the same output_dir"))
            fail_msg("not named:\n%s", run.err);
        test_run_free(&run);
        if (i == 0) test_expect(dist_launch(2, together, "run", first), 0, "", "");
    }
}

/* A sample that only rank 1 reads in the first step is damaged. */
static void a_failure_of_one_rank_is_told_to_all(void **state)
{
    (void)state;
    dist_needs_gloo();
    const char *bad = test_dir();
    for (int i = 0; i < 2; i++) {
        test_sample sample = dist_sample(2, 70 + (uint64_t)i);
        if (i == 1) test_tensor_set(test_sample_find(&sample, "hidden_states"), 5, (double)NAN);
        test_sample_write(&sample, test_path("%s/%s.safetensors", bad, i ? "damaged" : "good"));
        test_sample_free(&sample);
    }
    const char *const overrides[] = {dist_budget(1), "shuffle=false", test_path("train_data=%s", bad), NULL};
    /* "damaged" comes before "good": rank 0 has it */
    test_run run = dist_launch(2, NULL, test_path("%s/run", test_dir()), overrides);
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
    dist_needs_gloo();
    const char *dir = test_dir(), *out = test_path("%s/run", test_dir());
    for (int i = 0; i < 4; i++) {
        test_sample sample = dist_sample(2, 70 + (uint64_t)i);
        test_tensor *hidden = test_sample_find(&sample, "hidden_states");
        for (int64_t j = 0; i == 1 && j < hidden->count; j++) test_tensor_set(hidden, j, j % 2 ? 3e38 : -3e38);
        test_sample_write(&sample, test_path("%s/%d.safetensors", dir, i));
        test_sample_free(&sample);
    }
    /* steps of two batches: the odd ones have the bad sample, on rank 1 */
    const char *const overrides[] = {dist_budget(1), "shuffle=false", dist_max_steps(4),
                                     test_path("train_data=%s", dir), NULL};
    test_run run = dist_launch(2, NULL, out, overrides);
    if (run.exit_code != 0) fail_msg("exit code %d:\n%s", run.exit_code, run.err);
    assert_null(strstr(run.err, "[1] mtp: warning: step"));
    test_run_free(&run);
    json_t *lines = dist_lines(out, "bad_step");
    assert_int_equal(json_array_size(lines), 2);
    assert_int_equal((int)dist_number(json_array_get(lines, 0), "step"), 1);
    assert_int_equal((int)dist_number(json_array_get(lines, 1), "step"), 3);
    json_decref(lines);
    lines = dist_lines(out, "train");
    assert_int_equal(json_array_size(lines), 2);
    json_decref(lines);
    char *text = test_read(test_path("%s/bad_steps.jsonl", out), NULL);
    if (!strstr(text, "\"samples\": [\"0.safetensors\", \"1.safetensors\"]")) fail_msg("not both:\n%s", text);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_signal_to_one_rank_stops_all),       cmocka_unit_test(ranks_that_differ_are_named),
        cmocka_unit_test(a_run_directory_of_its_own_is_named),  cmocka_unit_test(a_failure_of_one_rank_is_told_to_all),
        cmocka_unit_test(a_bad_step_of_one_rank_is_one_of_all),
    };
    return cmocka_run_group_tests(tests, dist_setup, NULL);
}
