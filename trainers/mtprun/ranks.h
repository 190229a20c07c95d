/* The ranks of this node: processes with a process group each, so that whatever they start ends with them. */
#ifndef MTPRUN_RANKS_H
#define MTPRUN_RANKS_H

#include <stdbool.h>
#include <sys/types.h>

#include "output.h"
#include "plan.h"

typedef struct rank {
    int local, global;
    pid_t pid;
    bool running;
    int status;         /* of waitpid, when it has ended */
    double stopped;     /* since when it is stopped (SIGSTOP); 0: it is not */
    double stopped_for; /* killed after so many seconds in which it was */
    stream out, err;
    tail last;
} rank;

/* Start all. On failure those that were started are killed, the reason was said, and false returned. */
bool ranks_start(rank *all, const options *own, const plan *now);
/* A signal to every process of the ranks that run. */
void ranks_signal(const rank *all, int count, int signal_number);
/* Note those that ended: kills what they left behind, passes on what they printed. One that has been stopped for
 * `stopped_limit` seconds is killed. Returns the one that failed first, as far as it can be told; NULL when none did.
 */
rank *ranks_reap(rank *all, int count, double stopped_limit);
/* Whether one that runs is stopped, so that ranks_reap must be called again in time. */
bool ranks_stopped(const rank *all, int count);
int ranks_running(const rank *all, int count);
/* "exit code 3", "signal 9 (Killed)". */
void ranks_describe(const rank *one, char *text, size_t size);
/* The exit code of a run that fails because of it. */
int ranks_exit_code(const rank *one);

#endif
