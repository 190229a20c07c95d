/* Rotary embedding: the table of angles, and the rotation with its inverse (formulas: ops.h). */
#include <math.h>

#include "check.h"
#include "check_args.h"
#include "cpu/cpu.h"

enum { POSITION_MOST = 1 << 24 }; /* fp32 holds every integer up to here */

mtp_status mtp__cpu_rope_table(mtp_device *device, const mtp_rope_table_args *a)
{
    const char *op = "rope_table";
    const int64_t rows = a->positions.shape[0], half = a->inv_freq.shape[0];
    MTP__CHECK(op, positions, MTP_I32, -1);
    MTP__CHECK(op, inv_freq, MTP_F32, -1);
    MTP__CHECK(op, cos, MTP_F32, rows, half);
    MTP__CHECK(op, sin, MTP_F32, rows, half);
    const int32_t *positions = a->positions.data;
    const float *inv_freq = a->inv_freq.data;
    for (int64_t r = 0; r < rows; r++)
        if (positions[r] < 0 || positions[r] > POSITION_MOST)
            return MTP_FAIL(MTP_E_ARGUMENT, "%s: positions[%lld] is %d, outside 0..2^24", op, (long long)r,
                            (int)positions[r]);
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        float *cosine = mtp__row(&a->cos, r), *sine = mtp__row(&a->sin, r);
        for (int64_t i = 0; i < half; i++) {
            const float angle = (float)positions[r] * inv_freq[i];
            cosine[i] = cosf(angle);
            sine[i] = sinf(angle);
        }
    }
    return MTP_OK;
}

static mtp_status rotate(mtp_device *device, const char *op, const mtp_rope_args *a, float sign)
{
    const int64_t rows = a->x.shape[0], heads = a->x.shape[1], width = a->x.shape[2];
    MTP_TRY(mtp__check_rope(op, a, MTP_F32));
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++)
            device->vec->rotate(mtp__row(&a->y, r) + h * a->y.stride[1], mtp__row(&a->x, r) + h * a->x.stride[1],
                                mtp__row(&a->cos, r), mtp__row(&a->sin, r), sign, width / 2);
    return MTP_OK;
}

mtp_status mtp__cpu_rope_fwd(mtp_device *device, const mtp_rope_args *a)
{
    return rotate(device, "rope_fwd", a, 1.0f);
}

mtp_status mtp__cpu_rope_bwd(mtp_device *device, const mtp_rope_args *a)
{
    return rotate(device, "rope_bwd", a, -1.0f);
}
