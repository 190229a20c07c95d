/* Protects: mtp train as a process: its options, its exit codes, and that neither signals, nor kill -9, nor a full disk
 * leave anything that a later run cannot go on from. */
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "train.h"

static void says(const char *text, const char *part)
{
    if (part[0] && !strstr(text, part)) fail_msg("\"%s\" does not say \"%s\"", text, part);
}

static void ends(test_run run, int exit_code, const char *out, const char *err)
{
    if (run.exit_code != exit_code) fail_msg("exit code %d, want %d: %s", run.exit_code, exit_code, run.err);
    says(run.out, out);
    says(run.err, err);
    test_run_free(&run);
}

static bool exists(const char *path)
{
    return access(path, F_OK) == 0;
}

/* ---- a process in the background ------------------------------------------------------------------------------ */

static pid_t start(const char *const *argv, const char *log)
{
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        const int out = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0666);
        dup2(out, 1), dup2(out, 2);
        execv(argv[0], (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    return child;
}
#define start_mtp(log, ...) start((const char *const[]){MTP_TEST_PROGRAM, __VA_ARGS__, NULL}, log)

static void sleep_ms(long ms)
{
    const struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

static void wait_for_path(const char *path, pid_t child, const char *log)
{
    for (int i = 0; i < 6000 && !exists(path); i++) {
        if (waitpid(child, NULL, WNOHANG) != 0) fail_msg("the process ended: %s", test_read(log, NULL));
        sleep_ms(10);
    }
    assert_true(exists(path));
}

static int wait_exit(pid_t child)
{
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* The newest checkpoint's step; 0 when there is none. */
static int newest(const char *run)
{
    char directory[512];
    mtp__name_list names = {0};
    int step = 0;
    snprintf(directory, sizeof directory, "%s/checkpoints", run);
    if (!exists(directory)) return 0;
    assert_ok(mtp__dir_list(directory, MTP__LIST_DIRECTORIES, NULL, &names));
    for (size_t i = 0; i < names.count; i++) sscanf(names.names[i], "step-%d", &step);
    mtp__name_list_free(&names);
    return step;
}

/* ---- options -------------------------------------------------------------------------------------------------- */

static void prints_its_configuration(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir()), *config = test_train_file(run);
    test_run first = test_mtp("train", config, "--print-config", "--set", "seed=9", "--resume", "auto");
    if (first.exit_code != 0) fail_msg("%s", first.err);
    says(first.out, "seed = 9\n");
    says(first.out, "resume = \"auto\"\n");
    says(first.out, "head = \"masked\"\n");
    const char *path = test_path("%s/printed.toml", test_dir());
    test_write(path, first.out, strlen(first.out));
    test_run second = test_mtp("train", path, "--print-config");
    assert_string_equal(first.out, second.out);
    test_run_free(&first);
    test_run_free(&second);
    test_run reference = test_mtp("train", "--print-reference");
    assert_int_equal(reference.exit_code, 0);
    char *file = test_read(MTP_TEST_DATA "/../../configs/reference.toml", NULL);
    assert_string_equal(reference.out, file);
    free(file);
    test_run_free(&reference);
    assert_false(exists(run));
}

/* The configurations that are shipped load and differ from nothing the schema does not know. */
static void shipped_configurations_load(void **state)
{
    (void)state;
    static const char *const names[] = {"quickstart", "e2b", "e4b", "12b", "26b-a4b", "31b"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const bool ordered = names[i][0] == 'e' || names[i][0] == 'q';
        test_run run =
            test_mtp("train", test_path("%s/../../configs/%s.toml", MTP_TEST_DATA, names[i]), "--print-config", "--set",
                     test_path("drafter=%s/sample/drafter_init%s", MTP_TEST_DATA, ordered ? "" : "_dense"));
        if (run.exit_code != 0) fail_msg("%s: %s", names[i], run.err);
        says(run.out, ordered ? "head = \"masked\"" : "head = \"flat\"");
        test_run_free(&run);
    }
}

static void exit_codes(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir()), *config = test_train_file(run);
    ends(test_mtp("train", config, "--dry-run"), 0, "", "micro-batches in the first epoch");
    assert_false(exists(run));
    ends(test_mtp("train", config, "--set", "max_steps=2", "--set",
                  test_path("eval_data=[\"%s/sample/eval/sample_0100.safetensors\"]", MTP_TEST_DATA)),
         0, "before training", "step 2/2  loss ");
    ends(test_mtp("train", config), 2, "", "holds a run; go on with it (--resume auto)");
    ends(test_mtp("train", config, "--set", "learning_rte=1"), 2, "", "did you mean 'optimizer.learning_rate'?");
    ends(test_mtp("train", config, "--resume", "/nowhere"), 2, "", "there is no directory /nowhere");
    ends(test_mtp("train", config, "--set", "output_dir=/dev/null/x", "--set", "max_steps=1"), 1, "", "/dev/null");
    ends(test_mtp("train", config, "--set", "device=gpu", "--set", "output_dir=other"), 2, "", "cpu");
    ends(test_mtp("train", config, "--set", "isa=avx9", "--set", "output_dir=other"), 2, "", "avx9");
    /* what a restart would be refused is refused at once */
    const char *again = test_path("output_dir=%s/again", test_dir());
    setenv("TORCHELASTIC_MAX_RESTARTS", "2", 1);
    ends(test_mtp("train", config, "--set", again), 2, "", "--max-restarts 2: a restart would not go on");
    ends(test_mtp("train", config, "--set", again, "--set", "max_steps=1", "--resume", "auto"), 0, "", "step 1/1");
    unsetenv("TORCHELASTIC_MAX_RESTARTS");
    const char *bad = test_path("%s/bad.safetensors", test_dir());
    test_write(bad, "nothing", 7);
    ends(test_mtp("train", config, "--set", test_path("train_data=[\"%s\"]", bad), "--set", "output_dir=other"), 3, "",
         "bad.safetensors");
    assert_false(exists("other"));
}

/* ---- signals -------------------------------------------------------------------------------------------------- */

static void check_signal(int number)
{
    const char *run = test_path("%s/run", test_dir()), *log = test_path("%s/log", test_dir());
    const char *config = test_train_file(run);
    const pid_t child = start_mtp(log, "train", config, "--set", "max_steps=100000", "--set", "save_steps=1");
    wait_for_path(test_path("%s/checkpoints/step-00000001", run), child, log);
    assert_int_equal(kill(child, number), 0);
    assert_int_equal(wait_exit(child), 130);
    char *text = test_read(log, NULL);
    says(text, "mtp: error: interrupted at step ");
    free(text);
    const int step = newest(run);
    ends(test_mtp("train", config, "--resume", "auto", "--set", test_path("max_steps=%d", step + 1)), 0, "",
         test_path("step %d of %d", step, step + 1));
}

static void sigint_saves_and_ends(void **state)
{
    (void)state;
    check_signal(SIGINT);
}

static void sigterm_saves_and_ends(void **state)
{
    (void)state;
    check_signal(SIGTERM);
}

/* One update of very many micro-batches: the first signal waits for it, the second does not. */
static void the_second_signal_stops_at_once(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir()), *log = test_path("%s/log", test_dir());
    const pid_t child = start_mtp(log, "train", test_train_file(run), "--set", "gradient_accumulation_steps=4000");
    wait_for_path(test_path("%s/tb", run), child, log);
    sleep_ms(100);
    kill(child, SIGINT);
    sleep_ms(300);
    assert_int_equal(waitpid(child, NULL, WNOHANG), 0);
    kill(child, SIGINT);
    assert_int_equal(wait_exit(child), 130);
    assert_int_equal(newest(run), 0);
    ends(test_mtp("train", test_train_file(run), "--resume", "auto", "--set", "max_steps=1"), 0, "",
         "has no checkpoint yet; it starts from the beginning");
}

/* ---- a directory that goes away ------------------------------------------------------------------------------- */

/* Removed, and moved with another in its place: nothing is written beside it, and the next write ends the run. */
static void a_directory_that_goes_away_ends_the_run(void **state)
{
    (void)state;
    for (int moved = 0; moved < 2; moved++) {
        const char *run = test_path("%s/run", test_dir()), *log = test_path("%s/log", test_dir());
        const char *way = moved ? test_path("mv '%s' '%s.moved'", run, run) : test_path("rm -rf '%s'", run);
        const pid_t child = start_mtp(log, "train", test_train_file(run), "--set", "max_steps=100000");
        const char *metrics = test_path("%s/metrics.jsonl", run);
        wait_for_path(metrics, child, log);
        for (struct stat file = {0}; file.st_size == 0; sleep_ms(5)) assert_int_equal(stat(metrics, &file), 0);
        ends(test_execute((const char *const[]){"/bin/sh", "-c", way, NULL}), 0, "", "");
        assert_int_equal(wait_exit(child), 1);
        char *text = test_read(log, NULL);
        says(text, test_path("output_dir %s was removed, moved or replaced", run));
        free(text);
        assert_false(exists(run));
    }
}

/* ---- kill -9 and full disks ----------------------------------------------------------------------------------- */

/* Killed at ten different moments while checkpoints are written beside the steps, one after every step; each time the
 * run goes on, and where it arrives it is what an undisturbed run is. */
static void kill_leaves_a_run_that_goes_on(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir()), *log = test_path("%s/log", test_dir());
    const char *config = test_train_file(run);
    for (int i = 0; i < 10; i++) {
        const int before = newest(run);
        const pid_t child = start_mtp(log, "train", config, "--resume", "auto", "--set", "max_steps=100000", "--set",
                                      "save_steps=1", "--set", "keep_last=2");
        wait_for_path(test_path("%s/checkpoints/step-%08d", run, before + 1), child, log);
        sleep_ms(7919 * (i + 1) % 97); /* spread over a step and its save */
        kill(child, SIGKILL);
        assert_int_equal(wait_exit(child), 128 + SIGKILL);
    }
    const int last = newest(run) + 1;
    const char *steps = test_path("max_steps=%d", last);
    ends(test_mtp("train", config, "--resume", "auto", "--set", steps), 0, "", "going on from");
    const char *whole = test_path("%s/whole", test_dir());
    ends(test_mtp("train", config, "--set", steps, "--set", test_path("output_dir=%s", whole)), 0, "", "");
    test_same_checkpoint(test_path("%s/checkpoints/step-%08d", run, last),
                         test_path("%s/checkpoints/step-%08d", whole, last));
    char *a = test_train_metrics(run), *b = test_train_metrics(whole);
    assert_string_equal(a, b);
    free(a);
    free(b);
}

/* The script runs in a mount namespace of its own, with a small file system at $1 and the log at $3. The disk fills up
 * under a run that saves every second step, and later has room again. */
static const char full_disk[] =
    "set -u\n"
    "disk=$1 config=$2 log=$3\n"
    "mount -t tmpfs -o size=24m none \"$disk\" || exit 77\n"
    "await() { for i in $(seq 600); do eval \"$1\" && return; kill -0 $run || break; sleep 0.05; done; exit 78; }\n"
    "\"$0\" train \"$config\" --set output_dir=\"$disk/run\" --set save_steps=2 "
    "--set max_steps=100000 --set keep_last=1 2> \"$log\" &\n"
    "run=$!\n"
    "trap 'kill -9 $run 2> /dev/null; cat \"$log\" >&2' EXIT\n"
    "await 'ls -d \"$disk/run/checkpoints/step-\"* > /dev/null 2>&1'\n"
    /* again and again: a checkpoint that was under way makes room by removing the one before */
    "await 'head -c 30000000 /dev/zero >> \"$disk/filler\" 2> /dev/null; grep -q \"not saved: .*No space left\" "
    "\"$log\"'\n"
    "await 'grep -q \"metrics are written when they can be\" \"$log\"'\n"
    "rm \"$disk/filler\"\n"
    "await 'grep -q \"metrics can be written again\" \"$log\"'\n"
    "kill -TERM $run\n"
    "wait $run\n"
    "echo \"stopped: $?\"\n"
    "ls -A \"$disk/run/checkpoints\"\n"
    "newest=$(ls \"$disk/run/checkpoints\" | sed 's/step-0*//')\n"
    "test $newest -eq $(grep -c train \"$disk/run/metrics.jsonl\") && echo \"every line\"\n"
    "\"$0\" train \"$config\" --set output_dir=\"$disk/run\" --resume auto --set max_steps=200000 --dry-run\n"
    "echo \"again: $?\"\n"
    "head -c 20000000 /dev/zero > \"$disk/filler\" 2> /dev/null\n"
    "\"$0\" train \"$config\" --set output_dir=\"$disk/other\"\n"
    "echo \"before: $?\"\n"
    "test ! -e \"$disk/other\" && echo nothing\n";

static void a_full_disk_is_waited_out(void **state)
{
    (void)state;
    const char *disk = test_path("%s/disk", test_dir()), *config = test_train_file("unused");
    assert_int_equal(mkdir(disk, 0777), 0);
    test_run run = test_execute((const char *const[]){"/usr/bin/unshare", "-rm", "/bin/sh", "-c", full_disk,
                                                      MTP_TEST_PROGRAM, disk, config, test_path("%s.log", disk), NULL});
    if (run.exit_code == 77 || strstr(run.err, "unshare")) {
        print_message("skipped: no mount namespace here: %s\n", run.err);
        test_run_free(&run);
        skip();
    }
    if (run.exit_code != 0) fail_msg("%s%s", run.out, run.err);
    says(run.err, "The run goes on, its last good checkpoint is that of step ");
    says(run.out, "stopped: 130\nstep-");
    says(run.out, "every line\n");
    says(run.out, "again: 0\n");
    says(run.out, "before: 1\n");
    says(run.err, "the run will need about");
    says(run.out, "nothing\n");
    test_run_free(&run);
}

/* The same by a limit on file sizes, where there are no mounts: the very first checkpoint cannot be written. */
static void a_save_that_fails_is_exit_code_1(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    const char *command = test_path("ulimit -f 2000; exec %s train %s", MTP_TEST_PROGRAM, test_train_file(run));
    ends(test_execute((const char *const[]){"/bin/sh", "-c", command, NULL}), 1, "", "checkpoint of step 6 not saved");
    assert_int_equal(newest(run), 0);
    ends(test_mtp("train", test_train_file(run), "--resume", "auto"), 0, "", "starts from the beginning");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prints_its_configuration),
        cmocka_unit_test(shipped_configurations_load),
        cmocka_unit_test(exit_codes),
        cmocka_unit_test(sigint_saves_and_ends),
        cmocka_unit_test(sigterm_saves_and_ends),
        cmocka_unit_test(the_second_signal_stops_at_once),
        cmocka_unit_test(a_directory_that_goes_away_ends_the_run),
        cmocka_unit_test(kill_leaves_a_run_that_goes_on),
        cmocka_unit_test(a_full_disk_is_waited_out),
        cmocka_unit_test(a_save_that_fails_is_exit_code_1),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
