/* Protects: the error record is complete, thread-local, and cut visibly; statuses map to the documented exit codes. */
#include "support.h"

#include <pthread.h>

#include "base/error.h"

static mtp_status fails(void)
{
    return MTP_FAIL(MTP_E_DATA, "token %d is outside the vocabulary", 7);
}

static void message_names_cause_and_context(void **state)
{
    (void)state;
    assert_fails(fails(), MTP_E_DATA, "token 7 is outside the vocabulary");
    mtp__fail_prefix(MTP_E_DATA, "sample %s", "a.safetensors");
    assert_string_equal(mtp_last_error()->message, "sample a.safetensors: token 7 is outside the vocabulary");
    assert_non_null(strstr(mtp_last_error()->file, "test_error.c"));
}

static void long_message_is_cut_with_a_mark(void **state)
{
    (void)state;
    char text[10000];
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = '\0';
    (void)MTP_FAIL(MTP_E_IO, "%s", text);
    const char *message = mtp_last_error()->message;
    assert_string_equal(message + strlen(message) - 6, " [...]");
    (void)mtp__fail_prefix(MTP_E_IO, "context");
    message = mtp_last_error()->message;
    assert_string_equal(message + strlen(message) - 6, " [...]");
}

static void *other_thread(void *seen)
{
    *(mtp_status *)seen = mtp_last_error()->status;
    (void)MTP_FAIL(MTP_E_IO, "of the other thread");
    return NULL;
}

static void record_is_thread_local(void **state)
{
    (void)state;
    mtp_status seen = MTP_E_INTERNAL;
    pthread_t thread;
    (void)fails();
    assert_int_equal(pthread_create(&thread, NULL, other_thread, &seen), 0);
    pthread_join(thread, NULL);
    assert_int_equal(seen, MTP_OK);
    assert_int_equal(mtp_last_error()->status, MTP_E_DATA);
}

static void exit_codes_are_the_documented_ones(void **state)
{
    (void)state;
    assert_int_equal(mtp_status_exit_code(MTP_OK), 0);
    assert_int_equal(mtp_status_exit_code(MTP_E_IO), 1);
    assert_int_equal(mtp_status_exit_code(MTP_E_CONFIG), 2);
    assert_int_equal(mtp_status_exit_code(MTP_E_DATA), 3);
    assert_int_equal(mtp_status_exit_code(MTP_E_INTERRUPTED), 130);
    assert_string_equal(mtp_status_name((mtp_status)999), "MTP_E_INTERNAL");
    assert_string_equal(mtp_status_text(MTP_E_INTERRUPTED), "interrupted");
    assert_string_equal(mtp_status_text((mtp_status)999), mtp_status_text(MTP_E_INTERNAL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(message_names_cause_and_context),
        cmocka_unit_test(long_message_is_cut_with_a_mark),
        cmocka_unit_test(record_is_thread_local),
        cmocka_unit_test(exit_codes_are_the_documented_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
