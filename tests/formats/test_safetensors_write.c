/* Protects: what we write is byte for byte what the Python package writes for the same tensors, streams large tensors
 * in pieces, and leaves no file behind when anything goes wrong. */
#include "support.h"

#include <signal.h>
#include <sys/resource.h>

#include "base/error.h"
#include "base/file.h"
#include "mtp/safetensors.h"

/* Sources that point into an open file, in reverse order. */
static mtp_safetensors_source *sources_of(const mtp_safetensors *file)
{
    const size_t count = mtp_safetensors_count(file);
    mtp_safetensors_source *sources = calloc(count + 1, sizeof *sources);
    for (size_t i = 0; i < count; i++) {
        const mtp_safetensors_entry *entry = mtp_safetensors_at(file, count - 1 - i);
        sources[i] = (mtp_safetensors_source){.name = entry->name,
                                              .dtype = entry->dtype,
                                              .rank = entry->rank,
                                              .shape = entry->shape,
                                              .data = entry->data};
    }
    return sources;
}

static void assert_rewritten(const char *path)
{
    mtp_safetensors *file;
    mtp_safetensors_pair metadata[8];
    uint64_t predicted;
    size_t expected_size, size;
    const char *out = test_path("%s/out.safetensors", test_dir());
    assert_ok(mtp_safetensors_open(path, &file));
    const size_t num_metadata = mtp_safetensors_metadata_count(file), count = mtp_safetensors_count(file);
    for (size_t i = 0; i < num_metadata && i < 8; i++) metadata[i] = mtp_safetensors_metadata_at(file, i);
    mtp_safetensors_source *sources = sources_of(file);
    assert_ok(mtp_safetensors_write(out, metadata, num_metadata, sources, count));
    assert_ok(mtp_safetensors_file_size(metadata, num_metadata, sources, count, &predicted));
    char *expected = test_read(path, &expected_size), *got = test_read(out, &size);
    assert_int_equal(size, expected_size);
    assert_int_equal(size, predicted);
    assert_memory_equal(got, expected, size);
    free(expected), free(got), free(sources);
    mtp_safetensors_close(file);
}

static void python_files_come_back_unchanged(void **state)
{
    (void)state;
    assert_rewritten(MTP_TEST_DATA "/formats/python.safetensors");
    assert_rewritten(MTP_TEST_DATA "/sample/drafter_init/model.safetensors");
    assert_rewritten(MTP_TEST_DATA "/sample/drafter_init_dense/model.safetensors");
    assert_rewritten(MTP_TEST_DATA "/sample/verifier/model.safetensors");
    assert_rewritten(MTP_TEST_DATA "/sample/train/sample_0001.safetensors");
}

static void nothing_is_a_file_too(void **state)
{
    (void)state;
    const char *path = test_path("%s/out", test_dir());
    mtp_safetensors *file;
    size_t size;
    assert_ok(mtp_safetensors_write(path, NULL, 0, NULL, 0));
    char *bytes = test_read(path, &size);
    assert_int_equal(size, 16);
    assert_memory_equal(bytes, "\x08\0\0\0\0\0\0\0{}      ", 16);
    assert_ok(mtp_safetensors_open(path, &file));
    assert_int_equal(mtp_safetensors_count(file), 0);
    mtp_safetensors_close(file);
    free(bytes);
}

/* ---- streaming ------------------------------------------------------------------------------------------------ */

typedef struct stream {
    size_t expected_offset, largest, fail_at;
} stream;

static mtp_status fill(void *user, size_t offset, void *buffer, size_t size)
{
    stream *s = user;
    unsigned char *byte = buffer;
    assert_int_equal(offset, s->expected_offset);
    assert_int_equal(size % 4, 0);
    if (offset >= s->fail_at) return MTP_FAIL(MTP_E_DATA, "the source dried up");
    for (size_t i = 0; i < size; i++) byte[i] = (unsigned char)((offset + i) * 31 >> 3);
    s->expected_offset += size;
    if (size > s->largest) s->largest = size;
    return MTP_OK;
}

static void large_tensors_are_streamed(void **state)
{
    (void)state;
    const char *path = test_path("%s/out", test_dir());
    const int64_t shape[2] = {3, (1 << 18) + 5};
    stream s = {.fail_at = SIZE_MAX};
    const mtp_safetensors_source source = {
        .name = "x", .dtype = MTP_F32, .rank = 2, .shape = shape, .fill = fill, .user = &s};
    mtp_safetensors *file;
    assert_ok(mtp_safetensors_write(path, NULL, 0, &source, 1));
    assert_int_equal(s.expected_offset, shape[0] * shape[1] * 4);
    assert_true(s.largest <= 1 << 20);
    assert_ok(mtp_safetensors_open(path, &file));
    const mtp_safetensors_entry *entry = mtp_safetensors_find(file, "x");
    const unsigned char *byte = entry->data;
    assert_int_equal(entry->size, s.expected_offset);
    for (size_t i = 0; i < entry->size; i++)
        if (byte[i] != (unsigned char)(i * 31 >> 3)) fail_msg("byte %zu differs", i);
    mtp_safetensors_close(file);
}

static void failures_leave_no_file(void **state)
{
    (void)state;
    const char *dir = test_dir(), *path = test_path("%s/out", dir);
    const int64_t shape[1] = {1 << 20};
    stream s = {.fail_at = 1 << 21};
    const mtp_safetensors_source source = {
        .name = "x", .dtype = MTP_F32, .rank = 1, .shape = shape, .fill = fill, .user = &s};
    assert_fails(mtp_safetensors_write(path, NULL, 0, &source, 1), MTP_E_DATA, "tensor 'x': the source dried up");
    mtp__name_list list;
    struct rlimit before, limit;
    s = (stream){.fail_at = SIZE_MAX};
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    limit = (struct rlimit){3 << 19, before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
    const mtp_status status = mtp_safetensors_write(path, NULL, 0, &source, 1);
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, handler);
    assert_fails(status, MTP_E_IO, "out: cannot write: File too large");
    assert_ok(mtp__dir_list(dir, MTP__LIST_FILES, NULL, &list));
    assert_int_equal(list.count, 0);
    mtp__name_list_free(&list);
}

/* ---- arguments ------------------------------------------------------------------------------------------------ */

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    const char *dir = test_dir(), *path = test_path("%s/out", dir);
    const int64_t one[1] = {1}, negative[1] = {-1}, huge[2] = {INT64_MAX / 8, 3};
    const float x = 1;
    const mtp_safetensors_source good = {.name = "x", .dtype = MTP_F32, .rank = 1, .shape = one, .data = &x};
    mtp_safetensors_source tensors[2] = {good, good};
    assert_fails(mtp_safetensors_write(path, NULL, 0, tensors, 2), MTP_E_ARGUMENT, "out: tensor 'x' is given twice");
#define ASSERT_REFUSED(message, ...)                                                             \
    do {                                                                                         \
        tensors[0] = good;                                                                       \
        __VA_ARGS__;                                                                             \
        assert_fails(mtp_safetensors_write(path, NULL, 0, tensors, 1), MTP_E_ARGUMENT, message); \
    } while (0)
    ASSERT_REFUSED("tensor 0 has no name", tensors[0].name = NULL);
    ASSERT_REFUSED("may be called __metadata__", tensors[0].name = "__metadata__");
    ASSERT_REFUSED("not valid UTF-8", tensors[0].name = "\xff");
    ASSERT_REFUSED("unknown dtype", tensors[0].dtype = MTP_DTYPE_COUNT);
    ASSERT_REFUSED("no shape", tensors[0].shape = NULL);
    ASSERT_REFUSED("axis 0", tensors[0].shape = negative);
    ASSERT_REFUSED("axis 1", (tensors[0].shape = huge, tensors[0].rank = 2));
    ASSERT_REFUSED("neither data nor", tensors[0].data = NULL);
    const mtp_safetensors_pair twice[2] = {{"a", "1"}, {"a", "2"}}, invalid = {"a", "\xff"};
    assert_fails(mtp_safetensors_write(path, twice, 2, &good, 1), MTP_E_ARGUMENT, "metadata key 'a' is given twice");
    assert_fails(mtp_safetensors_write(path, &invalid, 1, &good, 1), MTP_E_ARGUMENT, "metadata 'a' is not valid");
    assert_fails(mtp_safetensors_write(dir, NULL, 0, &good, 1), MTP_E_IO, "it is a directory");
    assert_false(mtp__path_exists(path));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(python_files_come_back_unchanged), cmocka_unit_test(nothing_is_a_file_too),
        cmocka_unit_test(large_tensors_are_streamed),       cmocka_unit_test(failures_leave_no_file),
        cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
