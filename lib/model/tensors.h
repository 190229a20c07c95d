/* Internal: the tensors that a drafter's model.safetensors holds, worked out from its configuration. */
#ifndef MTP_MODEL_TENSORS_H
#define MTP_MODEL_TENSORS_H

#include "base/text.h"
#include "mtp/drafter.h"
#include "mtp/safetensors.h"

#define MTP__TOKEN_ORDERING "masked_embedding.token_ordering"

typedef struct mtp__tensor_spec {
    char name[72];
    int32_t rank;
    int64_t shape[2];
} mtp__tensor_spec;

/* All of them, token_ordering (the only integer one, I64 [V]) included, sorted by the bytes of their names. Dense: 4 +
 * 11 a layer; ordered heads have two more. free(*specs). */
mtp_status mtp__tensor_specs(const mtp_drafter_config *config, mtp__tensor_spec **specs, int64_t *count);
/* The specification with this name; NULL when there is none. */
const mtp__tensor_spec *mtp__tensor_spec_find(const mtp__tensor_spec *specs, int64_t count, const char *name);
/* "[2048, 64]" into `text`. */
const char *mtp__shape_text(int32_t rank, const int64_t *shape, char *text, size_t capacity);
/* Does the entry have the specified shape? */
bool mtp__tensor_fits(const mtp__tensor_spec *spec, const mtp_safetensors_entry *entry);
/* Why no drafter has a tensor of this name, with what to do; for the common strangers, else a general sentence. */
const char *mtp__tensor_stranger(const char *name);
/* Is `ordering` a permutation of 0..vocab_size-1? Otherwise MTP_E_DATA that names `origin` and the first wrong slot. */
mtp_status mtp__check_ordering(const int64_t *ordering, int64_t vocab_size, const char *origin);

#endif
