/* How libmtp fails: one record, one macro to raise, one to forward. Internal. */
#ifndef MTP_BASE_ERROR_H
#define MTP_BASE_ERROR_H

#include <stdarg.h>

#include "mtp/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define MTP__PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define MTP__PRINTF(fmt, args)
#endif

/* Fill the thread's error record and return `status`. */
mtp_status mtp__fail(mtp_status status, int foreign, const char *file, int line, const char *format, ...)
    MTP__PRINTF(5, 6);
/* Put "text: " in front of the thread's error message and return `status` (that of the record). Used where a caller
 * knows what a callee could not: the sample, the file, the key. */
mtp_status mtp__fail_prefix(mtp_status status, const char *format, ...) MTP__PRINTF(2, 3);

/* Put a record back that later failures have overwritten, and return its status:
 *     const mtp_error first = *mtp_last_error(); clean_up_that_may_fail(); return mtp__fail_again(&first); */
mtp_status mtp__fail_again(const mtp_error *error);

/* return MTP_FAIL(MTP_E_DATA, "sample %s: ...", name); */
#define MTP_FAIL(status, ...) mtp__fail((status), 0, __FILE__, __LINE__, __VA_ARGS__)
/* The same with errno or a foreign code; the text of errno is the caller's to add (%s, strerror(errno)). */
#define MTP_FAIL_FOREIGN(status, foreign, ...) mtp__fail((status), (foreign), __FILE__, __LINE__, __VA_ARGS__)
/* Forward a failure unchanged. */
#define MTP_TRY(call)                                          \
    do {                                                       \
        const mtp_status mtp_try_status_ = (call);             \
        if (mtp_try_status_ != MTP_OK) return mtp_try_status_; \
    } while (0)
/* Forward a failure to a clean-up label; `status` is the function's own variable. */
#define MTP_TRY_GOTO(status, call, label)   \
    do {                                    \
        (status) = (call);                  \
        if ((status) != MTP_OK) goto label; \
    } while (0)
/* Forward with context: MTP_TRY_AT(read(...), "sample %s", path). */
#define MTP_TRY_AT(call, ...)                                                                 \
    do {                                                                                      \
        const mtp_status mtp_try_status_ = (call);                                            \
        if (mtp_try_status_ != MTP_OK) return mtp__fail_prefix(mtp_try_status_, __VA_ARGS__); \
    } while (0)
/* Refuse an argument: the condition that must hold is the message. */
#define MTP_REQUIRE(condition)                                                                      \
    do {                                                                                            \
        if (!(condition)) return MTP_FAIL(MTP_E_ARGUMENT, "%s: requires %s", __func__, #condition); \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
