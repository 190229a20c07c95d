/* Protects: master weights in bf16 on a device whose products take them as they are, in a build with the emulator: a
 * run that is stopped and resumed is the run that was not, bit for bit. */
#include "support.h"

#include "train.h"

#ifdef MTP_TEST_EMULATOR
static void stopped_is_whole(void **state)
{
    (void)state;
    const char *whole = test_path("%s/whole", test_dir()), *parts = test_path("%s/parts", test_dir());
#define SETTINGS                                                                                           \
    "master_weights=bf16", "device=cuda", "precision=bf16", "weight_decay=0.1", "num_speculative_steps=1", \
        "tokens_per_batch=40", "overlong=truncate"
    test_run_training(whole, SETTINGS, "max_steps=2");
    test_run_training(parts, SETTINGS, "max_steps=1");
    const mtp_train_result rest = test_run_training(parts, SETTINGS, "max_steps=2", "resume=auto");
    assert_int_equal(rest.resumed_from, 1);
    test_same_checkpoint(test_path("%s/checkpoints/step-00000002", whole),
                         test_path("%s/checkpoints/step-00000002", parts));
}
#endif

int main(void)
{
#ifdef MTP_TEST_EMULATOR
    const struct CMUnitTest tests[] = {cmocka_unit_test(stopped_is_whole)};
    return cmocka_run_group_tests(tests, NULL, NULL);
#else
    return 77; /* no device */
#endif
}
