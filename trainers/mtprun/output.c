#include "output.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* As a whole, so that lines of ranks do not mix. A reader that went away is no reason to end a run. */
static void write_all(int fd, const char *data, size_t size)
{
    while (size > 0) {
        const ssize_t done = write(fd, data, size);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return;
        data += done;
        size -= (size_t)done;
    }
}

static void keep(tail *last, const char *line, size_t size)
{
    if (size > 0 && (line[size - 1] == '\n' || line[size - 1] == '\r')) size--;
    if (size == 0) return;
    if (size > TAIL_LETTERS - 1) size = TAIL_LETTERS - 1;
    char *slot = last->lines[last->count++ % TAIL_LINES];
    memcpy(slot, line, size);
    slot[size] = '\0';
}

/* A line with its end, which is a carriage return where a program draws over its own line. */
static void pass_on(stream *own, const char *line, size_t size)
{
    char prefixed[LINE_LETTERS + 32];
    keep(own->last, line, size);
    if (own->log >= 0) write_all(own->log, line, size);
    if (own->console < 0) return;
    const int prefix = snprintf(prefixed, sizeof prefixed, "[%d] ", own->rank);
    memcpy(prefixed + prefix, line, size);
    write_all(own->console, prefixed, (size_t)prefix + size);
}

static void pass_lines(stream *own)
{
    size_t start = 0;
    for (size_t i = 0; i < own->used; i++) {
        if (own->line[i] != '\n' && own->line[i] != '\r') continue;
        if (own->line[i] == '\r' && (i + 1 == own->used || own->line[i + 1] == '\n')) continue;
        pass_on(own, own->line + start, i + 1 - start);
        start = i + 1;
    }
    own->used -= start;
    memmove(own->line, own->line + start, own->used);
}

static void pass_rest(stream *own)
{
    if (own->used == 0) return;
    /* a full buffer without an end of line: broken here */
    if (own->used == sizeof own->line) own->used--;
    own->line[own->used++] = '\n';
    pass_on(own, own->line, own->used);
    own->used = 0;
}

void stream_read(stream *own)
{
    while (own->fd >= 0) {
        if (own->used >= sizeof own->line - 1) pass_rest(own);
        const ssize_t got = read(own->fd, own->line + own->used, sizeof own->line - 1 - own->used);
        if (got > 0) {
            own->used += (size_t)got;
            pass_lines(own);
        } else if (got == 0) {
            stream_close(own);
        } else if (errno != EINTR) {
            if (errno != EAGAIN && errno != EWOULDBLOCK) stream_close(own);
            return;
        }
    }
}

void stream_close(stream *own)
{
    pass_rest(own);
    if (own->fd >= 0) close(own->fd);
    if (own->log >= 0) close(own->log);
    own->fd = own->log = -1;
}

void tail_print(const tail *own, int rank)
{
    const int first = own->count > TAIL_LINES ? own->count - TAIL_LINES : 0;
    for (int i = first; i < own->count; i++) fprintf(stderr, "  [%d] %s\n", rank, own->lines[i % TAIL_LINES]);
    if (own->count == 0) fprintf(stderr, "  (rank %d printed nothing)\n", rank);
}
