#include "model/slots.h"

#include "base/error.h"

mtp_status mtp__values_in_memory_order(const mtp_drafter *drafter, const mtp__param *param, int64_t first,
                                       int64_t count, mtp__values_source source, void *user, float *values)
{
    if (!param->by_slot) return source(user, first, count, values);
    const int64_t width = param->shape[1], end = first + count;
    while (first < end) { /* the rest of a row, or of what is asked for */
        const int64_t row = first / width, column = first % width;
        const int64_t n = width - column < end - first ? width - column : end - first;
        MTP_TRY(source(user, drafter->token_ordering[row] * width + column, n, values));
        values += n;
        first += n;
    }
    return MTP_OK;
}
