#include "say.h"

#include <stdarg.h>
#include <stdio.h>

static void say_line(const char *kind, const char *format, va_list args)
{
    char line[10240];
    vsnprintf(line, sizeof line, format, args);
    fprintf(stderr, "mtprun: %s%s\n", kind, line);
}

void say(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say_line("", format, args);
    va_end(args);
}

int say_usage(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say_line("error: ", format, args);
    va_end(args);
    return 2;
}

int say_failure(void)
{
    fprintf(stderr, "mtprun: error: %s\n", mtp_last_error()->message);
    return mtp_status_exit_code(mtp_last_error()->status);
}

static void write_line(void *user, mtp_log_level level, const char *line)
{
    (void)user;
    fprintf(stderr, "mtprun: %s%s\n", level >= MTP_LOG_WARNING ? "warning: " : "", line);
}

const mtp_logger *say_logger(void)
{
    static const mtp_logger logger = {.write = write_line, .min_level = MTP_LOG_INFO};
    return &logger;
}
