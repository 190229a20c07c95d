/* What a backend of the collectives offers; and the one of more than one CPU process. Internal. */
#ifndef MTP_COMM_COLLECTIVES_H
#define MTP_COMM_COLLECTIVES_H

#include <stddef.h>

#include "base/error.h"
#include "mtp/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Every function but cancel is called from one thread at a time and blocks until this rank's part is done. Sizes are >
 * 0. */
typedef struct mtp__collectives {
    mtp_status (*all_reduce)(void *self, void *data, size_t count, mtp_dtype dtype, mtp_reduce reduce);
    mtp_status (*broadcast)(void *self, void *data, size_t size, int root);
    mtp_status (*all_gather)(void *self, const void *data, size_t size, void *out);
    mtp_status (*barrier)(void *self);
    /* NULL where data is host memory. `mark`, from the thread that asks for an operation: a mark behind all work that
     * was launched on the device so far. `use_mark`, before the operation: it begins behind that, and the mark is
     * owned. */
    mtp_status (*mark)(void *self, void **mark);
    void (*use_mark)(void *self, void *mark);
    /* From any thread: let an operation that is at work fail soon, and those that follow at once. */
    void (*cancel)(void *self);
    void (*free)(void *self);
    void *self;
} mtp__collectives;

/* Connect all ranks over Gloo, whose sockets listen on `address`. They meet through `store`, under keys that start with
 * `prefix`. MTP_E_UNSUPPORTED in a build without Gloo. */
mtp_status mtp__gloo_create(const mtp_comm_place *place, mtp_store *store, const char *prefix, const char *address,
                            double seconds, mtp__collectives *made);

/* Connect the devices of all ranks, which meet through `ranks`. MTP_E_UNSUPPORTED where the backend has no such thing.
 */
mtp_status mtp__devices_create(mtp_comm *ranks, mtp_context *context, double seconds, mtp__collectives *made);

#ifdef __cplusplus
}
#endif
#endif
