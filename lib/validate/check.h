/* Internal: what the tests of a sample share. lib/validate/README.md tells what each test rests on. */
#ifndef MTP_VALIDATE_CHECK_H
#define MTP_VALIDATE_CHECK_H

#include <pthread.h>

#include "base/context.h"
#include "base/error.h"
#include "data/dataset.h"
#include "data/verifier_key.h"
#include "mtp/check.h"

enum {
    MTP__CHECK_BLOCK = 256,     /* rows read at a time */
    MTP__CHECK_WINDOW = 2048,   /* tokens of a sample that the tests over positions look at */
    MTP__CHECK_MIN_TOKENS = 48, /* a shorter sample says too little to these tests */
    MTP__CHECK_FEATURES = 128,  /* of the embedding, and as many of the hidden state */
    MTP__CHECK_SPREAD = 4,      /* features that a value of a longer row goes into */
    MTP__CHECK_TARGETS = 64,    /* dimensions of K or V that are predicted */
    MTP__CHECK_LEARN = 64,      /* samples that the relation is learnt from */
    MTP__CHECK_FIELDS = MTP_LAYER_TYPES * MTP__KV,
    MTP__CHECK_HIDDEN = MTP__CHECK_FIELDS, /* hidden_states, where rows of any field are asked for */
    MTP__CHECK_MAX_EVIDENCE = 12
};

/* A linear map from features of a token to one field, learnt from the data set. */
typedef struct mtp__check_relation {
    double *weight; /* [2 features + 1, targets] */
    double *mean;   /* [targets] */
    double typical; /* median R^2 of the samples it was learnt from, at their own lag */
    bool possible;
} mtp__check_relation;

/* Where a value of a long row goes. */
typedef struct mtp__check_mix {
    int32_t feature;
    float sign;
} mtp__check_mix;

struct mtp_check {
    mtp_context *context;
    const mtp_dataset *dataset;
    const mtp_verifier *verifier;
    mtp_check_options options;
    mtp__verifier_key keys[MTP_LAYER_TYPES];
    int64_t features; /* of each kind; 0: nothing was learnt */
    mtp__check_relation relations[MTP__CHECK_FIELDS];
    struct mtp__check_origin *origin; /* what most samples say about where they come from */
    float *logits;                    /* [head_positions, V] */
    void *scratch;
    size_t scratch_size;
    pthread_mutex_t head; /* guards logits and scratch, and the device */
    mtp__check_mix *mix;  /* [Hb, SPREAD]; NULL when Hb is small enough to take as it is */
    mtp_check_evidence evidence[MTP__CHECK_MAX_EVIDENCE];
    int64_t num_evidence;
};

/* Figures of one sample, gathered while its rows stream by. */
typedef struct mtp__check_data {
    int64_t index;
    mtp__dataset_entry entry;
    mtp_safetensors *file; /* of a sample that is not packed, when it was opened here */
    mtp__sample sample;
    int fd;                       /* of the shard of a packed one */
    const mtp__verifier_key *key; /* that K is made with where a shard holds V alone */
    int64_t num_tokens;
    int32_t *ids;                 /* [S] */
    uint8_t *mask;                /* [S] */
    int64_t begin, count;         /* the window of tokens that statistics look at */
    float *hidden;                /* [count, Hb] after the final norm */
    float *kv[MTP__CHECK_FIELDS]; /* [count, NKV * D]; K and V of each type */
    mtp_check_finding repeated;   /* a row like its neighbour: the tests that follow may know better why */
    mtp_check_finding v_scale;    /* the scale of V: so here */
} mtp__check_data;

/* Report into `finding` with a printf message. */
void mtp__check_report(mtp_check_finding *finding, mtp_check_reason reason, int64_t index, const char *format, ...)
    MTP__PRINTF(4, 5);
/* Report what opening a sample said, without the path in front. */
void mtp__check_report_error(mtp_check_finding *finding, const char *path, const mtp_error *error);
static inline int mtp__check_field(int type, int part)
{
    return type * MTP__KV + part;
}
/* One more line of what can be tested. */
void mtp__check_note(mtp_check *check, const char *test, bool possible, const char *format, ...) MTP__PRINTF(4, 5);

/* weights.c: the keys, from the verifier's directory. */
mtp_status mtp__check_read_weights(mtp_check *check);
/* origin.c: metadata of all samples. */
mtp_status mtp__check_read_origin(mtp_check *check);
void mtp__check_test_origin(const mtp_check *check, const mtp__check_data *data, mtp_check_finding *finding);
void mtp__check_free_origin(mtp_check *check);
/* source.c: a sample's rows, wherever they are. "kv_last_local_k", "hidden_states" */
const char *mtp__check_field_name(int field);
/* Relative rounding that the RMS of a row may show. */
double mtp__check_tolerance(const mtp__check_data *data, int field);
/* `file`: that of the sample, when it is open already. Close the data always. */
mtp_status mtp__check_open(const mtp_check *check, int64_t index, const mtp_safetensors *file, mtp__check_data *data,
                           mtp_check_finding *finding);
void mtp__check_close(mtp__check_data *data);
mtp_status mtp__check_read_integers(const mtp_check *check, const mtp__check_data *data, mtp_check_finding *finding);
/* Rows [first, first + count) of a field, of n values each, as fp32; one that is not finite becomes a finding.
 * `scratch` holds two rows. */
mtp_status mtp__check_read_rows(const mtp__check_data *data, int field, int64_t first, int64_t count, int64_t n,
                                float *rows, float *scratch, mtp_check_finding *finding);
/* rows.c: read a sample, look at every row. A bad row ends the reading with a finding. Close the data always. */
mtp_status mtp__check_read(const mtp_check *check, int64_t index, const mtp_safetensors *file, mtp__check_data *data,
                           mtp_check_finding *finding);
/* What is reported of `finding`, data->repeated and data->v_scale: the one that explains most. */
void mtp__check_settle(const mtp__check_data *data, mtp_check_finding *finding);
/* keys.c: K against its norm and its position, global V against K. */
mtp_status mtp__check_test_keys(const mtp_check *check, const mtp__check_data *data, mtp_check_finding *finding);
/* Turn a row [heads, D] of K back by `position`. */
void mtp__check_unrotate(const mtp__verifier_key *key, double position, const float *row, float *out);
/* head.c: the verifier's head on supervised positions. */
mtp_status mtp__check_head_prepare(mtp_check *check);
mtp_status mtp__check_test_head(mtp_check *check, const mtp__check_data *data, mtp_check_finding *finding);
/* relation.c: K/V against tokens and hidden states. */
mtp_status mtp__check_learn(mtp_check *check);
mtp_status mtp__check_test_relations(const mtp_check *check, const mtp__check_data *data, mtp_check_finding *finding);

#endif
