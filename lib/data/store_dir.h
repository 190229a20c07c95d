/* Internal: the directory that mtp pack writes.
 *
 * pack.json    what is being packed and how: written first; another packing into the directory is refused
 * shard-NNNNN.h5   the shards, from 00000 on
 * quarantine.jsonl   the samples that were refused
 * store.json   counts: written last; without it the store is not finished */
#ifndef MTP_DATA_STORE_DIR_H
#define MTP_DATA_STORE_DIR_H

#include "base/file.h"

#define MTP__STORE_PLAN "pack.json"
#define MTP__STORE_DONE "store.json"

/* Was this directory written by mtp pack, finished or not? */
bool mtp__store_dir_is(const char *directory);
bool mtp__store_is_shard_name(const char *path);
/* "shard-00012.h5" */
void mtp__store_shard_name(int64_t shard, char name[32]);
/* The shards of a finished store, in order; all that store.json counts must be there. MTP_E_VERSION: a newer store. */
mtp_status mtp__store_dir_shards(const char *directory, mtp__name_list *names);

#endif
