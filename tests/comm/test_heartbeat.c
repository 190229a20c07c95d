/* Protects: a rank that is killed or stopped is noticed within the time limit while the others are in no collective,
 * and while they wait in one; it is named, as is one that never came; one that leaves in good order is not taken for
 * lost, nor its store missed.
 */
#include "support.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "comm/net.h"
#include "mtp/comm.h"

enum { RANKS = 3, VICTIM = 1, WRONG = 3, LIMIT = 2 };

typedef struct told {
    _Atomic int times;
    char message[2048];
} told;

typedef int (*body_function)(mtp_comm *comm, told *failure);

static void sleep_ms(int milliseconds)
{
    nanosleep(&(struct timespec){.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000L}, NULL);
}

static int wrong(int line, const char *what)
{
    fprintf(stderr, "rank %s: line %d: %s: %s\n", getenv("RANK"), line, what, mtp_last_error()->message);
    return WRONG;
}
#define WRONG_HERE(what) wrong(__LINE__, what)

static void note(void *user, const char *message)
{
    told *failure = user;
    snprintf(failure->message, sizeof failure->message, "%s", message);
    failure->times++;
}

static int be_rank(int rank, body_function body)
{
    told failure = {0};
    mtp_comm *comm;
    char number[16];
    const mtp_comm_options options = {.seconds = LIMIT, .heartbeat_seconds = 0.1, .failed = note, .user = &failure};
    snprintf(number, sizeof number, "%d", rank);
    setenv("RANK", number, 1);
    setenv("LOCAL_RANK", number, 1);
    if (mtp_comm_create(&options, &comm) != MTP_OK) return WRONG_HERE("create");
    const int code = body(comm, &failure);
    const mtp_error last = *mtp_last_error();
    mtp_comm_free(comm);
    /* freeing does not hide why */
    if (last.status != MTP_OK && strcmp(last.message, mtp_last_error()->message) != 0) return WRONG_HERE("the record");
    return code;
}

/* Rank 0 hosts the store unless an endpoint is set. */
static void run_world(body_function body, int status[RANKS])
{
#ifndef MTP_TEST_GLOO
    print_message("skipped: this build has no Gloo (MTP_GLOO=OFF)\n");
    skip();
#endif
    int fd, port;
    pid_t pids[RANKS];
    assert_ok(mtp__net_listen("127.0.0.1", 0, &fd, &port));
    close(fd);
    setenv("MTP_RDZV_PORT", test_path("%d", port), 1);
    setenv("WORLD_SIZE", "3", 1);
    setenv("LOCAL_WORLD_SIZE", "3", 1);
    for (int rank = 0; rank < RANKS; rank++) {
        pids[rank] = fork();
        if (pids[rank] == 0) _exit(be_rank(rank, body));
        assert_true(pids[rank] > 0);
    }
    for (int left = RANKS; left > 0;) {
        int ended;
        const pid_t pid = waitpid(-1, &ended, WUNTRACED);
        assert_true(pid > 0);
        for (int rank = 0; rank < RANKS; rank++) {
            if (pids[rank] != pid) continue;
            status[rank] = ended;
            left--;
        }
    }
    kill(pids[VICTIM], SIGKILL);
    waitpid(pids[VICTIM], NULL, 0);
}

static void assert_all(const int status[RANKS])
{
    for (int rank = 0; rank < RANKS; rank++)
        if (rank != VICTIM && status[rank] != 0) fail_msg("rank %d has status %x", rank, (unsigned)status[rank]);
}

/* ---- lost ranks -------------------------------------------------------------------------------------------------- */

static int expect_loss(mtp_comm *comm, const told *failure)
{
    float value = 1;
    if (mtp_comm_check(comm) != MTP_E_BACKEND) return WRONG_HERE("no failure");
    if (!strstr(mtp_last_error()->message, "rank 1 (") || !strstr(mtp_last_error()->message, "no sign of life"))
        return WRONG_HERE("the message");
    if (mtp_comm_all_reduce(comm, &value, 1, MTP_F32, MTP_REDUCE_SUM) != MTP_E_BACKEND) return WRONG_HERE("all-reduce");
    /* the callback comes right behind */
    for (int i = 0; i < 500 && failure->times == 0; i++) sleep_ms(10);
    if (failure->times != 1 || !strstr(failure->message, "rank 1 (")) return WRONG_HERE("the callback");
    return 0;
}

static int wait_outside(mtp_comm *comm, told *failure)
{
    for (int i = 0; i < 3000 && mtp_comm_check(comm) == MTP_OK; i++) sleep_ms(10);
    return expect_loss(comm, failure);
}

static int killed_outside(mtp_comm *comm, told *failure)
{
    if (mtp_comm_where(comm).rank == VICTIM) raise(SIGKILL);
    return wait_outside(comm, failure);
}

static int stopped_outside(mtp_comm *comm, told *failure)
{
    if (mtp_comm_where(comm).rank == VICTIM) raise(SIGSTOP);
    return wait_outside(comm, failure);
}

/* An operation that began late ends with the loss, before its own time limit: the message tells which it was. */
static int stopped_then_waited_for(mtp_comm *comm, told *failure)
{
    float value = 1;
    if (mtp_comm_where(comm).rank == VICTIM) raise(SIGSTOP);
    sleep_ms(LIMIT * 500);
    if (mtp_comm_all_reduce(comm, &value, 1, MTP_F32, MTP_REDUCE_SUM) != MTP_E_BACKEND) return WRONG_HERE("all-reduce");
    return expect_loss(comm, failure);
}

static void lost(void **state)
{
    (void)state;
    int status[RANKS];
    run_world(killed_outside, status);
    assert_true(WIFSIGNALED(status[VICTIM]));
    assert_all(status);
    run_world(stopped_outside, status);
    assert_true(WIFSTOPPED(status[VICTIM]));
    assert_all(status);
    run_world(stopped_then_waited_for, status);
    assert_all(status);
}

/* ---- no loss ----------------------------------------------------------------------------------------------------- */

/* Rank 0, which hosts the store, comes to its end first; then rank 1; rank 2 goes on for longer than the limit. */
static int leave_in_turn(mtp_comm *comm, told *failure)
{
    const int rank = mtp_comm_where(comm).rank;
    for (int i = 0; i < rank * LIMIT * 60; i++) {
        if (mtp_comm_check(comm) != MTP_OK) return WRONG_HERE("a failure");
        sleep_ms(10);
    }
    return failure->times == 0 ? 0 : WRONG_HERE("the callback");
}

static void left(void **state)
{
    (void)state;
    int status[RANKS];
    run_world(leave_in_turn, status);
    assert_all(status);
    assert_int_equal(status[VICTIM], 0);
}

static void settings(void **state)
{
    (void)state;
    mtp_comm *comm;
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    mtp_comm_options options = {.seconds = 6, .heartbeat_seconds = 3};
    assert_fails(mtp_comm_create(&options, &comm), MTP_E_CONFIG, "a heartbeat every 3 s is too rare");
    options = (mtp_comm_options){.logger = NULL};
    setenv("MTP_COMM_TIME_LIMIT", "soon", 1);
    assert_fails(mtp_comm_create(&options, &comm), MTP_E_CONFIG, "MTP_COMM_TIME_LIMIT is 'soon'");
    setenv("MTP_COMM_TIME_LIMIT", "9", 1);
    setenv("MTP_COMM_HEARTBEAT", "3.5", 1);
    assert_fails(mtp_comm_create(&options, &comm), MTP_E_CONFIG, "a heartbeat every 3.5 s is too rare");
    unsetenv("MTP_COMM_HEARTBEAT");
    assert_ok(mtp_comm_create(&options, &comm));
    assert_ok(mtp_comm_check(comm));
    mtp_comm_free(comm);
    unsetenv("MTP_COMM_TIME_LIMIT");
}

/* A rank that is not started is named, not the keys that it would have set. */
static void missing(void **state)
{
    (void)state;
#ifndef MTP_TEST_GLOO
    print_message("skipped: this build has no Gloo (MTP_GLOO=OFF)\n");
    skip();
#endif
    mtp_comm *comm;
    const mtp_comm_options options = {.seconds = 0.9, .heartbeat_seconds = 0.3};
    int fd, port;
    assert_ok(mtp__net_listen("127.0.0.1", 0, &fd, &port));
    close(fd);
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "3", 1);
    setenv("LOCAL_WORLD_SIZE", "3", 1);
    setenv("MTP_RDZV_PORT", test_path("%d", port), 1);
    assert_fails(mtp_comm_create(&options, &comm), MTP_E_BACKEND, "did not come within 0.9 s: 1, 2; are they started");
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    unsetenv("LOCAL_WORLD_SIZE");
    unsetenv("MTP_RDZV_PORT");
}

int main(void)
{
    setenv("TORCHELASTIC_RUN_ID", "test", 1);
    const struct CMUnitTest tests[] = {cmocka_unit_test(lost), cmocka_unit_test(left), cmocka_unit_test(settings),
                                       cmocka_unit_test(missing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
