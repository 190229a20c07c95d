#include "data/store_dir.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/store.h"
#include "formats/json.h"

static bool holds(const char *directory, const char *name)
{
    char *path = NULL;
    const bool found = mtp__path_join(directory, name, &path) == MTP_OK && mtp__file_exists(path);
    free(path);
    return found;
}

bool mtp__store_dir_is(const char *directory)
{
    return holds(directory, MTP__STORE_PLAN) || holds(directory, MTP__STORE_DONE);
}

bool mtp__store_is_shard_name(const char *path)
{
    const size_t length = strlen(path);
    return length > 3 && strcmp(path + length - 3, ".h5") == 0;
}

void mtp__store_shard_name(int64_t shard, char name[32])
{
    snprintf(name, 32, "shard-%05lld.h5", (long long)shard);
}

static mtp_status read_count(const char *path, int64_t *num_shards)
{
    json_t *json = NULL;
    int64_t version;
    MTP_TRY(mtp__json_read(path, &json));
    const mtp__json_node root = mtp__json_root(json, path);
    mtp_status status = mtp__json_as_object(&root);
    if (status == MTP_OK) status = mtp__json_get_int64(&root, "version", 1, INT64_MAX, &version);
    if (status == MTP_OK && version > MTP__SHARD_VERSION)
        status = mtp__json_fail(&root, MTP_E_VERSION,
                                "a store of version %lld; this program reads version %d and older: update it",
                                (long long)version, (int)MTP__SHARD_VERSION);
    if (status == MTP_OK) status = mtp__json_get_int64(&root, "num_shards", 0, 10000000, num_shards);
    json_decref(json);
    return status;
}

static mtp_status check_names(const char *directory, const mtp__name_list *names, int64_t num_shards)
{
    char expected[32];
    for (int64_t i = 0; i < num_shards; i++) {
        mtp__store_shard_name(i, expected);
        if (i >= (int64_t)names->count || strcmp(names->names[i], expected) != 0)
            return MTP_FAIL(MTP_E_NOT_FOUND, "%s: %s is missing; %s counts %lld shards", directory, expected,
                            MTP__STORE_DONE, (long long)num_shards);
    }
    if ((int64_t)names->count > num_shards)
        return MTP_FAIL(MTP_E_DATA, "%s: %s does not belong to the %lld shards that %s counts; remove it", directory,
                        names->names[num_shards], (long long)num_shards, MTP__STORE_DONE);
    return MTP_OK;
}

mtp_status mtp__store_dir_shards(const char *directory, mtp__name_list *names)
{
    char *path = NULL;
    int64_t num_shards = 0;
    *names = (mtp__name_list){0};
    if (!holds(directory, MTP__STORE_DONE))
        return MTP_FAIL(MTP_E_DATA,
                        "%s: packing has not finished; run the same mtp pack command again, it goes on where "
                        "it stopped",
                        directory);
    MTP_TRY(mtp__path_join(directory, MTP__STORE_DONE, &path));
    mtp_status status = read_count(path, &num_shards);
    free(path);
    if (status == MTP_OK) status = mtp__dir_list(directory, MTP__LIST_FILES, ".h5", names);
    for (size_t i = 0; i < names->count;) { /* temporaries begin with a dot */
        if (names->names[i][0] != '.') {
            i++;
            continue;
        }
        free(names->names[i]);
        memmove(names->names + i, names->names + i + 1, (--names->count - i) * sizeof *names->names);
    }
    if (status == MTP_OK) status = check_names(directory, names, num_shards);
    if (status != MTP_OK) mtp__name_list_free(names);
    return status;
}
