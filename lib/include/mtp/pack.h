/* The packed store: samples in a few large HDF5 files, checked once, read by the loader in large pieces.
 *
 * A store is a directory: shards shard-NNNNN.h5 (lib/data/README.md says what is in them), quarantine.jsonl with the
 * samples that were refused and why, pack.json with what is packed and how, and store.json, written last. The same
 * samples and settings give the same bytes with any number of workers and however often packing was interrupted. */
#ifndef MTP_PACK_H
#define MTP_PACK_H

#include "mtp/context.h"
#include "mtp/data.h"
#include "mtp/safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Why a sample is not stored. */
typedef struct mtp_pack_refusal {
    char reason[48];    /* a few words, counted in the summary */
    int64_t index;      /* first offending token; -1 where there is none */
    char message[1024]; /* what is wrong, without the path */
} mtp_pack_refusal;

/* Tests of samples before they are stored, beyond what reading them shows (types, lengths, ids, NaN, rows of zeros). */
typedef struct mtp_pack_check {
    const char *name; /* goes into pack.json: a store is made with one set of tests */
    /* Called once, before the first sample is looked at and not at all when nothing is left to pack. `samples` lives
     * until mtp_pack returns. */
    mtp_status (*prepare)(void *user, const mtp_dataset *samples);
    /* Called for each sample, by all workers at once; `file` is that of the sample, open. A bad sample is no error: it
     * leaves a reason that is not empty. The answer must depend on the data set and the index alone. */
    mtp_status (*sample)(void *user, int64_t index, const mtp_safetensors *file, mtp_pack_refusal *refusal);
    void *user;
} mtp_pack_check;

typedef struct mtp_pack_options {
    const char *const *inputs; /* directories of samples, or sample files, as mtp_dataset_open takes them */
    int64_t num_inputs;
    const mtp_verifier *verifier;
    mtp_hidden_norm hidden_norm; /* of files without a label; states before the norm are stored after it */
    int64_t shard_bytes;         /* a shard ends before it would become larger; one sample always fits. >= 1 */
    int64_t workers;             /* threads that read, check and write samples, >= 1 */
    double max_bad;              /* share of refused samples, in [0, 1], beyond which packing fails */
    bool fp8;                    /* K/V as float8_e4m3fn with a scale for each token, K or V, and head; else bf16 */
    bool global_v_only;          /* leave global K out and make it of V when it is read, for verifiers with
                                    attention_k_eq_v: MTP_E_CONFIG for others. K then has other last bits (bf16) */
    const mtp_context *teacher;  /* computes the teacher: log-sum-exp and the top 64 logits of the verifier's head (its
                                    embedding table) after the softcap, for each supervised token; NULL: no teacher */
    const mtp_pack_check *check; /* NULL: none; mtp/check.h has one, which trainers/mtp/pack.c connects */
    const mtp_logger *logger;    /* NULL: silent */
    /* Called after each sample by one thread at a time; false ends packing with MTP_E_INTERRUPTED. May be NULL. */
    bool (*progress)(void *user, int64_t done, int64_t total);
    void *user;
} mtp_pack_options;

enum { MTP_PACK_REASONS = 32 };

typedef struct mtp_pack_summary {
    int64_t samples, tokens, supervised; /* stored */
    int64_t refused;                     /* samples in quarantine */
    int64_t shards;
    int64_t shards_kept; /* of an earlier, interrupted run */
    uint64_t bytes;      /* of all shards */
    struct {
        char reason[48];
        int64_t count;
    } reasons[MTP_PACK_REASONS]; /* why samples were refused; the used ones first, the others are empty */
} mtp_pack_summary;

/* Pack into `directory`, made when missing. Where the same packing was interrupted it goes on behind the last finished
 * shard. MTP_E_EXISTS: another packing, or another program that is at work there now (the message names it).
 * MTP_E_DATA: more than max_bad samples are bad; quarantine.jsonl says which. MTP_E_IO: no room, no permission. */
MTP_API mtp_status mtp_pack(const char *directory, const mtp_pack_options *options, mtp_pack_summary *summary);

/* Read a whole store, or one shard (*.h5), and compare every checksum. MTP_E_DATA names shard, sample and field.
 * `progress` counts shards and may be NULL. */
MTP_API mtp_status mtp_pack_verify(const char *path, bool (*progress)(void *user, int64_t done, int64_t total),
                                   void *user, mtp_pack_summary *summary);

/* The official verifiers by index from 0: "E2B", "E4B", ...; NULL behind the last. */
MTP_API const char *mtp_pack_official(int64_t index);
/* Bytes of the fields of `num_tokens` tokens of one, all of them supervised where a teacher is stored. Index and names
 * come to less than 0.1 % of it. 0 with global_v_only for one that is not attention_k_eq_v. */
MTP_API uint64_t mtp_pack_official_bytes(int64_t index, bool fp8, bool global_v_only, bool teacher, int64_t num_tokens);

#ifdef __cplusplus
}
#endif
#endif
