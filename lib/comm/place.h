/* What the environment says about this process among others. Internal. */
#ifndef MTP_COMM_PLACE_H
#define MTP_COMM_PLACE_H

#include "comm/net.h"
#include "mtp/comm.h"

typedef struct mtp__meeting {
    mtp_comm_place place;
    bool one_node;               /* all ranks are on this node */
    bool host;                   /* this rank hosts the store */
    char address[MTP__NET_NAME]; /* where it listens */
    int port;
    char endpoint[2 * MTP__NET_NAME]; /* where to find it; empty for one rank */
    char secret[512];
    char run[256]; /* run id and restart count */
} mtp__meeting;

/* See mtp_comm_create. MTP_E_CONFIG. */
mtp_status mtp__meeting_read(mtp__meeting *meeting);

#endif
