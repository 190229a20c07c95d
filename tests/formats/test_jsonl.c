/* Protects: JSON lines are read with their line numbers, a bad line is named and does not hide the next, and an
 * appender goes on behind the last whole line. */
#include "support.h"

#include "formats/jsonl.h"

static int64_t next_number(mtp__jsonl_reader *reader)
{
    json_t *value;
    int64_t number = -1;
    assert_ok(mtp__jsonl_next(reader, &value));
    if (!value) return -1;
    const mtp__json_node root = mtp__json_root(value, reader->origin);
    assert_ok(mtp__json_get_int64(&root, "n", 0, 100, &number));
    json_decref(value);
    return number;
}

static void lines_are_walked(void **state)
{
    (void)state;
    const char *path = test_path("%s/side.jsonl", test_dir());
    static const char text[] = "{\"n\": 1}\r\n\n  \t\n{\"n\": 2}\n{\"n\": 3}";
    mtp__jsonl_reader reader;
    test_write(path, text, sizeof text - 1);
    assert_ok(mtp__jsonl_open(&reader, path));
    assert_int_equal(next_number(&reader), 1);
    assert_int_equal(reader.line, 1);
    assert_int_equal(next_number(&reader), 2);
    assert_int_equal(reader.line, 4);
    assert_string_equal(reader.origin, test_path("%s:4", path));
    assert_int_equal(next_number(&reader), 3);
    assert_int_equal(next_number(&reader), -1);
    assert_int_equal(next_number(&reader), -1);
    mtp__jsonl_close(&reader);
    mtp__jsonl_close(&reader);
}

static void bad_lines_are_named_and_passed(void **state)
{
    (void)state;
    static const char text[] = "{\"n\": 1}\n{\"n\": }\n{\"n\": 1, \"n\": 2}\n{} {}\n\"\xff\"\n{\"m\": 1}\n{\"n\": 7}\n";
    mtp__jsonl_reader reader;
    json_t *value;
    int64_t number;
    assert_ok(mtp__jsonl_open_text(&reader, text, sizeof text - 1, "side.jsonl"));
    assert_int_equal(next_number(&reader), 1);
    assert_fails(mtp__jsonl_next(&reader, &value), MTP_E_FORMAT, "side.jsonl:2:7: not valid JSON");
    assert_null(value);
    assert_fails(mtp__jsonl_next(&reader, &value), MTP_E_FORMAT, "side.jsonl:3:12: not valid JSON: duplicate");
    assert_fails(mtp__jsonl_next(&reader, &value), MTP_E_FORMAT,
                 "side.jsonl:4:4: not valid JSON: end of file expected");
    assert_fails(mtp__jsonl_next(&reader, &value), MTP_E_FORMAT, "side.jsonl:5:");
    assert_ok(mtp__jsonl_next(&reader, &value));
    const mtp__json_node root = mtp__json_root(value, reader.origin);
    assert_fails(mtp__json_get_int64(&root, "n", 0, 9, &number), MTP_E_NOT_FOUND,
                 "side.jsonl:6: n: the key is missing");
    json_decref(value);
    assert_int_equal(next_number(&reader), 7);
    mtp__jsonl_close(&reader);
}

static void long_lines_are_refused(void **state)
{
    (void)state;
    const size_t size = MTP__JSONL_MAX_LINE + 12;
    char *text = malloc(size);
    mtp__jsonl_reader reader;
    json_t *value;
    memset(text, '1', size);
    memcpy(text + size - 9, "\n{\"n\": 5}", 9);
    assert_ok(mtp__jsonl_open_text(&reader, text, size, "side.jsonl"));
    assert_fails(mtp__jsonl_next(&reader, &value), MTP_E_FORMAT, "side.jsonl:1: a line of 16777219 bytes");
    assert_int_equal(next_number(&reader), 5);
    mtp__jsonl_close(&reader);
    free(text);
}

static void wrong_kinds_of_file_are_refused(void **state)
{
    (void)state;
    const char *dir = test_dir(), *empty = test_path("%s/empty.jsonl", dir);
    mtp__jsonl_reader reader;
    test_write(empty, "", 0);
    assert_fails(mtp__jsonl_open(&reader, empty), MTP_E_FORMAT, "empty.jsonl: the file is empty");
    assert_fails(mtp__jsonl_open(&reader, dir), MTP_E_FORMAT, "is a directory");
    assert_fails(mtp__jsonl_open(&reader, test_path("%s/none", dir)), MTP_E_NOT_FOUND, "none");
}

/* ---- appending ------------------------------------------------------------------------------------------------- */

static void append_number(const char *path, int number)
{
    mtp__jsonl_writer writer;
    json_t *value = json_pack("{s:i,s:f}", "n", number, "loss", 0.1);
    assert_ok(mtp__jsonl_append_open(&writer, path));
    assert_ok(mtp__jsonl_append(&writer, value));
    assert_ok(mtp__jsonl_sync(&writer));
    mtp__jsonl_append_close(&writer);
    mtp__jsonl_append_close(&writer);
    json_decref(value);
}

static void appender_goes_on_behind_the_last_whole_line(void **state)
{
    (void)state;
    const char *path = test_path("%s/metrics.jsonl", test_dir());
    append_number(path, 1);
    append_number(path, 2);
    char *text = test_read(path, NULL);
    assert_string_equal(text, "{\"n\": 1, \"loss\": 0.1}\n{\"n\": 2, \"loss\": 0.1}\n");
    free(text);
    test_write(path, "{\"n\": 1}\n{\"n\": 2, \"lo", 21); /* killed in the middle of a line */
    append_number(path, 3);
    text = test_read(path, NULL);
    assert_string_equal(text, "{\"n\": 1}\n{\"n\": 3, \"loss\": 0.1}\n");
    free(text);
    char torn[10001];
    memset(torn, 'x', sizeof torn);
    torn[0] = '\n';
    test_write(path, torn, sizeof torn); /* a torn line longer than what is looked at in one go */
    append_number(path, 4);
    text = test_read(path, NULL);
    assert_string_equal(text, "\n{\"n\": 4, \"loss\": 0.1}\n");
    free(text);
    test_write(path, torn + 1, sizeof torn - 1); /* no whole line at all */
    append_number(path, 5);
    text = test_read(path, NULL);
    assert_string_equal(text, "{\"n\": 5, \"loss\": 0.1}\n");
    free(text);
}

static void appender_refuses_a_directory(void **state)
{
    (void)state;
    mtp__jsonl_writer writer;
    assert_fails(mtp__jsonl_append_open(&writer, test_dir()), MTP_E_IO, "cannot open: Is a directory");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lines_are_walked),
        cmocka_unit_test(bad_lines_are_named_and_passed),
        cmocka_unit_test(long_lines_are_refused),
        cmocka_unit_test(wrong_kinds_of_file_are_refused),
        cmocka_unit_test(appender_goes_on_behind_the_last_whole_line),
        cmocka_unit_test(appender_refuses_a_directory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
