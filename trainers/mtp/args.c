#include "args.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mtp/suggest.h"
#include "program.h"

enum { MAX_OPTIONS = 64, NAME_COLUMN = 34, LINE_WIDTH = 100 };

/* ---- help ----------------------------------------------------------------------------------------------------- */

/* `text` in words, broken before LINE_WIDTH; the cursor stands in column `column`, further lines start at `indent`. */
static void print_wrapped(const char *text, int column, int indent)
{
    while (*text) {
        const int length = (int)strcspn(text, " \n");
        if (column > indent && column + 1 + length > LINE_WIDTH) {
            printf("\n%*s", indent, "");
            column = indent;
        } else if (column > indent) {
            putchar(' ');
            column++;
        }
        printf("%.*s", length, text);
        column += length;
        text += length;
        text += strspn(text, " \n");
    }
    putchar('\n');
}

static void print_entry(const char *left, const char *help)
{
    int column = printf("  %s", left);
    if (column >= NAME_COLUMN - 1) {
        putchar('\n');
        column = 0;
    }
    printf("%*s", NAME_COLUMN - column, "");
    print_wrapped(help, NAME_COLUMN, NAME_COLUMN);
}

static void print_option(const args_option *option)
{
    char left[160];
    const char *more = option->kind == ARGS_LISTS ? " ..." : "";
    if (option->kind == ARGS_FLAG)
        snprintf(left, sizeof left, "--%s", option->name);
    else
        snprintf(left, sizeof left, "--%s %s%s", option->name, option->value, more);
    char help[2048];
    size_t length = (size_t)snprintf(help, sizeof help, "%s", option->help);
    for (int i = 0; option->kind == ARGS_CHOICE && option->choices[i] && length < sizeof help; i++)
        length +=
            (size_t)snprintf(help + length, sizeof help - length, "%s%s", i ? ", " : " One of: ", option->choices[i]);
    if (option->required && length < sizeof help) snprintf(help + length, sizeof help - length, " (required)");
    print_entry(left, help);
}

static void print_help(const args_spec *spec)
{
    printf("usage: %s", spec->command);
    for (int64_t i = 0; i < spec->num_options; i++) {
        const args_option *option = &spec->options[i];
        if (option->required)
            printf(" --%s %s%s", option->name, option->value, option->kind == ARGS_LISTS ? "..." : "");
    }
    for (int64_t i = 0; i < spec->num_positionals; i++) {
        const args_positional *p = &spec->positionals[i];
        printf(p->optional ? " [%s%s]" : " %s%s", p->name, p->many ? "..." : "");
    }
    fputs(" [OPTIONS]\n\n", stdout);
    print_wrapped(spec->summary, 0, 0);
    if (spec->num_positionals) fputs("\narguments:\n", stdout);
    for (int64_t i = 0; i < spec->num_positionals; i++)
        print_entry(spec->positionals[i].name, spec->positionals[i].help);
    fputs("\noptions:\n", stdout);
    for (int64_t i = 0; i < spec->num_options; i++) print_option(&spec->options[i]);
    print_entry("--help", "Print this text.");
    if (spec->epilogue) printf("\n%s\n", spec->epilogue);
}

/* ---- parsing -------------------------------------------------------------------------------------------------- */

typedef struct parser {
    const args_spec *spec;
    int argc;
    char **argv;
    int next;            /* index in argv */
    int64_t positionals; /* taken so far */
    bool given[MAX_OPTIONS];
} parser;

bool args_list_add(args_list *list, const char *item)
{
    const char **items = realloc(list->items, ((size_t)list->count + 1) * sizeof *items);
    if (!items) {
        program_usage("out of memory for the command line");
        return false;
    }
    list->items = items;
    items[list->count++] = item;
    return true;
}

void args_list_free(args_list *list)
{
    free(list->items);
    *list = (args_list){0};
}

static bool set_int(const args_option *option, const char *text)
{
    char *end = NULL;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno || (double)value < option->min || (double)value > option->max) {
        program_usage("--%s %s: must be a whole number from %lld to %lld", option->name, text, (long long)option->min,
                      (long long)option->max);
        return false;
    }
    *(int64_t *)option->target = value;
    return true;
}

static bool set_real(const args_option *option, const char *text)
{
    char *end = NULL;
    const double value = strtod(text, &end);
    if (end == text || *end || !isfinite(value) || value < option->min || value > option->max) {
        program_usage("--%s %s: must be a number from %.15g to %.15g", option->name, text, option->min, option->max);
        return false;
    }
    *(double *)option->target = value;
    return true;
}

static bool set_choice(const args_option *option, const char *text)
{
    char known[512] = "";
    size_t length = 0;
    for (int i = 0; option->choices[i]; i++) {
        if (strcmp(option->choices[i], text) == 0) {
            *(const char **)option->target = text;
            return true;
        }
        if (length < sizeof known)
            length +=
                (size_t)snprintf(known + length, sizeof known - length, "%s%s", i ? ", " : "", option->choices[i]);
    }
    program_usage("--%s %s: must be one of %s", option->name, text, known);
    return false;
}

static bool set_value(const args_option *option, const char *text)
{
    if (!*text) {
        program_usage("--%s: the value is empty; --%s %s is expected", option->name, option->name, option->value);
        return false;
    }
    switch (option->kind) {
    case ARGS_INT:
        return set_int(option, text);
    case ARGS_REAL:
        return set_real(option, text);
    case ARGS_CHOICE:
        return set_choice(option, text);
    case ARGS_LIST:
    case ARGS_LISTS:
        return args_list_add(option->target, text);
    case ARGS_STRING:
        *(const char **)option->target = text;
        return true;
    case ARGS_FLAG:
        break;
    }
    return false;
}

static const args_option *find_option(const args_spec *spec, const char *name, size_t length)
{
    for (int64_t i = 0; i < spec->num_options; i++) {
        const char *known = spec->options[i].name;
        if (strlen(known) == length && strncmp(known, name, length) == 0) return &spec->options[i];
    }
    return NULL;
}

static bool unknown_option(const args_spec *spec, const char *name, size_t length)
{
    const char *known[MAX_OPTIONS + 1];
    char word[64];
    size_t count = 0;
    if (length == strlen("help") && strncmp(name, "help", length) == 0) {
        program_usage("--help takes no value");
        return false;
    }
    for (int64_t i = 0; i < spec->num_options; i++) known[count++] = spec->options[i].name;
    known[count++] = "help";
    snprintf(word, sizeof word, "%.*s", (int)(length < sizeof word ? length : sizeof word - 1), name);
    const char *nearest = mtp_suggest(word, known, count);
    if (nearest)
        program_usage("unknown option '--%.*s' (did you mean '--%s'?)", (int)length, name, nearest);
    else
        program_usage("unknown option '--%.*s'; %s --help lists them all", (int)length, name, spec->command);
    return false;
}

/* argv[next] starts with "--" and a letter. */
static bool take_option(parser *p)
{
    const char *name = p->argv[p->next++] + 2;
    const size_t length = strcspn(name, "=");
    const char *value = name[length] ? name + length + 1 : NULL;
    const args_option *option = find_option(p->spec, name, length);
    if (!option) return unknown_option(p->spec, name, length);
    bool *given = &p->given[option - p->spec->options];
    const bool list = option->kind == ARGS_LIST || option->kind == ARGS_LISTS;
    if (*given && !list) {
        program_usage("--%s is given twice", option->name);
        return false;
    }
    *given = true;
    if (option->kind == ARGS_FLAG) {
        if (value) {
            program_usage("--%s takes no value", option->name);
            return false;
        }
        *(bool *)option->target = true;
        return true;
    }
    if (!value && p->next < p->argc && strncmp(p->argv[p->next], "--", 2) != 0) value = p->argv[p->next++];
    if (!value) {
        program_usage("--%s needs a value: --%s %s", option->name, option->name, option->value);
        return false;
    }
    if (!set_value(option, value)) return false;
    while (option->kind == ARGS_LISTS && p->next < p->argc && strncmp(p->argv[p->next], "--", 2) != 0)
        if (!set_value(option, p->argv[p->next++])) return false;
    return true;
}

static bool take_positional(parser *p, const char *text)
{
    const args_spec *spec = p->spec;
    const args_positional *last = spec->num_positionals ? &spec->positionals[spec->num_positionals - 1] : NULL;
    if (p->positionals >= spec->num_positionals && !(last && last->many)) {
        program_usage("unexpected argument '%s'; see %s --help", text, spec->command);
        return false;
    }
    const args_positional *positional =
        p->positionals < spec->num_positionals ? &spec->positionals[p->positionals] : last;
    p->positionals++;
    if (!*text) {
        program_usage("%s is empty; see %s --help", positional->name, spec->command);
        return false;
    }
    if (positional->many) return args_list_add(positional->target, text);
    *(const char **)positional->target = text;
    return true;
}

static bool complete(const parser *p)
{
    const args_spec *spec = p->spec;
    for (int64_t i = p->positionals; i < spec->num_positionals; i++) {
        if (spec->positionals[i].optional) continue;
        program_usage("%s is missing; see %s --help", spec->positionals[i].name, spec->command);
        return false;
    }
    for (int64_t i = 0; i < spec->num_options; i++) {
        const args_option *option = &spec->options[i];
        if (!option->required || p->given[i]) continue;
        program_usage("--%s %s is missing; see %s --help", option->name, option->value, spec->command);
        return false;
    }
    return true;
}

static bool wants_help(int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return true;
    return false;
}

bool args_parse(const args_spec *spec, int argc, char **argv, int *exit_code)
{
    parser p = {.spec = spec, .argc = argc, .argv = argv, .next = 1};
    *exit_code = 0;
    if (wants_help(argc, argv)) {
        print_help(spec);
        return false;
    }
    *exit_code = 2;
    if (spec->num_options > MAX_OPTIONS) {
        program_usage("%s: the option table has more than %d rows", spec->command, (int)MAX_OPTIONS);
        return false;
    }
    bool options = true;
    while (p.next < argc) {
        const char *text = argv[p.next];
        bool ok;
        if (options && strcmp(text, "--") == 0) {
            options = false;
            p.next++;
            continue;
        }
        if (options && strncmp(text, "--", 2) == 0)
            ok = take_option(&p);
        else if (options && text[0] == '-' && text[1])
            ok = (program_usage("unknown option '%s'; options have two dashes, see %s --help", text, spec->command),
                  false);
        else
            ok = (p.next++, take_positional(&p, text));
        if (!ok) return false;
    }
    if (!complete(&p)) return false;
    *exit_code = 0;
    return true;
}
