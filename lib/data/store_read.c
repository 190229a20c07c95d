/* Reading the rows of a shard and comparing their checksums. */
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

mtp_status mtp__shard_read(const mtp__shard *shard, int fd, int64_t sample, mtp__store_field field, int64_t begin,
                           int64_t end, void *buffer)
{
    const mtp__store_row *row = &shard->rows[sample];
    const size_t width = mtp__store_row_bytes(&shard->layout, field), size = (size_t)(end - begin) * width;
    if (size == 0) return MTP_OK;
    const uint64_t offset = shard->offsets[field] + (uint64_t)(first_row(row, field) + begin) * width;
    MTP_TRY(mtp__store_pread(fd, shard->path, offset, buffer, size));
    if (begin != 0 || end != num_rows(row, field)) return MTP_OK;
    return compare(shard, fd, sample, field, mtp__crc32c(0, buffer, size));
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
