/* A backend that stands in a module of its own (libmtp_cuda.so), opened at run time, so that programs without a GPU
 * need none of its libraries. Host and module are of one build: the interface number covers ops.h, which may change. */
#ifndef MTP_KERNELS_MODULE_H
#define MTP_KERNELS_MODULE_H

#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raise it with every change of ops.h that a module of an older build would misread. */
enum { MTP_MODULE_INTERFACE = 4 };

/* What the module uses of the host. The first two fields keep their place in every interface. Errors of the module are
 * raised in the host, whose records callers read. */
typedef struct mtp_module_host {
    int interface;       /* MTP_MODULE_INTERFACE of the host */
    const char *version; /* of libmtp */
    size_t backend_size; /* sizeof(mtp_backend) */
    mtp_status (*fail)(mtp_status status, int foreign, const char *file, int line, const char *message);
    mtp_status (*prefix)(mtp_status status, const char *text);
} mtp_module_host;

/* The one symbol that a module exports, under the name "mtp_module_open". Returns its table, which lives as long as the
 * module is loaded, or NULL when it was built for another interface; *version is that of the module in both cases.
 * `host` must outlive the module. Opening it again with the same host is allowed. */
typedef const mtp_backend *mtp_module_open_function(const mtp_module_host *host, const char **version);

#ifdef __cplusplus
}
#endif
#endif
