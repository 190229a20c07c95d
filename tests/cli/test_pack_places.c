/* Protects: `mtp pack` where it may not or cannot write: a disk that is full at any stage is said with the file, leaves
 * nothing half written, and packing goes on to the same bytes once there is room; a read-only mount and a directory
 * that cannot be made are said; a second packer is refused while the first works, by its process, and a directory of
 * samples is too. */
#include "support.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "pack.h"

#define SAMPLE MTP_TEST_DATA "/sample"

static const char *const *command(const char *out)
{
    static const char *argv[] = {
        MTP_TEST_PROGRAM, "pack", NULL, SAMPLE "/eval", "--verifier", SAMPLE "/verifier", "--shard-size", "0.0015",
        "--workers",      "2",    NULL};
    argv[2] = out;
    return argv;
}

/* Run a shell script in namespaces of its own, where it may mount. */
static test_run in_namespace(const char *script)
{
    return test_execute((const char *const[]){"/usr/bin/unshare", "-Urm", "/bin/sh", "-c", script, NULL});
}

static bool cannot_mount(const test_run *run)
{
    return run->exit_code == 77 || strstr(run->err, "unshare");
}

/* From no room at all to enough, a step at a time, in one directory. */
static void full_disk(void **state)
{
    (void)state;
    const char *dir = test_dir(), *whole = test_path("%s/whole", test_dir()), *at = test_path("%s/log", test_dir());
    const char *pack = test_path("%s pack %s/store %s/eval --verifier %s/verifier --shard-size 0.0015 --workers 2 "
                                 "--structure-only",
                                 MTP_TEST_PROGRAM, dir, SAMPLE, SAMPLE);
    test_expect(test_mtp("pack", whole, SAMPLE "/eval", "--verifier", SAMPLE "/verifier", "--shard-size", "0.0015",
                         "--structure-only"),
                0, "20 samples, ", "");
    const char *script = test_path(
        "mount -t tmpfs -o size=4k none %s || exit 77\n"
        "need=$(du -k --apparent-size -s %s | cut -f1)\n"
        "failed=0\n"
        "for kib in 4 8 12 16 64 512 1600 1620 1640 $(seq $((need - 20)) 4 $((need + 60))); do\n"
        "  mount -o remount,size=${kib}k %s || exit 77\n"
        "  %s > %s 2>&1; code=$?\n"
        "  if [ $code = 0 ]; then echo \"$failed failures, whole with $kib KiB\"; exec diff -r %s/store %s; fi\n"
        "  [ $code = 1 ] || { echo \"$kib KiB: exit $code\" >&2; cat %s >&2; exit 9; }\n"
        "  grep -q 'error: %s' %s || { cat %s >&2; exit 8; }\n"
        "  grep -q 'No space left\\|is there room' %s || { cat %s >&2; exit 7; }\n"
        "  [ -z \"$(find %s -name '.shard*' -o -name '*.tmp*' -o -name packing.lock)\" ] || exit 6\n"
        "  failed=$((failed + 1))\n"
        "done\n"
        "exit 5\n",
        dir, whole, dir, pack, at, dir, whole, at, dir, at, at, at, at, dir);
    test_run run = in_namespace(script);
    if (cannot_mount(&run)) {
        test_run_free(&run);
        skip(); /* no mount namespaces here */
    }
    if (run.exit_code != 0) fail_msg("exit %d: %s%s", run.exit_code, run.out, run.err);
    printf("%s", run.out);
    assert_non_null(strstr(run.out, " failures, whole with "));
    assert_true(strtol(run.out, NULL, 10) > 8);
    test_run_free(&run);
}

static void read_only_mount(void **state)
{
    (void)state;
    const char *dir = test_dir();
    test_run run =
        in_namespace(test_path("mount -t tmpfs none %s && mkdir %s/store && mount -o remount,ro %s || exit 77;"
                               "exec %s pack %s/store %s/eval --verifier %s/verifier",
                               dir, dir, dir, MTP_TEST_PROGRAM, dir, SAMPLE, SAMPLE));
    if (cannot_mount(&run)) {
        test_run_free(&run);
        skip();
    }
    test_expect(run, 1, "", "store/packing.lock: cannot create: Read-only file system");
}

static void directory_without_permission(void **state)
{
    (void)state;
    test_run run = test_execute(command("/proc/store"));   /* refuses even root */
    assert_true(run.exit_code == 1 || run.exit_code == 3); /* EACCES, or ENOENT as proc says it */
    assert_non_null(strstr(run.err, "/proc/store: cannot create the directory"));
    test_run_free(&run);
}

/* The first packer is stopped while it works. */
static pid_t stopped_packer(const char *out)
{
    const char *lock = test_path("%s/packing.lock", out);
    const pid_t pid = fork();
    if (pid == 0) {
        const char *const *argv = command(out);
        if (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr)) _exit(126);
        execv(argv[0], (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    assert_true(pid > 0);
    for (int i = 0; i < 20000 && !mtp__file_exists(lock); i++) usleep(500);
    usleep(2000); /* it has written what it is by now, and goes on for long */
    assert_int_equal(kill(pid, SIGSTOP), 0);
    return pid;
}

static void second_packer(void **state)
{
    (void)state;
    const char *out = test_path("%s/store", test_dir()), *alone = test_path("%s/store", test_dir());
    const pid_t first = stopped_packer(out);
    test_run second = test_execute(command(out));
    int status;
    assert_int_equal(kill(first, SIGCONT), 0);
    assert_int_equal(waitpid(first, &status, 0), first);
    test_expect(second, 2, "", test_path("packing.lock: process %ld started ", (long)first));
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    test_expect(test_execute(command(alone)), 0, "20 samples, ", "");
    test_same_directory(alone, out);
}

/* Where samples are: they would lie beside the store, unseen. */
static void among_samples(void **state)
{
    (void)state;
    const char *dir = test_dir(), *sample = test_path("%s/mine.safetensors", dir);
    test_write(sample, "mine", 4);
    test_expect(test_execute(command(dir)), 2, "", "holds samples (mine.safetensors, ...)");
    assert_false(mtp__file_exists(test_path("%s/pack.json", dir)));
    assert_int_equal(unlink(sample), 0);
    test_expect(test_execute(command(dir)), 0, "20 samples, ", "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(full_disk),
        cmocka_unit_test(read_only_mount),
        cmocka_unit_test(directory_without_permission),
        cmocka_unit_test(second_packer),
        cmocka_unit_test(among_samples),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
