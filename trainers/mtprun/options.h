/* The command line: torchrun's flags, in both spellings (--nproc-per-node, --nproc_per_node). */
#ifndef MTPRUN_OPTIONS_H
#define MTPRUN_OPTIONS_H

#include <stdbool.h>

enum { STREAM_OUT = 1, STREAM_ERR = 2, RANKS_MAX = 1024 };

typedef struct options {
    int min_nodes, num_nodes; /* the fewest and the most that a run goes on with */
    int node_rank;
    int num_ranks;        /* on this node */
    int num_cores;        /* that this process may use */
    const char *endpoint; /* of the store; NULL: loopback, a free port */
    const char *run_id, *master_addr;
    int master_port; /* 0: a free one */
    int max_restarts;
    const char *log_dir;
    const char *redirects, *tee; /* as given; see options_streams */
    double stop_seconds, join_seconds, last_call_seconds;
    double time_limit, heartbeat; /* seconds; of ranks (MTP_COMM_TIME_LIMIT, MTP_COMM_HEARTBEAT) and machines */
    bool standalone, no_python, module;
    char **program; /* NULL-terminated */
} options;

/* True: go on. False: end with *exit_code, after --help or a mistake, which was said. */
bool options_parse(int argc, char **argv, options *own, int *exit_code);
/* What a value of --redirects or --tee ("3", or "0:1,2:3" by local rank) says for one rank: STREAM_ flags. */
int options_streams(const char *value, int local_rank);

#endif
