/* What all subcommands share: how they report. Results go to stdout, everything else to stderr. */
#ifndef MTP_TRAINERS_PROGRAM_H
#define MTP_TRAINERS_PROGRAM_H

#include <stdbool.h>
#include <stdint.h>

#include "mtp/log.h"
#include "mtp/status.h"

#if defined(__GNUC__)
#define PROGRAM_PRINTF(text, args) __attribute__((format(printf, text, args)))
#else
#define PROGRAM_PRINTF(text, args)
#endif

/* Print the library's last error as "mtp: error: ..." and return the exit code of `status`; MTP_OK gives 0, silently.
 */
int program_finish(mtp_status status);
/* Print "mtp: error: ..." and return 2: a wrong command line. */
int program_usage(const char *format, ...) PROGRAM_PRINTF(1, 2);
/* Writes the library's lines to stderr: "mtp: ..." and "mtp: warning: ...". Lives as long as the program. */
const mtp_logger *program_logger(void);
/* Flush stdout; results that could not be written (a full disk, a closed pipe) turn exit code 0 into 1, with a message.
 */
int program_flush(int exit_code);
/* From here on the first SIGINT, SIGTERM or SIGHUP asks for an orderly end, the second ends the program at once with
 * 130. */
void program_catch_signals(void);
bool program_stop_requested(void);
/* What stands behind a noun that is counted: "" or "s". */
static inline const char *program_plural(int64_t count)
{
    return count == 1 ? "" : "s";
}

#endif
