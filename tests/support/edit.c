#include "edit.h"

#include <jansson.h>

#include "base/real.h"

enum { MAX_TENSORS = 4096 };

static void *own(test_tensors *tensors, void *memory)
{
    tensors->owned = realloc(tensors->owned, (tensors->num_owned + 1) * sizeof *tensors->owned);
    return tensors->owned[tensors->num_owned++] = memory;
}

const char *test_model_copy(const char *name)
{
    const char *directory = test_path("%s/drafter", test_dir());
    test_copy(test_path(MTP_TEST_DATA "/sample/%s", name), directory);
    return directory;
}

test_tensors test_tensors_open(const char *path)
{
    test_tensors tensors = {0};
    assert_ok(mtp_safetensors_open(path, &tensors.file));
    tensors.count = mtp_safetensors_count(tensors.file);
    tensors.items = calloc(MAX_TENSORS, sizeof *tensors.items);
    for (size_t i = 0; i < tensors.count; i++) {
        const mtp_safetensors_entry *entry = mtp_safetensors_at(tensors.file, i);
        tensors.items[i] = (mtp_safetensors_source){.name = entry->name,
                                                    .dtype = entry->dtype,
                                                    .rank = entry->rank,
                                                    .shape = entry->shape,
                                                    .data = entry->data};
    }
    return tensors;
}

mtp_safetensors_source *test_tensors_find(test_tensors *tensors, const char *name)
{
    for (size_t i = 0; i < tensors->count; i++)
        if (strcmp(tensors->items[i].name, name) == 0) return &tensors->items[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

void test_tensors_drop(test_tensors *tensors, const char *name)
{
    mtp_safetensors_source *item = test_tensors_find(tensors, name);
    *item = tensors->items[--tensors->count];
}

void test_tensors_rename(test_tensors *tensors, const char *name, const char *to)
{
    test_tensors_find(tensors, name)->name = own(tensors, strdup(to));
}

void *test_tensors_put(test_tensors *tensors, const char *name, mtp_dtype dtype, int32_t rank, const int64_t *shape)
{
    size_t slot = 0, count = 1;
    while (slot < tensors->count && strcmp(tensors->items[slot].name, name) != 0) slot++;
    if (slot == tensors->count) tensors->count++;
    for (int32_t axis = 0; axis < rank; axis++) count *= (size_t)shape[axis];
    int64_t *kept = own(tensors, malloc(5 * sizeof *kept));
    if (rank) memcpy(kept, shape, (size_t)rank * sizeof *kept);
    void *data = own(tensors, calloc(count ? count : 1, mtp_dtype_size(dtype)));
    tensors->items[slot] = (mtp_safetensors_source){
        .name = own(tensors, strdup(name)), .dtype = dtype, .rank = rank, .shape = kept, .data = data};
    return data;
}

void test_tensors_convert(test_tensors *tensors, const char *name, mtp_dtype dtype)
{
    mtp_safetensors_source *item = test_tensors_find(tensors, name);
    int64_t count = 1;
    for (int32_t axis = 0; axis < item->rank; axis++) count *= item->shape[axis];
    float *values = malloc((size_t)count * sizeof *values);
    void *data = own(tensors, malloc((size_t)count * mtp_dtype_size(dtype)));
    mtp__real_to_f32(values, item->data, item->dtype, count);
    mtp__real_from_f32(data, dtype, values, count);
    free(values);
    item->dtype = dtype;
    item->data = data;
}

void test_tensors_write(const test_tensors *tensors, const char *path)
{
    const mtp_safetensors_pair metadata = {"format", "pt"};
    assert_ok(mtp_safetensors_write(path, &metadata, 1, tensors->items, tensors->count));
}

void test_tensors_close(test_tensors *tensors)
{
    for (size_t i = 0; i < tensors->num_owned; i++) free(tensors->owned[i]);
    free(tensors->owned);
    free(tensors->items);
    mtp_safetensors_close(tensors->file);
}

/* ---- JSON ----------------------------------------------------------------------------------------------------- */

/* The object that holds the last part of `key`; *last is that part. */
static json_t *holder_of(json_t *root, const char *key, const char **last)
{
    char part[128];
    json_t *object = root;
    for (const char *dot; object && (dot = strchr(key, '.')); key = dot + 1) {
        snprintf(part, sizeof part, "%.*s", (int)(dot - key), key);
        object = json_object_get(object, part);
    }
    *last = key;
    return object;
}

static json_t *load(const char *path)
{
    json_error_t error;
    json_t *root = json_load_file(path, 0, &error);
    if (!root) fail_msg("%s: %s", path, error.text);
    return root;
}

void test_json_set(const char *path, const char *key, const char *value)
{
    const char *last;
    json_t *root = load(path), *holder = holder_of(root, key, &last);
    if (!holder) fail_msg("%s: no object for %s", path, key);
    if (value) {
        json_t *parsed = json_loads(value, JSON_DECODE_ANY, NULL);
        if (!parsed) fail_msg("not JSON: %s", value);
        json_object_set_new(holder, last, parsed);
    } else {
        json_object_del(holder, last);
    }
    assert_int_equal(json_dump_file(root, path, JSON_INDENT(2)), 0);
    json_decref(root);
}

char *test_json_get(const char *path, const char *key)
{
    const char *last;
    json_t *root = load(path), *holder = holder_of(root, key, &last), *value = json_object_get(holder, last);
    char *text = value ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    json_decref(root);
    return text;
}

bool test_same_file(const char *a, const char *b)
{
    size_t size_a, size_b;
    char *data_a = test_read(a, &size_a), *data_b = test_read(b, &size_b);
    const bool same = size_a == size_b && memcmp(data_a, data_b, size_a) == 0;
    free(data_a);
    free(data_b);
    return same;
}
