#include "support.h"

#include <jansson.h>

#include "mtp/safetensors.h"
#include "train.h"

const char *test_train_text(const char *output_dir, const char *more)
{
    const char *const sample = MTP_TEST_DATA "/sample";
    return test_path("[model]\n"
                     "drafter = \"%s/drafter_init\"\n"
                     "verifier = \"%s/verifier\"\n"
                     "[data]\n"
                     "train_data = [\"%s/train/sample_0000.safetensors\", \"%s/train/sample_0001.safetensors\", "
                     "\"%s/train/sample_0002.safetensors\", \"%s/train/sample_0003.safetensors\", "
                     "\"%s/train/sample_0004.safetensors\", \"%s/train/sample_0005.safetensors\"]\n"
                     "tokens_per_batch = 640\n"
                     "[loss]\n"
                     "num_speculative_steps = 2\n"
                     "[optimizer]\n"
                     "learning_rate = 3e-3\n"
                     "lr_scheduler_type = \"constant\"\n"
                     "[output]\n"
                     "output_dir = \"%s\"\n"
                     "logging_steps = 1\n"
                     "[device]\n"
                     "num_threads = 1\n"
                     "[train]\n"
                     "max_steps = 6\n"
                     "seed = 7\n"
                     "%s",
                     sample, sample, sample, sample, sample, sample, sample, sample, output_dir, more);
}

const char *test_train_file(const char *output_dir)
{
    const char *path = test_path("%s/run.toml", test_dir()), *text = test_train_text(output_dir, "");
    test_write(path, text, strlen(text));
    return path;
}

mtp_train_config *test_train_config(const char *output_dir, const char *const *overrides)
{
    mtp_train_config *config = NULL;
    int64_t count = 0;
    while (overrides[count]) count++;
    assert_ok(mtp_train_config_load(test_train_file(output_dir), overrides, count, &config));
    return config;
}

mtp_status test_train(const mtp_train_config *config, mtp_train_result *result)
{
    const mtp_train_options options = {.logger = NULL};
    return mtp_train(config, &options, result);
}

mtp_train_result test_train_ok(const char *output_dir, const char *const *overrides)
{
    mtp_train_result result;
    mtp_train_config *config = test_train_config(output_dir, overrides);
    assert_ok(test_train(config, &result));
    mtp_train_config_free(config);
    return result;
}

const char *test_huge_sample(int number)
{
    const char *path = test_path("%s/huge.safetensors", test_dir());
    mtp_safetensors *file = NULL;
    assert_ok(mtp_safetensors_open(test_path(MTP_TEST_DATA "/sample/train/sample_%04d.safetensors", number), &file));
    const size_t count = mtp_safetensors_count(file), pairs = mtp_safetensors_metadata_count(file);
    mtp_safetensors_source *sources = calloc(count, sizeof *sources);
    mtp_safetensors_pair *metadata = calloc(pairs + 1, sizeof *metadata);
    uint16_t *huge = NULL;
    for (size_t i = 0; i < pairs; i++) metadata[i] = mtp_safetensors_metadata_at(file, i);
    for (size_t i = 0; i < count; i++) {
        const mtp_safetensors_entry *e = mtp_safetensors_at(file, i);
        sources[i] = (mtp_safetensors_source){
            .name = e->name, .dtype = e->dtype, .rank = e->rank, .shape = e->shape, .data = e->data};
        if (strcmp(e->name, "hidden_states") != 0) continue;
        assert_int_equal(e->dtype, MTP_BF16);
        huge = malloc(e->size);
        for (int64_t j = 0; j < e->count; j++) huge[j] = 0x7f00;
        sources[i].data = huge;
    }
    assert_ok(mtp_safetensors_write(path, metadata, pairs, sources, count));
    free(huge);
    free(sources);
    free(metadata);
    mtp_safetensors_close(file);
    return path;
}

char *test_train_metrics(const char *output_dir)
{
    char *file = test_read(test_path("%s/metrics.jsonl", output_dir), NULL);
    char *result = calloc(1, strlen(file) + 1), *end = result, *rest = NULL;
    assert_non_null(result);
    for (char *line = strtok_r(file, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        json_t *value = json_loads(line, 0, NULL);
        assert_non_null(value);
        assert_int_equal(json_object_del(value, "time"), 0);
        char *text = json_dumps(value, JSON_COMPACT);
        const size_t length = strlen(text); /* no longer than the line it was */
        memcpy(end, text, length);
        end[length] = '\n';
        end += length + 1;
        free(text);
        json_decref(value);
    }
    free(file);
    return result;
}

static json_t *manifest_of(const char *directory)
{
    char *text = test_read(test_path("%s/manifest.json", directory), NULL);
    json_t *value = json_loads(text, 0, NULL);
    free(text);
    assert_non_null(value);
    return value;
}

static void same_shard(const char *one, const char *other, int rank, int world_size)
{
    const char *name = test_path("shard-%05d-of-%05d.safetensors", rank, world_size);
    mtp_safetensors *left = NULL, *right = NULL;
    assert_ok(mtp_safetensors_open(test_path("%s/%s", one, name), &left));
    assert_ok(mtp_safetensors_open(test_path("%s/%s", other, name), &right));
    assert_int_equal(mtp_safetensors_count(left), mtp_safetensors_count(right));
    for (size_t i = 0; i < mtp_safetensors_count(left); i++) {
        const mtp_safetensors_entry *entry = mtp_safetensors_at(left, i);
        const mtp_safetensors_entry *twin = mtp_safetensors_find(right, entry->name);
        if (!twin || twin->size != entry->size || memcmp(twin->data, entry->data, entry->size) != 0)
            fail_msg("tensor %s of %s and %s differs", entry->name, one, other);
    }
    mtp_safetensors_close(left);
    mtp_safetensors_close(right);
}

void test_same_checkpoint(const char *one, const char *other)
{
    static const char *const keys[] = {"step", "epoch", "batch", "seed", "dataset", "verifier", "best", "world_size"};
    json_t *a = manifest_of(one), *b = manifest_of(other);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!json_equal(json_object_get(a, keys[i]), json_object_get(b, keys[i])))
            fail_msg("manifests of %s and %s differ in \"%s\"", one, other, keys[i]);
    const int world_size = (int)json_integer_value(json_object_get(a, "world_size"));
    json_decref(a);
    json_decref(b);
    assert_true(world_size >= 1);
    for (int rank = 0; rank < world_size; rank++) same_shard(one, other, rank, world_size);
}
