/* Protects: training whose ranks no launcher looks after: one that is killed or stopped is named by the others, which
 * end within the time limit; and training on machines of which one is lost: the other goes on from the checkpoint that
 * both wrote. */
#include "support.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "background.h"
#include "comm/net.h"
#include "train.h"

enum { RANKS = 2 };

static const char *free_port(void)
{
    int fd, port;
    assert_ok(mtp__net_listen("127.0.0.1", 0, &fd, &port));
    close(fd);
    return test_path("%d", port);
}

static const char *setting(const char *name, const char *value)
{
    return test_path("%s=%s", name, value);
}

/* Longer where everything is slow: a sanitizer. */
static const char *time_limit(void)
{
    const char *set = getenv("MTP_TEST_TIME_LIMIT");
    return set ? set : "6";
}

static long size_of(const char *path)
{
    struct stat there;
    return stat(path, &there) == 0 ? (long)there.st_size : -1;
}

/* Until a file that grows does not grow any more. */
static void wait_for_rest(const char *path)
{
    const struct timespec pause = {.tv_sec = 1};
    for (long before = -1, now = 0; now <= 0 || now != before;) {
        before = now;
        nanosleep(&pause, NULL);
        now = size_of(path);
    }
}

static void fill_pipe(const char *path)
{
    const int fd = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    assert_true(fd >= 0);
    while (write(fd, "-", 1) == 1) continue;
    close(fd);
}

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SIGNALS_WAIT
#endif
#elif defined(__SANITIZE_THREAD__)
#define SIGNALS_WAIT
#endif

typedef struct run {
    const char *directory;
    const char *logs[RANKS];
    pid_t pids[RANKS];
} run;

/* Two ranks with torchrun's environment and nobody above them. Rank 0 hosts the store, and speaks to `log`; NULL: to a
 * file. */
static run start_ranks(const char *log, const char *limit)
{
    run made = {.directory = test_path("%s/run", test_dir())};
    const char *config = test_train_file(made.directory), *port = free_port();
    for (int rank = 0; rank < RANKS; rank++) {
        const char *number = test_path("%d", rank);
        made.logs[rank] = log && rank == 0 ? log : test_path("%s/log%d", test_dir(), rank);
        made.pids[rank] = test_start(
            made.logs[rank],
            (const char *const[]){"/usr/bin/env", setting("RANK", number), setting("LOCAL_RANK", number),
                                  "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", setting("MTP_RDZV_PORT", port),
                                  setting("MTP_COMM_TIME_LIMIT", limit), "MTP_COMM_HEARTBEAT=0.5", MTP_TEST_PROGRAM,
                                  "train", config, "--set", "max_steps=100000", "--set", "save_steps=2", NULL});
    }
    test_wait_for_file(test_path("%s/checkpoints/step-00000002", made.directory));
    return made;
}

static void assert_names(const run *own, int rank, int lost)
{
    test_file_says(own->logs[rank], test_path("rank %d (", lost));
    test_file_says(own->logs[rank], test_path("process %d)", (int)own->pids[lost]));
}

static void check_loss(int signal_number)
{
    const run own = start_ranks(NULL, time_limit());
    kill(own.pids[1], signal_number);
    const int code = test_end(own.pids[0]);
    if (code != 1) fail_msg("exit code %d: %s", code, test_read(own.logs[0], NULL));
    assert_names(&own, 0, 1);
    kill(own.pids[1], SIGKILL);
    test_end(own.pids[1]);
}

static void killed(void **state)
{
    (void)state;
#ifndef MTP_TEST_GLOO
    print_message("skipped: this build has no Gloo (MTP_GLOO=OFF)\n");
    skip();
#endif
    check_loss(SIGKILL);
}

static void stopped(void **state)
{
    (void)state;
#ifndef MTP_TEST_GLOO
    print_message("skipped: this build has no Gloo (MTP_GLOO=OFF)\n");
    skip();
#endif
    check_loss(SIGSTOP);
}

/* Rank 0 hangs in a write to a pipe that nobody reads when the other is lost: it ends all the same. */
static void lost_while_hanging(void **state)
{
    (void)state;
#ifndef MTP_TEST_GLOO
    print_message("skipped: this build has no Gloo (MTP_GLOO=OFF)\n");
    skip();
#endif
#ifdef SIGNALS_WAIT
    print_message("skipped: ThreadSanitizer keeps a signal back until the write that hangs is over\n");
    skip();
#endif
    const char *pipe_path = test_path("%s/pipe", test_dir());
    assert_int_equal(mkfifo(pipe_path, 0600), 0);
    const int unread = open(pipe_path, O_RDWR | O_CLOEXEC);
    assert_true(unread >= 0 && fcntl(unread, F_SETPIPE_SZ, 4096) > 0);
    const char *set = getenv("MTP_TEST_TIME_LIMIT");
    const run own = start_ranks(pipe_path, set ? set : "2");
    fill_pipe(pipe_path);
    wait_for_rest(test_path("%s/metrics.jsonl", own.directory));
    assert_int_equal(waitpid(own.pids[0], NULL, WNOHANG), 0);
    kill(own.pids[1], SIGKILL);
    test_end(own.pids[1]);
    assert_int_equal(test_end(own.pids[0]), 1);
    close(unread);
}

/* With rank 0 the store is gone too: nobody can say who was lost, and the other ends all the same. */
static void rank_0_killed(void **state)
{
    (void)state;
#ifndef MTP_TEST_GLOO
    print_message("skipped: this build has no Gloo (MTP_GLOO=OFF)\n");
    skip();
#endif
    const run own = start_ranks(NULL, time_limit());
    kill(own.pids[0], SIGKILL);
    assert_int_equal(test_end(own.pids[1]), 1);
    test_file_says(own.logs[1], "the store is lost");
    test_end(own.pids[0]);
}

/* ---- machines -----------------------------------------------------------------------------------------------------
 */

static pid_t start_machine(int node, const char *endpoint, const char *config, const char *directory, const char *log)
{
    return test_start(log, (const char *const[]){MTP_TEST_LAUNCHER,
                                                 "--nnodes=1:2",
                                                 test_path("--node-rank=%d", node),
                                                 "--rdzv-endpoint",
                                                 endpoint,
                                                 "--max-restarts=3",
                                                 "--last-call=2",
                                                 setting("--time-limit", time_limit()),
                                                 "--heartbeat=0.5",
                                                 "--stop-seconds=5",
                                                 MTP_TEST_PROGRAM,
                                                 "train",
                                                 config,
                                                 "--resume",
                                                 "auto",
                                                 "--set",
                                                 test_path("output_dir=%s", directory),
                                                 "--set",
                                                 "max_steps=60",
                                                 "--set",
                                                 "save_steps=2",
                                                 NULL});
}

static void a_machine_is_lost(void **state)
{
    (void)state;
#ifndef MTP_TEST_GLOO
    print_message("skipped: this build has no Gloo (MTP_GLOO=OFF)\n");
    skip();
#endif
    const char *directory = test_path("%s/run", test_dir()), *config = test_train_file("unset");
    const char *endpoint = test_path("127.0.0.1:%s", free_port());
    const char *logs[] = {test_path("%s/host", test_dir()), test_path("%s/other", test_dir())};
    pid_t pids[2];
    setenv("MTP_RDZV_SECRET", "a secret of the test", 1);
    for (int node = 0; node < 2; node++) pids[node] = start_machine(node, endpoint, config, directory, logs[node]);
    test_wait_for_file(test_path("%s/checkpoints/step-00000002", directory));
    kill(pids[1], SIGKILL);
    test_end(pids[1]);
    const int code = test_end(pids[0]);
    if (code != 0) fail_msg("exit code %d: %s", code, test_read(logs[0], NULL));
    test_file_says(logs[0], "2 machines of at most 2, 2 ranks in all");
    test_file_says(logs[0], "1 machine of at most 2, 1 rank in all");
    test_file_says(logs[0], "going on from");
    assert_int_equal(access(test_path("%s/export/model.safetensors", directory), F_OK), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(killed), cmocka_unit_test(stopped),
                                       cmocka_unit_test(lost_while_hanging), cmocka_unit_test(rank_0_killed),
                                       cmocka_unit_test(a_machine_is_lost)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
