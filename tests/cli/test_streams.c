/* Protects: a run whose standard streams are closed, or whose reader goes away, is the run that it would be otherwise:
 * nothing that is printed lands in a file of the run, and nobody who stops reading ends it. */
#include "support.h"

#include "train.h"

/* Run `script` with the program as $0 and a configuration as $1; its standard error. free() it. */
static char *shell(const char *script, const char *config)
{
    test_run run = test_execute((const char *const[]){"/bin/sh", "-c", script, MTP_TEST_PROGRAM, config, NULL});
    char *err = run.err;
    free(run.out);
    return err;
}

static void same_metrics(const char *run, const char *reference)
{
    char *a = test_train_metrics(run), *b = test_train_metrics(reference);
    assert_string_equal(a, b);
    free(a);
    free(b);
}

static void closed_streams_are_no_files_of_the_run(void **state)
{
    (void)state;
    static const char *const scripts[] = {
        "exec \"$0\" train \"$1\" >&-",
        "exec \"$0\" train \"$1\" 2>&-",
        "exec \"$0\" train \"$1\" >&- 2>&-",
        "exec \"$0\" train \"$1\" <&- >&- 2>&-",
    };
    const char *reference = test_path("%s/reference", test_dir());
    free(shell("exec \"$0\" train \"$1\"", test_train_file(reference)));
    for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++) {
        size_t size = 1;
        const char *run = test_path("%s/run-%zu", test_dir(), i);
        free(shell(scripts[i], test_train_file(run)));
        same_metrics(run, reference);
        free(test_read(test_path("%s/.lock", run), &size));
        assert_int_equal(size, 0);
    }
    char *err = shell("exec \"$0\" train --print-reference >&-", "");
    if (!strstr(err, "standard output could not be written")) fail_msg("\"%s\"", err);
    free(err);
}

static void a_reader_that_has_gone_ends_nothing(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir()), *reference = test_path("%s/reference", test_dir());
    char *err = shell("{ sleep 0.2; \"$0\" train \"$1\" 2>&1; echo \"ended: $?\" >&2; } | true", test_train_file(run));
    assert_string_equal(err, "ended: 0\n");
    free(err);
    free(shell("exec \"$0\" train \"$1\"", test_train_file(reference)));
    same_metrics(run, reference);
    free(test_read(test_path("%s/export/model.safetensors", run), NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(closed_streams_are_no_files_of_the_run),
        cmocka_unit_test(a_reader_that_has_gone_ends_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
