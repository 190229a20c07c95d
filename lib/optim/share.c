#include "optim/share.h"

int64_t mtp__optim_padded(int64_t count)
{
    return (count + MTP__OPTIM_GRAIN - 1) / MTP__OPTIM_GRAIN * MTP__OPTIM_GRAIN;
}

/* Where the share of a rank begins, of `grains` in all. */
static int64_t begin_of(int64_t grains, int64_t rank, int64_t world_size)
{
    return MTP__OPTIM_GRAIN * (grains / world_size * rank + grains % world_size * rank / world_size);
}

/* Values [first, end). A view without memory, of which only the size matters, stays one. */
static mtp_view part_of(const mtp_view *view, int64_t first, int64_t end)
{
    char *data = view->data;
    if (data) data += (size_t)first * mtp_dtype_size(view->dtype);
    return mtp_view_1d(data, view->dtype, end - first);
}

int64_t mtp__optim_share(const mtp__optim_tensor *tensors, int64_t num_tensors, const mtp__optim_rank *rank,
                         mtp__optim_tensor *parts)
{
    int64_t total = 0;
    for (int64_t i = 0; i < num_tensors; i++) total += mtp__optim_padded(mtp_view_count(tensors[i].value));
    const int64_t begin = begin_of(total / MTP__OPTIM_GRAIN, rank->rank, rank->world_size);
    const int64_t end = begin_of(total / MTP__OPTIM_GRAIN, rank->rank + 1, rank->world_size);
    int64_t num_parts = 0, at = 0;
    for (int64_t i = 0; i < num_tensors; i++) {
        const int64_t count = mtp_view_count(tensors[i].value);
        const int64_t first = begin > at ? begin - at : 0, last = end - at < count ? end - at : count;
        at += mtp__optim_padded(count);
        if (first >= last) continue;
        mtp__optim_tensor part = tensors[i];
        if (last - first < count) {
            part.first += first;
            part.place += first;
            part.value = part_of(&part.value, first, last);
            part.grad = part_of(&part.grad, first, last);
            part.shadow = part_of(&part.shadow, first, last);
        }
        parts[num_parts++] = part;
    }
    return num_parts;
}

bool mtp__optim_behind(const mtp_view *a, const mtp_view *b)
{
    if (!a->data && !b->data) return true;
    const size_t places = (size_t)mtp__optim_padded(mtp_view_count(*a));
    return a->data && a->dtype == b->dtype && (char *)a->data + places * mtp_dtype_size(a->dtype) == b->data;
}

int64_t mtp__optim_neighbours(const mtp__optim_tensor *tensors, int64_t num_tensors, int64_t first, int64_t *count)
{
    int64_t i = first;
    *count = 0;
    for (; i + 1 < num_tensors; i++) {
        const mtp__optim_tensor *a = &tensors[i], *b = &tensors[i + 1];
        const int64_t places = mtp__optim_padded(mtp_view_count(a->value));
        if (a->place + places != b->place || !mtp__optim_behind(&a->value, &b->value) ||
            !mtp__optim_behind(&a->grad, &b->grad) || !mtp__optim_behind(&a->shadow, &b->shadow))
            break;
        *count += places;
    }
    *count += mtp_view_count(tensors[i].value);
    return i + 1;
}
