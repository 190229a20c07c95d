/* Internal: which part of the trained values a rank updates when the moments are sharded (ZeRO stage 1: Rajbhandari et
 * al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020): each rank keeps moments of an
 * equal share of the values, updates those, and hands them to the others. */
#ifndef MTP_OPTIM_SHARE_H
#define MTP_OPTIM_SHARE_H

#include "optim/optimizer.h"

/* `count` values take this many places. */
int64_t mtp__optim_padded(int64_t count);
/* The parts of `tensors` that fall to a rank: an equal number of values on each, in the order of the list, cut at
 * multiples of 16 values inside a tensor. parts [num_tensors] is filled (it may be `tensors` itself); returns their
 * number, which may be 0. The shares of all ranks do not overlap. */
int64_t mtp__optim_share(const mtp__optim_tensor *tensors, int64_t num_tensors, const mtp__optim_rank *rank,
                         mtp__optim_tensor *parts);
/* Does `b` begin where the padding of `a` ends: in memory, of one dtype, or both nowhere. */
bool mtp__optim_behind(const mtp_view *a, const mtp_view *b);
/* Tensors [first, end) that lie one behind the other in memory, the most there are from `first` on, and how many values
 * that is, those between them included. Returns `end`. */
int64_t mtp__optim_neighbours(const mtp__optim_tensor *tensors, int64_t num_tensors, int64_t first, int64_t *count);

#endif
