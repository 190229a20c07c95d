/* Reading a configuration: defaults, the file, the overrides, then what only makes sense together. */
#include "run/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "formats/toml.h"
#include "model/step.h"
#include "mtp/suggest.h"

enum { MAX_FIELDS = 96, FEWEST_ROWS = 64 };
typedef enum config_source { FROM_DEFAULTS, FROM_FILE, FROM_OVERRIDE } config_source;

/* ---- life ----------------------------------------------------------------------------------------------------- */

static void free_strings(mtp_strings *strings)
{
    for (int64_t i = 0; i < strings->count; i++) free(strings->items[i]);
    free(strings->items);
    *strings = (mtp_strings){0};
}

void mtp_train_config_free(mtp_train_config *config)
{
    if (!config) return;
    size_t count;
    const mtp__field *fields = mtp__config_fields(&count);
    for (size_t i = 0; i < count; i++) {
        void *value = (char *)config + fields[i].offset;
        if (fields[i].kind == MTP__FIELD_STRING) free(*(char **)value);
        if (fields[i].kind == MTP__FIELD_STRINGS) free_strings(value);
        if (fields[i].kind == MTP__FIELD_SOURCES) mtp__config_free_sources(value);
        if (config->places && config->places->origin) free(config->places->origin[i]);
    }
    if (config->places) {
        free(config->places->path);
        free(config->places->origin);
        free(config->places);
    }
    free(config);
}

static mtp_status no_memory(void)
{
    return MTP_FAIL(MTP_E_MEMORY, "out of memory for the configuration");
}

static mtp_status create(const char *path, mtp_train_config **config)
{
    size_t count;
    mtp__config_fields(&count);
    mtp_train_config *created = calloc(1, sizeof *created);
    *config = created;
    if (!created) return no_memory();
    created->places = calloc(1, sizeof *created->places);
    if (!created->places) return no_memory();
    created->places->path = strdup(path);
    created->places->origin = calloc(count, sizeof *created->places->origin);
    return created->places->path && created->places->origin ? MTP_OK : no_memory();
}

/* ---- places --------------------------------------------------------------------------------------------------- */

/* Whether a field was set by somebody. */
static bool is_set(const mtp_train_config *config, const char *key)
{
    return config->places->origin[mtp__config_find(key)] != NULL;
}

mtp_status mtp__config_fail(const mtp_train_config *config, const char *key, const char *format, ...)
{
    char message[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    const char *origin = config->places->origin[mtp__config_find(key)];
    return MTP_FAIL(MTP_E_CONFIG, "%s: %s: %s", origin ? origin : config->places->path, key, message);
}

static mtp_status set_place(mtp_train_config *config, size_t field, const mtp__toml *toml, const mtp__toml_node *node,
                            config_source source)
{
    char **origin = &config->places->origin[field];
    free(*origin);
    *origin = NULL;
    if (source == FROM_DEFAULTS) return MTP_OK;
    mtp__text text = {0};
    mtp__text_add(&text, "%s", toml->origin);
    if (source == FROM_FILE) mtp__text_add(&text, ":%d", (int)node->line);
    *origin = text.data;
    return mtp__text_check(&text);
}

/* ---- one value ------------------------------------------------------------------------------------------------ */

static mtp_status wrong_type(const mtp__toml *toml, const mtp__toml_node *node, const mtp__field *field,
                             const char *want)
{
    return mtp__toml_fail(toml, node, "%s: expected %s, got %s", field->key, want, mtp__toml_kind_name(node->kind));
}

static mtp_status check_range(const mtp__toml *toml, const mtp__toml_node *node, const mtp__field *field)
{
    if (node->number >= field->min && node->number <= field->max) return MTP_OK;
    if (field->kind == MTP__FIELD_INT)
        return mtp__toml_fail(toml, node, "%s = %lld: must be from %lld to %lld", field->key, (long long)node->integer,
                              (long long)field->min, (long long)field->max);
    return mtp__toml_fail(toml, node, "%s = %.15g: must be from %.15g to %.15g", field->key, node->number, field->min,
                          field->max);
}

static mtp_status take_choice(const mtp__toml *toml, const mtp__toml_node *node, const mtp__field *field,
                              int32_t *value)
{
    size_t count = 0;
    for (; field->choices[count]; count++) {
        if (strcmp(field->choices[count], node->string) != 0) continue;
        *value = (int32_t)count;
        return MTP_OK;
    }
    mtp__text list = {0};
    for (size_t i = 0; i < count; i++) mtp__text_add(&list, "%s\"%s\"", i ? ", " : "", field->choices[i]);
    const char *nearest = mtp_suggest(node->string, field->choices, count);
    const mtp_status status = nearest
                                  ? mtp__toml_fail(toml, node, "%s = \"%s\": must be one of %s (did you mean \"%s\"?)",
                                                   field->key, node->string, mtp__text_get(&list), nearest)
                                  : mtp__toml_fail(toml, node, "%s = \"%s\": must be one of %s", field->key,
                                                   node->string, mtp__text_get(&list));
    mtp__text_free(&list);
    return status;
}

static mtp_status take_strings(const mtp__toml *toml, const mtp__toml_node *node, const mtp__field *field,
                               mtp_strings *value)
{
    const bool single = node->kind == MTP__TOML_STRING;
    if (!single && node->kind != MTP__TOML_ARRAY) return wrong_type(toml, node, field, "a list of strings");
    const int32_t count = single ? 1 : node->num_children;
    free_strings(value);
    if (count == 0) return MTP_OK;
    value->items = calloc((size_t)count, sizeof *value->items);
    if (!value->items) return no_memory();
    for (const mtp__toml_node *item = single ? node : mtp__toml_first(toml, node); item;
         item = mtp__toml_next(toml, item)) {
        if (item->kind != MTP__TOML_STRING) return wrong_type(toml, item, field, "a list of strings");
        value->items[value->count] = strdup(item->string);
        if (!value->items[value->count++]) return no_memory();
        if (single) break;
    }
    return MTP_OK;
}

static mtp_status take_value(const mtp__toml *toml, const mtp__toml_node *node, const mtp__field *field, void *value)
{
    switch (field->kind) {
    case MTP__FIELD_STRING: {
        if (node->kind != MTP__TOML_STRING) return wrong_type(toml, node, field, "a string");
        char *copy = strdup(node->string);
        if (!copy) return no_memory();
        free(*(char **)value);
        *(char **)value = copy;
        return MTP_OK;
    }
    case MTP__FIELD_STRINGS:
        return take_strings(toml, node, field, value);
    case MTP__FIELD_SOURCES:
        return mtp__config_take_sources(toml, node, field, value);
    case MTP__FIELD_INT:
        if (node->kind != MTP__TOML_INTEGER) return wrong_type(toml, node, field, "an integer");
        *(int64_t *)value = node->integer;
        return check_range(toml, node, field);
    case MTP__FIELD_REAL:
        if (node->kind != MTP__TOML_INTEGER && node->kind != MTP__TOML_FLOAT)
            return wrong_type(toml, node, field, "a number");
        *(double *)value = node->number;
        return check_range(toml, node, field);
    case MTP__FIELD_BOOL:
        if (node->kind != MTP__TOML_BOOL) return wrong_type(toml, node, field, "true or false");
        *(bool *)value = node->boolean;
        return MTP_OK;
    case MTP__FIELD_CHOICE:
        if (node->kind != MTP__TOML_STRING) return wrong_type(toml, node, field, "a string");
        return take_choice(toml, node, field, value);
    }
    return MTP_FAIL(MTP_E_INTERNAL, "%s: a kind without a reader", field->key);
}

/* ---- a whole file --------------------------------------------------------------------------------------------- */

/* "section.key" or, where that is what was written, the section of a mistyped name. */
static mtp_status unknown_key(const mtp__toml *toml, const mtp__toml_node *node)
{
    size_t count;
    const mtp__field *fields = mtp__config_fields(&count);
    const char *keys[MAX_FIELDS];
    char path[256];
    mtp__toml_path(toml, node, path, sizeof path);
    if (count > MAX_FIELDS) return MTP_FAIL(MTP_E_INTERNAL, "the schema has more than %d keys", (int)MAX_FIELDS);
    for (size_t i = 0; i < count; i++) keys[i] = fields[i].key;
    const char *nearest = mtp_suggest(node->key, keys, count);
    if (!nearest) return mtp__toml_fail(toml, node, "unknown key '%s'; mtp train --print-reference lists all", path);
    const mtp__field *field = &fields[mtp__config_find(nearest)];
    return mtp__toml_fail(toml, node, "unknown key '%s' (did you mean '%s.%s'?)", path, field->section, field->key);
}

static mtp_status unknown_table(const mtp__toml *toml, const mtp__toml_node *node)
{
    size_t count, known = 0;
    const mtp__field *fields = mtp__config_fields(&count);
    const char *names[MAX_FIELDS];
    for (size_t i = 0; i < count && known < MAX_FIELDS; i++)
        if (i == 0 || strcmp(fields[i].section, fields[i - 1].section) != 0) names[known++] = fields[i].section;
    const char *nearest = mtp_suggest(node->key, names, known);
    if (nearest) return mtp__toml_fail(toml, node, "unknown table '%s' (did you mean '%s'?)", node->key, nearest);
    return mtp__toml_fail(toml, node, "unknown table '%s'; mtp train --print-reference lists all", node->key);
}

static mtp_status take_field(mtp_train_config *config, const mtp__toml *toml, const mtp__toml_node *node, size_t index,
                             config_source source)
{
    size_t count;
    const mtp__field *field = &mtp__config_fields(&count)[index];
    MTP_TRY(take_value(toml, node, field, (char *)config + field->offset));
    return set_place(config, index, toml, node, source);
}

static mtp_status take_key(mtp_train_config *config, const mtp__toml *toml, const mtp__toml_node *node,
                           const char *section, config_source source)
{
    size_t count;
    const mtp__field *fields = mtp__config_fields(&count);
    const size_t index = mtp__config_find(node->key);
    if (index == count || (section && strcmp(fields[index].section, section) != 0)) return unknown_key(toml, node);
    return take_field(config, toml, node, index, source);
}

static bool is_section(const char *name)
{
    return mtp__config_section_help(name) != NULL;
}

/* Only an override may leave the section out. */
static mtp_status take_tree(mtp_train_config *config, const mtp__toml *toml, config_source source)
{
    for (const mtp__toml_node *top = mtp__toml_first(toml, &toml->nodes[0]); top; top = mtp__toml_next(toml, top)) {
        if (top->kind == MTP__TOML_ARRAY && strcmp(top->key, "data") == 0) { /* [[data]]: short for [[data.sources]] */
            MTP_TRY(take_field(config, toml, top, mtp__config_find("sources"), source));
            continue;
        }
        if (top->kind != MTP__TOML_TABLE) {
            if (source != FROM_OVERRIDE) return unknown_key(toml, top);
            MTP_TRY(take_key(config, toml, top, NULL, source));
            continue;
        }
        if (!is_section(top->key)) return unknown_table(toml, top);
        for (const mtp__toml_node *key = mtp__toml_first(toml, top); key; key = mtp__toml_next(toml, key))
            MTP_TRY(take_key(config, toml, key, top->key, source));
    }
    return MTP_OK;
}

static mtp_status take_defaults(mtp_train_config *config)
{
    mtp__text text = {0};
    mtp__toml *toml = NULL;
    mtp__config_write(&text, NULL, false);
    mtp_status status = mtp__text_check(&text);
    if (status == MTP_OK) status = mtp__toml_parse(text.data, text.length, "defaults", &toml);
    if (status == MTP_OK) status = take_tree(config, toml, FROM_DEFAULTS);
    mtp__toml_free(toml);
    mtp__text_free(&text);
    return status;
}

static mtp_status take_override(mtp_train_config *config, const char *override)
{
    mtp__toml *toml = NULL;
    MTP_TRY(mtp__toml_override(override, &toml));
    const mtp_status status = take_tree(config, toml, FROM_OVERRIDE);
    mtp__toml_free(toml);
    return status;
}

static mtp_status take_file(mtp_train_config *config, const char *path)
{
    mtp__toml *toml = NULL;
    MTP_TRY(mtp__toml_read(path, &toml));
    const mtp_status status = take_tree(config, toml, FROM_FILE);
    mtp__toml_free(toml);
    return status;
}

/* ---- what must hold together ---------------------------------------------------------------------------------- */

static mtp_status check_required(const mtp_train_config *config)
{
    size_t count;
    const mtp__field *fields = mtp__config_fields(&count);
    for (size_t i = 0; i < count; i++) {
        const void *value = (const char *)config + fields[i].offset;
        const bool empty = fields[i].kind == MTP__FIELD_STRING    ? !**(char *const *)value
                           : fields[i].kind == MTP__FIELD_STRINGS ? ((const mtp_strings *)value)->count == 0
                                                                  : false;
        if (config->sources.count > 0 && strcmp(fields[i].key, "train_data") == 0) continue; /* checked with them */
        if (fields[i].example && empty)
            return mtp__config_fail(config, fields[i].key, "must be given, in the table [%s]%s", fields[i].section,
                                    strcmp(fields[i].key, "train_data") == 0 ? ", or sources in place of it" : "");
    }
    return MTP_OK;
}

static mtp_status check_length(const mtp_train_config *c)
{
    if (c->max_steps == 0 && c->num_train_epochs == 0)
        return mtp__config_fail(c, "max_steps",
                                "the run has no length: give max_steps or num_train_epochs, in [train]");
    if (c->max_steps > 0 && c->num_train_epochs > 0)
        return mtp__config_fail(c, "num_train_epochs", "max_steps = %lld is given too; set one of them to 0",
                                (long long)c->max_steps);
    if (c->max_steps > 0 && c->warmup_steps > c->max_steps)
        return mtp__config_fail(c, "warmup_steps", "%lld is more than max_steps = %lld", (long long)c->warmup_steps,
                                (long long)c->max_steps);
    return MTP_OK;
}

static mtp_status check_sources(const mtp_train_config *c)
{
    if (c->sources.count > 0 && c->train_data.count > 0)
        return mtp__config_fail(c, "sources", "train_data is given too; use one of them");
    return MTP_OK;
}

static mtp_status check_evaluation(const mtp_train_config *c)
{
    if (c->validation_share > 0 && c->eval_data.count > 0)
        return mtp__config_fail(c, "validation_share", "eval_data is given too; use one of them");
    if (c->eval_steps > 0 && !mtp__config_evaluates(c))
        return mtp__config_fail(c, "eval_steps", "needs eval_data or validation_share, in [data]");
    if (c->precision == MTP_PRECISION_BF16 && strcmp(c->device, "cpu") == 0)
        return mtp__config_fail(c, "precision", "\"bf16\" needs device = \"cuda\"; device \"cpu\" computes in fp32");
    if (c->rows_per_chunk > 0 && c->rows_per_chunk < FEWEST_ROWS)
        return mtp__config_fail(c, "rows_per_chunk",
                                "%lld: must be from %d to 1048576, or 0 for the default of the device",
                                (long long)c->rows_per_chunk, (int)FEWEST_ROWS);
    if (c->keep_best && c->eval_steps == 0) return mtp__config_fail(c, "keep_best", "needs eval_steps, in [train]");
    if (c->patience > 0 && c->eval_steps == 0) return mtp__config_fail(c, "patience", "needs eval_steps, in [train]");
    return MTP_OK;
}

/* Where to get what is missing; "" when nobody but the user knows. */
static const char *where_from(const char *key)
{
    if (strcmp(key, "drafter") == 0)
        return ". Put the path of yours there or give --set drafter=DIR; published ones are google/gemma-4-*-assistant "
               "at Hugging Face, and `mtp init` makes one for a verifier";
    if (strcmp(key, "verifier") == 0)
        return ". Put the path of the model that wrote the samples there, or give --set verifier=DIR";
    return "";
}

mtp_status mtp__config_check_directory(const mtp_train_config *config, const char *key, const char *path)
{
    if (mtp__dir_exists(path)) return MTP_OK;
    if (mtp__path_exists(path)) return mtp__config_fail(config, key, "%s is not a directory", path);
    return mtp__config_fail(config, key, "there is no directory %s%s", path, where_from(key));
}

/* `head` and `centroid_weight` depend on the drafter. */
static mtp_status resolve_loss(mtp_train_config *c)
{
    enum { AUTO = MTP_HEAD_HIERARCHICAL + 1 };
    mtp_drafter_config drafter;
    MTP_TRY(mtp__config_check_directory(c, "drafter", c->drafter));
    const mtp_status status = mtp_drafter_config_read(c->drafter, &drafter);
    if (status != MTP_OK) {
        const char *origin = c->places->origin[mtp__config_find("drafter")];
        return mtp__fail_prefix(status, "%s: drafter", origin ? origin : c->places->path);
    }
    const bool ordered = drafter.ordered;
    mtp_drafter_config_free(&drafter);
    if (c->head == AUTO) c->head = ordered ? MTP_HEAD_MASKED : MTP_HEAD_FLAT;
    if (!ordered && c->head != MTP_HEAD_FLAT)
        return mtp__config_fail(
            c, "head", "the drafter %s has a dense head (use_ordered_embeddings is false); use \"flat\"", c->drafter);
    if (ordered && c->head != MTP_HEAD_HIERARCHICAL) return MTP_OK;
    if (is_set(c, "centroid_weight") && c->centroid_weight != 0)
        return mtp__config_fail(c, "centroid_weight",
                                ordered
                                    ? "head = \"hierarchical\" contains the centroid term; leave it out or set it to 0"
                                    : "a drafter with a dense head has no centroids; leave it out or set it to 0");
    c->centroid_weight = 0;
    return MTP_OK;
}

static mtp_status load(const char *path, const char *const *overrides, int64_t num_overrides, mtp_train_config *config)
{
    MTP_TRY(take_defaults(config));
    MTP_TRY(take_file(config, path));
    for (int64_t i = 0; i < num_overrides; i++) MTP_TRY(take_override(config, overrides[i]));
    MTP_TRY(check_required(config));
    MTP_TRY(check_sources(config));
    MTP_TRY(check_length(config));
    MTP_TRY(check_evaluation(config));
    return resolve_loss(config);
}

mtp_status mtp_train_config_load(const char *path, const char *const *overrides, int64_t num_overrides,
                                 mtp_train_config **config)
{
    MTP_REQUIRE(path && config && num_overrides >= 0 && (overrides || num_overrides == 0));
    mtp_train_config *created = NULL;
    *config = NULL;
    mtp_status status = create(path, &created);
    if (status == MTP_OK) status = load(path, overrides, num_overrides, created);
    if (status != MTP_OK) {
        mtp_train_config_free(created);
        return status;
    }
    *config = created;
    return MTP_OK;
}

static mtp_status check_data(const mtp_train_config *config, const char *key, const mtp_strings *paths)
{
    for (int64_t i = 0; i < paths->count; i++)
        if (!mtp__path_exists(paths->items[i]))
            return mtp__config_fail(config, key, "there is no file or directory %s", paths->items[i]);
    return MTP_OK;
}

mtp_status mtp_train_config_check_paths(const mtp_train_config *config)
{
    MTP_REQUIRE(config);
    MTP_TRY(mtp__config_check_directory(config, "drafter", config->drafter));
    MTP_TRY(mtp__config_check_directory(config, "verifier", config->verifier));
    if (*config->embedding_from) MTP_TRY(mtp__config_check_directory(config, "embedding_from", config->embedding_from));
    MTP_TRY(check_data(config, "train_data", &config->train_data));
    for (int64_t i = 0; i < config->sources.count; i++)
        MTP_TRY(check_data(config, "sources", &(mtp_strings){&config->sources.items[i].path, 1}));
    MTP_TRY(check_data(config, "eval_data", &config->eval_data));
    if (mtp__path_exists(config->output_dir))
        MTP_TRY(mtp__config_check_directory(config, "output_dir", config->output_dir));
    const bool named = strcmp(config->resume, MTP_RESUME_NEVER) != 0 && strcmp(config->resume, MTP_RESUME_AUTO) != 0;
    if (named) MTP_TRY(mtp__config_check_directory(config, "resume", config->resume));
    return MTP_OK;
}

/* ---- for others ----------------------------------------------------------------------------------------------- */

/* A chunk never has more rows than a micro-batch has tokens. */
static int64_t rows_per_chunk(const mtp_train_config *c)
{
    if (c->rows_per_chunk > 0) return c->rows_per_chunk;
    if (strcmp(c->device, "cpu") == 0) return MTP__ROWS_PER_CHUNK_HOST;
    return c->tokens_per_batch < MTP__ROWS_PER_CHUNK_DEVICE ? c->tokens_per_batch : MTP__ROWS_PER_CHUNK_DEVICE;
}

mtp_step_config mtp__config_step(const mtp_train_config *c)
{
    return (mtp_step_config){.num_speculative_steps = (int32_t)c->num_speculative_steps,
                             .position_offset = (int32_t)c->position_offset,
                             .feeding = (mtp_feeding)c->feeding,
                             .head_mode = (mtp_head_mode)c->head,
                             .step_weight_beta = c->step_weight_beta,
                             .centroid_weight = c->centroid_weight,
                             .detach_state = c->detach_state,
                             .rows_per_chunk = rows_per_chunk(c),
                             .logits_budget = (size_t)c->logits_budget_mib << 20};
}

mtp_adamw_config mtp__config_adamw(const mtp_train_config *c)
{
    return (mtp_adamw_config){.beta1 = c->adam_beta1,
                              .beta2 = c->adam_beta2,
                              .epsilon = c->adam_epsilon,
                              .weight_decay = c->weight_decay,
                              .max_grad_norm = c->max_grad_norm,
                              .seed = (uint64_t)c->seed};
}

mtp_dtype mtp__config_masters(const mtp_train_config *c)
{
    return c->master_weights == MTP_PRECISION_BF16 ? MTP_BF16 : MTP_F32;
}

mtp_context_options mtp__config_context(const mtp_train_config *c, const mtp_logger *logger)
{
    return (mtp_context_options){.device = c->device,
                                 .bf16 = c->precision == MTP_PRECISION_BF16,
                                 .num_threads = (int)c->num_threads,
                                 .isa = *c->isa ? c->isa : NULL,
                                 .logger = logger};
}
