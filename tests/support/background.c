#include "background.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "support.h"

enum { LOOKS = 2000, LOOK_MS = 10 };

static void pause_briefly(void)
{
    nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * 1000000L}, NULL);
}

pid_t test_start(const char *output_path, const char *const *argv)
{
    const pid_t pid = fork();
    if (pid == 0) {
        const int fd = open(output_path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
        dup2(fd, 1);
        dup2(fd, 2);
        execv(argv[0], (char *const *)argv);
        _exit(127);
    }
    assert_true(pid > 0);
    return pid;
}

int test_end(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void test_wait_for_file(const char *path)
{
    for (int i = 0; i < LOOKS; i++) {
        if (access(path, F_OK) == 0) return;
        pause_briefly();
    }
    fail_msg("%s did not appear", path);
}

static bool says(const char *path, const char *part)
{
    if (access(path, F_OK) != 0) return false;
    char *text = test_read(path, NULL);
    const bool there = strstr(text, part) != NULL;
    free(text);
    return there;
}

void test_wait_for_text(const char *path, const char *part)
{
    for (int i = 0; i < LOOKS; i++) {
        if (says(path, part)) return;
        pause_briefly();
    }
    fail_msg("%s does not say \"%s\": %s", path, part, test_read(path, NULL));
}

void test_file_says(const char *path, const char *part)
{
    if (!says(path, part)) fail_msg("no \"%s\" in %s: %s", part, path, test_read(path, NULL));
}

bool test_process_gone(const char *path)
{
    char *text = test_read(path, NULL);
    const pid_t pid = (pid_t)atoi(text);
    free(text);
    assert_true(pid > 0);
    for (int i = 0; i < LOOKS; i++) {
        char state_path[64], state = 'X';
        snprintf(state_path, sizeof state_path, "/proc/%d/stat", (int)pid);
        FILE *file = fopen(state_path, "r");
        if (!file) return true;
        /* a zombie nobody has waited for is gone as well */
        const bool read = fscanf(file, "%*d (%*[^)]) %c", &state) == 1;
        fclose(file);
        if (read && state == 'Z') return true;
        pause_briefly();
    }
    return false;
}
