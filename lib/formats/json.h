/* JSON: a strict reader over jansson with messages that name the place, and a writer with the layout of Python's
 * json.dumps (which is how transformers writes config.json). Internal.
 *
 * Strict: duplicate keys, trailing text, invalid UTF-8, integers beyond 64 bits, a text of more than
 * MTP__JSON_MAX_BYTES and nesting beyond MTP__JSON_MAX_DEPTH are MTP_E_FORMAT with file, line and column. */
#ifndef MTP_FORMATS_JSON_H
#define MTP_FORMATS_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MTP__JSON_MAX_BYTES = 1 << 28, MTP__JSON_MAX_DEPTH = 100 };

/* ---- parsing -------------------------------------------------------------------------------------------------- */

/* Any JSON value. `origin` (a path) and `first_line` (1 for a whole file) are for messages only. json_decref(*root). */
mtp_status mtp__json_parse(const char *text, size_t size, const char *origin, int first_line, json_t **root);
/* A file. json_decref(*root). */
mtp_status mtp__json_read(const char *path, json_t **root);

/* ---- typed access --------------------------------------------------------------------------------------------- */

/* A value and the way to it. Nodes live on the caller's stack and point to their parents, so that a message can say
 * "config.json: text_config.layer_types[3]: expected a string, got an integer". Values belong to the root. */
typedef struct mtp__json_node {
    json_t *value;
    const char *origin;
    const struct mtp__json_node *parent; /* NULL for the root */
    const char *key;                     /* NULL for an array item */
    size_t index;
} mtp__json_node;

mtp__json_node mtp__json_root(json_t *root, const char *origin);
/* True when `object` has `key` with a value other than null. */
bool mtp__json_has(const mtp__json_node *object, const char *key);
/* Raise a failure about a value: "origin: path: ...". */
mtp_status mtp__json_fail(const mtp__json_node *node, mtp_status status, const char *format, ...) MTP__PRINTF(3, 4);

/* Members of an object. A missing key is MTP_E_NOT_FOUND, another type MTP_E_FORMAT; a null is another type. */
mtp_status mtp__json_get(const mtp__json_node *object, const char *key, mtp__json_node *child);
mtp_status mtp__json_get_object(const mtp__json_node *object, const char *key, mtp__json_node *child);
mtp_status mtp__json_get_array(const mtp__json_node *object, const char *key, mtp__json_node *child, size_t *count);
/* An integer inside [min, max]; outside is MTP_E_FORMAT. */
mtp_status mtp__json_get_int64(const mtp__json_node *object, const char *key, int64_t min, int64_t max, int64_t *value);
/* A number; an integer is taken too. */
mtp_status mtp__json_get_double(const mtp__json_node *object, const char *key, double *value);
mtp_status mtp__json_get_bool(const mtp__json_node *object, const char *key, bool *value);
/* The string belongs to the root and holds no NUL. */
mtp_status mtp__json_get_string(const mtp__json_node *object, const char *key, const char **value);

/* An item of an array; the index must be inside. */
mtp__json_node mtp__json_item(const mtp__json_node *array, size_t index);
/* The same checks for a node itself. */
mtp_status mtp__json_as_object(const mtp__json_node *node);
mtp_status mtp__json_as_array(const mtp__json_node *node, size_t *count);
mtp_status mtp__json_as_int64(const mtp__json_node *node, int64_t min, int64_t max, int64_t *value);
mtp_status mtp__json_as_double(const mtp__json_node *node, double *value);
mtp_status mtp__json_as_bool(const mtp__json_node *node, bool *value);
mtp_status mtp__json_as_string(const mtp__json_node *node, const char **value);

/* ---- writing -------------------------------------------------------------------------------------------------- */

/* The layout of json.dumps: indent 2 (or one line), ": " after a key, non-ASCII as \uXXXX, floats as repr() gives them
 * (1e-06, 0.1, 1000000.0). Keys in their order, or sorted. */
enum {
    MTP__JSON_ONE_LINE = 1, /* ", " between items; no indentation */
    MTP__JSON_SORT_KEYS = 2,
    MTP__JSON_NEWLINE = 4 /* end with one */
};
/* free(*text). */
mtp_status mtp__json_dump(const json_t *root, unsigned flags, char **text);
/* A whole file, atomically. */
mtp_status mtp__json_write(const char *path, const json_t *root, unsigned flags);

#ifdef __cplusplus
}
#endif
#endif
