#include "op_timer.h"

#include <time.h>

#define OP_INDEX(op, args, scratch) INDEX_##op,
enum op_index { MTP_OP_LIST(OP_INDEX) NUM_OPS };
#undef OP_INDEX

#define OP_ROW(op, args, scratch) {#op, 0, 0, 0},
static op_timer_row rows[] = {MTP_OP_LIST(OP_ROW)};
#undef OP_ROW
static const mtp_backend *wrapped;
static op_timer_graphs launched;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* ---- operations, from the arguments ------------------------------------------------------------------------------ */

static double linear_operations(const mtp_linear_args *a)
{
    return 2.0 * (double)a->y.shape[0] * (double)a->w.shape[0] * (double)a->w.shape[1];
}

/* Two products a visible key forward, three backward. */
static double attention_operations(const mtp_attention_args *a, int products)
{
    const int32_t *begin = a->key_begin.data, *end = a->key_end.data;
    double keys = 0;
    if (!wrapped->memory_is_host) return 0;
    for (int64_t r = 0; r < a->q.shape[0]; r++) keys += end[r] - begin[r];
    return 2.0 * products * keys * (double)(a->q.shape[1] * a->q.shape[2]);
}

static double head_operations(const mtp_head_args *a, double candidates)
{
    const int products = 1 + (a->dx.data != NULL) + (a->de.data != NULL);
    return 2.0 * products * (double)a->x.shape[0] * candidates * (double)a->x.shape[1];
}

static double forced(const mtp_head_args *a)
{
    return a->target.data ? 1.0 : 0.0; /* at most: the forced centroid of every row */
}

#define OPERATIONS_embed_fwd(a) 0.0
#define OPERATIONS_gather_rows(a) 0.0
#define OPERATIONS_scatter_rows(a) 0.0
#define OPERATIONS_convert(a) 0.0
#define OPERATIONS_axpy(a) 0.0
#define OPERATIONS_linear_fwd(a) linear_operations(a)
#define OPERATIONS_linear_dx(a) linear_operations(a)
#define OPERATIONS_linear_dw(a) linear_operations(a)
#define OPERATIONS_rmsnorm_fwd(a) 0.0
#define OPERATIONS_rmsnorm_bwd(a) 0.0
#define OPERATIONS_residual_norm_fwd(a) 0.0
#define OPERATIONS_residual_norm_bwd(a) 0.0
#define OPERATIONS_geglu_fwd(a) 0.0
#define OPERATIONS_geglu_bwd(a) 0.0
#define OPERATIONS_rope_table(a) 0.0
#define OPERATIONS_rope_fwd(a) 0.0
#define OPERATIONS_rope_bwd(a) 0.0
#define OPERATIONS_attention_fwd(a) attention_operations(a, 2)
#define OPERATIONS_attention_bwd(a) attention_operations(a, 3)
#define OPERATIONS_topk(a) 0.0
#define OPERATIONS_xent(a) 0.0
#define OPERATIONS_head_flat(a) head_operations(a, (double)a->e.shape[0])
#define OPERATIONS_head_candidates(a) \
    head_operations(a, ((double)a->selected.shape[1] + forced(a)) * (double)a->order.shape[1])
#define OPERATIONS_head_hierarchical(a) head_operations(a, (double)a->order.shape[1])
#define OPERATIONS_tally(a) 0.0
#define OPERATIONS_adamw(a) 0.0
#define OPERATIONS_sumsq(a) 0.0
#define OPERATIONS_clip(a) 0.0

#define OP_WRAPPER(op, args, scratch)                               \
    static mtp_status timed_##op(mtp_device *device, const args *a) \
    {                                                               \
        const double start = now();                                 \
        const mtp_status status = wrapped->op(device, a);           \
        rows[INDEX_##op].seconds += now() - start;                  \
        rows[INDEX_##op].operations += OPERATIONS_##op(a);          \
        rows[INDEX_##op].calls++;                                   \
        return status;                                              \
    }
MTP_OP_LIST(OP_WRAPPER)
#undef OP_WRAPPER

static mtp_status counted_launch(mtp_device *device, mtp_graph *graph)
{
    launched.launches++;
    launched.nodes += wrapped->graph->num_nodes(graph);
    return wrapped->graph->launch(device, graph);
}

const mtp_backend *op_timer_wrap(const mtp_backend *real)
{
    static mtp_backend timed;
    static mtp_graph_ops graphs;
    timed = *real;
    wrapped = real;
    if (real->graph) {
        graphs = *real->graph;
        graphs.launch = counted_launch;
        timed.graph = &graphs;
    }
#define OP_ENTRY(op, args, scratch) timed.op = timed_##op;
    MTP_OP_LIST(OP_ENTRY)
#undef OP_ENTRY
    op_timer_reset();
    return &timed;
}

void op_timer_reset(void)
{
    for (int i = 0; i < NUM_OPS; i++) rows[i] = (op_timer_row){.op = rows[i].op};
    launched = (op_timer_graphs){0};
}

const op_timer_row *op_timer_rows(int *count)
{
    *count = NUM_OPS;
    return rows;
}

op_timer_graphs op_timer_launched(void)
{
    return launched;
}
