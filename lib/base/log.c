#include "mtp/log.h"

#include <stdarg.h>
#include <stdio.h>

void mtp_log(const mtp_logger *logger, mtp_log_level level, const char *format, ...)
{
    if (!logger || !logger->write || level < logger->min_level) return;
    char line[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    logger->write(logger->user, level, line);
}
