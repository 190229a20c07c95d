/* Checkpoint directories: finding a good one, and keeping house. */
#include "run/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/text.h"

enum { MAX_MANIFEST = 1 << 24 };
static const char prefix[] = "step-";

/* ---- names ---------------------------------------------------------------------------------------------------- */

mtp_status mtp__checkpoint_path(const char *run_directory, int64_t step, char **path)
{
    mtp__text text = {0};
    mtp__text_add(&text, "%s/checkpoints/%s%08lld", run_directory, prefix, (long long)step);
    *path = text.data;
    return mtp__text_check(&text);
}

/* The step of a directory's name; -1 for another name. */
static int64_t step_of(const char *name)
{
    const char *digits = name + strlen(prefix);
    if (strncmp(name, prefix, strlen(prefix)) != 0 || strlen(digits) < 8 || strlen(digits) > 18) return -1;
    if (strspn(digits, "0123456789") != strlen(digits)) return -1;
    return strtoll(digits, NULL, 10);
}

typedef struct step_list {
    int64_t *steps; /* ascending */
    int64_t count;
} step_list;

static int compare_steps(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Steps of the checkpoint directories of a run, good or not. A run that has no directory for them yet has none. */
static mtp_status list_steps(const char *run_directory, step_list *list)
{
    char *directory = NULL;
    mtp__name_list names = {0};
    *list = (step_list){0};
    MTP_TRY(mtp__path_join(run_directory, "checkpoints", &directory));
    mtp_status status = MTP_OK;
    if (mtp__dir_exists(directory)) status = mtp__dir_list(directory, MTP__LIST_DIRECTORIES, NULL, &names);
    free(directory);
    if (status != MTP_OK) return status;
    list->steps = calloc(names.count + 1, sizeof *list->steps);
    for (size_t i = 0; list->steps && i < names.count; i++)
        if (step_of(names.names[i]) >= 0) list->steps[list->count++] = step_of(names.names[i]);
    mtp__name_list_free(&names);
    if (!list->steps) return MTP_FAIL(MTP_E_MEMORY, "out of memory for the list of checkpoints");
    qsort(list->steps, (size_t)list->count, sizeof *list->steps, compare_steps);
    return MTP_OK;
}

/* ---- opening -------------------------------------------------------------------------------------------------- */

static mtp_status check_shard(const mtp__shard *shard, const char *path, bool verify)
{
    mtp__file_map map = {0};
    MTP_TRY(mtp__file_map_open(&map, path));
    mtp_status status = MTP_OK;
    if (map.size != shard->bytes)
        status = MTP_FAIL(MTP_E_DATA, "%s has %zu bytes, the manifest says %llu: damaged or incomplete", path, map.size,
                          (unsigned long long)shard->bytes);
    else if (verify && mtp__crc32c(0, map.data, map.size) != shard->crc32c)
        status = MTP_FAIL(MTP_E_DATA, "%s: the checksum is not the one of the manifest: damaged", path);
    mtp__file_map_close(&map);
    return status;
}

static mtp_status check_shards(const mtp__manifest *manifest, bool verify)
{
    for (int64_t i = 0; i < manifest->num_shards; i++) {
        char *path = NULL;
        MTP_TRY(mtp__path_join(manifest->directory, manifest->shards[i].file, &path));
        const mtp_status status = check_shard(&manifest->shards[i], path, verify);
        free(path);
        if (status != MTP_OK) return status;
    }
    return MTP_OK;
}

mtp_status mtp__checkpoint_open(const char *directory, bool verify, mtp__manifest **manifest)
{
    char *path = NULL, *text = NULL;
    size_t size = 0;
    mtp__manifest *opened = NULL;
    *manifest = NULL;
    MTP_TRY(mtp__path_join(directory, "manifest.json", &path));
    mtp_status status = mtp__file_read(path, MAX_MANIFEST, &text, &size);
    if (status == MTP_OK) status = mtp__manifest_parse(text, size, path, &opened);
    free(text);
    free(path);
    if (status == MTP_OK) {
        opened->directory = strdup(directory);
        status = opened->directory ? check_shards(opened, verify) : MTP_FAIL(MTP_E_MEMORY, "out of memory for a path");
    }
    if (status != MTP_OK) {
        const mtp_error first = *mtp_last_error();
        mtp__manifest_free(opened);
        /* a file that is missing from a directory that is there is damage like any other */
        if (status == MTP_E_NOT_FOUND && mtp__dir_exists(directory)) status = MTP_E_DATA;
        return mtp__fail(status, first.foreign, first.file, first.line, "checkpoint %s: %s", directory, first.message);
    }
    *manifest = opened;
    return MTP_OK;
}

/* The newest good checkpoint of a run, looked for from the newest on; `*damaged` counts those that were skipped. One
 * that cannot be read (permission, a failing disk) may be good and is not passed over. */
static mtp_status find_newest(const char *run_directory, const mtp_logger *logger, int64_t *damaged,
                              mtp__manifest **manifest)
{
    step_list list;
    mtp_status status = list_steps(run_directory, &list);
    *manifest = NULL;
    *damaged = 0;
    for (int64_t i = list.count - 1; status == MTP_OK && !*manifest && i >= 0; i--) {
        char *path = NULL;
        status = mtp__checkpoint_path(run_directory, list.steps[i], &path);
        if (status == MTP_OK) status = mtp__checkpoint_open(path, true, manifest);
        free(path);
        if (status == MTP_OK || status == MTP_E_VERSION || status == MTP_E_MEMORY) continue;
        if (status == MTP_E_IO) {
            const mtp_error first = *mtp_last_error();
            status = mtp__fail(status, first.foreign, first.file, first.line,
                               "%s; make it readable, or remove it to go on from an older one", first.message);
            continue;
        }
        mtp_log(logger, MTP_LOG_WARNING, "skipped: %s", mtp_last_error()->message);
        ++*damaged;
        status = MTP_OK;
    }
    free(list.steps);
    return status;
}

/* "run/checkpoints/step-00000400[/]": "run". NULL when the path has not that form (or memory is out). */
static char *run_of(const char *checkpoint)
{
    char *path = strdup(checkpoint);
    for (int level = 0; path && level < 2; level++) {
        size_t length = strlen(path);
        while (length > 1 && path[length - 1] == '/') path[--length] = '\0';
        char *slash = strrchr(path, '/');
        const char *name = slash ? slash + 1 : path;
        if ((level == 0 && step_of(name) < 0) || (level == 1 && strcmp(name, "checkpoints") != 0)) {
            free(path);
            return NULL;
        }
        if (!slash)
            strcpy(path, "."); /* a path has at least one letter */
        else
            slash[slash == path] = '\0';
    }
    return path;
}

/* Refuse a damaged checkpoint, and name the good one beside it. */
static mtp_status refuse(mtp_status status, const char *path)
{
    char *message = strdup(mtp_last_error()->message);
    char *run = run_of(path);
    mtp__manifest *other = NULL;
    int64_t damaged;
    if (message && run && find_newest(run, NULL, &damaged, &other) == MTP_OK && other)
        status = MTP_FAIL(status, "%s; the newest good checkpoint beside it is %s", message, other->directory);
    else if (message)
        status = MTP_FAIL(status, "%s", message);
    mtp__manifest_free(other);
    free(message);
    free(run);
    return status;
}

static bool has(const char *directory, const char *name)
{
    char *path = NULL;
    const bool there = mtp__path_join(directory, name, &path) == MTP_OK && mtp__path_exists(path);
    free(path);
    return there;
}

mtp_status mtp__checkpoint_find(const char *path, const mtp_logger *logger, mtp__manifest **manifest)
{
    int64_t damaged = 0;
    *manifest = NULL;
    if (!mtp__dir_exists(path))
        return MTP_FAIL(MTP_E_NOT_FOUND, "%s: there is no such directory; expected a run or a checkpoint of one", path);
    if (!has(path, "checkpoints") && !has(path, "run.json")) {
        if (!has(path, "manifest.json") && step_of(mtp__path_name(path)) < 0)
            return MTP_FAIL(MTP_E_NOT_FOUND,
                            "%s is neither a run (run.json, checkpoints/) nor a checkpoint (manifest.json)", path);
        const mtp_status status = mtp__checkpoint_open(path, true, manifest);
        return status == MTP_OK ? MTP_OK : refuse(status, path);
    }
    MTP_TRY(find_newest(path, logger, &damaged, manifest));
    if (*manifest) return MTP_OK;
    if (damaged)
        return MTP_FAIL(MTP_E_DATA, "run %s has no good checkpoint: %lld are damaged; the last problem: %s", path,
                        (long long)damaged, mtp_last_error()->message);
    return MTP_FAIL(MTP_E_NOT_FOUND, "run %s has no checkpoint yet", path);
}

/* ---- keeping house -------------------------------------------------------------------------------------------- */

/* "checkpoints/.step-00000400.old" without a "step-00000400" beside it: put it back. */
static mtp_status put_back(const char *directory, const char *name, bool *done)
{
    const size_t length = strlen(name), suffix = strlen(MTP__CHECKPOINT_OLD);
    char *from = NULL, *to = NULL;
    *done = false;
    if (length <= suffix + 1 || strcmp(name + length - suffix, MTP__CHECKPOINT_OLD) != 0) return MTP_OK;
    mtp_status status = mtp__path_join(directory, name, &from);
    if (status == MTP_OK) status = mtp__path_join(directory, name + 1, &to);
    if (status == MTP_OK) {
        to[strlen(to) - suffix] = '\0';
        *done = step_of(mtp__path_name(to)) >= 0 && !mtp__path_exists(to);
        if (*done && rename(from, to) != 0)
            status =
                MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s cannot be renamed back to %s: %s", from, to, strerror(errno));
    }
    free(from);
    free(to);
    return status;
}

mtp_status mtp__checkpoint_remove_leftovers(const char *run_directory)
{
    char *directory = NULL;
    mtp__name_list names = {0};
    MTP_TRY(mtp__path_join(run_directory, "checkpoints", &directory));
    mtp_status status = MTP_OK;
    if (mtp__dir_exists(directory)) status = mtp__dir_list(directory, MTP__LIST_DIRECTORIES, NULL, &names);
    for (size_t i = 0; status == MTP_OK && i < names.count; i++) {
        char *path = NULL;
        bool done = false;
        if (names.names[i][0] != '.') continue;
        status = put_back(directory, names.names[i], &done);
        if (done || status != MTP_OK) continue;
        status = mtp__path_join(directory, names.names[i], &path);
        if (status == MTP_OK) status = mtp__dir_remove(path);
        free(path);
    }
    mtp__name_list_free(&names);
    free(directory);
    return status;
}

static bool is_kept(const mtp__retention *retention, int64_t step)
{
    return step == retention->best_step || (retention->every > 0 && step % retention->every == 0);
}

mtp_status mtp__checkpoint_prune(const char *run_directory, const mtp__retention *retention)
{
    step_list list;
    MTP_TRY(mtp__checkpoint_remove_leftovers(run_directory));
    mtp_status status = list_steps(run_directory, &list);
    for (int64_t i = 0; status == MTP_OK && retention->last > 0 && i < list.count - retention->last; i++) {
        char *path = NULL;
        if (is_kept(retention, list.steps[i])) continue;
        status = mtp__checkpoint_path(run_directory, list.steps[i], &path);
        if (status == MTP_OK) status = mtp__dir_remove(path);
        free(path);
    }
    free(list.steps);
    return status;
}

mtp_status mtp__checkpoint_mark_best(const char *run_directory, int64_t step)
{
    char *path = NULL, *link = NULL, *temporary = NULL;
    mtp_status status = mtp__checkpoint_path(run_directory, step, &path);
    if (status == MTP_OK) status = mtp__path_join(run_directory, "checkpoints/best", &link);
    if (status == MTP_OK) status = mtp__path_join(run_directory, "checkpoints/.best", &temporary);
    if (status == MTP_OK) {
        unlink(temporary);
        if (symlink(mtp__path_name(path), temporary) != 0 || rename(temporary, link) != 0)
            status = MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s cannot be set to %s: %s", link, mtp__path_name(path),
                                      strerror(errno));
    }
    free(path);
    free(link);
    free(temporary);
    return status;
}

static mtp_status set_aside(const char *run_directory, int64_t step, const mtp_logger *logger)
{
    char *path = NULL;
    mtp__text aside = {0};
    mtp_status status = mtp__checkpoint_path(run_directory, step, &path);
    if (status == MTP_OK) {
        mtp__text_add(&aside, "%s.superseded", path);
        status = mtp__text_check(&aside);
    }
    if (status == MTP_OK) status = mtp__dir_remove(aside.data);
    if (status == MTP_OK && rename(path, aside.data) != 0)
        status = MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s cannot be renamed to %s: %s", path, aside.data, strerror(errno));
    if (status == MTP_OK)
        mtp_log(logger, MTP_LOG_WARNING, "checkpoint %s of a later step is set aside as %s", path, aside.data);
    free(path);
    mtp__text_free(&aside);
    return status;
}

mtp_status mtp__checkpoint_supersede(const char *run_directory, int64_t step, const mtp_logger *logger)
{
    step_list list;
    mtp_status status = list_steps(run_directory, &list);
    for (int64_t i = 0; status == MTP_OK && i < list.count; i++)
        if (list.steps[i] > step) status = set_aside(run_directory, list.steps[i], logger);
    free(list.steps);
    return status;
}
