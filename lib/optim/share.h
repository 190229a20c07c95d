/* Internal: which part of the trained values a rank updates when the moments are sharded (ZeRO stage 1: Rajbhandari et
 * al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020): each rank keeps moments of an
 * equal share of the values, updates those, and hands them to the others. */
#ifndef MTP_OPTIM_SHARE_H
#define MTP_OPTIM_SHARE_H

#include "optim/optimizer.h"

/* The parts of `tensors` that fall to a rank: an equal number of values on each, cut anywhere inside a tensor, in the
 * order of the list. parts [num_tensors] is filled (it may be `tensors` itself); returns their number, which may be 0.
 */
int64_t mtp__optim_share(const mtp__optim_tensor *tensors, int64_t num_tensors, const mtp__optim_rank *rank,
                         mtp__optim_tensor *parts);
/* The stretch of memory that holds the values of that share, when the tensors lie one behind the other in one block:
 * what lies between them (frozen parameters) belongs to it. The shares of all ranks do not overlap. */
void mtp__optim_stretch(const mtp__optim_tensor *tensors, int64_t num_tensors, const mtp__optim_rank *rank,
                        float **begin, int64_t *count);

#endif
