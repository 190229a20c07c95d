/* Protects: one rank that is asked to stop stops all at the same place, in a step or in an evaluation, and the run that
 * goes on from there is, bit for bit, the one that was never stopped. */
#include "dist.h"

/* Asked before each step and in each evaluation: two ranks, four steps, evaluations before them and after each second.
 */
enum { QUESTIONS = 7 };

static int asked, answers_no;

static bool stop(void *user)
{
    (void)user;
    return answers_no >= 0 && asked++ >= answers_no;
}

/* The program of a rank. Rank 1 says no so many times, and then that it shall stop; -1: never. */
static int be_a_rank(const char *config_path, const char *out, const char *eval_data, int no)
{
    const char *rank = getenv("RANK");
    const char *const overrides[] = {out, eval_data, dist_budget(6), "max_steps=4", "eval_steps=2", "resume=auto"};
    mtp_train_config *config = NULL;
    const mtp_train_options options = {.stop = stop};
    mtp_train_result result = {0};
    answers_no = rank && strcmp(rank, "1") == 0 ? no : -1;
    mtp_status status = mtp_train_config_load(config_path, overrides, sizeof overrides / sizeof *overrides, &config);
    if (status == MTP_OK) status = mtp_train(config, &options, &result);
    printf("status %d, step %lld\n", (int)status, (long long)result.step);
    if (status != MTP_OK && status != MTP_E_INTERRUPTED) fprintf(stderr, "%s\n", mtp_last_error()->message);
    mtp_train_config_free(config);
    return 0;
}

static test_run launch(const char *out, const char *eval_data, int no)
{
    const char *const self = test_self();
    test_run run =
        test_execute((const char *const[]){MTP_TEST_LAUNCHER, "--nproc-per-node=2", self, "rank", dist_config(),
                                           test_path("output_dir=%s", out), eval_data, test_path("%d", no), NULL});
    if (run.exit_code != 0) fail_msg("exit code %d:\n%s%s", run.exit_code, run.out, run.err);
    return run;
}

/* Both ranks end with `status` at the same step; which. */
static int ends(test_run run, mtp_status status)
{
    int step[2];
    for (int rank = 0; rank < 2; rank++) {
        int got = -1;
        const char *said = strstr(run.out, test_path("[%d] status ", rank));
        if (!said || sscanf(said + 4, "status %d, step %d", &got, &step[rank]) != 2 || got != (int)status)
            fail_msg("rank %d: status %d, not %d:\n%s%s", rank, got, (int)status, run.out, run.err);
    }
    assert_int_equal(step[0], step[1]);
    test_run_free(&run);
    return step[0];
}

static void anywhere(void **state)
{
    (void)state;
    dist_needs_gloo();
    static const int steps[QUESTIONS] = {0, 0, 1, 2, 2, 3, 4}; /* done when question number i says stop */
    const char *eval_data = test_path("eval_data=[\"%s\"]", dist_data(5, 900));
    const char *straight = test_path("%s/run", test_dir());
    assert_int_equal(ends(launch(straight, eval_data, -1), MTP_OK), 4);
    char *expected = test_train_metrics(straight);
    for (int no = 0; no < QUESTIONS; no++) {
        const char *out = test_path("%s/run", test_dir());
        assert_int_equal(ends(launch(out, eval_data, no), MTP_E_INTERRUPTED), steps[no]);
        assert_int_equal(ends(launch(out, eval_data, -1), MTP_OK), 4);
        char *got = test_train_metrics(out);
        if (strcmp(got, expected) != 0) fail_msg("stopped at question %d:\n%s\nnot\n%s", no, got, expected);
        free(got);
        test_same_checkpoint(test_path("%s/checkpoints/step-00000004", straight),
                             test_path("%s/checkpoints/step-00000004", out));
    }
    free(expected);
}

int main(int argc, char **argv)
{
    if (argc == 6 && strcmp(argv[1], "rank") == 0) return be_a_rank(argv[2], argv[3], argv[4], atoi(argv[5]));
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(anywhere),
    };
    return cmocka_run_group_tests(tests, dist_setup, NULL);
}
