#include "program.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int program_finish(mtp_status status)
{
    if (status != MTP_OK) fprintf(stderr, "mtp: error: %s\n", mtp_last_error()->message);
    return mtp_status_exit_code(status);
}

int program_usage(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("mtp: error: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    return 2;
}

static void write_line(void *user, mtp_log_level level, const char *line)
{
    static const char *const prefixes[] = {"debug: ", "", "warning: ", "error: "};
    (void)user;
    fprintf(stderr, "mtp: %s%s\n", prefixes[level], line);
}

const mtp_logger *program_logger(void)
{
    static const mtp_logger logger = {.write = write_line, .min_level = MTP_LOG_INFO};
    return &logger;
}

int program_flush(int exit_code)
{
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) return exit_code;
    fprintf(stderr, "mtp: error: standard output could not be written: %s\n", errno ? strerror(errno) : "write error");
    return exit_code ? exit_code : 1;
}
