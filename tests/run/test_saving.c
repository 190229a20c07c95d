/* Protects: a full disk during a save costs a run nothing but that checkpoint: it goes on, says so, tries again, keeps
 * every line of its metrics, and ends with the same weights; without room at the end it fails and says what is left.
 * keep_last, keep_every and keep_best keep what they say. */
#include "support.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/file.h"
#include "train.h"

/* A limit on file sizes stands for a disk that is full from one step on, until a message has been seen. Saves go on
 * beside the steps, so what is certain is: the save after `full_from` begins when the one before it has ended. */
typedef struct disk {
    int64_t full_from;
    const char *until; /* NULL: for ever */
    int64_t small;     /* bytes that still fit into a file */
    char log[16384];
} disk;

static void limit_files(int64_t bytes)
{
    struct rlimit limit;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes < 0 ? limit.rlim_max : (rlim_t)bytes;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

/* After each step, before what may be saved of it. */
static void on_step(void *user, const char *line, bool live)
{
    const disk *d = user;
    long long step = 0;
    (void)live;
    assert_int_equal(sscanf(line, "step %lld/", &step), 1);
    if (step == d->full_from) limit_files(d->small);
}

static void on_message(void *user, mtp_log_level level, const char *line)
{
    disk *d = user;
    const size_t length = strlen(d->log);
    (void)level;
    snprintf(d->log + length, sizeof d->log - length, "%s\n", line);
    if (d->until && strstr(line, d->until)) limit_files(-1);
}

static mtp_status train_on(disk *d, const mtp_train_config *config)
{
    const mtp_logger logger = {.write = on_message, .user = d, .min_level = MTP_LOG_INFO};
    const mtp_train_options options = {.logger = &logger, .progress = on_step, .user = d};
    signal(SIGXFSZ, SIG_IGN);
    const mtp_status status = mtp_train(config, &options, NULL);
    const mtp_error kept = *mtp_last_error();
    limit_files(-1);
    return status == MTP_OK ? MTP_OK : mtp__fail_again(&kept);
}

static void says(const char *log, const char *text)
{
    if (!strstr(log, text)) fail_msg("the log does not say \"%s\":\n%s", text, log);
}

static bool has(const char *run, const char *name)
{
    return access(test_path("%s/checkpoints/%s", run, name), F_OK) == 0;
}

static void same_end(const char *run, const char *whole, const char *step)
{
    char *a = test_train_metrics(run), *b = test_train_metrics(whole);
    assert_string_equal(a, b);
    free(a);
    free(b);
    test_same_checkpoint(test_path("%s/checkpoints/%s", run, step), test_path("%s/checkpoints/%s", whole, step));
}

static void a_disk_that_is_full_for_a_while(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir()), *whole = test_path("%s/whole", test_dir());
    /* nothing fits any more, not a line of metrics; or all but checkpoints */
    for (int64_t small = 0; small <= 200000; small += 200000) {
        disk d = {.full_from = 5, .until = "checkpoint of step 6 not saved: ", .small = small};
        run = test_path("%s/run", test_dir());
        mtp_train_config *config = test_config(run, "max_steps=9", "save_steps=2", "keep_last=1");
        assert_ok(train_on(&d, config));
        mtp_train_config_free(config);
        says(d.log, "checkpoint of step 6 not saved: ");
        says(d.log, "The run goes on, its last good checkpoint is that of step ");
        assert_null(strstr(d.log, "checkpoint of step 8 not saved"));
        if (small == 0) says(d.log, "the run goes on, and metrics are written when they can be");
        if (small == 0) says(d.log, "metrics can be written again");
        if (!has(whole, "")) test_run_training(whole, "max_steps=9", "save_steps=2", "keep_last=1");
        same_end(run, whole, "step-00000009");
    }
}

static void a_disk_that_stays_full(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir()), *whole = test_path("%s/whole", test_dir());
    disk d = {.full_from = 5, .small = 200000};
    mtp_train_config *config = test_config(run, "save_steps=2", "resume=auto");
    assert_fails(train_on(&d, config), MTP_E_IO, "checkpoint of step 6 not saved: ");
    assert_non_null(strstr(mtp_last_error()->message, "the last good checkpoint is that of step "));
    assert_false(has(run, "step-00000006"));
    assert_false(has(run, "../export"));
    assert_ok(test_train(config, NULL)); /* with room again */
    mtp_train_config_free(config);
    test_run_training(whole, "save_steps=2");
    same_end(run, whole, "step-00000006");
}

/* The best evaluation's checkpoint cannot be written: the best is the best of those that are there, and without any the
 * last step is given out. */
static void the_best_that_is_lost_is_not_exported(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    disk d = {.full_from = 1, .until = "checkpoint of step 2 not saved: ", .small = 200000};
    mtp_train_config *config =
        test_config(run, "max_steps=4", "save_steps=0", "eval_steps=2", "keep_best=true", "keep_last=1",
                    test_path("eval_data=[\"%s/sample/eval/sample_0100.safetensors\"]", MTP_TEST_DATA));
    config->learning_rate = 0; /* step 4 is no better than step 2 was */
    assert_ok(train_on(&d, config));
    says(d.log, "checkpoint of step 2 not saved: ");
    assert_false(has(run, "step-00000002"));
    assert_true(has(run, "step-00000004"));
    assert_true(has(run, "../export/model.safetensors"));
    mtp_train_config_free(config);
}

static void keeps_what_the_settings_say(void **state)
{
    (void)state;
    static const struct {
        const char *last, *every;
        int kept[8];
    } cases[] = {
        {"keep_last=1", "keep_every=0", {7}},
        {"keep_last=2", "keep_every=3", {3, 6, 7}},
        {"keep_last=1", "keep_every=4", {4, 7}},
        {"keep_last=0", "keep_every=0", {1, 2, 3, 4, 5, 6, 7}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *run = test_path("%s/run", test_dir());
        int64_t wanted = 0;
        test_run_training(run, "max_steps=7", "save_steps=1", cases[i].last, cases[i].every);
        for (; wanted < 8 && cases[i].kept[wanted]; wanted++)
            assert_true(has(run, test_path("step-%08d", cases[i].kept[wanted])));
        mtp__name_list names;
        assert_ok(mtp__dir_list(test_path("%s/checkpoints", run), MTP__LIST_DIRECTORIES, NULL, &names));
        assert_int_equal(names.count, wanted);
        mtp__name_list_free(&names);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_disk_that_is_full_for_a_while),
        cmocka_unit_test(a_disk_that_stays_full),
        cmocka_unit_test(the_best_that_is_lost_is_not_exported),
        cmocka_unit_test(keeps_what_the_settings_say),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
