/* Inside the twin of cuDNN: what its handles point at, and a graph as it is checked and computed. */
#ifndef MTP_EMU_CUDNN_H
#define MTP_EMU_CUDNN_H

#include <cudnn_graph.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emu
{

struct CudnnTensor {
    int64_t uid = -1;
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    std::vector<int64_t> dims, strides;
    int64_t alignment = 1;
    bool is_virtual = false, by_value = false;

    bool operator==(const CudnnTensor &other) const
    {
        return uid == other.uid && type == other.type && dims == other.dims && strides == other.strides &&
               alignment == other.alignment && is_virtual == other.is_virtual && by_value == other.by_value;
    }
};

enum class CudnnKind { MATMUL, POINTWISE, REDUCTION };

/* inputs: A B of a product; x, b, t of a pointwise operation, as many as its mode takes; x of a reduction. */
struct CudnnOperation {
    CudnnKind kind;
    int mode; /* of the pointwise operation or the reduction */
    int64_t axis;
    std::vector<CudnnTensor> inputs;
    CudnnTensor output;
};

using CudnnGraph = std::vector<CudnnOperation>; /* in an order in which it can be computed */

/* What an operation does not take, or "". cudnn_graph.cpp */
std::string cudnn_operation_fault(const CudnnOperation &operation);
/* What makes a graph invalid, or "". */
std::string cudnn_graph_fault(const CudnnGraph &graph);
/* Why it is not the forward attention that the engine of the twin computes, or "". */
std::string cudnn_attention_fault(const CudnnGraph &graph);

size_t cudnn_element_bytes(cudnnDataType_t type);
/* Bytes from the first to behind the last element. */
size_t cudnn_extent(const CudnnTensor &tensor);

/* Computes in fp32, rounding every result to its type; `places`: memory of the tensors that are not virtual, `numbers`:
 * of those that were given by value. cudnn_compute.cpp */
void cudnn_compute(const CudnnGraph &graph, const std::map<int64_t, void *> &places,
                   const std::map<int64_t, float> &numbers);

} // namespace emu

#endif
