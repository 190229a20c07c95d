#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/real.h"
#include "golden.h"

const char *const golden_group_names[GOLDEN_GROUPS] = {"hidden",     "state",      "logits",        "loss", "gradients",
                                                       "curve loss", "curve norm", "curve weights", "adamw"};
/* From the README of the reference cases; never loosened. */
const double golden_tolerances[GOLDEN_GROUPS] = {2e-5, 2e-5, 2e-5, 2e-5, 1.5e-4, 1e-5, 5e-4, 2e-5, 1e-6};

/* A little more than the largest of the cases. */
const double golden_plain_limits[GOLDEN_GROUPS] = {4e-2, 4e-2, 5e-2, 1e-2, 3e-1, 2e-2, 2e-1, 5e-3, 1e-6};

static mtp_status find(const mtp_safetensors *file, const char *name, int64_t count,
                       const mtp_safetensors_entry **entry)
{
    MTP_TRY(mtp_safetensors_get(file, name, entry));
    if ((*entry)->count != count)
        return MTP_FAIL(MTP_E_DATA, "%s: %s has %lld values, the case needs %lld", mtp_safetensors_path(file), name,
                        (long long)(*entry)->count, (long long)count);
    return MTP_OK;
}

mtp_status golden_reals(const mtp_safetensors *file, const char *name, int64_t count, double **values)
{
    const mtp_safetensors_entry *entry;
    MTP_TRY(find(file, name, count, &entry));
    *values = malloc(sizeof(double) * (size_t)(count + 1));
    if (!*values) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %s", name);
    for (int64_t i = 0; i < count; i++) {
        const char *at = (const char *)entry->data + (size_t)i * mtp_dtype_size(entry->dtype);
        float f;
        switch (entry->dtype) {
        case MTP_F64:
            memcpy(*values + i, at, sizeof(double));
            break;
        case MTP_F32:
        case MTP_BF16:
        case MTP_F16:
            mtp__real_to_f32(&f, at, entry->dtype, 1);
            (*values)[i] = (double)f;
            break;
        default:
            free(*values);
            *values = NULL;
            return MTP_FAIL(MTP_E_DATA, "%s: %s holds no real numbers", mtp_safetensors_path(file), name);
        }
    }
    return MTP_OK;
}

mtp_status golden_integers(const mtp_safetensors *file, const char *name, int64_t count, int64_t **values)
{
    const mtp_safetensors_entry *entry;
    MTP_TRY(find(file, name, count, &entry));
    *values = malloc(sizeof(int64_t) * (size_t)(count + 1));
    if (!*values) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %s", name);
    for (int64_t i = 0; i < count; i++) {
        const char *at = (const char *)entry->data + (size_t)i * mtp_dtype_size(entry->dtype);
        int32_t word;
        switch (entry->dtype) {
        case MTP_I64:
            memcpy(*values + i, at, sizeof(int64_t));
            break;
        case MTP_I32:
            memcpy(&word, at, sizeof word);
            (*values)[i] = word;
            break;
        case MTP_U8:
        case MTP_BOOL:
            (*values)[i] = *(const unsigned char *)at;
            break;
        default:
            free(*values);
            *values = NULL;
            return MTP_FAIL(MTP_E_DATA, "%s: %s holds no integers", mtp_safetensors_path(file), name);
        }
    }
    return MTP_OK;
}

void golden_note(golden_result *result, golden_group group, const char *name, double error, int64_t count)
{
    result->group[group].count += count;
    if (!isnan(result->group[group].error) && !(error <= result->group[group].error)) { /* a NaN is the largest error */
        result->group[group].error = error;
        snprintf(result->group[group].where, sizeof result->group[group].where, "%s", name);
    }
}

double golden_mean_error(const golden_result *result, int group)
{
    const double norm = result->group[group].scalar_norm;
    const double scalars = norm > 0 ? result->group[group].scalar_squares / norm : 0;
    const int64_t tensors = result->group[group].tensors + (norm > 0 ? 1 : 0);
    return tensors ? sqrt((result->group[group].squares + scalars) / (double)tensors) : 0;
}

void golden_note_integer(golden_result *result, const char *name, int64_t got, int64_t want)
{
    result->integers++;
    if (got == want) return;
    if (result->wrong++ == 0) snprintf(result->wrong_where, sizeof result->wrong_where, "%s", name);
}

mtp_status golden_compare(golden_result *result, golden_group group, const mtp_safetensors *expected, const char *name,
                          const float *got, int64_t count, double floor)
{
    double *want, largest = 0, error = 0;
    MTP_TRY(golden_reals(expected, name, count, &want));
    double squares = 0, norm = 0;
    for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(want[i]));
    for (int64_t i = 0; i < count; i++) {
        const double difference = fabs((double)got[i] - want[i]);
        if (!(difference <= error)) error = difference;
        squares += difference * difference;
        norm += want[i] * want[i];
    }
    free(want);
    const double scale = largest + floor;
    const double whole = sqrt(norm) + floor * sqrt((double)count);
    if (count == 1) {
        result->group[group].scalar_squares += squares;
        result->group[group].scalar_norm += whole * whole;
    } else {
        result->group[group].squares += whole > 0 ? squares / (whole * whole) : squares;
        result->group[group].tensors++;
    }
    golden_note(result, group, name, scale > 0 ? error / scale : error, count);
    return MTP_OK;
}

mtp_status golden_take(const mtp_safetensors *expected, const char *name, float *got, int64_t rows, int64_t width,
                       const bool *taken)
{
    double *want;
    MTP_TRY(golden_reals(expected, name, rows * width, &want));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = r * width; taken[r] && i < (r + 1) * width; i++) got[i] = (float)want[i];
    free(want);
    return MTP_OK;
}

mtp_status golden_compare_device(golden_result *result, golden_group group, const mtp_safetensors *expected,
                                 const char *name, const mtp_context *context, const void *got, int64_t count,
                                 double floor)
{
    const size_t bytes = (size_t)count * sizeof(float);
    float *values = malloc(bytes);
    if (!values) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %s", name);
    mtp_status status = context->ops->download(context->device, values, got, bytes);
    if (status == MTP_OK) status = golden_compare(result, group, expected, name, values, count, floor);
    free(values);
    return status;
}
