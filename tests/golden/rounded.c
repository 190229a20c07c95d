/* The CPU backend with every stored value and every factor of a product rounded to bf16 where it is read: what a plain
 * step in bf16 mode computes. Sums, softmax, norms and losses are as the backend makes them. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/real.h"
#include "golden.h"

enum { COPIES_MOST = 4 };

typedef struct copies {
    void *memory[COPIES_MOST];
    int count;
} copies;

static int64_t offset_of(const mtp_view *view, int64_t place)
{
    int64_t offset = 0;
    for (int32_t axis = view->rank - 1; axis >= 0; axis--) {
        offset += place % view->shape[axis] * view->stride[axis];
        place /= view->shape[axis];
    }
    return offset;
}

/* *view becomes a contiguous F32 copy of itself, rounded. */
static mtp_status round_view(mtp_view *view, copies *c)
{
    if (!view->data) return MTP_OK;
    const int64_t count = mtp_view_count(*view);
    const size_t element = mtp_dtype_size(view->dtype);
    uint16_t half;
    float *copy = malloc((size_t)(count + 1) * sizeof *copy);
    if (!copy) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a rounded copy of %lld values", (long long)count);
    c->memory[c->count++] = copy;
    for (int64_t i = 0; i < count; i++) {
        mtp__real_to_f32(&copy[i], (const char *)view->data + (size_t)offset_of(view, i) * element, view->dtype, 1);
        mtp__real_from_f32(&half, MTP_BF16, &copy[i], 1);
        mtp__real_to_f32(&copy[i], &half, MTP_BF16, 1);
    }
    int64_t stride = 1;
    for (int32_t axis = view->rank - 1; axis >= 0; axis--) {
        view->stride[axis] = stride;
        stride *= view->shape[axis];
    }
    view->data = copy;
    view->dtype = MTP_F32;
    return MTP_OK;
}

static void free_copies(copies *c)
{
    for (int i = 0; i < c->count; i++) free(c->memory[i]);
}

static mtp_view none; /* in place of a view that is not rounded */

/* The op with the named views rounded. */
#define ROUNDED(op, args, ...)                                                        \
    static mtp_status rounded_##op(mtp_device *device, const args *given)             \
    {                                                                                 \
        args a = *given;                                                              \
        copies c = {.count = 0};                                                      \
        mtp_view *const views[] = {__VA_ARGS__};                                      \
        mtp_status status = MTP_OK;                                                   \
        for (size_t i = 0; status == MTP_OK && i < sizeof views / sizeof *views; i++) \
            status = round_view(views[i], &c);                                        \
        if (status == MTP_OK) status = mtp__backend_cpu()->op(device, &a);            \
        free_copies(&c);                                                              \
        return status;                                                                \
    }

ROUNDED(linear_fwd, mtp_linear_args, &a.x, &a.w)
ROUNDED(linear_dx, mtp_linear_args, &a.y, &a.w)
ROUNDED(linear_dw, mtp_linear_args, &a.x, &a.y)
/* with RoPE behind it, the norm reads what is stored */
ROUNDED(rmsnorm_fwd, mtp_rmsnorm_args, a.cos.data ? &a.x : &none)
ROUNDED(rmsnorm_bwd, mtp_rmsnorm_args, &a.dy, a.cos.data ? &a.x : &none)
ROUNDED(residual_norm_fwd, mtp_residual_norm_args, &a.x)
ROUNDED(residual_norm_bwd, mtp_residual_norm_args, &a.x, a.next_w.data ? &a.next_dy : &none)
ROUNDED(geglu_fwd, mtp_geglu_args, &a.gate, &a.up)
ROUNDED(geglu_bwd, mtp_geglu_args, &a.gate, &a.up, &a.dy)
ROUNDED(rope_fwd, mtp_rope_args, &a.x)
ROUNDED(rope_bwd, mtp_rope_args, &a.x)
ROUNDED(attention_fwd, mtp_attention_args, &a.q, &a.kv)
ROUNDED(attention_bwd, mtp_attention_args, &a.q, &a.kv, &a.o, &a.do_)
ROUNDED(head_flat, mtp_head_args, &a.x, &a.e)
ROUNDED(head_candidates, mtp_head_args, &a.x, &a.e)
ROUNDED(head_hierarchical, mtp_head_args, &a.x, &a.e)

const mtp_backend *golden_rounded_backend(void)
{
    static mtp_backend table;
    table = *mtp__backend_cpu();
    table.linear_fwd = rounded_linear_fwd;
    table.linear_dx = rounded_linear_dx;
    table.linear_dw = rounded_linear_dw;
    table.rmsnorm_fwd = rounded_rmsnorm_fwd;
    table.rmsnorm_bwd = rounded_rmsnorm_bwd;
    table.residual_norm_fwd = rounded_residual_norm_fwd;
    table.residual_norm_bwd = rounded_residual_norm_bwd;
    table.geglu_fwd = rounded_geglu_fwd;
    table.geglu_bwd = rounded_geglu_bwd;
    table.rope_fwd = rounded_rope_fwd;
    table.rope_bwd = rounded_rope_bwd;
    table.attention_fwd = rounded_attention_fwd;
    table.attention_bwd = rounded_attention_bwd;
    table.head_flat = rounded_head_flat;
    table.head_candidates = rounded_head_candidates;
    table.head_hierarchical = rounded_head_hierarchical;
    return &table;
}
