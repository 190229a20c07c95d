/* Sums over rows of the head: a block adds up one draft step. A thread takes every THREADS-th row, whatever step it
 * belongs to, so padding rows and their number change no bit. */
#include "cuda/cuda.h"

namespace
{

using namespace mtp;

constexpr int THREADS = 512;

struct tally {
    const int *index, *target, *argmax;
    const float *loss, *centroid_loss;
    const uint8_t *miss;
    double *sums;
    int rows, rows_per_step, steps;
    bool joined;
    mtp::fault *fault;
};

__global__ void __launch_bounds__(THREADS) tally_kernel(tally t)
{
    MTP_SHARED(double, shared, [WARP]);
    double sums[MTP_TALLY_COLUMNS] = {};
    for (int i = (int)threadIdx.x; i < t.rows; i += THREADS) {
        const int index = t.index[i];
        if (index == MTP_NO_ROW) continue;
        const int step = index < 0 ? index : index / t.rows_per_step;
        if (!in_range(t.fault, FAULT_TALLY, step, t.steps, i) || step != (int)blockIdx.x) continue;
        const float loss = t.loss[i], centroid = t.centroid_loss ? t.centroid_loss[i] : 0.0f;
        sums[MTP_TALLY_LOSS] += (double)(t.joined ? loss + centroid : loss);
        sums[MTP_TALLY_CENTROID_LOSS] += t.joined ? 0.0 : (double)centroid;
        sums[MTP_TALLY_COUNT] += 1.0;
        sums[MTP_TALLY_CORRECT] += t.argmax[i] == t.target[i] ? 1.0 : 0.0;
        sums[MTP_TALLY_MISSED] += t.miss && t.miss[i] ? 1.0 : 0.0;
    }
#pragma unroll
    for (int column = 0; column < MTP_TALLY_COLUMNS; column++) {
        const double sum = block_sum(sums[column], shared);
        if (threadIdx.x == 0) t.sums[blockIdx.x * MTP_TALLY_COLUMNS + column] += sum;
    }
}

} // namespace

extern "C" mtp_status mtp__cuda_tally(mtp_device *device, const mtp_tally_args *a)
{
    const char *op = "tally";
    MTP_TRY(mtp__check_tally(op, a));
    tally t = {};
    t.index = (const int *)a->index.data;
    t.target = (const int *)a->target.data;
    t.argmax = (const int *)a->argmax.data;
    t.loss = (const float *)a->loss.data;
    t.centroid_loss = (const float *)a->centroid_loss.data;
    t.miss = (const uint8_t *)a->miss.data;
    t.sums = (double *)a->sums.data;
    t.rows = (int)a->index.shape[0];
    t.rows_per_step = (int)a->rows_per_step;
    t.steps = (int)a->sums.shape[0];
    t.joined = a->joined;
    t.fault = device->fault;
    MTP_CUDA_TRY(op, MTP_LAUNCH(tally_kernel, (unsigned)t.steps, THREADS, 0, device->stream, t));
    return MTP_OK;
}
