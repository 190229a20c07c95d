/* Writing checkpoints: shards into a staging directory, the manifest last, and then the name. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/text.h"
#include "mtp/safetensors.h"
#include "run/checkpoint.h"

enum { BLOCK = 1 << 20 };

static mtp_status no_memory(void)
{
    return MTP_FAIL(MTP_E_MEMORY, "out of memory for a checkpoint");
}

/* ---- names ---------------------------------------------------------------------------------------------------- */

void mtp__shard_name(int64_t rank, int64_t world_size, char name[MTP__SHARD_NAME])
{
    snprintf(name, MTP__SHARD_NAME, "shard-%05lld-of-%05lld.safetensors", (long long)rank, (long long)world_size);
}

/* "RUN/checkpoints/.step-00000400<suffix>" */
static mtp_status hidden_path(const char *run_directory, int64_t step, const char *suffix, char **path)
{
    char *final = NULL;
    mtp__text text = {0};
    MTP_TRY(mtp__checkpoint_path(run_directory, step, &final));
    mtp__text_add(&text, "%s/checkpoints/.%s%s", run_directory, mtp__path_name(final), suffix);
    free(final);
    *path = text.data;
    return mtp__text_check(&text);
}

mtp_status mtp__checkpoint_staging(const char *run_directory, int64_t step, char **path)
{
    return hidden_path(run_directory, step, ".tmp", path);
}

/* ---- a shard -------------------------------------------------------------------------------------------------- */

typedef struct device_tensor {
    mtp_context *context;
    const char *memory;
} device_tensor;

static mtp_status download(void *user, size_t offset, void *buffer, size_t size)
{
    const device_tensor *tensor = user;
    return tensor->context->ops->download(tensor->context->device, buffer, tensor->memory + offset, size);
}

static mtp_status write_tensors(const char *path, const mtp__pieces *pieces, const void *values)
{
    const size_t count = (size_t)pieces->count;
    mtp_safetensors_source *sources = calloc(count + 1, sizeof *sources);
    device_tensor *tensors = calloc(count + 1, sizeof *tensors);
    mtp_status status = sources && tensors ? MTP_OK : no_memory();
    const char *next = values;
    for (size_t i = 0; status == MTP_OK && i < count; i++) {
        const mtp__piece *piece = &pieces->items[i];
        tensors[i] = (device_tensor){pieces->context, piece->view.data};
        sources[i] = (mtp_safetensors_source){.name = piece->key,
                                              .dtype = piece->view.dtype,
                                              .rank = piece->view.rank,
                                              .shape = piece->view.shape,
                                              .data = next};
        if (next) next += (size_t)mtp_view_count(piece->view) * mtp_dtype_size(piece->view.dtype);
        if (next) continue;
        sources[i].fill = download;
        sources[i].user = &tensors[i];
    }
    if (status == MTP_OK) status = mtp_safetensors_write(path, NULL, 0, sources, count);
    free(sources);
    free(tensors);
    return status;
}

static mtp_status checksum(int fd, const char *path, char *block, uint64_t *bytes, uint32_t *crc32c)
{
    *bytes = 0;
    *crc32c = 0;
    for (;;) {
        const ssize_t count = read(fd, block, BLOCK);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s cannot be read: %s", path, strerror(errno));
        if (count == 0) return MTP_OK;
        *crc32c = mtp__crc32c(*crc32c, block, (size_t)count);
        *bytes += (uint64_t)count;
    }
}

/* The file as it was written, read back: size and checksum of what a later load will find. Not mapped: the pages of a
 * whole checkpoint would count as memory of the process. */
static mtp_status describe(const char *path, uint64_t *bytes, uint32_t *crc32c)
{
    char *block = malloc(BLOCK);
    if (!block) return no_memory();
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const mtp_status status = fd < 0
                                  ? MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s cannot be opened: %s", path, strerror(errno))
                                  : checksum(fd, path, block, bytes, crc32c);
    if (fd >= 0) close(fd);
    free(block);
    return status;
}

mtp_status mtp__shard_write(const char *run_directory, int64_t step, const mtp__share *share, const mtp__pieces *pieces,
                            const void *values, uint64_t *bytes, uint32_t *crc32c)
{
    char name[MTP__SHARD_NAME], *directory = NULL, *path = NULL;
    mtp__shard_name(share->rank, share->world_size, name);
    mtp_status status = mtp__checkpoint_staging(run_directory, step, &directory);
    if (status == MTP_OK) status = mtp__dir_create(directory);
    if (status == MTP_OK) status = mtp__path_join(directory, name, &path);
    if (status == MTP_OK) status = write_tensors(path, pieces, values);
    if (status == MTP_OK) status = describe(path, bytes, crc32c);
    free(directory);
    free(path);
    return status;
}

/* ---- the manifest, and the name ------------------------------------------------------------------------------- */

/* Ranks that write into directories of their own, on machines that share no file system, end here. */
static mtp_status check_there(const char *staging, const mtp__manifest *manifest)
{
    for (int64_t i = 0; i < manifest->num_shards; i++) {
        const mtp__shard *shard = &manifest->shards[i];
        struct stat info;
        char *path = NULL;
        MTP_TRY(mtp__path_join(staging, shard->file, &path));
        const bool there = stat(path, &info) == 0 && (uint64_t)info.st_size == shard->bytes;
        const mtp_status status =
            there ? MTP_OK
                  : MTP_FAIL(MTP_E_IO,
                             "%s, which rank %lld wrote, is not there in full; output_dir must be a directory that all "
                             "ranks share",
                             path, (long long)i);
        free(path);
        if (status != MTP_OK) return status;
    }
    return MTP_OK;
}

/* Give the finished directory its name. One that has it already is moved out of the way first and removed last. */
static mtp_status give_name(const char *parent, const char *temporary, const char *path, const char *old)
{
    if (mtp__path_exists(path)) {
        MTP_TRY(mtp__dir_remove(old));
        if (rename(path, old) != 0)
            return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s cannot be moved away: %s", path, strerror(errno));
    }
    if (rename(temporary, path) != 0)
        return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s cannot be renamed to %s: %s", temporary, path, strerror(errno));
    MTP_TRY(mtp__dir_sync(parent));
    return mtp__dir_remove(old);
}

static mtp_status publish(const char *run_directory, const char *staging, const char *path, const char *old,
                          const mtp__manifest *manifest)
{
    char *parent = NULL, *file = NULL;
    mtp_status status = check_there(staging, manifest);
    if (status == MTP_OK) status = mtp__path_join(run_directory, "checkpoints", &parent);
    if (status == MTP_OK) status = mtp__path_join(staging, "manifest.json", &file);
    if (status == MTP_OK) status = mtp__manifest_write(manifest, file);
    if (status == MTP_OK) status = mtp__dir_sync(run_directory); /* that it has checkpoints/ */
    if (status == MTP_OK) status = give_name(parent, staging, path, old);
    free(parent);
    free(file);
    return status;
}

mtp_status mtp__checkpoint_publish(const char *run_directory, const mtp__manifest *manifest)
{
    char *staging = NULL, *path = NULL, *old = NULL;
    mtp_status status = mtp__checkpoint_staging(run_directory, manifest->step, &staging);
    if (status == MTP_OK) status = mtp__checkpoint_path(run_directory, manifest->step, &path);
    if (status == MTP_OK) status = hidden_path(run_directory, manifest->step, MTP__CHECKPOINT_OLD, &old);
    if (status == MTP_OK) status = publish(run_directory, staging, path, old, manifest);
    free(staging);
    free(path);
    free(old);
    return status;
}

void mtp__checkpoint_abandon(const char *run_directory, int64_t step)
{
    const mtp_error first = *mtp_last_error();
    char *staging = NULL;
    if (mtp__checkpoint_staging(run_directory, step, &staging) == MTP_OK) mtp__dir_remove(staging);
    if (first.status != MTP_OK) mtp__fail_again(&first);
    free(staging);
}

static mtp_status save(const char *run_directory, mtp__manifest *manifest, const mtp_drafter *drafter,
                       const mtp__optimizer *optimizer)
{
    const mtp__share share = {.world_size = 1};
    mtp__pieces pieces = {0};
    char name[MTP__SHARD_NAME];
    uint64_t bytes = 0;
    uint32_t crc32c = 0;
    mtp__shard_name(0, 1, name);
    manifest->computation = mtp__checkpoint_computation(drafter);
    mtp_status status = mtp__pieces_collect(drafter, optimizer, &share, &pieces);
    if (status == MTP_OK)
        status = mtp__shard_write(run_directory, manifest->step, &share, &pieces, NULL, &bytes, &crc32c);
    if (status == MTP_OK) status = mtp__manifest_add_shard(manifest, name, bytes, crc32c);
    if (status == MTP_OK) status = mtp__checkpoint_publish(run_directory, manifest);
    mtp__pieces_free(&pieces);
    return status;
}

mtp_status mtp__checkpoint_save(const char *run_directory, mtp__manifest *manifest, const mtp_drafter *drafter,
                                const mtp__optimizer *optimizer)
{
    const mtp_status status = save(run_directory, manifest, drafter, optimizer);
    if (status == MTP_OK) return MTP_OK;
    mtp__checkpoint_abandon(run_directory, manifest->step);
    return mtp__fail_prefix(status, "checkpoint of step %lld not saved", (long long)manifest->step);
}
