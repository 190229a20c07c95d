/* Reading past the page cache (O_DIRECT): for stores that it could not hold, where filling it costs more processor time
 * than the disk costs waiting, and pushes out what others keep there. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "data/store.h"

mtp_status mtp__shard_file_direct(const mtp__shard *shard, int *fd)
{
    const mtp_status status = mtp__shard_file_as(shard, O_DIRECT, fd);
    if (status == MTP_OK || mtp_last_error()->foreign != EINVAL) return status;
    return MTP_FAIL(MTP_E_UNSUPPORTED,
                    "%s: the file system cannot read past the page cache (O_DIRECT); set direct_io = \"off\"",
                    shard->path);
}

mtp_status mtp__store_pread_direct(const mtp__store_reader *reader, const char *path, uint64_t offset, size_t size,
                                   const char **at, size_t *count)
{
    const uint64_t begin = offset / MTP__STORE_BLOCK * MTP__STORE_BLOCK;
    const size_t before = (size_t)(offset - begin);
    size_t wanted = MTP__STORE_BOUNCE;
    if (size < MTP__STORE_BOUNCE - before)
        wanted = (before + size + MTP__STORE_BLOCK - 1) / MTP__STORE_BLOCK * MTP__STORE_BLOCK;
    ssize_t got;
    do got = pread(reader->direct, reader->bounce, wanted, (off_t)begin);
    while (got < 0 && errno == EINTR);
    if (got < 0) return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: cannot read: %s", path, strerror(errno));
    if ((size_t)got <= before)
        return MTP_FAIL(MTP_E_FORMAT, "%s: the file ends at %llu, %zu bytes too early; pack it again", path,
                        (unsigned long long)(begin + (uint64_t)got), size);
    *at = (const char *)reader->bounce + before;
    *count = (size_t)got - before < size ? (size_t)got - before : size;
    return MTP_OK;
}
