/* The paths of a data set as sources of a mixture. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/dataset_open.h"

static mtp_status check_weights(const char *const *paths, int64_t num_paths, const double *weights, double *sum)
{
    *sum = 0;
    for (int64_t i = 0; i < num_paths; i++) {
        if (!(weights[i] > 0) || isinf(weights[i]))
            return MTP_FAIL(MTP_E_ARGUMENT, "source %s: weight %g; weights are positive numbers", paths[i], weights[i]);
        *sum += weights[i];
    }
    if (isinf(*sum)) return MTP_FAIL(MTP_E_ARGUMENT, "the sum of the weights is no finite number");
    return MTP_OK;
}

mtp_status mtp__dataset_create_sources(mtp_dataset *dataset, const char *const *paths, int64_t num_paths,
                                       const double *weights)
{
    double sum = 0;
    if (weights) MTP_TRY(check_weights(paths, num_paths, weights, &sum));
    dataset->mixed = weights != NULL;
    dataset->sources = calloc((size_t)num_paths + 1, sizeof *dataset->sources);
    if (!dataset->sources) return MTP_FAIL(MTP_E_MEMORY, "no memory for %lld sources", (long long)num_paths);
    for (int64_t i = 0; i < num_paths; i++) {
        mtp__dataset_source *source = &dataset->sources[dataset->num_sources++];
        source->share = weights ? weights[i] / sum : 0;
        source->path = strdup(paths[i]);
        if (!source->path) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", paths[i]);
    }
    return MTP_OK;
}

mtp_status mtp__dataset_split_sources(mtp_dataset *dataset)
{
    int64_t next = 0; /* selected samples are in the order of all */
    for (int64_t i = 0; i < dataset->num_sources; i++) {
        mtp__dataset_source *source = &dataset->sources[i];
        const int64_t end = source->first + source->count, first = next;
        while (dataset->selected && next < dataset->count && dataset->selected[next] < end) next++;
        if (dataset->selected) {
            source->first = first;
            source->count = next - first;
        }
        if (dataset->mixed && source->count == 0)
            return MTP_FAIL(MTP_E_DATA, "source %s has no sample%s, so it cannot have its share", source->path,
                            dataset->selected ? " on this side of the split" : "");
    }
    return MTP_OK;
}

int64_t mtp_dataset_num_sources(const mtp_dataset *dataset)
{
    return dataset->num_sources;
}

mtp_source_info mtp_dataset_source(const mtp_dataset *dataset, int64_t index)
{
    if (index < 0 || index >= dataset->num_sources) return (mtp_source_info){0};
    const mtp__dataset_source *source = &dataset->sources[index];
    mtp_source_info info = {.path = source->path, .share = source->share, .num_samples = source->count};
    for (int64_t i = 0; i < source->count; i++) {
        const mtp__dataset_entry entry = mtp__dataset_at(dataset, source->first + i);
        info.num_tokens += entry.num_tokens;
        info.num_supervised += entry.num_supervised;
    }
    return info;
}
