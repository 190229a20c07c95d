#include "data/sidecar.h"

#include <stdlib.h>
#include <string.h>

static void free_entry(mtp__sidecar_entry *entry)
{
    free(entry->file);
    free(entry->origin);
    free(entry->mask);
}

static mtp_status read_mask(const mtp__json_node *object, mtp__sidecar_entry *entry)
{
    mtp__json_node array;
    size_t count = 0;
    MTP_TRY(mtp__json_get_array(object, "loss_mask", &array, &count));
    if (count == 0) return mtp__json_fail(&array, MTP_E_DATA, "is empty; it needs a 0 or 1 for each token");
    entry->mask = malloc(count);
    if (!entry->mask) return MTP_FAIL(MTP_E_MEMORY, "%s: no memory for a mask of %zu tokens", entry->origin, count);
    entry->mask_length = (int64_t)count;
    for (size_t i = 0; i < count; i++) {
        const mtp__json_node item = mtp__json_item(&array, i);
        int64_t value = 0;
        if (json_is_boolean(item.value))
            value = json_is_true(item.value);
        else
            MTP_TRY(mtp__json_as_int64(&item, 0, 1, &value));
        entry->mask[i] = (uint8_t)value;
    }
    return MTP_OK;
}

static mtp_status read_entry(const mtp__json_node *object, mtp__sidecar_entry *entry)
{
    const char *file = NULL;
    MTP_TRY(mtp__json_as_object(object));
    if (!mtp__json_has(object, "file"))
        return mtp__json_fail(object, MTP_E_DATA,
                              "no key file; every *.jsonl beside samples is read as their loss masks: lines like "
                              "{\"file\": \"NAME.safetensors\", \"prompt_len\": N}. Move other files elsewhere");
    MTP_TRY(mtp__json_get_string(object, "file", &file));
    if (strchr(file, '/') || !*file)
        return mtp__json_fail(object, MTP_E_DATA, "file is \"%s\"; it must be a file name without directory", file);
    entry->file = strdup(file);
    if (!entry->file) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", entry->origin);
    const bool has_mask = mtp__json_has(object, "loss_mask"), has_prompt = mtp__json_has(object, "prompt_len");
    if (has_mask == has_prompt)
        return mtp__json_fail(object, MTP_E_DATA, "%s: %s loss_mask; give one of them", file,
                              has_mask ? "has both prompt_len and" : "has neither prompt_len nor");
    entry->prompt_len = -1;
    return has_mask ? read_mask(object, entry)
                    : mtp__json_get_int64(object, "prompt_len", 0, INT32_MAX, &entry->prompt_len);
}

static mtp_status grow(mtp__sidecar *sidecar)
{
    if (sidecar->count < sidecar->capacity) return MTP_OK;
    const size_t capacity = sidecar->capacity ? 2 * sidecar->capacity : 64;
    mtp__sidecar_entry *entries = realloc(sidecar->entries, capacity * sizeof *entries);
    if (!entries) return MTP_FAIL(MTP_E_MEMORY, "no memory for %zu entries of loss masks", capacity);
    sidecar->entries = entries;
    sidecar->capacity = capacity;
    return MTP_OK;
}

mtp_status mtp__sidecar_add(mtp__sidecar *sidecar, mtp__jsonl_reader *reader)
{
    for (;;) {
        json_t *value = NULL;
        MTP_TRY(mtp__jsonl_next(reader, &value));
        if (!value) return MTP_OK;
        mtp__sidecar_entry entry = {.origin = strdup(reader->origin)};
        mtp_status status = entry.origin ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", reader->origin);
        const mtp__json_node root = mtp__json_root(value, reader->origin);
        if (status == MTP_OK) status = read_entry(&root, &entry);
        if (status == MTP_OK) status = grow(sidecar);
        json_decref(value);
        if (status != MTP_OK) {
            free_entry(&entry);
            return status;
        }
        sidecar->entries[sidecar->count++] = entry;
    }
}

static int by_file(const void *a, const void *b)
{
    const mtp__sidecar_entry *left = a, *right = b;
    return strcmp(left->file, right->file);
}

mtp_status mtp__sidecar_sort(mtp__sidecar *sidecar)
{
    if (sidecar->count > 1) qsort(sidecar->entries, sidecar->count, sizeof *sidecar->entries, by_file);
    for (size_t i = 1; i < sidecar->count; i++) {
        const mtp__sidecar_entry *entry = &sidecar->entries[i];
        if (by_file(entry - 1, entry) == 0)
            return MTP_FAIL(MTP_E_DATA, "%s is listed twice, at %s and at %s; remove one of the lines", entry->file,
                            entry[-1].origin, entry->origin);
    }
    return MTP_OK;
}

mtp_status mtp__sidecar_read(mtp__sidecar *sidecar, const char *directory)
{
    mtp__name_list names;
    *sidecar = (mtp__sidecar){0};
    MTP_TRY(mtp__dir_list(directory, MTP__LIST_FILES, ".jsonl", &names));
    mtp_status status = MTP_OK;
    for (size_t i = 0; i < names.count && status == MTP_OK; i++) {
        char *path = NULL;
        mtp__jsonl_reader reader;
        status = mtp__path_join(directory, names.names[i], &path);
        if (status == MTP_OK) status = mtp__jsonl_open(&reader, path);
        if (status == MTP_OK) {
            status = mtp__sidecar_add(sidecar, &reader);
            mtp__jsonl_close(&reader);
        }
        free(path);
    }
    mtp__name_list_free(&names);
    if (status == MTP_OK) status = mtp__sidecar_sort(sidecar);
    if (status != MTP_OK) mtp__sidecar_free(sidecar);
    return status;
}

const mtp__sidecar_entry *mtp__sidecar_find(mtp__sidecar *sidecar, const char *file)
{
    size_t low = 0, high = sidecar->count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const int order = strcmp(file, sidecar->entries[middle].file);
        if (order == 0) {
            sidecar->entries[middle].used = true;
            return &sidecar->entries[middle];
        }
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

void mtp__sidecar_free(mtp__sidecar *sidecar)
{
    for (size_t i = 0; i < sidecar->count; i++) free_entry(&sidecar->entries[i]);
    free(sidecar->entries);
    *sidecar = (mtp__sidecar){0};
}
