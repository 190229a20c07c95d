/* Protects: `mtp export` prints the serve line and nothing else on stdout, does not overwrite, and ends with the
 * documented exit codes. */
#include "edit.h"

#include <sys/stat.h>

#define SAMPLE MTP_TEST_DATA "/sample/"
#define VERIFIER SAMPLE "verifier"

static void test_good(void **state)
{
    (void)state;
    const char *output = test_path("%s/out", test_dir());
    test_run run = test_mtp("export", SAMPLE "drafter_reference", output, "--verifier", VERIFIER);
    assert_int_equal(run.exit_code, 0);
    assert_int_equal(strncmp(run.out, "vllm serve ", 11), 0);
    assert_ptr_equal(strchr(run.out, '\n'), run.out + strlen(run.out) - 1);
    assert_non_null(strstr(run.out, test_path("--speculative-config '{\"method\": \"mtp\", \"model\": \"%s\", "
                                              "\"num_speculative_tokens\": 3}'",
                                              output)));
    assert_non_null(strstr(run.err, "exported to"));
    test_run_free(&run);
    assert_true(
        test_same_file(test_path("%s/model.safetensors", output), SAMPLE "drafter_reference/model.safetensors"));
    assert_true(test_same_file(test_path("%s/config.json", output), SAMPLE "drafter_reference/config.json"));

    test_expect(test_mtp("export", SAMPLE "drafter_init", output), 2, "", "--force");
    test_expect(test_mtp("export", SAMPLE "drafter_init", output, "--force", "--num-speculative-tokens", "6"), 0,
                "\"num_speculative_tokens\": 6", "not compared with a verifier");
    char *tokens = test_json_get(test_path("%s/generation_config.json", output), "num_assistant_tokens");
    assert_string_equal(tokens, "6");
    free(tokens);
}

static void test_refused(void **state)
{
    (void)state;
    const char *directory = test_dir(), *output = test_path("%s/out", directory);
    test_expect(test_mtp("export", SAMPLE "drafter_init"), 2, "", "OUT");
    test_expect(test_mtp("export", SAMPLE "drafter_init", output, "--num-speculative-tokens", "0"), 2, "",
                "num-speculative");
    test_expect(test_mtp("export", test_path("%s/no", directory), output), 3, "", "no such directory");
    test_expect(test_mtp("export", VERIFIER, output), 3, "", "not a drafter");
    test_expect(test_mtp("export", directory, output), 3, "", "neither a run");
    test_copy(SAMPLE "drafter_init", test_path("%s/source", directory));
    test_json_set(test_path("%s/source/config.json", directory), "text_config.num_key_value_heads", "1");
    test_expect(test_mtp("export", test_path("%s/source", directory), output, "--verifier", VERIFIER), 3, "",
                "num_key_value_heads");
    struct stat info;
    assert_int_not_equal(stat(output, &info), 0);
    test_expect(test_mtp("export", "--help"), 0, "usage", "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_good), cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
