/* A backend that computes with another one and keeps the seconds and the useful multiply-adds of every op. */
#ifndef MTP_BENCH_OP_TIMER_H
#define MTP_BENCH_OP_TIMER_H

#include "ops.h"

typedef struct op_timer_row {
    const char *op;
    int64_t calls;
    double seconds;
    double operations; /* floating-point operations of matrix products (2 a multiply-add); 0 where there are none, and
                          of attention on a device whose memory is not the host's */
} op_timer_row;

/* What was launched in graphs: it is in no row. */
typedef struct op_timer_graphs {
    int64_t launches, nodes;
} op_timer_graphs;

/* The timing backend over `real`. One at a time in a process. */
const mtp_backend *op_timer_wrap(const mtp_backend *real);
void op_timer_reset(void);
/* Rows of all ops, *count of them; those never called have calls 0. */
const op_timer_row *op_timer_rows(int *count);
op_timer_graphs op_timer_launched(void);

#endif
