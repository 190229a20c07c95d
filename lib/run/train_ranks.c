/* What must be the same on all ranks, looked at before the first step: ranks that differ would compute something that
 * no single process could, without anybody noticing. */
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "mtp/version.h"
#include "run/config.h"
#include "run/train_run.h"

/* Keys whose values may differ: paths, whose content is compared; names of devices, of which what they are is compared;
 * and what no result depends on. */
static const char *const own_keys[] = {"drafter",   "verifier", "embedding_from", "train_data",
                                       "eval_data", "prefetch", "num_workers",    "direct_io",
                                       "device",    "isa",      "num_threads"};

static const char *const facts[] = {"the version of mtp",
                                    "what computes (device, isa, BLAS)",
                                    "the verifier's embedding or norm",
                                    "the training data",
                                    "the evaluation data",
                                    "the drafter's config.json or token_ordering",
                                    "the drafter's weights",
                                    "the step to go on from",
                                    "the position in the data"};
enum { NUM_FACTS = sizeof facts / sizeof *facts };

static uint64_t hash_text(uint64_t hash, const char *text)
{
    return text ? mtp__fnv1a(hash, text, strlen(text)) : hash;
}

static mtp_status hash_key(const mtp_train_config *config, const mtp__field *field, uint64_t *hash)
{
    mtp__text text = {0};
    *hash = 0;
    for (size_t i = 0; i < sizeof own_keys / sizeof *own_keys; i++)
        if (strcmp(own_keys[i], field->key) == 0) return MTP_OK;
    mtp__config_value(&text, config, field);
    const mtp_status status = mtp__text_check(&text);
    if (status == MTP_OK) *hash = hash_text(MTP__FNV_START, text.data);
    mtp__text_free(&text);
    return status;
}

static mtp_status hash_weights(const mtp_drafter *drafter, uint64_t *hash)
{
    enum { CHUNK = 1 << 18 };
    float *buffer = malloc(CHUNK * sizeof *buffer);
    mtp_status status = buffer ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory for a copy of weights");
    *hash = MTP__FNV_START;
    for (int64_t i = 0; i < drafter->num_params; i++) {
        const mtp__param *param = &drafter->params[i];
        for (int64_t at = 0; status == MTP_OK && at < param->count; at += CHUNK) {
            const int64_t count = param->count - at < CHUNK ? param->count - at : CHUNK;
            status = mtp__param_read(drafter, param, at, buffer, count);
            if (status == MTP_OK) *hash = mtp__fnv1a(*hash, buffer, (size_t)count * sizeof *buffer);
        }
    }
    free(buffer);
    return status;
}

static uint64_t hash_device(const mtp_context *context)
{
    const mtp_context_info info = mtp_context_describe(context);
    return hash_text(hash_text(hash_text(MTP__FNV_START, info.device), info.isa), info.blas);
}

static mtp_status collect(const mtp__run *run, uint64_t *hashes, size_t num_keys)
{
    const mtp__trainer *t = &run->trainer;
    const int64_t position[2] = {run->epoch, run->batch};
    size_t count;
    const mtp__field *fields = mtp__config_fields(&count);
    uint64_t *values = hashes + num_keys;
    for (size_t i = 0; i < num_keys; i++) MTP_TRY(hash_key(run->config, &fields[i], &hashes[i]));
    *values++ = hash_text(MTP__FNV_START, mtp_version());
    *values++ = hash_device(t->context);
    *values++ = mtp__trainer_verifier_fingerprint(t->verifier);
    *values++ = mtp_dataset_fingerprint(t->train_data);
    *values++ = t->eval_data ? mtp_dataset_fingerprint(t->eval_data) : 0;
    *values++ = mtp__checkpoint_computation(t->drafter);
    MTP_TRY(hash_weights(t->drafter, values++));
    *values++ = (uint64_t)run->step;
    *values++ = mtp__fnv1a(MTP__FNV_START, position, sizeof position);
    return MTP_OK;
}

/* Every difference from rank 0, a line each. */
static mtp_status compare(const mtp__run *run, size_t num_keys, mtp__text *differences)
{
    size_t count;
    const mtp__field *fields = mtp__config_fields(&count);
    const uint64_t *first = mtp__ranks_said(&run->ranks, 0);
    for (int rank = 1; rank < run->ranks.world_size; rank++) {
        const uint64_t *other = mtp__ranks_said(&run->ranks, rank);
        for (size_t i = 0; i < num_keys; i++)
            if (other[i] != first[i])
                mtp__text_add(differences, "\n  rank %d: %s.%s", rank, fields[i].section, fields[i].key);
        for (size_t i = 0; i < NUM_FACTS; i++)
            if (other[num_keys + i] != first[num_keys + i])
                mtp__text_add(differences, "\n  rank %d: %s", rank, facts[i]);
    }
    return mtp__text_check(differences);
}

mtp_status mtp__run_check_ranks(mtp__run *run)
{
    mtp__text differences = {0};
    size_t num_keys;
    mtp__config_fields(&num_keys);
    if (run->ranks.world_size == 1) return MTP_OK;
    uint64_t *hashes = calloc(num_keys + NUM_FACTS, sizeof *hashes);
    mtp_status status = hashes ? collect(run, hashes, num_keys) : MTP_FAIL(MTP_E_MEMORY, "out of memory for hashes");
    status = mtp__ranks_exchange(&run->ranks, status, hashes, (num_keys + NUM_FACTS) * sizeof *hashes);
    if (status == MTP_OK) status = compare(run, num_keys, &differences);
    if (status == MTP_OK && differences.length > 0)
        status = MTP_FAIL(MTP_E_CONFIG,
                          "ranks do not have the same as rank 0:%s\nAll ranks must train the same run: start them with "
                          "the same program, configuration, data and weights",
                          differences.data);
    mtp__text_free(&differences);
    free(hashes);
    return status;
}
