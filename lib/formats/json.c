#include "formats/json.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"

/* ---- parsing -------------------------------------------------------------------------------------------------- */

/* jansson recurses: refuse deep texts before it sees them. Brackets inside strings do not count. */
static mtp_status check_depth(const char *text, size_t size, const char *origin, int line)
{
    bool in_string = false;
    int depth = 0;
    for (size_t i = 0; i < size; i++) {
        const char c = text[i];
        line += c == '\n';
        if (in_string && c == '\\')
            i++;
        else if (c == '"')
            in_string = !in_string;
        else if (!in_string && (c == '[' || c == '{') && ++depth > MTP__JSON_MAX_DEPTH)
            return MTP_FAIL(MTP_E_FORMAT, "%s:%d: nested deeper than %d levels", origin, line, MTP__JSON_MAX_DEPTH);
        else if (!in_string && (c == ']' || c == '}'))
            depth--;
    }
    return MTP_OK;
}

mtp_status mtp__json_parse(const char *text, size_t size, const char *origin, int first_line, json_t **root)
{
    json_error_t error;
    *root = NULL;
    if (size > MTP__JSON_MAX_BYTES)
        return MTP_FAIL(MTP_E_FORMAT, "%s:%d: %zu bytes of JSON; at most %d are read", origin, first_line, size,
                        MTP__JSON_MAX_BYTES);
    size_t blank = 0;
    while (blank < size && strchr(" \t\r\n", text[blank]) && text[blank]) blank++;
    if (blank == size) return MTP_FAIL(MTP_E_FORMAT, "%s:%d: empty, expected JSON", origin, first_line);
    MTP_TRY(check_depth(text, size, origin, first_line));
    *root = json_loadb(text, size, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &error);
    if (*root) return MTP_OK;
    if (json_error_code(&error) == json_error_out_of_memory)
        return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory while parsing", origin);
    const int line = error.line > 0 ? error.line - 1 + first_line : first_line;
    return MTP_FAIL(MTP_E_FORMAT, "%s:%d:%d: not valid JSON: %s", origin, line, error.column, error.text);
}

mtp_status mtp__json_read(const char *path, json_t **root)
{
    char *text;
    size_t size;
    *root = NULL;
    MTP_TRY(mtp__file_read(path, MTP__JSON_MAX_BYTES, &text, &size));
    const mtp_status status = mtp__json_parse(text, size, path, 1, root);
    free(text);
    return status;
}

/* ---- typed access --------------------------------------------------------------------------------------------- */

mtp__json_node mtp__json_root(json_t *root, const char *origin)
{
    return (mtp__json_node){.value = root, .origin = origin};
}

mtp__json_node mtp__json_item(const mtp__json_node *array, size_t index)
{
    return (mtp__json_node){json_array_get(array->value, index), array->origin, array, NULL, index};
}

bool mtp__json_has(const mtp__json_node *object, const char *key)
{
    const json_t *value = json_object_get(object->value, key);
    return value && !json_is_null(value);
}

/* Appends "a.b[3]" to text; the root adds nothing. */
static void path_of(const mtp__json_node *node, char *text, size_t capacity)
{
    if (!node->parent) return;
    path_of(node->parent, text, capacity);
    const size_t used = strlen(text);
    if (node->key)
        snprintf(text + used, capacity - used, "%s%s", used ? "." : "", node->key);
    else
        snprintf(text + used, capacity - used, "[%zu]", node->index);
}

mtp_status mtp__json_fail(const mtp__json_node *node, mtp_status status, const char *format, ...)
{
    char path[512] = "", message[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    path_of(node, path, sizeof path);
    return MTP_FAIL(status, "%s: %s%s%s", node->origin, path, *path ? ": " : "", message);
}

static mtp_status wrong_type(const mtp__json_node *node, const char *expected)
{
    static const char *const names[] = {
        [JSON_OBJECT] = "an object",   [JSON_ARRAY] = "an array",     [JSON_STRING] = "a string",
        [JSON_INTEGER] = "an integer", [JSON_REAL] = "a real number", [JSON_TRUE] = "true",
        [JSON_FALSE] = "false",        [JSON_NULL] = "null",
    };
    return mtp__json_fail(node, MTP_E_FORMAT, "expected %s, got %s", expected,
                          node->value ? names[json_typeof(node->value)] : "nothing");
}

mtp_status mtp__json_as_object(const mtp__json_node *node)
{
    return json_is_object(node->value) ? MTP_OK : wrong_type(node, "an object");
}

mtp_status mtp__json_as_array(const mtp__json_node *node, size_t *count)
{
    if (!json_is_array(node->value)) return wrong_type(node, "an array");
    *count = json_array_size(node->value);
    return MTP_OK;
}

mtp_status mtp__json_as_int64(const mtp__json_node *node, int64_t min, int64_t max, int64_t *value)
{
    if (!json_is_integer(node->value)) return wrong_type(node, "an integer");
    const int64_t number = json_integer_value(node->value);
    if (number < min || number > max)
        return mtp__json_fail(node, MTP_E_FORMAT, "%lld is outside %lld..%lld", (long long)number, (long long)min,
                              (long long)max);
    *value = number;
    return MTP_OK;
}

mtp_status mtp__json_as_double(const mtp__json_node *node, double *value)
{
    if (!json_is_number(node->value)) return wrong_type(node, "a number");
    *value = json_number_value(node->value);
    return MTP_OK;
}

mtp_status mtp__json_as_bool(const mtp__json_node *node, bool *value)
{
    if (!json_is_boolean(node->value)) return wrong_type(node, "true or false");
    *value = json_is_true(node->value);
    return MTP_OK;
}

mtp_status mtp__json_as_string(const mtp__json_node *node, const char **value)
{
    if (!json_is_string(node->value)) return wrong_type(node, "a string");
    *value = json_string_value(node->value);
    return MTP_OK;
}

mtp_status mtp__json_get(const mtp__json_node *object, const char *key, mtp__json_node *child)
{
    MTP_TRY(mtp__json_as_object(object));
    *child = (mtp__json_node){json_object_get(object->value, key), object->origin, object, key, 0};
    return child->value ? MTP_OK : mtp__json_fail(child, MTP_E_NOT_FOUND, "the key is missing");
}

mtp_status mtp__json_get_object(const mtp__json_node *object, const char *key, mtp__json_node *child)
{
    MTP_TRY(mtp__json_get(object, key, child));
    return mtp__json_as_object(child);
}

mtp_status mtp__json_get_array(const mtp__json_node *object, const char *key, mtp__json_node *child, size_t *count)
{
    MTP_TRY(mtp__json_get(object, key, child));
    return mtp__json_as_array(child, count);
}

mtp_status mtp__json_get_int64(const mtp__json_node *object, const char *key, int64_t min, int64_t max, int64_t *value)
{
    mtp__json_node child;
    MTP_TRY(mtp__json_get(object, key, &child));
    return mtp__json_as_int64(&child, min, max, value);
}

mtp_status mtp__json_get_double(const mtp__json_node *object, const char *key, double *value)
{
    mtp__json_node child;
    MTP_TRY(mtp__json_get(object, key, &child));
    return mtp__json_as_double(&child, value);
}

mtp_status mtp__json_get_bool(const mtp__json_node *object, const char *key, bool *value)
{
    mtp__json_node child;
    MTP_TRY(mtp__json_get(object, key, &child));
    return mtp__json_as_bool(&child, value);
}

mtp_status mtp__json_get_string(const mtp__json_node *object, const char *key, const char **value)
{
    mtp__json_node child;
    MTP_TRY(mtp__json_get(object, key, &child));
    return mtp__json_as_string(&child, value);
}
