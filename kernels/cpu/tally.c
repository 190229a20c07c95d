/* Sums over rows of the head. */
#include "check.h"
#include "check_args.h"
#include "cpu/cpu.h"

mtp_status mtp__cpu_tally(mtp_device *device, const mtp_tally_args *a)
{
    (void)device;
    MTP_TRY(mtp__check_tally("tally", a));
    const int64_t rows = a->index.shape[0], steps = a->sums.shape[0];
    const int32_t *index = a->index.data, *target = a->target.data, *argmax = a->argmax.data;
    const float *loss = a->loss.data, *centroid_loss = a->centroid_loss.data;
    const uint8_t *miss = a->miss.data;
    for (int64_t i = 0; i < rows; i++) {
        if (index[i] == MTP_NO_ROW) continue;
        const int64_t step = index[i] < 0 ? index[i] : index[i] / a->rows_per_step;
        if (step < 0 || step >= steps)
            return MTP_FAIL(MTP_E_ARGUMENT, "tally: index / rows_per_step[%lld] is %lld, outside [0, %lld)",
                            (long long)i, (long long)step, (long long)steps);
        const float centroid = centroid_loss ? centroid_loss[i] : 0.0f;
        double *sums = (double *)a->sums.data + step * MTP_TALLY_COLUMNS;
        sums[MTP_TALLY_LOSS] += (double)(a->joined ? loss[i] + centroid : loss[i]);
        sums[MTP_TALLY_CENTROID_LOSS] += a->joined ? 0.0 : (double)centroid;
        sums[MTP_TALLY_COUNT] += 1.0;
        sums[MTP_TALLY_CORRECT] += argmax[i] == target[i];
        sums[MTP_TALLY_MISSED] += miss && miss[i];
    }
    return MTP_OK;
}
