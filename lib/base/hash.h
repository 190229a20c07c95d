/* Checksums. Internal. */
#ifndef MTP_BASE_HASH_H
#define MTP_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

/* CRC-32C (Castagnoli, reflected 0x82F63B78), as TensorBoard records and our checkpoints use it. Continue a running
 * value by passing it as `crc`; start with 0. */
uint32_t mtp__crc32c(uint32_t crc, const void *data, size_t size);
/* FNV-1a, 64 bits: a stable identity for names and short records. Start with MTP__FNV_START. */
#define MTP__FNV_START 0xcbf29ce484222325u
uint64_t mtp__fnv1a(uint64_t hash, const void *data, size_t size);

#endif
