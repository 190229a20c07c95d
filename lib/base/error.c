#include "base/error.h"

#include <stdio.h>
#include <string.h>

static _Thread_local mtp_error last_error;

static void mark_cut(char *message, size_t capacity)
{
    static const char mark[] = " [...]";
    memcpy(message + capacity - sizeof mark, mark, sizeof mark);
}

mtp_status mtp__fail(mtp_status status, int foreign, const char *file, int line, const char *format, ...)
{
    va_list args;
    char message[sizeof last_error.message]; /* an argument may point into the record itself */
    va_start(args, format);
    const int length = vsnprintf(message, sizeof message, format, args);
    va_end(args);
    if (length < 0) message[0] = '\0';
    if (length >= (int)sizeof message) mark_cut(message, sizeof message);
    last_error.status = status;
    last_error.foreign = foreign;
    last_error.file = file;
    last_error.line = line;
    memcpy(last_error.message, message, sizeof message);
    return status;
}

mtp_status mtp__fail_prefix(mtp_status status, const char *format, ...)
{
    va_list args;
    char message[sizeof last_error.message];
    va_start(args, format);
    int length = vsnprintf(message, sizeof message, format, args);
    va_end(args);
    if (length >= 0 && (size_t)length < sizeof message) {
        const int rest = snprintf(message + length, sizeof message - (size_t)length, ": %s", last_error.message);
        length = rest < 0 ? -1 : length + rest;
    }
    if (length >= (int)sizeof message) mark_cut(message, sizeof message);
    if (length >= 0) memcpy(last_error.message, message, sizeof message);
    return status;
}

mtp_status mtp__fail_again(const mtp_error *error)
{
    return mtp__fail(error->status, error->foreign, error->file, error->line, "%s", error->message);
}

const mtp_error *mtp_last_error(void)
{
    return &last_error;
}

static const struct {
    const char *name;
    const char *text;
    int exit_code;
} statuses[] = {
#define ROW(symbol, code, meaning) {#symbol, meaning, code},
    MTP_STATUS_LIST(ROW)
#undef ROW
};

static size_t row_of(mtp_status status)
{
    const size_t row = (size_t)status;
    return row < sizeof statuses / sizeof *statuses ? row : (size_t)MTP_E_INTERNAL;
}

const char *mtp_status_name(mtp_status status)
{
    return statuses[row_of(status)].name;
}

const char *mtp_status_text(mtp_status status)
{
    return statuses[row_of(status)].text;
}

int mtp_status_exit_code(mtp_status status)
{
    return statuses[row_of(status)].exit_code;
}
