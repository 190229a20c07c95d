/* Internal: what a context holds. */
#ifndef MTP_BASE_CONTEXT_H
#define MTP_BASE_CONTEXT_H

#include "mtp/context.h"
#include "ops.h"

struct mtp_context {
    const mtp_backend *ops; /* context->ops->linear_fwd(context->device, &args) */
    mtp_device *device;
    const mtp_logger *logger;
};

#endif
