/* Protects: training from a packed store is training from the samples: the same losses, the same weights, to the last
 * bit, with the same fingerprint, so that a run begun with one goes on with the other. */
#include "support.h"

#include "pack.h"
#include "train.h"

#define SAMPLE MTP_TEST_DATA "/sample"

static const char *pack_six(void)
{
    const char *out = test_path("%s/store", test_dir()), *inputs[6];
    mtp_verifier *verifier = NULL;
    mtp_pack_summary summary;
    for (int i = 0; i < 6; i++) inputs[i] = test_path(SAMPLE "/train/sample_%04d.safetensors", i);
    assert_ok(mtp_verifier_open(SAMPLE "/verifier", NULL, &verifier));
    mtp_pack_options options = test_pack_options(inputs, 6, verifier);
    options.shard_bytes = 600000;
    assert_ok(mtp_pack(out, &options, &summary));
    assert_true(summary.shards > 1);
    mtp_verifier_close(verifier);
    return out;
}

static void same_losses(void **state)
{
    (void)state;
    const char *from_files = test_path("%s/files", test_dir()), *from_store = test_path("%s/store", test_dir());
    const char *data = test_path("train_data=[\"%s\"]", pack_six());
    test_run_training(from_files, NULL);
    test_run_training(from_store, data);
    char *one = test_train_metrics(from_files), *other = test_train_metrics(from_store);
    assert_string_equal(one, other);
    free(one);
    free(other);
    test_same_checkpoint(test_path("%s/checkpoints/step-00000006", from_files),
                         test_path("%s/checkpoints/step-00000006", from_store));
}

/* Documents that are held out are evaluated on, not trained on. */
static void held_out(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir()), *data = test_path("train_data=[\"%s\"]", pack_six());
    test_run_training(run, data, "validation_share=0.4", "max_steps=1");
    char *metrics = test_train_metrics(run);
    assert_non_null(strstr(metrics, "eval"));
    free(metrics);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(same_losses), cmocka_unit_test(held_out)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
