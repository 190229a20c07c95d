/* The context of a computation: a device and a logger. Everything that computes takes one. Contexts share nothing, so
 * two threads may each train a drafter in their own. */
#ifndef MTP_CONTEXT_H
#define MTP_CONTEXT_H

#include "mtp/log.h"
#include "mtp/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mtp_context mtp_context;

typedef struct mtp_context_options {
    const char *device;       /* "cpu"; NULL: "cpu". Another name is MTP_E_CONFIG, which says what this build has */
    int num_threads;          /* threads of the device's ops; 0: the cores this process may use */
    const char *isa;          /* "plain", "avx2", "avx512"; NULL: the best this machine has */
    const mtp_logger *logger; /* NULL: silent; must outlive the context */
} mtp_context_options;

/* What `mtp --version` prints about a device; strings live as long as the context. */
typedef struct mtp_context_info {
    const char *device; /* "cpu" */
    const char *isa;    /* "avx512" */
    const char *blas;   /* name, version and kernel of the BLAS */
    int num_threads;
    bool rows_exact;       /* packed = alone holds bit for bit with this BLAS (measured at creation) */
    const char *rows_note; /* one sentence about it */
} mtp_context_info;

MTP_API mtp_status mtp_context_create(const mtp_context_options *options, mtp_context **context);
MTP_API void mtp_context_free(mtp_context *context); /* accepts NULL */
MTP_API mtp_context_info mtp_context_describe(const mtp_context *context);

#ifdef __cplusplus
}
#endif
#endif
