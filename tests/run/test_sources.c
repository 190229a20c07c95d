/* Protects: a run on a mixture of sources goes on after an interruption as if there had been none, to the last bit and
 * however the loader reads; with other weights it does not go on; what is held out of sources is evaluated. */
#include "support.h"

#include "train.h"

#define SAMPLE MTP_TEST_DATA "/sample/train/sample_000"

/* Three samples in a directory of their own, and three in another. */
static const char *two_sources(const char *weight)
{
    static const char *dirs[2];
    for (int i = 0; i < 2 && !dirs[1]; i++) {
        dirs[i] = test_dir();
        for (int j = 0; j < 3; j++)
            test_copy(test_path(SAMPLE "%d.safetensors", 3 * i + j), test_path("%s/%d.safetensors", dirs[i], j));
    }
    return test_path("sources=[{path=\"%s\",weight=%s},{path=\"%s\"}]", dirs[0], weight, dirs[1]);
}

static void a_mixture_is_gone_on_with(void **state)
{
    (void)state;
    const char *whole = test_path("%s/whole", test_dir()), *parts = test_path("%s/parts", test_dir());
    const char *data = two_sources("2.5"), *other = two_sources("2");
    test_run_training(whole, "train_data=[]", data);
    test_run_training(parts, "train_data=[]", data, "max_steps=3", "num_workers=0", "direct_io=off");
    mtp_train_config *config = test_config(parts, "train_data=[]", other, "resume=auto");
    assert_fails(test_train(config, NULL), MTP_E_CONFIG,
                 "the training data: 6 samples (fingerprint of documents and weights");
    mtp_train_config_free(config);
    const mtp_train_result rest =
        test_run_training(parts, "train_data=[]", data, "resume=auto", "num_workers=3", "prefetch=4");
    assert_int_equal(rest.resumed_from, 3);
    assert_int_equal(rest.step, 6);
    test_same_checkpoint(test_path("%s/checkpoints/step-00000006", whole),
                         test_path("%s/checkpoints/step-00000006", parts));
    char *one = test_train_metrics(whole), *two = test_train_metrics(parts);
    assert_string_equal(one, two);
    free(one);
    free(two);
}

static void held_out_of_sources(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    test_run_training(run, "train_data=[]", two_sources("1"), "validation_share=0.4", "max_steps=1");
    char *metrics = test_train_metrics(run);
    assert_non_null(strstr(metrics, "eval"));
    free(metrics);
}

static void a_source_that_is_not_there(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    mtp_train_config *config = test_config(run, "train_data=[]", "sources=[{path=\"/nowhere\"}]");
    assert_fails(mtp_train_config_check_paths(config), MTP_E_CONFIG, "sources: there is no file or directory /nowhere");
    mtp_train_config_free(config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_mixture_is_gone_on_with),
                                       cmocka_unit_test(held_out_of_sources),
                                       cmocka_unit_test(a_source_that_is_not_there)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
