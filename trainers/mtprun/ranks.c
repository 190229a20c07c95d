#include "ranks.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "say.h"

/* argv of a rank; the caller frees the array. */
static char **command_line(const options *own)
{
    static char python[] = "python3", unbuffered[] = "-u", module[] = "-m";
    size_t count = 0, used = 0;
    while (own->program[count]) count++;
    char **command = calloc(count + 4, sizeof *command);
    if (!command) return NULL;
    const size_t length = strlen(own->program[0]);
    const bool script = length > 3 && strcmp(own->program[0] + length - 3, ".py") == 0;
    if (!own->no_python && (script || own->module)) {
        command[used++] = python;
        command[used++] = unbuffered;
        if (own->module) command[used++] = module;
    }
    memcpy(command + used, own->program, count * sizeof *command);
    return command;
}

static bool make_dirs(char *path)
{
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        const bool made = mkdir(path, 0777) == 0 || errno == EEXIST;
        *slash = '/';
        if (!made) return false;
    }
    return true;
}

/* A log that an earlier run left is kept: this one is written behind it. */
static void begin_log(int fd)
{
    struct stat file;
    char line[96];
    const time_t now = time(NULL);
    struct tm parts;
    if (fstat(fd, &file) != 0 || file.st_size == 0 || !localtime_r(&now, &parts)) return;
    const size_t length = strftime(line, sizeof line, "== mtprun: another run, %Y-%m-%d %H:%M:%S ==\n", &parts);
    if (write(fd, line, length) < 0) return; /* nor will what follows be written */
}

/* The log of one stream; -1 and *wrong on failure. */
static int open_log(const options *own, const plan *now, int local, const char *name, bool *wrong)
{
    char path[4096];
    const int length =
        snprintf(path, sizeof path, "%s/%s/attempt_%d/%d/%s.log", own->log_dir, own->run_id, now->attempt, local, name);
    const bool fits = length > 0 && length < (int)sizeof path;
    const int fd = fits && make_dirs(path) ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
    if (fd < 0) say("error: the log %s: %s", path, fits ? strerror(errno) : "the path is too long");
    *wrong |= fd < 0;
    if (fd >= 0) begin_log(fd);
    return fd;
}

static bool open_stream(stream *to, const options *own, const plan *now, rank *one, int flag, int *write_end)
{
    int ends[2];
    const bool only_log = options_streams(own->redirects, one->local) & flag;
    const bool log = only_log || (options_streams(own->tee, one->local) & flag);
    bool wrong = false;
    *to = (stream){.fd = -1, .log = -1, .rank = one->global, .last = &one->last};
    to->console = only_log ? -1 : flag == STREAM_OUT ? STDOUT_FILENO : STDERR_FILENO;
    if (log) to->log = open_log(own, now, one->local, flag == STREAM_OUT ? "stdout" : "stderr", &wrong);
    if (wrong) return false;
    if (pipe2(ends, O_CLOEXEC) != 0) return say("error: no pipe for a rank: %s", strerror(errno)), false;
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    to->fd = ends[0];
    *write_end = ends[1];
    return true;
}

/* In the child. Ends with the errno in `report` when the program cannot be run. */
static void become(char *const *command, char *const *environment, int out, int err, int report, pid_t parent)
{
    sigset_t none;
    const int empty = open("/dev/null", O_RDONLY);
    setpgid(0, 0);
    /* mtprun was killed: nobody sees to this rank any more */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    /* a shell that starts mtprun in the background has it ignored, and a shell under us could not even trap it */
    signal(SIGINT, SIG_DFL);
    if (empty < 0 || dup2(empty, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) _exit(1);
    execvpe(command[0], command, environment);
    const int error = errno;
    if (write(report, &error, sizeof error) < 0) _exit(126);
    _exit(127);
}

/* 0, or why the program could not be run. */
static int start_process(rank *one, char *const *command, char *const *environment, int out, int err)
{
    int report[2], error = 0;
    const pid_t parent = getpid();
    if (pipe2(report, O_CLOEXEC) != 0) return errno;
    one->pid = fork();
    if (one->pid == 0) become(command, environment, out, err, report[1], parent);
    if (one->pid < 0) error = errno;
    close(report[1]);
    if (one->pid > 0) {
        setpgid(one->pid, one->pid);
        ssize_t got;
        do got = read(report[0], &error, sizeof error);
        while (got < 0 && errno == EINTR);
        if (got != (ssize_t)sizeof error)
            error = 0;
        else
            waitpid(one->pid, NULL, 0);
    }
    close(report[0]);
    one->running = error == 0;
    return error;
}

static bool start_one(rank *one, const options *own, const plan *now, char *const *command)
{
    int out = -1, err = -1, error = ENOMEM;
    one->out.fd = one->out.log = one->err.fd = one->err.log = -1;
    bool good = open_stream(&one->out, own, now, one, STREAM_OUT, &out) &&
                open_stream(&one->err, own, now, one, STREAM_ERR, &err);
    if (good) {
        char **environment = environment_make(own, now, one->local);
        if (environment) error = start_process(one, command, environment, out, err);
        environment_free(environment);
        if (error != 0) say("error: cannot run '%s': %s", command[0], strerror(error));
        good = error == 0;
    }
    if (out >= 0) close(out);
    if (err >= 0) close(err);
    return good;
}

static void kill_all(rank *all, int count)
{
    ranks_signal(all, count, SIGKILL);
    for (int i = 0; i < count; i++) {
        if (all[i].running) waitpid(all[i].pid, &all[i].status, 0);
        all[i].running = false;
        stream_close(&all[i].out);
        stream_close(&all[i].err);
    }
}

bool ranks_start(rank *all, const options *own, const plan *now)
{
    char **command = command_line(own);
    int started = 0;
    bool good = command != NULL;
    if (!good) say("error: out of memory");
    for (; good && started < own->num_ranks; started++) {
        all[started] = (rank){.local = started, .global = now->first_rank + started};
        good = start_one(&all[started], own, now, command);
    }
    if (!good) kill_all(all, started);
    free(command);
    return good;
}

void ranks_signal(const rank *all, int count, int signal_number)
{
    for (int i = 0; i < count; i++)
        if (all[i].running) kill(-all[i].pid, signal_number);
}

static bool ended(const rank *one)
{
    siginfo_t info = {.si_pid = 0};
    return waitid(P_PID, (id_t)one->pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == one->pid;
}

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* A stopped process neither ends nor fails, and the others wait for it. */
static void watch_stopped(rank *one, double limit)
{
    siginfo_t info = {.si_pid = 0};
    while (waitid(P_PID, (id_t)one->pid, &info, WSTOPPED | WCONTINUED | WNOHANG) == 0 && info.si_pid == one->pid) {
        if (info.si_code == CLD_CONTINUED)
            one->stopped = 0;
        else if (one->stopped == 0)
            one->stopped = now_seconds();
        info.si_pid = 0;
    }
    if (one->stopped == 0 || one->stopped_for > 0 || now_seconds() - one->stopped < limit) return;
    one->stopped_for = now_seconds() - one->stopped;
    kill(-one->pid, SIGKILL);
}

bool ranks_stopped(const rank *all, int count)
{
    for (int i = 0; i < count; i++)
        if (all[i].running && all[i].stopped > 0) return true;
    return false;
}

rank *ranks_reap(rank *all, int count, double stopped_limit)
{
    rank *failed = NULL;
    for (int i = 0; i < count; i++) {
        rank *one = &all[i];
        if (one->running) watch_stopped(one, stopped_limit);
        if (!one->running || !ended(one)) continue;
        /* before the process is reaped: until then its group cannot be anybody else's */
        kill(-one->pid, SIGKILL);
        waitpid(one->pid, &one->status, 0);
        one->running = false;
        stream_read(&one->out);
        stream_read(&one->err);
        stream_close(&one->out);
        stream_close(&one->err);
        /* of several at once, one that a signal ended: the others fail because of it, not it because of them */
        if (one->status != 0 && (!failed || (WIFSIGNALED(one->status) && !WIFSIGNALED(failed->status)))) failed = one;
    }
    return failed;
}

int ranks_running(const rank *all, int count)
{
    int running = 0;
    for (int i = 0; i < count; i++) running += all[i].running;
    return running;
}

void ranks_describe(const rank *one, char *text, size_t size)
{
    if (one->stopped_for > 0)
        snprintf(text, size, "stopped for %.0f s (SIGSTOP or such), so killed", one->stopped_for);
    else if (WIFSIGNALED(one->status))
        snprintf(text, size, "signal %d (%s)", WTERMSIG(one->status), strsignal(WTERMSIG(one->status)));
    else
        snprintf(text, size, "exit code %d", WEXITSTATUS(one->status));
}

int ranks_exit_code(const rank *one)
{
    return WIFEXITED(one->status) ? WEXITSTATUS(one->status) : 1;
}
