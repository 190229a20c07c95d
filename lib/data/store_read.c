/* Reading the rows of a shard and comparing their checksums. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"
#include "data/store.h"

static int64_t first_row(const mtp__store_row *row, mtp__store_field field)
{
    return (int64_t)(field >= MTP__STORE_TEACHER_LSE ? row->first_teacher : row->first_token);
}

static int64_t num_rows(const mtp__store_row *row, mtp__store_field field)
{
    return field >= MTP__STORE_TEACHER_LSE ? row->num_teacher : row->num_tokens;
}

static mtp_status compare(const mtp__shard *shard, int fd, int64_t sample, mtp__store_field field, uint32_t found)
{
    uint32_t expected;
    const uint64_t at = (uint64_t)(sample * MTP__STORE_FIELDS + (int64_t)field) * sizeof expected;
    MTP_TRY(mtp__store_pread(fd, shard->path, shard->checksums_offset + at, &expected, sizeof expected));
    if (expected == found) return MTP_OK;
    return MTP_FAIL(MTP_E_DATA,
                    "%s: sample %lld (%s): the checksum of %s does not match; the file was damaged, pack it again",
                    shard->path, (long long)sample, mtp__shard_source(shard, sample), mtp__store_field_name(field));
}

/* No NaN and no Inf among bf16 values? */
static bool is_finite_bf16(const void *values, size_t size)
{
    const char *bytes = values;
    unsigned bad = 0;
    for (size_t i = 0; i + 2 <= size; i += 2) {
        uint16_t word;
        memcpy(&word, bytes + i, sizeof word);
        bad |= (word & 0x7f80u) == 0x7f80u;
    }
    return !bad;
}

/* What is looked at while values are read. */
typedef struct looking {
    bool checksum;
    bool *finite; /* NULL: not asked */
    uint32_t crc;
} looking;

enum { HOT = 256 << 10 }; /* stays in a core's cache while it is looked at, so that values pass through memory once */

static void look(looking *at, const char *piece, size_t size)
{
    if (at->checksum) at->crc = mtp__crc32c(at->crc, piece, size);
    if (at->finite) *at->finite = *at->finite && is_finite_bf16(piece, size);
}

static mtp_status read_cached(const mtp__shard *shard, int fd, uint64_t offset, char *buffer, size_t size, looking *at)
{
    while (size > 0) {
        const size_t piece = size < HOT ? size : HOT;
        MTP_TRY(mtp__store_pread(fd, shard->path, offset, buffer, piece));
        look(at, buffer, piece);
        buffer += piece;
        offset += piece;
        size -= piece;
    }
    return MTP_OK;
}

static mtp_status read_direct(const mtp__shard *shard, const mtp__store_reader *reader, uint64_t offset, char *buffer,
                              size_t size, looking *at)
{
    while (size > 0) {
        const char *found;
        size_t count;
        MTP_TRY(mtp__store_pread_direct(reader, shard->path, offset, size, &found, &count));
        if (count > 1 && count < size) count -= count % 2; /* whole values */
        for (size_t done = 0; done < count;) {
            const size_t piece = count - done < HOT ? count - done : HOT;
            memcpy(buffer + done, found + done, piece);
            look(at, buffer + done, piece);
            done += piece;
        }
        buffer += count;
        offset += count;
        size -= count;
    }
    return MTP_OK;
}

mtp_status mtp__shard_fetch(const mtp__shard *shard, const mtp__store_reader *reader, int64_t sample,
                            mtp__store_field field, int64_t begin, int64_t end, void *buffer, bool *finite)
{
    const mtp__store_row *row = &shard->rows[sample];
    const size_t width = mtp__store_row_bytes(&shard->layout, field), size = (size_t)(end - begin) * width;
    const uint64_t offset = shard->offsets[field] + (uint64_t)(first_row(row, field) + begin) * width;
    looking at = {.checksum = begin == 0 && end == num_rows(row, field), .finite = finite};
    if (finite) *finite = true;
    if (size == 0) return MTP_OK;
    if (reader->direct >= 0)
        MTP_TRY(read_direct(shard, reader, offset, buffer, size, &at));
    else
        MTP_TRY(read_cached(shard, reader->fd, offset, buffer, size, &at));
    return at.checksum ? compare(shard, reader->fd, sample, field, at.crc) : MTP_OK;
}

mtp_status mtp__shard_read(const mtp__shard *shard, int fd, int64_t sample, mtp__store_field field, int64_t begin,
                           int64_t end, void *buffer)
{
    const mtp__store_reader reader = {.fd = fd, .direct = -1};
    return mtp__shard_fetch(shard, &reader, sample, field, begin, end, buffer, NULL);
}

/* The system starts no more for one call than the read-ahead of the device, so the range is told in pieces. */
void mtp__shard_announce(const mtp__shard *shard, int fd, int64_t sample, mtp__store_field field, int64_t begin,
                         int64_t end)
{
    enum { STEP = 128 << 10 };
    const size_t width = mtp__store_row_bytes(&shard->layout, field);
    const uint64_t first = (uint64_t)first_row(&shard->rows[sample], field);
    uint64_t offset = shard->offsets[field] + (first + (uint64_t)begin) * width;
    for (uint64_t left = (uint64_t)(end - begin) * width; left > 0;) {
        const uint64_t size = left < STEP ? left : STEP;
        (void)posix_fadvise(fd, (off_t)offset, (off_t)size, POSIX_FADV_WILLNEED);
        offset += size;
        left -= size;
    }
}

/* ---- the whole file ------------------------------------------------------------------------------------------- */

enum { PIECE = 1 << 20 };

/* In pieces, so that a sample of any length takes no more memory. */
static mtp_status verify_field(const mtp__shard *shard, int fd, int64_t sample, mtp__store_field field, char *piece)
{
    const mtp__store_row *row = &shard->rows[sample];
    const uint64_t width = mtp__store_row_bytes(&shard->layout, field);
    uint64_t left = (uint64_t)num_rows(row, field) * width;
    uint64_t offset = shard->offsets[field] + (uint64_t)first_row(row, field) * width;
    uint32_t crc = 0;
    while (left > 0) {
        const size_t size = left < PIECE ? (size_t)left : PIECE;
        MTP_TRY(mtp__store_pread(fd, shard->path, offset, piece, size));
        crc = mtp__crc32c(crc, piece, size);
        offset += size;
        left -= size;
    }
    return compare(shard, fd, sample, field, crc);
}

static mtp_status verify_tail(const mtp__shard *shard, int fd, char *piece)
{
    uint64_t left = (uint64_t)shard->num_samples * MTP__STORE_FIELDS * sizeof(uint32_t);
    uint64_t offset = shard->checksums_offset;
    uint32_t crc[3] = {mtp__crc32c(0, shard->rows, (size_t)shard->num_samples * sizeof *shard->rows), 0,
                       mtp__crc32c(0, shard->sources, shard->sources_size)};
    static const char *const names[3] = {"index", "checksums", "sources"};
    while (left > 0) {
        const size_t size = left < PIECE ? (size_t)left : PIECE;
        MTP_TRY(mtp__store_pread(fd, shard->path, offset, piece, size));
        crc[1] = mtp__crc32c(crc[1], piece, size);
        offset += size;
        left -= size;
    }
    for (int i = 0; i < 3; i++)
        if (crc[i] != shard->tail_crc[i])
            return MTP_FAIL(MTP_E_DATA, "%s: the checksum of %s does not match; the file was damaged, pack it again",
                            shard->path, names[i]);
    return MTP_OK;
}

mtp_status mtp__shard_verify(const mtp__shard *shard)
{
    int fd;
    MTP_TRY(mtp__shard_file(shard, &fd));
    char *piece = malloc(PIECE);
    mtp_status status = piece ? verify_tail(shard, fd, piece) : MTP_FAIL(MTP_E_MEMORY, "out of memory");
    for (int64_t i = 0; i < shard->num_samples && status == MTP_OK; i++)
        for (int field = 0; field < MTP__STORE_FIELDS && status == MTP_OK; field++)
            status = verify_field(shard, fd, i, (mtp__store_field)field, piece);
    free(piece);
    close(fd);
    return status;
}
