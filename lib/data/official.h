/* Internal: what is known of the published Gemma-4 verifiers, for estimates and for checks that have no verifier to
 * look at. */
#ifndef MTP_DATA_OFFICIAL_H
#define MTP_DATA_OFFICIAL_H

#include <stdbool.h>
#include <stdint.h>

/* config.json of the published verifier: hidden_size, and the K/V of the last sliding and full layer that own it. Head
 * dims are 256 and 512 in all. */
typedef struct mtp__official {
    const char *name; /* "E2B" */
    int64_t hidden_size;
    int64_t num_kv_heads[2]; /* by mtp_layer_type */
    bool k_is_v;             /* attention_k_eq_v */
} mtp__official;

/* By index from 0; NULL behind the last. */
const mtp__official *mtp__official_at(int64_t index);
/* The one of that hidden_size; NULL when none has it. */
const mtp__official *mtp__official_of_size(int64_t hidden_size);

#endif
