/* The reference checker: runs case folders (tests/data/goldens, format in its README) through the whole training step
 * and compares. Errors are relative to the expected tensor's largest magnitude; gradients to that plus 1 % of the
 * case's largest gradient. */
#ifndef MTP_TESTS_GOLDEN_H
#define MTP_TESTS_GOLDEN_H

#include <stdbool.h>
#include <stdint.h>

#include "mtp/context.h"
#include "mtp/safetensors.h"

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
    } group[GOLDEN_GROUPS];
    int64_t integers;      /* integers compared */
    int64_t wrong;         /* of them, different */
    char wrong_where[128]; /* first tensor that differs */
} golden_result;

extern const char *const golden_group_names[GOLDEN_GROUPS];
extern const double golden_tolerances[GOLDEN_GROUPS];
extern const double golden_tolerances_bf16[GOLDEN_GROUPS]; /* products in bf16 */

/* An expected tensor as numbers: F32, F64, BF16, F16 to double, I64/I32/U8 to int64. The caller frees. */
mtp_status golden_reals(const mtp_safetensors *file, const char *name, int64_t count, double **values);
mtp_status golden_integers(const mtp_safetensors *file, const char *name, int64_t count, int64_t **values);

/* Compare `count` numbers with the expected tensor `name`; `floor` is added to the tensor's largest magnitude. */
mtp_status golden_compare(golden_result *result, golden_group group, const mtp_safetensors *expected, const char *name,
                          const float *got, int64_t count, double floor);
void golden_note(golden_result *result, golden_group group, const char *name, double error, int64_t count);
void golden_note_integer(golden_result *result, const char *name, int64_t got, int64_t want);

/* The same for numbers in device memory. */
mtp_status golden_compare_device(golden_result *result, golden_group group, const mtp_safetensors *expected,
                                 const char *name, const mtp_context *context, const void *got, int64_t count,
                                 double floor);

/* A drafter case, on a device (mtp_context_options). *skipped is set (and nothing compared) for an objective that is
 * not built, with its name. */
mtp_status golden_run_case(const char *directory, const mtp_context_options *device, golden_result *result,
                           const char **skipped);
/* The optimizer alone: a folder with optimizer.json. */
mtp_status golden_run_adamw(const char *directory, const mtp_context_options *device, golden_result *result);

#endif
