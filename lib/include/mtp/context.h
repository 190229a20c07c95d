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
    const char *device;       /* "cpu", "cuda" (device LOCAL_RANK under a launcher, else 0), "cuda:1"; NULL: "cpu". What
                                 this build or machine does not have is MTP_E_CONFIG */
    int num_threads;          /* threads of the device's ops; 0: the cores this process may use */
    const char *isa;          /* "plain", "avx2", "avx512"; NULL: the best this machine has */
    bool bf16;                /* cuda: factors of products are rounded to bf16; false: all is fp32. cpu: not used */
    const mtp_logger *logger; /* NULL: silent; must outlive the context */
} mtp_context_options;

/* What `mtp --version` prints about a device; strings live as long as the context. */
typedef struct mtp_context_info {
    const char *device; /* "cpu", "cuda" */
    const char *isa;    /* "avx512"; "NVIDIA H200, sm_90, 132 multiprocessors" */
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
