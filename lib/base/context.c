#include "base/context.h"

#include <stdlib.h>

#include "base/backends.h"
#include "base/error.h"

mtp_status mtp_context_create(const mtp_context_options *options, mtp_context **context)
{
    MTP_REQUIRE(options && context);
    *context = NULL;
    const mtp_backend *ops = NULL;
    int index = 0;
    MTP_TRY(mtp__backend_of(options->device ? options->device : "cpu", &ops, &index));
    mtp_context *created = calloc(1, sizeof *created);
    if (!created) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a context");
    created->ops = ops;
    created->logger = options->logger;
    const mtp_device_options device = {
        .num_threads = options->num_threads, .isa = options->isa, .index = index, .bf16 = options->bf16};
    const mtp_status status = created->ops->device_open(&device, &created->device);
    if (status != MTP_OK) {
        free(created);
        if (status == MTP_E_UNSUPPORTED) return MTP_FAIL(MTP_E_CONFIG, "%s", mtp_last_error()->message);
        return status;
    }
    *context = created;
    return MTP_OK;
}

void mtp_context_free(mtp_context *context)
{
    if (!context) return;
    context->ops->device_close(context->device);
    free(context);
}

mtp_context_info mtp_context_describe(const mtp_context *context)
{
    const mtp_device_info *info = context->ops->device_info(context->device);
    return (mtp_context_info){.device = info->backend,
                              .isa = info->isa,
                              .blas = info->blas,
                              .num_threads = info->num_threads,
                              .rows_exact = info->rows_exact,
                              .rows_note = info->rows_note};
}
