/* Protects: event files are what TensorBoard reads: records with correct checksums, the version event first, scalars
 * with step, time, tag and value; a second part of a run never touches the file of the first. */
#include "support.h"

#include "base/file.h"
#include "formats/tfevents.h"

/* CRC-32C bit by bit, masked as TensorFlow does. */
static uint32_t masked_crc(const unsigned char *data, size_t size)
{
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < size; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
    }
    crc = ~crc;
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static uint64_t little_endian(const unsigned char *data, int bytes)
{
    uint64_t value = 0;
    while (bytes-- > 0) value = value << 8 | data[bytes];
    return value;
}

/* Checks the frame at `*next` and returns its message. */
static const unsigned char *next_record(const unsigned char **next, const unsigned char *end, size_t *size)
{
    const unsigned char *record = *next;
    if (end - record < 16) fail_msg("%td bytes are no record", end - record);
    *size = (size_t)little_endian(record, 8);
    assert_int_equal(little_endian(record + 8, 4), masked_crc(record, 8));
    if ((size_t)(end - record) < *size + 16) fail_msg("the record is longer than the file");
    assert_int_equal(little_endian(record + 12 + *size, 4), masked_crc(record + 12, *size));
    *next = record + 16 + *size;
    return record + 12;
}

/* An event of "tag" = 2.5 at `step`, time 1000.5, as protobuf encodes it. */
static void assert_scalar(const unsigned char *event, size_t size, const unsigned char *step, size_t step_size)
{
    static const unsigned char time[] = {0x09, 0, 0, 0, 0, 0, 0x44, 0x8f, 0x40, 0x10};
    static const unsigned char summary[] = {0x2a, 0x0c, 0x0a, 0x0a, 0x0a, 0x03, 't', 'a', 'g', 0x15, 0, 0, 0x20, 0x40};
    assert_int_equal(size, sizeof time + step_size + sizeof summary);
    assert_memory_equal(event, time, sizeof time);
    assert_memory_equal(event + sizeof time, step, step_size);
    assert_memory_equal(event + sizeof time + step_size, summary, sizeof summary);
}

static void records_are_exact(void **state)
{
    (void)state;
    const char *dir = test_path("%s/a/events", test_dir());
    mtp__tfevents *events;
    size_t file_size, size;
    assert_ok(mtp__tfevents_create(dir, 1000.5, &events));
    const char *path = test_path("%s", mtp__tfevents_path(events));
    assert_int_equal(strncmp(mtp__path_name(path), "events.out.tfevents.0000001000.", 31), 0);
    assert_ok(mtp__tfevents_scalar(events, "tag", 300, 1000.5, 2.5f));
    assert_ok(mtp__tfevents_flush(events));
    assert_ok(mtp__tfevents_scalar(events, "tag", 0, 1000.5, 2.5f));
    assert_ok(mtp__tfevents_close(events));
    char *bytes = test_read(path, &file_size);
    const unsigned char *next = (unsigned char *)bytes, *end = next + file_size;
    const unsigned char *event = next_record(&next, end, &size);
    static const unsigned char version[] = "\x09\0\0\0\0\0\x44\x8f\x40\x1a\x0d"
                                           "brain.Event:2";
    assert_int_equal(size, sizeof version - 1);
    assert_memory_equal(event, version, size);
    event = next_record(&next, end, &size);
    assert_scalar(event, size, (const unsigned char[]){0xac, 0x02}, 2);
    event = next_record(&next, end, &size);
    assert_scalar(event, size, (const unsigned char[]){0x00}, 1);
    assert_ptr_equal(next, end);
    free(bytes);
}

static void many_records_pass_the_buffer_whole(void **state)
{
    (void)state;
    enum { RECORDS = 5000 };
    mtp__tfevents *events;
    size_t file_size, size, count = 0;
    char tag[MTP__TFEVENTS_MAX_TAG + 2];
    assert_ok(mtp__tfevents_create(test_dir(), 1e9, &events));
    const char *path = test_path("%s", mtp__tfevents_path(events));
    memset(tag, 't', sizeof tag);
    for (int i = 0; i < RECORDS; i++) {
        tag[i % (MTP__TFEVENTS_MAX_TAG + 1)] = '\0';
        assert_ok(mtp__tfevents_scalar(events, tag, (int64_t)i << 40, 1e9, (float)i));
        tag[i % (MTP__TFEVENTS_MAX_TAG + 1)] = 't';
    }
    tag[MTP__TFEVENTS_MAX_TAG + 1] = '\0';
    assert_fails(mtp__tfevents_scalar(events, tag, 1, 1e9, 0), MTP_E_ARGUMENT, "is longer than 200 bytes");
    assert_ok(mtp__tfevents_close(events));
    char *bytes = test_read(path, &file_size);
    const unsigned char *next = (unsigned char *)bytes, *end = next + file_size;
    for (; next < end; count++) (void)next_record(&next, end, &size);
    assert_int_equal(count, RECORDS + 1);
    free(bytes);
}

static void each_part_of_a_run_has_its_own_file(void **state)
{
    (void)state;
    const char *dir = test_dir();
    mtp__tfevents *first, *second;
    mtp__name_list list;
    assert_ok(mtp__tfevents_create(dir, 1000, &first));
    assert_ok(mtp__tfevents_create(dir, 1000, &second));
    assert_string_not_equal(mtp__tfevents_path(first), mtp__tfevents_path(second));
    assert_ok(mtp__tfevents_close(first));
    assert_ok(mtp__tfevents_close(second));
    assert_ok(mtp__dir_list(dir, MTP__LIST_FILES, NULL, &list));
    assert_int_equal(list.count, 2);
    mtp__name_list_free(&list);
    assert_ok(mtp__tfevents_close(NULL));
}

static void bad_directories_are_refused(void **state)
{
    (void)state;
    const char *file = test_path("%s/file", test_dir());
    mtp__tfevents *events;
    test_write(file, "x", 1);
    assert_fails(mtp__tfevents_create(file, 1000, &events), MTP_E_IO, "file: cannot create the directory");
    assert_null(events);
    assert_fails(mtp__tfevents_create("/proc/mtp", 1000, &events), MTP_E_NOT_FOUND, "/proc/mtp");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(records_are_exact),
        cmocka_unit_test(many_records_pass_the_buffer_whole),
        cmocka_unit_test(each_part_of_a_run_has_its_own_file),
        cmocka_unit_test(bad_directories_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
