/* The machines of a run, which meet at the store: node 0 hosts it. */
#ifndef MTPRUN_NODES_H
#define MTPRUN_NODES_H

#include <stdbool.h>

#include "mtp/comm.h"
#include "plan.h"

typedef struct nodes {
    const options *own;
    mtp_store_server *server; /* of node 0 */
    mtp_store *store;         /* of several machines */
    bool met;                 /* all were there once */
    char endpoint[ENDPOINT_LETTERS];
    char host[ADDRESS_LETTERS];
    char secret[512];
} nodes;

typedef enum node_end { NODE_RUNS, NODE_DONE, NODE_FAILED, NODE_INTERRUPTED, NODE_LOST } node_end;

/* Host the store or connect to it. 0, or the exit code after a failure, which was said. */
int nodes_open(nodes *all, const options *own);
/* Agree on an attempt: number the ranks, choose MASTER_PORT. Blocks until all are there, for at most join_seconds;
 * gives up when `stop` says so. NODE_RUNS, NODE_INTERRUPTED, or NODE_FAILED after saying why. */
node_end nodes_join(nodes *all, int attempt, plan *now, bool (*stop)(void *), void *user);
/* Tell the others how this attempt ended here. `text` and `code` go with NODE_FAILED. */
void nodes_report(nodes *all, int attempt, node_end end, int code, const char *text);
/* What the others say. NODE_DONE: all are done. After NODE_FAILED `text` and `code` are the first failure's.
 * NODE_LOST: node 0 does not answer. */
node_end nodes_look(nodes *all, int attempt, int *code, char *text, size_t size);
/* Node 0 waits until the others know how it ended. Accepts a zeroed struct. */
void nodes_close(nodes *all);

#endif
