/* Protects: the program's compute threads do not spin while they wait, so that it does not crawl beside other work; and
 * what the user chose stays. OMP_DISPLAY_ENV makes OpenMP's library print its settings when it loads. */
#include "support.h"

#include <strings.h>

/* Value of OMP_WAIT_POLICY in the last report on stderr: "PASSIVE" or "ACTIVE". */
static bool last_policy_is(const char *text, const char *value)
{
    const char *last = NULL;
    for (const char *at = text; (at = strstr(at, "OMP_WAIT_POLICY")) != NULL; at++) last = at;
    if (!last) fail_msg("no report of OMP_WAIT_POLICY in: %s", text);
    while (*last != '\'' && *last != '\0') last++;
    return strncasecmp(last + 1, value, strlen(value)) == 0;
}

static test_run run_version(const char *policy)
{
    unsetenv("GOMP_SPINCOUNT");
    unsetenv("KMP_BLOCKTIME");
    if (policy)
        setenv("OMP_WAIT_POLICY", policy, 1);
    else
        unsetenv("OMP_WAIT_POLICY");
    setenv("OMP_DISPLAY_ENV", "true", 1);
    return test_mtp("--version");
}

static void threads_wait_without_spinning(void **state)
{
    (void)state;
    test_run run = run_version(NULL);
    assert_int_equal(run.exit_code, 0);
    assert_true(last_policy_is(run.err, "PASSIVE"));
    test_run_free(&run);
}

static void the_users_choice_stays(void **state)
{
    (void)state;
    test_run run = run_version("active");
    assert_int_equal(run.exit_code, 0);
    assert_true(last_policy_is(run.err, "ACTIVE"));
    test_run_free(&run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_wait_without_spinning),
        cmocka_unit_test(the_users_choice_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
