#include "run/run_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "formats/json.h"
#include "mtp/version.h"

static mtp_status check_record(const char *path)
{
    json_t *value = NULL;
    const char *format;
    int64_t version = 0;
    MTP_TRY(mtp__json_read(path, &value));
    const mtp__json_node root = mtp__json_root(value, path);
    mtp_status status = mtp__json_as_object(&root);
    if (status == MTP_OK) status = mtp__json_get_string(&root, "format", &format);
    if (status == MTP_OK && strcmp(format, MTP__RUN_FORMAT) != 0)
        status = mtp__json_fail(&root, MTP_E_FORMAT, "format \"%s\" is not a run's (\"%s\")", format, MTP__RUN_FORMAT);
    if (status == MTP_OK) status = mtp__json_get_int64(&root, "version", 1, INT64_MAX, &version);
    if (status == MTP_OK && version > MTP__RUN_VERSION)
        status = mtp__json_fail(&root, MTP_E_VERSION,
                                "run of version %lld, written by a newer mtp; this one knows versions up to %d",
                                (long long)version, (int)MTP__RUN_VERSION);
    json_decref(value);
    return status;
}

mtp_status mtp__run_dir_inspect(const char *path, bool *is_run)
{
    static const char *const ours[] = {"config.toml", "metrics.jsonl", "bad_steps.jsonl",
                                       "checkpoints", "export",        "tb"};
    char *name = NULL;
    MTP_TRY(mtp__path_join(path, "run.json", &name));
    *is_run = mtp__path_exists(name);
    mtp_status status = *is_run ? check_record(name) : MTP_OK;
    free(name);
    for (size_t i = 0; status == MTP_OK && !*is_run && i < sizeof ours / sizeof *ours; i++) {
        MTP_TRY(mtp__path_join(path, ours[i], &name));
        if (mtp__path_exists(name))
            status = MTP_FAIL(MTP_E_EXISTS,
                              "%s is there, but %s is not a run of mtp (it has no run.json); use another output_dir",
                              name, path);
        free(name);
    }
    return status;
}

static mtp_status take_lock(mtp__run_dir *directory)
{
    char *name = NULL;
    MTP_TRY(mtp__path_join(directory->path, ".lock", &name));
    mtp_status status = MTP_OK;
    directory->lock = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (directory->lock < 0) {
        status = MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s cannot be opened: %s", name, strerror(errno));
    } else if (flock(directory->lock, LOCK_EX | LOCK_NB) != 0) {
        status =
            errno == EWOULDBLOCK
                ? MTP_FAIL(MTP_E_EXISTS, "another process is training in %s; wait for it or use another output_dir",
                           directory->path)
                : MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s cannot be locked: %s", name, strerror(errno));
        close(directory->lock);
    } else {
        directory->locked = true;
    }
    free(name);
    return status;
}

static mtp_status write_record(const char *name)
{
    json_t *root =
        json_pack("{s:s, s:i, s:s}", "format", MTP__RUN_FORMAT, "version", (int)MTP__RUN_VERSION, "mtp", mtp_version());
    if (!root) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %s", name);
    const mtp_status status = mtp__json_write(name, root, MTP__JSON_NEWLINE);
    json_decref(root);
    return status;
}

static mtp_status remember(mtp__run_dir *directory, const char *name)
{
    struct stat there;
    if (stat(name, &there) != 0) return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: %s", name, strerror(errno));
    directory->device = (uint64_t)there.st_dev;
    directory->inode = (uint64_t)there.st_ino;
    return MTP_OK;
}

mtp_status mtp__run_dir_check(const mtp__run_dir *directory)
{
    struct stat there;
    char *name = NULL;
    if (!directory->locked) return MTP_OK;
    MTP_TRY(mtp__path_join(directory->path, "run.json", &name));
    const int code = stat(name, &there) == 0 ? 0 : errno;
    free(name);
    if (code == 0 && (uint64_t)there.st_dev == directory->device && (uint64_t)there.st_ino == directory->inode)
        return MTP_OK;
    if (code != 0 && code != ENOENT && code != ENOTDIR)
        return MTP_OK; /* a disk that fails says so when it is written */
    return MTP_FAIL(
        MTP_E_IO,
        "output_dir %s was removed, moved or replaced while the run wrote to it: what it would write from here "
        "on is no run any more. Start again, in a directory that stays",
        directory->path);
}

static mtp_status claim(mtp__run_dir *directory, bool fresh)
{
    char *name = NULL;
    MTP_TRY(mtp__dir_create(directory->path));
    MTP_TRY(take_lock(directory));
    MTP_TRY(mtp__path_join(directory->path, "run.json", &name));
    mtp_status status = MTP_OK;
    if (!mtp__path_exists(name))
        status = write_record(name);
    else if (fresh)
        status = MTP_FAIL(MTP_E_EXISTS, "another process has begun a run in %s", directory->path);
    if (status == MTP_OK) status = remember(directory, name);
    free(name);
    return status;
}

mtp_status mtp__run_dir_open(const char *path, bool fresh, mtp__run_dir *directory)
{
    *directory = (mtp__run_dir){.path = strdup(path)};
    if (!directory->path) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a path");
    const mtp_status status = claim(directory, fresh);
    if (status != MTP_OK) mtp__run_dir_close(directory);
    return status;
}

/* ".config.toml.tmp-1234-0": what mtp__file_writer, and mtp_export for "export", call their temporaries. */
static bool is_leftover(const char *name, const char *of)
{
    const size_t length = strlen(of);
    const char *rest = name + 1 + length;
    if (name[0] != '.' || strncmp(name + 1, of, length) != 0 || strncmp(rest, ".tmp-", 5) != 0) return false;
    return rest[5] != '\0' && strspn(rest + 5, "0123456789-") == strlen(rest + 5);
}

static mtp_status remove_files(const char *path, const mtp__name_list *names)
{
    static const char *const ours[] = {"run.json", "config.toml", "metrics.jsonl", "bad_steps.jsonl"};
    for (size_t i = 0; i < names->count; i++)
        for (size_t j = 0; j < sizeof ours / sizeof *ours; j++) {
            char *file = NULL;
            if (!is_leftover(names->names[i], ours[j])) continue;
            MTP_TRY(mtp__path_join(path, names->names[i], &file));
            const int code = unlink(file) == 0 || errno == ENOENT ? 0 : errno;
            const mtp_status status =
                code ? MTP_FAIL_FOREIGN(MTP_E_IO, code, "%s cannot be removed: %s", file, strerror(code)) : MTP_OK;
            free(file);
            if (status != MTP_OK) return status;
        }
    return MTP_OK;
}

static mtp_status remove_exports(const char *path, const mtp__name_list *names)
{
    for (size_t i = 0; i < names->count; i++) {
        char *directory = NULL;
        if (!is_leftover(names->names[i], "export")) continue;
        MTP_TRY(mtp__path_join(path, names->names[i], &directory));
        const mtp_status status = mtp__dir_remove(directory);
        free(directory);
        if (status != MTP_OK) return status;
    }
    return MTP_OK;
}

mtp_status mtp__run_dir_remove_leftovers(const mtp__run_dir *directory)
{
    mtp__name_list files = {0}, directories = {0};
    mtp_status status = mtp__dir_list(directory->path, MTP__LIST_FILES, NULL, &files);
    if (status == MTP_OK) status = mtp__dir_list(directory->path, MTP__LIST_DIRECTORIES, NULL, &directories);
    if (status == MTP_OK) status = remove_files(directory->path, &files);
    if (status == MTP_OK) status = remove_exports(directory->path, &directories);
    mtp__name_list_free(&files);
    mtp__name_list_free(&directories);
    return status;
}

void mtp__run_dir_close(mtp__run_dir *directory)
{
    if (directory->locked) close(directory->lock);
    free(directory->path);
    *directory = (mtp__run_dir){0};
}

/* `path` or the nearest parent of it that exists. */
static mtp_status existing_parent(const char *path, char **parent)
{
    char *part = strdup(path);
    if (!part) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a path");
    while (!mtp__path_exists(part)) {
        char *slash = strrchr(part, '/');
        if (slash == part || !slash) {
            free(part);
            part = strdup(slash ? "/" : ".");
            if (!part) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a path");
            break;
        }
        *slash = '\0';
    }
    *parent = part;
    return MTP_OK;
}

mtp_status mtp__run_dir_check_space(const char *path, uint64_t bytes, const char *what)
{
    char *parent = NULL;
    uint64_t available = 0;
    MTP_TRY(existing_parent(path, &parent));
    mtp_status status = mtp__dir_free_bytes(parent, &available);
    if (status == MTP_OK && available < bytes)
        status = MTP_FAIL(MTP_E_IO,
                          "%s: the run will need about %.1f MiB (%s) and %.1f MiB are free; make room, or lower "
                          "keep_last",
                          path, (double)bytes / (1 << 20), what, (double)available / (1 << 20));
    free(parent);
    return status;
}
