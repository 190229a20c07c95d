#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "mtp/context.h"

/* ---- files ---------------------------------------------------------------------------------------------------- */

static char *directories[256];
static int num_directories;
static pid_t owner;

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *where)
{
    (void)info, (void)kind, (void)where;
    return remove(path);
}

static void remove_directories(void)
{
    if (getpid() != owner) return;
    for (int i = 0; i < num_directories; i++) {
        nftw(directories[i], remove_entry, 16, FTW_DEPTH | FTW_PHYS);
        free(directories[i]);
    }
}

const char *test_dir(void)
{
    const char *root = getenv("TMPDIR");
    char *path = NULL;
    if (num_directories == 0) {
        owner = getpid();
        atexit(remove_directories);
    }
    if (num_directories == (int)(sizeof directories / sizeof *directories)) fail_msg("too many test directories");
    if (asprintf(&path, "%s/mtp-test-XXXXXX", root && *root ? root : "/tmp") < 0 || !mkdtemp(path))
        fail_msg("cannot make a test directory: %s", strerror(errno));
    directories[num_directories++] = path;
    return path;
}

static char *paths[4096];
static int num_paths;

static void free_paths(void)
{
    for (int i = 0; i < num_paths; i++) free(paths[i]);
}

const char *test_path(const char *format, ...)
{
    va_list args;
    char *path = NULL;
    if (num_paths == 0) atexit(free_paths);
    va_start(args, format);
    if (num_paths == (int)(sizeof paths / sizeof *paths) || vasprintf(&path, format, args) < 0)
        fail_msg("too many test paths");
    va_end(args);
    paths[num_paths++] = path;
    return path;
}

const char *test_no_gpu(void)
{
    const mtp_context_options options = {.device = "cuda:0"};
    mtp_context *context = NULL;
    if (mtp_context_create(&options, &context) != MTP_OK) return mtp_last_error()->message;
    mtp_context_free(context);
    return NULL;
}

const char *test_self(void)
{
    char self[4096];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(length > 0);
    return test_path("%.*s", (int)length, self);
}

char *test_read(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    if (!file) fail_msg("%s: %s", path, strerror(errno));
    size_t used = 0, capacity = 1 << 16;
    char *data = malloc(capacity + 1);
    for (size_t got; (got = fread(data + used, 1, capacity - used, file)) > 0;) {
        used += got;
        if (used == capacity) data = realloc(data, (capacity *= 2) + 1);
    }
    fclose(file);
    data[used] = '\0';
    if (size) *size = used;
    return data;
}

void test_write(const char *path, const void *data, size_t size)
{
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, size, file) != size || fclose(file) != 0) fail_msg("%s: %s", path, strerror(errno));
}

void test_copy(const char *from, const char *to)
{
    test_run run = test_execute((const char *const[]){"/bin/cp", "-r", from, to, NULL});
    if (run.exit_code != 0) fail_msg("cp -r %s %s: %s", from, to, run.err);
    test_run_free(&run);
}

/* ---- programs ------------------------------------------------------------------------------------------------- */

static void append(char **text, size_t *size, const char *data, size_t count)
{
    *text = realloc(*text, *size + count + 1);
    memcpy(*text + *size, data, count);
    *size += count;
    (*text)[*size] = '\0';
}

test_run test_execute(const char *const *argv)
{
    int out[2], err[2];
    if (pipe(out) || pipe(err)) fail_msg("pipe: %s", strerror(errno));
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        const int in = open("/dev/null", O_RDONLY);
        dup2(in, 0), dup2(out[1], 1), dup2(err[1], 2);
        close(out[0]), close(err[0]), close(out[1]), close(err[1]);
        execv(argv[0], (char *const *)(uintptr_t)argv);
        fprintf(stderr, "%s: %s\n", argv[0], strerror(errno));
        _exit(127);
    }
    close(out[1]), close(err[1]);
    test_run run = {.exit_code = -1, .out = calloc(1, 1), .err = calloc(1, 1)};
    size_t out_size = 0, err_size = 0;
    struct pollfd fds[2] = {{.fd = out[0], .events = POLLIN}, {.fd = err[0], .events = POLLIN}};
    for (int open_fds = 2; open_fds > 0;) {
        char buffer[4096];
        if (poll(fds, 2, -1) < 0) continue;
        for (int i = 0; i < 2; i++) {
            if (!fds[i].revents) continue;
            const ssize_t got = read(fds[i].fd, buffer, sizeof buffer);
            if (got > 0) {
                append(i ? &run.err : &run.out, i ? &err_size : &out_size, buffer, (size_t)got);
            } else {
                close(fds[i].fd);
                fds[i].fd = -1;
                open_fds--;
            }
        }
    }
    int status = 0;
    waitpid(child, &status, 0);
    run.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return run;
}

void test_run_free(test_run *run)
{
    free(run->out);
    free(run->err);
    *run = (test_run){0};
}

void test_expect(test_run run, int exit_code, const char *out, const char *err)
{
    if (run.exit_code != exit_code || !strstr(run.out, out) || !strstr(run.err, err))
        fail_msg("exit %d, want %d\nstdout: %s\nstderr: %s", run.exit_code, exit_code, run.out, run.err);
    test_run_free(&run);
}

/* ---- numbers -------------------------------------------------------------------------------------------------- */

static uint64_t next(test_rng *rng)
{
    uint64_t x = rng->state += 0x9E3779B97F4A7C15u; /* splitmix64 */
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

float test_uniform(test_rng *rng)
{
    return (float)((double)(next(rng) >> 11) * 0x1p-52 - 1.0);
}

int64_t test_below(test_rng *rng, int64_t n)
{
    return (int64_t)(next(rng) % (uint64_t)n);
}

void test_fill(test_rng *rng, float *x, int64_t n, float scale)
{
    for (int64_t i = 0; i < n; i++) x[i] = scale * test_uniform(rng);
}

enum { GUARD = 64 };
static const float sentinel = -12345.678f;

float *test_guarded(int64_t n)
{
    float *block = malloc(sizeof(float) * (size_t)(n + 2 * GUARD));
    if (!block) fail_msg("out of memory");
    for (int64_t i = 0; i < n + 2 * GUARD; i++) block[i] = sentinel;
    memcpy(block, &n, sizeof n); /* the first guard holds the length */
    return block + GUARD;
}

void test_guarded_check(const float *x)
{
    int64_t n;
    memcpy(&n, x - GUARD, sizeof n);
    for (int i = 2; i < GUARD; i++)
        if (x[i - GUARD] != sentinel) fail_msg("written %d floats before the buffer", GUARD - i);
    for (int i = 0; i < GUARD; i++)
        if (x[n + i] != sentinel) fail_msg("written %d floats after the end of the buffer", i);
}

void test_guarded_free(float *x)
{
    if (x) free(x - GUARD);
}
