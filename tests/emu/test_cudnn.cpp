/* Protects: what the twin of cuDNN refuses, as its documentation says. That a whole attention graph computes attention
 * is what the benchmark checks (tests bench_attention_*_cuda). */
#include "emu/testing.h"

#include <cudnn_graph.h>

namespace
{

using Handle = cudnnBackendDescriptor_t;

#define assert_cudnn(call) assert_int_equal((call), CUDNN_STATUS_SUCCESS)

/* A descriptor that is destroyed with its scope. */
class Made
{
  public:
    explicit Made(cudnnBackendDescriptorType_t type)
    {
        assert_cudnn(cudnnBackendCreateDescriptor(type, &handle_));
    }
    ~Made()
    {
        cudnnBackendDestroyDescriptor(handle_);
    }
    Made(const Made &) = delete;
    Made &operator=(const Made &) = delete;

    Handle get() const
    {
        return handle_;
    }
    template <class T>
    cudnnStatus_t set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const std::vector<T> &values)
    {
        return cudnnBackendSetAttribute(handle_, name, type, static_cast<int64_t>(values.size()), values.data());
    }
    cudnnStatus_t hold(cudnnBackendAttributeName_t name, const Made &other)
    {
        return set<Handle>(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, {other.get()});
    }
    cudnnStatus_t finish()
    {
        return cudnnBackendFinalize(handle_);
    }

  private:
    Handle handle_ = nullptr;
};

struct Tensor : Made {
    Tensor(int64_t uid, cudnnDataType_t type, const std::vector<int64_t> &dims, bool is_virtual = false)
        : Made(CUDNN_BACKEND_TENSOR_DESCRIPTOR)
    {
        std::vector<int64_t> strides(dims.size(), 1);
        for (size_t axis = dims.size() - 1; axis > 0; axis--) strides[axis - 1] = strides[axis] * dims[axis];
        assert_cudnn(set<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, {uid}));
        assert_cudnn(set<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, {type}));
        assert_cudnn(set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, dims));
        assert_cudnn(set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides));
        assert_cudnn(set<int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, {16}));
        const bool yes = true;
        if (is_virtual)
            assert_cudnn(cudnnBackendSetAttribute(get(), CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &yes));
    }
};

/* c = exp(a), where a and c may also be the same id. */
struct Exponential : Made {
    Made how{CUDNN_BACKEND_POINTWISE_DESCRIPTOR};

    Exponential(const Made &a, const Made &c) : Made(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)
    {
        assert_cudnn(
            how.set<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, {CUDNN_POINTWISE_EXP}));
        assert_cudnn(
            how.set<cudnnDataType_t>(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, {CUDNN_DATA_FLOAT}));
        assert_cudnn(how.finish());
        assert_cudnn(hold(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how));
        assert_cudnn(hold(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, a));
        assert_cudnn(hold(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, c));
    }
};

void attributes(void **)
{
    Made empty(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    Handle none = nullptr;
    assert_int_equal(cudnnBackendCreateDescriptor(CUDNN_BACKEND_RNG_DESCRIPTOR, &none), CUDNN_STATUS_NOT_SUPPORTED);
    assert_int_equal(empty.finish(), CUDNN_STATUS_BAD_PARAM);
    assert_int_equal(empty.set<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_DATA_TYPE, {1}),
                     CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE);
    assert_int_equal(empty.set<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, {1, 2}), CUDNN_STATUS_BAD_PARAM);
    assert_int_equal(empty.set<int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, {1}), CUDNN_STATUS_BAD_PARAM);
    Tensor tensor(1, CUDNN_DATA_FLOAT, {1, 2, 4, 8});
    assert_cudnn(tensor.finish());
    assert_int_equal(tensor.finish(), CUDNN_STATUS_BAD_PARAM);
    assert_int_equal(tensor.set<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, {1}), CUDNN_STATUS_BAD_PARAM);
}

void tensors(void **)
{
    Tensor strides(1, CUDNN_DATA_FLOAT, {1, 2, 4, 8}), empty(1, CUDNN_DATA_FLOAT, {1, 2, 0, 8});
    Tensor alignment(1, CUDNN_DATA_FLOAT, {1, 2, 4, 8}), type(1, CUDNN_DATA_DOUBLE, {1, 2, 4, 8});
    Tensor number(1, CUDNN_DATA_FLOAT, {1, 1, 1, 2});
    const bool yes = true;
    assert_cudnn(strides.set<int64_t>(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, {8, 8, 1}));
    assert_cudnn(alignment.set<int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, {24}));
    assert_cudnn(cudnnBackendSetAttribute(number.get(), CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &yes));
    for (Tensor *tensor : {&strides, &empty, &alignment, &type, &number})
        assert_int_equal(tensor->finish(), CUDNN_STATUS_BAD_PARAM);
}

void operations(void **)
{
    Tensor a(1, CUDNN_DATA_FLOAT, {1, 2, 4, 8}), other(2, CUDNN_DATA_FLOAT, {1, 2, 4, 9});
    Made product(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR), how(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    assert_int_equal(product.hold(CUDNN_ATTR_OPERATION_MATMUL_ADESC, a), CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED);
    assert_cudnn(a.finish());
    assert_cudnn(other.finish());
    assert_cudnn(how.set<cudnnDataType_t>(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, {CUDNN_DATA_FLOAT}));
    assert_cudnn(how.finish());
    assert_int_equal(product.hold(CUDNN_ATTR_OPERATION_MATMUL_ADESC, how), CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE);
    assert_cudnn(product.hold(CUDNN_ATTR_OPERATION_MATMUL_DESC, how));
    assert_cudnn(product.hold(CUDNN_ATTR_OPERATION_MATMUL_ADESC, a));
    assert_cudnn(product.hold(CUDNN_ATTR_OPERATION_MATMUL_BDESC, other));
    assert_int_equal(product.finish(), CUDNN_STATUS_BAD_PARAM); /* no result */
    assert_cudnn(product.hold(CUDNN_ATTR_OPERATION_MATMUL_CDESC, a));
    assert_int_equal(product.finish(), CUDNN_STATUS_BAD_PARAM); /* 8 columns, 4 rows */
    Exponential exponential(a, other);
    assert_int_equal(exponential.finish(), CUDNN_STATUS_BAD_PARAM); /* 8 columns into 9 */
}

/* Finalizes a graph of the two; the last error says why not. */
cudnnStatus_t graph_of(cudnnHandle_t handle, Exponential &first, Exponential &second)
{
    Made graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    assert_cudnn(first.finish());
    assert_cudnn(second.finish());
    assert_cudnn(graph.set<cudnnHandle_t>(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, {handle}));
    assert_cudnn(
        graph.set<Handle>(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, {first.get(), second.get()}));
    return graph.finish();
}

void graphs(void **)
{
    cudnnHandle_t handle;
    char why[128];
    assert_cudnn(cudnnCreate(&handle));
    Tensor a(1, CUDNN_DATA_FLOAT, {1, 2, 4, 8}), between(2, CUDNN_DATA_FLOAT, {1, 2, 4, 8}, true);
    Tensor c(3, CUDNN_DATA_FLOAT, {1, 2, 4, 8}), again(1, CUDNN_DATA_FLOAT, {1, 2, 8, 4});
    Tensor again_result(4, CUDNN_DATA_FLOAT, {1, 2, 8, 4});
    for (Tensor *tensor : {&a, &between, &c, &again, &again_result}) assert_cudnn(tensor->finish());
    {
        Exponential first(a, between), second(between, c);
        assert_cudnn(graph_of(handle, first, second));
    }
    {
        Exponential first(between, c), second(a, between);
        assert_int_equal(graph_of(handle, first, second), CUDNN_STATUS_BAD_PARAM);
        cudnnGetLastErrorString(why, sizeof why);
        assert_string_equal(why, "virtual tensor 2 is read before an operation makes it");
    }
    {
        Exponential first(a, c), second(again, again_result);
        assert_int_equal(graph_of(handle, first, second), CUDNN_STATUS_BAD_PARAM);
        cudnnGetLastErrorString(why, sizeof why);
        assert_string_equal(why, "two tensors with id 1");
    }
    {
        Exponential first(a, c), second(a, c);
        assert_int_equal(graph_of(handle, first, second), CUDNN_STATUS_BAD_PARAM);
    }
    assert_cudnn(cudnnDestroy(handle));
}

void packs(void **)
{
    Made twice(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR), fewer(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    int here;
    for (Made *pack : {&twice, &fewer})
        assert_cudnn(pack->set<void *>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, {&here, &here}));
    assert_cudnn(twice.set<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, {1, 1}));
    assert_cudnn(fewer.set<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, {1}));
    assert_int_equal(twice.finish(), CUDNN_STATUS_BAD_PARAM);
    assert_int_equal(fewer.finish(), CUDNN_STATUS_BAD_PARAM);
}

} // namespace

int main()
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attributes), cmocka_unit_test(tensors), cmocka_unit_test(operations),
        cmocka_unit_test(graphs),     cmocka_unit_test(packs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
