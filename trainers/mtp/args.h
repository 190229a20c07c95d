/* The command line of every subcommand: a table of options, parsed and explained by one piece of code.
 *
 * `--name value` and `--name=value` are the same; options may stand anywhere; `--` ends them; `-h` is `--help`. */
#ifndef MTP_TRAINERS_ARGS_H
#define MTP_TRAINERS_ARGS_H

#include <stdbool.h>
#include <stdint.h>

typedef enum args_kind {
    ARGS_FLAG,   /* target: bool; no value; set to true */
    ARGS_STRING, /* target: const char * */
    ARGS_CHOICE, /* target: const char *; one of `choices` */
    ARGS_INT,    /* target: int64_t in [min, max] */
    ARGS_REAL,   /* target: double, finite, in [min, max] */
    ARGS_LIST,   /* target: args_list; one value each time it is given */
    ARGS_LISTS   /* target: args_list; one or more values each time: up to the next option */
} args_kind;

/* Values of an option or positional that may come more than once, in order. Points into argv. Zero-initialise; free
 * with args_list_free. */
typedef struct args_list {
    const char **items;
    int64_t count;
} args_list;

typedef struct args_option {
    const char *name; /* "num-speculative-steps" */
    args_kind kind;
    void *target;               /* holds the default before the call; kept when the option is not given */
    const char *value;          /* what the help calls the value: "DIR"; NULL for a flag */
    const char *help;           /* one or more sentences without the name; says the default */
    double min, max;            /* ARGS_INT, ARGS_REAL */
    const char *const *choices; /* ARGS_CHOICE, NULL-terminated */
    bool required;
} args_option;

typedef struct args_positional {
    const char *name; /* "CONFIG" */
    void *target;     /* const char *, or args_list when `many` */
    const char *help;
    bool optional;
    bool many; /* takes all the rest, one or more; last of the table */
} args_positional;

typedef struct args_spec {
    const char *command; /* "mtp train" */
    const char *summary; /* what it does: the first lines of the help */
    const args_positional *positionals;
    int64_t num_positionals;
    const args_option *options;
    int64_t num_options;
    const char *epilogue; /* text after the options, may be NULL: examples, exit codes */
} args_spec;

/* Parse argv[1..argc) (argv[0] is skipped). True: go on. False: end the program with *exit_code: 0 after --help
 * (printed to stdout), 2 after a mistake (said on stderr, with the nearest option where one was mistyped). */
bool args_parse(const args_spec *spec, int argc, char **argv, int *exit_code);
/* One more item behind the others. False when out of memory, which is said on stderr. */
bool args_list_add(args_list *list, const char *item);
void args_list_free(args_list *list);

#endif
