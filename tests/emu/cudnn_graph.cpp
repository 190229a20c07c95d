/* What cuDNN's documentation asks of tensors, operations and graphs, of the operations that forward attention is
 * written with; and what its attention engines ask of the graph. */
#include "emu/cudnn.h"

#include <set>

namespace emu
{

size_t cudnn_element_bytes(cudnnDataType_t type)
{
    switch (type) {
    case CUDNN_DATA_FLOAT:
    case CUDNN_DATA_INT32:
        return 4;
    case CUDNN_DATA_BFLOAT16:
        return 2;
    case CUDNN_DATA_BOOLEAN:
        return 1;
    default:
        return 0; /* not known here */
    }
}

size_t cudnn_extent(const CudnnTensor &tensor)
{
    int64_t last = 0;
    for (size_t axis = 0; axis < tensor.dims.size(); axis++) last += (tensor.dims[axis] - 1) * tensor.strides[axis];
    return static_cast<size_t>(last + 1) * cudnn_element_bytes(tensor.type);
}

namespace
{

/* Every axis as wide as the result's, or one wide. */
bool spreads(const CudnnTensor &input, const CudnnTensor &output)
{
    if (input.dims.size() != output.dims.size()) return false;
    for (size_t axis = 0; axis < input.dims.size(); axis++)
        if (input.dims[axis] != output.dims[axis] && input.dims[axis] != 1) return false;
    return true;
}

std::string matmul_fault(const CudnnOperation &o)
{
    const auto &a = o.inputs[0].dims, &b = o.inputs[1].dims, &c = o.output.dims;
    if (a.size() != 4 || b.size() != 4 || c.size() != 4) return "a product of tensors that have not four axes";
    if (a[3] != b[2] || c[2] != a[2] || c[3] != b[3]) return "a product whose rows and columns do not fit";
    if (a[0] != b[0] || c[0] != a[0] || c[1] != a[1] || a[1] % b[1] != 0) return "a product whose batches do not fit";
    return "";
}

size_t operands(int mode)
{
    switch (mode) {
    case CUDNN_POINTWISE_EXP:
    case CUDNN_POINTWISE_LOG:
    case CUDNN_POINTWISE_GEN_INDEX:
        return 1;
    case CUDNN_POINTWISE_ADD:
    case CUDNN_POINTWISE_SUB:
    case CUDNN_POINTWISE_DIV:
    case CUDNN_POINTWISE_CMP_GT:
    case CUDNN_POINTWISE_CMP_GE:
        return 2;
    case CUDNN_POINTWISE_BINARY_SELECT:
        return 3;
    default:
        return 0;
    }
}

std::string pointwise_fault(const CudnnOperation &o)
{
    const size_t wanted = operands(o.mode);
    if (wanted == 0) return "a pointwise mode that the emulator does not have";
    if (o.inputs.size() != wanted) return "a pointwise operation with more or fewer inputs than its mode takes";
    for (const CudnnTensor &input : o.inputs)
        if (!spreads(input, o.output)) return "a pointwise operation whose shapes do not fit";
    const bool compares = o.mode == CUDNN_POINTWISE_CMP_GT || o.mode == CUDNN_POINTWISE_CMP_GE;
    if (compares != (o.output.type == CUDNN_DATA_BOOLEAN)) return "a comparison gives BOOLEAN, nothing else does";
    if (o.mode == CUDNN_POINTWISE_BINARY_SELECT && o.inputs[2].type != CUDNN_DATA_BOOLEAN)
        return "a selection by something that is not BOOLEAN";
    if (o.mode == CUDNN_POINTWISE_GEN_INDEX &&
        (o.axis < 0 || o.axis >= static_cast<int64_t>(o.output.dims.size()) || o.output.type != CUDNN_DATA_INT32))
        return "an index needs an axis of its tensor, and gives INT32";
    return "";
}

std::string reduction_fault(const CudnnOperation &o)
{
    if (o.mode != CUDNN_REDUCE_TENSOR_ADD && o.mode != CUDNN_REDUCE_TENSOR_MAX)
        return "a reduction that the emulator does not have";
    return spreads(o.output, o.inputs[0]) ? "" : "a reduction whose shapes do not fit";
}

} // namespace

std::string cudnn_operation_fault(const CudnnOperation &operation)
{
    switch (operation.kind) {
    case CudnnKind::MATMUL:
        return matmul_fault(operation);
    case CudnnKind::POINTWISE:
        return pointwise_fault(operation);
    default:
        return reduction_fault(operation);
    }
}

std::string cudnn_graph_fault(const CudnnGraph &graph)
{
    std::map<int64_t, CudnnTensor> known;
    std::set<int64_t> made;
    const auto differs = [&](const CudnnTensor &tensor) {
        const auto added = known.emplace(tensor.uid, tensor);
        return !added.second && !(added.first->second == tensor);
    };
    for (const CudnnOperation &o : graph) {
        for (const CudnnTensor &input : o.inputs) {
            if (differs(input)) return "two tensors with id " + std::to_string(input.uid);
            if (input.is_virtual && !made.count(input.uid))
                return "virtual tensor " + std::to_string(input.uid) + " is read before an operation makes it";
        }
        if (differs(o.output)) return "two tensors with id " + std::to_string(o.output.uid);
        if (o.output.by_value || !made.insert(o.output.uid).second)
            return "tensor " + std::to_string(o.output.uid) + " cannot be a result, or is one already";
    }
    return graph.empty() ? "no operation" : "";
}

/* Two products with a softmax between them, the scores virtual, everything in memory BF16 but the statistics; head
 * widths are multiples of 8 without gaps. */
std::string cudnn_attention_fault(const CudnnGraph &graph)
{
    std::vector<const CudnnOperation *> products;
    for (const CudnnOperation &o : graph)
        if (o.kind == CudnnKind::MATMUL) products.push_back(&o);
    if (products.size() != 2 || products[0] != &graph.front() || products[1] != &graph.back())
        return "attention begins and ends with a product, and has no other";
    const CudnnTensor &q = products[0]->inputs[0], &k = products[0]->inputs[1], &v = products[1]->inputs[1];
    const CudnnTensor &weight = products[1]->inputs[0], &o = products[1]->output;
    for (const CudnnTensor *tensor : {&q, &k, &v, &o})
        if (tensor->is_virtual || tensor->by_value || tensor->type != CUDNN_DATA_BFLOAT16)
            return "queries, keys, values and outputs are BF16 in memory";
    if (!weight.is_virtual || weight.type != CUDNN_DATA_BFLOAT16)
        return "the weights are virtual, and BF16 as the values";
    if (q.strides[3] != 1 || k.strides[2] != 1 || v.strides[3] != 1 || o.strides[3] != 1)
        return "the values of a head lie beside each other";
    if (q.dims[3] % 8 != 0 || v.dims[3] % 8 != 0) return "a head width is a multiple of 8";
    for (const CudnnOperation &one : graph)
        if (!one.output.is_virtual && &one != &graph.back() && one.output.dims[3] != 1) return "the scores are virtual";
    return "";
}

} // namespace emu
