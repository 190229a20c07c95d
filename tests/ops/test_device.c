/* Protects: opening a CPU device: what it says of itself, which options it refuses and how, its memory; and that every
 * entry of the op table is filled. */
#include "ops_check.h"

static void every_entry_is_filled(void **state)
{
    (void)state;
    const mtp_backend *backend = mtp__backend_cpu();
#define FILLED_0(op) assert_true(backend->op != NULL);
#define FILLED_1(op)                  \
    assert_true(backend->op != NULL); \
    assert_true(backend->op##_scratch != NULL);
#define FILLED(op, args, scratch) FILLED_##scratch(op)
    MTP_OP_LIST(FILLED)
    assert_string_equal(backend->name, "cpu");
}

static void a_device_says_what_it_is(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 3);
    const mtp_device_info *info = mtp__backend_cpu()->device_info(device);
    assert_string_equal(info->backend, "cpu");
    assert_int_equal(info->num_threads, 3);
    assert_true(strlen(info->blas) > 4);
    assert_non_null(strstr(info->rows_note, info->rows_exact ? "same bits" : "depend on its place"));
    mtp_device *all = ops_open(NULL, 0);
    assert_true(mtp__backend_cpu()->device_info(all)->num_threads >= 1);
    ops_release();
}

static void unknown_options_are_refused(void **state)
{
    (void)state;
    mtp_device *device = NULL;
    const mtp_device_options isa = {.isa = "avx9"}, threads = {.num_threads = -1};
    assert_fails(mtp__backend_cpu()->device_open(&isa, &device), MTP_E_UNSUPPORTED,
                 "\"avx9\" is not available; this machine has plain");
    assert_null(device);
    assert_fails(mtp__backend_cpu()->device_open(&threads, &device), MTP_E_ARGUMENT, "-1 threads");
    assert_fails(mtp__backend_cpu()->device_open(NULL, NULL), MTP_E_ARGUMENT, "device");
    mtp__backend_cpu()->device_close(NULL);
}

static void memory_goes_there_and_back(void **state)
{
    (void)state;
    mtp_device *device = ops_open(NULL, 1);
    const mtp_backend *backend = mtp__backend_cpu();
    void *memory = NULL;
    assert_ok(backend->memory_alloc(device, 100, &memory));
    assert_int_equal((uintptr_t)memory % 64, 0);
    char text[100], back[100];
    for (int i = 0; i < 100; i++) text[i] = (char)i;
    assert_ok(backend->upload(device, memory, text, sizeof text));
    assert_ok(backend->download(device, back, memory, sizeof back));
    assert_memory_equal(back, text, sizeof text);
    assert_ok(backend->memory_zero(device, memory, 50));
    assert_ok(backend->download(device, back, memory, sizeof back));
    assert_true(back[49] == 0 && back[50] == 50);
    assert_fails(backend->upload(device, NULL, text, 1), MTP_E_ARGUMENT, "copy");
    void *host = NULL;
    assert_ok(backend->host_alloc(device, 100, &host));
    assert_int_equal((uintptr_t)host % 64, 0);
    assert_ok(backend->download(device, host, memory, 100));
    assert_memory_equal(host, back, 100);
    backend->host_free(device, host);
    backend->host_free(device, NULL);
    backend->memory_free(device, memory);
    assert_fails(backend->memory_alloc(device, SIZE_MAX / 2, &memory), MTP_E_MEMORY, "bytes");
    assert_null(memory);
    assert_ok(backend->memory_alloc(device, 0, &memory));
    backend->memory_free(device, memory);
    backend->memory_free(device, NULL);
    ops_release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_entry_is_filled),
        cmocka_unit_test(a_device_says_what_it_is),
        cmocka_unit_test(unknown_options_are_refused),
        cmocka_unit_test(memory_goes_there_and_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
