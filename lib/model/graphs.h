/* Internal to lib/model: work that comes again and again in the same sizes, captured as a graph when it comes the
 * second time and launched as a whole from then on. The first time it runs call by call, and the device chooses the
 * algorithms of its products. A bounded number of graphs is kept; the one that was not used for longest goes. Work that
 * cannot be captured runs call by call, and the context's logger gets a warning with the reason, the first time.
 *
 * MTP_CUDA_GRAPHS=0 in the environment lets everything run call by call. */
#ifndef MTP_MODEL_GRAPHS_H
#define MTP_MODEL_GRAPHS_H

#include "base/context.h"

enum { MTP__GRAPHS_KEPT = 64, MTP__GRAPH_NUMBERS = 4 };

/* What graphs of the same work differ in. */
typedef struct mtp__graph_key {
    int64_t numbers[MTP__GRAPH_NUMBERS];
} mtp__graph_key;

typedef struct mtp__graph_entry {
    mtp__graph_key key;
    mtp_graph *graph;  /* NULL: it came once */
    bool refused;      /* capturing it failed; it runs call by call */
    int64_t last_used; /* 0: an empty place */
} mtp__graph_entry;

typedef struct mtp__graphs {
    const mtp_context *context;
    bool on; /* the device has graphs and they are wanted */
    int64_t time;
    mtp__graph_entry entries[MTP__GRAPHS_KEPT];
    int64_t called, captured, launched, refused; /* pieces of work: run call by call, captured, ... */
    int64_t nodes;                               /* of the graph launched last */
} mtp__graphs;

void mtp__graphs_create(const mtp_context *context, mtp__graphs *graphs);
/* All graphs go: what they read or write is not where it was. Accepts a zeroed struct. */
void mtp__graphs_clear(mtp__graphs *graphs);
/* Do `work(user)`, which calls only what may be captured and has the same arguments whenever the key is the same. */
mtp_status mtp__graphs_run(mtp__graphs *graphs, const mtp__graph_key *key, mtp_status (*work)(void *user), void *user);

#endif
