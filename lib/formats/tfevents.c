#include "formats/tfevents.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"

enum { BUFFER = 1 << 16, MOST_FILES = 1000, MAX_RECORD = 16 + 64 + MTP__TFEVENTS_MAX_TAG };

struct mtp__tfevents {
    int fd;
    char *path;
    size_t used;
    unsigned char buffer[BUFFER];
};

/* ---- protocol buffers ----------------------------------------------------------------------------------------- */

typedef struct message {
    unsigned char byte[MAX_RECORD];
    size_t size;
} message;

/* Wire types. */
enum { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };

static void put_varint(message *to, uint64_t value)
{
    for (; value >= 0x80; value >>= 7) to->byte[to->size++] = (unsigned char)(value | 0x80);
    to->byte[to->size++] = (unsigned char)value;
}

static void put_little_endian(message *to, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++) to->byte[to->size++] = (unsigned char)(value >> 8 * i & 0xff);
}

static void put_key(message *to, unsigned field, unsigned wire)
{
    put_varint(to, field << 3 | wire);
}

static void put_bytes(message *to, unsigned field, const void *data, size_t size)
{
    put_key(to, field, BYTES);
    put_varint(to, size);
    memcpy(to->byte + to->size, data, size);
    to->size += size;
}

static void put_double(message *to, unsigned field, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_key(to, field, FIXED64);
    put_little_endian(to, bits, 8);
}

static void put_float(message *to, unsigned field, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_key(to, field, FIXED32);
    put_little_endian(to, bits, 4);
}

/* ---- records -------------------------------------------------------------------------------------------------- */

/* TensorFlow stores checksums rotated and shifted, so that a checksum of data with checksums in it stays useful. */
static uint32_t masked_crc(const void *data, size_t size)
{
    const uint32_t crc = mtp__crc32c(0, data, size);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static mtp_status put_record(mtp__tfevents *events, const message *event)
{
    message frame = {.size = 0};
    if (events->used + event->size + 16 > BUFFER) MTP_TRY(mtp__tfevents_flush(events));
    put_little_endian(&frame, event->size, 8);
    put_little_endian(&frame, masked_crc(frame.byte, 8), 4);
    memcpy(frame.byte + frame.size, event->byte, event->size);
    frame.size += event->size;
    put_little_endian(&frame, masked_crc(event->byte, event->size), 4);
    memcpy(events->buffer + events->used, frame.byte, frame.size);
    events->used += frame.size;
    return MTP_OK;
}

static mtp_status put_version(mtp__tfevents *events, double wall_time)
{
    static const char version[] = "brain.Event:2";
    message event = {.size = 0};
    put_double(&event, 1, wall_time);
    put_bytes(&event, 3, version, sizeof version - 1);
    return put_record(events, &event);
}

mtp_status mtp__tfevents_scalar(mtp__tfevents *events, const char *tag, int64_t step, double wall_time, float value)
{
    message item = {.size = 0}, summary = {.size = 0}, event = {.size = 0};
    const size_t length = strlen(tag);
    if (length > MTP__TFEVENTS_MAX_TAG)
        return MTP_FAIL(MTP_E_ARGUMENT, "TensorBoard tag '%s' is longer than %d bytes", tag, MTP__TFEVENTS_MAX_TAG);
    put_bytes(&item, 1, tag, length);
    put_float(&item, 2, value);
    put_bytes(&summary, 1, item.byte, item.size);
    put_double(&event, 1, wall_time);
    put_key(&event, 2, VARINT);
    put_varint(&event, (uint64_t)step);
    put_bytes(&event, 5, summary.byte, summary.size);
    return put_record(events, &event);
}

/* ---- the file ------------------------------------------------------------------------------------------------- */

static mtp_status fail_errno(const char *path, const char *what)
{
    const int code = errno;
    return MTP_FAIL_FOREIGN(MTP_E_IO, code, "%s: cannot %s: %s", path, what, strerror(code));
}

/* Opens the first name that is free: files of an earlier part of the run are never touched. */
static mtp_status create_file(mtp__tfevents *events, const char *directory, double wall_time)
{
    char host[256] = "localhost";
    if (gethostname(host, sizeof host - 1) != 0 || host[0] == '\0' || strchr(host, '/')) strcpy(host, "localhost");
    for (int i = 0; i < MOST_FILES; i++) {
        if (asprintf(&events->path, "%s/events.out.tfevents.%010lld.%s.%ld.%d", directory, (long long)wall_time, host,
                     (long)getpid(), i) < 0) {
            events->path = NULL;
            return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", directory);
        }
        events->fd = open(events->path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
        if (events->fd >= 0) return MTP_OK;
        if (errno != EEXIST) return fail_errno(events->path, "create");
        free(events->path);
        events->path = NULL;
    }
    return MTP_FAIL(MTP_E_IO, "%s: %d event files of this second and process are there already", directory, MOST_FILES);
}

static void release(mtp__tfevents *events)
{
    if (events->fd >= 0) close(events->fd);
    free(events->path);
    free(events);
}

mtp_status mtp__tfevents_create(const char *directory, double wall_time, mtp__tfevents **events)
{
    mtp_status status;
    *events = NULL;
    MTP_TRY(mtp__dir_create(directory));
    mtp__tfevents *created = calloc(1, sizeof *created);
    if (!created) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", directory);
    created->fd = -1;
    MTP_TRY_GOTO(status, create_file(created, directory, wall_time), failed);
    MTP_TRY_GOTO(status, put_version(created, wall_time), failed);
    MTP_TRY_GOTO(status, mtp__tfevents_flush(created), failed);
    *events = created;
    return MTP_OK;
failed:
    release(created);
    return status;
}

mtp_status mtp__tfevents_flush(mtp__tfevents *events)
{
    const size_t size = events->used;
    events->used = 0;
    return size > 0 ? mtp__fd_append(events->fd, events->path, events->buffer, size) : MTP_OK;
}

mtp_status mtp__tfevents_close(mtp__tfevents *events)
{
    if (!events) return MTP_OK;
    mtp_status status = mtp__tfevents_flush(events);
    if (status == MTP_OK && fsync(events->fd) != 0) status = fail_errno(events->path, "sync");
    release(events);
    return status;
}

const char *mtp__tfevents_path(const mtp__tfevents *events)
{
    return events->path;
}
