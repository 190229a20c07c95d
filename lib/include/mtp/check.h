/* Validation: are stored samples what they say they are?
 *
 * Structure (keys, shapes, lengths, labels, masks) is checked when a data set is opened; here come values, and what
 * the verifier's weights say about them. lib/validate/README.md explains every test, its threshold, how that was
 * measured, and what cannot be seen. */
#ifndef MTP_CHECK_H
#define MTP_CHECK_H

#include "mtp/data.h"
#include "mtp/safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(symbol, name in reports, what it means). In the order in which they are looked for: a sample has one finding, the
 * first. */
#define MTP_CHECK_LIST(X)                                                                                        \
    X(MTP_CHECK_FILE, "file", "truncated or malformed file")                                                     \
    X(MTP_CHECK_HEADER, "header", "keys, shapes, lengths, labels or mask do not fit the verifier or each other") \
    X(MTP_CHECK_PROVENANCE, "provenance", "another verifier, dtype or norm label than most samples")             \
    X(MTP_CHECK_IDS, "ids", "token ids outside the verifier's vocabulary")                                       \
    X(MTP_CHECK_NONFINITE, "non-finite", "NaN, infinity, or an fp8 scale that is no number")                     \
    X(MTP_CHECK_ZERO_ROWS, "zero-rows", "rows of zeros")                                                         \
    X(MTP_CHECK_REPEATED_ROWS, "repeated-rows", "the same row for different tokens")                             \
    X(MTP_CHECK_HIDDEN_NORM, "hidden-norm", "hidden states on the other side of the final norm than labelled")   \
    X(MTP_CHECK_SWAPPED, "swapped", "local and global K/V swapped")                                              \
    X(MTP_CHECK_K_ROPE, "k-rope", "K without rotary embedding")                                                  \
    X(MTP_CHECK_K_SHIFTED, "k-shifted", "K of a neighbouring position")                                          \
    X(MTP_CHECK_SCALE, "scale", "a scale that the verifier's norms cannot give")                                 \
    X(MTP_CHECK_HIDDEN_SHIFTED, "hidden-shifted", "hidden states of a neighbouring position")                    \
    X(MTP_CHECK_TOKENS, "tokens", "token ids of another tokenizer, or hidden states of another text")            \
    X(MTP_CHECK_V_SHIFTED, "v-shifted", "V of a neighbouring position")                                          \
    X(MTP_CHECK_OTHER_KV, "other-kv", "K/V that do not belong to the sample's tokens and hidden states")

typedef enum mtp_check_reason {
    MTP_CHECK_GOOD,
#define MTP_CHECK_ENUM_(symbol, name, text) symbol,
    MTP_CHECK_LIST(MTP_CHECK_ENUM_)
#undef MTP_CHECK_ENUM_
        MTP_CHECK_REASONS
} mtp_check_reason;

/* "k-shifted"; "good" for MTP_CHECK_GOOD. */
MTP_API const char *mtp_check_reason_name(mtp_check_reason reason);
MTP_API const char *mtp_check_reason_text(mtp_check_reason reason);

typedef struct mtp_check_finding {
    mtp_check_reason reason; /* MTP_CHECK_GOOD: nothing was found */
    int64_t index;           /* first offending token; -1 where there is none (a header, a label) */
    char message[512];       /* key and figures, without the path */
} mtp_check_finding;

typedef struct mtp_check_options {
    /* Values and ids only, for numbers that no verifier wrote: nothing that rests on its norms and weights. */
    bool structure_only;
    int64_t head_positions; /* supervised positions a sample on which the verifier's head is run; 0: 32 */
    int64_t head_samples;   /* it is run on so many samples, spread evenly; 0: 1024. The others go without that test */
} mtp_check_options;

typedef struct mtp_check mtp_check;

/* Prepare to check the samples of `dataset`, which like `context` and its verifier must outlive the checking (what is
 * known of the evidence stays). Reads up to
 * 64 samples to learn how K/V follow from tokens and hidden states, and the metadata of all. MTP_E_DATA and
 * MTP_E_FORMAT concern the verifier's directory; a bad sample is no error. */
MTP_API mtp_status mtp_check_create(mtp_context *context, const mtp_dataset *dataset, const mtp_check_options *options,
                                    mtp_check **check);
MTP_API void mtp_check_free(mtp_check *check); /* accepts NULL */
/* Check sample `index`, whole. A bad sample is not an error: it is in the finding. A function of the data set and the
 * index alone; several threads may call it at once. `file`: the sample's file where the caller has it open, so that it
 * is not opened again; else, and for packed samples, NULL. */
MTP_API mtp_status mtp_check_sample(mtp_check *check, int64_t index, const mtp_safetensors *file,
                                    mtp_check_finding *finding);

/* One test that rests on the verifier, and whether it can be made here. */
typedef struct mtp_check_evidence {
    const char *test; /* "K positions, local" */
    bool possible;
    char note[160]; /* why not, or on what it rests */
} mtp_check_evidence;
MTP_API int64_t mtp_check_num_evidence(const mtp_check *check);
MTP_API const mtp_check_evidence *mtp_check_get_evidence(const mtp_check *check, int64_t index);

/* ---- a whole data set ----------------------------------------------------------------------------------------- */

typedef struct mtp_check_bad {
    char *path;
    mtp_check_finding finding;
} mtp_check_bad;

typedef struct mtp_check_report {
    int64_t num_samples;                /* good and bad */
    int64_t num_tokens, num_supervised; /* of the good ones */
    int64_t num_unsupervised;           /* good samples without a supervised token: they train nothing */
    int64_t counts[MTP_CHECK_REASONS];  /* samples by reason, MTP_CHECK_GOOD included */
    int64_t num_bad;
    mtp_check_bad *bad; /* [num_bad] in the order of their discovery: files and headers first */
    int64_t num_evidence;
    mtp_check_evidence *evidence; /* [num_evidence] */
} mtp_check_report;

/* Open and check everything in `paths` (as mtp_dataset_open takes them); bad samples are collected, whatever their
 * number. `progress` (may be NULL) is called before each sample; returning false ends with MTP_E_INTERRUPTED. Free the
 * report with mtp_check_report_free. */
MTP_API mtp_status mtp_check_run(mtp_context *context, const char *const *paths, int64_t num_paths,
                                 const mtp_verifier *verifier, const mtp_dataset_options *dataset_options,
                                 const mtp_check_options *options,
                                 bool (*progress)(void *user, int64_t done, int64_t total), void *user,
                                 mtp_check_report *report);
MTP_API void mtp_check_report_free(mtp_check_report *report); /* accepts a zeroed struct */
/* One JSON object on one line, without a newline; free() it. Keys: num_samples, num_good, num_bad, bad_share,
 * num_tokens, num_supervised, num_unsupervised, counts (an object: reason -> samples, those that occur), bad (objects
 * with path, reason, index or null, message), tests (objects with test, possible, note). */
MTP_API mtp_status mtp_check_report_json(const mtp_check_report *report, char **json);

#ifdef __cplusplus
}
#endif
#endif
