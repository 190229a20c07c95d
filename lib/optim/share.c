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

/* Values [first, last). A view without memory, of which only the size matters, stays one. */
static mtp_view part_of(const mtp_view *view, int64_t first, int64_t last)
{
    return mtp_view_1d(view->data ? (float *)view->data + first : NULL, MTP_F32, last - first);
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
        mtp__optim_tensor part = tensors[i];
        if (last - first < count) {
            part.first = first;
            part.value = part_of(&part.value, first, last);
            part.grad = part_of(&part.grad, first, last);
        }
        parts[num_parts++] = part;
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
