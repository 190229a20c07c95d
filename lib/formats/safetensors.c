#include "mtp/safetensors.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "formats/json.h"

struct mtp_safetensors {
    char *path;
    mtp__file_map map; /* empty for bytes of the caller */
    const unsigned char *data;
    size_t data_size;
    json_t *header; /* owns every name and metadata string */
    mtp_safetensors_entry *entries;
    size_t num_entries;
    const mtp_safetensors_entry **by_name;
    int64_t *shapes; /* those of all the entries, one after another */
    mtp_safetensors_pair *metadata;
    size_t num_metadata;
};

/* ---- the header ----------------------------------------------------------------------------------------------- */

/* Splits the file into header text and data. */
static mtp_status split_file(mtp_safetensors *file, const unsigned char *bytes, size_t size, size_t *header_size)
{
    uint64_t length = 0;
    if (size < 8) return MTP_FAIL(MTP_E_FORMAT, "%s: %zu bytes are too few for a safetensors file", file->path, size);
    for (int i = 7; i >= 0; i--) length = length << 8 | bytes[i];
    if (length > MTP_SAFETENSORS_MAX_HEADER)
        return MTP_FAIL(MTP_E_FORMAT, "%s: not a safetensors file, or damaged: a header of %llu bytes (the most is %u)",
                        file->path, (unsigned long long)length, MTP_SAFETENSORS_MAX_HEADER);
    if (length > size - 8)
        return MTP_FAIL(MTP_E_FORMAT, "%s: truncated: the header has %llu bytes and the file %zu", file->path,
                        (unsigned long long)length, size);
    if (length == 0 || bytes[8] != '{')
        return MTP_FAIL(MTP_E_FORMAT, "%s: not a safetensors file: the header does not begin with '{'", file->path);
    *header_size = (size_t)length;
    file->data = bytes + 8 + length;
    file->data_size = size - 8 - (size_t)length;
    return MTP_OK;
}

static mtp_status read_metadata(mtp_safetensors *file, const mtp__json_node *metadata)
{
    const char *key;
    json_t *value;
    MTP_TRY(mtp__json_as_object(metadata));
    file->metadata = calloc(json_object_size(metadata->value) + 1, sizeof *file->metadata);
    if (!file->metadata) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", file->path);
    json_object_foreach(metadata->value, key, value)
    {
        const mtp__json_node node = {value, file->path, metadata, key, 0};
        mtp_safetensors_pair *pair = &file->metadata[file->num_metadata++];
        pair->key = key;
        MTP_TRY(mtp__json_as_string(&node, &pair->value));
    }
    return MTP_OK;
}

static mtp_status read_dtype(const mtp__json_node *tensor, mtp_dtype *dtype)
{
    const char *name;
    MTP_TRY(mtp__json_get_string(tensor, "dtype", &name));
    for (int i = 0; i < MTP_DTYPE_COUNT; i++) {
        *dtype = (mtp_dtype)i;
        if (!strcmp(mtp_dtype_name(*dtype), name)) return MTP_OK;
    }
    return mtp__json_fail(tensor, MTP_E_FORMAT, "dtype '%s' is not known", name);
}

/* The shape, its product, and the product in bytes. An axis of 0 makes the tensor empty, but the others must still
 * multiply to something that an int64 can hold, so that strides can be computed. */
static mtp_status read_shape(const mtp__json_node *tensor, mtp_safetensors_entry *entry, int64_t *shape)
{
    mtp__json_node axes;
    size_t rank;
    int64_t count = 1, nonzero = 1;
    MTP_TRY(mtp__json_get_array(tensor, "shape", &axes, &rank));
    for (size_t i = 0; i < rank; i++) {
        const mtp__json_node axis = mtp__json_item(&axes, i);
        MTP_TRY(mtp__json_as_int64(&axis, 0, INT64_MAX, &shape[i]));
        const int64_t factor = shape[i] > 0 ? shape[i] : 1;
        if (nonzero > INT64_MAX / (int64_t)sizeof(int64_t) / factor)
            return mtp__json_fail(&axes, MTP_E_FORMAT, "the number of elements overflows");
        nonzero *= factor;
        count *= shape[i];
    }
    entry->shape = shape;
    entry->rank = (int32_t)rank;
    entry->count = count;
    return MTP_OK;
}

static mtp_status read_range(const mtp__json_node *tensor, const mtp_safetensors *file, mtp_safetensors_entry *entry)
{
    mtp__json_node offsets;
    size_t two;
    int64_t ends[2];
    MTP_TRY(mtp__json_get_array(tensor, "data_offsets", &offsets, &two));
    if (two != 2) return mtp__json_fail(&offsets, MTP_E_FORMAT, "expected [begin, end], got %zu values", two);
    for (size_t i = 0; i < 2; i++) {
        const mtp__json_node offset = mtp__json_item(&offsets, i);
        MTP_TRY(mtp__json_as_int64(&offset, 0, INT64_MAX, &ends[i]));
    }
    if (ends[1] < ends[0])
        return mtp__json_fail(&offsets, MTP_E_FORMAT, "the end %lld is before the begin %lld", (long long)ends[1],
                              (long long)ends[0]);
    if ((uint64_t)ends[1] > file->data_size)
        return mtp__json_fail(&offsets, MTP_E_FORMAT, "the end %lld is beyond the %zu bytes of data in the file",
                              (long long)ends[1], file->data_size);
    const int64_t expected = entry->count * (int64_t)mtp_dtype_size(entry->dtype);
    if (ends[1] - ends[0] != expected)
        return mtp__json_fail(&offsets, MTP_E_FORMAT, "%lld bytes, but shape and dtype need %lld",
                              (long long)(ends[1] - ends[0]), (long long)expected);
    entry->data = file->data + ends[0];
    entry->size = (size_t)expected;
    entry->aligned = (uintptr_t)entry->data % mtp_dtype_size(entry->dtype) == 0;
    return MTP_OK;
}

/* Only the three known members: a fourth would be something we do not understand about the data. */
static mtp_status read_tensor(mtp_safetensors *file, const mtp__json_node *tensor, int64_t *shape)
{
    mtp_safetensors_entry *entry = &file->entries[file->num_entries++];
    entry->owner = file;
    entry->name = tensor->key;
    MTP_TRY(mtp__json_as_object(tensor));
    MTP_TRY(read_dtype(tensor, &entry->dtype));
    MTP_TRY(read_shape(tensor, entry, shape));
    MTP_TRY(read_range(tensor, file, entry));
    if (json_object_size(tensor->value) != 3)
        return mtp__json_fail(tensor, MTP_E_FORMAT, "has members besides dtype, shape and data_offsets");
    return MTP_OK;
}

/* Memory for entries and shapes, sized by what the header holds before any of it is believed. */
static mtp_status allocate(mtp_safetensors *file, size_t *num_axes)
{
    const char *key;
    json_t *value;
    size_t axes = 0;
    const size_t count = json_object_size(file->header);
    json_object_foreach(file->header, key, value) axes += json_array_size(json_object_get(value, "shape"));
    file->entries = calloc(count + 1, sizeof *file->entries);
    file->by_name = calloc(count + 1, sizeof *file->by_name);
    file->shapes = calloc(axes + 1, sizeof *file->shapes);
    if (!file->entries || !file->by_name || !file->shapes)
        return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", file->path);
    *num_axes = axes;
    return MTP_OK;
}

static mtp_status read_header(mtp_safetensors *file)
{
    const mtp__json_node root = mtp__json_root(file->header, file->path);
    const char *key;
    json_t *value;
    size_t num_axes, used_axes = 0;
    MTP_TRY(allocate(file, &num_axes));
    json_object_foreach(file->header, key, value)
    {
        const mtp__json_node node = {value, file->path, &root, key, 0};
        if (!strcmp(key, "__metadata__")) {
            MTP_TRY(read_metadata(file, &node));
            continue;
        }
        MTP_TRY(read_tensor(file, &node, file->shapes + used_axes));
        used_axes += (size_t)file->entries[file->num_entries - 1].rank;
    }
    return MTP_OK;
}

/* ---- the data ------------------------------------------------------------------------------------------------- */

static int compare_place(const void *a, const void *b)
{
    const mtp_safetensors_entry *x = a, *y = b;
    const uintptr_t p = (uintptr_t)x->data, q = (uintptr_t)y->data;
    if (p != q) return p < q ? -1 : 1;
    if (x->size != y->size) return x->size < y->size ? -1 : 1; /* empty tensors first */
    return strcmp(x->name, y->name);
}

static int compare_name(const void *a, const void *b)
{
    return strcmp((*(const mtp_safetensors_entry *const *)a)->name, (*(const mtp_safetensors_entry *const *)b)->name);
}

/* The data must be one run of tensors: no overlap, no hole, nothing behind the last. */
static mtp_status check_places(mtp_safetensors *file)
{
    size_t end = 0;
    const char *before = "the header";
    qsort(file->entries, file->num_entries, sizeof *file->entries, compare_place);
    for (size_t i = 0; i < file->num_entries; i++) {
        const mtp_safetensors_entry *entry = &file->entries[i];
        const size_t begin = (size_t)((const unsigned char *)entry->data - file->data);
        if (begin < end)
            return MTP_FAIL(MTP_E_FORMAT, "%s: %s: its data overlaps that of %s", file->path, entry->name, before);
        if (begin > end)
            return MTP_FAIL(MTP_E_FORMAT, "%s: %s: a hole of %zu bytes between its data and %s", file->path,
                            entry->name, begin - end, before);
        end = begin + entry->size;
        before = entry->name;
        file->by_name[i] = entry;
    }
    if (end != file->data_size)
        return MTP_FAIL(MTP_E_FORMAT, "%s: %zu bytes behind the last tensor belong to none", file->path,
                        file->data_size - end);
    qsort(file->by_name, file->num_entries, sizeof(const mtp_safetensors_entry *), compare_name);
    return MTP_OK;
}

static mtp_status parse(mtp_safetensors *file, const void *bytes, size_t size)
{
    size_t header_size = 0;
    MTP_TRY(split_file(file, bytes, size, &header_size));
    MTP_TRY(mtp__json_parse((const char *)bytes + 8, header_size, file->path, 1, &file->header));
    const mtp_status status = read_header(file);
    if (status == MTP_E_NOT_FOUND) return MTP_FAIL(MTP_E_FORMAT, "%s", mtp_last_error()->message); /* a missing key */
    return status == MTP_OK ? check_places(file) : status;
}

/* ---- opening -------------------------------------------------------------------------------------------------- */

static mtp_status create(const char *path, mtp_safetensors **file)
{
    *file = calloc(1, sizeof **file);
    char *copy = strdup(path);
    if (*file && copy) {
        (*file)->path = copy;
        return MTP_OK;
    }
    free(copy);
    free(*file);
    *file = NULL;
    return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
}

mtp_status mtp_safetensors_open(const char *path, mtp_safetensors **file)
{
    mtp_status status;
    MTP_REQUIRE(path != NULL && file != NULL);
    MTP_TRY(create(path, file));
    MTP_TRY_GOTO(status, mtp__file_map_open(&(*file)->map, path), failed);
    MTP_TRY_GOTO(status, parse(*file, (*file)->map.data, (*file)->map.size), failed);
    return MTP_OK;
failed:
    mtp_safetensors_close(*file);
    *file = NULL;
    return status;
}

mtp_status mtp_safetensors_from_memory(const void *data, size_t size, const char *name, mtp_safetensors **file)
{
    MTP_REQUIRE(data != NULL && name != NULL && file != NULL);
    MTP_TRY(create(name, file));
    const mtp_status status = parse(*file, data, size);
    if (status == MTP_OK) return MTP_OK;
    mtp_safetensors_close(*file);
    *file = NULL;
    return status;
}

void mtp_safetensors_close(mtp_safetensors *file)
{
    if (!file) return;
    mtp__file_map_close(&file->map);
    json_decref(file->header);
    free(file->entries);
    free(file->by_name);
    free(file->shapes);
    free(file->metadata);
    free(file->path);
    free(file);
}

/* ---- access --------------------------------------------------------------------------------------------------- */

const char *mtp_safetensors_path(const mtp_safetensors *file)
{
    return file->path;
}

size_t mtp_safetensors_count(const mtp_safetensors *file)
{
    return file->num_entries;
}

const mtp_safetensors_entry *mtp_safetensors_at(const mtp_safetensors *file, size_t index)
{
    return index < file->num_entries ? &file->entries[index] : NULL;
}

const mtp_safetensors_entry *mtp_safetensors_find(const mtp_safetensors *file, const char *name)
{
    const mtp_safetensors_entry wanted = {.name = name}, *key = &wanted;
    const mtp_safetensors_entry **found =
        bsearch(&key, file->by_name, file->num_entries, sizeof(const mtp_safetensors_entry *), compare_name);
    return found ? *found : NULL;
}

mtp_status mtp_safetensors_get(const mtp_safetensors *file, const char *name, const mtp_safetensors_entry **entry)
{
    MTP_REQUIRE(file != NULL && name != NULL && entry != NULL);
    *entry = mtp_safetensors_find(file, name);
    return *entry ? MTP_OK : MTP_FAIL(MTP_E_NOT_FOUND, "%s: no tensor '%s'", file->path, name);
}

mtp_status mtp_safetensors_view(const mtp_safetensors_entry *entry, mtp_view *view)
{
    MTP_REQUIRE(entry != NULL && view != NULL);
    if (entry->rank < 1 || entry->rank > MTP_MAX_RANK)
        return MTP_FAIL(MTP_E_FORMAT, "%s: %s: has %d axes; between 1 and %d can be used", entry->owner->path,
                        entry->name, (int)entry->rank, MTP_MAX_RANK);
    if (!entry->aligned)
        return MTP_FAIL(MTP_E_FORMAT, "%s: %s: its data is not aligned for %s; copy it first", entry->owner->path,
                        entry->name, mtp_dtype_name(entry->dtype));
    /* a view has one pointer type for reading and writing; the header forbids writing through this one */
    *view = mtp_view_nd((void *)(uintptr_t)entry->data, entry->dtype, entry->rank, entry->shape);
    return MTP_OK;
}

mtp_status mtp_safetensors_copy(const mtp_safetensors_entry *entry, void *buffer, size_t size)
{
    MTP_REQUIRE(entry != NULL && (buffer != NULL || size == 0));
    if (size != entry->size)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: %s: has %zu bytes, the buffer %zu", entry->owner->path, entry->name,
                        entry->size, size);
    if (size > 0) memcpy(buffer, entry->data, size);
    return MTP_OK;
}

size_t mtp_safetensors_metadata_count(const mtp_safetensors *file)
{
    return file->num_metadata;
}

mtp_safetensors_pair mtp_safetensors_metadata_at(const mtp_safetensors *file, size_t index)
{
    return index < file->num_metadata ? file->metadata[index] : (mtp_safetensors_pair){0};
}

const char *mtp_safetensors_metadata(const mtp_safetensors *file, const char *key)
{
    for (size_t i = 0; i < file->num_metadata; i++)
        if (!strcmp(file->metadata[i].key, key)) return file->metadata[i].value;
    return NULL;
}
