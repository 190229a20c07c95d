/* Protects: mtp devices lists the cpu, and says of a CUDA backend that cannot be used why; device names that do not
 * exist and a module that is not one are configuration errors. */
#include "support.h"

#include "mtp/context.h"

static void the_cpu_is_listed(void **state)
{
    (void)state;
    mtp_device_entry entries[64];
    int count = 0;
    assert_ok(mtp_devices_list(entries, 64, &count));
    assert_true(count >= 2);
    assert_string_equal(entries[0].device, "cpu");
    assert_true(entries[0].usable && entries[0].memory > 0);
    for (int i = 1; i < count && i < 64; i++) {
        assert_memory_equal(entries[i].device, "cuda", 4);
        assert_true(entries[i].usable == !*entries[i].reason);
    }
    assert_ok(mtp_devices_list(NULL, 0, &count));
    assert_true(count >= 2);
    assert_fails(mtp_devices_list(NULL, 3, &count), MTP_E_ARGUMENT, "entries");
}

static mtp_status open_named(const char *name)
{
    mtp_context *context = NULL;
    const mtp_context_options options = {.device = name, .num_threads = 1};
    const mtp_status status = mtp_context_create(&options, &context);
    mtp_context_free(context);
    return status;
}

static void names_are_checked(void **state)
{
    (void)state;
    assert_ok(open_named("cpu"));
    static const char *const wrong[] = {"gpu", "cuda:", "cuda:x", "cuda:1x", "cuda:-1", "cuda:99999", "CPU", ""};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_fails(open_named(wrong[i]), MTP_E_CONFIG, "there are \"cpu\", \"cuda\" and \"cuda:N\"");
}

static void a_module_that_is_none_is_refused(void **state)
{
    (void)state;
    setenv("MTP_CUDA_MODULE", "/nowhere/libmtp_cuda.so", 1);
    assert_fails(open_named("cuda"), MTP_E_CONFIG, "/nowhere/libmtp_cuda.so cannot be loaded");
    setenv("MTP_CUDA_MODULE", "libc.so.6", 1);
    assert_fails(open_named("cuda:0"), MTP_E_CONFIG, "libc.so.6 is of another build (version unknown");
    setenv("LOCAL_RANK", "first", 1);
    assert_fails(open_named("cuda"), MTP_E_CONFIG, "LOCAL_RANK is \"first\"");
    unsetenv("LOCAL_RANK");
    unsetenv("MTP_CUDA_MODULE");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_cpu_is_listed), cmocka_unit_test(names_are_checked),
                                       cmocka_unit_test(a_module_that_is_none_is_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
