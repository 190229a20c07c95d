/* Gradients summed over ranks while the backward pass still computes others. Internal.
 *
 * One block of floats whose parts become final from the front to the back is cut into buckets of equal size; the
 * all-reduce of a bucket starts when the last of its values is final. Buckets start in order on every rank, and the
 * sums depend on world size and bucket size only. */
#ifndef MTP_COMM_BUCKETS_H
#define MTP_COMM_BUCKETS_H

#include "base/context.h"
#include "base/error.h"
#include "mtp/comm.h"

typedef struct mtp__buckets mtp__buckets;

/* For a block of `count` floats of the context's device memory that outlives it, in buckets of `bucket` floats (the
 * last may be smaller). `staged`: comm takes host memory only, and the device's is another; then there is a copy of the
 * block in host memory, and a bucket goes there and back. */
mtp_status mtp__buckets_create(mtp_comm *comm, mtp_context *context, bool staged, float *data, int64_t count,
                               int64_t bucket, mtp__buckets **buckets);
void mtp__buckets_free(mtp__buckets *buckets); /* accepts NULL; waits for what was started */

/* data [0, final) will not change any more on this rank: start what can be started. What cannot be started now is tried
 * again by finish, which tells. */
void mtp__buckets_ready(mtp__buckets *buckets, int64_t final);
/* Everything is final: start the rest and wait for all. The block then holds the sums, the same bits on every rank, and
 * the next round may begin. A rank that failed halfway calls it all the same: the others wait for it. */
mtp_status mtp__buckets_finish(mtp__buckets *buckets);

/* Device memory of rank `root` to all; `staged` as above. */
mtp_status mtp__broadcast_values(mtp_comm *comm, mtp_context *context, bool staged, void *data, size_t bytes, int root);

#endif
