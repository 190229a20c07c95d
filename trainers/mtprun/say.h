/* How mtprun speaks: "mtprun: ..." on stderr. */
#ifndef MTPRUN_SAY_H
#define MTPRUN_SAY_H

#include <stdint.h>

#include "mtp/log.h"

#if defined(__GNUC__)
#define SAY_PRINTF(text, args) __attribute__((format(printf, text, args)))
#else
#define SAY_PRINTF(text, args)
#endif

void say(const char *format, ...) SAY_PRINTF(1, 2);
/* "mtprun: error: ..."; returns 2, the exit code of a wrong command line. */
int say_usage(const char *format, ...) SAY_PRINTF(1, 2);
/* The library's last error; returns the exit code of its status. */
int say_failure(void);
const mtp_logger *say_logger(void);
/* What stands behind a noun that is counted: "" or "s". */
static inline const char *plural(int64_t count)
{
    return count == 1 ? "" : "s";
}

#endif
