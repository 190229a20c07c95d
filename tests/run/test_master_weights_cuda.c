/* Protects: master weights of either type on a device whose products take bf16 factors, in a build with the emulator: a
 * run that is stopped and resumed is the run that was not, bit for bit; the copies that products take of fp32 masters
 * are renewed by a resume. */
#include "support.h"

#include "train.h"

#ifdef MTP_TEST_EMULATOR
static void stopped_is_whole(void **state)
{
    (void)state;
    static const char *const masters[] = {"master_weights=bf16", "master_weights=fp32"};
    for (int i = 0; i < 2; i++) {
        const char *whole = test_path("%s/whole%d", test_dir(), i), *parts = test_path("%s/parts%d", test_dir(), i);
#define SETTINGS                                                                                                       \
    masters[i], "device=cuda", "precision=bf16", "weight_decay=0.1", "num_speculative_steps=1", "tokens_per_batch=40", \
        "overlong=truncate"
        test_run_training(whole, SETTINGS, "max_steps=2");
        test_run_training(parts, SETTINGS, "max_steps=1");
        const mtp_train_result rest = test_run_training(parts, SETTINGS, "max_steps=2", "resume=auto");
        assert_int_equal(rest.resumed_from, 1);
        test_same_checkpoint(test_path("%s/checkpoints/step-00000002", whole),
                             test_path("%s/checkpoints/step-00000002", parts));
        char *a = test_train_metrics(whole), *b = test_train_metrics(parts);
        assert_string_equal(a, b);
        free(a);
        free(b);
    }
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
