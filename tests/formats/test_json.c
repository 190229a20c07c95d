/* Protects: JSON is read strictly with messages that name the place, and written byte for byte as Python writes it. */
#include "support.h"

#include "formats/json.h"

static json_t *parse(const char *text)
{
    json_t *root;
    assert_ok(mtp__json_parse(text, strlen(text), "config.json", 1, &root));
    return root;
}

static void assert_refused(const char *text, const char *message)
{
    json_t *root = (json_t *)(uintptr_t)1;
    assert_fails(mtp__json_parse(text, strlen(text), "config.json", 1, &root), MTP_E_FORMAT, message);
    assert_null(root);
}

static void faults_have_a_place(void **state)
{
    (void)state;
    assert_refused("", "config.json:1: empty");
    assert_refused(" \n\t", "config.json:1: empty");
    assert_refused("{\n  \"a\": 1,\n  \"a\": 2\n}", "config.json:3:5: not valid JSON: duplicate object key");
    assert_refused("{\n\"a\": 1", "config.json:2:6: not valid JSON");
    assert_refused("{} {}", "not valid JSON: end of file expected");
    assert_refused("[9223372036854775808]", "too big integer");
    assert_refused("[1e999]", "real number overflow");
    assert_refused("[NaN]", "not valid JSON");
    assert_refused("[\"\xff\"]", "not valid JSON");
    assert_refused("{\"a\\u0000b\": 1}", "not valid JSON");
    json_t *root;
    assert_fails(mtp__json_parse("{,}", 3, "lines", 7, &root), MTP_E_FORMAT, "lines:7:2: ");
}

static void depth_is_limited(void **state)
{
    (void)state;
    enum { DEEP = 100000 };
    char *text = malloc(DEEP + 1);
    memset(text, '[', DEEP);
    text[DEEP] = '\0';
    assert_refused(text, "config.json:1: nested deeper than 100 levels");
    free(text);
    char fits[2 * MTP__JSON_MAX_DEPTH + 1] = "";
    memset(fits, '[', MTP__JSON_MAX_DEPTH);
    memset(fits + MTP__JSON_MAX_DEPTH, ']', MTP__JSON_MAX_DEPTH);
    json_decref(parse(fits));
    char brackets[3 * MTP__JSON_MAX_DEPTH];
    memset(brackets, '[', sizeof brackets);
    memcpy(brackets, "\"\\\"", 3);
    memcpy(brackets + sizeof brackets - 2, "\"", 2);
    json_decref(parse(brackets)); /* inside a string they are text */
}

static void files_are_checked(void **state)
{
    (void)state;
    const char *dir = test_dir(), *path = test_path("%s/a.json", dir);
    json_t *root;
    test_write(path, "{\"a\": }", 7);
    assert_fails(mtp__json_read(path, &root), MTP_E_FORMAT, "a.json:1:7: not valid JSON");
    assert_fails(mtp__json_read(dir, &root), MTP_E_FORMAT, "is a directory");
    assert_fails(mtp__json_read(test_path("%s/none", dir), &root), MTP_E_NOT_FOUND, "none");
    test_write(path, "", 0);
    assert_fails(mtp__json_read(path, &root), MTP_E_FORMAT, "a.json:1: empty");
}

static void getters_return_values(void **state)
{
    (void)state;
    json_t *value =
        parse("{\"t\": {\"n\": -3, \"x\": 2.5, \"yes\": true, \"name\": \"abc\", \"list\": [1, 2], \"nil\": null}}");
    const mtp__json_node root = mtp__json_root(value, "config.json");
    mtp__json_node text, list;
    int64_t n;
    double x;
    bool yes;
    const char *name;
    size_t count;
    assert_ok(mtp__json_get_object(&root, "t", &text));
    assert_ok(mtp__json_get_int64(&text, "n", -3, 0, &n));
    assert_int_equal(n, -3);
    assert_ok(mtp__json_get_double(&text, "x", &x));
    assert_true(x == 2.5);
    assert_ok(mtp__json_get_double(&text, "n", &x));
    assert_true(x == -3);
    assert_ok(mtp__json_get_bool(&text, "yes", &yes));
    assert_true(yes);
    assert_ok(mtp__json_get_string(&text, "name", &name));
    assert_string_equal(name, "abc");
    assert_ok(mtp__json_get_array(&text, "list", &list, &count));
    assert_int_equal(count, 2);
    const mtp__json_node item = mtp__json_item(&list, 1);
    assert_ok(mtp__json_as_int64(&item, 0, 9, &n));
    assert_int_equal(n, 2);
    assert_true(mtp__json_has(&text, "n") && !mtp__json_has(&text, "nil") && !mtp__json_has(&text, "m"));
    json_decref(value);
}

static void getters_name_the_path(void **state)
{
    (void)state;
    json_t *value =
        parse("{\"text_config\": {\"hidden_size\": \"64\", \"types\": [\"a\", [1, 2.5]], \"nil\": null, \"n\": 7}}");
    const mtp__json_node root = mtp__json_root(value, "config.json");
    mtp__json_node text, types, inner;
    int64_t n;
    size_t count;
    bool yes;
    const char *name;
    assert_ok(mtp__json_get_object(&root, "text_config", &text));
    assert_fails(mtp__json_get_int64(&text, "hidden_size", 1, 9, &n), MTP_E_FORMAT,
                 "config.json: text_config.hidden_size: expected an integer, got a string");
    assert_fails(mtp__json_get_int64(&text, "n", 1, 6, &n), MTP_E_FORMAT, "text_config.n: 7 is outside 1..6");
    assert_fails(mtp__json_get_int64(&text, "none", 1, 6, &n), MTP_E_NOT_FOUND, "text_config.none: the key is missing");
    assert_fails(mtp__json_get_string(&text, "nil", &name), MTP_E_FORMAT,
                 "text_config.nil: expected a string, got null");
    assert_fails(mtp__json_get_bool(&text, "n", &yes), MTP_E_FORMAT, "expected true or false, got an integer");
    assert_ok(mtp__json_get_array(&text, "types", &types, &count));
    inner = mtp__json_item(&types, 1);
    const mtp__json_node item = mtp__json_item(&inner, 1);
    assert_fails(mtp__json_as_int64(&item, 0, 9, &n), MTP_E_FORMAT,
                 "config.json: text_config.types[1][1]: expected an integer, got a real number");
    assert_fails(mtp__json_get(&types, "a", &inner), MTP_E_FORMAT,
                 "text_config.types: expected an object, got an array");
    assert_fails(mtp__json_fail(&item, MTP_E_DATA, "must be %d", 3), MTP_E_DATA, "types[1][1]: must be 3");
    assert_fails(mtp__json_fail(&root, MTP_E_DATA, "is odd"), MTP_E_DATA, "config.json: is odd");
    json_decref(value);
}

/* Reading and writing again gives the same bytes. */
static void assert_rewritten(const char *path, unsigned flags)
{
    json_t *root;
    size_t size;
    char *expected = test_read(path, &size);
    const char *out = test_path("%s/out.json", test_dir());
    if (size > 0 && expected[size - 1] == '\n') flags |= MTP__JSON_NEWLINE;
    assert_ok(mtp__json_read(path, &root));
    assert_ok(mtp__json_write(out, root, flags));
    char *got = test_read(out, NULL);
    assert_string_equal(got, expected);
    free(got), free(expected);
    json_decref(root);
}

static void output_is_that_of_python(void **state)
{
    (void)state;
    json_t *root;
    assert_rewritten(MTP_TEST_DATA "/formats/python.json", 0);
    assert_rewritten(MTP_TEST_DATA "/formats/python_line.json", MTP__JSON_ONE_LINE);
    assert_rewritten(MTP_TEST_DATA "/formats/python_sorted.json", MTP__JSON_SORT_KEYS);
    assert_rewritten(MTP_TEST_DATA "/sample/drafter_init/config.json", 0);
    assert_rewritten(MTP_TEST_DATA "/sample/verifier/config.json", 0);
    assert_rewritten(MTP_TEST_DATA "/sample/verifier/generation_config.json", 0);
    assert_ok(mtp__json_read(MTP_TEST_DATA "/formats/python.json", &root));
    char *sorted, *expected = test_read(MTP_TEST_DATA "/formats/python_sorted.json", NULL);
    assert_ok(mtp__json_dump(root, MTP__JSON_SORT_KEYS | MTP__JSON_NEWLINE, &sorted));
    assert_string_equal(sorted, expected);
    free(sorted), free(expected);
    json_decref(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(faults_have_a_place),   cmocka_unit_test(depth_is_limited),
        cmocka_unit_test(files_are_checked),     cmocka_unit_test(getters_return_values),
        cmocka_unit_test(getters_name_the_path), cmocka_unit_test(output_is_that_of_python),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
