#include "program.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Names that come from files may hold anything: control characters but the newline are shown as '?', so that no file
 * steers the terminal. */
static void print_line(const char *prefix, const char *text)
{
    fputs(prefix, stderr);
    for (const unsigned char *at = (const unsigned char *)text; *at; at++)
        fputc((*at < ' ' && *at != '\n') || *at == 0x7f ? '?' : *at, stderr);
    fputc('\n', stderr);
}

int program_finish(mtp_status status)
{
    if (status != MTP_OK) print_line("mtp: error: ", mtp_last_error()->message);
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
    (void)user;
    print_line(level >= MTP_LOG_WARNING ? "mtp: warning: " : "mtp: ", line);
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

static volatile sig_atomic_t stop_requested;

static void on_signal(int number)
{
    (void)number;
    if (stop_requested) _exit(130);
    stop_requested = 1;
}

void program_catch_signals(void)
{
    struct sigaction action = {.sa_handler = on_signal};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, &action, NULL); /* a terminal that closes loses no work */
}

bool program_stop_requested(void)
{
    return stop_requested != 0;
}
