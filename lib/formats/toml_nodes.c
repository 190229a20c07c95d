/* Reading a configuration from a file or from --set, and walking its nodes: what does not depend on the parser. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "formats/toml.h"

mtp_status mtp__toml_parse(const char *text, size_t size, const char *origin, mtp__toml **toml)
{
    return mtp__toml_parse_as(text, size, origin, false, toml);
}

mtp_status mtp__toml_read(const char *path, mtp__toml **toml)
{
    char *text = NULL;
    size_t size = 0;
    *toml = NULL;
    mtp_status status = mtp__file_read(path, MTP__TOML_MAX_BYTES, &text, &size);
    if (status == MTP_E_MEMORY) return status;
    if (status != MTP_OK) return MTP_FAIL(MTP_E_CONFIG, "configuration %s", mtp_last_error()->message);
    status = mtp__toml_parse(text, size, path, toml);
    free(text);
    return status;
}

/* ---- --set ---------------------------------------------------------------------------------------------------- */

/* The '=' behind the key: the first that is not inside quotes; NULL when there is none. */
static const char *find_equals(const char *text)
{
    char quote = 0;
    for (; *text; text++) {
        if (quote == 0 && *text == '=') return text;
        if (quote == 0 && (*text == '"' || *text == '\''))
            quote = *text;
        else if (*text == quote)
            quote = 0;
    }
    return NULL;
}

/* "key = value", the value as it is or as a basic string with that content. free() it; NULL when out of memory. */
static char *assignment(const char *key, size_t key_size, const char *value, size_t value_size, bool quote)
{
    char *text = malloc(key_size + 2 * value_size + sizeof " = \"\"");
    if (!text) return NULL;
    char *end = text;
    memcpy(end, key, key_size);
    end = stpcpy(end + key_size, quote ? " = \"" : " = ");
    for (size_t i = 0; i < value_size; i++) {
        if (quote && (value[i] == '"' || value[i] == '\\')) *end++ = '\\';
        *end++ = value[i];
    }
    stpcpy(end, quote ? "\"" : "");
    return text;
}

static mtp_status parse_assignment(const char *text, const char *equals, const char *origin, bool quote,
                                   mtp__toml **toml)
{
    const char *value = equals + 1 + strspn(equals + 1, " \t");
    size_t size = strlen(value);
    while (size > 0 && (value[size - 1] == ' ' || value[size - 1] == '\t')) size--;
    char *source = assignment(text, (size_t)(equals - text), value, size, quote);
    if (!source) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", origin);
    const mtp_status status = mtp__toml_parse_as(source, strlen(source), origin, true, toml);
    free(source);
    return status;
}

static mtp_status parse_override(const char *text, const char *origin, mtp__toml **toml)
{
    const char *equals = find_equals(text);
    if (!equals || strpbrk(text, "\r\n")) return MTP_FAIL(MTP_E_CONFIG, "%s: expected key=value on one line", origin);
    const char *value = equals + 1 + strspn(equals + 1, " \t");
    if (!*value)
        return MTP_FAIL(MTP_E_CONFIG, "%s: no value; an empty string is written %.*s=''", origin, (int)(equals - text),
                        text);
    const bool structured = strchr("\"'[{", *value) != NULL;
    /* a '#' in a bare word belongs to the word: there are no comments on a command line */
    if (structured || !strchr(value, '#')) {
        const mtp_status status = parse_assignment(text, equals, origin, false, toml);
        if (status == MTP_OK || structured) return status;
    }
    return parse_assignment(text, equals, origin, true, toml);
}

mtp_status mtp__toml_override(const char *text, mtp__toml **toml)
{
    char *origin = NULL;
    *toml = NULL;
    if (asprintf(&origin, "--set %s", text) < 0) return MTP_FAIL(MTP_E_MEMORY, "--set: out of memory");
    const mtp_status status = parse_override(text, origin, toml);
    free(origin);
    return status;
}

/* ---- nodes ---------------------------------------------------------------------------------------------------- */

const mtp__toml_node *mtp__toml_first(const mtp__toml *toml, const mtp__toml_node *parent)
{
    return parent->first_child < 0 ? NULL : &toml->nodes[parent->first_child];
}

const mtp__toml_node *mtp__toml_next(const mtp__toml *toml, const mtp__toml_node *node)
{
    return node->next_sibling < 0 ? NULL : &toml->nodes[node->next_sibling];
}

const mtp__toml_node *mtp__toml_find(const mtp__toml *toml, const mtp__toml_node *parent, const char *key)
{
    const mtp__toml_node *node = mtp__toml_first(toml, parent);
    while (node && (!node->key || strcmp(node->key, key) != 0)) node = mtp__toml_next(toml, node);
    return node;
}

const char *mtp__toml_path(const mtp__toml *toml, const mtp__toml_node *node, char *text, size_t capacity)
{
    if (capacity > 0) text[0] = '\0';
    if (capacity == 0 || node->parent < 0) return text;
    const mtp__toml_node *parent = &toml->nodes[node->parent];
    mtp__toml_path(toml, parent, text, capacity);
    const size_t used = strlen(text);
    if (node->key) {
        snprintf(text + used, capacity - used, "%s%s", used ? "." : "", node->key);
        return text;
    }
    int index = 0;
    for (const mtp__toml_node *item = mtp__toml_first(toml, parent); item != node; item = mtp__toml_next(toml, item))
        index++;
    snprintf(text + used, capacity - used, "[%d]", index);
    return text;
}

const char *mtp__toml_kind_name(mtp__toml_kind kind)
{
    switch (kind) {
    case MTP__TOML_TABLE:
        return "a table";
    case MTP__TOML_ARRAY:
        return "an array";
    case MTP__TOML_STRING:
        return "a string";
    case MTP__TOML_INTEGER:
        return "an integer";
    case MTP__TOML_FLOAT:
        return "a float";
    case MTP__TOML_BOOL:
        return "true or false";
    }
    return "?";
}

mtp_status mtp__toml_fail(const mtp__toml *toml, const mtp__toml_node *node, const char *format, ...)
{
    char message[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    if (toml->is_override) return MTP_FAIL(MTP_E_CONFIG, "%s: %s", toml->origin, message);
    return MTP_FAIL(MTP_E_CONFIG, "%s:%d: %s", toml->origin, (int)node->line, message);
}
