/* Internal: device names and the backends behind them. "cpu" is part of libmtp; "cuda" is a module (libmtp_cuda.so)
 * that is loaded when it is first asked for, so that nothing else needs CUDA's libraries. */
#ifndef MTP_BASE_BACKENDS_H
#define MTP_BASE_BACKENDS_H

#include "ops.h"

/* The backend of a device name, and which of its devices: "cpu"; "cuda": device LOCAL_RANK under a launcher, else 0;
 * "cuda:1". MTP_E_CONFIG says what is wrong with the name, or what keeps the backend from being used here. */
mtp_status mtp__backend_of(const char *name, const mtp_backend **backend, int *index);

#endif
