#include "comm/table.h"

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"

static mtp__table_entry *find(const mtp__table *table, uint64_t hash, const uint8_t *key, size_t key_size)
{
    for (size_t i = 0; i < table->count; i++) {
        mtp__table_entry *entry = &table->entries[i];
        if (entry->hash == hash && entry->key_size == key_size && memcmp(entry->key, key, key_size) == 0) return entry;
    }
    return NULL;
}

const mtp__table_entry *mtp__table_find(const mtp__table *table, const uint8_t *key, size_t key_size)
{
    return find(table, mtp__fnv1a(MTP__FNV_START, key, key_size), key, key_size);
}

static uint8_t *copy_of(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);
    if (copy && size > 0) memcpy(copy, data, size);
    return copy;
}

static bool reserve_entry(mtp__table *table)
{
    if (table->count < table->capacity) return true;
    const size_t capacity = table->capacity ? 2 * table->capacity : 64;
    mtp__table_entry *grown = realloc(table->entries, capacity * sizeof *grown);
    if (!grown) return false;
    table->entries = grown;
    table->capacity = capacity;
    return true;
}

const char *mtp__table_set(mtp__table *table, const uint8_t *key, size_t key_size, const uint8_t *value,
                           size_t value_size)
{
    const uint64_t hash = mtp__fnv1a(MTP__FNV_START, key, key_size);
    mtp__table_entry *entry = find(table, hash, key, key_size);
    const size_t freed = entry ? entry->key_size + entry->value_size : 0;
    if (table->bytes - freed + key_size + value_size > MTP__TABLE_BYTES_MAX) return "the store is full (64 MiB)";
    if (!entry && table->count == MTP__TABLE_KEYS_MAX) return "the store is full (65536 keys)";
    uint8_t *new_value = copy_of(value, value_size);
    uint8_t *new_key = entry ? entry->key : copy_of(key, key_size);
    if (!new_value || !new_key || (!entry && !reserve_entry(table))) {
        free(new_value);
        if (!entry) free(new_key);
        return "the store's host is out of memory";
    }
    if (entry)
        free(entry->value);
    else
        entry = &table->entries[table->count++];
    *entry = (mtp__table_entry){
        .hash = hash, .key = new_key, .value = new_value, .key_size = key_size, .value_size = value_size};
    table->bytes += key_size + value_size - freed;
    return NULL;
}

void mtp__table_free(mtp__table *table)
{
    for (size_t i = 0; i < table->count; i++) {
        free(table->entries[i].key);
        free(table->entries[i].value);
    }
    free(table->entries);
    *table = (mtp__table){.count = 0};
}
