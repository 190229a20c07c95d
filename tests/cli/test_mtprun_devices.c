/* Protects: how many ranks --nproc-per-node gpu and auto start: the GPUs that are there and that CUDA_VISIBLE_DEVICES
 * leaves; a clear error where there is none. */
#include "support.h"

#include <unistd.h>

#include "../../trainers/mtprun/devices.c"

static void counts(void **state)
{
    (void)state;
    static const char *const files[] = {"nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia", "null"};
    const char *dir = test_dir();
    static const struct {
        const char *visible;
        int count;
    } cases[] = {{NULL, 3}, {"", 0},     {"0", 1},       {"1,0", 2},         {"0,1,2", 3},
                 {"-1", 0}, {"0,-1", 1}, {"0,1,2,3", 3}, {"GPU-a,GPU-b", 2}, {"NoDevFiles", 1}};
    unsetenv("CUDA_VISIBLE_DEVICES");
    assert_int_equal(devices_count(dir), 0);
    assert_int_equal(devices_count(test_path("%s/none", dir)), 0);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) test_write(test_path("%s/%s", dir, files[i]), "", 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (cases[i].visible) setenv("CUDA_VISIBLE_DEVICES", cases[i].visible, 1);
        assert_int_equal(devices_count(dir), cases[i].count);
    }
    unsetenv("CUDA_VISIBLE_DEVICES");
}

static void no_gpu(void **state)
{
    (void)state;
    /* hides what may be there */
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    const char *const gpu[] = {MTP_TEST_LAUNCHER, "--nproc-per-node=gpu", "true", NULL};
    test_expect(test_execute(gpu), 2, "", "--nproc-per-node gpu: no GPU here");
    const char *const automatic[] = {
        MTP_TEST_LAUNCHER, "--nproc-per-node=auto", "sh", "-c", "echo $LOCAL_WORLD_SIZE ranks", NULL};
    test_expect(test_execute(automatic), 0, test_path("[0] %ld ranks", sysconf(_SC_NPROCESSORS_ONLN)), "");
    unsetenv("CUDA_VISIBLE_DEVICES");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(counts), cmocka_unit_test(no_gpu)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
