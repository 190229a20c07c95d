/* Internal: how the K that a drafter reads is made, from the verifier's directory: K = RoPE(k_norm weight * n), n of
 * RMS 1 in every head; and with attention_k_eq_v the V of full layers is n itself. */
#ifndef MTP_DATA_VERIFIER_KEY_H
#define MTP_DATA_VERIFIER_KEY_H

#include "base/error.h"
#include "mtp/verifier.h"

typedef struct mtp__verifier_key {
    int64_t heads, width; /* NKV, D; heads 0: the verifier has no such layer */
    float *norm;          /* k_norm weight [D], NULL when it is not in the directory */
    double *frequency;    /* radians a position, [D / 2], NULL when the rotary scheme is not known */
    bool is_value;        /* V is n: a full layer with attention_k_eq_v */
} mtp__verifier_key;

/* Of the last layer of the type that owns K/V. Free with mtp__verifier_key_free, also after a failure. */
mtp_status mtp__verifier_key_read(const mtp_verifier *verifier, mtp_layer_type type, mtp__verifier_key *key);
void mtp__verifier_key_free(mtp__verifier_key *key); /* accepts a zeroed struct */
/* Can K be made of V? MTP_E_CONFIG says why not. */
mtp_status mtp__verifier_key_check(const mtp__verifier_key *key, const char *directory);
/* How far K may be from what V gives, relative to its size in a head. Both are rounded to bf16 on their way, so K comes
 * out with other last bits: 0.5 % of its size at most on the sample data (tests/dataset/test_value_only.c). */
#define MTP__KEY_OF_VALUE_LIMIT 0.015625
/* K of token `position` of its V, [heads, D] each. */
void mtp__verifier_key_of_value(const mtp__verifier_key *key, int64_t position, const float *v, float *k);

#endif
