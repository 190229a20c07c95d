/* Protects: a safetensors file is read as the Python package reads it, and everything malformed is refused with the
 * file, the tensor and the reason, whatever the header claims. */
#include "support.h"

#include "mtp/safetensors.h"
#include "safetensors_bytes.h"

static const char python_file[] = MTP_TEST_DATA "/formats/python.safetensors";

/* ---- good files ----------------------------------------------------------------------------------------------- */

static void foreign_file_is_read(void **state)
{
    (void)state;
    mtp_safetensors *file;
    const mtp_safetensors_entry *entry;
    mtp_view view;
    assert_ok(mtp_safetensors_open(python_file, &file));
    assert_string_equal(mtp_safetensors_path(file), python_file);
    assert_int_equal(mtp_safetensors_count(file), 34);
    assert_ok(mtp_safetensors_get(file, "bf16.2", &entry));
    assert_int_equal(entry->dtype, MTP_BF16);
    assert_int_equal(entry->rank, 2);
    assert_int_equal(entry->count, 10);
    assert_int_equal(entry->size, 20);
    assert_true(entry->aligned);
    assert_ok(mtp_safetensors_view(entry, &view));
    assert_ptr_equal(view.data, entry->data);
    assert_int_equal(view.shape[0], 2);
    assert_int_equal(view.shape[1], 5);
    assert_int_equal(view.stride[0], 5);
    assert_non_null(mtp_safetensors_find(file, "zwei \"Anführungen\"\\ \t\x01/"));
    assert_null(mtp_safetensors_find(file, "bf16"));
    assert_null(mtp_safetensors_at(file, 34));
    assert_fails(mtp_safetensors_get(file, "bf16", &entry), MTP_E_NOT_FOUND, "python.safetensors: no tensor 'bf16'");
    mtp_safetensors_close(file);
    mtp_safetensors_close(NULL);
}

static void scalar_empty_and_six_axes(void **state)
{
    (void)state;
    mtp_safetensors *file;
    mtp_view view;
    float value;
    assert_ok(mtp_safetensors_open(python_file, &file));
    const mtp_safetensors_entry *scalar = mtp_safetensors_find(file, "scalar");
    assert_int_equal(scalar->rank, 0);
    assert_int_equal(scalar->count, 1);
    assert_ok(mtp_safetensors_copy(scalar, &value, sizeof value));
    assert_true(value == 3.5f);
    assert_fails(mtp_safetensors_view(scalar, &view), MTP_E_FORMAT, "scalar: has 0 axes");
    assert_fails(mtp_safetensors_copy(scalar, &value, 2), MTP_E_ARGUMENT, "scalar: has 4 bytes, the buffer 2");
    const mtp_safetensors_entry *empty = mtp_safetensors_find(file, "empty");
    assert_int_equal(empty->count, 0);
    assert_int_equal(empty->shape[1], 7);
    assert_ok(mtp_safetensors_view(empty, &view));
    assert_ok(mtp_safetensors_copy(empty, NULL, 0));
    const mtp_safetensors_entry *six = mtp_safetensors_find(file, "rank six");
    assert_int_equal(six->rank, 6);
    assert_int_equal(six->shape[5], 2);
    assert_fails(mtp_safetensors_view(six, &view), MTP_E_FORMAT, "rank six: has 6 axes; between 1 and 5");
    mtp_safetensors_close(file);
}

static void metadata_keeps_its_order(void **state)
{
    (void)state;
    size_t size;
    unsigned char *bytes = safetensors_bytes("{\"__metadata__\":{\"z\":\"1\",\"a\":\"2\",\"m\":\"\"}}", 0, &size);
    mtp_safetensors *file;
    assert_ok(mtp_safetensors_from_memory(bytes, size, "memory", &file));
    assert_int_equal(mtp_safetensors_metadata_count(file), 3);
    assert_string_equal(mtp_safetensors_metadata_at(file, 0).key, "z");
    assert_string_equal(mtp_safetensors_metadata_at(file, 1).value, "2");
    assert_null(mtp_safetensors_metadata_at(file, 3).key);
    assert_string_equal(mtp_safetensors_metadata(file, "m"), "");
    assert_null(mtp_safetensors_metadata(file, "b"));
    assert_int_equal(mtp_safetensors_count(file), 0);
    mtp_safetensors_close(file);
    free(bytes);
}

/* A writer that pads nothing and orders by name: legal, and data is then where it happens to be. */
static void unaligned_data_is_copied_not_viewed(void **state)
{
    (void)state;
    size_t size;
    unsigned char *bytes = safetensors_bytes("{\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                                             "\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[1,5]},"
                                             "\"y\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[5,9]}}   ",
                                             9, &size);
    mtp_safetensors *file;
    mtp_view view;
    unsigned char value[4];
    assert_ok(mtp_safetensors_from_memory(bytes, size, "memory", &file));
    const mtp_safetensors_entry *entry = mtp_safetensors_find(file, "x");
    assert_int_equal(entry->aligned, (uintptr_t)entry->data % 4 == 0);
    assert_int_equal(entry->aligned, mtp_safetensors_find(file, "y")->aligned);
    if (entry->aligned) fail_msg("the case is built wrong: x is aligned");
    assert_fails(mtp_safetensors_view(entry, &view), MTP_E_FORMAT, "memory: x: its data is not aligned for F32");
    assert_ok(mtp_safetensors_copy(entry, value, 4));
    assert_memory_equal(value, ((unsigned char[]){1, 2, 3, 4}), 4);
    mtp_safetensors_close(file);
    free(bytes);
}

/* ---- bad files ------------------------------------------------------------------------------------------------ */

static void assert_refused(const void *bytes, size_t size, const char *message)
{
    /* an own allocation of the exact size, so that a sanitizer sees a read behind the end */
    void *copy = malloc(size ? size : 1);
    memcpy(copy, bytes, size);
    mtp_safetensors *file;
    assert_fails(mtp_safetensors_from_memory(copy, size, "bad.safetensors", &file), MTP_E_FORMAT, message);
    assert_non_null(strstr(mtp_last_error()->message, "bad.safetensors"));
    assert_null(file);
    free(copy);
}

static void bad_headers_are_refused(void **state)
{
    (void)state;
#define F32(name, shape, offsets) "\"" name "\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
    static const struct {
        const char *header;
        size_t data_size;
        const char *message;
    } cases[] = {
        {" {}", 0, "does not begin with '{'"},
        {"[]", 0, "does not begin with '{'"},
        {"{", 0, "not valid JSON"},
        {"{}x", 0, "end of file expected"},
        {"{\"x\":1}", 0, "x: expected an object, got an integer"},
        {"{\"x\":{}}", 0, "x.dtype: the key is missing"},
        {"{" F32("x", "[1]", "[0,4]") "," F32("x", "[1]", "[4,8]") "}", 8, "duplicate object key"},
        {"{\"x\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
         "duplicate object key"},
        {"{\"x\":{\"dtype\":\"Q4\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "x: dtype 'Q4' is not known"},
        {"{\"x\":{\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "dtype 'f32' is not known"},
        {"{\"x\":{\"dtype\":3,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "x.dtype: expected a string"},
        {"{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"y\":0}}", 4, "x: has members besides"},
        {"{" F32("x", "1", "[0,4]") "}", 4, "x.shape: expected an array, got an integer"},
        {"{" F32("x", "[1.0]", "[0,4]") "}", 4, "x.shape[0]: expected an integer, got a real number"},
        {"{" F32("x", "[-1]", "[0,4]") "}", 4, "x.shape[0]: -1 is outside"},
        {"{" F32("x", "[2,9223372036854775808]", "[0,4]") "}", 4, "too big integer"},
        {"{" F32("x", "[9223372036854775807]", "[0,4]") "}", 4, "x.shape: the number of elements overflows"},
        {"{" F32("x", "[4294967296,4294967296]", "[0,0]") "}", 0, "x.shape: the number of elements overflows"},
        {"{" F32("x", "[4611686018427387904,4]", "[0,0]") "}", 0, "x.shape: the number of elements overflows"},
        {"{" F32("x", "[0,4294967296,4294967296]", "[0,0]") "}", 0, "x.shape: the number of elements overflows"},
        {"{" F32("x", "[1]", "[0]") "}", 4, "x.data_offsets: expected [begin, end], got 1 values"},
        {"{" F32("x", "[1]", "[0,4,8]") "}", 4, "expected [begin, end], got 3 values"},
        {"{" F32("x", "[1]", "[-4,0]") "}", 4, "x.data_offsets[0]: -4 is outside"},
        {"{" F32("x", "[1]", "[4,0]") "}", 4, "x.data_offsets: the end 0 is before the begin 4"},
        {"{" F32("x", "[2]", "[0,8]") "}", 7, "x.data_offsets: the end 8 is beyond the 7 bytes of data"},
        {"{" F32("x", "[1]", "[9223372036854775803,9223372036854775807]") "}", 4, "is beyond the 4 bytes of data"},
        {"{" F32("x", "[3]", "[0,8]") "}", 8, "x.data_offsets: 8 bytes, but shape and dtype need 12"},
        {"{" F32("x", "[2]", "[0,8]") "," F32("y", "[2]", "[4,12]") "}", 12, "y: its data overlaps that of x"},
        {"{" F32("x", "[2]", "[0,8]") "," F32("y", "[2]", "[0,8]") "}", 8, "y: its data overlaps that of x"},
        {"{" F32("x", "[2]", "[0,8]") "," F32("e", "[0]", "[4,4]") "}", 8, "e: its data overlaps that of x"},
        {"{" F32("x", "[1]", "[4,8]") "}", 8, "x: a hole of 4 bytes between its data and the header"},
        {"{" F32("x", "[1]", "[0,4]") "," F32("y", "[1]", "[8,12]") "}", 12,
         "y: a hole of 4 bytes between its data and x"},
        {"{" F32("x", "[1]", "[0,4]") "}", 5, "1 bytes behind the last tensor belong to none"},
        {"{}", 3, "3 bytes behind the last tensor"},
        {"{\"__metadata__\":[]}", 0, "__metadata__: expected an object"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "__metadata__.a: expected a string, got an integer"},
        {"{\"a\\u0000b\":1}", 0, "not valid JSON"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t size;
        unsigned char *bytes = safetensors_bytes(cases[i].header, cases[i].data_size, &size);
        assert_refused(bytes, size, cases[i].message);
        free(bytes);
    }
}

static void lying_header_lengths_are_refused(void **state)
{
    (void)state;
    unsigned char bytes[16] = {2, 0, 0, 0, 0, 0, 0, 0, '{', '}'};
    assert_refused(bytes, 0, "0 bytes are too few");
    assert_refused(bytes, 7, "7 bytes are too few");
    assert_refused(bytes, 8, "truncated: the header has 2 bytes and the file 8");
    assert_refused(bytes, 9, "truncated: the header has 2 bytes and the file 9");
    bytes[0] = 0;
    assert_refused(bytes, 10, "does not begin with '{'");
    bytes[0] = 3;
    assert_refused(bytes, 10, "truncated");
    bytes[3] = 0x7f;
    assert_refused(bytes, 10, "a header of 2130706435 bytes");
    memset(bytes, 0xff, 8);
    assert_refused(bytes, 10, "a header of 18446744073709551615 bytes");
}

/* Every prefix of a good file is refused: no length at which a truncated one looks whole. */
static void every_truncation_is_refused(void **state)
{
    (void)state;
    size_t size;
    char *bytes = test_read(python_file, &size);
    for (size_t length = 0; length < size; length++) {
        mtp_safetensors *file;
        char *part = malloc(length + 1);
        memcpy(part, bytes, length);
        if (mtp_safetensors_from_memory(part, length, "part", &file) != MTP_E_FORMAT)
            fail_msg("the first %zu of %zu bytes were accepted", length, size);
        free(part);
    }
    free(bytes);
}

static void wrong_kinds_of_file_are_refused(void **state)
{
    (void)state;
    const char *dir = test_dir(), *empty = test_path("%s/empty.safetensors", dir);
    mtp_safetensors *file;
    test_write(empty, "", 0);
    assert_fails(mtp_safetensors_open(empty, &file), MTP_E_FORMAT, "empty.safetensors: the file is empty");
    assert_null(file);
    assert_fails(mtp_safetensors_open(dir, &file), MTP_E_FORMAT, "is a directory, not a file");
    assert_fails(mtp_safetensors_open(test_path("%s/none", dir), &file), MTP_E_NOT_FOUND, "none: cannot open");
    assert_fails(mtp_safetensors_open(NULL, &file), MTP_E_ARGUMENT, "path");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(foreign_file_is_read),        cmocka_unit_test(scalar_empty_and_six_axes),
        cmocka_unit_test(metadata_keeps_its_order),    cmocka_unit_test(unaligned_data_is_copied_not_viewed),
        cmocka_unit_test(bad_headers_are_refused),     cmocka_unit_test(lying_header_lengths_are_refused),
        cmocka_unit_test(every_truncation_is_refused), cmocka_unit_test(wrong_kinds_of_file_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
