/* Protects: several machines, here all on this one: they find each other, number the ranks and start again together;
 * one that is lost lets the rest go on where --nnodes allows it, one that comes back joins at the next restart; the
 * loss of node 0 ends the run; one with another secret stays outside. */
#include "support.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "background.h"
#include "comm/net.h"

static const char *free_endpoint(void)
{
    int fd, port;
    assert_ok(mtp__net_listen("127.0.0.1", 0, &fd, &port));
    close(fd);
    return test_path("127.0.0.1:%d", port);
}

static void two_nodes(void **state)
{
    (void)state;
    const char *dir = test_dir(), *endpoint = free_endpoint();
    const char *outs[2] = {test_path("%s/node0", dir), test_path("%s/node1", dir)};
    const char *const script = "echo rank $RANK of $WORLD_SIZE node $GROUP_RANK local $LOCAL_RANK port $MASTER_PORT; "
                               "[ $RANK = 2 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 7; "
                               "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && sleep 300; exit 0";
    pid_t pids[2];
    for (int node = 1; node >= 0; node--)
        pids[node] = test_start(
            outs[node], (const char *const[]){MTP_TEST_LAUNCHER, "--nnodes=2", test_path("--node-rank=%d", node),
                                              test_path("--nproc-per-node=%d", node + 1), "--rdzv-endpoint", endpoint,
                                              "--max-restarts=1", "sh", "-c", script, NULL});
    for (int node = 0; node < 2; node++)
        if (test_end(pids[node]) != 0) fail_msg("node %d: %s", node, test_read(outs[node], NULL));
    test_file_says(outs[0], "[0] rank 0 of 3 node 0 local 0 port ");
    test_file_says(outs[1], "[1] rank 1 of 3 node 1 local 0 port ");
    test_file_says(outs[1], "[2] rank 2 of 3 node 1 local 1 port ");
    test_file_says(outs[0], "another machine reports: rank 2 ");
    test_file_says(outs[0], "restart 1 of 1");
}

/* What one machine ends with for good ends the others too, whatever became of their own ranks. */
static void a_final_code_ends_all(void **state)
{
    (void)state;
    const char *dir = test_dir(), *endpoint = free_endpoint();
    const char *const script = "[ $RANK = 1 ] && exit 2; sleep 300";
    pid_t pids[2];
    for (int node = 0; node < 2; node++)
        pids[node] = test_start(test_path("%s/node%d", dir, node),
                                (const char *const[]){MTP_TEST_LAUNCHER, "--nnodes=2",
                                                      test_path("--node-rank=%d", node), "--rdzv-endpoint", endpoint,
                                                      "--max-restarts=5", "sh", "-c", script, NULL});
    for (int node = 0; node < 2; node++) {
        assert_int_equal(test_end(pids[node]), 2);
        test_file_says(test_path("%s/node%d", dir, node), "exit code 2 is not started again");
    }
}

static void another_secret(void **state)
{
    (void)state;
    const char *out = test_path("%s/node0", test_dir()), *endpoint = free_endpoint();
    /* one with another secret stays outside */
    const pid_t host =
        test_start(out, (const char *const[]){MTP_TEST_LAUNCHER, "--nnodes=2", "--node-rank=0", "--rdzv-endpoint",
                                              endpoint, "--join-seconds=3", "true", NULL});
    setenv("MTP_RDZV_SECRET", "another secret", 1);
    const char *const stranger[] = {
        MTP_TEST_LAUNCHER, "--nnodes=2", "--node-rank=1", "--rdzv-endpoint", endpoint, "true", NULL};
    test_expect(test_execute(stranger), 2, "", "MTP_RDZV_SECRET");
    setenv("MTP_RDZV_SECRET", "a secret of the test", 1);
    assert_int_equal(test_end(host), 1);
    test_file_says(out, "refused 127.0.0.1");
    test_file_says(out, "node 1 of 2 did not come within 3 s");
}

/* ---- machines that are lost and come back ------------------------------------------------------------------------ */

typedef struct machine {
    const char *out;
    pid_t pid;
} machine;

/* A rank waits for a file `end<attempt>` that says its exit code. */
static machine start_machine(const char *dir, const char *endpoint, const char *nnodes, int node,
                             const char *time_limit, const char *name)
{
    machine made = {.out = test_path("%s/%s", dir, name)};
    const char *script =
        test_path("n=$TORCHELASTIC_RESTART_COUNT; echo try $n rank $RANK of $WORLD_SIZE node "
                  "$NODE_RANK group $GROUP_RANK of $GROUP_WORLD_SIZE; echo $$ > %s/up$n.$NODE_RANK.tmp; "
                  "mv %s/up$n.$NODE_RANK.tmp %s/up$n.$NODE_RANK; "
                  "while [ ! -s %s/end$n ]; do sleep 0.05; done; exit $(cat %s/end$n)",
                  dir, dir, dir, dir, dir);
    made.pid =
        test_start(made.out, (const char *const[]){MTP_TEST_LAUNCHER, "--nnodes", nnodes,
                                                   test_path("--node-rank=%d", node), "--rdzv-endpoint", endpoint,
                                                   "--max-restarts=3", "--last-call=1", "--stop-seconds=5",
                                                   "--join-seconds=60", test_path("--time-limit=%s", time_limit),
                                                   "--heartbeat=0.2", "sh", "-c", script, NULL});
    return made;
}

static void end_attempt(const char *dir, int attempt, const char *code)
{
    test_write(test_path("%s/end%d.tmp", dir, attempt), code, strlen(code));
    assert_int_equal(rename(test_path("%s/end%d.tmp", dir, attempt), test_path("%s/end%d", dir, attempt)), 0);
}

static void assert_ends(const machine *one, int code)
{
    const int got = test_end(one->pid);
    if (got != code) fail_msg("exit code %d, not %d: %s", got, code, test_read(one->out, NULL));
}

/* Lost, noticed by its silence alone; the rest go on; it comes back. */
static void lost_and_back(void **state)
{
    (void)state;
    const char *dir = test_dir(), *endpoint = free_endpoint();
    const machine host = start_machine(dir, endpoint, "1:2", 0, "2", "host");
    const machine other = start_machine(dir, endpoint, "1:2", 1, "2", "other");
    for (int node = 0; node < 2; node++) test_wait_for_file(test_path("%s/up0.%d", dir, node));
    kill(other.pid, SIGKILL);
    test_end(other.pid);
    assert_true(test_process_gone(test_path("%s/up0.1", dir)));
    test_wait_for_file(test_path("%s/up1.0", dir));
    test_file_says(host.out, "machine 1 (");
    test_file_says(host.out, "has given no sign of life for ");
    test_file_says(host.out, "[0] try 1 rank 0 of 1 node 0 group 0 of 1");
    const machine back = start_machine(dir, endpoint, "1:2", 1, "2", "back");
    test_wait_for_text(back.out, "joins at the next restart");
    end_attempt(dir, 1, "1");
    for (int node = 0; node < 2; node++) test_wait_for_file(test_path("%s/up2.%d", dir, node));
    end_attempt(dir, 2, "0");
    assert_ends(&host, 0);
    assert_ends(&back, 0);
    test_file_says(back.out, "[1] try 2 rank 1 of 2 node 1 group 1 of 2");
}

/* Back before anybody has noticed: the run starts again at once. */
static void back_at_once(void **state)
{
    (void)state;
    const char *dir = test_dir(), *endpoint = free_endpoint();
    const machine host = start_machine(dir, endpoint, "2", 0, "60", "host");
    const machine other = start_machine(dir, endpoint, "2", 1, "60", "other");
    for (int node = 0; node < 2; node++) test_wait_for_file(test_path("%s/up0.%d", dir, node));
    kill(other.pid, SIGKILL);
    test_end(other.pid);
    const machine back = start_machine(dir, endpoint, "2", 1, "60", "back");
    for (int node = 0; node < 2; node++) test_wait_for_file(test_path("%s/up1.%d", dir, node));
    end_attempt(dir, 1, "0");
    assert_ends(&host, 0);
    assert_ends(&back, 0);
    test_file_says(host.out, "reports: machine 1 was lost and has been started anew");
}

/* A machine for which the run ends while it waits. */
static void too_late(void **state)
{
    (void)state;
    const char *dir = test_dir(), *endpoint = free_endpoint();
    const machine host = start_machine(dir, endpoint, "1:2", 0, "2", "host");
    test_wait_for_file(test_path("%s/up0.0", dir));
    const machine late = start_machine(dir, endpoint, "1:2", 1, "2", "late");
    test_wait_for_text(late.out, "joins at the next restart");
    end_attempt(dir, 0, "0");
    assert_ends(&host, 0);
    assert_ends(&late, 0);
    test_file_says(late.out, "the run has ended, with exit code 0, before this machine took part");
}

static void node_0_lost(void **state)
{
    (void)state;
    const char *dir = test_dir(), *endpoint = free_endpoint();
    const machine host = start_machine(dir, endpoint, "1:2", 0, "2", "host");
    const machine other = start_machine(dir, endpoint, "1:2", 1, "2", "other");
    for (int node = 0; node < 2; node++) test_wait_for_file(test_path("%s/up0.%d", dir, node));
    kill(host.pid, SIGKILL);
    test_end(host.pid);
    assert_ends(&other, 1);
    test_file_says(other.out, "node 0, which hosts the store at ");
    test_file_says(other.out, ", is lost: the run ends");
    for (int node = 0; node < 2; node++) assert_true(test_process_gone(test_path("%s/up0.%d", dir, node)));
}

int main(void)
{
    setenv("MTP_RDZV_SECRET", "a secret of the test", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_nodes),     cmocka_unit_test(a_final_code_ends_all), cmocka_unit_test(another_secret),
        cmocka_unit_test(lost_and_back), cmocka_unit_test(back_at_once),          cmocka_unit_test(too_late),
        cmocka_unit_test(node_0_lost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
