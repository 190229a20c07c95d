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
    bool bf16;                /* cuda: factors of products, activations in memory among them, are bf16; false: all is
                                 fp32. cpu: not used */
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

/* A device that there is, or a backend that cannot be used here. */
typedef struct mtp_device_entry {
    char device[16]; /* as `device` above: "cpu", "cuda:0"; "cuda" for the backend as a whole */
    char name[128];  /* "NVIDIA H200, sm_90, 132 multiprocessors"; "" when unusable as a whole */
    uint64_t memory; /* bytes in all; 0: unknown */
    bool usable;
    char reason[512]; /* why not; "" when usable */
} mtp_device_entry;

/* Up to `capacity` devices of all backends into `entries`; *count is how many there are, and may be more. A backend
 * that is not built or finds no driver is an entry with its reason, not a failure. */
MTP_API mtp_status mtp_devices_list(mtp_device_entry *entries, int capacity, int *count);

MTP_API mtp_status mtp_context_create(const mtp_context_options *options, mtp_context **context);
MTP_API void mtp_context_free(mtp_context *context); /* accepts NULL */
MTP_API mtp_context_info mtp_context_describe(const mtp_context *context);

#ifdef __cplusplus
}
#endif
#endif
