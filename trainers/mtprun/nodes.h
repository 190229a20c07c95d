/* The machines of a run, which meet at the store: node 0 hosts it and decides who takes part in an attempt. */
#ifndef MTPRUN_NODES_H
#define MTPRUN_NODES_H

#include <stdbool.h>
#include <stdint.h>

#include "mtp/comm.h"
#include "plan.h"

enum { NODE_TEXT = 512, NODE_HOST = 64, NODE_KEY = 300 };

/* What is known of another machine. */
typedef struct node {
    int ranks;
    char incarnation[MTP_STORE_SECRET_SIZE]; /* differs when its mtprun was started anew */
    char host[NODE_HOST];
    bool takes_part; /* in the attempt that runs, or ran last */
    int64_t beats;   /* its number of signs of life, and when that changed; node 0 looks at it */
    double changed;
} node;

typedef struct nodes {
    const options *own;
    mtp_store_server *server; /* of node 0 */
    mtp_store *store;         /* of several machines */
    char endpoint[ENDPOINT_LETTERS];
    char host[ADDRESS_LETTERS];
    char secret[512];
    char incarnation[MTP_STORE_SECRET_SIZE];
    node *all; /* by node rank, own->num_nodes of them */
    int members;
    double last_beat;
} nodes;

typedef enum node_end {
    NODE_RUNS,
    NODE_DONE,
    NODE_FAILED,
    NODE_INTERRUPTED,
    NODE_LOST, /* node 0 does not answer */
    NODE_OVER  /* the run ended while this machine waited to take part */
} node_end;

/* Asked while waiting: true, the user wants the end. */
typedef struct node_stop {
    bool (*wanted)(void *user);
    void *user;
} node_stop;

/* Host the store or connect to it. 0, or the exit code after a failure, which was said. */
int nodes_open(nodes *all, const options *own);
/* Agree on an attempt: this one, or a later one when this one runs without this machine. Numbers the ranks, chooses
 * MASTER_PORT. Blocks until the machines are there, for at most join_seconds; gives up when `stop` says so. NODE_RUNS,
 * or another end after saying why; *code is the exit code of NODE_OVER. */
node_end nodes_join(nodes *all, int attempt, plan *now, node_stop stop, int *code);
/* Tell the others how this attempt ended here. `text` and `code` go with NODE_FAILED. */
void nodes_report(nodes *all, int attempt, node_end end, int code, const char *text);
/* Give a sign of life and look at what the others say. NODE_DONE: all are done. After NODE_FAILED `text` and `code` are
 * the first failure's. */
node_end nodes_look(nodes *all, int attempt, int *code, char *text, size_t size);
/* Node 0 waits until the others know how it ended. Accepts a zeroed struct. */
void nodes_close(nodes *all, int code);

/* ---- between nodes.c and join.c ---------------------------------------------------------------------------------- */

double nodes_now(void);
/* "mtprun/RUN/NAME". */
void nodes_key(const nodes *all, const char *name, char key[NODE_KEY]);
/* "mtprun/RUN/ATTEMPT/NAME". */
void nodes_attempt_key(const nodes *all, int attempt, const char *name, char key[NODE_KEY]);
/* A sign of life, when it is time for one; node 0 then looks for those of the others. False: the store is lost. */
bool nodes_beat(nodes *all);
/* Node 0: look for the signs of one machine now. False: the store is lost. */
bool nodes_observe(nodes *all, int rank);
/* Whether a machine has given no sign of life for so long, as far as node 0 has looked. */
bool nodes_silent(const nodes *all, int rank, double seconds);

#endif
