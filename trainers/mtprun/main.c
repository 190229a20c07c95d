/* mtprun: starts the ranks of a run, sees them to their end, and starts all again when one fails. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#include "nodes.h"
#include "options.h"
#include "ranks.h"
#include "say.h"

enum { WRONG_USAGE = 2, INTERRUPTED = 130, LOOK_MS = 200, HOST_LETTERS = 128 };

typedef struct launch {
    options own;
    nodes all;
    plan now;
    rank *ranks;
    struct pollfd *polls;
    int signals;    /* a signalfd */
    int interrupts; /* SIGINT, SIGTERM, SIGHUP so far */
    bool stopping;  /* SIGTERM at `ask_at` unless `asked`, SIGKILL at `kill_at` */
    bool asked;
    int64_t ask_at, kill_at; /* milliseconds */
    node_end end;            /* of this attempt; NODE_RUNS until something happened */
    int code;
    const rank *failed;     /* the first one here */
    char reason[NODE_TEXT]; /* what another machine says */
} launch;

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ---- signals -------------------------------------------------------------------------------------------------- */

static int open_signals(void)
{
    sigset_t set;
    struct sigaction hang_up;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    /* under nohup it stays ignored, by us and by the ranks */
    if (sigaction(SIGHUP, NULL, &hang_up) == 0 && hang_up.sa_handler != SIG_IGN) sigaddset(&set, SIGHUP);
    sigaddset(&set, SIGCHLD);
    signal(SIGPIPE, SIG_IGN);
    /* also for the store's thread, which inherits it */
    if (sigprocmask(SIG_BLOCK, &set, NULL) != 0) return -1;
    return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

static void take_signals(launch *run)
{
    struct signalfd_siginfo info;
    while (read(run->signals, &info, sizeof info) == (ssize_t)sizeof info) {
        const int number = (int)info.ssi_signo;
        if (number == SIGCHLD) continue;
        if (++run->interrupts == 1) {
            say("%s: passed on to all ranks; once more kills them", strsignal(number));
            ranks_signal(run->ranks, run->own.num_ranks, number == SIGHUP ? SIGTERM : number);
            /* one that is stopped sees it when it goes on */
            ranks_signal(run->ranks, run->own.num_ranks, SIGCONT);
        } else {
            say("%s again: killing all ranks", strsignal(number));
            ranks_signal(run->ranks, run->own.num_ranks, SIGKILL);
        }
    }
}

static bool interrupted(void *user)
{
    launch *run = user;
    take_signals(run);
    return run->interrupts > 0;
}

/* ---- one attempt ---------------------------------------------------------------------------------------------- */

static void ask_ranks(launch *run)
{
    run->asked = true;
    ranks_signal(run->ranks, run->own.num_ranks, SIGTERM);
    /* a stopped process does not see SIGTERM before it goes on */
    ranks_signal(run->ranks, run->own.num_ranks, SIGCONT);
}

/* All ranks are to end, in the time of --stop-seconds; `agreed`: they do so already, and have half of that time before
 * they are asked. */
static void stop_ranks(launch *run, bool agreed)
{
    const int64_t left = (int64_t)(run->own.stop_seconds * 1000), now = now_ms();
    if (run->stopping) return;
    run->stopping = true;
    run->ask_at = agreed ? now + left / 2 : now;
    run->kill_at = now + left;
    if (!agreed) ask_ranks(run);
}

static void note_failed(launch *run, const rank *failed)
{
    char what[64], text[256], host[HOST_LETTERS] = "?";
    ranks_describe(failed, what, sizeof what);
    if (run->interrupts > 0 || run->end != NODE_RUNS) return;
    gethostname(host, sizeof host - 1);
    snprintf(text, sizeof text, "rank %d (%s, local rank %d, process %d): %s", failed->global, host, failed->local,
             (int)failed->pid, what);
    run->failed = failed;
    run->end = NODE_FAILED;
    run->code = ranks_exit_code(failed);
    say("%s%s", text, ranks_running(run->ranks, run->own.num_ranks) ? "; stopping the others" : "");
    nodes_report(&run->all, run->now.attempt, NODE_FAILED, run->code, text);
    /* who was interrupted agreed with the others to end, and a second signal would cut them short */
    stop_ranks(run, run->code == INTERRUPTED);
}

/* What other machines say. */
static void look_around(launch *run)
{
    int code = 1;
    if (run->end != NODE_RUNS) return;
    const node_end end = nodes_look(&run->all, run->now.attempt, &code, run->reason, sizeof run->reason);
    if (end == NODE_RUNS || end == NODE_DONE) return;
    run->end = end;
    run->code = end == NODE_INTERRUPTED ? INTERRUPTED : code;
    if (end == NODE_LOST)
        say("node 0, which hosts the store at %s, is lost: the run ends", run->all.endpoint);
    else
        say("another machine %s%s; stopping the ranks here", end == NODE_FAILED ? "reports: " : "was interrupted",
            run->reason);
    stop_ranks(run, false);
}

static void poll_once(launch *run)
{
    const int count = run->own.num_ranks;
    run->polls[0] = (struct pollfd){.fd = run->signals, .events = POLLIN};
    for (int i = 0; i < count; i++) {
        /* poll skips negative descriptors */
        run->polls[1 + 2 * i] = (struct pollfd){.fd = run->ranks[i].out.fd, .events = POLLIN};
        run->polls[2 + 2 * i] = (struct pollfd){.fd = run->ranks[i].err.fd, .events = POLLIN};
    }
    const bool timed = run->stopping || run->own.num_nodes > 1 || ranks_stopped(run->ranks, count);
    if (poll(run->polls, 1 + 2 * (nfds_t)count, timed ? LOOK_MS : -1) <= 0) return;
    for (int i = 0; i < count; i++) {
        if (run->polls[1 + 2 * i].revents) stream_read(&run->ranks[i].out);
        if (run->polls[2 + 2 * i].revents) stream_read(&run->ranks[i].err);
    }
}

static void watch(launch *run)
{
    bool told = false;
    while (ranks_running(run->ranks, run->own.num_ranks) > 0) {
        poll_once(run);
        take_signals(run);
        if (run->interrupts > 0 && !told) {
            told = true;
            nodes_report(&run->all, run->now.attempt, NODE_INTERRUPTED, INTERRUPTED, "");
        }
        const rank *failed = ranks_reap(run->ranks, run->own.num_ranks, run->own.time_limit);
        if (failed) note_failed(run, failed);
        if (run->own.num_nodes > 1) look_around(run);
        if (run->stopping && !run->asked && now_ms() >= run->ask_at) ask_ranks(run);
        if (run->stopping && now_ms() >= run->kill_at) ranks_signal(run->ranks, run->own.num_ranks, SIGKILL);
    }
}

/* All ended well here: so do the others, or we start again with them. */
static void wait_for_others(launch *run)
{
    nodes_report(&run->all, run->now.attempt, NODE_DONE, 0, NULL);
    while (run->own.num_nodes > 1 && run->end == NODE_RUNS && !interrupted(run)) {
        int code;
        if (nodes_look(&run->all, run->now.attempt, &code, run->reason, sizeof run->reason) == NODE_DONE) break;
        look_around(run);
        nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * 1000000L}, NULL);
    }
    if (run->end == NODE_RUNS) run->end = run->interrupts > 0 ? NODE_INTERRUPTED : NODE_DONE;
}

/* Ends with run->end and run->code set. */
static void attempt_once(launch *run, int attempt)
{
    run->failed = NULL;
    run->reason[0] = '\0';
    run->stopping = run->asked = false;
    run->code = 1;
    const node_stop stop = {.wanted = interrupted, .user = run};
    run->end = nodes_join(&run->all, attempt, &run->now, stop, &run->code);
    if (run->end != NODE_RUNS) return;
    if (!ranks_start(run->ranks, &run->own, &run->now)) {
        run->end = NODE_FAILED;
        nodes_report(&run->all, run->now.attempt, NODE_FAILED, 1, "a machine that cannot start its ranks");
        return;
    }
    watch(run);
    if (run->interrupts > 0)
        run->end = NODE_INTERRUPTED;
    else if (run->end == NODE_RUNS)
        wait_for_others(run);
}

/* ---- the run -------------------------------------------------------------------------------------------------- */

static void print_summary(const launch *run)
{
    char what[64], host[HOST_LETTERS] = "?";
    if (!run->failed) {
        if (run->reason[0])
            say("failed after %d restart%s: %s", run->now.attempt, plural(run->now.attempt), run->reason);
        return;
    }
    gethostname(host, sizeof host - 1);
    ranks_describe(run->failed, what, sizeof what);
    say("failed after %d restart%s. First to fail: rank %d on %s (node %d, local rank %d): %s. Its last lines:",
        run->now.attempt, plural(run->now.attempt), run->failed->global, host, run->own.node_rank, run->failed->local,
        what);
    tail_print(&run->failed->last, run->failed->global);
}

/* What the attempt ended with on all machines: what the first of them said, whatever followed from it here. */
static int agreed_code(launch *run)
{
    int code = run->code;
    char text[NODE_TEXT];
    if (run->own.num_nodes == 1 || run->now.world_size == 0) return code;
    const node_end end = nodes_look(&run->all, run->now.attempt, &code, text, sizeof text);
    return end == NODE_FAILED || end == NODE_INTERRUPTED ? code : run->code;
}

/* Would the next attempt end the same way, or is it not wanted? */
static const char *why_no_restart(int code)
{
    return code == WRONG_USAGE   ? "wrong usage or configuration does not get better by another start"
           : code == INTERRUPTED ? "it was told to stop"
                                 : NULL;
}

static int run_attempts(launch *run)
{
    /* a machine that comes late begins with a later attempt */
    for (int attempt = 0;; attempt = run->now.attempt + 1) {
        attempt_once(run, attempt);
        if (run->end == NODE_DONE) return 0;
        if (run->end == NODE_INTERRUPTED) return INTERRUPTED;
        if (run->end == NODE_OVER) return run->code;
        /* a program that never ran does not run the next time */
        const bool ran = run->failed || (run->own.num_nodes > 1 && run->now.world_size > 0);
        if (run->end == NODE_LOST || !ran || run->now.attempt >= run->own.max_restarts) {
            print_summary(run);
            return run->code;
        }
        const int code = agreed_code(run);
        if (why_no_restart(code)) {
            print_summary(run);
            say("exit code %d is not started again: %s", code, why_no_restart(code));
            return code;
        }
        say("starting all ranks again, restart %d of %d", run->now.attempt + 1, run->own.max_restarts);
    }
}

static void say_threads(const options *own)
{
    const char *threads = getenv("OMP_NUM_THREADS");
    const int each = own->num_cores / own->num_ranks;
    if (threads && *threads) return;
    say("OMP_NUM_THREADS is set to %d for each rank: %d core%s, %d ranks", each > 0 ? each : 1, own->num_cores,
        plural(own->num_cores), own->num_ranks);
}

int main(int argc, char **argv)
{
    launch run = {.end = NODE_RUNS};
    int code;
    if (!options_parse(argc, argv, &run.own, &code)) return code;
    run.signals = open_signals();
    run.ranks = calloc((size_t)run.own.num_ranks, sizeof *run.ranks);
    run.polls = calloc(1 + 2 * (size_t)run.own.num_ranks, sizeof *run.polls);
    if (run.signals < 0 || !run.ranks || !run.polls) {
        say("error: cannot start: %s", strerror(errno));
        code = 1;
    } else {
        code = nodes_open(&run.all, &run.own);
        if (code == 0) {
            if (run.own.num_ranks > 1) say_threads(&run.own);
            code = run_attempts(&run);
        }
    }
    nodes_close(&run.all, code);
    free(run.ranks);
    free(run.polls);
    return code;
}
