#include "base/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { WRITE_BUFFER = 1 << 16, MOST_TEMPORARIES = 1000 };

/* errno as a failure: what could not be done, to which path, why. */
static mtp_status fail_errno(int code, const char *what, const char *path)
{
    const mtp_status status = code == ENOENT || code == ENOTDIR ? MTP_E_NOT_FOUND : MTP_E_IO;
    return MTP_FAIL_FOREIGN(status, code, "%s: cannot %s: %s", path, what, strerror(code));
}

static mtp_status fail_memory(const char *path)
{
    return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
}

/* ---- paths ---------------------------------------------------------------------------------------------------- */

mtp_status mtp__path_join(const char *directory, const char *name, char **path)
{
    const size_t length = strlen(directory);
    const char *slash = length == 0 || directory[length - 1] == '/' ? "" : "/";
    const size_t size = length + strlen(slash) + strlen(name) + 1;
    *path = malloc(size);
    if (!*path) return fail_memory(name);
    snprintf(*path, size, "%s%s%s", directory, slash, name);
    return MTP_OK;
}

const char *mtp__path_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* The directory part of `path` ("." when it has none); free() it. NULL when out of memory. */
static char *directory_of(const char *path)
{
    const char *name = mtp__path_name(path);
    if (name == path) return strdup(".");
    return name == path + 1 ? strdup("/") : strndup(path, (size_t)(name - path - 1));
}

static bool has_mode(const char *path, mode_t kind)
{
    struct stat info;
    return stat(path, &info) == 0 && (info.st_mode & S_IFMT) == kind;
}

bool mtp__file_exists(const char *path)
{
    return has_mode(path, S_IFREG);
}

bool mtp__dir_exists(const char *path)
{
    return has_mode(path, S_IFDIR);
}

bool mtp__path_exists(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0;
}

/* ---- writing -------------------------------------------------------------------------------------------------- */

mtp_status mtp__fd_write(int fd, const char *path, const void *data, size_t size)
{
    const char *next = data;
    while (size > 0) {
        const ssize_t count = write(fd, next, size < SSIZE_MAX ? size : SSIZE_MAX);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return fail_errno(errno, "write", path);
        if (count == 0) return MTP_FAIL_FOREIGN(MTP_E_IO, ENOSPC, "%s: cannot write: nothing was accepted", path);
        next += count;
        size -= (size_t)count;
    }
    return MTP_OK;
}

mtp_status mtp__fd_append(int fd, const char *path, const void *data, size_t size)
{
    const off_t end = lseek(fd, 0, SEEK_END);
    if (end < 0) return fail_errno(errno, "seek in", path);
    const mtp_status status = mtp__fd_write(fd, path, data, size);
    if (status == MTP_OK) return MTP_OK;
    const mtp_error first = *mtp_last_error();
    if (ftruncate(fd, end) != 0 || lseek(fd, end, SEEK_SET) < 0) return fail_errno(errno, "cut back", path);
    return mtp__fail_again(&first);
}

static void writer_free(mtp__file_writer *writer)
{
    free(writer->path);
    free(writer->temporary);
    free(writer->buffer);
    *writer = (mtp__file_writer){.fd = -1};
}

/* Creates the first free ".<name>.tmp-<pid>-<n>" beside the path. */
static mtp_status create_temporary(mtp__file_writer *writer)
{
    const char *name = mtp__path_name(writer->path);
    const int directory = (int)(name - writer->path);
    for (int i = 0; i < MOST_TEMPORARIES; i++) {
        char *temporary = NULL;
        if (asprintf(&temporary, "%.*s.%s.tmp-%ld-%d", directory, writer->path, name, (long)getpid(), i) < 0)
            return fail_memory(writer->path);
        writer->fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (writer->fd >= 0) {
            writer->temporary = temporary;
            return MTP_OK;
        }
        const int code = errno;
        free(temporary);
        if (code != EEXIST) return fail_errno(code, "create", writer->path);
    }
    return MTP_FAIL(MTP_E_IO, "%s: cannot create: %d temporary files of earlier attempts are beside it; remove them",
                    writer->path, MOST_TEMPORARIES);
}

mtp_status mtp__file_writer_open(mtp__file_writer *writer, const char *path)
{
    struct stat info;
    *writer = (mtp__file_writer){.fd = -1};
    if (*mtp__path_name(path) == '\0') return MTP_FAIL(MTP_E_ARGUMENT, "'%s' is no name for a file", path);
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode))
        return MTP_FAIL(MTP_E_IO, "%s: cannot write: it is a %s, not a file", path,
                        S_ISDIR(info.st_mode) ? "directory" : "device or pipe");
    writer->path = strdup(path);
    writer->buffer = malloc(WRITE_BUFFER);
    const mtp_status status = writer->path && writer->buffer ? create_temporary(writer) : fail_memory(path);
    if (status != MTP_OK) writer_free(writer);
    return status;
}

static mtp_status flush_buffer(mtp__file_writer *writer)
{
    const size_t size = writer->buffered;
    writer->buffered = 0;
    return mtp__fd_write(writer->fd, writer->path, writer->buffer, size);
}

/* A writer that failed once must not be committed: its descriptor is closed, which every later call notices. */
static mtp_status break_writer(mtp__file_writer *writer, mtp_status status)
{
    close(writer->fd);
    writer->fd = -1;
    return status;
}

mtp_status mtp__file_writer_write(mtp__file_writer *writer, const void *data, size_t size)
{
    if (!writer->temporary || writer->fd < 0) return MTP_FAIL(MTP_E_ARGUMENT, "write to a closed file writer");
    writer->written += size;
    if (writer->buffered + size > WRITE_BUFFER) {
        const mtp_status status = flush_buffer(writer);
        if (status != MTP_OK) return break_writer(writer, status);
    }
    if (size >= WRITE_BUFFER) {
        const mtp_status status = mtp__fd_write(writer->fd, writer->path, data, size);
        return status == MTP_OK ? status : break_writer(writer, status);
    }
    if (size > 0) memcpy(writer->buffer + writer->buffered, data, size);
    writer->buffered += size;
    return MTP_OK;
}

static mtp_status publish(mtp__file_writer *writer)
{
    MTP_TRY(flush_buffer(writer));
    if (fsync(writer->fd) != 0) return fail_errno(errno, "sync", writer->path);
    const int closed = close(writer->fd);
    writer->fd = -1;
    if (closed != 0) return fail_errno(errno, "close", writer->path);
    if (rename(writer->temporary, writer->path) != 0) return fail_errno(errno, "rename into place", writer->path);
    free(writer->temporary);
    writer->temporary = NULL;
    char *directory = directory_of(writer->path);
    if (!directory) return fail_memory(writer->path);
    const mtp_status status = mtp__dir_sync(directory);
    free(directory);
    return status;
}

mtp_status mtp__file_writer_commit(mtp__file_writer *writer)
{
    mtp_status status;
    if (!writer->temporary || writer->fd < 0)
        status = MTP_FAIL(MTP_E_ARGUMENT, "commit of a closed or failed file writer");
    else
        status = publish(writer);
    mtp__file_writer_abort(writer);
    return status;
}

void mtp__file_writer_abort(mtp__file_writer *writer)
{
    if (!writer->path) return;
    if (writer->fd >= 0) close(writer->fd);
    if (writer->temporary) unlink(writer->temporary);
    writer_free(writer);
}

mtp_status mtp__file_write(const char *path, const void *data, size_t size)
{
    mtp__file_writer writer;
    mtp_status status;
    MTP_TRY(mtp__file_writer_open(&writer, path));
    MTP_TRY_GOTO(status, mtp__file_writer_write(&writer, data, size), done);
    status = mtp__file_writer_commit(&writer);
done:
    mtp__file_writer_abort(&writer);
    return status;
}

/* ---- reading -------------------------------------------------------------------------------------------------- */

/* Opens a regular file. O_NONBLOCK: opening a FIFO must be refused, not wait for its other end. */
static mtp_status open_regular(const char *path, int *fd, struct stat *info)
{
    *fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (*fd < 0) return fail_errno(errno, "open", path);
    mtp_status status = MTP_OK;
    if (fstat(*fd, info) != 0)
        status = fail_errno(errno, "look at", path);
    else if (S_ISDIR(info->st_mode))
        status = MTP_FAIL(MTP_E_FORMAT, "%s: is a directory, not a file", path);
    else if (!S_ISREG(info->st_mode))
        status = MTP_FAIL(MTP_E_FORMAT, "%s: is a device, socket or pipe, not a regular file", path);
    if (status == MTP_OK) return MTP_OK;
    close(*fd);
    *fd = -1;
    return status;
}

/* Fills `data` from the descriptor up to `capacity`; `size` is what was there. */
static mtp_status read_all(int fd, const char *path, char *data, size_t capacity, size_t *size)
{
    *size = 0;
    while (*size < capacity) {
        const ssize_t count = read(fd, data + *size, capacity - *size);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return fail_errno(errno, "read", path);
        if (count == 0) break;
        *size += (size_t)count;
    }
    return MTP_OK;
}

mtp_status mtp__file_read(const char *path, size_t limit, char **data, size_t *size)
{
    int fd;
    struct stat info;
    mtp_status status;
    size_t got = 0;
    *data = NULL;
    MTP_TRY(open_regular(path, &fd, &info));
    const uint64_t length = (uint64_t)info.st_size;
    if (length > limit) {
        close(fd);
        return MTP_FAIL(MTP_E_FORMAT, "%s: has %llu bytes; at most %zu are read here", path, (unsigned long long)length,
                        limit);
    }
    char *text = malloc((size_t)length + 1);
    status = text ? read_all(fd, path, text, (size_t)length, &got) : fail_memory(path);
    close(fd);
    if (status != MTP_OK) {
        free(text);
        return status;
    }
    text[got] = '\0';
    *data = text;
    if (size) *size = got;
    return MTP_OK;
}

mtp_status mtp__file_map_open(mtp__file_map *map, const char *path)
{
    int fd;
    struct stat info;
    *map = (mtp__file_map){0};
    MTP_TRY(open_regular(path, &fd, &info));
    if (info.st_size == 0 || (uint64_t)info.st_size > SIZE_MAX) {
        close(fd);
        return MTP_FAIL(MTP_E_FORMAT, "%s: the file is %s", path, info.st_size ? "too large to map" : "empty");
    }
    void *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
    const int code = errno;
    close(fd);
    if (data == MAP_FAILED) return fail_errno(code, "map", path);
    *map = (mtp__file_map){data, (size_t)info.st_size};
    return MTP_OK;
}

void mtp__file_map_close(mtp__file_map *map)
{
    /* munmap takes a pointer to non-const; the map itself is read-only */
    if (map->data) munmap((void *)(uintptr_t)map->data, map->size);
    *map = (mtp__file_map){0};
}

mtp_status mtp__file_copy(const char *from, const char *to)
{
    int fd;
    struct stat info;
    mtp_status status;
    mtp__file_writer writer = {.fd = -1};
    char *chunk = NULL;
    MTP_TRY(open_regular(from, &fd, &info));
    MTP_TRY_GOTO(status, mtp__file_writer_open(&writer, to), done);
    chunk = malloc(WRITE_BUFFER);
    if (!chunk) {
        status = fail_memory(to);
        goto done;
    }
    for (size_t count = WRITE_BUFFER; count == WRITE_BUFFER;) {
        MTP_TRY_GOTO(status, read_all(fd, from, chunk, WRITE_BUFFER, &count), done);
        MTP_TRY_GOTO(status, mtp__file_writer_write(&writer, chunk, count), done);
    }
    status = mtp__file_writer_commit(&writer);
done:
    free(chunk);
    close(fd);
    mtp__file_writer_abort(&writer);
    return status;
}

/* ---- directories ---------------------------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static bool ends_with(const char *name, const char *suffix)
{
    const size_t length = strlen(name), tail = suffix ? strlen(suffix) : 0;
    return length >= tail && (tail == 0 || memcmp(name + length - tail, suffix, tail) == 0);
}

static mtp_status append_name(mtp__name_list *list, size_t *capacity, const char *name)
{
    if (list->count == *capacity) {
        const size_t larger = *capacity ? *capacity * 2 : 64;
        char **names = realloc(list->names, larger * sizeof *names);
        if (!names) return fail_memory(name);
        list->names = names;
        *capacity = larger;
    }
    char *copy = strdup(name);
    if (!copy) return fail_memory(name);
    list->names[list->count++] = copy;
    return MTP_OK;
}

static mtp_status read_entries(DIR *stream, const char *directory, mtp__list_kind kind, const char *suffix,
                               mtp__name_list *list)
{
    size_t capacity = 0;
    for (;;) {
        errno = 0;
        const struct dirent *entry = readdir(stream);
        if (!entry) return errno ? fail_errno(errno, "list", directory) : MTP_OK;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..") || !ends_with(entry->d_name, suffix)) continue;
        struct stat info;
        if (fstatat(dirfd(stream), entry->d_name, &info, 0) != 0) continue; /* removed meanwhile, or a dangling link */
        if (kind == MTP__LIST_FILES ? S_ISREG(info.st_mode) : S_ISDIR(info.st_mode))
            MTP_TRY(append_name(list, &capacity, entry->d_name));
    }
}

mtp_status mtp__dir_list(const char *directory, mtp__list_kind kind, const char *suffix, mtp__name_list *list)
{
    *list = (mtp__name_list){0};
    DIR *stream = opendir(directory);
    if (!stream && errno == ENOTDIR) return MTP_FAIL(MTP_E_FORMAT, "%s: is not a directory", directory);
    if (!stream) return fail_errno(errno, "open the directory", directory);
    const mtp_status status = read_entries(stream, directory, kind, suffix, list);
    closedir(stream);
    if (status != MTP_OK) {
        mtp__name_list_free(list);
        return status;
    }
    if (list->count > 1) qsort(list->names, list->count, sizeof *list->names, compare_names);
    return MTP_OK;
}

void mtp__name_list_free(mtp__name_list *list)
{
    for (size_t i = 0; i < list->count; i++) free(list->names[i]);
    free(list->names);
    *list = (mtp__name_list){0};
}

mtp_status mtp__dir_create(const char *path)
{
    char *partial = strdup(path);
    if (!partial) return fail_memory(path);
    mtp_status status = MTP_OK;
    for (char *end = partial; status == MTP_OK && *end;) {
        end += strspn(end, "/");
        end += strcspn(end, "/");
        const char kept = *end;
        *end = '\0';
        if (*partial && mkdir(partial, 0777) != 0) {
            const int code = errno; /* looking whether it is there sets another */
            if (!mtp__dir_exists(partial)) status = fail_errno(code, "create the directory", partial);
        }
        *end = kept;
    }
    free(partial);
    return status;
}

mtp_status mtp__dir_remove(const char *directory)
{
    DIR *dir = opendir(directory);
    if (!dir) return errno == ENOENT ? MTP_OK : MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: %s", directory, strerror(errno));
    mtp_status status = MTP_OK;
    for (const struct dirent *entry = readdir(dir); entry && status == MTP_OK; entry = readdir(dir)) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (unlinkat(dirfd(dir), entry->d_name, 0) != 0)
            status = MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s/%s cannot be removed: %s", directory, entry->d_name,
                                      strerror(errno));
    }
    closedir(dir);
    if (status == MTP_OK && rmdir(directory) != 0)
        status = MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s cannot be removed: %s", directory, strerror(errno));
    return status;
}

mtp_status mtp__dir_sync(const char *path)
{
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return fail_errno(errno, "open the directory", path);
    const int result = fsync(fd);
    const int code = errno;
    close(fd);
    /* EINVAL: a file system that has no notion of syncing a directory */
    return result == 0 || code == EINVAL ? MTP_OK : fail_errno(code, "sync the directory", path);
}

mtp_status mtp__dir_free_bytes(const char *path, uint64_t *bytes)
{
    struct statvfs info;
    if (statvfs(path, &info) != 0) return fail_errno(errno, "ask the free space", path);
    *bytes = (uint64_t)info.f_bavail * (uint64_t)info.f_frsize;
    return MTP_OK;
}
