/* safetensors files: a checked reader over a map, sharded models, and a writer.
 *
 * Format (Hugging Face safetensors): a little-endian u64 N, N bytes of JSON that give every tensor's dtype, shape and
 * byte range, then the data without holes. Everything in the header is checked when a file is opened; malformed is
 * MTP_E_FORMAT and the message names the file and the tensor. */
#ifndef MTP_SAFETENSORS_H
#define MTP_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mtp/status.h"
#include "mtp/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The format's own limit for the JSON header. */
#define MTP_SAFETENSORS_MAX_HEADER 100000000u

/* ---- reading one file ------------------------------------------------------------------------------------------ */

/* An open file. Immutable once open: any number of threads may read it. */
typedef struct mtp_safetensors mtp_safetensors;

/* One tensor of a file. All pointers belong to the file and live until it is closed. */
typedef struct mtp_safetensors_entry {
    const mtp_safetensors *owner;
    const char *name;
    mtp_dtype dtype;
    int32_t rank; /* may exceed MTP_MAX_RANK; such a tensor has no view, only data */
    const int64_t *shape;
    int64_t count;    /* elements */
    size_t size;      /* bytes */
    const void *data; /* read-only; inside the map */
    bool aligned;     /* data is aligned for dtype. Files of other writers may hold tensors that are not: copy them */
} mtp_safetensors_entry;

/* Map `path` and check its header. MTP_E_NOT_FOUND, MTP_E_IO, MTP_E_FORMAT (also for a directory, a pipe, an empty
 * file). The map follows the file: whoever shortens it in place while it is open makes readers die of SIGBUS; replacing
 * it by rename is safe. */
MTP_API mtp_status mtp_safetensors_open(const char *path, mtp_safetensors **file);
/* The same for bytes in memory, which must outlive the handle; `name` stands for the path in messages. */
MTP_API mtp_status mtp_safetensors_from_memory(const void *data, size_t size, const char *name, mtp_safetensors **file);
/* Accepts NULL. */
MTP_API void mtp_safetensors_close(mtp_safetensors *file);

MTP_API const char *mtp_safetensors_path(const mtp_safetensors *file);
/* Tensors by index, in the order of their data in the file. NULL beyond the last. */
MTP_API size_t mtp_safetensors_count(const mtp_safetensors *file);
MTP_API const mtp_safetensors_entry *mtp_safetensors_at(const mtp_safetensors *file, size_t index);
/* By exact name. NULL when there is none. */
MTP_API const mtp_safetensors_entry *mtp_safetensors_find(const mtp_safetensors *file, const char *name);
/* By exact name; MTP_E_NOT_FOUND names file and tensor. */
MTP_API mtp_status mtp_safetensors_get(const mtp_safetensors *file, const char *name,
                                       const mtp_safetensors_entry **entry);

/* A contiguous view into the map: never write through it. MTP_E_FORMAT when the rank exceeds MTP_MAX_RANK or is 0, or
 * the data is not aligned for its dtype (then copy). */
MTP_API mtp_status mtp_safetensors_view(const mtp_safetensors_entry *entry, mtp_view *view);
/* Copy the data to `buffer`, aligned or not. `size` must be entry->size. */
MTP_API mtp_status mtp_safetensors_copy(const mtp_safetensors_entry *entry, void *buffer, size_t size);

/* The strings under "__metadata__", in file order. */
typedef struct mtp_safetensors_pair {
    const char *key;
    const char *value;
} mtp_safetensors_pair;
MTP_API size_t mtp_safetensors_metadata_count(const mtp_safetensors *file);
/* NULL fields beyond the last. */
MTP_API mtp_safetensors_pair mtp_safetensors_metadata_at(const mtp_safetensors *file, size_t index);
/* NULL when the key is absent. */
MTP_API const char *mtp_safetensors_metadata(const mtp_safetensors *file, const char *key);

/* ---- reading a model directory --------------------------------------------------------------------------------- */

/* The tensors of a directory: model.safetensors, or the shards that model.safetensors.index.json lists. Shards are
 * opened when a tensor of theirs is first asked for. Use one index from one thread at a time. */
typedef struct mtp_safetensors_index mtp_safetensors_index;

/* MTP_E_NOT_FOUND when the directory has neither file. */
MTP_API mtp_status mtp_safetensors_index_open(const char *directory, mtp_safetensors_index **index);
/* Closes the shards too; entries and views die with it. Accepts NULL. */
MTP_API void mtp_safetensors_index_close(mtp_safetensors_index *index);
MTP_API size_t mtp_safetensors_index_count(const mtp_safetensors_index *index);
/* Names sorted by bytes. NULL beyond the last. */
MTP_API const char *mtp_safetensors_index_name(const mtp_safetensors_index *index, size_t i);
/* Whether the directory names such a tensor; opens nothing. */
MTP_API bool mtp_safetensors_index_has(const mtp_safetensors_index *index, const char *name);
/* MTP_E_NOT_FOUND: no such tensor, or its shard is missing. MTP_E_FORMAT: the shard does not hold what the index says.
 */
MTP_API mtp_status mtp_safetensors_index_get(mtp_safetensors_index *index, const char *name,
                                             const mtp_safetensors_entry **entry);

/* ---- writing --------------------------------------------------------------------------------------------------- */

/* One tensor to write: `data` (contiguous), or `fill`, which is asked for consecutive pieces of at most 1 MiB so that
 * nothing large is buffered. */
typedef struct mtp_safetensors_source {
    const char *name; /* UTF-8, unique, not "__metadata__" */
    mtp_dtype dtype;
    int32_t rank; /* 0 for a scalar */
    const int64_t *shape;
    const void *data;
    /* Put bytes [offset, offset + size) of the tensor into `buffer`; both are multiples of the element size. Used when
     * data is NULL. A failure ends the writing and leaves no file. */
    mtp_status (*fill)(void *user, size_t offset, void *buffer, size_t size);
    void *user;
} mtp_safetensors_source;

/* Write `path` atomically (temporary name, sync, rename), in any order of `tensors` the bytes that the Python package
 * writes: metadata as given, tensors by dtype (U64, I64, F64, F32, U32, I32, BF16, F16, U16, I16, F8_E4M3, F8_E5M2, I8,
 * U8, BOOL) and then by name, header padded to 8 bytes, so data is aligned. Replaces an existing file. No metadata
 * (num_metadata 0) writes no "__metadata__". */
MTP_API mtp_status mtp_safetensors_write(const char *path, const mtp_safetensors_pair *metadata, size_t num_metadata,
                                         const mtp_safetensors_source *tensors, size_t num_tensors);
/* How many bytes that file has; for checks of free space beforehand. */
MTP_API mtp_status mtp_safetensors_file_size(const mtp_safetensors_pair *metadata, size_t num_metadata,
                                             const mtp_safetensors_source *tensors, size_t num_tensors,
                                             uint64_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
