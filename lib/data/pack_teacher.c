/* The verifier's head at pack time: logits = softcap(h W^T), the head tied to the embedding table, in pieces of the
 * vocabulary so that no more than rows x chunk logits exist at once. The log-sum-exp is kept as (maximum, sum) in
 * double; everything goes in the order of the ids, so the numbers do not depend on threads. */
#include <math.h>
#include <stdlib.h>

#include "base/context.h"
#include "data/pack.h"

enum { CHUNK = 4096 };

struct mtp__teacher {
    const mtp_context *context;
    mtp_view table; /* [V, Hb] */
    double softcap; /* 0: none */
    int64_t top;
    float *logits; /* [MTP__TEACHER_ROWS, CHUNK] */
    void *scratch;
    size_t scratch_bytes;
    double *largest, *sum; /* [MTP__TEACHER_ROWS] */
};

static mtp_linear_args arguments(const mtp__teacher *teacher, void *hidden, int64_t rows, int64_t first, int64_t count)
{
    const mtp_scratch scratch = {teacher->scratch, teacher->scratch_bytes};
    return (mtp_linear_args){.x = mtp_view_2d(hidden, MTP_BF16, rows, teacher->table.shape[1]),
                             .w = mtp_view_rows(teacher->table, first, count),
                             .y = mtp_view_2d(teacher->logits, MTP_F32, rows, count),
                             .write = MTP_OVERWRITE,
                             .scratch = scratch};
}

mtp_status mtp__teacher_create(const mtp_context *context, const mtp_verifier *verifier, int64_t top,
                               mtp__teacher **teacher)
{
    *teacher = NULL;
    mtp__teacher *made = calloc(1, sizeof *made);
    if (!made) return MTP_FAIL(MTP_E_MEMORY, "no memory for the teacher");
    made->context = context;
    made->table = mtp_verifier_embedding(verifier);
    made->softcap = mtp_verifier_get_config(verifier)->final_logit_softcapping;
    made->top = top;
    const int64_t chunk = CHUNK < made->table.shape[0] ? CHUNK : made->table.shape[0];
    const mtp_linear_args args = arguments(made, NULL, MTP__TEACHER_ROWS, 0, chunk);
    made->scratch_bytes = context->ops->linear_fwd_scratch(context->device, &args);
    made->logits = aligned_alloc(64, (size_t)MTP__TEACHER_ROWS * CHUNK * sizeof *made->logits);
    made->scratch = aligned_alloc(64, (made->scratch_bytes + 64) / 64 * 64);
    made->largest = calloc(MTP__TEACHER_ROWS, sizeof *made->largest);
    made->sum = calloc(MTP__TEACHER_ROWS, sizeof *made->sum);
    if (!made->logits || !made->scratch || !made->largest || !made->sum) {
        mtp__teacher_free(made);
        return MTP_FAIL(MTP_E_MEMORY, "no memory for the teacher");
    }
    *teacher = made;
    return MTP_OK;
}

void mtp__teacher_free(mtp__teacher *teacher)
{
    if (!teacher) return;
    free(teacher->logits);
    free(teacher->scratch);
    free(teacher->largest);
    free(teacher->sum);
    free(teacher);
}

/* Keep the `top` largest, falling; among equals the lower id, which came first, stays in front. */
static void keep(int32_t *ids, float *logits, int64_t held, int64_t top, int32_t id, float logit)
{
    int64_t at = held < top ? held : top - 1;
    if (held == top && logit <= logits[top - 1]) return;
    for (; at > 0 && logits[at - 1] < logit; at--) {
        logits[at] = logits[at - 1];
        ids[at] = ids[at - 1];
    }
    logits[at] = logit;
    ids[at] = id;
}

/* Ids first, first + 1, ... of one row. */
static void take_chunk(mtp__teacher *teacher, int64_t row, int64_t first, int64_t count, int32_t *ids, float *logits)
{
    float *y = teacher->logits + row * count;
    float chunk_largest = -INFINITY;
    const float cap = (float)teacher->softcap;
    for (int64_t i = 0; i < count; i++) {
        if (cap > 0) y[i] = cap * tanhf(y[i] / cap);
        if (y[i] > chunk_largest) chunk_largest = y[i];
        const int64_t seen = first + i;
        keep(ids, logits, seen < teacher->top ? seen : teacher->top, teacher->top, (int32_t)seen, y[i]);
    }
    double *largest = &teacher->largest[row], *sum = &teacher->sum[row];
    if ((double)chunk_largest > *largest) {
        *sum *= exp(*largest - (double)chunk_largest);
        *largest = (double)chunk_largest;
    }
    for (int64_t i = 0; i < count; i++) *sum += exp((double)y[i] - *largest);
}

mtp_status mtp__teacher_rows(mtp__teacher *teacher, void *hidden, int64_t rows, float *lse, int32_t *ids, float *logits)
{
    const int64_t vocab = teacher->table.shape[0];
    for (int64_t r = 0; r < rows; r++) {
        teacher->largest[r] = -INFINITY;
        teacher->sum[r] = 0;
    }
    for (int64_t first = 0; first < vocab; first += CHUNK) {
        const int64_t count = vocab - first < CHUNK ? vocab - first : CHUNK;
        const mtp_linear_args args = arguments(teacher, hidden, rows, first, count);
        MTP_TRY(teacher->context->ops->linear_fwd(teacher->context->device, &args));
        for (int64_t r = 0; r < rows; r++)
            take_chunk(teacher, r, first, count, ids + r * teacher->top, logits + r * teacher->top);
    }
    for (int64_t r = 0; r < rows; r++) {
        lse[r] = (float)(teacher->largest[r] + log(teacher->sum[r]));
        if (!isfinite(lse[r])) return MTP_FAIL(MTP_E_DATA, "the verifier's head gives NaN or Inf for hidden_states");
    }
    return MTP_OK;
}
