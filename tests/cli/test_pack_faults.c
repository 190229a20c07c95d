/* Protects: `mtp pack` puts every sample to the tests of `mtp check`: each planted fault stands in the quarantine list
 * with file, reason and token, is counted, and is not in the store; more of them than --max-bad end the run with 3; the
 * bytes do not depend on the workers; a drafter of another size is refused before anything is packed. */
#include "faults.h"

#include <jansson.h>
#include <unistd.h>

#include "base/file.h"
#include "pack.h"

#define VERIFIER TEST_SAMPLES "/verifier"
enum { GOOD = 40 };

/* The first of train/. */
static const char *good_samples(void)
{
    const char *dir = test_dir();
    for (int i = 0; i < GOOD; i++)
        test_copy(test_path(TEST_SAMPLES "/train/sample_%04d.safetensors", i),
                  test_path("%s/sample_%04d.safetensors", dir, i));
    return dir;
}

/* A directory with one file a fault, and one that was cut. */
static const char *plant(void)
{
    const char *dir = test_dir(), *cut = test_path("%s/cut.safetensors", dir);
    for (int i = 0; i < test_num_faults; i++) {
        test_sample sample = test_faults[i].make(&test_faults[i]);
        test_sample_write(&sample, test_path("%s/fault_%02d.safetensors", dir, i));
        test_sample_free(&sample);
    }
    size_t size;
    char *bytes = test_read(test_eval_sample(TEST_BENT), &size);
    test_write(cut, bytes, size - 1000);
    free(bytes);
    return dir;
}

/* The line of the quarantine list for a file; NULL: there is none. */
static json_t *line_of(const char *list, const char *file)
{
    for (const char *line = list; *line;) {
        const size_t length = strcspn(line, "\n");
        json_t *value = json_loadb(line, length, 0, NULL);
        assert_non_null(value);
        if (strcmp(json_string_value(json_object_get(value, "file")), file) == 0) return value;
        json_decref(value);
        line += length + (line[length] == '\n');
    }
    return NULL;
}

static void expect_line(const char *list, const char *file, const char *reason, int64_t index, const char *text)
{
    json_t *line = line_of(list, file);
    if (!line) fail_msg("%s is not in the list", file);
    const char *found = json_string_value(json_object_get(line, "reason"));
    const char *message = json_string_value(json_object_get(line, "message"));
    const int64_t at = json_integer_value(json_object_get(line, "index"));
    if (strcmp(found, reason) != 0 || at != index || !strstr(message, text))
        fail_msg("%s: want %s at %lld with \"%s\", got %s at %lld: %s", file, reason, (long long)index, text, found,
                 (long long)at, message);
    json_decref(line);
}

/* The shards say what was refused while each was written, and what is in them. */
static void expect_inspected(const char *out)
{
    int64_t samples = 0, refused = 0;
    for (int i = 0; mtp__file_exists(test_path("%s/shard-%05d.h5", out, i)); i++) {
        test_run run = test_mtp("inspect", "--json", test_path("%s/shard-%05d.h5", out, i));
        json_t *json = json_loads(run.out, 0, NULL), *facts = json_object_get(json, "facts"), *count;
        const char *reason;
        int64_t sum = 0;
        assert_int_equal(run.exit_code, 0);
        assert_string_equal(json_string_value(json_object_get(facts, "verifier")), "verifier");
        assert_int_equal(json_integer_value(json_object_get(facts, "version")), 1);
        samples += json_integer_value(json_object_get(facts, "samples"));
        json_object_foreach(json_object_get(facts, "refused_by_reason"), reason, count) sum +=
            json_integer_value(count);
        assert_int_equal(sum, json_integer_value(json_object_get(facts, "refused")));
        refused += sum;
        json_decref(json);
        test_run_free(&run);
    }
    assert_int_equal(samples, GOOD);
    assert_true(refused > 30 && refused < test_num_faults); /* those that opening turned away are in no shard */
}

static void faults_are_named(void **state)
{
    (void)state;
    const char *good = good_samples(), *bad = plant(), *out = test_path("%s/store", test_dir()),
               *other = test_path("%s/store", test_dir());
    test_run run = test_mtp("pack", out, good, bad, "--verifier", VERIFIER, "--max-bad", "1", "--shard-size", "0.005",
                            "--workers", "1");
    if (run.exit_code != 0) fail_msg("%s", run.err);
    assert_non_null(strstr(run.out, test_path("%d samples, ", GOOD)));
    assert_non_null(strstr(run.out, test_path("%d samples were refused\n", test_num_faults + 1)));
    assert_non_null(strstr(run.out, " hidden-norm\n"));
    assert_non_null(strstr(run.out, "tested      global V follows from the text"));
    test_run_free(&run);
    char *list = test_read(test_path("%s/quarantine.jsonl", out), NULL);
    for (int i = 0; i < test_num_faults; i++) {
        const test_fault *fault = &test_faults[i];
        const char *reason = fault->reason == MTP_CHECK_HEADER ? "keys of different lengths" /* seen on opening */
                                                               : mtp_check_reason_name(fault->reason);
        expect_line(list, test_path("fault_%02d.safetensors", i), reason, fault->index, fault->text);
    }
    expect_line(list, "cut.safetensors", "damaged file", -1, "");
    assert_null(line_of(list, "sample_0000.safetensors"));
    free(list);
    test_expect(test_mtp("check", out, "--verifier", VERIFIER), 0, test_path("%d samples, %d good", GOOD, GOOD), "");
    expect_inspected(out);

    run = test_mtp("pack", other, good, bad, "--verifier", VERIFIER, "--max-bad", "1", "--shard-size", "0.005",
                   "--workers", "5");
    assert_int_equal(run.exit_code, 0);
    test_run_free(&run);
    test_same_directory(out, other);
}

static void too_many_are_an_error(void **state)
{
    (void)state;
    const char *dir = test_eval_samples(6), *out = test_path("%s/store", test_dir());
    const test_fault *fault = &test_faults[0];
    test_sample sample = fault->make(fault);
    test_sample_write(&sample, test_path("%s/sample_0103.safetensors", dir));
    test_sample_free(&sample);
    test_expect(test_mtp("pack", out, dir, "--verifier", VERIFIER), 3, "     1  hidden-norm\n",
                "1 of 6 samples are bad, more than max_bad 0.01 allows");
    /* of several the message has one, whole */
    test_write(test_path("%s/sample_0990.safetensors", dir), "nothing", 7);
    test_write(test_path("%s/sample_0991.safetensors", dir), "nothing", 7);
    test_run run = test_mtp("pack", test_path("%s/store", test_dir()), dir, "--verifier", VERIFIER);
    assert_int_equal(run.exit_code, 3);
    assert_non_null(strstr(run.err, "the first: {\"file\":\"sample_0990.safetensors\""));
    assert_null(strstr(run.err, "sample_0991"));
    test_run_free(&run);
    assert_int_equal(unlink(test_path("%s/sample_0990.safetensors", dir)), 0);
    assert_int_equal(unlink(test_path("%s/sample_0991.safetensors", dir)), 0);
    assert_false(mtp__file_exists(test_path("%s/store.json", out)));
    /* another set of tests makes another store */
    test_expect(test_mtp("pack", out, dir, "--verifier", VERIFIER, "--structure-only"), 2, "",
                "other samples or settings");
    out = test_path("%s/store", test_dir());
    test_expect(test_mtp("pack", out, dir, "--verifier", VERIFIER, "--structure-only"), 0, "0 samples were refused",
                "");
}

static void drafter_of_another_size(void **state)
{
    (void)state;
    const char *out = test_path("%s/store", test_dir());
    test_expect(test_mtp("pack", out, TEST_SAMPLES "/raw", "--verifier", VERIFIER, "--hidden-norm", "pre", "--drafter",
                         MTP_TEST_DATA "/goldens/m12b_flat/assistant"),
                3, "", "the drafter was not made for the verifier");
    assert_false(mtp__path_exists(out));
    test_expect(test_mtp("pack", out, TEST_SAMPLES "/raw", "--verifier", VERIFIER, "--hidden-norm", "pre", "--drafter",
                         TEST_SAMPLES "/drafter_init"),
                0, "6 samples, ", "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(faults_are_named),
        cmocka_unit_test(too_many_are_an_error),
        cmocka_unit_test(drafter_of_another_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
