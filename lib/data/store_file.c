/* The file of a shard that was opened, and what the shard says of itself. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/store.h"

mtp_status mtp__store_open_file(const char *path, int flags, int *fd, struct stat *info)
{
    *fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | flags);
    if (*fd < 0)
        return MTP_FAIL_FOREIGN(errno == ENOENT ? MTP_E_NOT_FOUND : MTP_E_IO, errno, "cannot open: %s",
                                strerror(errno));
    if (fstat(*fd, info) == 0 && S_ISREG(info->st_mode)) return MTP_OK;
    close(*fd);
    return MTP_FAIL(MTP_E_FORMAT, "is no regular file");
}

int64_t mtp__store_time(const struct stat *info)
{
    return (int64_t)info->st_mtim.tv_sec * 1000000000 + info->st_mtim.tv_nsec;
}

void mtp__shard_close(mtp__shard *shard)
{
    if (!shard) return;
    free(shard->path);
    free(shard->rows);
    free(shard->sources);
    free(shard->quarantine);
    free(shard);
}

mtp_status mtp__shard_check_verifier(const mtp__shard *shard, const mtp_verifier_config *verifier)
{
    const mtp__store_layout expected = mtp__store_layout_of(verifier), *found = &shard->layout;
    const struct {
        const char *what;
        int64_t found, expected;
    } pairs[] = {{"vocab_size", found->vocab_size, expected.vocab_size},
                 {"hidden_size", found->hidden_size, expected.hidden_size},
                 {"sliding_window", found->sliding_window, expected.sliding_window},
                 {"local K/V heads", found->num_kv_heads[0], expected.num_kv_heads[0]},
                 {"local head_dim", found->head_dim[0], expected.head_dim[0]},
                 {"global K/V heads", found->num_kv_heads[1], expected.num_kv_heads[1]},
                 {"global head_dim", found->head_dim[1], expected.head_dim[1]}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        if (pairs[i].found != pairs[i].expected)
            return MTP_FAIL(MTP_E_DATA, "%s: packed for another verifier: %s is %lld, this verifier's is %lld",
                            shard->path, pairs[i].what, (long long)pairs[i].found, (long long)pairs[i].expected);
    return MTP_OK;
}

const char *mtp__shard_source(const mtp__shard *shard, int64_t sample)
{
    return shard->sources + shard->rows[sample].source;
}

mtp_status mtp__shard_file(const mtp__shard *shard, int *fd)
{
    return mtp__shard_file_as(shard, 0, fd);
}

mtp_status mtp__shard_file_as(const mtp__shard *shard, int flags, int *fd)
{
    struct stat info;
    MTP_TRY_AT(mtp__store_open_file(shard->path, flags, fd, &info), "%s", shard->path);
    if ((uint64_t)info.st_size == shard->file_size && (uint64_t)info.st_ino == shard->file_node &&
        mtp__store_time(&info) == shard->file_time)
        return MTP_OK;
    close(*fd);
    return MTP_FAIL(MTP_E_DATA, "%s: the file changed since it was opened", shard->path);
}
