/* Protects: a run of several ranks that is disturbed at random moments - a rank killed or stopped, the launcher killed,
 * the disk full, the newest checkpoint cut short - ends with the weights and the metrics of the undisturbed run. */
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "background.h"
#include "base/file.h"
#include "comm/net.h"
#include "train.h"

enum { RANKS_MIN = 2, RANKS_MAX = 4, STEPS = 24, RUNS = 6, EVENTS_MAX = 3, DISK_MIB = 96, FULL_MS = 400 };

typedef enum event { KILL_RANK, STOP_RANK, KILL_LAUNCHER, CUT_CHECKPOINT, FILL_DISK, EVENTS } event;
static const char *const event_names[EVENTS] = {"a rank killed", "a rank stopped", "the launcher killed",
                                                "the newest checkpoint cut short", "the disk full"};

typedef struct chaos {
    const char *disk; /* a file system of its own, or NULL with the reason */
    const char *why_no_disk;
    const char *whole[RANKS_MAX + 1]; /* the undisturbed run with that many ranks */
    int64_t took[RANKS_MAX + 1];      /* milliseconds */
    test_rng rng;
} chaos;

/* One run and what happens to it. */
typedef struct victim {
    const char *directory, *log;
    int ranks, starts;
    pid_t launcher;
    pid_t hit[EVENTS_MAX]; /* ranks that were killed or stopped */
} victim;

static void sleep_ms(int64_t milliseconds)
{
    nanosleep(&(struct timespec){.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000L}, NULL);
}

/* ---- a disk that can be full ------------------------------------------------------------------------------------ */

/* Mounts belong to a name space of this process, so that they end with it. */
static const char *make_disk(const char **why)
{
    const char *path = test_path("%s/disk", test_dir());
    assert_int_equal(mkdir(path, 0777), 0);
    *why = NULL;
    if (geteuid() != 0)
        *why = "only root may mount";
    else if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
             mount("none", path, "tmpfs", 0, test_path("size=%dm", DISK_MIB)) != 0)
        *why = strerror(errno);
    return *why ? NULL : path;
}

static void fill_disk(const char *disk)
{
    static const char block[1 << 16];
    const char *path = test_path("%s/filler", disk);
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    assert_true(fd >= 0);
    ssize_t written;
    do written = write(fd, block, sizeof block);
    while (written > 0);
    assert_int_equal(errno, ENOSPC);
    sleep_ms(FULL_MS);
    close(fd);
    assert_int_equal(unlink(path), 0);
}

/* ---- a run ------------------------------------------------------------------------------------------------------ */

static void start_launcher(victim *own, const char *config)
{
    const char *limit = getenv("MTP_TEST_TIME_LIMIT");
    own->log = test_path("%s.log%d", own->directory, own->starts++);
    own->launcher = test_start(own->log, (const char *const[]){MTP_TEST_LAUNCHER,
                                                               test_path("--nproc-per-node=%d", own->ranks),
                                                               "--max-restarts=200",
                                                               test_path("--time-limit=%s", limit ? limit : "5"),
                                                               "--heartbeat=0.5",
                                                               "--stop-seconds=1",
                                                               MTP_TEST_PROGRAM,
                                                               "train",
                                                               config,
                                                               "--resume",
                                                               "auto",
                                                               "--set",
                                                               test_path("output_dir=%s", own->directory),
                                                               "--set",
                                                               test_path("max_steps=%d", STEPS),
                                                               "--set",
                                                               "tokens_per_batch=64",
                                                               "--set",
                                                               "overlong=truncate",
                                                               "--set",
                                                               "save_steps=2",
                                                               "--set",
                                                               "keep_last=3",
                                                               NULL});
}

/* Whether the launcher has ended, with its exit code. */
static bool has_ended(victim *own, int *code)
{
    int status;
    if (waitpid(own->launcher, &status, WNOHANG) != own->launcher) return false;
    *code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return true;
}

/* A child of the launcher; 0 when it has none now. */
static pid_t any_rank(chaos *all, const victim *own)
{
    pid_t pids[RANKS_MAX];
    int count = 0;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)own->launcher, (int)own->launcher);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    while (count < RANKS_MAX && fscanf(file, "%d", &pids[count]) == 1) count++;
    fclose(file);
    return count ? pids[test_below(&all->rng, count)] : 0;
}

/* A file of the newest checkpoint loses its second half. */
static bool cut_newest(const victim *own)
{
    bool cut = false;
    const char *checkpoints = test_path("%s/checkpoints", own->directory);
    mtp__name_list names = {0};
    struct stat info;
    if (stat(checkpoints, &info) != 0) return false;
    assert_ok(mtp__dir_list(checkpoints, MTP__LIST_DIRECTORIES, NULL, &names));
    const char *newest = NULL;
    int count = 0;
    for (size_t i = 0; i < names.count; i++) {
        if (strncmp(names.names[i], "step-", 5) != 0 || strchr(names.names[i], '.')) continue;
        newest = names.names[i];
        count++;
    }
    /* with no other one the run is refused, not begun anew */
    if (count > 1) {
        const char *directory = test_path("%s/%s", checkpoints, newest);
        mtp__name_list files = {0};
        assert_ok(mtp__dir_list(directory, MTP__LIST_FILES, NULL, &files));
        for (size_t i = 0; i < files.count; i++) {
            const char *file = test_path("%s/%s", directory, files.names[i]);
            if (stat(file, &info) != 0 || !strstr(file, ".safetensors")) continue;
            assert_int_equal(truncate(file, info.st_size / 2), 0);
            cut = true;
        }
        mtp__name_list_free(&files);
    }
    mtp__name_list_free(&names);
    return cut;
}

static void kill_launcher(victim *own)
{
    kill(own->launcher, SIGKILL);
    assert_int_equal(test_end(own->launcher), 128 + SIGKILL);
}

/* False: there was nothing to disturb. */
static bool make_happen(chaos *all, victim *own, const char *config, event what, pid_t *rank)
{
    bool done = true;
    switch (what) {
    case KILL_RANK:
    case STOP_RANK:
        *rank = any_rank(all, own);
        return *rank > 0 && kill(*rank, what == KILL_RANK ? SIGKILL : SIGSTOP) == 0;
    case KILL_LAUNCHER:
    case CUT_CHECKPOINT:
        kill_launcher(own);
        if (what == CUT_CHECKPOINT) done = cut_newest(own);
        start_launcher(own, config);
        return done;
    case FILL_DISK:
        fill_disk(all->disk);
        return true;
    case EVENTS:
        break;
    }
    return false;
}

static void assert_no_orphans(const victim *own)
{
    for (int i = 0; i < EVENTS_MAX; i++) {
        /* orphans are reaped by another process, which takes its time */
        for (int tries = 0; own->hit[i] > 0 && kill(own->hit[i], 0) == 0; tries++) {
            if (tries == 100) fail_msg("process %d lives on", (int)own->hit[i]);
            sleep_ms(100);
        }
    }
}

static void assert_same_run(const victim *own, const char *whole)
{
    size_t size, other_size;
    char *one = test_read(test_path("%s/export/model.safetensors", own->directory), &size);
    char *other = test_read(test_path("%s/export/model.safetensors", whole), &other_size);
    if (size != other_size || memcmp(one, other, size) != 0)
        fail_msg("the weights of %s differ from those of %s", own->directory, whole);
    free(one);
    free(other);
    one = test_train_metrics(own->directory);
    other = test_train_metrics(whole);
    if (strcmp(one, other) != 0) fail_msg("the metrics of %s differ:\n%s\nnot:\n%s", own->directory, one, other);
    free(one);
    free(other);
}

/* ---- all of it -------------------------------------------------------------------------------------------------- */

static void undisturbed(chaos *all, const char *config, int ranks)
{
    victim own = {.directory = test_path("%s/whole%d", test_dir(), ranks), .ranks = ranks};
    const int64_t start = mtp__net_now();
    start_launcher(&own, config);
    const int code = test_end(own.launcher);
    if (code != 0) fail_msg("exit code %d: %s", code, test_read(own.log, NULL));
    all->took[ranks] = mtp__net_now() - start;
    all->whole[ranks] = own.directory;
}

static void disturbed(chaos *all, const char *config, int number)
{
    victim own = {.directory = test_path("%s/run%d", all->disk ? all->disk : test_dir(), number),
                  .ranks = RANKS_MIN + (int)test_below(&all->rng, RANKS_MAX - RANKS_MIN + 1)};
    const int events = 1 + (int)test_below(&all->rng, EVENTS_MAX);
    int code = 0, kinds = all->disk ? EVENTS : FILL_DISK;
    bool ended = false;
    if (!all->whole[own.ranks]) undisturbed(all, config, own.ranks);
    start_launcher(&own, config);
    for (int i = 0; i < events && !ended; i++) {
        /* every kind comes as often as the others */
        const event what = (event)((number + i * 2) % kinds);
        sleep_ms(test_below(&all->rng, all->took[own.ranks]));
        ended = has_ended(&own, &code);
        if (ended) break;
        const bool done = make_happen(all, &own, config, what, &own.hit[i]);
        print_message("run %d, %d ranks: %s%s\n", number, own.ranks, event_names[what], done ? "" : " (was not there)");
    }
    if (!ended) code = test_end(own.launcher);
    if (code != 0) fail_msg("run %d: exit code %d: %s", number, code, test_read(own.log, NULL));
    assert_no_orphans(&own);
    assert_same_run(&own, all->whole[own.ranks]);
    assert_int_equal(system(test_path("rm -r %s %s.log*", own.directory, own.directory)), 0);
}

static void runs(void **state)
{
    (void)state;
#ifndef MTP_TEST_GLOO
    print_message("skipped: this build has no Gloo (MTP_GLOO=OFF)\n");
    skip();
#endif
    const char *count = getenv("MTP_CHAOS_RUNS"), *seed = getenv("MTP_CHAOS_SEED");
    chaos all = {.rng = {seed ? strtoull(seed, NULL, 10) : 11}};
    all.disk = make_disk(&all.why_no_disk);
    if (!all.disk) print_message("skipped: the disk is never full: %s\n", all.why_no_disk);
    const char *config = test_train_file("unset");
    for (int number = 0; number < (count ? atoi(count) : RUNS); number++) disturbed(&all, config, number);
    if (all.disk) umount2(all.disk, MNT_DETACH);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(runs)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
