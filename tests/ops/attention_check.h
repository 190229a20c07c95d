/* What the tests of attention share: a random problem of packed documents, and the op's arguments for it. */
#ifndef MTP_TESTS_ATTENTION_CHECK_H
#define MTP_TESTS_ATTENTION_CHECK_H

#include "ops_check.h"

typedef struct attention_document {
    int64_t tokens, rows; /* the last `rows` tokens are positions of the batch */
} attention_document;

typedef struct attention_shape {
    int64_t NH, NKV, D, window; /* window 0: all tokens up to the position */
    mtp_dtype dtype;            /* of K/V */
    int num_documents;
    attention_document documents[4];
} attention_shape;

/* Elements between the rows. */
typedef struct attention_gaps {
    int64_t q, kv, o, lse, dout, dq;
} attention_gaps;

typedef struct attention_problem {
    attention_shape s;
    mtp_dtype stored; /* of q, o and their gradients */
    int64_t R, S;
    ops_tensor q, kv, o, lse, dout, dq;
    int32_t *key_begin, *key_end, *doc_begin;
} attention_problem;

static inline attention_problem attention_make_stored(test_rng *rng, attention_shape s, attention_gaps gap,
                                                      float q_scale, mtp_dtype stored)
{
    attention_problem p = {.s = s, .stored = stored};
    for (int i = 0; i < s.num_documents; i++) {
        p.R += s.documents[i].rows;
        p.S += s.documents[i].tokens;
    }
    p.q = ops_random(rng, stored, p.R, s.NH * s.D, gap.q, q_scale);
    p.kv = ops_random(rng, s.dtype, p.S, 2 * s.NKV * s.D, gap.kv, 1);
    p.o = ops_random(rng, stored, p.R, s.NH * s.D, gap.o, 1);
    p.lse = ops_random(rng, MTP_F32, p.R, s.NH, gap.lse, 1);
    p.dout = ops_random(rng, stored, p.R, s.NH * s.D, gap.dout, 1);
    p.dq = ops_random(rng, stored, p.R, s.NH * s.D, gap.dq, 1);
    p.key_begin = ops_bytes((size_t)p.R * sizeof(int32_t));
    p.key_end = ops_bytes((size_t)p.R * sizeof(int32_t));
    p.doc_begin = ops_bytes((size_t)p.R * sizeof(int32_t));
    int64_t row = 0, doc = 0;
    for (int i = 0; i < s.num_documents; i++) {
        const attention_document d = s.documents[i];
        for (int64_t t = d.tokens - d.rows; t < d.tokens; t++, row++) {
            p.doc_begin[row] = (int32_t)doc;
            p.key_begin[row] = (int32_t)(doc + (s.window && t >= s.window ? t - s.window + 1 : 0));
            p.key_end[row] = (int32_t)(doc + t + 1);
        }
        doc += d.tokens;
    }
    return p;
}

static inline attention_problem attention_make(test_rng *rng, attention_shape s, attention_gaps gap, float q_scale)
{
    return attention_make_stored(rng, s, gap, q_scale, MTP_F32);
}

/* [R, NH * D] as [R, NH, D] */
static inline mtp_view attention_split(mtp_view v, int64_t heads)
{
    mtp_view w = mtp_view_3d(v.data, v.dtype, v.shape[0], heads, v.shape[1] / heads);
    w.stride[0] = v.stride[0];
    return w;
}

static inline mtp_attention_args attention_args(const attention_problem *p)
{
    mtp_attention_args a = {.q = attention_split(p->q.view, p->s.NH),
                            .kv = mtp_view_4d(p->kv.view.data, p->s.dtype, p->S, 2, p->s.NKV, p->s.D),
                            .key_begin = mtp_view_1d(p->key_begin, MTP_I32, p->R),
                            .key_end = mtp_view_1d(p->key_end, MTP_I32, p->R),
                            .doc_begin = mtp_view_1d(p->doc_begin, MTP_I32, p->R),
                            .o = attention_split(p->o.view, p->s.NH),
                            .lse = p->lse.view,
                            .do_ = attention_split(p->dout.view, p->s.NH),
                            .dq = attention_split(p->dq.view, p->s.NH)};
    a.kv.stride[0] = p->kv.view.stride[0];
    return a;
}

/* The rows [first, first + count) of the same arguments. */
static inline mtp_attention_args attention_rows(mtp_attention_args a, int64_t first, int64_t count)
{
    mtp_view *views[] = {&a.q, &a.key_begin, &a.key_end, &a.doc_begin, &a.o, &a.lse, &a.do_, &a.dq};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++) *views[i] = mtp_view_rows(*views[i], first, count);
    return a;
}

#endif
