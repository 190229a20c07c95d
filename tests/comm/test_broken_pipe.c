/* Protects: ranks that live on when another dies at any moment of a collective or of the meeting before it: they get an
 * error, and no SIGPIPE ends them; and what the program does with SIGPIPE stays its own choice. */
#include "support.h"

#include <errno.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/broken_pipe.h"
#include "comm/collectives.h"
#include "comm/net.h"

enum { RANKS = 3, VICTIM = 1, WRONG = 3 };

static const char secret[] = "a secret of the test";

/* ---- the mask of a thread ---------------------------------------------------------------------------------------- */

static void write_to_nobody(void)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    close(ends[0]);
    assert_int_equal(write(ends[1], "x", 1), -1);
    assert_int_equal(errno, EPIPE);
    close(ends[1]);
}

static bool sigpipe_in(int (*ask)(sigset_t *set))
{
    sigset_t set;
    assert_int_equal(ask(&set), 0);
    return sigismember(&set, SIGPIPE) == 1;
}

static int mask_of_thread(sigset_t *set)
{
    return pthread_sigmask(SIG_BLOCK, NULL, set);
}

static void mask(void **state)
{
    (void)state;
    mtp__broken_pipe held;
    mtp__broken_pipe_hold(&held);
    write_to_nobody();
    mtp__broken_pipe_release(&held);
    assert_false(sigpipe_in(mask_of_thread));
    assert_false(sigpipe_in(sigpending));

    /* one that the program holds back itself is its own: it stays blocked and pending */
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    assert_int_equal(pthread_sigmask(SIG_BLOCK, &set, NULL), 0);
    mtp__broken_pipe_hold(&held);
    write_to_nobody();
    mtp__broken_pipe_release(&held);
    assert_true(sigpipe_in(mask_of_thread));
    assert_false(sigpipe_in(sigpending));
    write_to_nobody();
    mtp__broken_pipe_hold(&held);
    write_to_nobody();
    mtp__broken_pipe_release(&held);
    assert_true(sigpipe_in(sigpending));
    int got;
    assert_int_equal(sigwait(&set, &got), 0);
    assert_int_equal(pthread_sigmask(SIG_UNBLOCK, &set, NULL), 0);
}

/* ---- a death ----------------------------------------------------------------------------------------------------- */

/* In a process of its own: this one must fork, so it may not have threads. */
static pid_t host_store(int *port)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    const pid_t pid = fork();
    if (pid == 0) {
        const mtp_store_server_options options = {.secret = secret};
        mtp_store_server *server;
        if (mtp_store_server_start(&options, &server) != MTP_OK) _exit(WRONG);
        const int bound = mtp_store_server_port(server);
        if (write(ends[1], &bound, sizeof bound) != sizeof bound) _exit(WRONG);
        for (;;) pause();
    }
    assert_true(pid > 0);
    assert_int_equal(read(ends[0], port, sizeof *port), sizeof *port);
    close(ends[0]);
    close(ends[1]);
    return pid;
}

/* Add up until it fails: 0 when that is an error of the backend, and SIGPIPE is as it was. */
static int add_up(mtp__collectives *ranks)
{
    static float data[30000];
    mtp_status status = MTP_OK;
    struct sigaction action;
    for (size_t count = 1; status == MTP_OK; count = count * 3 % 29999 + 1)
        status = ranks->all_reduce(ranks->self, data, count, MTP_F32, MTP_REDUCE_MAX);
    ranks->free(ranks->self);
    if (sigaction(SIGPIPE, NULL, &action) != 0 || action.sa_handler != SIG_DFL) return WRONG;
    return status == MTP_E_BACKEND && !sigpipe_in(mask_of_thread) ? 0 : WRONG;
}

/* The victim dies that long after `meets`, or after it began to look for the others. */
static void be_rank(int rank, int port, const char *prefix, bool meets, long microseconds)
{
    const mtp_comm_place place = {.rank = rank, .world_size = RANKS, .local_rank = rank, .local_world_size = RANKS};
    mtp__collectives ranks;
    mtp_store *store;
    char endpoint[32];
    /* no handler: the kernel ends the victim wherever it is, as SIGKILL would */
    const struct itimerval moment = {.it_value = {.tv_usec = microseconds}};
    snprintf(endpoint, sizeof endpoint, "127.0.0.1:%d", port);
    if (mtp_store_connect(endpoint, secret, 20, &store) != MTP_OK) _exit(WRONG);
    if (!meets && rank == VICTIM && setitimer(ITIMER_REAL, &moment, NULL) != 0) _exit(WRONG);
    const mtp_status status = mtp__gloo_create(&place, store, prefix, "127.0.0.1", meets ? 2 : 0.5, &ranks);
    if (meets && rank == VICTIM && setitimer(ITIMER_REAL, &moment, NULL) != 0) _exit(WRONG);
    const int code = status == MTP_OK ? add_up(&ranks) : status == MTP_E_BACKEND ? 0 : WRONG;
    while (rank == VICTIM) pause();
    _exit(code);
}

static void one_death(int port, int round, bool meets, long microseconds)
{
    pid_t ranks[RANKS];
    char prefix[32];
    snprintf(prefix, sizeof prefix, "round%d/", round);
    for (int rank = 0; rank < RANKS; rank++) {
        ranks[rank] = fork();
        if (ranks[rank] == 0) be_rank(rank, port, prefix, meets, microseconds);
        assert_true(ranks[rank] > 0);
    }
    for (int rank = 0; rank < RANKS; rank++) {
        int status;
        assert_int_equal(waitpid(ranks[rank], &status, 0), ranks[rank]);
        if (rank == VICTIM ? !WIFSIGNALED(status) || WTERMSIG(status) != SIGALRM : status != 0)
            fail_msg("round %d, after %ld microseconds: rank %d has status %x", round, microseconds, rank,
                     (unsigned)status);
    }
}

static void any_moment(void **state)
{
    (void)state;
#ifndef MTP_TEST_GLOO
    print_message("skipped: this build has no Gloo (MTP_GLOO=OFF)\n");
    skip();
#endif
    int port, round = 0;
    const pid_t store = host_store(&port);
    const int64_t end = mtp__net_deadline(3);
    test_rng rng = {5};
    do one_death(port, round++, true, 1 + (long)test_below(&rng, 6000));
    while (mtp__net_now() < end);
    print_message("%d deaths in an all-reduce\n", round);
    /* these cost Gloo's time limits */
    one_death(port, round++, false, 1);
    one_death(port, round, false, 9000);
    kill(store, SIGKILL);
    waitpid(store, NULL, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(mask), cmocka_unit_test(any_moment)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
