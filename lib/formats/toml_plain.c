/* The parser of a build without toml++: the part of TOML that configurations use. Tables and lists of tables, dotted
 * and quoted keys, strings of one line, decimal numbers, true and false, lists and inline tables, comments. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/toml.h"

typedef struct tree {
    mtp__toml base;
    int32_t room;  /* for nodes */
    uint8_t *how;  /* [room]: what made a table, see below */
    int32_t *last; /* [room]: last child */
    char **strings;
    size_t num_strings;
} tree;

/* A header may open a table once, and not one that a value made. */
enum { BY_HEADER = 1, BY_KEY = 2, BY_VALUE = 4 };

typedef struct parser {
    tree *to;
    const char *at, *end, *line_start;
    int32_t line;
} parser;

/* ---- messages ------------------------------------------------------------------------------------------------- */

static mtp_status fault(const parser *p, const char *what)
{
    const mtp__toml *toml = &p->to->base;
    if (toml->is_override) return MTP_FAIL(MTP_E_CONFIG, "%s: not valid TOML: %s", toml->origin, what);
    return MTP_FAIL(MTP_E_CONFIG, "%s:%d:%d: not valid TOML: %s", toml->origin, (int)p->line,
                    (int)(p->at - p->line_start) + 1, what);
}

/* About valid TOML that is not taken. */
static mtp_status refuse(const parser *p, const char *what)
{
    const mtp__toml *toml = &p->to->base;
    if (toml->is_override) return MTP_FAIL(MTP_E_CONFIG, "%s: %s", toml->origin, what);
    return MTP_FAIL(MTP_E_CONFIG, "%s:%d: %s", toml->origin, (int)p->line, what);
}

static mtp_status out_of_memory(const parser *p)
{
    return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", p->to->base.origin);
}

static mtp_status too_deep(const parser *p)
{
    return refuse(p, "nested deeper than 32 levels");
}

/* ---- nodes ---------------------------------------------------------------------------------------------------- */

static bool grow(tree *to)
{
    const int32_t room = to->room ? 2 * to->room : 64;
    mtp__toml_node *nodes = realloc(to->base.nodes, (size_t)room * sizeof *nodes);
    if (nodes) to->base.nodes = nodes;
    uint8_t *how = realloc(to->how, (size_t)room);
    if (how) to->how = how;
    int32_t *last = realloc(to->last, (size_t)room * sizeof *last);
    if (last) to->last = last;
    if (!nodes || !how || !last) return false;
    to->room = room;
    return true;
}

/* A child behind the others of `parent` (-1: the root). It belongs to the tree, and so does `key`. */
static mtp_status add(parser *p, int32_t parent, const char *key, mtp__toml_kind kind, int32_t *index)
{
    tree *to = p->to;
    if (to->base.num_nodes == to->room && !grow(to)) return out_of_memory(p);
    *index = to->base.num_nodes++;
    to->base.nodes[*index] = (mtp__toml_node){
        .kind = kind, .line = p->line, .parent = parent, .first_child = -1, .next_sibling = -1, .key = key};
    to->how[*index] = 0;
    to->last[*index] = -1;
    if (parent < 0) return MTP_OK;
    mtp__toml_node *above = &to->base.nodes[parent];
    if (to->last[parent] < 0)
        above->first_child = *index;
    else
        to->base.nodes[to->last[parent]].next_sibling = *index;
    to->last[parent] = *index;
    above->num_children++;
    return MTP_OK;
}

static mtp_status keep(parser *p, char *string)
{
    tree *to = p->to;
    if ((to->num_strings & (to->num_strings - 1)) == 0) {
        char **strings = realloc(to->strings, (to->num_strings ? 2 * to->num_strings : 1) * sizeof *strings);
        if (!strings) {
            free(string);
            return out_of_memory(p);
        }
        to->strings = strings;
    }
    to->strings[to->num_strings++] = string;
    return MTP_OK;
}

static int32_t find(const parser *p, int32_t parent, const char *key)
{
    const mtp__toml_node *node = mtp__toml_find(&p->to->base, &p->to->base.nodes[parent], key);
    return node ? (int32_t)(node - p->to->base.nodes) : -1;
}

/* ---- characters ----------------------------------------------------------------------------------------------- */

static int look(const parser *p)
{
    return p->at < p->end ? (unsigned char)*p->at : -1;
}

static bool take(parser *p, char c)
{
    if (look(p) != (unsigned char)c) return false;
    p->at++;
    return true;
}

static void blanks(parser *p)
{
    while (look(p) == ' ' || look(p) == '\t') p->at++;
}

/* The end of a line, which may be that of the text; a comment before it is skipped. False: there is something else. */
static bool end_of_line(parser *p)
{
    blanks(p);
    if (look(p) == '#')
        while (p->at < p->end && *p->at != '\n') p->at++;
    if (look(p) == '\r' && p->end - p->at > 1 && p->at[1] == '\n') p->at++;
    if (p->at == p->end) return true;
    if (!take(p, '\n')) return false;
    p->line++;
    p->line_start = p->at;
    return true;
}

/* Blanks, comments and ends of lines. */
static void space(parser *p)
{
    do blanks(p);
    while (p->at < p->end && *p->at && strchr("#\r\n", *p->at) && end_of_line(p));
}

/* ---- strings -------------------------------------------------------------------------------------------------- */

/* Bytes of the UTF-8 sequence at `at`, 0 when there is none. */
static size_t utf8_size(const char *at, const char *end)
{
    const unsigned char *c = (const unsigned char *)at;
    const size_t size = *c < 0x80 ? 1 : *c >= 0xf0 ? 4 : *c >= 0xe0 ? 3 : 2;
    if ((*c >= 0x80 && *c < 0xc2) || *c > 0xf4 || (size_t)(end - at) < size) return 0;
    for (size_t i = 1; i < size; i++)
        if ((c[i] & 0xc0) != 0x80) return 0;
    if ((*c == 0xe0 && c[1] < 0xa0) || (*c == 0xed && c[1] > 0x9f) || (*c == 0xf0 && c[1] < 0x90) ||
        (*c == 0xf4 && c[1] > 0x8f))
        return 0;
    return size;
}

static char *put_utf8(char *to, uint32_t code)
{
    if (code < 0x80) {
        *to++ = (char)code;
        return to;
    }
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const uint8_t lead[] = {0, 0xc0, 0xe0, 0xf0};
    *to++ = (char)(lead[more] | (code >> (6 * more)));
    for (int i = more - 1; i >= 0; i--) *to++ = (char)(0x80 | ((code >> (6 * i)) & 0x3f));
    return to;
}

static mtp_status escape(parser *p, char **to)
{
    static const char letters[] = "btnfr\"\\", meant[] = "\b\t\n\f\r\"\\";
    const int c = look(p);
    const char *known = c > 0 ? strchr(letters, c) : NULL;
    if (c != 'u' && c != 'U' && !known) return fault(p, "an unknown escape in a string");
    p->at++;
    if (known) {
        *(*to)++ = meant[known - letters];
        return MTP_OK;
    }
    uint32_t code = 0;
    for (int i = 0; i < (c == 'u' ? 4 : 8); i++, p->at++) {
        const int digit = look(p);
        if (digit < 0 || !isxdigit(digit)) return fault(p, "an escape in a string lacks digits");
        code = code << 4 | (uint32_t)(digit <= '9' ? digit - '0' : (digit | 32) - 'a' + 10);
    }
    if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return fault(p, "an escape that is no character");
    *to = put_utf8(*to, code);
    return MTP_OK;
}

/* The string whose opening quote is next. `what` names it in messages. */
static mtp_status string(parser *p, const char *what, const char **value)
{
    const char quote = *p->at, *close = memchr(p->at, '\n', (size_t)(p->end - p->at));
    if (p->end - p->at >= 3 && p->at[1] == quote && p->at[2] == quote)
        return refuse(p, "a string of several lines needs a build with toml++ (-DMTP_TOML=ON)");
    p->at++;
    char *text = malloc((size_t)((close ? close : p->end) - p->at) + 1), *to = text;
    if (!text) return out_of_memory(p);
    mtp_status status = MTP_OK;
    while (status == MTP_OK && p->at < p->end && *p->at != quote) {
        const size_t size = utf8_size(p->at, p->end);
        if (quote == '"' && take(p, '\\'))
            status = escape(p, &to);
        else if (size == 0)
            status = fault(p, "a string that is not UTF-8");
        else if (size == 1 && ((unsigned char)*p->at < 0x20 || *p->at == 0x7f) && *p->at != '\t')
            status = fault(p, "a string that does not end on its line, or with a control character");
        else
            for (size_t i = 0; i < size; i++) *to++ = *p->at++;
    }
    *to = '\0';
    if (status == MTP_OK && !take(p, quote)) status = fault(p, "a string without its closing quote");
    if (status == MTP_OK && strlen(text) != (size_t)(to - text)) {
        char message[64];
        snprintf(message, sizeof message, "a %s with a NUL character", what);
        status = refuse(p, message);
    }
    if (status != MTP_OK) {
        free(text);
        return status;
    }
    *value = text;
    return keep(p, text);
}

/* ---- keys ----------------------------------------------------------------------------------------------------- */

/* One part of a key. */
static mtp_status key_part(parser *p, const char **key)
{
    blanks(p);
    const char *begin = p->at;
    if (look(p) == '"' || look(p) == '\'') return string(p, "key", key);
    while (p->at < p->end && (isalnum((unsigned char)*p->at) || *p->at == '-' || *p->at == '_')) p->at++;
    if (look(p) >= 0x80) return refuse(p, "a letter beyond ASCII outside of quotes");
    if (p->at == begin) return fault(p, "a key is missing");
    char *text = strndup(begin, (size_t)(p->at - begin));
    if (!text) return out_of_memory(p);
    *key = text;
    return keep(p, text);
}

static int32_t depth(const parser *p, int32_t node)
{
    int32_t levels = 0;
    for (; node >= 0; node = p->to->base.nodes[node].parent) levels++;
    return levels;
}

/* The table `key` of `table`, made when there is none. In a list of tables it is the newest one. */
static mtp_status enter(parser *p, const char *key, uint8_t how, int32_t *table)
{
    const int32_t found = find(p, *table, key);
    if (found < 0) {
        if (depth(p, *table) > MTP__TOML_MAX_DEPTH) return too_deep(p);
        MTP_TRY(add(p, *table, key, MTP__TOML_TABLE, table));
        p->to->how[*table] = how;
        return MTP_OK;
    }
    const mtp__toml_node *node = &p->to->base.nodes[found];
    if (node->kind == MTP__TOML_ARRAY && how == 0 && p->to->how[found] == BY_HEADER) {
        *table = p->to->last[found];
        return MTP_OK;
    }
    if (node->kind != MTP__TOML_TABLE || (p->to->how[found] & BY_VALUE))
        return fault(p, "a key that has a value already");
    if (how == BY_KEY && p->to->how[found] == BY_HEADER) return fault(p, "a table that a header opened already");
    *table = found;
    return MTP_OK;
}

/* "a.b.c": enters all but the last part, and gives that. */
static mtp_status dotted(parser *p, uint8_t how, int32_t *table, const char **key)
{
    for (int parts = 1;; parts++) {
        if (parts > MTP__TOML_MAX_DEPTH) return too_deep(p);
        MTP_TRY(key_part(p, key));
        blanks(p);
        if (!take(p, '.')) return MTP_OK;
        MTP_TRY(enter(p, *key, how, table));
    }
}

/* ---- values --------------------------------------------------------------------------------------------------- */

static mtp_status value(parser *p, int32_t parent, const char *key, int levels);

static mtp_status list(parser *p, int32_t node, int levels)
{
    for (;;) {
        space(p);
        if (take(p, ']')) return MTP_OK;
        MTP_TRY(value(p, node, NULL, levels + 1));
        space(p);
        if (take(p, ']')) return MTP_OK;
        if (!take(p, ',')) return fault(p, "a list without , or ] behind its item");
    }
}

static mtp_status pair(parser *p, int32_t table, int levels)
{
    const char *key;
    MTP_TRY(dotted(p, BY_KEY, &table, &key));
    if (find(p, table, key) >= 0) return fault(p, "a key that has a value already");
    if (!take(p, '=')) return fault(p, "a key without =");
    blanks(p);
    return value(p, table, key, levels);
}

static mtp_status inline_table(parser *p, int32_t node, int levels)
{
    blanks(p);
    if (take(p, '}')) return MTP_OK;
    for (;;) {
        MTP_TRY(pair(p, node, levels + 1));
        blanks(p);
        if (take(p, '}')) return MTP_OK;
        if (!take(p, ',')) return fault(p, "an inline table without , or } behind its value");
    }
}

/* Digits with single _ between them. */
static const char *digits(const char *c)
{
    const char *begin = c;
    while (isdigit((unsigned char)*c) ||
           (*c == '_' && c > begin && isdigit((unsigned char)c[-1]) && isdigit((unsigned char)c[1])))
        c++;
    return c == begin ? NULL : c;
}

/* 1 an integer, 2 a float, 0 neither. */
static int number_kind(const char *word)
{
    const char *c = word + (*word == '+' || *word == '-');
    if (strcmp(c, "inf") == 0 || strcmp(c, "nan") == 0) return 2;
    if (c[0] == '0' && isdigit((unsigned char)c[1])) return 0;
    c = digits(c);
    if (!c) return 0;
    if (!*c) return 1;
    if (*c == '.') c = digits(c + 1);
    if (c && (*c == 'e' || *c == 'E')) c = digits(c + 1 + (c[1] == '+' || c[1] == '-'));
    return c && !*c ? 2 : 0;
}

static mtp_status number(parser *p, const char *word, mtp__toml_node *node)
{
    char plain[128], *to = plain;
    const int kind = number_kind(word);
    if (kind == 0) return fault(p, "a value that is no string, decimal number, list, table, true or false");
    for (; *word; word++)
        if (*word != '_') *to++ = *word;
    *to = '\0';
    node->kind = kind == 1 ? MTP__TOML_INTEGER : MTP__TOML_FLOAT;
    node->number = strtod(plain, NULL);
    if (kind == 2) return MTP_OK;
    errno = 0;
    node->integer = strtoll(plain, NULL, 10);
    node->number = (double)node->integer;
    return errno ? fault(p, "an integer beyond 64 bits") : MTP_OK;
}

static mtp_status word(parser *p, mtp__toml_node *node)
{
    char text[128];
    const char *begin = p->at;
    while (p->at < p->end && *p->at && (isalnum((unsigned char)*p->at) || strchr("+-._:", *p->at))) p->at++;
    const size_t size = (size_t)(p->at - begin);
    if (look(p) >= 0x80) return refuse(p, "a letter beyond ASCII outside of quotes");
    p->at = begin;
    if (size == 0 || size >= sizeof text) return fault(p, "a value is missing");
    memcpy(text, begin, size);
    text[size] = '\0';
    if (strspn(text, "0123456789") == 4 && text[4] == '-') return refuse(p, "dates and times are not used here");
    node->kind = MTP__TOML_BOOL;
    node->boolean = strcmp(text, "true") == 0;
    if (!node->boolean && strcmp(text, "false") != 0) MTP_TRY(number(p, text, node));
    p->at += size;
    return MTP_OK;
}

static mtp_status value(parser *p, int32_t parent, const char *key, int levels)
{
    int32_t index;
    if (levels > MTP__TOML_MAX_DEPTH) return too_deep(p);
    MTP_TRY(add(p, parent, key, MTP__TOML_STRING, &index));
    p->to->how[index] = BY_VALUE;
    mtp__toml_node *node = &p->to->base.nodes[index];
    if (look(p) == '"' || look(p) == '\'') {
        const char *text;
        MTP_TRY(string(p, "string", &text));
        node->string = text;
        return MTP_OK;
    }
    if (take(p, '[')) {
        node->kind = MTP__TOML_ARRAY;
        return list(p, index, levels);
    }
    if (take(p, '{')) {
        node->kind = MTP__TOML_TABLE;
        return inline_table(p, index, levels);
    }
    return word(p, node);
}

/* ---- the text ------------------------------------------------------------------------------------------------- */

/* [a.b] or [[a.b]], behind the first bracket. */
static mtp_status header(parser *p, int32_t *table)
{
    const char *key;
    const bool many = take(p, '[');
    *table = 0;
    MTP_TRY(dotted(p, 0, table, &key));
    if (!take(p, ']') || (many && !take(p, ']'))) return fault(p, "a header without its closing bracket");
    const int32_t found = find(p, *table, key);
    if (!many) {
        if (found >= 0 && p->to->how[found] != 0) return fault(p, "a table that is there already");
        MTP_TRY(enter(p, key, 0, table));
        p->to->how[*table] = BY_HEADER;
        return MTP_OK;
    }
    int32_t tables = found;
    if (found >= 0 && (p->to->base.nodes[found].kind != MTP__TOML_ARRAY || p->to->how[found] != BY_HEADER))
        return fault(p, "a key that is no list of tables");
    if (found < 0) MTP_TRY(add(p, *table, key, MTP__TOML_ARRAY, &tables));
    p->to->how[tables] = BY_HEADER;
    MTP_TRY(add(p, tables, NULL, MTP__TOML_TABLE, table));
    p->to->how[*table] = BY_HEADER;
    return MTP_OK;
}

static mtp_status document(parser *p)
{
    int32_t table;
    MTP_TRY(add(p, -1, NULL, MTP__TOML_TABLE, &table));
    p->to->how[table] = BY_HEADER;
    for (space(p); p->at < p->end; space(p)) {
        MTP_TRY(take(p, '[') ? header(p, &table) : pair(p, table, 1));
        if (!end_of_line(p)) return fault(p, "something behind the end of a value or header");
    }
    return MTP_OK;
}

mtp_status mtp__toml_parse_as(const char *text, size_t size, const char *origin, bool is_override, mtp__toml **toml)
{
    *toml = NULL;
    tree *to = calloc(1, sizeof *to);
    if (!to) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", origin);
    to->base.is_override = is_override;
    to->base.origin = strdup(origin);
    parser p = {.to = to, .at = text, .end = text + size, .line_start = text, .line = 1};
    mtp_status status = to->base.origin ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", origin);
    if (size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) p.at += 3; /* a byte order mark */
    if (status == MTP_OK && size > MTP__TOML_MAX_BYTES)
        status = MTP_FAIL(MTP_E_CONFIG, "%s: has %zu bytes; at most %d are read", origin, size, MTP__TOML_MAX_BYTES);
    if (status == MTP_OK) status = document(&p);
    if (status == MTP_OK)
        *toml = &to->base;
    else
        mtp__toml_free(&to->base);
    return status;
}

void mtp__toml_free(mtp__toml *toml)
{
    tree *to = (tree *)toml;
    if (!to) return;
    for (size_t i = 0; i < to->num_strings; i++) free(to->strings[i]);
    free(to->strings);
    free(to->how);
    free(to->last);
    free(to->base.nodes);
    free((char *)to->base.origin);
    free(to);
}
