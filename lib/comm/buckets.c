#include "comm/buckets.h"

#include <stdlib.h>

struct mtp__buckets {
    mtp_comm *comm;
    float *data;
    int64_t count, bucket;
    mtp_comm_request **requests; /* [num] */
    int64_t num, started;
};

mtp_status mtp__buckets_create(mtp_comm *comm, float *data, int64_t count, int64_t bucket, mtp__buckets **buckets)
{
    MTP_REQUIRE(comm && data && count >= 1 && bucket >= 1 && buckets);
    *buckets = NULL;
    mtp__buckets *made = calloc(1, sizeof *made);
    if (!made) return MTP_FAIL(MTP_E_MEMORY, "out of memory for gradient buckets");
    *made = (mtp__buckets){.comm = comm, .data = data, .count = count, .bucket = bucket};
    made->num = (count + bucket - 1) / bucket;
    made->requests = calloc((size_t)made->num, sizeof *made->requests);
    if (!made->requests) {
        free(made);
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
        const int64_t begin = buckets->started * buckets->bucket;
        MTP_TRY(mtp_comm_all_reduce_start(buckets->comm, buckets->data + begin,
                                          end_of(buckets, buckets->started) - begin, MTP_F32, MTP_REDUCE_SUM,
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
        const mtp_status one = mtp_comm_wait(buckets->comm, buckets->requests[i]);
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
    free(buckets);
}
