/* The manifest of a checkpoint: a JSON object that says what the directory holds. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/hash.h"
#include "formats/json.h"
#include "run/checkpoint.h"

mtp__manifest *mtp__manifest_create(void)
{
    mtp__manifest *manifest = calloc(1, sizeof *manifest);
    if (!manifest) return NULL;
    manifest->version = MTP__CHECKPOINT_VERSION;
    manifest->world_size = 1;
    manifest->best_step = -1;
    manifest->last_eval_step = -1;
    return manifest;
}

void mtp__manifest_free(mtp__manifest *manifest)
{
    if (!manifest) return;
    for (int64_t i = 0; i < manifest->num_settings; i++) {
        free(manifest->settings[i].key);
        free(manifest->settings[i].value);
    }
    for (int64_t i = 0; i < manifest->num_shards; i++) free(manifest->shards[i].file);
    free(manifest->settings);
    free(manifest->shards);
    free(manifest->drafter);
    free(manifest->directory);
    free(manifest);
}

static mtp_status no_memory(void)
{
    return MTP_FAIL(MTP_E_MEMORY, "out of memory for a checkpoint's manifest");
}

mtp_status mtp__manifest_add_setting(mtp__manifest *manifest, const char *key, const char *value)
{
    const size_t count = (size_t)manifest->num_settings;
    mtp__setting *grown = realloc(manifest->settings, (count + 1) * sizeof *grown);
    if (!grown) return no_memory();
    manifest->settings = grown;
    grown[count] = (mtp__setting){.key = strdup(key), .value = strdup(value)};
    manifest->num_settings++;
    return grown[count].key && grown[count].value ? MTP_OK : no_memory();
}

mtp_status mtp__manifest_add_shard(mtp__manifest *manifest, const char *file, uint64_t bytes, uint32_t crc32c)
{
    const size_t count = (size_t)manifest->num_shards;
    mtp__shard *grown = realloc(manifest->shards, (count + 1) * sizeof *grown);
    if (!grown) return no_memory();
    manifest->shards = grown;
    grown[count] = (mtp__shard){.file = strdup(file), .bytes = bytes, .crc32c = crc32c};
    manifest->num_shards++;
    return grown[count].file ? MTP_OK : no_memory();
}

const char *mtp__manifest_setting(const mtp__manifest *manifest, const char *key)
{
    for (int64_t i = 0; i < manifest->num_settings; i++)
        if (strcmp(manifest->settings[i].key, key) == 0) return manifest->settings[i].value;
    return NULL;
}

/* ---- reading -------------------------------------------------------------------------------------------------- */

static mtp_status get_string(const mtp__json_node *object, const char *key, char **value)
{
    const char *text;
    MTP_TRY(mtp__json_get_string(object, key, &text));
    *value = strdup(text);
    return *value ? MTP_OK : no_memory();
}

/* 64 bits as "0123456789abcdef": JSON numbers are not wide enough for every reader. */
static mtp_status get_hex(const mtp__json_node *object, const char *key, uint64_t *value)
{
    const char *text;
    MTP_TRY(mtp__json_get_string(object, key, &text));
    if (strlen(text) != 16 || strspn(text, "0123456789abcdef") != 16) {
        mtp__json_node node;
        MTP_TRY(mtp__json_get(object, key, &node));
        return mtp__json_fail(&node, MTP_E_FORMAT, "expected 16 hexadecimal digits, got \"%s\"", text);
    }
    *value = strtoull(text, NULL, 16);
    return MTP_OK;
}

static mtp_status parse_settings(const mtp__json_node *root, mtp__manifest *m)
{
    mtp__json_node settings;
    MTP_TRY(mtp__json_get_object(root, "config", &settings));
    const char *key;
    json_t *item;
    json_object_foreach(settings.value, key, item)
    {
        const char *value;
        MTP_TRY(mtp__json_get_string(&settings, key, &value));
        MTP_TRY(mtp__manifest_add_setting(m, key, value));
    }
    return MTP_OK;
}

/* A name that stays inside the directory and is not one of the writer's temporary ones. */
static bool is_plain_name(const char *name)
{
    return *name && *name != '.' && !strchr(name, '/') && strlen(name) <= NAME_MAX;
}

static mtp_status parse_shard(const mtp__json_node *node, const mtp__manifest *m, mtp__shard *shard)
{
    int64_t bytes, crc;
    MTP_TRY(mtp__json_as_object(node));
    MTP_TRY(get_string(node, "file", &shard->file));
    if (!is_plain_name(shard->file))
        return mtp__json_fail(node, MTP_E_FORMAT, "\"%s\" is not a file name inside the checkpoint", shard->file);
    for (const mtp__shard *other = m->shards; other < shard; other++)
        if (strcmp(other->file, shard->file) == 0)
            return mtp__json_fail(node, MTP_E_FORMAT, "%s is listed twice", shard->file);
    MTP_TRY(mtp__json_get_int64(node, "bytes", 1, INT64_MAX, &bytes));
    MTP_TRY(mtp__json_get_int64(node, "crc32c", 0, UINT32_MAX, &crc));
    shard->bytes = (uint64_t)bytes;
    shard->crc32c = (uint32_t)crc;
    return MTP_OK;
}

static mtp_status parse_shards(const mtp__json_node *root, mtp__manifest *m)
{
    mtp__json_node shards;
    size_t count;
    MTP_TRY(mtp__json_get_array(root, "shards", &shards, &count));
    if (count < 1 || count > MTP__CHECKPOINT_MAX_SHARDS)
        return mtp__json_fail(&shards, MTP_E_FORMAT, "%zu shards; expected 1 to %d", count,
                              (int)MTP__CHECKPOINT_MAX_SHARDS);
    m->shards = calloc(count, sizeof *m->shards);
    if (!m->shards) return no_memory();
    for (size_t i = 0; i < count; i++) {
        const mtp__json_node node = mtp__json_item(&shards, i);
        m->num_shards++;
        MTP_TRY(parse_shard(&node, m, &m->shards[i]));
    }
    return MTP_OK;
}

static mtp_status parse_best(const mtp__json_node *root, mtp__manifest *m)
{
    mtp__json_node best;
    MTP_TRY(mtp__json_get_object(root, "best", &best));
    MTP_TRY(mtp__json_get_int64(&best, "step", -1, m->step, &m->best_step));
    MTP_TRY(mtp__json_get_double(&best, "accepted_length", &m->best_length));
    MTP_TRY(mtp__json_get_int64(&best, "evals_since", 0, INT64_MAX, &m->evals_since_best));
    return mtp__json_get_int64(&best, "last_eval_step", -1, m->step, &m->last_eval_step);
}

static mtp_status check_version(const mtp__json_node *root, int64_t *version)
{
    const char *format;
    MTP_TRY(mtp__json_as_object(root));
    MTP_TRY(mtp__json_get_string(root, "format", &format));
    if (strcmp(format, MTP__CHECKPOINT_FORMAT) != 0)
        return mtp__json_fail(root, MTP_E_FORMAT, "format \"%s\" is not a checkpoint's (\"%s\")", format,
                              MTP__CHECKPOINT_FORMAT);
    MTP_TRY(mtp__json_get_int64(root, "version", 1, INT64_MAX, version));
    if (*version > MTP__CHECKPOINT_VERSION)
        return mtp__json_fail(root, MTP_E_VERSION,
                              "checkpoint of version %lld, written by a newer mtp; this one reads versions up to %d",
                              (long long)*version, (int)MTP__CHECKPOINT_VERSION);
    return MTP_OK;
}

/* CRC-32C of the manifest as it is printed without the key crc32c. */
static mtp_status checksum(json_t *root, uint32_t *crc)
{
    char *text = NULL;
    json_object_del(root, "crc32c");
    MTP_TRY(mtp__json_dump(root, MTP__JSON_NEWLINE, &text));
    *crc = mtp__crc32c(0, text, strlen(text));
    free(text);
    return MTP_OK;
}

/* After everything else: what is wrong in particular is the better message. */
static mtp_status check_checksum(const mtp__json_node *root)
{
    int64_t said;
    uint32_t crc;
    MTP_TRY(mtp__json_get_int64(root, "crc32c", 0, UINT32_MAX, &said));
    MTP_TRY(checksum(root->value, &crc));
    if (crc == (uint32_t)said) return MTP_OK;
    return mtp__json_fail(root, MTP_E_DATA, "the manifest's own checksum is not right: damaged or edited");
}

static mtp_status parse(const mtp__json_node *root, mtp__manifest *m)
{
    int64_t seed;
    MTP_TRY(check_version(root, &m->version));
    MTP_TRY(mtp__json_get_int64(root, "step", 0, INT64_MAX, &m->step));
    if (m->version > 1) MTP_TRY(mtp__json_get_int64(root, "bad_steps", 0, m->step, &m->bad_steps));
    MTP_TRY(mtp__json_get_int64(root, "total_steps", 1, INT64_MAX, &m->total_steps));
    MTP_TRY(mtp__json_get_int64(root, "epoch", 0, INT64_MAX, &m->epoch));
    MTP_TRY(mtp__json_get_int64(root, "batch", 0, INT64_MAX, &m->batch));
    MTP_TRY(mtp__json_get_int64(root, "seed", 0, INT64_MAX, &seed));
    m->seed = (uint64_t)seed;
    MTP_TRY(mtp__json_get_int64(root, "world_size", 1, MTP__CHECKPOINT_MAX_SHARDS, &m->world_size));
    MTP_TRY(get_string(root, "drafter", &m->drafter));
    MTP_TRY(get_hex(root, "computation", &m->computation));
    MTP_TRY(get_hex(root, "verifier", &m->verifier));
    MTP_TRY(get_hex(root, "dataset", &m->dataset));
    MTP_TRY(mtp__json_get_int64(root, "num_samples", 0, INT64_MAX, &m->num_samples));
    MTP_TRY(parse_best(root, m));
    MTP_TRY(parse_settings(root, m));
    MTP_TRY(parse_shards(root, m));
    return check_checksum(root);
}

mtp_status mtp__manifest_parse(const char *text, size_t size, const char *origin, mtp__manifest **manifest)
{
    json_t *root = NULL;
    *manifest = NULL;
    MTP_TRY(mtp__json_parse(text, size, origin, 1, &root));
    const mtp__json_node node = mtp__json_root(root, origin);
    mtp__manifest *parsed = mtp__manifest_create();
    const mtp_status status = parsed ? parse(&node, parsed) : no_memory();
    json_decref(root);
    if (status != MTP_OK) {
        mtp__manifest_free(parsed);
        return status;
    }
    *manifest = parsed;
    return MTP_OK;
}

/* ---- writing -------------------------------------------------------------------------------------------------- */

static json_t *hex(uint64_t value)
{
    return json_sprintf("%016llx", (unsigned long long)value);
}

static json_t *settings_json(const mtp__manifest *m)
{
    json_t *object = json_object();
    for (int64_t i = 0; object && i < m->num_settings; i++)
        json_object_set_new(object, m->settings[i].key, json_string(m->settings[i].value));
    return object;
}

static json_t *shards_json(const mtp__manifest *m)
{
    json_t *array = json_array();
    for (int64_t i = 0; array && i < m->num_shards; i++)
        json_array_append_new(array,
                              json_pack("{s:s, s:I, s:I}", "file", m->shards[i].file, "bytes",
                                        (json_int_t)m->shards[i].bytes, "crc32c", (json_int_t)m->shards[i].crc32c));
    return array;
}

mtp_status mtp__manifest_print(const mtp__manifest *m, char **text)
{
    json_t *root = json_pack(
        "{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:o, s:o, s:o, s:I, s:{s:I, s:f, s:I, s:I}, s:o, s:o}",
        "format", MTP__CHECKPOINT_FORMAT, "version", (json_int_t)m->version, "step", (json_int_t)m->step, "bad_steps",
        (json_int_t)m->bad_steps, "total_steps", (json_int_t)m->total_steps, "epoch", (json_int_t)m->epoch, "batch",
        (json_int_t)m->batch, "seed", (json_int_t)m->seed, "world_size", (json_int_t)m->world_size, "drafter",
        m->drafter, "computation", hex(m->computation), "verifier", hex(m->verifier), "dataset", hex(m->dataset),
        "num_samples", (json_int_t)m->num_samples, "best", "step", (json_int_t)m->best_step, "accepted_length",
        m->best_length, "evals_since", (json_int_t)m->evals_since_best, "last_eval_step", (json_int_t)m->last_eval_step,
        "config", settings_json(m), "shards", shards_json(m));
    if (!root) return no_memory();
    uint32_t crc;
    mtp_status status = checksum(root, &crc);
    if (status == MTP_OK && json_object_set_new(root, "crc32c", json_integer((json_int_t)crc)) != 0)
        status = no_memory();
    if (status == MTP_OK) status = mtp__json_dump(root, MTP__JSON_NEWLINE, text);
    json_decref(root);
    return status;
}

mtp_status mtp__manifest_write(const mtp__manifest *m, const char *path)
{
    char *text = NULL;
    MTP_TRY(mtp__manifest_print(m, &text));
    const mtp_status status = mtp__file_write(path, text, strlen(text));
    free(text);
    return status;
}
