/* The reference checker: runs case folders (tests/data/goldens, format in its README) through the whole training step
 * and compares. Errors are relative to the expected tensor's largest magnitude; gradients to that plus 1 % of the
 * case's largest gradient.
 *
 * In bf16 mode the error of a group is the root mean square over its tensors of |got - want| / |want| (2-norms; tensors
 * of one element, of which a single one may cancel to nothing, are taken together as one), and may be twice that of a
 * plain step in bf16: the CPU's with every stored value and every factor rounded (rounded.c), whose own errors have
 * limits. Rounding may turn a choice between near ties: a centroid that only one of both selected is left out of the
 * logits, a place that another token was drafted for out of everything that is given by place; how many there may be is
 * limited, and the share of such places is added to what losses and gradients may differ by. */
#ifndef MTP_TESTS_GOLDEN_H
#define MTP_TESTS_GOLDEN_H

#include <stdbool.h>
#include <stdint.h>

#include "mtp/context.h"
#include "mtp/safetensors.h"
#include "ops.h"

typedef enum golden_group {
    GOLDEN_HIDDEN,
    GOLDEN_STATE,
    GOLDEN_LOGITS,
    GOLDEN_LOSS,
    GOLDEN_GRADIENTS,
    GOLDEN_CURVE_LOSS,
    GOLDEN_CURVE_NORM,
    GOLDEN_CURVE_WEIGHTS,
    GOLDEN_ADAMW,
    GOLDEN_GROUPS
} golden_group;

/* What one case gave. A group that was not compared has count 0. */
typedef struct golden_result {
    struct {
        double error;    /* largest of the group */
        int64_t count;   /* numbers compared */
        char where[128]; /* tensor of the largest error */
        double squares;  /* sum over its tensors of (|got - want| / |want|)^2, 2-norms */
        int64_t tensors;
        double scalar_squares, scalar_norm; /* |got - want|^2 and |want|^2 of the tensors of one element together */
    } group[GOLDEN_GROUPS];
    int64_t integers;      /* integers compared */
    int64_t wrong;         /* of them, different */
    char wrong_where[128]; /* first tensor that differs */
    /* bf16 mode */
    int64_t selections, reselected; /* centroids, and those that only the case selected */
    int64_t drafts, redrafted;      /* places, and those computed for another token */
} golden_result;

double golden_mean_error(const golden_result *result, int group);

extern const char *const golden_group_names[GOLDEN_GROUPS];
extern const double golden_tolerances[GOLDEN_GROUPS];
extern const double golden_plain_limits[GOLDEN_GROUPS]; /* mean errors of the plain step in bf16 */
/* How much of the choices may turn: 1 of so many. */
enum { GOLDEN_TURNED_SELECTIONS = 25, GOLDEN_TURNED_DRAFTS = 8 };

/* An expected tensor as numbers: F32, F64, BF16, F16 to double, I64/I32/U8 to int64. The caller frees. */
mtp_status golden_reals(const mtp_safetensors *file, const char *name, int64_t count, double **values);
mtp_status golden_integers(const mtp_safetensors *file, const char *name, int64_t count, int64_t **values);

/* Compare `count` numbers with the expected tensor `name`; `floor` is added to the tensor's largest magnitude. */
mtp_status golden_compare(golden_result *result, golden_group group, const mtp_safetensors *expected, const char *name,
                          const float *got, int64_t count, double floor);
void golden_note(golden_result *result, golden_group group, const char *name, double error, int64_t count);
void golden_note_integer(golden_result *result, const char *name, int64_t got, int64_t want);

/* The rows of `got` [rows, width] that `taken` names become the expected ones. */
mtp_status golden_take(const mtp_safetensors *expected, const char *name, float *got, int64_t rows, int64_t width,
                       const bool *taken);

/* The same as golden_compare for numbers in device memory. */
mtp_status golden_compare_device(golden_result *result, golden_group group, const mtp_safetensors *expected,
                                 const char *name, const mtp_context *context, const void *got, int64_t count,
                                 double floor);

/* The plain step in bf16: rounded.c. */
const mtp_backend *golden_rounded_backend(void);

/* A drafter case, on a device (mtp_context_options); the cpu in bf16 is the plain step. *skipped is set (and nothing
 * compared) for an objective that is not built, with its name. */
mtp_status golden_run_case(const char *directory, const mtp_context_options *device, golden_result *result,
                           const char **skipped);
/* What `count` steps of AdamW gave: before each its loss and the norm of its gradients, and the last weights. */
enum { GOLDEN_STEPS_MOST = 64 };
typedef struct golden_steps {
    double loss[GOLDEN_STEPS_MOST], norm[GOLDEN_STEPS_MOST];
    float *weights; /* of every trained parameter, the caller frees */
    int64_t num_weights;
} golden_steps;
mtp_status golden_run_steps(const char *directory, const mtp_context_options *device, int64_t count,
                            golden_steps *steps);
/* The optimizer alone: a folder with optimizer.json. */
mtp_status golden_run_adamw(const char *directory, const mtp_context_options *device, golden_result *result);

#endif
