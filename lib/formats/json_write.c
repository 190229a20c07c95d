#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "formats/json.h"

/* ---- strings -------------------------------------------------------------------------------------------------- */

/* The code point at `byte` (jansson holds valid UTF-8 only); `length` is how many bytes it takes. */
static uint32_t decode(const unsigned char *byte, int *length)
{
    if (byte[0] < 0x80) return *length = 1, byte[0];
    if (byte[0] < 0xe0) return *length = 2, (byte[0] & 0x1fu) << 6 | (byte[1] & 0x3fu);
    if (byte[0] < 0xf0) return *length = 3, (byte[0] & 0x0fu) << 12 | (byte[1] & 0x3fu) << 6 | (byte[2] & 0x3fu);
    *length = 4;
    return (byte[0] & 0x07u) << 18 | (byte[1] & 0x3fu) << 12 | (byte[2] & 0x3fu) << 6 | (byte[3] & 0x3fu);
}

/* The letter of a two-character escape, 0 when there is none. */
static char short_escape(uint32_t code)
{
    switch (code) {
    case '"':
        return '"';
    case '\\':
        return '\\';
    case '\b':
        return 'b';
    case '\f':
        return 'f';
    case '\n':
        return 'n';
    case '\r':
        return 'r';
    case '\t':
        return 't';
    default:
        return 0;
    }
}

static void put_string(FILE *out, const char *text, size_t size)
{
    const unsigned char *byte = (const unsigned char *)text, *end = byte + size;
    fputc('"', out);
    for (int length; byte < end; byte += length) {
        const uint32_t code = decode(byte, &length);
        const char letter = short_escape(code);
        if (letter)
            fprintf(out, "\\%c", letter);
        else if (code >= ' ' && code < 127)
            fputc((int)code, out);
        else if (code < 0x10000)
            fprintf(out, "\\u%04x", (unsigned)code);
        else
            fprintf(out, "\\u%04x\\u%04x", (unsigned)(0xd800 + ((code - 0x10000) >> 10)),
                    (unsigned)(0xdc00 + ((code - 0x10000) & 0x3ff)));
    }
    fputc('"', out);
}

/* ---- numbers -------------------------------------------------------------------------------------------------- */

/* The fewest decimal digits that give `value` back, and its decimal exponent: value = 0.d1d2d3... * 10^point. */
static int shortest_digits(double value, char digits[24], int *point)
{
    char text[40];
    for (int precision = 0; precision < 17; precision++) {
        snprintf(text, sizeof text, "%.*e", precision, fabs(value));
        if (strtod(text, NULL) == fabs(value)) break;
    }
    int count = 0;
    const char *c = text;
    for (; *c && *c != 'e'; c++)
        if (*c >= '0' && *c <= '9') digits[count++] = *c; /* whatever the locale puts for the point is left out */
    *point = atoi(c + 1) + 1;
    while (count > 1 && digits[count - 1] == '0') count--;
    return count;
}

/* repr() of Python: fixed notation for exponents -5 < e < 16, always a point or an exponent. */
static void put_real(FILE *out, double value)
{
    char digits[24];
    int point;
    const int count = shortest_digits(value, digits, &point);
    if (signbit(value)) fputc('-', out);
    if (value == 0) {
        fputs("0.0", out);
    } else if (point < -3 || point > 16) {
        fprintf(out, "%c%s%.*se%+03d", digits[0], count > 1 ? "." : "", count - 1, digits + 1, point - 1);
    } else if (point <= 0) {
        fprintf(out, "0.%.*s%.*s", -point, "0000", count, digits);
    } else if (count <= point) {
        fprintf(out, "%.*s%.*s.0", count, digits, point - count, "0000000000000000");
    } else {
        fprintf(out, "%.*s.%.*s", point, digits, count - point, digits + point);
    }
}

/* ---- containers ----------------------------------------------------------------------------------------------- */

typedef struct printer {
    FILE *out;
    unsigned flags;
    bool failed; /* out of memory */
} printer;

static void put_value(printer *to, const json_t *value, int depth);

/* What stands before an item and before the closing bracket. */
static void put_break(printer *to, bool comma, int depth)
{
    if (comma) fputc(',', to->out);
    if (!(to->flags & MTP__JSON_ONE_LINE))
        fprintf(to->out, "\n%*s", 2 * depth, "");
    else if (comma)
        fputc(' ', to->out);
}

static void put_array(printer *to, const json_t *array, int depth)
{
    const size_t count = json_array_size(array);
    fputc('[', to->out);
    for (size_t i = 0; i < count; i++) {
        put_break(to, i > 0, depth + 1);
        put_value(to, json_array_get(array, i), depth + 1);
    }
    if (count > 0) put_break(to, false, depth);
    fputc(']', to->out);
}

static int compare_keys(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static void put_object(printer *to, const json_t *object, int depth)
{
    json_t *members = (json_t *)(uintptr_t)object; /* jansson iterates over a non-const object, but changes nothing */
    const size_t count = json_object_size(object);
    const char **keys = calloc(count ? count : 1, sizeof *keys);
    const char *key;
    json_t *value;
    size_t used = 0;
    to->failed |= !keys;
    if (!keys) return;
    json_object_foreach(members, key, value) keys[used++] = key;
    if (to->flags & MTP__JSON_SORT_KEYS) qsort(keys, count, sizeof *keys, compare_keys);
    fputc('{', to->out);
    for (size_t i = 0; i < count; i++) {
        put_break(to, i > 0, depth + 1);
        put_string(to->out, keys[i], strlen(keys[i]));
        fputs(": ", to->out);
        put_value(to, json_object_get(object, keys[i]), depth + 1);
    }
    if (count > 0) put_break(to, false, depth);
    fputc('}', to->out);
    free(keys);
}

static void put_value(printer *to, const json_t *value, int depth)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        put_object(to, value, depth);
        break;
    case JSON_ARRAY:
        put_array(to, value, depth);
        break;
    case JSON_STRING:
        put_string(to->out, json_string_value(value), json_string_length(value));
        break;
    case JSON_INTEGER:
        fprintf(to->out, "%lld", (long long)json_integer_value(value));
        break;
    case JSON_REAL:
        put_real(to->out, json_real_value(value));
        break;
    case JSON_TRUE:
        fputs("true", to->out);
        break;
    case JSON_FALSE:
        fputs("false", to->out);
        break;
    case JSON_NULL:
        fputs("null", to->out);
        break;
    }
}

mtp_status mtp__json_dump(const json_t *root, unsigned flags, char **text)
{
    size_t size;
    *text = NULL;
    MTP_REQUIRE(root != NULL);
    printer to = {.out = open_memstream(text, &size), .flags = flags};
    if (!to.out) return MTP_FAIL(MTP_E_MEMORY, "out of memory while writing JSON");
    put_value(&to, root, 0);
    if (flags & MTP__JSON_NEWLINE) fputc('\n', to.out);
    to.failed |= ferror(to.out) != 0;
    to.failed |= fclose(to.out) != 0;
    if (!to.failed) return MTP_OK;
    free(*text);
    *text = NULL;
    return MTP_FAIL(MTP_E_MEMORY, "out of memory while writing JSON");
}

mtp_status mtp__json_write(const char *path, const json_t *root, unsigned flags)
{
    char *text;
    MTP_TRY_AT(mtp__json_dump(root, flags, &text), "%s", path);
    const mtp_status status = mtp__file_write(path, text, strlen(text));
    free(text);
    return status;
}
