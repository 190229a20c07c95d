/* A text that grows: lists of problems, reports. Internal. */
#ifndef MTP_BASE_TEXT_H
#define MTP_BASE_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Zero-initialise. `data` is NUL-terminated, or NULL while nothing was added. */
typedef struct mtp__text {
    char *data;
    size_t length, capacity;
    bool failed; /* out of memory: sticky, so callers check once, with mtp__text_check */
} mtp__text;

/* printf to the end. */
void mtp__text_add(mtp__text *text, const char *format, ...) MTP__PRINTF(2, 3);
/* MTP_E_MEMORY when an addition failed. */
mtp_status mtp__text_check(const mtp__text *text);
/* The text so far; "" when empty. */
const char *mtp__text_get(const mtp__text *text);
/* Accepts a zeroed struct and zeroes it. */
void mtp__text_free(mtp__text *text);
/* What stands behind a noun that is counted, in messages: "" or "s". */
static inline const char *mtp__plural(int64_t count)
{
    return count == 1 ? "" : "s";
}

#ifdef __cplusplus
}
#endif
#endif
