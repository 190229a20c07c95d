#include "options.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

mtp_status bench_options(int argc, char **argv, const bench_option *options, size_t count)
{
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        size_t o = 0;
        while (o < count && strcmp(name, options[o].name) != 0) o++;
        if (o == count) return MTP_FAIL(MTP_E_CONFIG, "option \"%s\" is unknown", name);
        if (options[o].flag) {
            *options[o].flag = true;
            continue;
        }
        if (++i == argc) return MTP_FAIL(MTP_E_CONFIG, "option \"%s\" lacks its value", name);
        if (options[o].text) {
            *options[o].text = argv[i];
            continue;
        }
        char *end = NULL;
        errno = 0;
        *options[o].number = strtoll(argv[i], &end, 10);
        if (errno || end == argv[i] || *end)
            return MTP_FAIL(MTP_E_CONFIG, "%s \"%s\": it must be a whole number", name, argv[i]);
    }
    return MTP_OK;
}
