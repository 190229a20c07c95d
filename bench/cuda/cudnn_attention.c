/* The graph of the forward, written as cuDNN's attention engines know it: every mask and the softmax spelled out in
 * pointwise operations and reductions over the scores, which exist nowhere in memory. */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cuda/cudnn.h"
#include "cuda/cudnn_backend.h"

enum { Q = 1, K, V, O, LSE, HIDDEN, WINDOW, FIRST_VIRTUAL = 100, OPERATIONS_MOST = 20 };

typedef struct tensor {
    cudnn_descriptor descriptor;
    int64_t dims[4], strides[4];
} tensor;

struct cudnn_attention {
    cudnn_session session;
    cudnn_shape shape;
    int64_t next; /* id of the next virtual tensor */
    cudnn_descriptor operations[OPERATIONS_MOST];
    int count;
    cudnn_descriptor plan;
    int64_t workspace;
    float hidden, window; /* numbers that the graph reads from the host: the score of a hidden key, the window */
    char name[64];
};

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

typedef enum where { IN_MEMORY, VIRTUAL, ON_THE_HOST } where;

static tensor make_tensor(cudnn_attention *a, int64_t id, int type, where place, const int64_t dims[4],
                          const int64_t strides[4])
{
    cudnn_session *s = &a->session;
    const bool yes = true;
    tensor t = {.descriptor = cudnn_begin(s, CUDNN_BACKEND_TENSOR_DESCRIPTOR)};
    memcpy(t.dims, dims, sizeof t.dims);
    memcpy(t.strides, strides, sizeof t.strides);
    cudnn_set_int(s, t.descriptor, CUDNN_ATTR_TENSOR_UNIQUE_ID, id);
    cudnn_set_enum(s, t.descriptor, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type);
    cudnn_set(s, t.descriptor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims);
    cudnn_set(s, t.descriptor, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides);
    cudnn_set_int(s, t.descriptor, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 16);
    if (place == VIRTUAL) cudnn_set(s, t.descriptor, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &yes);
    if (place == ON_THE_HOST) cudnn_set(s, t.descriptor, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &yes);
    cudnn_finish(s, t.descriptor, "a tensor of the attention graph");
    return t;
}

/* A result that the next operation takes; its shape is that of `like`, one wide if it belongs to rows. */
static tensor virtual_tensor(cudnn_attention *a, const tensor *like, int64_t width, int type)
{
    const int64_t dims[4] = {like->dims[0], like->dims[1], like->dims[2], width};
    const int64_t strides[4] = {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1};
    return make_tensor(a, a->next++, type, VIRTUAL, dims, strides);
}

static tensor host_number(cudnn_attention *a, int64_t id)
{
    const int64_t ones[4] = {1, 1, 1, 1};
    return make_tensor(a, id, CUDNN_DATA_FLOAT, ON_THE_HOST, ones, ones);
}

/* ---- operations -------------------------------------------------------------------------------------------------- */

static void add_operation(cudnn_attention *a, cudnn_descriptor operation, const char *what)
{
    cudnn_finish(&a->session, operation, what);
    if (a->session.status == MTP_OK) a->operations[a->count++] = operation;
}

static void matmul(cudnn_attention *a, const tensor *x, const tensor *y, const tensor *product)
{
    cudnn_session *s = &a->session;
    cudnn_descriptor how = cudnn_begin(s, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    cudnn_set_enum(s, how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    cudnn_finish(s, how, "a product");
    cudnn_descriptor operation = cudnn_begin(s, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    cudnn_set_descriptor(s, operation, CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
    cudnn_set_descriptor(s, operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, x->descriptor);
    cudnn_set_descriptor(s, operation, CUDNN_ATTR_OPERATION_MATMUL_BDESC, y->descriptor);
    cudnn_set_descriptor(s, operation, CUDNN_ATTR_OPERATION_MATMUL_CDESC, product->descriptor);
    add_operation(a, operation, "a product");
}

static void reduce(cudnn_attention *a, int operator, const tensor * x, const tensor *result)
{
    cudnn_session *s = &a->session;
    cudnn_descriptor how = cudnn_begin(s, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    cudnn_set_enum(s, how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, operator);
    cudnn_set_enum(s, how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    cudnn_finish(s, how, "a reduction");
    cudnn_descriptor operation = cudnn_begin(s, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    cudnn_set_descriptor(s, operation, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
    cudnn_set_descriptor(s, operation, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x->descriptor);
    cudnn_set_descriptor(s, operation, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, result->descriptor);
    add_operation(a, operation, "a reduction");
}

/* result = mode(x), mode(x, b) or mode(x, b, t); `axis` is that of an index, else -1. */
static void pointwise(cudnn_attention *a, int mode, int axis, int arithmetic, const tensor *x, const tensor *b,
                      const tensor *t, const tensor *result)
{
    cudnn_session *s = &a->session;
    cudnn_descriptor how = cudnn_begin(s, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    cudnn_set_enum(s, how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
    cudnn_set_enum(s, how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, arithmetic);
    if (axis >= 0) cudnn_set_int(s, how, CUDNN_ATTR_POINTWISE_AXIS, axis);
    cudnn_finish(s, how, "a pointwise operation");
    cudnn_descriptor operation = cudnn_begin(s, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    cudnn_set_descriptor(s, operation, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
    cudnn_set_descriptor(s, operation, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x->descriptor);
    if (b) cudnn_set_descriptor(s, operation, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b->descriptor);
    if (t) cudnn_set_descriptor(s, operation, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t->descriptor);
    cudnn_set_descriptor(s, operation, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, result->descriptor);
    add_operation(a, operation, "a pointwise operation");
}

/* A pointwise operation in fp32 whose result is as wide as x. */
static tensor map(cudnn_attention *a, int mode, const tensor *x, const tensor *b)
{
    const tensor result = virtual_tensor(a, x, x->dims[3], CUDNN_DATA_FLOAT);
    pointwise(a, mode, -1, CUDNN_DATA_FLOAT, x, b, NULL, &result);
    return result;
}

/* ---- the graph --------------------------------------------------------------------------------------------------- */

/* Of every score, which position (axis 2) or key (axis 3) it belongs to. */
static tensor index_of(cudnn_attention *a, const tensor *score, int axis)
{
    const tensor index = virtual_tensor(a, score, score->dims[3], CUDNN_DATA_INT32);
    pointwise(a, CUDNN_POINTWISE_GEN_INDEX, axis, CUDNN_DATA_FLOAT, score, NULL, NULL, &index);
    return index;
}

/* Scores where `compare` says so, the others hidden. */
static tensor keep_where(cudnn_attention *a, const tensor *score, int compare, const tensor *x, const tensor *y,
                         const tensor *hidden)
{
    const tensor keep = virtual_tensor(a, score, score->dims[3], CUDNN_DATA_BOOLEAN);
    const tensor result = virtual_tensor(a, score, score->dims[3], CUDNN_DATA_FLOAT);
    pointwise(a, compare, -1, CUDNN_DATA_BOOLEAN, x, y, NULL, &keep);
    pointwise(a, CUDNN_POINTWISE_BINARY_SELECT, -1, CUDNN_DATA_FLOAT, score, hidden, &keep, &result);
    return result;
}

/* Keys up to the position; with a window, those of which key + window > position. */
static tensor mask(cudnn_attention *a, tensor score)
{
    const tensor hidden = host_number(a, HIDDEN);
    tensor position = index_of(a, &score, 2), key = index_of(a, &score, 3);
    score = keep_where(a, &score, CUDNN_POINTWISE_CMP_GE, &position, &key, &hidden);
    if (!a->shape.window) return score;
    const tensor window = host_number(a, WINDOW);
    position = index_of(a, &score, 2);
    key = index_of(a, &score, 3);
    key = map(a, CUDNN_POINTWISE_ADD, &key, &window);
    return keep_where(a, &score, CUDNN_POINTWISE_CMP_GT, &key, &position, &hidden);
}

static tensor softmax(cudnn_attention *a, const tensor *score, const tensor *lse)
{
    const tensor top = virtual_tensor(a, score, 1, CUDNN_DATA_FLOAT);
    reduce(a, CUDNN_REDUCE_TENSOR_MAX, score, &top);
    const tensor below = map(a, CUDNN_POINTWISE_SUB, score, &top);
    const tensor weight = map(a, CUDNN_POINTWISE_EXP, &below, NULL);
    const tensor sum = virtual_tensor(a, score, 1, CUDNN_DATA_FLOAT);
    reduce(a, CUDNN_REDUCE_TENSOR_ADD, &weight, &sum);
    const tensor log_sum = map(a, CUDNN_POINTWISE_LOG, &sum, NULL);
    pointwise(a, CUDNN_POINTWISE_ADD, -1, CUDNN_DATA_FLOAT, &top, &log_sum, NULL, lse);
    const tensor result = virtual_tensor(a, score, score->dims[3], CUDNN_DATA_BFLOAT16);
    pointwise(a, CUDNN_POINTWISE_DIV, -1, CUDNN_DATA_FLOAT, &weight, &sum, NULL, &result);
    return result;
}

static cudnn_descriptor make_graph(cudnn_attention *a)
{
    cudnn_session *s = &a->session;
    const cudnn_shape *n = &a->shape;
    const int64_t row = n->heads * n->width, kv_row = 2 * n->kv_heads * n->width;
    const int64_t rows[4] = {n->documents, n->heads, n->length, n->width};
    const int64_t row_strides[4] = {n->length * row, n->width, row, 1};
    const int64_t k_dims[4] = {n->documents, n->kv_heads, n->width, n->length};
    const int64_t k_strides[4] = {n->length * kv_row, n->width, 1, kv_row};
    const int64_t v_dims[4] = {n->documents, n->kv_heads, n->length, n->width};
    const int64_t v_strides[4] = {n->length * kv_row, n->width, kv_row, 1};
    const int64_t lse_dims[4] = {n->documents, n->heads, n->length, 1};
    const int64_t lse_strides[4] = {n->heads * n->length, n->length, 1, 1};
    const tensor q = make_tensor(a, Q, CUDNN_DATA_BFLOAT16, IN_MEMORY, rows, row_strides);
    const tensor k = make_tensor(a, K, CUDNN_DATA_BFLOAT16, IN_MEMORY, k_dims, k_strides);
    const tensor v = make_tensor(a, V, CUDNN_DATA_BFLOAT16, IN_MEMORY, v_dims, v_strides);
    const tensor o = make_tensor(a, O, CUDNN_DATA_BFLOAT16, IN_MEMORY, rows, row_strides);
    const tensor lse = make_tensor(a, LSE, CUDNN_DATA_FLOAT, IN_MEMORY, lse_dims, lse_strides);

    tensor score = virtual_tensor(a, &q, n->length, CUDNN_DATA_FLOAT);
    matmul(a, &q, &k, &score);
    score = mask(a, score);
    const tensor weight = softmax(a, &score, &lse);
    matmul(a, &weight, &v, &o);

    cudnn_descriptor graph = cudnn_begin(s, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    cudnn_set(s, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &s->handle);
    cudnn_set(s, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, a->count, a->operations);
    cudnn_finish(s, graph, "the attention graph");
    return graph;
}

/* ---- the plan ---------------------------------------------------------------------------------------------------- */

static void name_plan(cudnn_attention *a, cudnn_descriptor configuration)
{
    cudnn_session *s = &a->session;
    cudnn_descriptor engine = cudnn_begin(s, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    int64_t count = 0, index = -1;
    const size_t version = s->library.version();
    if (s->status == MTP_OK)
        s->library.get_attribute(configuration, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count,
                                 &engine);
    if (count == 1)
        s->library.get_attribute(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &count, &index);
    snprintf(a->name, sizeof a->name, "cuDNN %zu.%zu.%zu, engine %lld", version / 10000, version / 100 % 100,
             version % 100, (long long)index);
}

/* A plan of one configuration; false, and nothing noted, if cuDNN cannot make it. */
static bool plan_of(cudnn_attention *a, cudnn_descriptor configuration, int *why)
{
    cudnn_session *s = &a->session;
    cudnn_descriptor plan = cudnn_begin(s, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    cudnn_set(s, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &s->handle);
    cudnn_set_descriptor(s, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration);
    if (s->status != MTP_OK) return false;
    *why = s->library.finalize(plan);
    if (*why != CUDNN_STATUS_SUCCESS) return false;
    int64_t count = 0;
    *why = s->library.get_attribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count,
                                    &a->workspace);
    a->plan = *why == CUDNN_STATUS_SUCCESS && count == 1 ? plan : NULL;
    return a->plan != NULL;
}

enum { CONFIGURATIONS_MOST = 8 };

/* The first of the proposed configurations that can be planned. */
static bool plan_by(cudnn_attention *a, cudnn_descriptor graph, int mode, int *why)
{
    cudnn_session *s = &a->session;
    cudnn_descriptor heuristics = cudnn_begin(s, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    cudnn_descriptor configurations[CONFIGURATIONS_MOST];
    int64_t count = 0;
    cudnn_set_descriptor(s, heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    cudnn_set_enum(s, heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
    for (int i = 0; i < CONFIGURATIONS_MOST; i++)
        configurations[i] = cudnn_begin(s, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (s->status != MTP_OK) return false;
    *why = s->library.finalize(heuristics);
    if (*why == CUDNN_STATUS_SUCCESS)
        *why = s->library.get_attribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                        CONFIGURATIONS_MOST, &count, configurations);
    if (*why != CUDNN_STATUS_SUCCESS) return false;
    for (int64_t i = 0; i < count && i < CONFIGURATIONS_MOST; i++) {
        if (!plan_of(a, configurations[i], why)) continue;
        name_plan(a, configurations[i]);
        return true;
    }
    return false;
}

static mtp_status make_plan(cudnn_attention *a, cudnn_descriptor graph)
{
    int why = CUDNN_STATUS_NOT_SUPPORTED;
    if (a->session.status == MTP_OK && !plan_by(a, graph, CUDNN_HEUR_MODE_A, &why) &&
        !plan_by(a, graph, CUDNN_HEUR_MODE_FALLBACK, &why) && a->session.status == MTP_OK)
        a->session.status = cudnn_failed(&a->session, why == CUDNN_STATUS_SUCCESS ? CUDNN_STATUS_NOT_SUPPORTED : why,
                                         "a plan for the attention graph");
    return a->session.status;
}

/* ---- what the benchmark calls ------------------------------------------------------------------------------------ */

mtp_status cudnn_attention_create(const cudnn_shape *shape, void *stream, cudnn_attention **attention)
{
    *attention = NULL;
    cudnn_attention *a = calloc(1, sizeof *a);
    if (!a) return MTP_FAIL(MTP_E_MEMORY, "out of memory for cuDNN's attention");
    a->shape = *shape;
    a->next = FIRST_VIRTUAL;
    a->hidden = -INFINITY;
    a->window = (float)shape->window;
    mtp_status status = cudnn_session_open(&a->session, stream);
    if (status == MTP_OK) status = make_plan(a, make_graph(a));
    if (status == MTP_OK)
        *attention = a;
    else
        cudnn_attention_free(a);
    return status;
}

const char *cudnn_attention_name(const cudnn_attention *a)
{
    return a->name;
}

size_t cudnn_attention_workspace(const cudnn_attention *a)
{
    return (size_t)a->workspace;
}

mtp_status cudnn_attention_run(cudnn_attention *a, const cudnn_tensors *t)
{
    cudnn_session *s = &a->session;
    const size_t v = (size_t)(a->shape.kv_heads * a->shape.width) * 2; /* bytes from a token's K to its V */
    const int64_t ids[] = {Q, K, V, O, LSE, HIDDEN, WINDOW};
    const void *places[] = {t->q, t->kv, (const char *)t->kv + v, t->o, t->lse, &a->hidden, &a->window};
    const int count = s->count, used = a->shape.window ? 7 : 6;
    cudnn_descriptor pack = cudnn_begin(s, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    cudnn_set(s, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, used, ids);
    cudnn_set(s, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, used, places);
    cudnn_set(s, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &t->workspace);
    cudnn_finish(s, pack, "the tensors of a call");
    if (s->status != MTP_OK) return s->status;
    const int status = s->library.execute(s->handle, a->plan, pack);
    while (s->count > count) s->library.destroy_descriptor(s->made[--s->count]);
    return status == CUDNN_STATUS_SUCCESS ? MTP_OK : cudnn_failed(s, status, "running the attention graph");
}

void cudnn_attention_free(cudnn_attention *a)
{
    if (!a) return;
    if (a->session.library.destroy) cudnn_session_close(&a->session);
    free(a);
}
