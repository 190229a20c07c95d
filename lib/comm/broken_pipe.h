/* SIGPIPE of code that writes to sockets without MSG_NOSIGNAL, as Gloo does. Internal. */
#ifndef MTP_COMM_BROKEN_PIPE_H
#define MTP_COMM_BROKEN_PIPE_H

#include <signal.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A write to a connection whose other side is gone raises SIGPIPE in the thread that writes, and unless told otherwise
 * that ends the process. What the process does with signals is its program's choice, not ours; so the threads that may
 * write so block the signal while they do. Threads made meanwhile inherit that. */
typedef struct mtp__broken_pipe {
    sigset_t before;
    bool blocked, pending; /* already, before us */
} mtp__broken_pipe;

/* Block SIGPIPE in this thread. */
void mtp__broken_pipe_hold(mtp__broken_pipe *state);
/* Drop a SIGPIPE that came meanwhile, then make the mask what it was. Call it in the same thread. */
void mtp__broken_pipe_release(const mtp__broken_pipe *state);

#ifdef __cplusplus
}
#endif
#endif
