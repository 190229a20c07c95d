#include "formats/jsonl.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- reading -------------------------------------------------------------------------------------------------- */

mtp_status mtp__jsonl_open_text(mtp__jsonl_reader *reader, const char *text, size_t size, const char *name)
{
    *reader = (mtp__jsonl_reader){.text = text, .size = size, .path = strdup(name)};
    if (!reader->path) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", name);
    return MTP_OK;
}

mtp_status mtp__jsonl_open(mtp__jsonl_reader *reader, const char *path)
{
    mtp__file_map map;
    *reader = (mtp__jsonl_reader){0};
    MTP_TRY(mtp__file_map_open(&map, path));
    const mtp_status status = mtp__jsonl_open_text(reader, map.data, map.size, path);
    if (status == MTP_OK)
        reader->map = map;
    else
        mtp__file_map_close(&map);
    return status;
}

/* The next line that is not blank; false at the end. */
static bool next_line(mtp__jsonl_reader *reader, const char **line, size_t *length)
{
    while (reader->next < reader->size) {
        const char *begin = reader->text + reader->next;
        const size_t rest = reader->size - reader->next;
        const char *newline = memchr(begin, '\n', rest);
        *length = newline ? (size_t)(newline - begin) : rest;
        reader->next += *length + (newline != NULL);
        reader->line++;
        if (*length > 0 && begin[*length - 1] == '\r') --*length;
        size_t blank = 0;
        while (blank < *length && (begin[blank] == ' ' || begin[blank] == '\t')) blank++;
        if (blank == *length) continue;
        *line = begin;
        return true;
    }
    return false;
}

mtp_status mtp__jsonl_next(mtp__jsonl_reader *reader, json_t **value)
{
    const char *line;
    size_t length;
    char *origin = NULL;
    *value = NULL;
    if (!next_line(reader, &line, &length)) return MTP_OK;
    if (asprintf(&origin, "%s:%d", reader->path, reader->line) < 0)
        return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", reader->path);
    free(reader->origin);
    reader->origin = origin;
    if (length > MTP__JSONL_MAX_LINE)
        return MTP_FAIL(MTP_E_FORMAT, "%s: a line of %zu bytes; at most %d are read", origin, length,
                        MTP__JSONL_MAX_LINE);
    return mtp__json_parse(line, length, reader->path, reader->line, value);
}

void mtp__jsonl_close(mtp__jsonl_reader *reader)
{
    mtp__file_map_close(&reader->map);
    free(reader->path);
    free(reader->origin);
    *reader = (mtp__jsonl_reader){0};
}

/* ---- appending ------------------------------------------------------------------------------------------------ */

static mtp_status fail_errno(const mtp__jsonl_writer *writer, const char *what)
{
    const int code = errno;
    return MTP_FAIL_FOREIGN(MTP_E_IO, code, "%s: cannot %s: %s", writer->path, what, strerror(code));
}

/* Where the last whole line ends. */
static mtp_status whole_lines(const mtp__jsonl_writer *writer, off_t *end)
{
    char block[4096];
    *end = lseek(writer->fd, 0, SEEK_END);
    if (*end < 0) return fail_errno(writer, "seek");
    while (*end > 0) {
        const off_t begin = *end > (off_t)sizeof block ? *end - (off_t)sizeof block : 0;
        const ssize_t count = pread(writer->fd, block, (size_t)(*end - begin), begin);
        if (count < 0) return fail_errno(writer, "read");
        const char *newline = memrchr(block, '\n', (size_t)count);
        *end = newline ? begin + (newline - block) + 1 : begin;
        if (newline) break;
    }
    return MTP_OK;
}

static mtp_status cut_torn_line(const mtp__jsonl_writer *writer)
{
    off_t end;
    MTP_TRY(whole_lines(writer, &end));
    return ftruncate(writer->fd, end) == 0 ? MTP_OK : fail_errno(writer, "cut off a torn line");
}

mtp_status mtp__jsonl_append_open(mtp__jsonl_writer *writer, const char *path)
{
    *writer = (mtp__jsonl_writer){.fd = -1, .path = strdup(path)};
    if (!writer->path) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
    writer->fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    const mtp_status status = writer->fd < 0 ? fail_errno(writer, "open") : cut_torn_line(writer);
    if (status != MTP_OK) mtp__jsonl_append_close(writer);
    return status;
}

mtp_status mtp__jsonl_append_text(mtp__jsonl_writer *writer, const char *text, size_t size)
{
    return mtp__fd_append(writer->fd, writer->path, text, size);
}

mtp_status mtp__jsonl_append(mtp__jsonl_writer *writer, const json_t *value)
{
    char *text;
    MTP_TRY(mtp__json_dump(value, MTP__JSON_ONE_LINE | MTP__JSON_NEWLINE, &text));
    const mtp_status status = mtp__jsonl_append_text(writer, text, strlen(text));
    free(text);
    return status;
}

mtp_status mtp__jsonl_sync(mtp__jsonl_writer *writer)
{
    return fsync(writer->fd) == 0 ? MTP_OK : fail_errno(writer, "sync");
}

void mtp__jsonl_append_close(mtp__jsonl_writer *writer)
{
    if (writer->fd >= 0) close(writer->fd);
    free(writer->path);
    *writer = (mtp__jsonl_writer){.fd = -1};
}
