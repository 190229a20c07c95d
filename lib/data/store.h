/* Internal: a shard of the packed store, one HDF5 file.
 *
 * One contiguous dataset a field, token-major: row t of a field belongs to token place t of the shard. The rows of a
 * sample lie together, samples in the order of the index; places between two samples belong to none (a sample was
 * refused there while packing). HDF5 gives structure and metadata; values go by pread and pwrite at the datasets' file
 * offsets. A shard is written under a temporary name, gets its index and the attribute `complete` last, is synced and
 * renamed. Values are little-endian. */
#ifndef MTP_DATA_STORE_H
#define MTP_DATA_STORE_H

#include "base/error.h"
#include "mtp/drafter.h"
#include "mtp/verifier.h"

/* The newest version that is read; what is written has the oldest that says all: 2 with global V only, else 1. */
enum { MTP__SHARD_VERSION = 2, MTP__TEACHER_TOP = 64 };

/* Fields in the order of the columns of `checksums`. Local and global K/V stand in the order of mtp_layer_type. */
typedef enum mtp__store_field {
    MTP__STORE_IDS,       /* I32 [T] */
    MTP__STORE_MASK,      /* U8 [T] */
    MTP__STORE_HIDDEN,    /* bf16 [T, Hb], after the final norm */
    MTP__STORE_KV,        /* local: bf16 or fp8 [T, 2, NKV, D]; K, then V */
    MTP__STORE_KV_GLOBAL, /* global; with global_v_only [T, 1, NKV, D]: V */
    MTP__STORE_SCALES,    /* local: F32 [T, 2, NKV], with fp8 only */
    MTP__STORE_SCALES_GLOBAL /* global */,
    MTP__STORE_TEACHER_LSE,    /* F32 [U]: log-sum-exp of the verifier's logits, for each supervised token */
    MTP__STORE_TEACHER_IDS,    /* I32 [U, top] */
    MTP__STORE_TEACHER_LOGITS, /* F32 [U, top], falling */
    MTP__STORE_FIELDS
} mtp__store_field;

/* What decides the datasets of a shard. */
typedef struct mtp__store_layout {
    int64_t num_tokens;  /* T: token places */
    int64_t num_teacher; /* U: supervised tokens with a token before them; 0 without a teacher */
    int64_t vocab_size, hidden_size, sliding_window;
    int64_t num_kv_heads[MTP_LAYER_TYPES], head_dim[MTP_LAYER_TYPES]; /* 0: the verifier has no such K/V */
    int64_t teacher_top;                                              /* 0: no teacher */
    bool fp8;
    bool global_v_only; /* of global K/V only V is stored; K is made of it */
} mtp__store_layout;

/* A row of the index; the compound type of the file. Numbers of tokens are relative to the sample. */
typedef struct mtp__store_row {
    uint64_t sample_id;   /* of the token ids: mtp__sample_hash */
    uint64_t first_token; /* place of token 0 */
    uint64_t first_teacher;
    uint64_t source; /* offset of the sample's name in `sources` */
    uint32_t num_tokens, num_supervised;
    uint32_t prompt_len;   /* first supervised token; num_tokens when none is */
    uint32_t first_target; /* first supervised token from the third on; num_tokens when none is */
    uint32_t last_target;  /* one past the last such token; 0 when there is none */
    uint32_t num_teacher;
} mtp__store_row;

/* Name of a field's dataset. */
const char *mtp__store_field_name(mtp__store_field field);
/* Bytes of a row of a field; 0 when a shard of this layout has no such field. */
size_t mtp__store_row_bytes(const mtp__store_layout *layout, mtp__store_field field);
/* What is stored of K/V of a type: 2, or 1 where it is V alone. */
int64_t mtp__store_parts(const mtp__store_layout *layout, int type);
/* Version of a shard of this layout. */
int mtp__store_version(const mtp__store_layout *layout);
/* Rows of a field. */
int64_t mtp__store_num_rows(const mtp__store_layout *layout, mtp__store_field field);
/* Geometry of a verifier's shards; T, U, top and fp8 are the caller's. */
mtp__store_layout mtp__store_layout_of(const mtp_verifier_config *verifier);

/* MTP_E_UNSUPPORTED about `path` in a build without HDF5 (MTP_HDF5=OFF), where no shard is opened or created. */
mtp_status mtp__store_supported(const char *path);

/* ---- writing (store_write.c) ---------------------------------------------------------------------------------- */

/* Create the file with the datasets of all fields, and reserve its blocks: a disk without room is MTP_E_IO here.
 * `offsets` receives where each field begins in the file (0 for fields that are not there). */
mtp_status mtp__store_create(const char *path, const mtp__store_layout *layout, const char *verifier_name,
                             uint64_t offsets[MTP__STORE_FIELDS]);
/* What comes last. */
typedef struct mtp__store_tail {
    const mtp__store_row *rows;
    const uint32_t *checksums; /* [num_samples, MTP__STORE_FIELDS] CRC-32C of each sample's rows of each field */
    int64_t num_samples;
    const char *sources; /* names, each ending in NUL */
    size_t sources_size;
    const char *quarantine; /* JSON lines of the samples that were refused */
    size_t quarantine_size;
} mtp__store_tail;
/* Add index, checksums and names, mark the file complete, sync it. */
mtp_status mtp__store_finish(const char *path, const mtp__store_tail *tail);

/* ---- reading (store_open.c, store_file.c, store_read.c) ------------------------------------------------------- */

/* A shard whose structure was checked. The file is not kept open; a reader notices when it was replaced. */
typedef struct mtp__shard {
    char *path;
    int64_t version;
    char verifier[256]; /* name of the directory that it was packed with */
    mtp__store_layout layout;
    uint64_t offsets[MTP__STORE_FIELDS];
    uint64_t checksums_offset; /* U32 [num_samples, MTP__STORE_FIELDS] in the file */
    uint32_t tail_crc[3];      /* of index, checksums and names, as the file says */
    int64_t num_samples, num_supervised, sample_tokens;
    mtp__store_row *rows;
    char *sources; /* ends in NUL */
    size_t sources_size;
    char *quarantine; /* NUL-terminated */
    size_t quarantine_size;
    uint64_t file_size, file_node;
    int64_t file_time; /* nanoseconds */
} mtp__shard;

/* The metadata takes the same reads whatever the number of samples; the index is read in one piece and checked.
 * MTP_E_FORMAT: no shard, or a damaged or incomplete one; MTP_E_VERSION: a newer one. */
mtp_status mtp__shard_open(const char *path, mtp__shard **shard);
void mtp__shard_close(mtp__shard *shard); /* accepts NULL */
/* Is the packed data of this verifier? */
mtp_status mtp__shard_check_verifier(const mtp__shard *shard, const mtp_verifier_config *verifier);
const char *mtp__shard_source(const mtp__shard *shard, int64_t sample);

/* Opens a regular file to read, and its stat; messages do not name it. The time of its last change, in nanoseconds. */
struct stat;
mtp_status mtp__store_open_file(const char *path, int flags, int *fd, struct stat *info);
int64_t mtp__store_time(const struct stat *info);
/* An open file of a shard. */
mtp_status mtp__shard_file(const mtp__shard *shard, int *fd);
/* Opened with more flags. */
mtp_status mtp__shard_file_as(const mtp__shard *shard, int flags, int *fd);
/* Rows [begin, end) of a field of a sample into `buffer`. When that is all of the sample's rows, their checksum is
 * compared. */
mtp_status mtp__shard_read(const mtp__shard *shard, int fd, int64_t sample, mtp__store_field field, int64_t begin,
                           int64_t end, void *buffer);
/* How much is read at once past the page cache, and to what offsets, sizes and memory are aligned then. */
enum { MTP__STORE_BOUNCE = 4 << 20, MTP__STORE_BLOCK = 4096 };
/* A way to read large fields of a shard. */
typedef struct mtp__store_reader {
    int fd;
    int direct;   /* the file opened past the page cache; -1: not so */
    void *bounce; /* [MTP__STORE_BOUNCE] at a multiple of MTP__STORE_BLOCK, with `direct` */
} mtp__store_reader;
/* mtp__shard_read by a reader. With `finite` the field is one of bf16 values, which are looked through for NaN and Inf
 * on the way. */
mtp_status mtp__shard_fetch(const mtp__shard *shard, const mtp__store_reader *reader, int64_t sample,
                            mtp__store_field field, int64_t begin, int64_t end, void *buffer, bool *finite);
/* The file for a reader's `direct`. MTP_E_UNSUPPORTED: its file system has no such thing. */
mtp_status mtp__shard_file_direct(const mtp__shard *shard, int *fd);
/* As many of the `size` bytes at an offset as one read gives, at least one; they lie at `*at` until the next read. */
mtp_status mtp__store_pread_direct(const mtp__store_reader *reader, const char *path, uint64_t offset, size_t size,
                                   const char **at, size_t *count);
/* Tell the system that these rows will be read soon, so that it begins; what it makes of that is its own affair. */
void mtp__shard_announce(const mtp__shard *shard, int fd, int64_t sample, mtp__store_field field, int64_t begin,
                         int64_t end);
/* Read everything and compare every checksum, those of index and names included. */
mtp_status mtp__shard_verify(const mtp__shard *shard);
/* pread until all is there. */
mtp_status mtp__store_pread(int fd, const char *path, uint64_t offset, void *buffer, size_t size);
mtp_status mtp__store_pwrite(int fd, const char *path, uint64_t offset, const void *buffer, size_t size);

/* ---- 8-bit floats (store_fp8.c) ------------------------------------------------------------------------------- */

/* n values of one head: byte = round(value / scale) to float8_e4m3fn, ties to even; scale = largest magnitude / 448
 * times 1 to 2, of 16 such the one with the least squared error. */
void mtp__store_to_fp8(uint8_t *bytes, float *scale, const float *values, int64_t n);

#endif
