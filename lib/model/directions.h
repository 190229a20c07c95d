/* Internal: the leading directions of a table of rows. */
#ifndef MTP_MODEL_DIRECTIONS_H
#define MTP_MODEL_DIRECTIONS_H

#include "base/context.h"

/* `count` directions [count, Hb] (host, overwritten) that span, nearly, the space of the leading right singular vectors
 * of `table` (real [V, Hb], host): block power iteration on table^T table, orthonormal rows. Beyond Hb of them the
 * directions are random. Costs 2 V Hb^2 operations (1.2e12 for V = 262144, Hb = 1536) and 8 Hb^2 bytes; deterministic
 * in `seed`. */
mtp_status mtp__leading_directions(mtp_context *context, mtp_view table, int64_t count, uint64_t seed,
                                   float *directions);

#endif
