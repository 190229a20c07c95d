/* JSON Lines: one JSON value a line. A reader for files of others, an appender for our metrics. Internal. */
#ifndef MTP_FORMATS_JSONL_H
#define MTP_FORMATS_JSONL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/file.h"
#include "formats/json.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A longer line is refused: it is no record but a damaged file. */
enum { MTP__JSONL_MAX_LINE = 1 << 24 };

/* Walks the lines of a map. Blank lines are skipped. */
typedef struct mtp__jsonl_reader {
    mtp__file_map map; /* empty for text of the caller */
    const char *text;
    size_t size, next;
    char *path;
    char *origin; /* "path:line" of the last line read: for mtp__json_root */
    int line;     /* of the last line read, from 1 */
} mtp__jsonl_reader;

/* An empty file is MTP_E_FORMAT. On failure the reader is closed. */
mtp_status mtp__jsonl_open(mtp__jsonl_reader *reader, const char *path);
/* Text in memory, which must outlive the reader. */
mtp_status mtp__jsonl_open_text(mtp__jsonl_reader *reader, const char *text, size_t size, const char *name);
/* The next value, checked as formats/json.h says; json_decref(*value). NULL at the end of the file. After a failure
 * ("path:line:column: ...") the next call goes on with the next line. */
mtp_status mtp__jsonl_next(mtp__jsonl_reader *reader, json_t **value);
/* Accepts a zeroed struct. */
void mtp__jsonl_close(mtp__jsonl_reader *reader);

/* Appends lines to a file that grows while it is read by others (metrics.jsonl). Each line goes out whole with one
 * write; one that fails leaves nothing of it. A zeroed struct with fd -1 is closed. */
typedef struct mtp__jsonl_writer {
    int fd;
    char *path;
} mtp__jsonl_writer;

/* Creates the file or goes on at its end; what a killed process left of a last line is cut off. */
mtp_status mtp__jsonl_append_open(mtp__jsonl_writer *writer, const char *path);
mtp_status mtp__jsonl_append(mtp__jsonl_writer *writer, const json_t *value);
/* Whole lines, as text. */
mtp_status mtp__jsonl_append_text(mtp__jsonl_writer *writer, const char *text, size_t size);
/* Make the lines durable. */
mtp_status mtp__jsonl_sync(mtp__jsonl_writer *writer);
void mtp__jsonl_append_close(mtp__jsonl_writer *writer);

#ifdef __cplusplus
}
#endif
#endif
