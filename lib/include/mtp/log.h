/* Where messages go. The library prints nothing by itself: it hands lines to the logger of the caller. */
#ifndef MTP_LOG_H
#define MTP_LOG_H

#include "mtp/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Errors are no messages: they are the status of the call that fails (mtp/status.h). */
typedef enum mtp_log_level { MTP_LOG_INFO, MTP_LOG_WARNING } mtp_log_level;

/* `write` gets one complete line without a newline; it may be called from several threads at once. A NULL logger is
 * silent. The logger must outlive whatever was given it. */
typedef struct mtp_logger {
    void (*write)(void *user, mtp_log_level level, const char *line);
    void *user;
    mtp_log_level min_level;
} mtp_logger;

/* printf-style; lines below min_level are not formatted. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
MTP_API void
mtp_log(const mtp_logger *logger, mtp_log_level level, const char *format, ...);

#ifdef __cplusplus
}
#endif
#endif
