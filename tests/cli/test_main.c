/* Protects: the command line itself: help and version are complete, mistakes end with exit code 2 and one line that
 * says what was meant. */
#include "support.h"

static void says(const char *text, const char *part)
{
    if (part[0] && !strstr(text, part)) fail_msg("\"%s\" does not say \"%s\"", text, part);
}

static void ends(test_run run, int exit_code, const char *out, const char *err)
{
    if (run.exit_code != exit_code) fail_msg("exit code %d, want %d: %s", run.exit_code, exit_code, run.err);
    says(run.out, out);
    says(run.err, err);
    if (exit_code == 2) assert_string_equal(run.out, "");
    test_run_free(&run);
}

static void version_names_the_build(void **state)
{
    (void)state;
    test_run run = test_mtp("--version");
    assert_int_equal(run.exit_code, 0);
    says(run.out, "mtp 0.");
    says(run.out, "compiler ");
    says(run.out, "parts            HDF5 ");
    says(run.out, "BLAS ");
    says(run.out, "kernel");
    says(run.out, "instruction set ");
    says(run.out, "CUDA ");
    test_run_free(&run);
}

/* Every command is in the help, and explains every option of its own. */
static void help_is_complete(void **state)
{
    (void)state;
    test_run help = test_mtp("--help");
    assert_int_equal(help.exit_code, 0);
    static const char *const commands[] = {"train", "plan", "init", "export", "inspect"};
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        says(help.out, test_path("\n  %s ", commands[i]));
        test_run run = test_mtp(commands[i], "--help");
        assert_int_equal(run.exit_code, 0);
        says(run.out, test_path("usage: mtp %s", commands[i]));
        says(run.out, "--help");
        assert_string_equal(run.err, "");
        test_run_free(&run);
    }
    test_run_free(&help);
    ends(test_mtp("train", "run.toml", "--set", "x=1", "-h"), 0, "--set KEY=VALUE", "");
}

static void no_command_shows_the_help(void **state)
{
    (void)state;
    ends(test_execute((const char *const[]){MTP_TEST_PROGRAM, NULL}), 2, "", "usage: mtp COMMAND");
}

static void mistakes_are_named(void **state)
{
    (void)state;
    ends(test_mtp("trian"), 2, "", "mtp: error: unknown command 'trian' (did you mean 'train'?)");
    ends(test_mtp("xyzzyplugh"), 2, "", "unknown command 'xyzzyplugh'; mtp --help");
    ends(test_mtp("--versoin"), 2, "", "unknown option '--versoin' (did you mean '--version'?)");
    ends(test_mtp("train"), 2, "", "CONFIG is missing");
    ends(test_mtp("plan"), 2, "", "needs CONFIG, --tokens or --world-size");
    ends(test_mtp("train", "a.toml", "b.toml"), 2, "", "unexpected argument 'b.toml'");
    ends(test_mtp("train", "a.toml", "--resum", "auto"), 2, "", "unknown option '--resum' (did you mean '--resume'?)");
    ends(test_mtp("train", "a.toml", "--dry_run"), 2, "", "(did you mean '--dry-run'?)");
    ends(test_mtp("train", "a.toml", "--qqqq"), 2, "", "unknown option '--qqqq'; mtp train --help lists them all");
    ends(test_mtp("train", "a.toml", "-n"), 2, "", "options have two dashes");
    ends(test_mtp("train", "a.toml", "--set"), 2, "", "--set needs a value: --set KEY=VALUE");
    ends(test_mtp("train", "a.toml", "--set", "--dry-run"), 2, "", "--set needs a value");
    ends(test_mtp("train", "a.toml", "--dry-run=yes"), 2, "", "--dry-run takes no value");
    ends(test_mtp("train", "--help=dry-run"), 2, "", "--help takes no value");
    ends(test_mtp("train", "a.toml", "--resume=auto", "--resume", "never"), 2, "", "--resume is given twice");
    ends(test_mtp("--version", "x"), 2, "", "unexpected argument 'x'");
    ends(test_mtp("eval", "--model", "", "--verifier", "v", "--data", "d"), 2, "",
         "--model: the value is empty; --model DIR is expected");
    ends(test_mtp("eval", "--model=", "--verifier", "v", "--data", "d"), 2, "", "--model: the value is empty");
    ends(test_mtp("inspect", ""), 2, "", "PATH is empty");
    ends(test_mtp("pack", "out", "", "--verifier", "v"), 2, "", "INPUT is empty");
    ends(test_mtp("plan", "--tokens", "9223372036854775807"), 2, "",
         "--tokens 9223372036854775807: must be a whole number from 1 to 1000000000000000");
    ends(test_mtp("train", "--", "--dry-run"), 2, "", "--dry-run"); /* a file of that name */
}

static void results_that_cannot_be_written_are_a_failure(void **state)
{
    (void)state;
    const char *command = test_path("exec %s --help > /dev/full", MTP_TEST_PROGRAM);
    ends(test_execute((const char *const[]){"/bin/sh", "-c", command, NULL}), 1, "",
         "standard output could not be written");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(version_names_the_build),
        cmocka_unit_test(help_is_complete),
        cmocka_unit_test(no_command_shows_the_help),
        cmocka_unit_test(mistakes_are_named),
        cmocka_unit_test(results_that_cannot_be_written_are_a_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
