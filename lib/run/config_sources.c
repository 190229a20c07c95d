/* The sources of a configuration: tables with a path and a weight. */
#include <stdlib.h>
#include <string.h>

#include "formats/toml.h"
#include "mtp/suggest.h"
#include "run/config.h"

void mtp__config_free_sources(mtp_sources *sources)
{
    for (int64_t i = 0; i < sources->count; i++) free(sources->items[i].path);
    free(sources->items);
    *sources = (mtp_sources){0};
}

static mtp_status unknown_key(const mtp__toml *toml, const mtp__toml_node *node)
{
    static const char *const keys[] = {"path", "weight"};
    const char *nearest = mtp_suggest(node->key, keys, 2);
    if (nearest)
        return mtp__toml_fail(toml, node, "unknown key '%s' of a source (did you mean '%s'?)", node->key, nearest);
    return mtp__toml_fail(
        toml, node,
        "a source has the keys 'path' and 'weight', not '%s'; the other keys of the section stand in a "
        "table [data], with the sources as [[data.sources]] tables",
        node->key);
}

static mtp_status take_weight(const mtp__toml *toml, const mtp__toml_node *node, const mtp__field *field,
                              double *weight)
{
    if (node->kind != MTP__TOML_INTEGER && node->kind != MTP__TOML_FLOAT)
        return mtp__toml_fail(toml, node, "weight: expected a number, got %s", mtp__toml_kind_name(node->kind));
    if (!(node->number >= field->min && node->number <= field->max))
        return mtp__toml_fail(toml, node,
                              "weight = %.15g: must be from %.15g to %.15g; leave a source out that shall have none",
                              node->number, field->min, field->max);
    *weight = node->number;
    return MTP_OK;
}

static mtp_status take_source(const mtp__toml *toml, const mtp__toml_node *table, const mtp__field *field,
                              mtp_source *source)
{
    if (table->kind != MTP__TOML_TABLE)
        return mtp__toml_fail(toml, table, "%s: expected a table with path and weight, got %s", field->key,
                              mtp__toml_kind_name(table->kind));
    source->weight = 1;
    for (const mtp__toml_node *key = mtp__toml_first(toml, table); key; key = mtp__toml_next(toml, key)) {
        if (strcmp(key->key, "weight") == 0) {
            MTP_TRY(take_weight(toml, key, field, &source->weight));
        } else if (strcmp(key->key, "path") == 0) {
            if (key->kind != MTP__TOML_STRING || !*key->string)
                return mtp__toml_fail(toml, key, "path: expected a string that names a store, a directory or a file");
            source->path = strdup(key->string);
            if (!source->path) return MTP_FAIL(MTP_E_MEMORY, "out of memory for the configuration");
        } else {
            return unknown_key(toml, key);
        }
    }
    return source->path ? MTP_OK : mtp__toml_fail(toml, table, "a source without a path");
}

mtp_status mtp__config_take_sources(const mtp__toml *toml, const mtp__toml_node *node, const mtp__field *field,
                                    mtp_sources *sources)
{
    if (node->kind != MTP__TOML_ARRAY)
        return mtp__toml_fail(toml, node, "%s: expected a list of tables, got %s", field->key,
                              mtp__toml_kind_name(node->kind));
    mtp__config_free_sources(sources);
    if (node->num_children == 0) return MTP_OK;
    sources->items = calloc((size_t)node->num_children, sizeof *sources->items);
    if (!sources->items) return MTP_FAIL(MTP_E_MEMORY, "out of memory for the configuration");
    for (const mtp__toml_node *item = mtp__toml_first(toml, node); item; item = mtp__toml_next(toml, item))
        MTP_TRY(take_source(toml, item, field, &sources->items[sources->count++]));
    return MTP_OK;
}
