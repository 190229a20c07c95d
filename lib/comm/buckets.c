#include "comm/buckets.h"

#include <stdlib.h>

struct mtp__buckets {
    mtp_comm *comm;
    mtp_context *context;
    float *data, *host; /* host: the copy that travels; NULL: `data` itself does */
    int64_t count, bucket;
    mtp_comm_request **requests; /* [num] */
    int64_t num, started;
};

mtp_status mtp__buckets_create(mtp_comm *comm, mtp_context *context, bool staged, float *data, int64_t count,
                               int64_t bucket, mtp__buckets **buckets)
{
    MTP_REQUIRE(comm && context && data && count >= 1 && bucket >= 1 && buckets);
    *buckets = NULL;
    mtp__buckets *made = calloc(1, sizeof *made);
    if (!made) return MTP_FAIL(MTP_E_MEMORY, "out of memory for gradient buckets");
    *made = (mtp__buckets){.comm = comm, .context = context, .data = data, .count = count, .bucket = bucket};
    made->num = (count + bucket - 1) / bucket;
    made->requests = calloc((size_t)made->num, sizeof *made->requests);
    if (staged) made->host = malloc((size_t)count * sizeof *made->host);
    if (!made->requests || (staged && !made->host)) {
        mtp__buckets_free(made);
        return MTP_FAIL(MTP_E_MEMORY, "out of memory for gradient buckets");
    }
    *buckets = made;
    return MTP_OK;
}

static int64_t end_of(const mtp__buckets *buckets, int64_t index)
{
    const int64_t end = (index + 1) * buckets->bucket;
    return end < buckets->count ? end : buckets->count;
}

/* Start those that end at `final` or before. */
static mtp_status start(mtp__buckets *buckets, int64_t final)
{
    while (buckets->started < buckets->num && end_of(buckets, buckets->started) <= final) {
        const int64_t begin = buckets->started * buckets->bucket, count = end_of(buckets, buckets->started) - begin;
        float *travels = (buckets->host ? buckets->host : buckets->data) + begin;
        if (buckets->host)
            MTP_TRY(buckets->context->ops->download(buckets->context->device, travels, buckets->data + begin,
                                                    (size_t)count * sizeof *travels));
        MTP_TRY(mtp_comm_all_reduce_start(buckets->comm, travels, count, MTP_F32, MTP_REDUCE_SUM,
                                          &buckets->requests[buckets->started]));
        buckets->started++;
    }
    return MTP_OK;
}

void mtp__buckets_ready(mtp__buckets *buckets, int64_t final)
{
    (void)start(buckets, final);
}

/* Wait for all that was started; the first failure. */
static mtp_status wait_all(mtp__buckets *buckets)
{
    mtp_status status = MTP_OK;
    for (int64_t i = 0; i < buckets->started; i++) {
        const int64_t begin = i * buckets->bucket, count = end_of(buckets, i) - begin;
        mtp_status one = mtp_comm_wait(buckets->comm, buckets->requests[i]);
        if (one == MTP_OK && buckets->host)
            one = buckets->context->ops->upload(buckets->context->device, buckets->data + begin, buckets->host + begin,
                                                (size_t)count * sizeof(float));
        if (status == MTP_OK) status = one; /* all that follow report the same failure */
    }
    buckets->started = 0;
    return status;
}

mtp_status mtp__buckets_finish(mtp__buckets *buckets)
{
    const mtp_status status = start(buckets, buckets->count);
    const mtp_status waited = wait_all(buckets);
    return status == MTP_OK ? waited : status;
}

void mtp__buckets_free(mtp__buckets *buckets)
{
    if (!buckets) return;
    (void)wait_all(buckets);
    free(buckets->requests);
    free(buckets->host);
    free(buckets);
}

mtp_status mtp__broadcast_values(mtp_comm *comm, mtp_context *context, bool staged, void *data, size_t bytes, int root)
{
    const bool own = mtp_comm_where(comm).rank == root;
    if (!staged || bytes == 0) return mtp_comm_broadcast(comm, data, (int64_t)bytes, root);
    void *host = malloc(bytes);
    mtp_status status = host ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory for values on their way");
    if (status == MTP_OK && own) status = context->ops->download(context->device, host, data, bytes);
    if (status == MTP_OK) status = mtp_comm_broadcast(comm, host, (int64_t)bytes, root);
    if (status == MTP_OK && !own) status = context->ops->upload(context->device, data, host, bytes);
    free(host);
    return status;
}
