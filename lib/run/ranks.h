/* Internal: the processes that train one run together. Rank 0 alone writes the run directory and talks to people; what
 * may fail on one rank alone ends in an exchange of all, so that all go on or all end, and all say why.
 *
 * All functions but open, close and said are collectives: every rank calls them in the same order, and nothing else of
 * `comm` that waits comes between. With one rank nobody is waited for. */
#ifndef MTP_RUN_RANKS_H
#define MTP_RUN_RANKS_H

#include "base/error.h"
#include "mtp/comm.h"

typedef struct mtp__ranks {
    mtp_comm *comm;
    int rank, world_size;
    char *all;       /* what was said in the last exchange */
    size_t capacity; /* of it, for each rank */
    size_t size;     /* that each rank said */
    bool told;       /* a failure was told to all, or nobody listens any more */
} mtp__ranks;

/* Find the others; mtp/comm.h says how. Close also after a failure. */
mtp_status mtp__ranks_open(const mtp_comm_options *options, mtp__ranks *ranks);
void mtp__ranks_close(mtp__ranks *ranks); /* accepts a zeroed struct */

/* `size` bytes of each rank to all, and how each one's part went so far (`status`, with the thread's error record).
 * MTP_OK when it went well on all; then mtp__ranks_said has what each said. Otherwise a rank that failed gets its own
 * failure back, and the others that of the lowest such rank: "rank 2: <its message>". */
mtp_status mtp__ranks_exchange(mtp__ranks *ranks, mtp_status status, const void *own, size_t size);
/* What a rank said in the last exchange that was MTP_OK; valid until the next one. */
const void *mtp__ranks_said(const mtp__ranks *ranks, int rank);
/* An exchange without words. */
mtp_status mtp__ranks_agree(mtp__ranks *ranks, mtp_status status);
/* The end of this process's part. A failure that no exchange has told yet is told in the exchange that the others come
 * to next, whichever that is: it begins with how each one's part went. Returns `status` with its record. */
mtp_status mtp__ranks_leave(mtp__ranks *ranks, mtp_status status);
/* A text of rank 0 (NULL: none) to all; free(*text). Rank 0 passes its own in `*text` and keeps it. */
mtp_status mtp__ranks_share_text(mtp__ranks *ranks, char **text);

#endif
