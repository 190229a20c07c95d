/* Protects: `mtp init` makes a drafter that the strict inspection takes, from a config file and from sizes, and ends
 * with the documented exit codes. */
#include "edit.h"

#define SAMPLE MTP_TEST_DATA "/sample/"
#define VERIFIER SAMPLE "verifier"

static void test_good(void **state)
{
    (void)state;
    const char *directory = test_dir(), *a = test_path("%s/a", directory), *b = test_path("%s/b", directory);
    test_expect(test_mtp("init", "--config", SAMPLE "drafter_init/config.json", "--verifier", VERIFIER, "--output", a,
                         "--seed", "5"),
                0, "439524 parameters", "clustered in");
    test_expect(test_mtp("inspect", "--strict", a, "--verifier", VERIFIER), 0, "ready for every engine", "");
    test_expect(test_mtp("init", "--config", SAMPLE "drafter_init/config.json", "--verifier", VERIFIER, "--output", b,
                         "--token-ordering", test_path("%s/model.safetensors", a), "--seed", "5", "--threads", "1"),
                0, "439524 parameters", "");
    /* the same seed and ordering, another number of threads: the same bytes */
    assert_true(test_same_file(test_path("%s/model.safetensors", a), test_path("%s/model.safetensors", b)));
    test_expect(test_mtp("init", "--verifier", VERIFIER, "--output", b, "--hidden-size", "32", "--intermediate-size",
                         "64", "--num-hidden-layers", "2", "--num-centroids", "16", "--centroid-top-k", "2", "--force",
                         "--num-speculative-tokens", "4"),
                0, "an untrained drafter", "");
    test_expect(test_mtp("inspect", b), 0, "the best 2 of 16 centroids of 128 tokens", "");
}

static void test_refused(void **state)
{
    (void)state;
    const char *output = test_path("%s/out", test_dir());
    test_expect(test_mtp("init", "--output", output), 2, "", "--verifier");
    test_expect(test_mtp("init", "--verifier", VERIFIER, "--output", output, "--hiden-size", "3"), 2, "",
                "--hidden-size");
    test_expect(test_mtp("init", "--verifier", VERIFIER, "--output", output, "--num-centroids", "33"), 2, "", "divide");
    test_expect(test_mtp("init", "--verifier", VERIFIER, "--output", output, "--num-centroids", "16"), 2, "",
                "--centroid-top-k");
    test_expect(test_mtp("init", "--verifier", SAMPLE "train", "--output", output), 3, "", "config.json");
    test_expect(test_mtp("init", "--verifier", VERIFIER, "--output", SAMPLE "drafter_init"), 2, "", "exists");
    test_expect(test_mtp("init", "--help"), 0, "usage", "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_good), cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
