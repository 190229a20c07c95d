/* Internal: the order of rows in memory. An ordered drafter has the rows of model.embed_tokens.weight, of its gradient
 * and of its moments in the order of token_ordering ("by slot"), so that the tokens of a centroid are one block; files
 * have the rows in the order of the tokens. */
#ifndef MTP_MODEL_SLOTS_H
#define MTP_MODEL_SLOTS_H

#include "model/drafter.h"

/* Puts values [first, first + count) of a tensor, in the order of files, into `values`. */
typedef mtp_status (*mtp__values_source)(void *user, int64_t first, int64_t count, float *values);

/* Values [first, first + count) of a parameter, of its gradient or of a moment in the order of memory, into `values`;
 * `source` has them in the order of files. */
mtp_status mtp__values_in_memory_order(const mtp_drafter *drafter, const mtp__param *param, int64_t first,
                                       int64_t count, mtp__values_source source, void *user, float *values);

#endif
