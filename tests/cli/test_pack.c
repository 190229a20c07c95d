/* Protects: `mtp pack`: the store of the shipped samples, its summary and --verify; kill -9 at 50 random moments, after
 * each of which the same command ends with the same bytes; smaller forms of K/V keep the acceptance on the sample to
 * 1 %. */
#include "support.h"

#include <jansson.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "mtp/data.h"
#include "pack.h"

#define SAMPLE MTP_TEST_DATA "/sample"
#define SHARD_SIZE "0.0015" /* GiB: about eight samples a shard */

/* Without the tests on the verifier's weights, which would take most of the time and write nothing. */
static const char *const *command(const char *out)
{
    static const char *argv[] = {MTP_TEST_PROGRAM, "pack",       NULL,
                                 SAMPLE "/eval",   "--verifier", SAMPLE "/verifier",
                                 "--shard-size",   SHARD_SIZE,   "--structure-only",
                                 "--workers",      "2",          NULL};
    argv[2] = out;
    return argv;
}

static void pack_and_verify(void **state)
{
    (void)state;
    const char *out = test_path("%s/store", test_dir());
    test_run run = test_execute(command(out));
    assert_int_equal(run.exit_code, 0);
    assert_non_null(strstr(run.out, "20 samples, 4529 tokens, 3522 of them supervised, in "));
    assert_non_null(strstr(run.out, "for a billion tokens\n0 samples were refused\n"));
    test_run_free(&run);

    run = test_mtp("pack", out, "--verify");
    assert_int_equal(run.exit_code, 0);
    assert_non_null(strstr(run.out, "every checksum is right\n20 samples"));
    test_run_free(&run);

    run = test_mtp("check", out, "--verifier", SAMPLE "/verifier");
    assert_int_equal(run.exit_code, 0);
    assert_non_null(strstr(run.out, "20 samples, 20 good (4529 tokens"));
    test_run_free(&run);

    const char *shard = test_path("%s/shard-00001.h5", out);
    run = test_mtp("inspect", shard, "--verifier", SAMPLE "/verifier");
    assert_int_equal(run.exit_code, 0);
    assert_non_null(strstr(run.out, "a shard of a packed store"));
    assert_non_null(strstr(run.out, "field hidden_states"));
    assert_null(strstr(run.out, "problem"));
    test_run_free(&run);
    run = test_mtp("inspect", out);
    assert_int_equal(run.exit_code, 0);
    assert_non_null(strstr(run.out, "a packed store\n"));
    assert_non_null(strstr(run.out, " 4529\n"));
    test_run_free(&run);

    size_t size;
    char *bytes = test_read(shard, &size);
    bytes[size / 2] ^= 4;
    test_write(shard, bytes, size);
    free(bytes);
    run = test_mtp("pack", out, "--verify");
    assert_int_equal(run.exit_code, 3);
    assert_non_null(strstr(run.err, "shard-00001.h5: sample "));
    assert_non_null(strstr(run.err, "checksum of "));
    test_run_free(&run);
}

/* Drafts of the reference drafter that are accepted in a round, as a server walks them, and at a position. */
static void accepted_on(const char *data, double *round, double *position)
{
    test_run run = test_mtp("eval", "--model", SAMPLE "/drafter_reference", "--verifier", SAMPLE "/verifier", "--data",
                            data, "--num-speculative-steps", "3", "--threads", "1", "--json");
    if (run.exit_code != 0) fail_msg("%s", run.err);
    json_t *report = json_loads(run.out, 0, NULL);
    *round = json_number_value(json_object_get(json_object_get(report, "rounds"), "mean_accepted"));
    *position = json_number_value(json_object_get(json_object_get(report, "positions"), "mean_accepted"));
    json_decref(report);
    test_run_free(&run);
}

/* Forms of K/V that are not the samples' bits. */
static void smaller_forms_accept_the_same(void **state)
{
    (void)state;
    static const char *const forms[][3] = {
        {"--kv", "fp8", NULL}, {"--global-v-only", NULL, NULL}, {"--kv", "fp8", "--global-v-only"}};
    double bf16[2], form[2];
    accepted_on(SAMPLE "/eval", &bf16[0], &bf16[1]);
    for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
        const char *out = test_path("%s/store", test_dir());
        test_expect(test_mtp("pack", out, SAMPLE "/eval", "--verifier", SAMPLE "/verifier", "--structure-only",
                             forms[f][0], forms[f][1], forms[f][2]),
                    0, "20 samples, ", "");
        accepted_on(out, &form[0], &form[1]);
        for (int i = 0; i < 2; i++) {
            printf("%s %s: drafts accepted a %s %.4f, with bf16 %.4f (%+.2f %%)\n", forms[f][0],
                   forms[f][2] ? forms[f][2] : "", i ? "position" : "round", form[i], bf16[i],
                   100 * (form[i] / bf16[i] - 1));
            assert_true(bf16[i] > 0.3);
            assert_true(form[i] > 0.99 * bf16[i] && form[i] < 1.01 * bf16[i]);
        }
        test_expect(test_mtp("check", out, "--verifier", SAMPLE "/verifier"), 0, "20 samples, 20 good", "");
        test_expect(test_mtp("inspect", out), 0, f ? "V alone: K is made of it" : "F8_E4M3, 1 heads of 64\n", "");
    }
}

/* 31B: ids, mask, 5376 hidden, 2 x (16 x 256 + 4 x 512) K/V in bf16 are 35,333 bytes a token. */
static void plan_of_disk(void **state)
{
    (void)state;
    test_run run = test_mtp("plan", "--tokens", "1073741824");
    assert_int_equal(run.exit_code, 0);
    assert_non_null(strstr(run.out, " 35333.0 "));
    assert_non_null(strstr(run.out, "E2B "));
    test_run_free(&run);
    run = test_mtp("plan");
    assert_int_equal(run.exit_code, 2);
    assert_non_null(strstr(run.err, "CONFIG"));
    test_run_free(&run);
}

static void wrong_use(void **state)
{
    (void)state;
    test_run run = test_mtp("pack", "out", "--verifier", SAMPLE "/verifier");
    assert_int_equal(run.exit_code, 2);
    assert_non_null(strstr(run.err, "INPUT"));
    test_run_free(&run);
    run = test_mtp("pack", SAMPLE "/eval", SAMPLE "/eval", "--verify");
    assert_int_equal(run.exit_code, 2);
    test_run_free(&run);
    run = test_mtp("pack", SAMPLE "/eval", "--verify");
    assert_int_equal(run.exit_code, 3);
    assert_non_null(strstr(run.err, "no directory that mtp pack wrote"));
    test_run_free(&run);
}

/* ---- killed --------------------------------------------------------------------------------------------------- */

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static pid_t start(const char *out)
{
    const char *const *argv = command(out);
    const pid_t pid = fork();
    if (pid != 0) return pid;
    if (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr)) _exit(126);
    execv(argv[0], (char *const *)(uintptr_t)argv);
    _exit(127);
}

/* Whatever a killed packer leaves is refused with a reason or is the whole store. */
static void check_left(const char *out, const mtp_verifier *verifier)
{
    const mtp_dataset_options options = {.hidden_norm = MTP_HIDDEN_UNSET};
    mtp_dataset *dataset = NULL;
    if (mtp_dataset_open(&out, 1, verifier, &options, &dataset) == MTP_OK)
        assert_int_equal(mtp_dataset_size(dataset), 20);
    else
        assert_true(strstr(mtp_last_error()->message, "packing has not finished") ||
                    strstr(mtp_last_error()->message, "no *.safetensors") ||
                    strstr(mtp_last_error()->message, "no such file"));
    mtp_dataset_close(dataset);
}

static void kill_and_go_on(void **state)
{
    (void)state;
    enum { KILLS = 50 };
    const char *whole = test_path("%s/store", test_dir());
    mtp_verifier *verifier = NULL;
    test_rng rng = {2024};
    int killed = 0, unfinished = 0;
    assert_ok(mtp_verifier_open(SAMPLE "/verifier", NULL, &verifier));
    double takes = now();
    test_run run = test_execute(command(whole));
    takes = now() - takes;
    assert_int_equal(run.exit_code, 0);
    test_run_free(&run);
    for (int i = 0; i < KILLS; i++) {
        const char *out = test_path("%s/store", test_dir());
        const pid_t pid = start(out);
        assert_true(pid > 0);
        usleep((useconds_t)(test_below(&rng, 1000) * (int64_t)(takes * 1e6) / 1000));
        kill(pid, SIGKILL);
        int status;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        killed += WIFSIGNALED(status);
        unfinished += !mtp__file_exists(test_path("%s/store.json", out));
        check_left(out, verifier);
        run = test_execute(command(out));
        if (run.exit_code != 0) fail_msg("after kill %d: %s", i, run.err);
        test_run_free(&run);
        test_same_directory(whole, out);
    }
    printf("%d of %d were killed while they worked, %d stores were unfinished\n", killed, KILLS, unfinished);
    assert_true(killed > 0 && unfinished > 0);
    mtp_verifier_close(verifier);
}

/* SIGTERM ends it in good order: exit code 130, what to do next, no owner left. */
static void stop_and_go_on(void **state)
{
    (void)state;
    enum { MOMENTS = 8 };
    const char *whole = test_path("%s/store", test_dir());
    int stopped = 0;
    double takes = now();
    test_run run = test_execute(command(whole));
    takes = now() - takes;
    assert_int_equal(run.exit_code, 0);
    test_run_free(&run);
    for (int i = 1; i < MOMENTS; i++) {
        const char *out = test_path("%s/store", test_dir());
        const pid_t pid = start(out);
        int status;
        assert_true(pid > 0);
        usleep((useconds_t)(takes * 1e6 * i / MOMENTS));
        kill(pid, SIGTERM);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (WIFSIGNALED(status)) continue; /* before it listens */
        assert_true(WEXITSTATUS(status) == 130 || WEXITSTATUS(status) == 0);
        stopped += WEXITSTATUS(status) == 130;
        assert_false(mtp__file_exists(test_path("%s/packing.lock", out)));
        run = test_execute(command(out));
        assert_int_equal(run.exit_code, 0);
        test_run_free(&run);
        test_same_directory(whole, out);
    }
    assert_true(stopped > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pack_and_verify),
        cmocka_unit_test(plan_of_disk),
        cmocka_unit_test(smaller_forms_accept_the_same),
        cmocka_unit_test(wrong_use),
        cmocka_unit_test(kill_and_go_on),
        cmocka_unit_test(stop_and_go_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
