#include "optim/share.h"

/* Shares begin at a multiple of so many values of the list. */
enum { GRAIN = 64 };

static int64_t total_of(const mtp__optim_tensor *tensors, int64_t num_tensors)
{
    int64_t total = 0;
    for (int64_t i = 0; i < num_tensors; i++) total += mtp_view_count(tensors[i].value);
    return total;
}

/* Where the share of a rank begins, in values of the list; of the rank behind the last one: the end. */
static int64_t begin_of(int64_t total, int64_t rank, int64_t world_size)
{
    const int64_t grains = (total + GRAIN - 1) / GRAIN;
    const int64_t begin = GRAIN * (grains / world_size * rank + grains % world_size * rank / world_size);
    return begin < total ? begin : total;
}

int64_t mtp__optim_share(const mtp__optim_tensor *tensors, int64_t num_tensors, const mtp__optim_rank *rank,
                         mtp__optim_tensor *parts)
{
    const int64_t total = total_of(tensors, num_tensors);
    const int64_t begin = begin_of(total, rank->rank, rank->world_size);
    const int64_t end = begin_of(total, rank->rank + 1, rank->world_size);
    int64_t num_parts = 0, at = 0;
    for (int64_t i = 0; i < num_tensors; i++) {
        const int64_t count = mtp_view_count(tensors[i].value);
        const int64_t first = begin > at ? begin - at : 0, last = end - at < count ? end - at : count;
        at += count;
        if (first >= last) continue;
        mtp__optim_tensor *part = &parts[num_parts++];
        *part = tensors[i];
        if (last - first == count) continue;
        part->first = first;
        part->value = mtp_view_1d((float *)tensors[i].value.data + first, MTP_F32, last - first);
        part->grad = mtp_view_1d((float *)tensors[i].grad.data + first, MTP_F32, last - first);
        if (!tensors[i].value.data) part->value.data = part->grad.data = NULL; /* only sizes are asked for */
    }
    return num_parts;
}

/* The memory of a value of the list; of the one behind the last: behind it. */
static float *address_of(const mtp__optim_tensor *tensors, int64_t num_tensors, int64_t index)
{
    for (int64_t i = 0; i < num_tensors; i++) {
        const int64_t count = mtp_view_count(tensors[i].value);
        if (index < count || (index == count && i + 1 == num_tensors)) return (float *)tensors[i].value.data + index;
        index -= count;
    }
    return NULL;
}

void mtp__optim_stretch(const mtp__optim_tensor *tensors, int64_t num_tensors, const mtp__optim_rank *rank,
                        float **begin, int64_t *count)
{
    const int64_t total = total_of(tensors, num_tensors);
    *begin = address_of(tensors, num_tensors, begin_of(total, rank->rank, rank->world_size));
    *count = address_of(tensors, num_tensors, begin_of(total, rank->rank + 1, rank->world_size)) - *begin;
}
