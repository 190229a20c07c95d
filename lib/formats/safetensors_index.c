#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "formats/json.h"
#include "mtp/safetensors.h"

/* One file of the model; opened on demand. */
typedef struct shard {
    const char *name; /* inside the directory */
    mtp_safetensors *file;
} shard;

typedef struct place {
    const char *tensor;
    size_t shard;
} place;

struct mtp_safetensors_index {
    char *directory;
    char *index_path; /* of model.safetensors.index.json; NULL for a model of one file */
    json_t *root;     /* owns the names when there is an index */
    place *places;    /* sorted by tensor */
    size_t num_places;
    shard *shards; /* sorted by name */
    size_t num_shards;
};

static const char single_name[] = "model.safetensors";
static const char index_name[] = "model.safetensors.index.json";

static int compare_tensors(const void *a, const void *b)
{
    return strcmp(((const place *)a)->tensor, ((const place *)b)->tensor);
}

static int compare_shards(const void *a, const void *b)
{
    return strcmp(((const shard *)a)->name, ((const shard *)b)->name);
}

static mtp_status open_shard(mtp_safetensors_index *index, shard *part)
{
    char *path;
    if (part->file) return MTP_OK;
    MTP_TRY(mtp__path_join(index->directory, part->name, &path));
    const mtp_status status = mtp_safetensors_open(path, &part->file);
    free(path);
    return status;
}

static mtp_status allocate(mtp_safetensors_index *index, size_t num_tensors, size_t num_shards)
{
    index->places = calloc(num_tensors + 1, sizeof *index->places);
    index->shards = calloc(num_shards + 1, sizeof *index->shards);
    if (index->places && index->shards) return MTP_OK;
    return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", index->directory);
}

static mtp_status read_single(mtp_safetensors_index *index)
{
    shard part = {.name = single_name};
    MTP_TRY(open_shard(index, &part));
    const size_t count = mtp_safetensors_count(part.file);
    const mtp_status status = allocate(index, count, 1);
    if (status != MTP_OK) {
        mtp_safetensors_close(part.file);
        return status;
    }
    index->shards[0] = part;
    index->num_shards = 1;
    index->num_places = count;
    for (size_t i = 0; i < count; i++) index->places[i].tensor = mtp_safetensors_at(part.file, i)->name;
    return MTP_OK;
}

/* The sorted list of distinct shards; weight_map names each once per tensor. */
static void unique_shards(mtp_safetensors_index *index)
{
    qsort(index->shards, index->num_shards, sizeof *index->shards, compare_shards);
    size_t kept = 0;
    for (size_t i = 0; i < index->num_shards; i++)
        if (kept == 0 || strcmp(index->shards[kept - 1].name, index->shards[i].name) != 0)
            index->shards[kept++] = index->shards[i];
    index->num_shards = kept;
}

/* A shard is a plain file name: a path could lead out of the directory. */
static mtp_status read_shard_name(const mtp__json_node *node, const char **name)
{
    MTP_TRY(mtp__json_as_string(node, name));
    if (**name == '\0' || **name == '.' || strchr(*name, '/'))
        return mtp__json_fail(node, MTP_E_FORMAT, "'%s' is not the name of a file in the same directory", *name);
    return MTP_OK;
}

static mtp_status read_index(mtp_safetensors_index *index)
{
    const char *key;
    json_t *value;
    mtp__json_node map;
    MTP_TRY(mtp__json_read(index->index_path, &index->root));
    const mtp__json_node root = mtp__json_root(index->root, index->index_path);
    if (!mtp__json_has(&root, "weight_map"))
        return mtp__json_fail(&root, MTP_E_FORMAT, "no weight_map, which says what tensor is in what file");
    MTP_TRY(mtp__json_get_object(&root, "weight_map", &map));
    const size_t count = json_object_size(map.value);
    MTP_TRY(allocate(index, count, count));
    json_object_foreach(map.value, key, value)
    {
        const mtp__json_node node = {value, index->index_path, &map, key, 0};
        MTP_TRY(read_shard_name(&node, &index->shards[index->num_shards++].name));
    }
    unique_shards(index);
    json_object_foreach(map.value, key, value)
    {
        const shard wanted = {.name = json_string_value(value)};
        const shard *found = bsearch(&wanted, index->shards, index->num_shards, sizeof wanted, compare_shards);
        index->places[index->num_places++] = (place){key, (size_t)(found - index->shards)};
    }
    return MTP_OK;
}

static mtp_status open_directory(mtp_safetensors_index *index)
{
    char *single;
    MTP_TRY(mtp__path_join(index->directory, single_name, &single));
    const bool has_single = mtp__path_exists(single);
    free(single);
    if (has_single) {
        MTP_TRY(read_single(index));
    } else {
        MTP_TRY(mtp__path_join(index->directory, index_name, &index->index_path));
        if (!mtp__path_exists(index->index_path))
            return MTP_FAIL(MTP_E_NOT_FOUND, "%s: %s; expected a model directory with %s or %s", index->directory,
                            mtp__dir_exists(index->directory) ? "holds no weights" : "is not a directory", single_name,
                            index_name);
        MTP_TRY(read_index(index));
    }
    qsort(index->places, index->num_places, sizeof *index->places, compare_tensors);
    return MTP_OK;
}

mtp_status mtp_safetensors_index_open(const char *directory, mtp_safetensors_index **index)
{
    MTP_REQUIRE(directory != NULL && index != NULL);
    *index = calloc(1, sizeof **index);
    mtp_status status = MTP_OK;
    if (*index) (*index)->directory = strdup(directory);
    if (!*index || !(*index)->directory) status = MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", directory);
    if (status == MTP_OK) status = open_directory(*index);
    if (status == MTP_OK) return MTP_OK;
    mtp_safetensors_index_close(*index);
    *index = NULL;
    return status;
}

void mtp_safetensors_index_close(mtp_safetensors_index *index)
{
    if (!index) return;
    for (size_t i = 0; i < index->num_shards; i++) mtp_safetensors_close(index->shards[i].file);
    json_decref(index->root);
    free(index->shards);
    free(index->places);
    free(index->index_path);
    free(index->directory);
    free(index);
}

size_t mtp_safetensors_index_count(const mtp_safetensors_index *index)
{
    return index->num_places;
}

const char *mtp_safetensors_index_name(const mtp_safetensors_index *index, size_t i)
{
    return i < index->num_places ? index->places[i].tensor : NULL;
}

static const place *find(const mtp_safetensors_index *index, const char *name)
{
    const place wanted = {.tensor = name};
    return bsearch(&wanted, index->places, index->num_places, sizeof wanted, compare_tensors);
}

bool mtp_safetensors_index_has(const mtp_safetensors_index *index, const char *name)
{
    return find(index, name) != NULL;
}

mtp_status mtp_safetensors_index_get(mtp_safetensors_index *index, const char *name,
                                     const mtp_safetensors_entry **entry)
{
    MTP_REQUIRE(index != NULL && name != NULL && entry != NULL);
    *entry = NULL;
    const place *found = find(index, name);
    if (!found) return MTP_FAIL(MTP_E_NOT_FOUND, "%s: no tensor '%s'", index->directory, name);
    shard *part = &index->shards[found->shard];
    MTP_TRY_AT(open_shard(index, part), "tensor '%s'", name);
    *entry = mtp_safetensors_find(part->file, name);
    if (*entry) return MTP_OK;
    return MTP_FAIL(MTP_E_FORMAT, "%s: no tensor '%s', though %s says so", mtp_safetensors_path(part->file), name,
                    index->index_path);
}
