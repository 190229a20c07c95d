/* mtp_inspect: which kind a path is, and how what was found is put into words. */
#include "run/inspect.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/text.h"
#include "data/store_dir.h"

static const char *const kind_names[] = {[MTP_INSPECT_SAFETENSORS] = "safetensors",
                                         [MTP_INSPECT_SAMPLE] = "sample",
                                         [MTP_INSPECT_SAMPLES] = "samples",
                                         [MTP_INSPECT_SHARD] = "shard",
                                         [MTP_INSPECT_STORE] = "store",
                                         [MTP_INSPECT_DRAFTER] = "drafter",
                                         [MTP_INSPECT_VERIFIER] = "verifier",
                                         [MTP_INSPECT_CHECKPOINT] = "checkpoint",
                                         [MTP_INSPECT_RUN] = "run"};
static const char *const kind_texts[] = {[MTP_INSPECT_SAFETENSORS] = "a safetensors file",
                                         [MTP_INSPECT_SAMPLE] = "a stored sample",
                                         [MTP_INSPECT_SAMPLES] = "a directory of samples",
                                         [MTP_INSPECT_SHARD] = "a shard of a packed store",
                                         [MTP_INSPECT_STORE] = "a packed store",
                                         [MTP_INSPECT_DRAFTER] = "a drafter",
                                         [MTP_INSPECT_VERIFIER] = "a verifier",
                                         [MTP_INSPECT_CHECKPOINT] = "a checkpoint",
                                         [MTP_INSPECT_RUN] = "a run"};

/* ---- collecting ----------------------------------------------------------------------------------------------- */

void mtp__fact(mtp__inspector *inspector, const char *name, json_t *value)
{
    if (json_object_set_new(inspector->facts, name, value) != 0) inspector->failed = true;
}

/* printf to a JSON string; bytes that are no UTF-8 become '?'. */
static json_t *string_of(const char *format, va_list args)
{
    char *text = NULL;
    if (vasprintf(&text, format, args) < 0) return NULL;
    json_t *value = json_string(text);
    if (!value) {
        for (char *c = text; *c; c++)
            if ((unsigned char)*c >= 0x80) *c = '?';
        value = json_string(text);
    }
    free(text);
    return value;
}

void mtp__fact_text(mtp__inspector *inspector, const char *name, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    mtp__fact(inspector, name, string_of(format, args));
    va_end(args);
}

void mtp__problem(mtp__inspector *inspector, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (json_array_append_new(inspector->problems, string_of(format, args)) != 0) inspector->failed = true;
    va_end(args);
}

void mtp__problem_last(mtp__inspector *inspector)
{
    mtp__problem(inspector, "%s", mtp_last_error()->message);
}

/* ---- kinds ---------------------------------------------------------------------------------------------------- */

static bool has(const char *directory, const char *name)
{
    char *path = NULL;
    const bool there = mtp__path_join(directory, name, &path) == MTP_OK && mtp__path_exists(path);
    free(path);
    return there;
}

static bool holds_safetensors(const char *directory)
{
    mtp__name_list list = {0};
    const bool some = mtp__dir_list(directory, MTP__LIST_FILES, ".safetensors", &list) == MTP_OK && list.count > 0;
    mtp__name_list_free(&list);
    return some;
}

/* Model directories by the model_type of their config.json. */
static mtp_status inspect_model(mtp__inspector *inspector)
{
    char *path = NULL;
    json_t *json = NULL;
    const char *type = NULL;
    MTP_TRY(mtp__path_join(inspector->path, "config.json", &path));
    mtp_status status = mtp__json_read(path, &json);
    if (status == MTP_OK) {
        const mtp__json_node root = mtp__json_root(json, path);
        status = mtp__json_as_object(&root);
        if (status == MTP_OK) status = mtp__json_get_string(&root, "model_type", &type);
    }
    if (status == MTP_OK)
        status = strstr(type, "assistant") ? mtp__inspect_drafter(inspector) : mtp__inspect_verifier(inspector);
    json_decref(json);
    free(path);
    return status;
}

static mtp_status dispatch(mtp__inspector *inspector)
{
    const char *path = inspector->path;
    if (!mtp__path_exists(path)) return MTP_FAIL(MTP_E_NOT_FOUND, "%s: there is no such file or directory", path);
    if (!mtp__dir_exists(path))
        return mtp__store_is_shard_name(path) ? mtp__inspect_shard(inspector) : mtp__inspect_file(inspector);
    if (mtp__store_dir_is(path)) return mtp__inspect_store(inspector);
    if (has(path, "run.json") || has(path, "checkpoints")) return mtp__inspect_run(inspector);
    if (has(path, "manifest.json")) return mtp__inspect_checkpoint(inspector);
    if (has(path, "config.json")) return inspect_model(inspector);
    if (holds_safetensors(path)) return mtp__inspect_samples(inspector);
    return MTP_FAIL(
        MTP_E_FORMAT,
        "%s is no directory that mtp knows: no config.json (drafter, verifier), run.json (run), manifest.json "
        "(checkpoint), store.json (packed samples) or *.safetensors (samples)",
        path);
}

/* ---- words ---------------------------------------------------------------------------------------------------- */

static void add_value(mtp__text *text, const json_t *value)
{
    char *dumped = NULL;
    if (json_is_string(value)) {
        mtp__text_add(text, "%s", json_string_value(value));
    } else if ((dumped = json_dumps(value, JSON_ENCODE_ANY))) {
        mtp__text_add(text, "%s", dumped);
    } else {
        text->failed = true;
    }
    free(dumped);
}

/* The settings of a run, one a line, as a configuration has them. */
static void add_settings(mtp__text *text, json_t *settings)
{
    const char *key;
    json_t *value;
    mtp__text_add(text, "%zu\n", json_object_size(settings));
    json_object_foreach(settings, key, value) mtp__text_add(text, "    %s = %s\n", key, json_string_value(value));
}

static mtp_status render_text(const mtp__inspector *inspector, mtp_inspection *inspection)
{
    mtp__text text = {0};
    const char *name;
    json_t *value;
    size_t index;
    mtp__text_add(&text, "%s: %s\n", inspector->path, kind_texts[inspector->kind]);
    json_object_foreach(inspector->facts, name, value)
    {
        mtp__text_add(&text, "  %-22s ", name);
        if (strcmp(name, "settings") == 0) {
            add_settings(&text, value);
            continue;
        }
        add_value(&text, value);
        mtp__text_add(&text, "\n");
    }
    json_array_foreach(inspector->problems, index, value)
        mtp__text_add(&text, "problem: %s\n", json_string_value(value));
    const mtp_status status = mtp__text_check(&text);
    inspection->text = text.data;
    return status;
}

static mtp_status render_json(const mtp__inspector *inspector, mtp_inspection *inspection)
{
    json_t *path = json_string(inspector->path);
    json_t *root =
        json_pack("{s:s, s:o, s:O, s:O}", "kind", kind_names[inspector->kind], "path",
                  path ? path : json_string("(not UTF-8)"), "facts", inspector->facts, "problems", inspector->problems);
    if (!root) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", inspector->path);
    const mtp_status status = mtp__json_dump(root, MTP__JSON_ONE_LINE, &inspection->json);
    json_decref(root);
    return status;
}

mtp_status mtp_inspect(const char *path, const char *verifier, mtp_inspection *inspection)
{
    MTP_REQUIRE(path && inspection);
    mtp__inspector inspector = {.path = path, .verifier = verifier, .facts = json_object(), .problems = json_array()};
    *inspection = (mtp_inspection){0};
    mtp_status status = dispatch(&inspector);
    if (status == MTP_OK && inspector.failed) status = MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
    if (status == MTP_OK) status = render_text(&inspector, inspection);
    if (status == MTP_OK) status = render_json(&inspector, inspection);
    inspection->kind = inspector.kind;
    inspection->num_problems = (int64_t)json_array_size(inspector.problems);
    json_decref(inspector.facts);
    json_decref(inspector.problems);
    if (status != MTP_OK) mtp_inspection_free(inspection);
    return status;
}

void mtp_inspection_free(mtp_inspection *inspection)
{
    if (!inspection) return;
    free(inspection->text);
    free(inspection->json);
    *inspection = (mtp_inspection){0};
}
