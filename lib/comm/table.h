/* The content of a store: keys and values, within limits. Internal. */
#ifndef MTP_COMM_TABLE_H
#define MTP_COMM_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MTP__TABLE_BYTES_MAX = 64 << 20, MTP__TABLE_KEYS_MAX = 1 << 16 };

typedef struct mtp__table_entry {
    uint64_t hash;
    uint8_t *key, *value;
    size_t key_size, value_size;
} mtp__table_entry;

/* Zero-initialise. */
typedef struct mtp__table {
    mtp__table_entry *entries;
    size_t count, capacity, bytes;
} mtp__table;

/* NULL when the key is not there. Valid until the next set. */
const mtp__table_entry *mtp__table_find(const mtp__table *table, const uint8_t *key, size_t key_size);
/* Set or replace. Returns NULL, or why not. */
const char *mtp__table_set(mtp__table *table, const uint8_t *key, size_t key_size, const uint8_t *value,
                           size_t value_size);
void mtp__table_free(mtp__table *table);

#endif
