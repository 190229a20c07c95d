#include "model/embedding.h"

#include "base/error.h"
#include "model/drafter.h"

uint64_t mtp__embedding_bytes(const mtp_verifier *verifier)
{
    const mtp_view table = mtp_verifier_embedding(verifier);
    return (uint64_t)mtp_view_count(table) * mtp_dtype_size(table.dtype);
}

mtp_view mtp__embedding_held(const mtp_drafter *drafter, const mtp_verifier *verifier)
{
    const mtp_view table = mtp_verifier_embedding(verifier);
    if (drafter->context->ops->memory_is_host) return table;
    return drafter->embedding_of == table.data ? drafter->embedding : (mtp_view){0};
}

static mtp_status copy(mtp_drafter *drafter, mtp_view table, size_t bytes)
{
    const mtp_context *context = drafter->context;
    mtp_view held = table;
    MTP_TRY_AT(context->ops->memory_alloc(context->device, bytes, &held.data), "embedding table of the verifier");
    const mtp_status status = context->ops->upload(context->device, held.data, table.data, bytes);
    if (status != MTP_OK) {
        context->ops->memory_free(context->device, held.data);
        return status;
    }
    drafter->embedding = held;
    drafter->embedding_of = table.data;
    return MTP_OK;
}

mtp_status mtp__embedding_hold(mtp_drafter *drafter, const mtp_verifier *verifier)
{
    const mtp_view table = mtp_verifier_embedding(verifier);
    if (drafter->embedding_holders > 0 && drafter->embedding_of && drafter->embedding_of != table.data)
        return MTP_FAIL(MTP_E_ARGUMENT, "the drafter's device holds the embedding table of another verifier");
    if (!mtp__embedding_held(drafter, verifier).data)
        MTP_TRY(copy(drafter, table, (size_t)mtp__embedding_bytes(verifier)));
    drafter->embedding_holders++;
    return MTP_OK;
}

void mtp__embedding_drop(mtp_drafter *drafter)
{
    if (--drafter->embedding_holders > 0) return;
    drafter->context->ops->memory_free(drafter->context->device, drafter->embedding.data);
    drafter->embedding = (mtp_view){0};
    drafter->embedding_of = NULL;
}
