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

static void names_in_files_do_not_steer_the_terminal(void **state)
{
    (void)state;
    static const char json[] = "{\"\\u001b[31m\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}";
    char file[8 + sizeof json - 1] = {sizeof json - 1};
    memcpy(file + 8, json, sizeof json - 1);
    const char *path = test_path("%s/steering.safetensors", test_dir());
    test_write(path, file, sizeof file);
    test_run run = test_mtp("inspect", path);
    assert_int_equal(run.exit_code, 3);
    assert_null(strchr(run.err, '\033'));
    assert_non_null(strstr(run.err, "?[31m"));
    test_run_free(&run);
}

static void a_mapped_file_made_shorter_is_said(void **state)
{
    (void)state;
    const char *verifier = test_path("%s/verifier", test_dir()), *run = test_path("%s/run", test_dir());
    test_copy(test_path("%s/sample/verifier", MTP_TEST_DATA), verifier);
    char *err =
        shell(test_path("\"$0\" train \"$1\" --set verifier='\"%s\"' --set max_steps=100000 & "
                        "while ! grep -q '\"train\"' %s/metrics.jsonl 2>/dev/null && kill -0 $!; do sleep 0.05; "
                        "done; : >%s/model.safetensors; wait $!; echo \"ended: $?\" >&2",
                        verifier, run, verifier),
              test_train_file(run));
    if (!strstr(err, "made shorter while it was in use") || !strstr(err, "ended: 3\n")) fail_msg("%s", err);
    free(err);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(closed_streams_are_no_files_of_the_run),
        cmocka_unit_test(a_reader_that_has_gone_ends_nothing),
        cmocka_unit_test(names_in_files_do_not_steer_the_terminal),
        cmocka_unit_test(a_mapped_file_made_shorter_is_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
