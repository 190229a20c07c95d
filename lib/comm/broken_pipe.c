#include "comm/broken_pipe.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

static void only_sigpipe(sigset_t *set)
{
    sigemptyset(set);
    sigaddset(set, SIGPIPE);
}

static bool is_pending(void)
{
    sigset_t pending;
    return sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE) == 1;
}

void mtp__broken_pipe_hold(mtp__broken_pipe *state)
{
    sigset_t set;
    only_sigpipe(&set);
    state->pending = is_pending();
    state->blocked = pthread_sigmask(SIG_BLOCK, &set, &state->before) == 0;
}

void mtp__broken_pipe_release(const mtp__broken_pipe *state)
{
    sigset_t set;
    const struct timespec now = {.tv_sec = 0};
    if (!state->blocked) return;
    only_sigpipe(&set);
    if (!state->pending && is_pending())
        while (sigtimedwait(&set, NULL, &now) < 0 && errno == EINTR) continue;
    pthread_sigmask(SIG_SETMASK, &state->before, NULL);
}
