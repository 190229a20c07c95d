/* Protects: whatever the bytes, a shard is refused with a message, or every read of it stays inside its buffers and
 * gives an index that fits the fields. HDF5's metadata and the index, scales included, are what is damaged here. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/store.h"

static int read_field(const mtp__shard *shard, int fd, int64_t sample, mtp__store_field field)
{
    const mtp__store_row *row = &shard->rows[sample];
    const int64_t rows = field >= MTP__STORE_TEACHER_LSE ? row->num_teacher : row->num_tokens;
    const size_t width = mtp__store_row_bytes(&shard->layout, field);
    void *buffer = malloc((size_t)rows * width + 1);
    FUZZ_CHECK(buffer);
    int accepted = mtp__shard_read(shard, fd, sample, field, 0, rows, buffer) == MTP_OK;
    if (rows > 1) accepted &= mtp__shard_read(shard, fd, sample, field, 1, rows, buffer) == MTP_OK;
    free(buffer);
    return accepted;
}

static int use(const mtp__shard *shard)
{
    int fd, accepted = 1;
    if (mtp__shard_file(shard, &fd) != MTP_OK) return 0;
    for (int64_t i = 0; i < shard->num_samples; i++) {
        FUZZ_CHECK(shard->rows[i].num_tokens >= 1);
        FUZZ_CHECK(strlen(mtp__shard_source(shard, i)) <= shard->sources_size);
        for (int field = 0; field < MTP__STORE_FIELDS; field++)
            accepted &= read_field(shard, fd, i, (mtp__store_field)field);
    }
    close(fd);
    return accepted & (mtp__shard_verify(shard) == MTP_OK);
}

/* HDF5 opens by name, and by no link to a file in memory: a file system in memory where there is one. */
static int create(char path[32])
{
    static const char *const places[] = {"/dev/shm", "/tmp"};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        snprintf(path, 32, "%s/mtp-fuzz-XXXXXX", places[i]);
        const int fd = mkstemp(path);
        if (fd >= 0) return fd;
    }
    return -1;
}

int mtp_fuzz_accepts(const uint8_t *data, size_t size)
{
    char path[32]; /* the file lives as long as this call */
    mtp__shard *shard = NULL;
    const int fd = create(path);
    FUZZ_CHECK(fd >= 0 && (size == 0 || write(fd, data, size) == (ssize_t)size));
    close(fd);
    int accepted = mtp__shard_open(path, &shard) == MTP_OK;
    if (accepted) accepted = use(shard);
    mtp__shard_close(shard);
    unlink(path);
    return accepted;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    (void)mtp_fuzz_accepts(data, size);
    return 0;
}
