#include "run/ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MESSAGE = 1536 };

/* What a rank says when one has failed. */
typedef struct outcome {
    int64_t status;
    char message[MESSAGE];
} outcome;

/* Room for `size` bytes of each rank. */
static mtp_status reserve(mtp__ranks *ranks, size_t size)
{
    if (size <= ranks->capacity) return MTP_OK;
    char *all = realloc(ranks->all, size * (size_t)ranks->world_size);
    if (!all) return MTP_FAIL(MTP_E_MEMORY, "out of memory for what %d ranks say", ranks->world_size);
    ranks->all = all;
    ranks->capacity = size;
    return MTP_OK;
}

mtp_status mtp__ranks_open(const mtp_comm_options *options, mtp__ranks *ranks)
{
    *ranks = (mtp__ranks){.world_size = 1};
    MTP_TRY(mtp_comm_create(options, &ranks->comm));
    const mtp_comm_place place = mtp_comm_where(ranks->comm);
    ranks->rank = place.rank;
    ranks->world_size = place.world_size;
    return reserve(ranks, sizeof(outcome)); /* to tell of a failure never takes memory */
}

void mtp__ranks_close(mtp__ranks *ranks)
{
    mtp_comm_free(ranks->comm);
    free(ranks->all);
    *ranks = (mtp__ranks){0};
}

/* Some rank failed; every rank knows. `status`: how it went here. */
static mtp_status tell_failures(mtp__ranks *ranks, mtp_status status)
{
    outcome own = {.status = (int64_t)status};
    ranks->told = true;
    if (status != MTP_OK) snprintf(own.message, sizeof own.message, "%.*s", MESSAGE - 1, mtp_last_error()->message);
    MTP_TRY(mtp_comm_all_gather(ranks->comm, &own, sizeof own, ranks->all));
    const outcome *all = (const outcome *)(const void *)ranks->all;
    for (int rank = 0; status == MTP_OK && rank < ranks->world_size; rank++)
        if (all[rank].status != MTP_OK)
            return MTP_FAIL((mtp_status)all[rank].status, "rank %d: %.*s", rank, MESSAGE - 1, all[rank].message);
    return status;
}

static mtp_status exchange(mtp__ranks *ranks, mtp_status status, const void *own, size_t size)
{
    const int64_t failed = status != MTP_OK;
    bool any = false;
    MTP_TRY(mtp_comm_all_gather(ranks->comm, &failed, sizeof failed, ranks->all));
    for (int rank = 0; rank < ranks->world_size; rank++) any = any || ((const int64_t *)(const void *)ranks->all)[rank];
    if (any) return tell_failures(ranks, status);
    MTP_TRY(reserve(ranks, size));
    ranks->size = size;
    return mtp_comm_all_gather(ranks->comm, own, (int64_t)size, ranks->all);
}

mtp_status mtp__ranks_exchange(mtp__ranks *ranks, mtp_status status, const void *own, size_t size)
{
    if (status == MTP_OK) return exchange(ranks, status, own, size);
    if (ranks->world_size == 1) return status;
    const mtp_error first = *mtp_last_error(); /* whatever becomes of telling the others, the reason stays this one */
    (void)exchange(ranks, status, own, size);
    return mtp__fail_again(&first);
}

const void *mtp__ranks_said(const mtp__ranks *ranks, int rank)
{
    return ranks->all + (size_t)rank * ranks->size;
}

mtp_status mtp__ranks_agree(mtp__ranks *ranks, mtp_status status)
{
    return mtp__ranks_exchange(ranks, status, NULL, 0);
}

mtp_status mtp__ranks_leave(mtp__ranks *ranks, mtp_status status)
{
    if (status != MTP_OK && ranks->comm && !ranks->told) status = mtp__ranks_agree(ranks, status);
    ranks->told = true;
    return status;
}

mtp_status mtp__ranks_share_text(mtp__ranks *ranks, char **text)
{
    int64_t size = ranks->rank == 0 && *text ? (int64_t)strlen(*text) + 1 : 0;
    MTP_TRY(mtp__ranks_exchange(ranks, MTP_OK, &size, sizeof size));
    if (ranks->rank > 0) *text = NULL;
    size = *(const int64_t *)mtp__ranks_said(ranks, 0);
    if (size == 0 || ranks->world_size == 1) return MTP_OK;
    char *received = ranks->rank == 0 ? *text : malloc((size_t)size);
    mtp_status status = received ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory for a text");
    status = mtp__ranks_agree(ranks, status);
    if (status == MTP_OK) status = mtp_comm_broadcast(ranks->comm, received, size, 0);
    if (ranks->rank == 0) return status;
    if (status == MTP_OK)
        *text = received;
    else
        free(received);
    return status;
}
