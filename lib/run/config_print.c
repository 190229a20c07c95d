/* A configuration as TOML text: the one of a run, and the commented reference. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "run/config.h"

enum { WIDTH = 110 };

static void add_string(mtp__text *text, const char *string)
{
    mtp__text_add(text, "\"");
    for (const unsigned char *c = (const unsigned char *)string; *c; c++) {
        if (*c == '"' || *c == '\\')
            mtp__text_add(text, "\\%c", *c);
        else if (*c < 0x20 || *c == 0x7f)
            mtp__text_add(text, "\\u%04X", *c);
        else
            mtp__text_add(text, "%c", *c);
    }
    mtp__text_add(text, "\"");
}

/* The shortest decimal that reads back to the same double, recognisable as a float. */
static void add_real(mtp__text *text, double value)
{
    char digits[40];
    for (int precision = 1; precision <= 17; precision++) {
        snprintf(digits, sizeof digits, "%.*g", precision, value);
        if (strtod(digits, NULL) == value) break;
    }
    mtp__text_add(text, "%s%s", digits, strpbrk(digits, ".e") ? "" : ".0");
}

void mtp__config_value(mtp__text *text, const mtp_train_config *config, const mtp__field *field)
{
    const void *value = (const char *)config + field->offset;
    switch (field->kind) {
    case MTP__FIELD_STRING:
        add_string(text, *(char *const *)value);
        break;
    case MTP__FIELD_STRINGS: {
        const mtp_strings *strings = value;
        mtp__text_add(text, "[");
        for (int64_t i = 0; i < strings->count; i++) {
            if (i) mtp__text_add(text, ", ");
            add_string(text, strings->items[i]);
        }
        mtp__text_add(text, "]");
        break;
    }
    case MTP__FIELD_SOURCES: {
        const mtp_sources *sources = value;
        mtp__text_add(text, "[");
        for (int64_t i = 0; i < sources->count; i++) {
            mtp__text_add(text, "%s{ path = ", i ? ", " : "");
            add_string(text, sources->items[i].path);
            mtp__text_add(text, ", weight = ");
            add_real(text, sources->items[i].weight);
            mtp__text_add(text, " }");
        }
        mtp__text_add(text, "]");
        break;
    }
    case MTP__FIELD_INT:
        mtp__text_add(text, "%lld", (long long)*(const int64_t *)value);
        break;
    case MTP__FIELD_REAL:
        add_real(text, *(const double *)value);
        break;
    case MTP__FIELD_BOOL:
        mtp__text_add(text, *(const bool *)value ? "true" : "false");
        break;
    case MTP__FIELD_CHOICE:
        add_string(text, field->choices[*(const int32_t *)value]);
        break;
    }
}

/* `help` in comment lines. */
static void add_comment(mtp__text *text, const char *help)
{
    size_t column = 0;
    while (*help) {
        const size_t length = strcspn(help, " ");
        if (column == 0 || column + 1 + length > WIDTH) {
            mtp__text_add(text, "%s#", column ? "\n" : "");
            column = 1;
        }
        mtp__text_add(text, " %.*s", (int)length, help);
        column += 1 + length;
        help += length;
        help += strspn(help, " ");
    }
    mtp__text_add(text, "\n");
}

static void add_range(mtp__text *text, const char *what, const mtp__field *field)
{
    mtp__text_add(text, "# %s from %.15g", what, field->min);
    if (field->max < 9e15) mtp__text_add(text, " to %.15g", field->max);
}

static void add_type(mtp__text *text, const mtp__field *field)
{
    switch (field->kind) {
    case MTP__FIELD_STRING:
        mtp__text_add(text, "# string");
        break;
    case MTP__FIELD_STRINGS:
        mtp__text_add(text, "# list of strings");
        break;
    case MTP__FIELD_SOURCES:
        add_range(text, "list of tables { path, weight }; weight", field);
        break;
    case MTP__FIELD_INT:
        add_range(text, "integer", field);
        break;
    case MTP__FIELD_REAL:
        add_range(text, "number", field);
        break;
    case MTP__FIELD_BOOL:
        mtp__text_add(text, "# true or false");
        break;
    case MTP__FIELD_CHOICE:
        mtp__text_add(text, "# one of");
        for (int i = 0; field->choices[i]; i++) mtp__text_add(text, "%s \"%s\"", i ? "," : "", field->choices[i]);
        break;
    }
    mtp__text_add(text, field->example ? "; no default\n" : "\n");
}

void mtp__config_write(mtp__text *text, const mtp_train_config *values, bool comments)
{
    size_t count;
    const mtp__field *fields = mtp__config_fields(&count);
    for (size_t i = 0; i < count; i++) {
        const mtp__field *field = &fields[i];
        if (i == 0 || strcmp(field->section, fields[i - 1].section) != 0) {
            if (i) mtp__text_add(text, "\n");
            if (comments) add_comment(text, mtp__config_section_help(field->section));
            mtp__text_add(text, "[%s]\n", field->section);
        }
        if (comments) {
            mtp__text_add(text, "\n");
            add_comment(text, field->help);
            add_type(text, field);
        }
        mtp__text_add(text, "%s = ", field->key);
        if (values)
            mtp__config_value(text, values, field);
        else
            mtp__text_add(text, "%s", comments && field->example ? field->example : field->value);
        mtp__text_add(text, "\n");
    }
}

static mtp_status finish(mtp__text *text, char **result)
{
    const mtp_status status = mtp__text_check(text);
    if (status != MTP_OK) {
        mtp__text_free(text);
        return status;
    }
    *result = text->data;
    return MTP_OK;
}

mtp_status mtp_train_config_print(const mtp_train_config *config, char **toml)
{
    mtp__text text = {0};
    MTP_REQUIRE(config && toml);
    mtp__config_write(&text, config, false);
    return finish(&text, toml);
}

mtp_status mtp_train_config_reference(char **toml)
{
    mtp__text text = {0};
    MTP_REQUIRE(toml);
    mtp__text_add(
        &text, "# Every key of `mtp train CONFIG`, with its default. A configuration needs only the keys that have no "
               "default and\n"
               "# max_steps or num_train_epochs; `--set key=value` on the command line overrides the file. Paths are "
               "relative to\n"
               "# the directory that mtp runs in. `mtp train --print-reference` prints this text.\n\n");
    mtp__config_write(&text, NULL, true);
    return finish(&text, toml);
}
