/* Signs of life through the store, from a thread of its own: a rank that was killed or stopped, or whose machine is
 * gone, is noticed also while nobody waits for it. Internal.
 *
 * Each rank counts up its own number and watches that of the next rank; one that has left is passed over. Who finds a
 * number that stands still for too long says so under a key that all ranks look at with each beat. */
#ifndef MTP_COMM_HEARTBEAT_H
#define MTP_COMM_HEARTBEAT_H

#include "base/text.h"
#include "mtp/comm.h"

typedef struct mtp__heartbeat_options {
    mtp_comm_place place;
    const char *prefix; /* of the keys; must outlive the heartbeat */
    const char *endpoint, *secret;
    double interval; /* seconds between beats */
    double limit;    /* within which everybody knows of a loss; at least MTP__BEATS_MIN intervals */
    /* Called once, from the thread: a rank, or the store, is lost. */
    void (*lost)(void *user, const char *message);
    void *user;
} mtp__heartbeat_options;

enum {
    MTP__BEATS_MIN = 3,
    MTP__REPORT_SECONDS = 2 /* that others may take to say that they failed too */
};

typedef struct mtp__heartbeat mtp__heartbeat;

/* Say who this is, beat once, and go on from a thread. */
mtp_status mtp__heartbeat_start(const mtp__heartbeat_options *options, mtp__heartbeat **heartbeat);
/* Say that this rank leaves, end the thread, free. Accepts NULL. */
void mtp__heartbeat_stop(mtp__heartbeat *heartbeat);

/* "rank 3 (host, process 77)", as that rank said itself. */
void mtp__heartbeat_name(mtp_store *store, const char *prefix, int rank, mtp__text *text);
/* After an operation has failed here: say so through the store, learn who else says so, and add to `text` which of the
 * others do not: those that have stopped beating, and those that live but are somewhere else. Takes up to two seconds
 * and an interval. */
void mtp__heartbeat_blame(mtp_store *store, const char *prefix, const mtp_comm_place *place, double interval,
                          mtp__text *text);

#endif
