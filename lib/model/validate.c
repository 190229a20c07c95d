/* The export validator: would every engine load this directory, and compute with it what was trained.
 *
 * Each check stands for something that was measured on the engines or read in their loaders; the finding names them.
 * Findings are collected, not raised: a user sees all of them at once. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/real.h"
#include "base/text.h"
#include "data/official.h"
#include "data/verifier_config.h"
#include "model/config.h"
#include "model/export.h"
#include "model/tensors.h"
#include "mtp/export.h"

typedef struct checker {
    const char *directory;
    const char *verifier;
    mtp_export_report report;
    mtp_status memory; /* sticky */
    mtp_drafter_config config;
    bool has_config;
} checker;

enum { WARNING, FATAL };

static char *format_text(const char *format, va_list args)
{
    char *text = NULL;
    return vasprintf(&text, format, args) < 0 ? NULL : text;
}

static void found(checker *check, int kind, const char *where, const char *engines, const char *format, ...)
    MTP__PRINTF(5, 6);

static void found(checker *check, int kind, const char *where, const char *engines, const char *format, ...)
{
    mtp_export_report *report = &check->report;
    const size_t size = (size_t)(report->num_findings + 1) * sizeof *report->findings;
    va_list args;
    va_start(args, format);
    mtp_finding finding = {.fatal = kind == FATAL,
                           .where = strdup(where),
                           .engines = strdup(engines),
                           .message = format_text(format, args)};
    va_end(args);
    mtp_finding *grown = realloc(report->findings, size);
    if (grown) report->findings = grown;
    if (!grown || !finding.where || !finding.engines || !finding.message) {
        free((void *)finding.where);
        free((void *)finding.engines);
        free((void *)finding.message);
        check->memory = MTP_FAIL(MTP_E_MEMORY, "%s: out of memory for a report", check->directory);
        return;
    }
    grown[report->num_findings++] = finding;
    report->num_fatal += finding.fatal;
}

/* The message of the last failure without the path of the file in front: the finding says where. */
static const char *last_message(const checker *check, const char *name)
{
    const char *message = mtp_last_error()->message;
    const size_t length = strlen(check->directory), of_name = strlen(name);
    if (strncmp(message, check->directory, length) == 0) message += length + strspn(message + length, "/");
    return strncmp(message, name, of_name) == 0 && strncmp(message + of_name, ": ", 2) == 0 ? message + of_name + 2
                                                                                            : message;
}

/* Path of a file of the export into `path`; false when it is too long. */
static bool path_in(checker *check, const char *name, char *path, size_t capacity)
{
    const int length = snprintf(path, capacity, "%s/%s", check->directory, name);
    if (length > 0 && (size_t)length < capacity) return true;
    found(check, FATAL, name, "all", "the path of the directory is too long");
    return false;
}

/* ---- config.json ---------------------------------------------------------------------------------------------- */

static void check_architecture(checker *check, const json_t *root)
{
    const char *type = json_string_value(json_object_get(root, "model_type"));
    const char *expected = mtp__export_architecture(type);
    const json_t *list = json_object_get(root, "architectures");
    const char *got = json_string_value(json_array_get(list, 0));
    if (!expected) return; /* model_type itself is refused by the parser */
    if (json_array_size(list) != 1 || !got || strcmp(got, expected) != 0)
        found(check, FATAL, "config.json: architectures", "llama.cpp (the converter fails)",
              "is %s%s%s, must be [\"%s\"] for model_type %s", got ? "[\"" : "", got ? got : "not one name",
              got ? "\"]" : "", expected, type);
}

static void check_zero(checker *check, const json_t *text, const char *key)
{
    char where[128];
    const json_t *value = json_object_get(text, key);
    snprintf(where, sizeof where, "config.json: text_config.%s", key);
    if (!json_is_integer(value) || json_integer_value(value) != 0)
        found(check, FATAL, where, "transformers, vLLM, llama.cpp (all fail: their default is not 0)",
              "%s; write the key with the value 0", value ? "is not 0" : "is missing");
}

static void check_tied(checker *check, const json_t *object, const char *where)
{
    if (json_is_false(json_object_get(object, "tie_word_embeddings")))
        found(check, FATAL, where, "vLLM (silently drafts with a garbage head), transformers (head missing)",
              "is false, but the head of a drafter is its model.embed_tokens.weight; set it to true");
}

/* The old spelling of the geometry must be enough: some readers know no other. */
static void check_old_keys(checker *check, const json_t *text)
{
    const mtp_layer_geometry *full = &check->config.geometry[MTP_LAYER_FULL];
    const char *const readers = "mlx-vlm and older converters (they read only the old keys)";
    if (!check->has_config || full->head_dim == 0) return;
    if (!json_is_integer(json_object_get(text, "global_head_dim")))
        found(check, FATAL, "config.json: text_config.global_head_dim", readers, "is missing; write the value %lld",
              (long long)full->head_dim);
    const json_t *heads = json_object_get(text, "num_key_value_heads");
    const bool other = json_integer_value(heads) != full->num_kv_heads;
    if (other && !json_is_integer(json_object_get(text, "num_global_key_value_heads")))
        found(check, FATAL, "config.json: text_config.num_global_key_value_heads", readers,
              "is missing; write the value %lld", (long long)full->num_kv_heads);
}

static void check_geometry(checker *check, const json_t *text)
{
    const mtp_drafter_config *config = &check->config;
    const json_t *shared = json_object_get(text, "num_kv_shared_layers");
    if (json_integer_value(shared) != config->num_layers)
        found(check, FATAL, "config.json: text_config.num_kv_shared_layers",
              "transformers (its check of a drafter), llama.cpp (looks for keys of its own)",
              "%s; every layer reads the verifier's K/V: write num_hidden_layers, %lld",
              shared ? "is wrong" : "is missing", (long long)config->num_layers);
    if (config->layer_types[config->num_layers - 1] != MTP_LAYER_FULL)
        found(check, WARNING, "config.json: text_config.layer_types", "transformers (changes the last entry)",
              "the last layer is not full_attention; this drafter cannot be used with transformers");
    if (config->geometry[MTP_LAYER_FULL].head_dim && !config->geometry[MTP_LAYER_FULL].proportional)
        found(check, WARNING, "config.json: text_config.rope_parameters.full_attention.rope_type",
              "llama.cpp (the converter asserts \"proportional\")", "is \"default\"");
    if (config->hidden_size == config->backbone_hidden_size)
        found(check, WARNING, "config.json: backbone_hidden_size", "llama.cpp (fails at run)",
              "equals hidden_size, %lld", (long long)config->hidden_size);
}

/* A drafter has no K/V tensors, so nothing in its own directory contradicts a wrong number of K/V heads. The published
 * verifiers are told by their hidden size. */
static void check_official(checker *check)
{
    static const char *const keys[MTP_LAYER_TYPES] = {
        [MTP_LAYER_SLIDING] = "config.json: text_config.num_key_value_heads",
        [MTP_LAYER_FULL] = "config.json: text_config.num_global_key_value_heads"};
    const mtp__official *official = mtp__official_of_size(check->config.backbone_hidden_size);
    found(check, WARNING, "config.json", "llama.cpp (aborts at run when num_key_value_heads is wrong)",
          "not compared with a verifier: none was given");
    for (int type = 0; official && type < MTP_LAYER_TYPES; type++) {
        const mtp_layer_geometry *own = &check->config.geometry[type];
        if (own->head_dim == 0 || own->num_kv_heads == official->num_kv_heads[type]) continue;
        found(check, FATAL, keys[type], "llama.cpp (aborts at run)",
              "is %lld, but the verifier of backbone_hidden_size %lld, %s, has %lld; write that, or give the verifier "
              "that this drafter is for (--verifier)",
              (long long)own->num_kv_heads, (long long)official->hidden_size, official->name,
              (long long)official->num_kv_heads[type]);
    }
}

static void check_verifier(checker *check)
{
    mtp_verifier_config verifier;
    if (!check->verifier) {
        check_official(check);
        return;
    }
    mtp_status status = mtp__verifier_config_read(check->verifier, &verifier);
    if (status == MTP_OK) status = mtp__verifier_config_check(&verifier, check->verifier, &check->config);
    if (status != MTP_OK)
        found(check, FATAL, "config.json", "all (num_key_value_heads: llama.cpp aborts at run)", "%s",
              mtp_last_error()->message);
}

/* One C++ runner finds the kind by searching the text. */
static void check_spacing(checker *check, const char *text)
{
    if (!strstr(text, "\"model_type\": \""))
        found(check, WARNING, "config.json", "runners that search the text",
              "keys are not followed by \": \"; write it as json.dumps does");
}

/* A config.json that parses as JSON. Of another model only that is said: what its other keys lack would mislead. */
static void judge_config(checker *check, json_t *root, const char *path, const char *source)
{
    const json_t *text = json_object_get(root, "text_config");
    const bool drafter = mtp__export_architecture(json_string_value(json_object_get(root, "model_type"))) != NULL;
    const int64_t before = check->report.num_fatal;
    if (drafter) {
        check_architecture(check, root);
        check_tied(check, root, "config.json: tie_word_embeddings");
        check_tied(check, text, "config.json: text_config.tie_word_embeddings");
        check_zero(check, text, "hidden_size_per_layer_input");
        check_zero(check, text, "vocab_size_per_layer_input");
        check_spacing(check, source);
    }
    check->has_config = mtp__drafter_config_parse(root, path, &check->config) == MTP_OK;
    if (check->has_config) {
        check_old_keys(check, text);
        check_geometry(check, text);
        check_verifier(check);
    } else if (check->report.num_fatal == before) {
        found(check, FATAL, "config.json", "all", "%s", last_message(check, "config.json"));
    }
}

static void check_config(checker *check)
{
    char path[4096];
    char *source = NULL;
    json_t *root = NULL;
    size_t size;
    if (!path_in(check, "config.json", path, sizeof path)) return;
    if (mtp__file_read(path, MTP__JSON_MAX_BYTES, &source, &size) == MTP_OK &&
        mtp__json_parse(source, size, path, 1, &root) == MTP_OK)
        judge_config(check, root, path, source);
    else
        found(check, FATAL, "config.json", "all", "%s", last_message(check, "config.json"));
    json_decref(root);
    free(source);
}

/* ---- tensors -------------------------------------------------------------------------------------------------- */

static const char *where_tensor(const char *name, char *where, size_t capacity)
{
    snprintf(where, capacity, "model.safetensors: %s", name);
    return where;
}

static bool ends_with(const char *name, const char *end)
{
    const size_t length = strlen(name), tail = strlen(end);
    return length >= tail && strcmp(name + length - tail, end) == 0;
}

static const char *missing_engines(const char *name)
{
    if (ends_with(name, "layer_scalar"))
        return "vLLM (silently takes 1.0), transformers (warns and takes 1.0), llama.cpp (fails at run)";
    if (strncmp(name, "masked_embedding.", strlen("masked_embedding.")) == 0) return "transformers, vLLM (both fail)";
    return "all (transformers makes up a random one)";
}

static const char *stranger_engines(const char *name)
{
    if (strcmp(name, "lm_head.weight") == 0) return "llama.cpp (the converter fails)";
    if (strncmp(name, "model.pre_projection", 20) == 0 || strncmp(name, "model.post_projection", 21) == 0)
        return "llama.cpp (the converter fails)";
    if (strncmp(name, "masked_embedding.", strlen("masked_embedding.")) == 0)
        return "vLLM (fails), transformers (reports it as unexpected)";
    return "vLLM, llama.cpp, mlx-vlm (all fail on unknown names)";
}

static void check_values(checker *check, const mtp_safetensors_entry *entry, const char *where)
{
    const int64_t bad = mtp__real_find_nonfinite_in(entry->data, entry->dtype, entry->count);
    if (bad < 0) return;
    float value;
    mtp__real_to_f32(&value, (const char *)entry->data + (size_t)bad * mtp_dtype_size(entry->dtype), entry->dtype, 1);
    found(check, FATAL, where, "all", "holds %f at element %lld; export an earlier checkpoint", (double)value,
          (long long)bad);
}

static void check_ordering(checker *check, const mtp_safetensors_entry *entry, const char *where)
{
    int64_t *ordering = malloc(entry->size);
    if (!ordering || mtp_safetensors_copy(entry, ordering, entry->size) != MTP_OK ||
        mtp__check_ordering(ordering, entry->count, "token ordering") != MTP_OK)
        found(check, FATAL, where, "transformers, vLLM, sglang (draft other tokens)", "%s", mtp_last_error()->message);
    free(ordering);
}

static void check_tensor(checker *check, const mtp__tensor_spec *spec, const mtp_safetensors_entry *entry)
{
    char where[256], got[256], want[64];
    const bool ordering = strcmp(spec->name, MTP__TOKEN_ORDERING) == 0;
    where_tensor(spec->name, where, sizeof where);
    if (!entry) {
        found(check, FATAL, where, missing_engines(spec->name), "is missing");
        return;
    }
    const bool fits = mtp__tensor_fits(spec, entry);
    if (!fits)
        found(check, FATAL, where,
              ends_with(spec->name, "layer_scalar") ? "transformers, vLLM (both fail)" : "all (they fail on the shape)",
              "has shape %s, must be %s", mtp__shape_text(entry->rank, entry->shape, got, sizeof got),
              mtp__shape_text(spec->rank, spec->shape, want, sizeof want));
    if (ordering && entry->dtype != MTP_I64)
        found(check, FATAL, where, "transformers, vLLM (silently draft other tokens with some dtypes)",
              "is %s, must be I64", mtp_dtype_name(entry->dtype));
    else if (!ordering && !mtp_dtype_is_compute(entry->dtype))
        found(check, FATAL, where, "all", "is %s, must be BF16 (F32 and F16 load too)", mtp_dtype_name(entry->dtype));
    else if (fits && ordering)
        check_ordering(check, entry, where);
    else if (fits)
        check_values(check, entry, where);
}

static void check_all_tensors(checker *check, const mtp_safetensors *file)
{
    char where[512];
    mtp__tensor_spec *specs = NULL;
    int64_t count = 0;
    if (mtp__tensor_specs(&check->config, &specs, &count) != MTP_OK) {
        check->memory = MTP_E_MEMORY;
        return;
    }
    for (int64_t i = 0; i < count; i++) check_tensor(check, &specs[i], mtp_safetensors_find(file, specs[i].name));
    for (size_t i = 0; i < mtp_safetensors_count(file); i++) {
        const char *name = mtp_safetensors_at(file, i)->name;
        if (!mtp__tensor_spec_find(specs, count, name))
            found(check, FATAL, where_tensor(name, where, sizeof where), stranger_engines(name),
                  "does not belong here: %s", mtp__tensor_stranger(name));
    }
    free(specs);
}

static void check_weights(checker *check)
{
    char path[4096];
    mtp_safetensors *file = NULL;
    if (!path_in(check, "model.safetensors", path, sizeof path)) return;
    if (mtp_safetensors_open(path, &file) != MTP_OK) {
        found(check, FATAL, "model.safetensors", "all", "%s", last_message(check, "model.safetensors"));
        return;
    }
    if (check->has_config) check_all_tensors(check, file);
    mtp_safetensors_close(file);
}

/* ---- other files ---------------------------------------------------------------------------------------------- */

static bool exists(checker *check, const char *name)
{
    char path[4096];
    return path_in(check, name, path, sizeof path) && mtp__file_exists(path);
}

/* A file that must be a JSON object. */
static json_t *read_object(checker *check, const char *name, const char *engines)
{
    char path[4096];
    json_t *root = NULL;
    if (!path_in(check, name, path, sizeof path)) return NULL;
    if (mtp__json_read(path, &root) != MTP_OK) {
        found(check, FATAL, name, engines, "%s", last_message(check, name));
    } else if (!json_is_object(root)) {
        found(check, FATAL, name, engines, "is not a JSON object");
    }
    return root;
}

static void check_generation(checker *check)
{
    const char *const name = "generation_config.json";
    if (!exists(check, name)) {
        found(check, WARNING, name, "transformers (drafts its default number of tokens)", "is missing");
        return;
    }
    json_t *root = read_object(check, name, "transformers, vLLM");
    const json_t *tokens = json_object_get(root, "num_assistant_tokens");
    if (json_is_object(root) && (!json_is_integer(tokens) || json_integer_value(tokens) < 1))
        found(check, WARNING, "generation_config.json: num_assistant_tokens",
              "transformers (takes the number of draft steps from here only)", "is not a positive integer");
    json_decref(root);
}

static void check_tokenizer(checker *check)
{
    if (!exists(check, "tokenizer.json"))
        found(check, FATAL, "tokenizer.json", "llama.cpp (the converter fails)", "is missing; copy the verifier's");
    else
        json_decref(read_object(check, "tokenizer.json", "llama.cpp (the converter fails)"));
    if (!exists(check, "tokenizer_config.json"))
        found(check, WARNING, "tokenizer_config.json", "llama.cpp", "is missing; copy the verifier's");
}

static void check_one_file(checker *check)
{
    mtp__name_list list = {0};
    if (mtp__dir_list(check->directory, MTP__LIST_FILES, NULL, &list) != MTP_OK) {
        found(check, FATAL, ".", "all", "%s", last_message(check, "."));
        return;
    }
    for (size_t i = 0; i < list.count; i++) {
        const char *name = list.names[i];
        if (ends_with(name, ".safetensors") && strcmp(name, "model.safetensors") != 0)
            found(check, FATAL, name, "loaders that take every *.safetensors",
                  "there must be one model.safetensors and no other; remove it");
        if (ends_with(name, ".safetensors.index.json"))
            found(check, FATAL, name, "loaders that follow an index",
                  "a drafter is one file without an index; remove it");
    }
    mtp__name_list_free(&list);
}

/* ---- the whole ------------------------------------------------------------------------------------------------ */

static mtp_status conclude(const checker *check)
{
    const mtp_export_report *report = &check->report;
    mtp__text list = {0};
    for (int64_t i = 0; i < report->num_findings; i++) {
        const mtp_finding *finding = &report->findings[i];
        if (finding->fatal)
            mtp__text_add(&list, "%s%s %s [%s]", list.length ? "; " : "", finding->where, finding->message,
                          finding->engines);
    }
    mtp_status status = mtp__text_check(&list);
    if (status == MTP_OK && list.length)
        status = MTP_FAIL(MTP_E_DATA, "%s is not an export that every engine loads: %s", check->directory, list.data);
    mtp__text_free(&list);
    return status;
}

mtp_status mtp_validate_export(const char *directory, const char *verifier, mtp_export_report *report)
{
    MTP_REQUIRE(directory);
    checker check = {.directory = directory, .verifier = verifier, .memory = MTP_OK};
    if (report) *report = (mtp_export_report){0};
    if (!mtp__dir_exists(directory)) return MTP_FAIL(MTP_E_NOT_FOUND, "%s: no such directory", directory);
    check_config(&check);
    check_generation(&check);
    check_weights(&check);
    check_tokenizer(&check);
    check_one_file(&check);
    mtp_drafter_config_free(&check.config);
    const mtp_status status = check.memory == MTP_OK ? conclude(&check) : check.memory;
    if (report)
        *report = check.report;
    else
        mtp_export_report_free(&check.report);
    return status;
}

mtp_status mtp_export_report_json(const mtp_export_report *report, const char *directory, char **json)
{
    MTP_REQUIRE(report && directory && json);
    json_t *findings = json_array();
    *json = NULL;
    bool done = findings != NULL;
    for (int64_t i = 0; i < report->num_findings; i++) {
        const mtp_finding *finding = &report->findings[i];
        done = json_array_append_new(findings,
                                     json_pack("{s:b, s:s, s:s, s:s}", "fatal", finding->fatal, "where", finding->where,
                                               "engines", finding->engines, "message", finding->message)) == 0 &&
               done;
    }
    json_t *root =
        json_pack("{s:s, s:b, s:o}", "directory", directory, "ready", report->num_fatal == 0, "findings", findings);
    const mtp_status status = root && done ? mtp__json_dump(root, MTP__JSON_ONE_LINE, json)
                                           : MTP_FAIL(MTP_E_DATA, "%s: a name or a path is not UTF-8", directory);
    json_decref(root);
    return status;
}

void mtp_export_report_free(mtp_export_report *report)
{
    if (!report) return;
    for (int64_t i = 0; i < report->num_findings; i++) {
        free((void *)report->findings[i].where);
        free((void *)report->findings[i].engines);
        free((void *)report->findings[i].message);
    }
    free(report->findings);
    *report = (mtp_export_report){0};
}
