/* The operations of a graph by plain loops, one after the other: virtual tensors are arrays of floats. */
#include "emu/cudnn.h"

#include <cuda_bf16.h>

#include <cmath>
#include <cstring>
#include <limits>

namespace emu
{

namespace
{

using Index = std::vector<int64_t>;

float round_to(cudnnDataType_t type, float value)
{
    return type == CUDNN_DATA_BFLOAT16 ? __bfloat162float(__float2bfloat16_rn(value)) : value;
}

/* One tensor: in memory, an array, or a number. */
class Values
{
  public:
    Values(const CudnnTensor &tensor, void *place, float number) : tensor_(tensor), place_(place), number_(number)
    {
        if (!tensor.is_virtual) return;
        size_t count = 1;
        for (int64_t dim : tensor.dims) count *= static_cast<size_t>(dim);
        array_.assign(count, std::numeric_limits<float>::quiet_NaN());
    }

    /* Along an axis that is one wide, the only element. */
    float get(const Index &at) const
    {
        if (tensor_.by_value) return number_;
        if (tensor_.is_virtual) return array_[compact(at)];
        const char *element = static_cast<const char *>(place_) + offset(at);
        if (tensor_.type == CUDNN_DATA_FLOAT) {
            float value;
            memcpy(&value, element, sizeof value);
            return value;
        }
        __nv_bfloat16 value;
        memcpy(static_cast<void *>(&value), element, sizeof value);
        return __bfloat162float(value);
    }

    void set(const Index &at, float value)
    {
        if (tensor_.is_virtual) {
            array_[compact(at)] = round_to(tensor_.type, value);
        } else if (tensor_.type == CUDNN_DATA_FLOAT) {
            memcpy(static_cast<char *>(place_) + offset(at), &value, sizeof value);
        } else {
            const __nv_bfloat16 half = __float2bfloat16_rn(value);
            memcpy(static_cast<char *>(place_) + offset(at), &half, sizeof half);
        }
    }

  private:
    size_t compact(const Index &at) const
    {
        size_t place = 0;
        for (size_t axis = 0; axis < at.size(); axis++)
            place = place * static_cast<size_t>(tensor_.dims[axis]) +
                    static_cast<size_t>(tensor_.dims[axis] == 1 ? 0 : at[axis]);
        return place;
    }
    size_t offset(const Index &at) const
    {
        int64_t place = 0;
        for (size_t axis = 0; axis < at.size(); axis++)
            if (tensor_.dims[axis] > 1) place += at[axis] * tensor_.strides[axis];
        return static_cast<size_t>(place) * cudnn_element_bytes(tensor_.type);
    }

    CudnnTensor tensor_;
    void *place_;
    float number_;
    std::vector<float> array_;
};

/* body(at) for every index of `dims`. */
template <class Body>
void for_each(const Index &dims, Body body)
{
    Index at(dims.size(), 0);
    for (bool more = true; more;) {
        body(at);
        more = false;
        for (size_t axis = dims.size(); axis-- > 0 && !more;) {
            more = ++at[axis] < dims[axis];
            if (!more) at[axis] = 0;
        }
    }
}

/* C[b, h, m, n] = sum over k of A[b, h, m, k] B[b, h', k, n]; consecutive heads of A share one of B. */
void multiply(const CudnnOperation &o, const Values &a, const Values &b, Values &c)
{
    const Index &a_dims = o.inputs[0].dims, &b_dims = o.inputs[1].dims;
    for_each(o.output.dims, [&](const Index &at) {
        float sum = 0;
        Index x = at, y = at;
        y[1] = at[1] / (a_dims[1] / b_dims[1]);
        for (int64_t k = 0; k < a_dims[3]; k++) {
            x[3] = y[2] = k;
            sum += a.get(x) * b.get(y);
        }
        c.set(at, sum);
    });
}

float pointwise(int mode, float x, float b, float t)
{
    switch (mode) {
    case CUDNN_POINTWISE_ADD:
        return x + b;
    case CUDNN_POINTWISE_SUB:
        return x - b;
    case CUDNN_POINTWISE_DIV:
        return x / b;
    case CUDNN_POINTWISE_EXP:
        return expf(x);
    case CUDNN_POINTWISE_LOG:
        return logf(x);
    case CUDNN_POINTWISE_CMP_GT:
        return x > b;
    case CUDNN_POINTWISE_CMP_GE:
        return x >= b;
    default: /* CUDNN_POINTWISE_BINARY_SELECT */
        return t != 0.0f ? x : b;
    }
}

void apply(const CudnnOperation &o, const std::vector<const Values *> &in, Values &out)
{
    for_each(o.output.dims, [&](const Index &at) {
        if (o.mode == CUDNN_POINTWISE_GEN_INDEX)
            return out.set(at, static_cast<float>(at[static_cast<size_t>(o.axis)]));
        const float b = in.size() > 1 ? in[1]->get(at) : 0, t = in.size() > 2 ? in[2]->get(at) : 0;
        out.set(at, pointwise(o.mode, in[0]->get(at), b, t));
    });
}

void reduce(const CudnnOperation &o, const Values &x, Values &out)
{
    Index inside = o.inputs[0].dims; /* the part that one result sees */
    for (size_t axis = 0; axis < inside.size(); axis++)
        if (o.output.dims[axis] > 1) inside[axis] = 1;
    for_each(o.output.dims, [&](const Index &at) {
        const bool add = o.mode == CUDNN_REDUCE_TENSOR_ADD;
        float value = add ? 0 : -std::numeric_limits<float>::infinity();
        for_each(inside, [&](const Index &offset) {
            Index from = at;
            for (size_t axis = 0; axis < from.size(); axis++) from[axis] += offset[axis];
            const float one = x.get(from);
            value = add ? value + one : one > value ? one : value;
        });
        out.set(at, value);
    });
}

} // namespace

void cudnn_compute(const CudnnGraph &graph, const std::map<int64_t, void *> &places,
                   const std::map<int64_t, float> &numbers)
{
    std::map<int64_t, Values> values;
    const auto of = [&](const CudnnTensor &tensor) -> Values & {
        const auto found = values.find(tensor.uid);
        if (found != values.end()) return found->second;
        const auto place = places.find(tensor.uid);
        const auto number = numbers.find(tensor.uid);
        return values
            .emplace(tensor.uid, Values(tensor, place == places.end() ? nullptr : place->second,
                                        number == numbers.end() ? 0 : number->second))
            .first->second;
    };
    for (const CudnnOperation &o : graph) {
        std::vector<const Values *> in;
        for (const CudnnTensor &tensor : o.inputs) in.push_back(&of(tensor));
        Values &out = of(o.output);
        if (o.kind == CudnnKind::MATMUL)
            multiply(o, *in[0], *in[1], out);
        else if (o.kind == CudnnKind::REDUCTION)
            reduce(o, *in[0], out);
        else
            apply(o, in, out);
    }
}

} // namespace emu
