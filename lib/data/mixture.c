#include "data/mixture.h"

#include <math.h>
#include <stdlib.h>

#include "base/error.h"
#include "data/sampler.h"

static mtp_status overlong(const mtp__dataset_entry *entry, int64_t budget)
{
    static const char remedy[] = "raise tokens_per_batch, or set overlong to \"truncate\" or \"skip\"";
    if (entry->shard)
        return MTP_FAIL(MTP_E_DATA, "%s: sample %lld (%s) has %lld tokens, more than the %lld of a batch; %s",
                        entry->path, (long long)entry->row, mtp__shard_source(entry->shard, entry->row),
                        (long long)entry->num_tokens, (long long)budget, remedy);
    return MTP_FAIL(MTP_E_DATA, "%s has %lld tokens, more than the %lld of a batch; %s", entry->path,
                    (long long)entry->num_tokens, (long long)budget, remedy);
}

mtp_status mtp__document_length(const mtp__dataset_entry *entry, const mtp_loader_options *options, int64_t *length)
{
    const int64_t budget = options->tokens_per_batch;
    *length = entry->num_tokens;
    if (*length <= budget) return MTP_OK;
    if (options->overlong == MTP_OVERLONG_ERROR) return overlong(entry, budget);
    *length = options->overlong == MTP_OVERLONG_TRUNCATE ? budget : 0;
    return MTP_OK;
}

/* ---- how much of each source ---------------------------------------------------------------------------------- */

/* Tokens of a source that fit into batches. */
static mtp_status count_tokens(const mtp_dataset *dataset, const mtp__dataset_source *source,
                               const mtp_loader_options *options, int64_t *tokens)
{
    *tokens = 0;
    for (int64_t i = 0; i < source->count; i++) {
        const mtp__dataset_entry entry = mtp__dataset_at(dataset, source->first + i);
        int64_t length;
        MTP_TRY(mtp__document_length(&entry, options, &length));
        *tokens += length;
    }
    if (*tokens > 0) return MTP_OK;
    return MTP_FAIL(MTP_E_DATA, "source %s: none of its %lld documents fits into the %lld tokens of a batch",
                    source->path, (long long)source->count, (long long)options->tokens_per_batch);
}

/* Documents of an epoch that give a source its share of `all` tokens. */
static mtp_status count_documents(const mtp__dataset_source *source, int64_t tokens, int64_t all, int64_t *documents)
{
    const double passes = source->share * (double)all / (double)tokens;
    if (passes > MTP__MIXTURE_PASSES)
        return MTP_FAIL(MTP_E_DATA,
                        "source %s: its %lld tokens would come %.0f times in an epoch of %lld tokens to have %g %% of "
                        "them; lower its weight, or give it more data",
                        source->path, (long long)tokens, passes, (long long)all, 100 * source->share);
    *documents = llround(passes * (double)source->count);
    if (*documents < 1) *documents = 1;
    return MTP_OK;
}

static mtp_status fill_parts(const mtp_dataset *dataset, const mtp_loader_options *options, mtp__mixture *mixture)
{
    int64_t all = 0, *tokens = calloc((size_t)dataset->num_sources, sizeof *tokens);
    mtp_status status = tokens ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "no memory for a mixture of sources");
    for (int64_t s = 0; s < dataset->num_sources && status == MTP_OK; s++) {
        status = count_tokens(dataset, &dataset->sources[s], options, &tokens[s]);
        all += tokens[s];
    }
    for (int64_t s = 0; s < dataset->num_sources && status == MTP_OK; s++) {
        status = count_documents(&dataset->sources[s], tokens[s], all, &mixture->parts[s]);
        mixture->documents += mixture->parts[s];
    }
    free(tokens);
    if (status == MTP_OK && mixture->documents > UINT32_MAX / 2)
        status = MTP_FAIL(MTP_E_DATA, "the mixture has %lld documents an epoch; at most %u are possible",
                          (long long)mixture->documents, UINT32_MAX / 2);
    return status;
}

mtp_status mtp__mixture_create(const mtp_dataset *dataset, const mtp_loader_options *options, mtp__mixture *mixture)
{
    *mixture = (mtp__mixture){.documents = dataset->count};
    if (!dataset->mixed) return MTP_OK;
    mixture->documents = 0;
    mixture->parts = calloc((size_t)dataset->num_sources, sizeof *mixture->parts);
    if (!mixture->parts) return MTP_FAIL(MTP_E_MEMORY, "no memory for a mixture of sources");
    const mtp_status status = fill_parts(dataset, options, mixture);
    if (status != MTP_OK) mtp__mixture_free(mixture);
    return status;
}

void mtp__mixture_free(mtp__mixture *mixture)
{
    free(mixture->parts);
    *mixture = (mtp__mixture){0};
}

/* ---- which documents, in which order -------------------------------------------------------------------------- */

/* Documents `begin` to `begin + count` of the endless sequence of a source. Sources of the same size get orders of
 * their own. `pass` is room for one pass. */
static void take_documents(const mtp_dataset *dataset, const mtp_loader_options *options, int64_t number, int64_t begin,
                           int64_t count, uint32_t *pass, uint32_t *taken)
{
    const mtp__dataset_source *source = &dataset->sources[number];
    const uint64_t seed = options->seed + (uint64_t)number * UINT64_C(0x9e3779b97f4a7c15);
    int64_t made = -1;
    for (int64_t i = 0; i < count; i++) {
        const int64_t wanted = (begin + i) / source->count;
        if (wanted != made) mtp__sampler_order(seed, wanted, options->shuffle, (uint32_t)source->count, pass);
        made = wanted;
        taken[i] = (uint32_t)source->first + pass[(begin + i) % source->count];
    }
}

/* Where the merging of the sources stands. */
typedef struct progress {
    const uint32_t *next, *end; /* documents of the source that are left */
    int64_t tokens;             /* of those taken */
} progress;

/* The source that is furthest behind its share and has documents left. */
static int64_t furthest_behind(const mtp_dataset *dataset, const progress *at)
{
    int64_t found = -1;
    for (int64_t s = 0; s < dataset->num_sources; s++) {
        if (at[s].next == at[s].end) continue;
        if (found < 0 ||
            (double)at[s].tokens * dataset->sources[found].share < (double)at[found].tokens * dataset->sources[s].share)
            found = s;
    }
    return found;
}

static mtp_status merge(const mtp__mixture *mixture, const mtp_dataset *dataset, const mtp_loader_options *options,
                        progress *at, uint32_t *order)
{
    for (int64_t i = 0; i < mixture->documents; i++) {
        progress *source = &at[furthest_behind(dataset, at)];
        const mtp__dataset_entry entry = mtp__dataset_at(dataset, *source->next);
        int64_t length;
        MTP_TRY(mtp__document_length(&entry, options, &length));
        order[i] = *source->next++;
        source->tokens += length;
    }
    return MTP_OK;
}

static mtp_status order_sources(const mtp__mixture *mixture, const mtp_dataset *dataset,
                                const mtp_loader_options *options, int64_t epoch, uint32_t *order)
{
    uint32_t *taken = malloc((size_t)mixture->documents * sizeof *taken);
    uint32_t *pass = malloc((size_t)dataset->count * sizeof *pass);
    progress *at = calloc((size_t)dataset->num_sources, sizeof *at);
    mtp_status status = MTP_OK;
    if (!taken || !pass || !at)
        status = MTP_FAIL(MTP_E_MEMORY, "no memory to order %lld documents", (long long)mixture->documents);
    uint32_t *next = taken;
    for (int64_t s = 0; s < dataset->num_sources && status == MTP_OK; s++) {
        const int64_t count = mixture->parts[s];
        take_documents(dataset, options, s, epoch * count, count, pass, next);
        at[s] = (progress){.next = next, .end = next + count};
        next += count;
    }
    if (status == MTP_OK) status = merge(mixture, dataset, options, at, order);
    free(taken);
    free(pass);
    free(at);
    return status;
}

mtp_status mtp__mixture_order(const mtp__mixture *mixture, const mtp_dataset *dataset,
                              const mtp_loader_options *options, int64_t epoch, uint32_t *order)
{
    if (mixture->parts) return order_sources(mixture, dataset, options, epoch, order);
    mtp__sampler_order(options->seed, epoch, options->shuffle, (uint32_t)mixture->documents, order);
    return MTP_OK;
}
