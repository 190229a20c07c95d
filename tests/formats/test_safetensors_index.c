/* Protects: a model directory is found whole or sharded, only the shards that are asked for are opened, and an index
 * that lies or leads elsewhere is refused. */
#include "support.h"

#include <unistd.h>

#include "mtp/safetensors.h"

static void write_one(const char *path, const char *name, float value)
{
    const int64_t shape[1] = {1};
    const mtp_safetensors_source source = {.name = name, .dtype = MTP_F32, .rank = 1, .shape = shape, .data = &value};
    assert_ok(mtp_safetensors_write(path, NULL, 0, &source, 1));
}

static void write_text(const char *path, const char *text)
{
    test_write(path, text, strlen(text));
}

static float value_of(mtp_safetensors_index *index, const char *name)
{
    const mtp_safetensors_entry *entry;
    float value;
    assert_ok(mtp_safetensors_index_get(index, name, &entry));
    assert_ok(mtp_safetensors_copy(entry, &value, sizeof value));
    return value;
}

static void single_file(void **state)
{
    (void)state;
    mtp_safetensors_index *index;
    const mtp_safetensors_entry *entry;
    assert_ok(mtp_safetensors_index_open(MTP_TEST_DATA "/sample/drafter_init", &index));
    const size_t count = mtp_safetensors_index_count(index);
    assert_true(count > 10);
    for (size_t i = 0; i < count; i++) {
        assert_ok(mtp_safetensors_index_get(index, mtp_safetensors_index_name(index, i), &entry));
        if (i > 0) assert_true(strcmp(mtp_safetensors_index_name(index, i - 1), entry->name) < 0);
    }
    assert_null(mtp_safetensors_index_name(index, count));
    assert_true(mtp_safetensors_index_has(index, "model.embed_tokens.weight"));
    assert_false(mtp_safetensors_index_has(index, "lm_head.weight"));
    assert_fails(mtp_safetensors_index_get(index, "lm_head.weight", &entry), MTP_E_NOT_FOUND,
                 "no tensor 'lm_head.weight'");
    mtp_safetensors_index_close(index);
    mtp_safetensors_index_close(NULL);
}

static void shards_are_opened_on_demand(void **state)
{
    (void)state;
    const char *dir = test_dir();
    mtp_safetensors_index *index;
    const mtp_safetensors_entry *entry;
    write_one(test_path("%s/model-1.safetensors", dir), "a", 1);
    write_one(test_path("%s/model-2.safetensors", dir), "b", 2);
    write_text(test_path("%s/model.safetensors.index.json", dir),
               "{\"metadata\": {\"total_size\": 8}, \"weight_map\": {\"c\": \"model-3.safetensors\", "
               "\"b\": \"model-2.safetensors\", \"a\": \"model-1.safetensors\", \"z\": \"model-1.safetensors\"}}");
    assert_ok(mtp_safetensors_index_open(dir, &index)); /* model-3 does not exist, which nobody asked for yet */
    assert_int_equal(mtp_safetensors_index_count(index), 4);
    assert_string_equal(mtp_safetensors_index_name(index, 3), "z");
    assert_true(value_of(index, "b") == 2);
    assert_int_equal(unlink(test_path("%s/model-2.safetensors", dir)), 0);
    assert_true(value_of(index, "b") == 2); /* stays open */
    assert_true(value_of(index, "a") == 1);
    assert_fails(mtp_safetensors_index_get(index, "c", &entry), MTP_E_NOT_FOUND, "tensor 'c': ");
    assert_non_null(strstr(mtp_last_error()->message, "model-3.safetensors"));
    assert_fails(mtp_safetensors_index_get(index, "z", &entry), MTP_E_FORMAT, "model-1.safetensors: no tensor 'z'");
    mtp_safetensors_index_close(index);
}

static void bad_directories_are_refused(void **state)
{
    (void)state;
    const char *dir = test_dir(), *json = test_path("%s/model.safetensors.index.json", dir);
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"{}", "index.json: no weight_map"},
        {"{\"weight_map\": []}", "weight_map: expected an object"},
        {"{\"weight_map\": {\"a\": 1}}", "weight_map.a: expected a string"},
        {"{\"weight_map\": {\"a\": \"../model.safetensors\"}}", "'../model.safetensors' is not the name of a file"},
        {"{\"weight_map\": {\"a\": \"/etc/passwd\"}}", "is not the name of a file"},
        {"{\"weight_map\": {\"a\": \"\"}}", "is not the name of a file"},
        {"{\"weight_map\": {\"a\": \"x\", \"a\": \"y\"}}", "duplicate object key"},
        {"{\"weight_map\": ", "not valid JSON"},
        {"", "empty"},
    };
    mtp_safetensors_index *index;
    assert_fails(mtp_safetensors_index_open(dir, &index), MTP_E_NOT_FOUND, "holds no weights; expected");
    assert_null(index);
    assert_fails(mtp_safetensors_index_open(test_path("%s/none", dir), &index), MTP_E_NOT_FOUND, "is not a directory");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_text(json, cases[i].text);
        assert_fails(mtp_safetensors_index_open(dir, &index), MTP_E_FORMAT, cases[i].message);
    }
    write_text(test_path("%s/model.safetensors", dir), "no safetensors");
    assert_fails(mtp_safetensors_index_open(dir, &index), MTP_E_FORMAT, "/model.safetensors: not a safetensors file");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(single_file),
        cmocka_unit_test(shards_are_opened_on_demand),
        cmocka_unit_test(bad_directories_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
