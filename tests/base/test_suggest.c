/* Protects: a mistyped name brings up the one that was meant, and a stranger brings up none. */
#include "support.h"

#include "mtp/suggest.h"

static const char *const known[] = {"learning_rate", "max_steps", "warmup_steps", "max_grad_norm", "seed", "loss"};

static void meant(const char *word, const char *name)
{
    const char *got = mtp_suggest(word, known, sizeof known / sizeof *known);
    if (!got || strcmp(got, name) != 0) fail_msg("%s: got %s, want %s", word, got ? got : "nothing", name);
}

static void near_names(void **state)
{
    (void)state;
    meant("learning_rte", "learning_rate");   /* a letter left out */
    meant("learnning_rate", "learning_rate"); /* one too many */
    meant("learming_rate", "learning_rate");  /* another one */
    meant("laerning_rate", "learning_rate");  /* two swapped */
    meant("Learning-Rate", "learning_rate");  /* another spelling */
    meant("warmup_step", "warmup_steps");
    meant("max_step", "max_steps");
    meant("sed", "seed");
    meant("los", "loss");
}

static void strangers(void **state)
{
    (void)state;
    const size_t count = sizeof known / sizeof *known;
    assert_null(mtp_suggest("optimizer", known, count));
    assert_null(mtp_suggest("ab", known, count)); /* two edits make any word of any other of two letters */
    assert_null(mtp_suggest("", known, count));
    assert_null(mtp_suggest(NULL, known, count));
    assert_null(mtp_suggest("seed", known, 0));
    char longest[500];
    memset(longest, 's', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    assert_null(mtp_suggest(longest, known, count));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(near_names), cmocka_unit_test(strangers)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
