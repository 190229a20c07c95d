/* TOML: a C facade over toml++ that keeps the source line of every node, so that a configuration layer can say
 * "run.toml:12: unknown key 'optimizer.lr'". A build without toml++ (MTP_TOML=OFF) reads the part of TOML that
 * configurations use: no strings of several lines, no numbers but decimal ones. Internal.
 *
 * Faults are MTP_E_CONFIG with "file:line:column". Beyond the grammar: dates and times are refused, and so are keys
 * or values nested deeper than MTP__TOML_MAX_DEPTH and files larger than MTP__TOML_MAX_BYTES. */
#ifndef MTP_FORMATS_TOML_H
#define MTP_FORMATS_TOML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MTP__TOML_MAX_BYTES = 1 << 20, MTP__TOML_MAX_DEPTH = 32 };

typedef enum mtp__toml_kind {
    MTP__TOML_TABLE,
    MTP__TOML_ARRAY,
    MTP__TOML_STRING,
    MTP__TOML_INTEGER,
    MTP__TOML_FLOAT,
    MTP__TOML_BOOL
} mtp__toml_kind;

/* Nodes stand in one array, parents before children, siblings in the order of their keys in the file. */
typedef struct mtp__toml_node {
    mtp__toml_kind kind;
    int32_t line;         /* of the key, or of the value inside an array; 1 for the root */
    int32_t parent;       /* index; -1 for the root */
    int32_t first_child;  /* of a table or array; -1 when empty */
    int32_t next_sibling; /* -1 for the last */
    int32_t num_children;
    const char *key;    /* NULL for the root and for array items */
    const char *string; /* MTP__TOML_STRING; NUL inside is refused */
    int64_t integer;    /* MTP__TOML_INTEGER */
    double number;      /* MTP__TOML_FLOAT, and the value of an integer as a double */
    bool boolean;       /* MTP__TOML_BOOL */
} mtp__toml_node;

typedef struct mtp__toml {
    const char *origin;    /* the path, or "--set a.b=3" */
    bool is_override;      /* of --set: there are no lines to name */
    mtp__toml_node *nodes; /* nodes[0] is the root table */
    int32_t num_nodes;
} mtp__toml;

/* A file; missing, unreadable or a directory is MTP_E_CONFIG too, since a configuration is asked for by name. */
mtp_status mtp__toml_read(const char *path, mtp__toml **toml);
mtp_status mtp__toml_parse(const char *text, size_t size, const char *origin, mtp__toml **toml);
/* One "a.b=value" of the command line: a tree with the tables a and one leaf. The value is TOML; one that is not, and
 * does not begin like a string, array or table, is taken as a string (`--set data.train=runs/a`). */
mtp_status mtp__toml_override(const char *text, mtp__toml **toml);
/* The parser: toml.cpp with toml++, toml_plain.c without. */
mtp_status mtp__toml_parse_as(const char *text, size_t size, const char *origin, bool is_override, mtp__toml **toml);
/* Accepts NULL. */
void mtp__toml_free(mtp__toml *toml);

/* The member `key` of the table `parent`; NULL when there is none. */
const mtp__toml_node *mtp__toml_find(const mtp__toml *toml, const mtp__toml_node *parent, const char *key);
/* First child and next sibling; NULL at the end. */
const mtp__toml_node *mtp__toml_first(const mtp__toml *toml, const mtp__toml_node *parent);
const mtp__toml_node *mtp__toml_next(const mtp__toml *toml, const mtp__toml_node *node);
/* "a.b[2].c" of a node into `text`, cut when it does not fit; returns `text`. */
const char *mtp__toml_path(const mtp__toml *toml, const mtp__toml_node *node, char *text, size_t capacity);
/* "a table", "an integer", ... for messages. */
const char *mtp__toml_kind_name(mtp__toml_kind kind);
/* Raise MTP_E_CONFIG about a node: "run.toml:12: <message>", or "--set a.b=3: <message>". */
mtp_status mtp__toml_fail(const mtp__toml *toml, const mtp__toml_node *node, const char *format, ...) MTP__PRINTF(3, 4);

#ifdef __cplusplus
}
#endif
#endif
