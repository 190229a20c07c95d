#include "mtp/tensor.h"

static const struct {
    size_t size;
    const char *name;
} dtypes[] = {
#define ROW(symbol, bytes, name) {bytes, name},
    MTP_DTYPE_LIST(ROW)
#undef ROW
};

size_t mtp_dtype_size(mtp_dtype dtype)
{
    return (unsigned)dtype < MTP_DTYPE_COUNT ? dtypes[dtype].size : 0;
}

const char *mtp_dtype_name(mtp_dtype dtype)
{
    return (unsigned)dtype < MTP_DTYPE_COUNT ? dtypes[dtype].name : "?";
}

bool mtp_dtype_is_compute(mtp_dtype dtype)
{
    return dtype == MTP_F32 || dtype == MTP_BF16 || dtype == MTP_F16;
}

mtp_view mtp_view_nd(void *data, mtp_dtype dtype, int32_t rank, const int64_t *shape)
{
    mtp_view view = {.data = data, .dtype = dtype, .rank = rank};
    int64_t stride = 1;
    for (int32_t axis = rank - 1; axis >= 0; axis--) {
        view.shape[axis] = shape[axis];
        view.stride[axis] = stride;
        stride *= shape[axis];
    }
    return view;
}

static mtp_view advance(mtp_view view, int64_t elements)
{
    if (view.data) view.data = (char *)view.data + elements * (int64_t)mtp_dtype_size(view.dtype);
    return view;
}

mtp_view mtp_view_cols(mtp_view matrix, int64_t first, int64_t count)
{
    matrix = advance(matrix, first * matrix.stride[1]);
    matrix.shape[1] = count;
    return matrix;
}

mtp_view mtp_view_rows(mtp_view tensor, int64_t first, int64_t count)
{
    tensor = advance(tensor, first * tensor.stride[0]);
    tensor.shape[0] = count;
    return tensor;
}

int64_t mtp_view_count(mtp_view tensor)
{
    int64_t count = 1;
    for (int32_t axis = 0; axis < tensor.rank; axis++) count *= tensor.shape[axis];
    return count;
}
