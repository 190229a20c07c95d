/* Files and directories: whole or not at all. Internal.
 *
 * Messages name the path and the reason. Status codes: a path that is not there is MTP_E_NOT_FOUND; one of the wrong
 * kind (a directory given for a file, a FIFO, an empty file where content is needed) is MTP_E_FORMAT; everything the
 * system refuses (permission, full disk) is MTP_E_IO with errno as the foreign code. */
#ifndef MTP_BASE_FILE_H
#define MTP_BASE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- writing -------------------------------------------------------------------------------------------------- */

/* An atomic writer: everything goes to ".<name>.tmp-<pid>-<n>" beside `path`; commit syncs it, renames it over `path`
 * and syncs the directory. Whoever reads `path` sees the old content or the new, never a part. Small writes are
 * gathered. A zeroed struct is a closed writer. */
typedef struct mtp__file_writer {
    char *path;
    char *temporary;
    int fd;
    char *buffer;
    size_t buffered;
    uint64_t written; /* bytes accepted so far */
} mtp__file_writer;

/* Fails when `path` names an existing directory or special file. On failure the writer is closed. */
mtp_status mtp__file_writer_open(mtp__file_writer *writer, const char *path);
/* After a failure only abort is useful; commit then refuses. */
mtp_status mtp__file_writer_write(mtp__file_writer *writer, const void *data, size_t size);
/* Publish and close. On failure the temporary is removed, `path` is as it was, and the writer is closed. */
mtp_status mtp__file_writer_commit(mtp__file_writer *writer);
/* Remove the temporary and close. Does nothing to a closed writer, so clean-up paths call it always. */
void mtp__file_writer_abort(mtp__file_writer *writer);

/* Open, write `size` bytes, commit. */
mtp_status mtp__file_write(const char *path, const void *data, size_t size);
/* Copy a regular file, atomically. */
mtp_status mtp__file_copy(const char *from, const char *to);
/* write(2) until all is written; `path` is for the message. For files that grow in place (logs, event files). */
mtp_status mtp__fd_write(int fd, const char *path, const void *data, size_t size);

/* Write to the end of a file, whole or not at all: what a failing write put there is cut off again. For files that one
 * process writes. */
mtp_status mtp__fd_append(int fd, const char *path, const void *data, size_t size);

/* ---- reading -------------------------------------------------------------------------------------------------- */

/* A whole regular file of at most `limit` bytes. The result is NUL-terminated beyond `size`; free() it. `size` may be
 * NULL. An empty file is read as an empty text. */
mtp_status mtp__file_read(const char *path, size_t limit, char **data, size_t *size);

/* A read-only map of a whole regular file; refuses an empty one. The content is not copied: when another process
 * shortens the file while it is mapped, reading past the new end raises SIGBUS. Data sets and checkpoints are therefore
 * replaced by rename (as the writer above does), which leaves the mapped file alive, and never rewritten in place. */
typedef struct mtp__file_map {
    const void *data;
    size_t size;
} mtp__file_map;
mtp_status mtp__file_map_open(mtp__file_map *map, const char *path);
/* Accepts a zeroed struct. */
void mtp__file_map_close(mtp__file_map *map);

/* ---- paths and directories ------------------------------------------------------------------------------------ */

/* "directory/name" (one slash); free() it. */
mtp_status mtp__path_join(const char *directory, const char *name, char **path);
/* The part behind the last slash, inside `path`. */
const char *mtp__path_name(const char *path);
/* Whether `path` is (a link to) a regular file, a directory, anything at all. False when it cannot be looked at. */
bool mtp__file_exists(const char *path);
bool mtp__dir_exists(const char *path);
bool mtp__path_exists(const char *path);

typedef struct mtp__name_list {
    char **names; /* without the directory, sorted by bytes */
    size_t count;
} mtp__name_list;
typedef enum mtp__list_kind { MTP__LIST_FILES, MTP__LIST_DIRECTORIES } mtp__list_kind;
/* The regular files (or directories; links count as what they point to) of a directory whose names end with `suffix`
 * (NULL or "" for all). Free the list with mtp__name_list_free. No match is an empty list, not a failure. */
mtp_status mtp__dir_list(const char *directory, mtp__list_kind kind, const char *suffix, mtp__name_list *list);
void mtp__name_list_free(mtp__name_list *list);

/* mkdir -p. */
mtp_status mtp__dir_create(const char *path);
/* Remove a directory and the files in it; one that is not there is fine. One with directories in it is MTP_E_IO. */
mtp_status mtp__dir_remove(const char *path);
/* Make renames and new names inside `path` durable. */
mtp_status mtp__dir_sync(const char *path);
/* Bytes an unprivileged process may still write on the file system of `path` (which must exist). */
mtp_status mtp__dir_free_bytes(const char *path, uint64_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
