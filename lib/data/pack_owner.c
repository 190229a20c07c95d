/* Who packs into a directory. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "data/pack.h"

enum { OWNER_BYTES = 512, ATTEMPTS = 10 };
static const char owner_name[] = "packing.lock";

/* When a process started, in clock ticks since boot: with its id this names one process, though ids come again. 0:
 * there is no such process, or the system does not say. */
static unsigned long long start_of(long pid)
{
    char path[64], text[2048];
    unsigned long long start = 0;
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (size <= 0) return 0;
    text[size] = '\0';
    const char *field = strrchr(text, ')'); /* the name may hold anything; 20 fields on is the start */
    for (int i = 0; i < 20 && field; i++) field = strchr(field + 1, ' ');
    if (field) start = strtoull(field, NULL, 10);
    return start;
}

static void describe_self(char text[OWNER_BYTES])
{
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    snprintf(text, OWNER_BYTES, "process %ld started %llu on %s\n", (long)getpid(), start_of(getpid()), host);
}

/* Does the text name a process of this machine that is gone? What cannot be understood counts as alive. */
static bool is_gone(const char *text)
{
    char host[256] = "", own[256] = "";
    long pid;
    unsigned long long start;
    gethostname(own, sizeof own - 1);
    if (sscanf(text, "process %ld started %llu on %255[^\n]", &pid, &start, host) != 3) return false;
    if (strcmp(host, own) != 0 || pid <= 0) return false;
    if (kill((pid_t)pid, 0) != 0) return errno == ESRCH;
    return start != 0 && start_of(pid) != start;
}

/* Take the file of a process that is gone out of the way. Renamed first and looked at again, so that of two who do this
 * none removes the file of the other. */
static mtp_status remove_stale(const char *path, const char *seen)
{
    char *aside = NULL, *found = NULL;
    if (asprintf(&aside, "%s.%ld", path, (long)getpid()) < 0) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
    if (rename(path, aside) == 0) {
        const bool same = mtp__file_read(aside, OWNER_BYTES, &found, NULL) == MTP_OK && strcmp(found, seen) == 0;
        if (same || link(aside, path) == 0 || errno == EEXIST)
            unlink(aside);
        else
            rename(aside, path); /* a file system without hard links */
    }
    free(found);
    free(aside);
    return MTP_OK;
}

static mtp_status create(const char *path, bool *created)
{
    char text[OWNER_BYTES];
    describe_self(text);
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    *created = fd >= 0;
    if (fd < 0 && errno == EEXIST) return MTP_OK;
    if (fd < 0) return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: cannot create: %s", path, strerror(errno));
    const mtp_status status = mtp__fd_write(fd, path, text, strlen(text));
    close(fd);
    if (status != MTP_OK) unlink(path);
    return status;
}

static mtp_status own(const char *path)
{
    for (int i = 0; i < ATTEMPTS; i++) {
        bool created = false;
        char *text = NULL;
        MTP_TRY(create(path, &created));
        if (created) return MTP_OK;
        const mtp_status status = mtp__file_read(path, OWNER_BYTES, &text, NULL);
        if (status == MTP_E_NOT_FOUND) continue; /* removed meanwhile */
        if (status != MTP_OK) return status;
        const bool empty = text[0] == '\0'; /* killed, or not yet, between making and writing the file */
        if (empty) usleep(200000);
        char *again = NULL;
        const bool stale =
            is_gone(text) || (empty && mtp__file_read(path, OWNER_BYTES, &again, NULL) == MTP_OK && again[0] == '\0');
        free(again);
        if (!stale) {
            text[strcspn(text, "\n")] = '\0';
            const mtp_status refused = MTP_FAIL(
                MTP_E_EXISTS, "%s: %s is packing into this directory; wait for it, or remove the file if it is gone",
                path, empty ? "somebody" : text);
            free(text);
            return refused;
        }
        const mtp_status removed = remove_stale(path, text);
        free(text);
        MTP_TRY(removed);
    }
    return MTP_FAIL(MTP_E_EXISTS, "%s: several programs start to pack into this directory", path);
}

mtp_status mtp__pack_own(const char *directory, mtp__pack_owner *owner)
{
    *owner = (mtp__pack_owner){0};
    MTP_TRY(mtp__path_join(directory, owner_name, &owner->path));
    const mtp_status status = own(owner->path);
    if (status != MTP_OK) {
        free(owner->path);
        owner->path = NULL;
    }
    return status;
}

void mtp__pack_disown(mtp__pack_owner *owner)
{
    if (owner->path) unlink(owner->path);
    free(owner->path);
    *owner = (mtp__pack_owner){0};
}
