/* Stored samples: data sets, packed batches, the loader.
 *
 * A sample is one safetensors file (design: lib/data/README.md): token_ids, hidden_states, the K/V of the verifier's
 * last sliding and last full layer, and a loss mask, in the file or in a sidecar. All variants are read into one form.
 */
#ifndef MTP_DATA_H
#define MTP_DATA_H

#include "mtp/verifier.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Which side of the verifier's final norm stored hidden states are on. */
typedef enum mtp_hidden_norm { MTP_HIDDEN_UNSET, MTP_HIDDEN_PRE, MTP_HIDDEN_POST } mtp_hidden_norm;
/* What to do with a document longer than the token budget of a batch. */
typedef enum mtp_overlong { MTP_OVERLONG_ERROR, MTP_OVERLONG_TRUNCATE, MTP_OVERLONG_SKIP } mtp_overlong;

typedef enum mtp_split { MTP_SPLIT_NONE, MTP_SPLIT_TRAINING, MTP_SPLIT_VALIDATION } mtp_split;

typedef struct mtp_dataset_options {
    mtp_hidden_norm hidden_norm; /* what an unlabelled file holds; UNSET: an unlabelled file is an error that shows both
                                    choices. A label in a file that contradicts a setting is an error */
    const mtp_logger *logger;    /* counts and warnings while opening; NULL: silent */
    /* Which documents are taken. With VALIDATION those whose hash of token ids falls into the share, in (0, 1); with
     * TRAINING the others. A document stays on its side whatever is added to the data, and all copies of it do. */
    mtp_split split;
    double validation_share;
    /* One for each path, which is then a source: a loader mixes the sources so that their shares of the tokens of an
     * epoch are as the weights (lib/data/README.md, "Mixing sources"). Finite and positive. NULL: no mixing, every
     * document once an epoch. */
    const double *weights;
} mtp_dataset_options;

typedef struct mtp_dataset mtp_dataset;

/* The samples in `paths`: directories that mtp_pack wrote, or single shards (*.h5) of them; directories searched for
 * *.safetensors in name order, not recursively; or single sample files. They are checked against the verifier: keys,
 * shapes, dtypes, equal lengths, metadata, loss masks (in the file, or in any *.jsonl beside it: a sidecar). Values are
 * checked when they are read; no file stays open. The verifier must outlive the data set. MTP_E_NOT_FOUND: a path, or
 * samples in a directory. MTP_E_CONFIG: hidden_norm must be set or contradicts a label; a sample given twice.
 * MTP_E_DATA, MTP_E_FORMAT, MTP_E_VERSION: a sample or a sidecar is bad; the message names it. */
MTP_API mtp_status mtp_dataset_open(const char *const *paths, int64_t num_paths, const mtp_verifier *verifier,
                                    const mtp_dataset_options *options, mtp_dataset **dataset);
MTP_API void mtp_dataset_close(mtp_dataset *dataset); /* accepts NULL */

typedef struct mtp_sample_info {
    const char *path;       /* of its file or its shard */
    const char *name;       /* file name without directory; of a packed sample, that of the file it came from */
    int64_t num_tokens;     /* S */
    int64_t prompt_len;     /* index of the first supervised token; num_tokens when none is */
    int64_t num_supervised; /* ones in the loss mask */
} mtp_sample_info;

MTP_API int64_t mtp_dataset_size(const mtp_dataset *dataset);
/* Strings live as long as the data set. All zeros when index is not below the size. */
MTP_API mtp_sample_info mtp_dataset_sample(const mtp_dataset *dataset, int64_t index);
/* One of the paths that the data set was opened with. */
typedef struct mtp_source_info {
    const char *path;
    double share; /* of the tokens of an epoch, in (0, 1]; 0: there is no mixing */
    int64_t num_samples, num_tokens, num_supervised;
} mtp_source_info;
MTP_API int64_t mtp_dataset_num_sources(const mtp_dataset *dataset);
/* The path lives as long as the data set; all zeros when index is not below the number. Looks at all samples of it. */
MTP_API mtp_source_info mtp_dataset_source(const mtp_dataset *dataset, int64_t index);
/* A stable 64-bit identity of the data set (token ids, lengths, supervised tokens, order, and of mixed sources their
 * sizes and shares; not names and directories, so samples and the store they were packed into have the same): stored
 * with a checkpoint. */
MTP_API uint64_t mtp_dataset_fingerprint(const mtp_dataset *dataset);

/* A batch on the host. Documents stand back to back (packed: B = 1, S tokens) or one a line, padded with zeros (B > 1);
 * T = B * S token places. No padding place is ever inside a document, so no row can read one. */
typedef struct mtp_batch {
    int64_t batch, seq;    /* B, S */
    int32_t *token_ids;    /* [T] */
    uint8_t *loss_mask;    /* [T] */
    int32_t *document_ids; /* [T]: document of each place, -1 in padding */
    int64_t num_documents;
    int32_t *document_begin;      /* [num_documents] first place */
    int32_t *document_end;        /* [num_documents] one past the last */
    int64_t *document_sample;     /* [num_documents] index in the data set */
    mtp_view hidden_states;       /* real [B, S, Hb], after the final norm */
    mtp_view kv[MTP_LAYER_TYPES]; /* real [B, S, 2, NKV, D]: index 0 of the third axis is K, 1 is V. data NULL for a
                                     type of which the verifier has no K/V */
    int64_t num_supervised; /* places with loss_mask 1 that can be a target (third token of a document or later) */
} mtp_batch;

/* The given samples as one batch. packed: B = 1; else one a line. A tensor has the type of its samples when they
 * agree, else (and for fp8) it is fp32; no value changes by it. Every value is checked: ids in the vocabulary, no NaN
 * or Inf, no row of zeros in hidden_states: MTP_E_DATA with file, key and index. Free with mtp_batch_free. */
MTP_API mtp_status mtp_batch_collate(const mtp_dataset *dataset, const int64_t *samples, int64_t num_samples,
                                     bool packed, mtp_batch **batch);
MTP_API void mtp_batch_free(mtp_batch *batch); /* accepts NULL */

/* Where the blocks of a loader come from, for devices that copy from memory of their own kind (pinned pages). `alloc`
 * returns memory aligned to 64 bytes, or NULL when there is none; `free` gets each block back with its size. Both are
 * called by the thread that creates and frees the loader, never while it reads. */
typedef struct mtp_allocator {
    void *(*alloc)(void *user, size_t size);
    void (*free)(void *user, void *memory, size_t size);
    void *user;
} mtp_allocator;

/* Whether a loader reads stores through the system's page cache or past it (O_DIRECT). Past it takes a third of the
 * processor time and leaves the cache to others, but every epoch reads the disk again. */
typedef enum mtp_direct_io {
    MTP_DIRECT_IO_AUTO, /* past it when the shards are together larger than half the machine's memory and their file
                           system can do it */
    MTP_DIRECT_IO_ON,   /* MTP_E_UNSUPPORTED where the file system cannot */
    MTP_DIRECT_IO_OFF
} mtp_direct_io;

typedef struct mtp_loader_options {
    int64_t tokens_per_batch; /* token budget of a packed batch, >= 1 */
    mtp_overlong overlong;
    bool shuffle; /* order by (seed, epoch), by blocks of neighbours where there are many; else that of the data set */
    uint64_t seed;
    int64_t world_size, rank; /* of several processes that share the data: of each world_size batches in a row, from
                                 where they began or were sent, rank r takes number r; rows go on over the end of an
                                 epoch, so nothing is left out and none sees another's. 0, 0: alone */
    int64_t num_speculative_steps; /* draft steps K, 0..MTP_MAX_SPECULATIVE_STEPS, of the rows that will be made of the
                                      batches: K/V that none of them sees is not read and stands as zeros. 0: rows of
                                      any K */
    int64_t prefetch;              /* batches read ahead of the caller, all threads together, >= 1 */
    int64_t num_workers;     /* threads that read, each a batch at a time; more than prefetch are not started. 0: none,
                                mtp_loader_next reads when it is called. Order and bits are the same with any number */
    mtp_direct_io direct_io; /* the same bits either way */
    const mtp_allocator *allocator; /* of the ring's memory; NULL: the loader's own. Copied */
    const mtp_logger *logger;       /* what an epoch looks like, at creation; NULL: silent */
} mtp_loader_options;

typedef struct mtp_loader mtp_loader;

/* A loader over `dataset` (which must outlive it): threads pack documents in the sampler's order into batches of at
 * most tokens_per_batch tokens and read ahead. Memory is prefetch + 2 blocks, each of the size of the largest
 * batch, taken here and used again and again; with them the plan of an epoch (16 bytes a document, 48 a batch). Batches
 * where nothing is supervised are skipped and counted. The order is a pure function of (seed, epoch): any position can
 * be started from; the first is (0, 0). MTP_E_DATA: a document is longer than tokens_per_batch and overlong is ERROR,
 * or no batch would have a target. One thread at a time may call the functions of a loader. */
MTP_API mtp_status mtp_loader_create(const mtp_dataset *dataset, const mtp_loader_options *options,
                                     mtp_loader **loader);
MTP_API void mtp_loader_free(mtp_loader *loader); /* accepts NULL; stops the threads */
/* Batches in an epoch (supervised ones), those of all ranks together. */
MTP_API mtp_status mtp_loader_batches(const mtp_loader *loader, int64_t epoch, int64_t *count);
/* Continue with batch `index` of `epoch` (the number of batches itself: with the next epoch), rank r with the batch r
 * places behind it; what was read ahead and not taken is dropped, what is held stays valid. */
MTP_API mtp_status mtp_loader_seek(mtp_loader *loader, int64_t epoch, int64_t index);
/* The next batch and its (epoch, index); goes on into the next epoch by itself. The batch belongs to the loader until
 * mtp_loader_release. At most `prefetch` + 1 batches may be held at once; one more is MTP_E_ARGUMENT. Errors of the
 * reading threads arrive here, each in the place of the batch that could not be read, and stay until a seek. */
MTP_API mtp_status mtp_loader_next(mtp_loader *loader, const mtp_batch **batch, int64_t *epoch, int64_t *index);
MTP_API void mtp_loader_release(mtp_loader *loader, const mtp_batch *batch);

/* What was passed over is counted with the batches that mtp_loader_next gave out: an epoch's counts are complete with
 * its last batch. */
typedef struct mtp_loader_stats {
    double wait_seconds;                            /* time mtp_loader_next waited for data */
    int64_t batches_skipped;                        /* nothing supervised */
    int64_t documents_truncated, documents_skipped; /* longer than the budget */
    int64_t tokens_read;                            /* read ahead included */
    int64_t bytes_read;                             /* of values in stores and sample files, read ahead included */
    size_t memory_bytes;                            /* of the ring: constant */
} mtp_loader_stats;
MTP_API mtp_loader_stats mtp_loader_get_stats(const mtp_loader *loader);

#ifdef __cplusplus
}
#endif
#endif
