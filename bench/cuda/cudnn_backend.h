/* cuDNN's backend interface: the library, and descriptors that are made step by step. The first failure of a session
 * stays, and everything after it does nothing, so a graph is written down without a check at every line. */
#ifndef MTP_BENCH_CUDNN_BACKEND_H
#define MTP_BENCH_CUDNN_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include "cuda/cudnn_numbers.h"
#include "mtp/status.h"

typedef void *cudnn_descriptor;

typedef struct cudnn_library {
    size_t (*version)(void);
    const char *(*error_string)(int status);
    void (*last_error_string)(char *text, size_t size);
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*set_stream)(void *handle, void *stream);
    int (*create_descriptor)(int type, cudnn_descriptor *descriptor);
    int (*destroy_descriptor)(cudnn_descriptor descriptor);
    int (*finalize)(cudnn_descriptor descriptor);
    int (*set_attribute)(cudnn_descriptor descriptor, int name, int type, int64_t count, const void *values);
    int (*get_attribute)(cudnn_descriptor descriptor, int name, int type, int64_t wanted, int64_t *count, void *values);
    int (*execute)(void *handle, cudnn_descriptor plan, cudnn_descriptor pack);
} cudnn_library;

enum { CUDNN_DESCRIPTORS_MOST = 160 };

typedef struct cudnn_session {
    cudnn_library library;
    void *handle;
    mtp_status status; /* of the first failure; mtp_last_error() has its message */
    cudnn_descriptor made[CUDNN_DESCRIPTORS_MOST];
    int count;
} cudnn_session;

mtp_status cudnn_session_open(cudnn_session *session, void *stream);
void cudnn_session_close(cudnn_session *session);

/* cuDNN's own words for a failed call; `what` is what was being done. MTP_E_UNSUPPORTED if it does not do this. */
mtp_status cudnn_failed(const cudnn_session *session, int status, const char *what);

/* A descriptor lives until its session ends. NULL after a failure. */
cudnn_descriptor cudnn_begin(cudnn_session *session, int type);
void cudnn_set(cudnn_session *session, cudnn_descriptor descriptor, int attribute, int type, int64_t count,
               const void *values);
void cudnn_set_int(cudnn_session *session, cudnn_descriptor descriptor, int attribute, int64_t value);
/* Of one of cuDNN's enumerations. */
void cudnn_set_enum(cudnn_session *session, cudnn_descriptor descriptor, int attribute, int type, int value);
void cudnn_set_descriptor(cudnn_session *session, cudnn_descriptor descriptor, int attribute, cudnn_descriptor value);
void cudnn_finish(cudnn_session *session, cudnn_descriptor descriptor, const char *what);

#endif
