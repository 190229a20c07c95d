/* cuDNN's forward attention, for a comparison. The library is opened at run time (libcudnn.so.9, or what
 * MTP_CUDNN_LIBRARY names) and called through its backend interface; the graph and its plan are made once.
 *
 *   o = softmax(q k^T) v over the keys that the position sees, scale 1, lse = log sum exp of the scores
 *
 * of documents of one length: all keys up to the position itself, or the last `window` of them. */
#ifndef MTP_BENCH_CUDNN_H
#define MTP_BENCH_CUDNN_H

#include <stddef.h>
#include <stdint.h>

#include "mtp/status.h"

typedef struct cudnn_attention cudnn_attention;

typedef struct cudnn_shape {
    int64_t documents, length; /* length: positions of one */
    int64_t heads, kv_heads, width;
    int64_t window; /* 0: none */
} cudnn_shape;

/* Device memory. Without gaps, as the benchmark lays it out; 16-byte aligned. */
typedef struct cudnn_tensors {
    const void *q;  /* BF16 [documents * length, heads, width] */
    const void *kv; /* BF16 [documents * length, 2, kv_heads, width] */
    void *o;        /* BF16 [documents * length, heads, width] */
    void *lse;      /* F32 [documents, heads, length] */
    void *workspace;
} cudnn_tensors;

/* `stream`: what it runs on, a cudaStream_t. MTP_E_UNSUPPORTED where there is no cuDNN 9, or where cuDNN does not take
 * the shape: its reason is the message. The current device must be the stream's. */
mtp_status cudnn_attention_create(const cudnn_shape *shape, void *stream, cudnn_attention **attention);
/* "cuDNN 9.19.0, engine 4" */
const char *cudnn_attention_name(const cudnn_attention *attention);
size_t cudnn_attention_workspace(const cudnn_attention *attention);
/* Queues one forward on the stream. */
mtp_status cudnn_attention_run(cudnn_attention *attention, const cudnn_tensors *tensors);
void cudnn_attention_free(cudnn_attention *attention);

#endif
