/* Protects: mtprun: the environment of ranks is exactly what is documented; lines, logs, exit codes and the summary of
 * a failure are right; signals reach all; a rank that fails takes the others with it or starts all again; nothing that
 * a rank started outlives the run. */
#include "support.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "background.h"
#include "mtp/comm.h"

#define mtprun(...) test_execute((const char *const[]){MTP_TEST_LAUNCHER, __VA_ARGS__, NULL})

#define assert_says(text, part)                                                     \
    do {                                                                            \
        if (!strstr((text), (part))) fail_msg("no \"%s\" in:\n%s", (part), (text)); \
    } while (0)

static void assert_code(const test_run *run, int code)
{
    if (run->exit_code != code) fail_msg("exit code %d, not %d:\n%s%s", run->exit_code, code, run->out, run->err);
}

static int count_of(const char *text, const char *part)
{
    int count = 0;
    for (const char *at = strstr(text, part); at; at = strstr(at + 1, part)) count++;
    return count;
}

/* ---- the environment ------------------------------------------------------------------------------------------ */

static void assert_line(const char *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void assert_line(const char *text, const char *format, ...)
{
    char line[256];
    va_list args;
    line[0] = '\n';
    va_start(args, format);
    vsnprintf(line + 1, sizeof line - 2, format, args);
    va_end(args);
    strcat(line, "\n");
    assert_says(text, line);
}

static void environment(void **state)
{
    (void)state;
    test_run run = test_execute((const char *const[]){
        "/usr/bin/env", "-i", "KEPT=yes", "RANK=77", "TORCHELASTIC_USE_AGENT_STORE=True", MTP_TEST_LAUNCHER,
        "--nproc-per-node=3", "--max_restarts", "4", "--rdzv-id=job", "--master-port=4567", "/usr/bin/env", NULL});
    assert_code(&run, 0);
    char *text = malloc(strlen(run.out) + 2);
    sprintf(text, "\n%s", run.out);
    for (int rank = 0; rank < 3; rank++) {
        char start[8];
        snprintf(start, sizeof start, "\n[%d] ", rank);
        /* these and no others */
        assert_int_equal(count_of(text, start), 19);
        assert_line(text, "[%d] KEPT=yes", rank);
        assert_line(text, "[%d] RANK=%d", rank, rank);
        assert_line(text, "[%d] LOCAL_RANK=%d", rank, rank);
        assert_line(text, "[%d] ROLE_RANK=%d", rank, rank);
        assert_line(text, "[%d] WORLD_SIZE=3", rank);
        assert_line(text, "[%d] LOCAL_WORLD_SIZE=3", rank);
        assert_line(text, "[%d] NODE_RANK=0", rank);
        assert_line(text, "[%d] GROUP_RANK=0", rank);
        assert_line(text, "[%d] GROUP_WORLD_SIZE=1", rank);
        assert_line(text, "[%d] MASTER_ADDR=127.0.0.1", rank);
        assert_line(text, "[%d] MASTER_PORT=4567", rank);
        assert_line(text, "[%d] TORCHELASTIC_RESTART_COUNT=0", rank);
        assert_line(text, "[%d] TORCHELASTIC_MAX_RESTARTS=4", rank);
        assert_line(text, "[%d] TORCHELASTIC_RUN_ID=job", rank);
        assert_line(text, "[%d] MTP_COMM_TIME_LIMIT=60", rank);
        assert_line(text, "[%d] MTP_COMM_HEARTBEAT=5", rank);
    }
    assert_int_equal(count_of(text, "] MTP_RDZV_ENDPOINT=127.0.0.1:"), 3);
    assert_int_equal(count_of(text, "] MTP_RDZV_SECRET="), 3);
    assert_int_equal(count_of(text, "] OMP_NUM_THREADS="), 3);
    assert_int_equal(count_of(text, "AGENT_STORE"), 0);
    assert_int_equal(count_of(run.err, "OMP_NUM_THREADS"), 1);
    free(text);
    test_run_free(&run);
    /* one that is set stays, silently; a free MASTER_PORT is chosen */
    setenv("OMP_NUM_THREADS", "7", 1);
    run =
        mtprun("--standalone", "--nproc_per_node", "2", "sh", "-c", "echo threads $OMP_NUM_THREADS port $MASTER_PORT");
    unsetenv("OMP_NUM_THREADS");
    assert_code(&run, 0);
    assert_int_equal(count_of(run.out, "threads 7 port "), 2);
    assert_int_equal(count_of(run.out, "port 0"), 0);
    assert_string_equal(run.err, "");
    test_run_free(&run);
}

/* The default heartbeat, a third of a short time limit, arrives as no more than a third. */
static void short_time_limits(void **state)
{
    (void)state;
    static const char *const limits[] = {"0.2", "2", "5", "7"};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        test_run run = mtprun("--time-limit", limits[i], "sh", "-c", "echo heartbeat $MTP_COMM_HEARTBEAT");
        assert_code(&run, 0);
        const char *text = strstr(run.out, "heartbeat ");
        assert_non_null(text);
        const double heartbeat = strtod(text + strlen("heartbeat "), NULL);
        assert_true(heartbeat > 0 && heartbeat <= strtod(limits[i], NULL) / 3);
        test_run_free(&run);
    }
}

/* ---- the command line ----------------------------------------------------------------------------------------- */

static void wrong_usage(void **state)
{
    (void)state;
    static const struct {
        const char *arguments[6], *says;
    } cases[] = {
        {{NULL}, "no program"},
        {{"--nproc-per-node", "2"}, "no program"},
        {{"--nproc-per-nod", "2", "true"}, "did you mean '--nproc-per-node'"},
        {{"--nproc_per_node=0", "true"}, "from 1 to 1024, gpu, cpu or auto"},
        {{"--nnodes=x", "true"}, "N or MIN:MAX"},
        {{"--nnodes=2:1", "true"}, "N or MIN:MAX"},
        {{"--nnodes=1:2", "true"}, "--node-rank"},
        {{"--time-limit=10", "--heartbeat=4", "true"}, "at most a third"},
        {{"--heartbeat=-1", "true"}, "--heartbeat is '-1'"},
        {{"--nnodes=2", "true"}, "--node-rank"},
        {{"--nnodes=2", "--node-rank=0", "true"}, "--rdzv-endpoint"},
        {{"--nnodes=2", "--node-rank=0", "--rdzv-endpoint=127.0.0.1:4000", "true"}, "MTP_RDZV_SECRET"},
        {{"--node-rank=1", "true"}, "--node-rank is 1"},
        {{"--standalone", "--nnodes=2", "true"}, "--standalone"},
        {{"--standalone=yes", "true"}, "takes no value"},
        {{"--max-restarts=-1", "true"}, "--max-restarts is '-1'"},
        {{"--tee=4", "--log-dir=x", "true"}, "--tee is '4'"},
        {{"--redirects=0:1,", "--log-dir=x", "true"}, "--redirects is"},
        {{"--tee=3", "true"}, "--log-dir"},
        {{"--rdzv-endpoint=nowhere", "true"}, "HOST:PORT"},
        {{"--rdzv-id=a/b", "true"}, "--rdzv-id"},
        {{"-x", "true"}, "unknown option '-x'"},
        {{"--master-port"}, "needs a value"},
    };
    unsetenv("MTP_RDZV_SECRET");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *argv[8] = {MTP_TEST_LAUNCHER};
        for (int j = 0; j < 6 && cases[i].arguments[j]; j++) argv[j + 1] = cases[i].arguments[j];
        test_run run = test_execute(argv);
        assert_code(&run, 2);
        assert_says(run.err, cases[i].says);
        test_run_free(&run);
    }
    setenv("MTP_RDZV_SECRET", "short", 1);
    test_run run = mtprun("--nnodes=2", "--node-rank=1", "--rdzv-endpoint=127.0.0.1:4000", "true");
    unsetenv("MTP_RDZV_SECRET");
    assert_code(&run, 2);
    assert_says(run.err, "at least 8 letters");
    test_run_free(&run);
    run = mtprun("--help");
    assert_code(&run, 0);
    assert_says(run.out, "--nproc-per-node");
    test_run_free(&run);
}

static void programs(void **state)
{
    (void)state;
    const char *script = test_path("%s/hello.py", test_dir());
    static const char hello[] = "import os, sys\nprint('python', os.environ['RANK'], sys.argv[1:])\n";
    test_write(script, hello, sizeof hello - 1);
    test_run run = mtprun("--nproc-per-node=2", script, "--nproc-per-node", "x");
    assert_code(&run, 0);
    assert_says(run.out, "[0] python 0 ['--nproc-per-node', 'x']\n");
    assert_says(run.out, "[1] python 1 ");
    test_run_free(&run);
    run = mtprun("-m", "this");
    assert_code(&run, 0);
    assert_says(run.out, "[0] Beautiful is better than ugly.");
    test_run_free(&run);
    run = mtprun("--no-python", script); /* not executable */
    assert_code(&run, 1);
    assert_says(run.err, "cannot run");
    test_run_free(&run);
    run = mtprun("--max-restarts=2", "/no/such/program");
    assert_code(&run, 1);
    assert_int_equal(count_of(run.err, "cannot run '/no/such/program': No such file"), 1);
    test_run_free(&run);
    run = mtprun("--nproc-per-node=auto", "sh", "-c", "echo size $WORLD_SIZE");
    assert_code(&run, 0);
    assert_says(run.out, "[0] size ");
    test_run_free(&run);
}

/* ---- output --------------------------------------------------------------------------------------------------- */

static void output(void **state)
{
    (void)state;
    test_run run = mtprun("--nproc-per-node=3", "sh", "-c",
                          "i=0; while [ $i -lt 200 ]; do echo line $i of $RANK; i=$((i+1)); done; printf 'no end' >&2");
    assert_code(&run, 0);
    int lines = 0;
    for (char *line = strtok(run.out, "\n"); line; line = strtok(NULL, "\n"), lines++) {
        int rank, number, of;
        assert_int_equal(sscanf(line, "[%d] line %d of %d", &rank, &number, &of), 3);
        assert_int_equal(rank, of);
    }
    assert_int_equal(lines, 600);
    assert_says(run.err, "[2] no end\n");
    test_run_free(&run);

    const char *logs = test_path("%s/logs", test_dir());
    const char *const both = "echo out $RANK; echo err $RANK >&2";
    run = mtprun("--nproc-per-node=2", "--log-dir", logs, "--rdzv-id=a", "sh", "-c", both);
    assert_code(&run, 0);
    assert_says(run.out, "[1] out 1\n");
    char *text = test_read(test_path("%s/a/attempt_0/1/stdout.log", logs), NULL);
    assert_string_equal(text, "out 1\n");
    free(text);
    text = test_read(test_path("%s/a/attempt_0/0/stderr.log", logs), NULL);
    assert_string_equal(text, "err 0\n");
    free(text);
    test_run_free(&run);
    /* another run of the name takes nothing away */
    run = mtprun("--nproc-per-node=2", "--log-dir", logs, "--rdzv-id=a", "sh", "-c", "echo more");
    assert_code(&run, 0);
    text = test_read(test_path("%s/a/attempt_0/1/stdout.log", logs), NULL);
    assert_memory_equal(text, "out 1\n== mtprun: another run, ", 30);
    assert_string_equal(strstr(text, " ==\n"), " ==\nmore\n");
    free(text);
    test_run_free(&run);

    run = mtprun("--nproc-per-node=2", "--log-dir", logs, "--rdzv-id=b", "--redirects=1:3", "--tee", "0:2", "sh", "-c",
                 both);
    assert_code(&run, 0);
    assert_string_equal(run.out, "[0] out 0\n");
    assert_says(run.err, "[0] err 0\n");
    assert_int_equal(count_of(run.err, "err 1"), 0);
    text = test_read(test_path("%s/b/attempt_0/1/stderr.log", logs), NULL);
    assert_string_equal(text, "err 1\n");
    free(text);
    assert_int_equal(access(test_path("%s/b/attempt_0/0/stdout.log", logs), F_OK), -1);
    test_run_free(&run);
}

/* ---- failures ------------------------------------------------------------------------------------------------- */

static void failures(void **state)
{
    (void)state;
    const char *dir = test_dir();
    /* rank 1 fails in the middle; the others would go on for long, and have started processes of their own */
    const char *script =
        test_path("sleep 300 & echo $! > %s/child$RANK; echo begun; "
                  "if [ $RANK = 1 ]; then while [ ! -s %s/child0 ] || [ ! -s %s/child2 ]; do sleep 0.05; done; "
                  "echo the reason >&2; exit 3; fi; wait",
                  dir, dir, dir);
    test_run run = mtprun("--nproc-per-node=3", "sh", "-c", script);
    assert_code(&run, 3);
    assert_says(run.err, "First to fail: rank 1 on ");
    assert_says(run.err, "exit code 3. Its last lines:\n  [1] begun\n  [1] the reason\n");
    for (int rank = 0; rank < 3; rank++) assert_true(test_process_gone(test_path("%s/child%d", dir, rank)));
    test_run_free(&run);

    run = mtprun("--nproc-per-node=2", "sh", "-c", "[ $RANK = 0 ] && kill -9 $$; sleep 300");
    assert_code(&run, 1);
    assert_says(run.err, "rank 0");
    assert_says(run.err, "signal 9 (Killed)");
    assert_says(run.err, "(rank 0 printed nothing)");
    test_run_free(&run);

    /* one that does not care for SIGTERM is killed after --stop-seconds */
    run = mtprun("--nproc-per-node=2", "--stop-seconds=1", "sh", "-c",
                 "trap '' TERM; [ $RANK = 0 ] && sleep 0.3 && exit 5; while true; do sleep 0.1; done");
    assert_code(&run, 5);
    test_run_free(&run);
}

/* A stopped process ends of nothing: it is killed after the time limit, with what it started; the others start again.
 */
static void stopped(void **state)
{
    (void)state;
    const char *dir = test_dir();
    const char *script = test_path("[ $TORCHELASTIC_RESTART_COUNT = 1 ] && echo again && exit 0; "
                                   "echo $$ > %s/p$RANK; [ $RANK = 1 ] && kill -STOP $$; sleep 300",
                                   dir);
    test_run run = mtprun("--nproc-per-node=2", "--time-limit=1", "--max-restarts=1", "sh", "-c", script);
    assert_code(&run, 0);
    assert_says(run.err, "rank 1 (");
    assert_says(run.err, "stopped for 1 s (SIGSTOP or such), so killed; stopping the others");
    assert_says(run.out, "[1] again");
    for (int rank = 0; rank < 2; rank++) assert_true(test_process_gone(test_path("%s/p%d", dir, rank)));
    test_run_free(&run);
    /* one that goes on in time has only been slow */
    run = mtprun("--time-limit=20", "sh", "-c", "(sleep 0.5; kill -CONT $$) & kill -STOP $$; wait; echo went on");
    assert_code(&run, 0);
    assert_says(run.out, "went on");
    test_run_free(&run);
}

static void restarts(void **state)
{
    (void)state;
    test_run run = mtprun("--nproc-per-node=2", "--max-restarts=3", "sh", "-c",
                          "echo try $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; "
                          "[ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT -lt 2 ] && exit 1; exit 0");
    assert_code(&run, 0);
    assert_says(run.out, "[1] try 2 of 3");
    assert_int_equal(count_of(run.out, "try 3"), 0);
    assert_says(run.err, "restart 2 of 3");
    test_run_free(&run);
    run = mtprun("--max-restarts=1", "sh", "-c", "echo try; exit 4");
    assert_code(&run, 4);
    assert_int_equal(count_of(run.out, "try"), 2);
    assert_says(run.err, "failed after 1 restart. First");
    test_run_free(&run);
    /* a wrong configuration stays wrong; who was told to stop is not wanted */
    static const int final[] = {2, 130};
    for (int i = 0; i < 2; i++) {
        run = mtprun("--nproc-per-node=2", "--max-restarts=3", "--stop-seconds=1", "sh", "-c",
                     test_path("echo try; [ $RANK = 1 ] && exit %d; sleep 300", final[i]));
        assert_code(&run, final[i]);
        assert_true(count_of(run.out, "try") <= 2);
        assert_says(run.err, test_path("exit code %d is not started again", final[i]));
        test_run_free(&run);
    }
}

/* ---- signals -------------------------------------------------------------------------------------------------- */

static void interrupt(void **state)
{
    (void)state;
    const char *dir = test_dir(), *out = test_path("%s/out", dir);
    const int numbers[] = {SIGINT, SIGTERM};
    for (int i = 0; i < 2; i++) {
        const char *script = test_path("trap 'echo saved; exit 0' INT TERM; touch %s/up%d.$RANK; "
                                       "while true; do sleep 0.05; done",
                                       dir, i);
        const pid_t pid = test_start(out, (const char *const[]){MTP_TEST_LAUNCHER, "--nproc-per-node=2",
                                                                "--max-restarts=5", "sh", "-c", script, NULL});
        for (int rank = 0; rank < 2; rank++) test_wait_for_file(test_path("%s/up%d.%d", dir, i, rank));
        kill(pid, numbers[i]);
        assert_int_equal(test_end(pid), 130);
        test_file_says(out, "[0] saved");
        test_file_says(out, "[1] saved");
    }
    /* the second signal */
    const char *script = test_path("trap '' INT TERM; touch %s/deaf; while true; do sleep 0.05; done", dir);
    const pid_t pid = test_start(out, (const char *const[]){MTP_TEST_LAUNCHER, "sh", "-c", script, NULL});
    test_wait_for_file(test_path("%s/deaf", dir));
    kill(pid, SIGTERM);
    /* two signals of a kind that nobody has taken yet are one */
    test_wait_for_text(out, "passed on to all ranks");
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0);
    kill(pid, SIGTERM);
    assert_int_equal(test_end(pid), 130);
}

/* One rank was interrupted and the other, which agreed to end with it, still writes: it is not signalled at once. */
static void one_rank_is_interrupted(void **state)
{
    (void)state;
    test_run run =
        mtprun("--nproc-per-node=2", "sh", "-c",
               "[ $RANK = 1 ] && exit 130; trap 'echo cut; exit 1' TERM; sleep 0.7; echo complete; exit 130");
    assert_code(&run, 130);
    assert_says(run.out, "[0] complete");
    assert_int_equal(count_of(run.out, "cut"), 0);
    test_run_free(&run);
}

/* mtprun itself is killed: its ranks do not live on. */
static void launcher_killed(void **state)
{
    (void)state;
    const char *dir = test_dir(), *out = test_path("%s/out", dir);
    const char *script = test_path(
        "echo $$ > %s/p$RANK.tmp; mv %s/p$RANK.tmp %s/p$RANK; while true; do sleep 0.05; done", dir, dir, dir);
    const pid_t pid =
        test_start(out, (const char *const[]){MTP_TEST_LAUNCHER, "--nproc-per-node=2", "sh", "-c", script, NULL});
    for (int rank = 0; rank < 2; rank++) test_wait_for_file(test_path("%s/p%d", dir, rank));
    kill(pid, SIGKILL);
    test_end(pid);
    for (int rank = 0; rank < 2; rank++) assert_true(test_process_gone(test_path("%s/p%d", dir, rank)));
}

/* ---- what the environment is for ------------------------------------------------------------------------------ */

/* The program of the ranks: the sum of their numbers. */
static int add_up(void)
{
    const mtp_comm_options options = {.seconds = 30};
    mtp_comm *comm;
    if (mtp_comm_create(&options, &comm) != MTP_OK) return fprintf(stderr, "%s\n", mtp_last_error()->message), 1;
    float sum = (float)(mtp_comm_where(comm).rank + 1);
    const mtp_status status = mtp_comm_all_reduce(comm, &sum, 1, MTP_F32, MTP_REDUCE_SUM);
    printf("sum %g\n", status == MTP_OK ? (double)sum : -1.0);
    mtp_comm_free(comm);
    return status == MTP_OK ? 0 : 1;
}

static void collectives(void **state)
{
    (void)state;
#ifndef MTP_TEST_GLOO
    print_message("skipped: this build has no Gloo (MTP_GLOO=OFF)\n");
    skip();
#endif
    const char *const self = test_self();
    test_run run = mtprun("--nproc-per-node=3", self, "add_up");
    assert_code(&run, 0);
    assert_int_equal(count_of(run.out, "sum 6\n"), 3);
    test_run_free(&run);
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "add_up") == 0) return add_up();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(environment),
        cmocka_unit_test(short_time_limits),
        cmocka_unit_test(wrong_usage),
        cmocka_unit_test(programs),
        cmocka_unit_test(output),
        cmocka_unit_test(failures),
        cmocka_unit_test(restarts),
        cmocka_unit_test(interrupt),
        cmocka_unit_test(collectives),
        cmocka_unit_test(stopped),
        cmocka_unit_test(one_rank_is_interrupted),
        cmocka_unit_test(launcher_killed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
