/* The part of cuDNN's backend interface that forward attention is built with: descriptors with the checks that the
 * documentation states, one engine that takes attention only, plans, execution on a stream. A descriptor that is
 * destroyed or of another kind ends the process where cuDNN would read freed memory. */
#include "emu/cudnn.h"
#include "emu/block.h"
#include "emu/device_memory.h"
#include "emu/fault.h"
#include "emu/stream.h"

#include <cstring>
#include <set>

using namespace emu;

struct cudnnContext {
    cudaStream_t stream;
};

namespace
{

constexpr int64_t WORKSPACE = 256;

struct Descriptor;
using Shared = std::shared_ptr<Descriptor>;

struct Attribute {
    int64_t count;
    std::vector<char> bytes;
    std::vector<Shared> descriptors; /* of an attribute that holds some */
};

struct Descriptor {
    cudnnBackendDescriptorType_t type;
    bool finalized = false;
    std::map<cudnnBackendAttributeName_t, Attribute> attributes;
    CudnnTensor tensor;       /* of a finalized tensor */
    CudnnOperation operation; /* of a finalized operation */
    CudnnGraph graph;         /* of a finalized graph, of its heuristics, engine configurations and plans */
    cudnnHandle_t handle = nullptr;
};

std::map<void *, Shared> &live()
{
    static auto *map = new std::map<void *, Shared>;
    return *map;
}

std::set<cudnnHandle_t> &handles()
{
    static auto *set = new std::set<cudnnHandle_t>;
    return *set;
}

thread_local std::string last_error;

cudnnStatus_t refuse(cudnnStatus_t status, const std::string &why)
{
    last_error = why;
    return status;
}

Shared find(void *descriptor)
{
    const auto found = live().find(descriptor);
    if (found == live().end()) host_fault("cuDNN: %p is no descriptor, or it was destroyed", descriptor);
    return found->second;
}

/* ---- which attributes there are ---------------------------------------------------------------------------------- */

struct Rule {
    cudnnBackendDescriptorType_t descriptor;
    cudnnBackendAttributeName_t name;
    cudnnBackendAttributeType_t type;
    int64_t most; /* elements */
    bool needed;
    cudnnBackendDescriptorType_t holds = CUDNN_BACKEND_TENSOR_DESCRIPTOR; /* where the type is a descriptor's */
};

const cudnnBackendDescriptorType_t ANY_OPERATION = CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR;

const Rule RULES[] = {
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, true},
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, true},
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, CUDNN_DIM_MAX, true},
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, CUDNN_DIM_MAX, true},
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, true},
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, false},
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, false},
    {CUDNN_BACKEND_MATMUL_DESCRIPTOR, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, true},
    {CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, CUDNN_ATTR_OPERATION_MATMUL_DESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
     true, CUDNN_BACKEND_MATMUL_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, CUDNN_ATTR_OPERATION_MATMUL_ADESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
     true},
    {CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, CUDNN_ATTR_OPERATION_MATMUL_BDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
     true},
    {CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, CUDNN_ATTR_OPERATION_MATMUL_CDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
     true},
    {CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, true},
    {CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, true},
    {CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, false},
    {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR,
     CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, true, CUDNN_BACKEND_POINTWISE_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR,
     1, true},
    {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR,
     1, false},
    {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR,
     1, false},
    {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR,
     1, true},
    {CUDNN_BACKEND_REDUCTION_DESCRIPTOR, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, true},
    {CUDNN_BACKEND_REDUCTION_DESCRIPTOR, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, true},
    {CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, CUDNN_ATTR_OPERATION_REDUCTION_DESC, CUDNN_TYPE_BACKEND_DESCRIPTOR,
     1, true, CUDNN_BACKEND_REDUCTION_DESCRIPTOR},
    {CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR,
     1, true},
    {CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR,
     1, true},
    {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, true},
    {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 64, true,
     ANY_OPERATION},
    {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, true,
     CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR},
    {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, true},
    {CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, true},
    {CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
     true, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR},
    {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, 64, true},
    {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, 64, true},
    {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, false},
};

const Rule *rule_of(cudnnBackendDescriptorType_t descriptor, cudnnBackendAttributeName_t name)
{
    for (const Rule &rule : RULES)
        if (rule.descriptor == descriptor && rule.name == name) return &rule;
    return nullptr;
}

bool is_operation(cudnnBackendDescriptorType_t type)
{
    return type == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR || type == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR ||
           type == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR;
}

bool is_known(cudnnBackendDescriptorType_t type)
{
    if (type == CUDNN_BACKEND_ENGINE_DESCRIPTOR || type == CUDNN_BACKEND_ENGINECFG_DESCRIPTOR) return true;
    for (const Rule &rule : RULES)
        if (rule.descriptor == type) return true;
    return false;
}

size_t bytes_of(cudnnBackendAttributeType_t type)
{
    switch (type) {
    case CUDNN_TYPE_BOOLEAN:
        return sizeof(bool);
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
        return 8;
    default: /* enumerations */
        return 4;
    }
}

template <class T>
std::vector<T> values(const Descriptor &d, cudnnBackendAttributeName_t name)
{
    const auto found = d.attributes.find(name);
    if (found == d.attributes.end()) return {};
    std::vector<T> out(static_cast<size_t>(found->second.count));
    memcpy(out.data(), found->second.bytes.data(), found->second.bytes.size());
    return out;
}

template <class T>
T value(const Descriptor &d, cudnnBackendAttributeName_t name, T otherwise)
{
    T out = otherwise;
    const auto found = d.attributes.find(name);
    if (found != d.attributes.end()) memcpy(&out, found->second.bytes.data(), sizeof out);
    return out;
}

const Descriptor &held(const Descriptor &d, cudnnBackendAttributeName_t name)
{
    return *d.attributes.at(name).descriptors[0];
}

/* ---- finalizing -------------------------------------------------------------------------------------------------- */

std::string finish_tensor(Descriptor &d)
{
    CudnnTensor &t = d.tensor;
    t.uid = value<int64_t>(d, CUDNN_ATTR_TENSOR_UNIQUE_ID, 0);
    t.type = value(d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_DATA_FLOAT);
    t.dims = values<int64_t>(d, CUDNN_ATTR_TENSOR_DIMENSIONS);
    t.strides = values<int64_t>(d, CUDNN_ATTR_TENSOR_STRIDES);
    t.alignment = value<int64_t>(d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 0);
    t.is_virtual = value(d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, false);
    t.by_value = value(d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, false);
    const int64_t element = static_cast<int64_t>(cudnn_element_bytes(t.type));
    if (element == 0) return "a tensor of a type that the emulator does not have";
    if (t.dims.size() != t.strides.size()) return "a tensor with as many dimensions as strides is wanted";
    int64_t count = 1;
    for (size_t axis = 0; axis < t.dims.size(); axis++) {
        if (t.dims[axis] < 1 || t.strides[axis] < 1) return "dimensions and strides are 1 at least";
        count *= t.dims[axis];
    }
    if (t.alignment < element || (t.alignment & (t.alignment - 1)) != 0)
        return "the alignment is a power of two, and not below an element";
    if (t.by_value && (t.is_virtual || count > 1)) return "a tensor by value has one element, and is not virtual";
    return "";
}

std::string finish_operation(Descriptor &d)
{
    CudnnOperation &o = d.operation;
    o = {};
    o.axis = -1;
    if (d.type == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) {
        o.kind = CudnnKind::MATMUL;
        o.inputs = {held(d, CUDNN_ATTR_OPERATION_MATMUL_ADESC).tensor,
                    held(d, CUDNN_ATTR_OPERATION_MATMUL_BDESC).tensor};
        o.output = held(d, CUDNN_ATTR_OPERATION_MATMUL_CDESC).tensor;
    } else if (d.type == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR) {
        o.kind = CudnnKind::REDUCTION;
        o.mode = value(held(d, CUDNN_ATTR_OPERATION_REDUCTION_DESC), CUDNN_ATTR_REDUCTION_OPERATOR, 0);
        o.inputs = {held(d, CUDNN_ATTR_OPERATION_REDUCTION_XDESC).tensor};
        o.output = held(d, CUDNN_ATTR_OPERATION_REDUCTION_YDESC).tensor;
    } else {
        const Descriptor &how = held(d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
        o.kind = CudnnKind::POINTWISE;
        o.mode = value(how, CUDNN_ATTR_POINTWISE_MODE, 0);
        o.axis = value<int64_t>(how, CUDNN_ATTR_POINTWISE_AXIS, -1);
        for (const auto name : {CUDNN_ATTR_OPERATION_POINTWISE_XDESC, CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
                                CUDNN_ATTR_OPERATION_POINTWISE_TDESC})
            if (d.attributes.count(name)) o.inputs.push_back(held(d, name).tensor);
        o.output = held(d, CUDNN_ATTR_OPERATION_POINTWISE_YDESC).tensor;
    }
    return cudnn_operation_fault(o);
}

std::string finish_graph(Descriptor &d)
{
    d.graph.clear();
    for (const Shared &operation : d.attributes.at(CUDNN_ATTR_OPERATIONGRAPH_OPS).descriptors)
        d.graph.push_back(operation->operation);
    d.handle = value<cudnnHandle_t>(d, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, nullptr);
    if (!handles().count(d.handle)) return "the handle of a graph is none";
    return cudnn_graph_fault(d.graph);
}

cudnnStatus_t finish_plan(Descriptor &d)
{
    const Descriptor &configuration = held(d, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    d.handle = value<cudnnHandle_t>(d, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, nullptr);
    d.graph = configuration.graph;
    if (d.handle != configuration.handle) return refuse(CUDNN_STATUS_BAD_PARAM, "a plan with another handle's graph");
    return CUDNN_STATUS_SUCCESS;
}

std::string finish_pack(const Descriptor &d)
{
    const auto ids = values<int64_t>(d, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const auto places = values<void *>(d, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    if (ids.size() != places.size()) return "as many ids as pointers are wanted";
    if (std::set<int64_t>(ids.begin(), ids.end()).size() != ids.size()) return "an id twice";
    return "";
}

cudnnStatus_t finish(Descriptor &d)
{
    std::string why;
    if (d.type == CUDNN_BACKEND_TENSOR_DESCRIPTOR)
        why = finish_tensor(d);
    else if (is_operation(d.type))
        why = finish_operation(d);
    else if (d.type == CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)
        why = finish_graph(d);
    else if (d.type == CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)
        why = finish_pack(d);
    else if (d.type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)
        return finish_plan(d);
    else if (d.type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR) {
        const Descriptor &graph = held(d, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
        d.graph = graph.graph;
        d.handle = graph.handle;
    } else if (d.type == CUDNN_BACKEND_ENGINE_DESCRIPTOR || d.type == CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)
        return refuse(CUDNN_STATUS_NOT_SUPPORTED, "engines come from heuristics here");
    return why.empty() ? CUDNN_STATUS_SUCCESS : refuse(CUDNN_STATUS_BAD_PARAM, why);
}

/* ---- execution --------------------------------------------------------------------------------------------------- */

void must_be_device(const CudnnTensor &tensor, const void *place)
{
    const size_t bytes = cudnn_extent(tensor);
    if (is_device(place, bytes)) return;
    char where[160];
    if (device_address(place))
        device_describe(place, where, sizeof where);
    else
        snprintf(where, sizeof where, "an address of host memory");
    host_fault("cudnnBackendExecute: tensor %lld, %zu bytes at %s, is not within live device memory",
               static_cast<long long>(tensor.uid), bytes, where);
}

cudnnStatus_t place_tensor(const CudnnTensor &tensor, const std::map<int64_t, void *> &given,
                           std::map<int64_t, float> *numbers)
{
    if (tensor.is_virtual) return CUDNN_STATUS_SUCCESS;
    const auto found = given.find(tensor.uid);
    if (found == given.end() || !found->second)
        return refuse(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no pointer for tensor " + std::to_string(tensor.uid));
    if (tensor.by_value) {
        if (device_address(found->second))
            host_fault("cudnnBackendExecute: tensor %lld is by value, its pointer is of device memory",
                       static_cast<long long>(tensor.uid));
        memcpy(&(*numbers)[tensor.uid], found->second, sizeof(float));
        return CUDNN_STATUS_SUCCESS;
    }
    if (reinterpret_cast<uintptr_t>(found->second) % static_cast<uintptr_t>(tensor.alignment) != 0)
        return refuse(CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER, "tensor " + std::to_string(tensor.uid));
    must_be_device(tensor, found->second);
    return CUDNN_STATUS_SUCCESS;
}

} // namespace

extern "C" {

size_t cudnnGetVersion(void)
{
    return CUDNN_VERSION;
}

const char *cudnnGetErrorString(cudnnStatus_t status)
{
    switch (status) {
    case CUDNN_STATUS_SUCCESS:
        return "CUDNN_STATUS_SUCCESS";
    case CUDNN_STATUS_BAD_PARAM:
        return "CUDNN_STATUS_BAD_PARAM";
    case CUDNN_STATUS_NOT_SUPPORTED:
        return "CUDNN_STATUS_NOT_SUPPORTED";
    case CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN:
        return "CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN";
    default:
        return "another status of cuDNN";
    }
}

void cudnnGetLastErrorString(char *message, size_t bytes)
{
    if (!message || bytes == 0) return;
    snprintf(message, bytes, "%s", last_error.c_str());
    last_error.clear();
}

cudnnStatus_t cudnnCreate(cudnnHandle_t *handle)
{
    const Lock lock(api_mutex());
    if (!handle) return refuse(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no place for the handle");
    *handle = new cudnnContext{nullptr};
    handles().insert(*handle);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t handle)
{
    const Lock lock(api_mutex());
    if (!handles().erase(handle)) host_fault("cudnnDestroy: %p is no handle", static_cast<void *>(handle));
    delete handle;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream)
{
    const Lock lock(api_mutex());
    if (!handles().count(handle)) return refuse(CUDNN_STATUS_BAD_PARAM, "no handle");
    handle->stream = stream;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *descriptor)
{
    const Lock lock(api_mutex());
    if (!descriptor) return refuse(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no place for the descriptor");
    if (!is_known(type)) return refuse(CUDNN_STATUS_NOT_SUPPORTED, "a descriptor that the emulator does not have");
    auto made = std::make_shared<Descriptor>();
    made->type = type;
    *descriptor = made.get();
    live()[*descriptor] = made;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor)
{
    const Lock lock(api_mutex());
    find(descriptor);
    live().erase(descriptor);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void *elements)
{
    const Lock lock(api_mutex());
    const Shared d = find(descriptor);
    if (d->finalized) return refuse(CUDNN_STATUS_BAD_PARAM, "the descriptor is finalized");
    const Rule *rule = rule_of(d->type, name);
    if (!rule) return refuse(CUDNN_STATUS_BAD_PARAM, "an attribute that the descriptor does not have");
    if (type != rule->type) return refuse(CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE, "an attribute of another type");
    if (count < 1 || count > rule->most) return refuse(CUDNN_STATUS_BAD_PARAM, "too few or too many elements");
    if (!elements) return refuse(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no elements");
    const char *bytes = static_cast<const char *>(elements);
    Attribute attribute = {count, {bytes, bytes + static_cast<size_t>(count) * bytes_of(type)}, {}};
    for (int64_t i = 0; type == CUDNN_TYPE_BACKEND_DESCRIPTOR && i < count; i++) {
        void *one;
        memcpy(&one, bytes + i * 8, sizeof one);
        const Shared other = find(one);
        if (rule->holds == ANY_OPERATION ? !is_operation(other->type) : other->type != rule->holds)
            return refuse(CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE, "an attribute that holds another kind of descriptor");
        if (!other->finalized)
            return refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "a descriptor that is not finalized");
        attribute.descriptors.push_back(other);
    }
    d->attributes[name] = attribute;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor)
{
    const Lock lock(api_mutex());
    const Shared d = find(descriptor);
    if (d->finalized) return refuse(CUDNN_STATUS_BAD_PARAM, "the descriptor is finalized");
    for (const Rule &rule : RULES)
        if (rule.descriptor == d->type && rule.needed && !d->attributes.count(rule.name))
            return refuse(CUDNN_STATUS_BAD_PARAM, "attribute " + std::to_string(rule.name) + " is not set");
    const cudnnStatus_t status = finish(*d);
    d->finalized = status == CUDNN_STATUS_SUCCESS;
    return status;
}

/* One configuration of the engine, if it takes the graph. */
static cudnnStatus_t results(const Descriptor &heuristics, int64_t wanted, int64_t *count, void *elements)
{
    *count = 0;
    const std::string why = cudnn_attention_fault(heuristics.graph);
    if (!why.empty()) return refuse(CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN, why);
    *count = 1;
    if (wanted == 0) return CUDNN_STATUS_SUCCESS;
    void *one;
    memcpy(&one, elements, sizeof one);
    const Shared configuration = find(one);
    if (configuration->type != CUDNN_BACKEND_ENGINECFG_DESCRIPTOR || configuration->finalized)
        return refuse(CUDNN_STATUS_BAD_PARAM, "results need new engine configurations to go to");
    configuration->graph = heuristics.graph;
    configuration->handle = heuristics.handle;
    configuration->finalized = true;
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t give(cudnnBackendAttributeType_t type, cudnnBackendAttributeType_t wanted, int64_t what,
                          int64_t *count, void *elements)
{
    if (type != wanted) return refuse(CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE, "an attribute of another type");
    memcpy(elements, &what, sizeof what);
    *count = 1;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t wanted, int64_t *count, void *elements)
{
    const Lock lock(api_mutex());
    const Shared d = find(descriptor);
    if (!count || (wanted > 0 && !elements))
        return refuse(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no place for elements");
    if (!d->finalized) return refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "a descriptor that is not finalized");
    if (d->type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR && name == CUDNN_ATTR_ENGINEHEUR_RESULTS &&
        type == CUDNN_TYPE_BACKEND_DESCRIPTOR)
        return results(*d, wanted, count, elements);
    if (wanted < 1) return refuse(CUDNN_STATUS_BAD_PARAM, "no element is asked for");
    if (d->type == CUDNN_BACKEND_ENGINECFG_DESCRIPTOR && name == CUDNN_ATTR_ENGINECFG_ENGINE &&
        type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
        void *engine;
        memcpy(&engine, elements, sizeof engine);
        find(engine)->finalized = true;
        *count = 1;
        return CUDNN_STATUS_SUCCESS;
    }
    if (d->type == CUDNN_BACKEND_ENGINE_DESCRIPTOR && name == CUDNN_ATTR_ENGINE_GLOBAL_INDEX)
        return give(type, CUDNN_TYPE_INT64, 0, count, elements);
    if (d->type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR && name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)
        return give(type, CUDNN_TYPE_INT64, WORKSPACE, count, elements);
    return refuse(CUDNN_STATUS_BAD_PARAM, "an attribute that the descriptor does not give");
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack)
{
    const Lock lock(api_mutex());
    if (!handles().count(handle)) return refuse(CUDNN_STATUS_BAD_PARAM, "no handle");
    const Shared p = find(plan), v = find(pack);
    if (p->type != CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR || v->type != CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)
        return refuse(CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE, "a plan and a variant pack are wanted");
    if (!p->finalized || !v->finalized)
        return refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "a descriptor that is not finalized");
    const auto ids = values<int64_t>(*v, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const auto pointers = values<void *>(*v, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    std::map<int64_t, void *> places;
    std::map<int64_t, float> numbers;
    for (size_t i = 0; i < ids.size(); i++) places[ids[i]] = pointers[i];
    for (const CudnnOperation &o : p->graph) {
        for (const CudnnTensor &input : o.inputs)
            if (const cudnnStatus_t status = place_tensor(input, places, &numbers)) return status;
        if (const cudnnStatus_t status = place_tensor(o.output, places, &numbers)) return status;
    }
    void *const workspace = value<void *>(*v, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, nullptr);
    if (!workspace) return refuse(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "no workspace");
    if (!is_device(workspace, static_cast<size_t>(WORKSPACE)))
        host_fault("cudnnBackendExecute: the workspace, %lld bytes at %p, is not within live device memory",
                   static_cast<long long>(WORKSPACE), workspace);
    const CudnnGraph graph = p->graph;
    const cudaError_t queued = enqueue(handle->stream, WorkKind::LIBRARY, "cudnnBackendExecute", [=] {
        memset(workspace, 0xff, static_cast<size_t>(WORKSPACE));
        cudnn_compute(graph, places, numbers);
    });
    return queued == cudaSuccess ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_EXECUTION_FAILED;
}

} // extern "C"
