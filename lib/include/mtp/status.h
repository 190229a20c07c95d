/* Status codes and the error record.
 *
 * Every fallible function of libmtp returns an mtp_status. When it is not MTP_OK, a record behind it says what was
 * wrong, where (file, key, tensor, sample) and what to do; mtp_last_error() reads it. The record is thread-local:
 * each thread sees its own last failure. */
#ifndef MTP_STATUS_H
#define MTP_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define MTP_API __attribute__((visibility("default")))
#else
#define MTP_API
#endif

/* X(symbol, exit code of a program that ends with it, one-line meaning) */
#define MTP_STATUS_LIST(X)                                            \
    X(MTP_OK, 0, "ok")                                                \
    X(MTP_E_ARGUMENT, 1, "invalid argument to a library function")    \
    X(MTP_E_MEMORY, 1, "out of memory")                               \
    X(MTP_E_IO, 1, "reading or writing failed")                       \
    X(MTP_E_BACKEND, 1, "a foreign library or the device failed")     \
    X(MTP_E_UNSUPPORTED, 1, "not supported by this build or backend") \
    X(MTP_E_INTERNAL, 1, "a bug in libmtp")                           \
    X(MTP_E_CONFIG, 2, "wrong usage or configuration")                \
    X(MTP_E_EXISTS, 2, "refusing to overwrite what exists")           \
    X(MTP_E_FORMAT, 3, "malformed file")                              \
    X(MTP_E_DATA, 3, "bad data")                                      \
    X(MTP_E_VERSION, 3, "written by a newer version")                 \
    X(MTP_E_NOT_FOUND, 3, "file, tensor or key not found")            \
    X(MTP_E_INTERRUPTED, 130, "interrupted")

typedef enum mtp_status {
#define MTP_STATUS_ENUM_(symbol, exit_code, text) symbol,
    MTP_STATUS_LIST(MTP_STATUS_ENUM_)
#undef MTP_STATUS_ENUM_
} mtp_status;

/* The record behind a failed call. `message` is complete on its own; `file` and `line` name the place in the source. */
typedef struct mtp_error {
    mtp_status status;
    int foreign; /* errno, or the code of a foreign library; 0 when there is none */
    const char *file;
    int line;
    char message[8192]; /* ends in " [...]" when it had to be cut */
} mtp_error;

/* The symbol of a status ("MTP_E_IO"). Never NULL. */
MTP_API const char *mtp_status_name(mtp_status status);
/* The meaning of a status in a few words. Never NULL. */
MTP_API const char *mtp_status_text(mtp_status status);
/* The documented exit code of a program that ends with this status: 0 done, 1 failed, 2 wrong usage or configuration,
 * 3 bad data, 130 interrupted. */
MTP_API int mtp_status_exit_code(mtp_status status);
/* The calling thread's last failure. Never NULL; `status` is MTP_OK when nothing failed yet. Valid until the thread's
 * next failure. */
MTP_API const mtp_error *mtp_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
