/* Protects: a configuration arrives with its types and source lines, faults name file, line and column, and --set
 * values are taken as TOML or as a plain word. */
#include "support.h"

#include "formats/toml.h"

static mtp__toml *parse(const char *text)
{
    mtp__toml *toml;
    assert_ok(mtp__toml_parse(text, strlen(text), "run.toml", &toml));
    return toml;
}

static const mtp__toml_node *at(const mtp__toml *toml, const char *path)
{
    const mtp__toml_node *node = &toml->nodes[0];
    char *copy = strdup(path), *rest = copy;
    for (char *key; (key = strsep(&rest, "/"));) {
        node = mtp__toml_find(toml, node, key);
        if (!node) fail_msg("no %s in %s", key, path);
    }
    free(copy);
    return node;
}

static void assert_refused(const char *text, const char *message)
{
    mtp__toml *toml;
    assert_fails(mtp__toml_parse(text, strlen(text), "run.toml", &toml), MTP_E_CONFIG, message);
    assert_null(toml);
}

/* ---- good ------------------------------------------------------------------------------------------------------ */

static void values_have_types_and_lines(void **state)
{
    (void)state;
    mtp__toml *toml = parse("# a comment\n"
                            "name = \"run 1\"\n"
                            "\n"
                            "[optimizer]\n"
                            "learning_rate = 1e-4\n"
                            "steps = 1_000\n"
                            "fused = true\n"
                            "betas = [0.9,\n"
                            "         0.95]\n"
                            "schedule.warmup = -5\n"
                            "[data]\n"
                            "parts = [{path = 'a'}, {path = 'b', weight = 2}]\n");
    assert_string_equal(at(toml, "name")->string, "run 1");
    assert_int_equal(at(toml, "name")->line, 2);
    assert_int_equal(at(toml, "optimizer")->kind, MTP__TOML_TABLE);
    assert_int_equal(at(toml, "optimizer")->line, 4);
    assert_int_equal(at(toml, "optimizer")->num_children, 5);
    assert_int_equal(at(toml, "optimizer/learning_rate")->kind, MTP__TOML_FLOAT);
    assert_true(at(toml, "optimizer/learning_rate")->number == 1e-4);
    assert_int_equal(at(toml, "optimizer/learning_rate")->line, 5);
    assert_int_equal(at(toml, "optimizer/steps")->kind, MTP__TOML_INTEGER);
    assert_int_equal(at(toml, "optimizer/steps")->integer, 1000);
    assert_true(at(toml, "optimizer/steps")->number == 1000);
    assert_int_equal(at(toml, "optimizer/fused")->kind, MTP__TOML_BOOL);
    assert_true(at(toml, "optimizer/fused")->boolean);
    assert_int_equal(at(toml, "optimizer/schedule/warmup")->integer, -5);
    assert_int_equal(at(toml, "optimizer/schedule/warmup")->line, 10);
    const mtp__toml_node *betas = at(toml, "optimizer/betas"), *item = mtp__toml_first(toml, betas);
    assert_int_equal(betas->kind, MTP__TOML_ARRAY);
    assert_int_equal(betas->num_children, 2);
    assert_true(item->number == 0.9 && item->line == 8 && !item->key);
    item = mtp__toml_next(toml, item);
    assert_true(item->number == 0.95 && item->line == 9);
    assert_null(mtp__toml_next(toml, item));
    assert_null(mtp__toml_find(toml, &toml->nodes[0], "none"));
    assert_null(mtp__toml_first(toml, at(toml, "name")));
    mtp__toml_free(toml);
    mtp__toml_free(NULL);
}

static void paths_and_messages_name_the_place(void **state)
{
    (void)state;
    char text[64];
    mtp__toml *toml = parse("[data]\n\nparts = [{path = 'a'}, {path = 'b', weight = 2}]\n");
    const mtp__toml_node *second = mtp__toml_next(toml, mtp__toml_first(toml, at(toml, "data/parts")));
    const mtp__toml_node *weight = mtp__toml_find(toml, second, "weight");
    assert_string_equal(mtp__toml_path(toml, weight, text, sizeof text), "data.parts[1].weight");
    assert_string_equal(mtp__toml_path(toml, weight, text, 8), "data.pa");
    assert_string_equal(mtp__toml_path(toml, &toml->nodes[0], text, sizeof text), "");
    assert_fails(mtp__toml_fail(toml, weight, "unknown key '%s'", "weight"), MTP_E_CONFIG,
                 "run.toml:3: unknown key 'weight'");
    assert_string_equal(mtp__toml_kind_name(weight->kind), "an integer");
    mtp__toml_free(toml);
}

static void members_keep_the_order_of_the_file(void **state)
{
    (void)state;
    mtp__toml *toml = parse("z = 1\nb = 2\n[m]\ny = 1\na = 2\n[c]\n");
    const char *expected[] = {"z", "b", "m", "c"};
    const mtp__toml_node *node = mtp__toml_first(toml, &toml->nodes[0]);
    for (size_t i = 0; i < 4; i++, node = mtp__toml_next(toml, node)) assert_string_equal(node->key, expected[i]);
    assert_null(node);
    assert_string_equal(mtp__toml_first(toml, at(toml, "m"))->key, "y");
    mtp__toml_free(toml);
    toml = parse("\xef\xbb\xbf");
    assert_int_equal(toml->num_nodes, 1);
    mtp__toml_free(toml);
    toml = parse("");
    assert_int_equal(toml->num_nodes, 1);
    assert_null(mtp__toml_first(toml, &toml->nodes[0]));
    mtp__toml_free(toml);
}

#ifndef MTP_TEST_TOML
/* What only toml++ reads is refused with the way out. */
static void the_rest_of_toml_is_refused(void **state)
{
    (void)state;
    assert_refused("a = \"\"\"\nx\"\"\"\n", "run.toml:1: a string of several lines needs a build with toml++");
    assert_refused("\na = 0x10\n", "run.toml:2:5: not valid TOML: a value that is no string, decimal number");
    assert_refused("a = 07\n", "no string, decimal number");
    assert_refused("a.b = 1\n[a]\n", "run.toml:2:4: not valid TOML: a table that is there already");
    assert_refused("a = {b = 1}\na.c = 2\n", "run.toml:2:3: not valid TOML: a key that has a value already");
    assert_refused("[[a]]\n[a]\n", "a table that is there already");
    assert_refused("[a]\n[[a]]\n", "a key that is no list of tables");
    assert_refused("a = 1 2\n", "run.toml:1:7: not valid TOML: something behind the end");
    assert_refused("a = [1 2]\n", "a list without , or ]");
    assert_refused("a = \"\\x\"\n", "an unknown escape");
    assert_refused("a = \"\\ud800\"\n", "an escape that is no character");
}
#endif

static void lists_of_tables_and_escapes(void **state)
{
    (void)state;
    mtp__toml *toml =
        parse("[[data.sources]]\npath = \"a\\tb\\u00e9\\\\\"\n[[data.sources]]\npath = 'c\\'\nweight = +1_0.5e-1\n"
              "[data.sources.more]\n\"quoted key\" = [ # a comment\n 1, [], {}, ]\n");
    const mtp__toml_node *sources = at(toml, "data/sources"), *first = mtp__toml_first(toml, sources);
    assert_int_equal(sources->num_children, 2);
    assert_string_equal(mtp__toml_find(toml, first, "path")->string, "a\tb\xc3\xa9\\");
    const mtp__toml_node *second = mtp__toml_next(toml, first);
    assert_string_equal(mtp__toml_find(toml, second, "path")->string, "c\\");
    assert_true(mtp__toml_find(toml, second, "weight")->number == 10.5e-1);
    assert_int_equal(mtp__toml_find(toml, mtp__toml_find(toml, second, "more"), "quoted key")->num_children, 3);
    mtp__toml_free(toml);
}

/* ---- bad ------------------------------------------------------------------------------------------------------- */

static void faults_have_a_place(void **state)
{
    (void)state;
    assert_refused("a = 1\nb = \n", "run.toml:2:");
    assert_refused("a = 1\nb = \n", "not valid TOML: ");
    assert_refused("a = 1\na = 2\n", "run.toml:2:");
    assert_refused("[a]\n[a]\n", "run.toml:2:");
    assert_refused("a = 9223372036854775808\n", "run.toml:1:");
    assert_refused("a = \"\xff\"\n", "run.toml:1:");
    assert_refused("# Н\na = \"Н\"\nН = 1\n", "run.toml:3: a letter beyond ASCII outside of quotes");
    assert_refused("a = Н\n", "run.toml:1: a letter beyond ASCII outside of quotes");
    assert_refused("a = \"open", "run.toml:1:");
    assert_refused("\n\nday = 2024-01-01\n", "run.toml:3: dates and times");
    assert_refused("\na = \"x\\u0000y\"\n", "run.toml:2: a string with a NUL character");
    assert_refused("\n\"x\\u0000y\" = 1\n", "run.toml:2: a key with a NUL character");
}

static void files_are_a_matter_of_configuration(void **state)
{
    (void)state;
    const char *dir = test_dir(), *path = test_path("%s/run.toml", dir);
    mtp__toml *toml;
    assert_fails(mtp__toml_read(path, &toml), MTP_E_CONFIG, "run.toml: cannot open: No such file");
    assert_fails(mtp__toml_read(dir, &toml), MTP_E_CONFIG, "is a directory, not a file");
    assert_null(toml);
    char *large = malloc(MTP__TOML_MAX_BYTES + 1);
    memset(large, '#', MTP__TOML_MAX_BYTES + 1);
    test_write(path, large, MTP__TOML_MAX_BYTES + 1);
    assert_fails(mtp__toml_read(path, &toml), MTP_E_CONFIG, "has 1048577 bytes; at most 1048576");
    free(large);
    test_write(path, "a = 1\n", 6);
    assert_ok(mtp__toml_read(path, &toml));
    assert_string_equal(toml->origin, path);
    mtp__toml_free(toml);
}

/* `count` copies of `part` between `before` and `after`. */
static char *repeated(const char *before, const char *part, size_t count, const char *after)
{
    char *text = malloc(strlen(before) + strlen(part) * count + strlen(after) + 1), *end = stpcpy(text, before);
    for (size_t i = 0; i < count; i++) end = stpcpy(end, part);
    stpcpy(end, after);
    return text;
}

static void depth_is_limited(void **state)
{
    (void)state;
    static const struct {
        const char *before, *part, *after;
        size_t count;
    } cases[] = {
        {"\n", "a.", "a = 1", 100000},
        {"\n[", "a . ", "a]", 100000},
        {"\n", "'a'.\"b\".", "c = 1", 50000},
        {"\na = ", "[", "", 100000},
        {"\na = ", "{a=", "1", 100000},
#ifdef MTP_TEST_TOML
        {"\nx = [\"\"\"q\"\"\"\"", ", {a.a", "", 60},
        {"\nx = ['''q''''', {", "a.", "", 60},
#endif
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = repeated(cases[i].before, cases[i].part, cases[i].count, cases[i].after);
        assert_refused(text, "run.toml:2: nested deeper than 32 levels");
        free(text);
    }
}

static void dots_that_nest_nothing_are_allowed(void **state)
{
    (void)state;
    char *floats = repeated("a = [", "0.5, ", 1000, "]"), *comment = repeated("# ", ".", 1000, "\na = 1");
#ifdef MTP_TEST_TOML
    char *literal = repeated("a = '''\n", "{.\n", 1000, "'''\nb = 1");
#else
    char *literal = repeated("a = '", "{.", 1000, "'\nb = 1");
#endif
    char *string = repeated("a = \"", "[.", 1000, "\"");
    char *escaped = repeated("a = \"\\\"", "[.", 1000, "\"");
    mtp__toml_free(parse(floats));
    mtp__toml_free(parse(comment));
    mtp__toml_free(parse(string));
    mtp__toml_free(parse(literal));
    mtp__toml_free(parse(escaped));
    free(floats), free(comment), free(string), free(literal), free(escaped);
}

/* ---- --set ----------------------------------------------------------------------------------------------------- */

static void assert_override_is_string(const char *text, const char *path, const char *value)
{
    mtp__toml *toml;
    assert_ok(mtp__toml_override(text, &toml));
    if (at(toml, path)->kind != MTP__TOML_STRING) fail_msg("%s: not a string", text);
    assert_string_equal(at(toml, path)->string, value);
    mtp__toml_free(toml);
}

static void overrides_are_toml_or_words(void **state)
{
    (void)state;
    mtp__toml *toml;
    assert_ok(mtp__toml_override("optimizer.learning_rate=3e-4", &toml));
    assert_true(at(toml, "optimizer/learning_rate")->number == 3e-4);
    assert_int_equal(toml->num_nodes, 3);
    assert_fails(mtp__toml_fail(toml, at(toml, "optimizer"), "unknown"), MTP_E_CONFIG,
                 "--set optimizer.learning_rate=3e-4: unknown");
    mtp__toml_free(toml);
    assert_ok(mtp__toml_override("data.train = ['a', \"b=c\"]", &toml));
    assert_int_equal(at(toml, "data/train")->num_children, 2);
    mtp__toml_free(toml);
    assert_ok(mtp__toml_override("a=true", &toml));
    assert_true(at(toml, "a")->boolean);
    mtp__toml_free(toml);
    assert_override_is_string("a=runs/x-1", "a", "runs/x-1");
    assert_override_is_string("a.b=True", "a/b", "True");
    assert_override_is_string("a= two words ", "a", "two words");
    assert_override_is_string("a=C:\\dir \"q\"", "a", "C:\\dir \"q\"");
    assert_override_is_string("a=3#4", "a", "3#4");
    assert_override_is_string("a=x=y", "a", "x=y");
    assert_override_is_string("a=''", "a", "");
    assert_override_is_string("\"a=b\"=\"x\"", "a=b", "x");
}

static void bad_overrides_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"a", "--set a: expected key=value"},
        {"", "expected key=value"},
        {"a=", "--set a=: no value; an empty"},
        {"=3", "--set =3: not valid TOML"},
        {"a..b=3", "--set a..b=3: not valid TOML"},
        {"a=3\nb=4", "expected key=value on one line"},
        {"a=[1", "--set a=[1: not valid TOML"},
        {"a='x", "not valid TOML"},
        {"[a]=3", "not valid TOML"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mtp__toml *toml;
        assert_fails(mtp__toml_override(cases[i].text, &toml), MTP_E_CONFIG, cases[i].message);
        assert_null(toml);
    }
    assert_override_is_string("a=2024-01-01", "a", "2024-01-01"); /* dates are words: run names look like this */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_have_types_and_lines),         cmocka_unit_test(paths_and_messages_name_the_place),
        cmocka_unit_test(members_keep_the_order_of_the_file),  cmocka_unit_test(faults_have_a_place),
        cmocka_unit_test(files_are_a_matter_of_configuration), cmocka_unit_test(depth_is_limited),
        cmocka_unit_test(dots_that_nest_nothing_are_allowed),
#ifndef MTP_TEST_TOML
        cmocka_unit_test(the_rest_of_toml_is_refused),
#endif
        cmocka_unit_test(lists_of_tables_and_escapes),         cmocka_unit_test(overrides_are_toml_or_words),
        cmocka_unit_test(bad_overrides_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
