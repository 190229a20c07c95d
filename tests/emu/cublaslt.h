/* Inside the twin of cuBLASLt: what its handles point at. */
#ifndef MTP_EMU_CUBLASLT_H
#define MTP_EMU_CUBLASLT_H

#include <cublasLt.h>

namespace emu
{

struct Layout {
    cudaDataType type;
    uint64_t rows, cols;
    int64_t ld;
    cublasLtOrder_t order;
    int32_t batch;
    int64_t stride;
};

struct Operation {
    cublasComputeType_t compute;
    cudaDataType scale;
    cublasOperation_t a, b;
    cublasLtPointerMode_t pointers;
    cublasLtEpilogue_t epilogue;
};

struct Preference {
    uint64_t workspace;
    uint32_t reductions;
    uint32_t alignment[4]; /* of A, B, C, D */
};

/* What an algorithm was chosen for; it stands in cublasLtMatmulAlgo_t. */
struct Algorithm {
    uint32_t magic;
    uint32_t problem; /* of types, operations and sizes */
    uint32_t alignment[4];
    uint64_t workspace;
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t), "it stands in there");

struct Product {
    Operation operation;
    Layout a, b, c, d;
    const void *a_data, *b_data, *c_data;
    void *d_data;
};

size_t element_bytes(cudaDataType type); /* 0: not known here */
uint64_t layout_bytes(const Layout &layout);
void multiply(const Product &product, float alpha, float beta); /* cublaslt_multiply.cpp */

} // namespace emu

#endif
