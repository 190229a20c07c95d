/* Options of a benchmark's command line. */
#ifndef MTP_BENCH_OPTIONS_H
#define MTP_BENCH_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mtp/status.h"

/* One of text, number and flag says where the value goes; a flag takes none. */
typedef struct bench_option {
    const char *name; /* "--rows" */
    const char **text;
    int64_t *number;
    bool *flag;
} bench_option;

/* MTP_E_CONFIG for an option that is unknown, or lacks its value, or has one that is no whole number. */
mtp_status bench_options(int argc, char **argv, const bench_option *options, size_t count);

#endif
