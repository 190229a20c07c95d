/* Collectives between the devices of the ranks, by what the backend's own library offers. */
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "comm/collectives.h"

typedef struct devices {
    const mtp_group_ops *ops;
    mtp_device_group *group;
    void *mark; /* behind which the next operation begins */
    double seconds;
} devices;

static mtp_status sum(void *self, void *data, size_t count, mtp_dtype dtype, mtp_reduce reduce)
{
    devices *all = self;
    if (reduce != MTP_REDUCE_SUM) return MTP_FAIL(MTP_E_UNSUPPORTED, "devices add up; they find no maximum or minimum");
    return all->ops->sum(all->group, all->mark, data, count, dtype, all->seconds);
}

static mtp_status broadcast(void *self, void *data, size_t size, int root)
{
    devices *all = self;
    return all->ops->broadcast(all->group, all->mark, data, size, root, all->seconds);
}

static mtp_status all_gather(void *self, const void *data, size_t size, void *out)
{
    (void)self, (void)data, (void)size, (void)out;
    return MTP_FAIL(MTP_E_UNSUPPORTED, "devices do not gather; use the communicator of the ranks");
}

static mtp_status barrier(void *self)
{
    (void)self;
    return MTP_FAIL(MTP_E_UNSUPPORTED, "devices have no barrier; use the communicator of the ranks");
}

static mtp_status mark(void *self, void **made)
{
    devices *all = self;
    return all->ops->mark(all->group, made);
}

static void use_mark(void *self, void *made)
{
    devices *all = self;
    all->ops->mark_free(all->group, all->mark);
    all->mark = made;
}

static void cancel_all(void *self)
{
    devices *all = self;
    all->ops->cancel(all->group);
}

static void free_all(void *self)
{
    devices *all = self;
    use_mark(self, NULL);
    all->ops->close(all->group);
    free(all);
}

/* Rank 0 makes the number of the group, or says that it cannot. */
static mtp_status agree_on_id(mtp_comm *ranks, const mtp_group_ops *ops, uint8_t id[MTP_GROUP_ID])
{
    uint8_t message[MTP_GROUP_ID + 1] = {0};
    mtp_status made = MTP_OK;
    if (mtp_comm_where(ranks).rank == 0) {
        made = ops->make_id(message + 1);
        message[0] = made == MTP_OK;
    }
    /* the record of rank 0's failure stays the last one only if this one succeeds */
    MTP_TRY(mtp_comm_broadcast(ranks, message, sizeof message, 0));
    if (made != MTP_OK) return made;
    if (!message[0]) return MTP_FAIL(MTP_E_BACKEND, "rank 0 could not begin a group of devices; it says why");
    memcpy(id, message + 1, MTP_GROUP_ID);
    return MTP_OK;
}

mtp_status mtp__devices_create(mtp_comm *ranks, mtp_context *context, double seconds, mtp__collectives *made)
{
    const mtp_group_ops *ops = context->ops->group;
    const mtp_comm_place place = mtp_comm_where(ranks);
    uint8_t id[MTP_GROUP_ID];
    if (!ops) return MTP_FAIL(MTP_E_UNSUPPORTED, "devices of the backend \"%s\" exchange nothing", context->ops->name);
    MTP_TRY(agree_on_id(ranks, ops, id));
    devices *all = calloc(1, sizeof *all);
    if (!all) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a communicator");
    *all = (devices){.ops = ops, .seconds = seconds};
    const mtp_status status = ops->open(context->device, id, place.rank, place.world_size, &all->group);
    if (status != MTP_OK) {
        free(all);
        return status;
    }
    *made = (mtp__collectives){.all_reduce = sum,
                               .broadcast = broadcast,
                               .all_gather = all_gather,
                               .barrier = barrier,
                               .mark = mark,
                               .use_mark = use_mark,
                               .cancel = cancel_all,
                               .free = free_all,
                               .self = all};
    return MTP_OK;
}
