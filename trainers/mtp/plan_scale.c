#include "plan_scale.h"

#include <stdio.h>

#include "mtp/pack.h"
#include "program.h"

static void print_row(const mtp_scale *s)
{
    printf("%-10s %9.1f %9.2f %9.2f %9.2f %9.2f %8.2f%% %9.1f%% %12.0f %8.2f %8.2f\n", s->name,
           (double)s->num_parameters / 1e6, 1e3 * s->step_seconds, 1e3 * s->compute_seconds, 1e3 * s->optimizer_seconds,
           1e3 * s->all_reduce_seconds, 100 * s->exposed_seconds / s->step_seconds, 100 * s->efficiency,
           s->positions_per_second, (double)s->memory_bytes / (1024.0 * 1024 * 1024), s->data_bytes_per_second / 1e9);
}

static void print_object(const mtp_scale *s)
{
    printf("{\"size\": \"%s\", \"parameters\": %lld, \"operations_per_position\": %.6g, \"step_seconds\": %.6g, "
           "\"compute_seconds\": %.6g, \"optimizer_seconds\": %.6g, \"all_reduce_seconds\": %.6g, "
           "\"exposed_seconds\": %.6g, \"efficiency\": %.6g, \"positions_per_second\": %.6g, "
           "\"memory_bytes_per_rank\": %llu, \"data_bytes_per_second_per_rank\": %.6g}",
           s->name, (long long)s->num_parameters, s->operations, s->step_seconds, s->compute_seconds,
           s->optimizer_seconds, s->all_reduce_seconds, s->exposed_seconds, s->efficiency, s->positions_per_second,
           (unsigned long long)s->memory_bytes, s->data_bytes_per_second);
}

mtp_status print_scale(const mtp_scale_options *options, bool json)
{
    mtp_scale scale;
    for (int64_t i = 0; mtp_pack_official(i); i++) {
        const mtp_status status = mtp_scale_predict(i, options, &scale);
        if (status != MTP_OK) return status;
        if (i == 0 && !json)
            printf(
                "a step on %lld GPU%s, one rank each: estimates, not measurements; ms, positions/s of all ranks, GiB "
                "and GB/s of one rank\n"
                "%-10s %9s %9s %9s %9s %9s %9s %10s %12s %8s %8s\n",
                (long long)options->world_size, program_plural(options->world_size), "verifier", "M params", "step",
                "compute", "optimizer", "allreduce", "exposed", "efficiency", "positions/s", "memory", "data");
        if (json) printf(i == 0 ? "{\"scale\": [" : ", ");
        if (json)
            print_object(&scale);
        else
            print_row(&scale);
    }
    if (json) puts("]}");
    return MTP_OK;
}
