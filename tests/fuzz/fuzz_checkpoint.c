/* Protects: whatever the bytes, a checkpoint's manifest is refused or read; one that is read stays inside its directory
 * and survives being written and read again. */
#include "fuzz.h"

#include <string.h>

#include "run/checkpoint.h"

static void check_shards(const mtp__manifest *m)
{
    FUZZ_CHECK(m->num_shards >= 1 && m->num_shards <= MTP__CHECKPOINT_MAX_SHARDS);
    for (int64_t i = 0; i < m->num_shards; i++) {
        const char *file = m->shards[i].file;
        FUZZ_CHECK(file[0] && file[0] != '.' && !strchr(file, '/'));
        FUZZ_CHECK(m->shards[i].bytes >= 1);
        for (int64_t j = 0; j < i; j++) FUZZ_CHECK(strcmp(file, m->shards[j].file) != 0);
    }
}

static void check_same(const mtp__manifest *a, const mtp__manifest *b)
{
    FUZZ_CHECK(a->step == b->step && a->total_steps == b->total_steps);
    FUZZ_CHECK(a->epoch == b->epoch && a->batch == b->batch && a->seed == b->seed);
    FUZZ_CHECK(a->computation == b->computation && a->verifier == b->verifier && a->dataset == b->dataset &&
               a->num_samples == b->num_samples);
    FUZZ_CHECK(a->best_step == b->best_step && a->best_length == b->best_length);
    FUZZ_CHECK(a->num_settings == b->num_settings && a->num_shards == b->num_shards);
    for (int64_t i = 0; i < a->num_settings; i++) {
        const char *value = mtp__manifest_setting(b, a->settings[i].key);
        FUZZ_CHECK(value && strcmp(value, a->settings[i].value) == 0);
    }
}

int mtp_fuzz_accepts(const uint8_t *data, size_t size)
{
    mtp__manifest *m = NULL, *again = NULL;
    char *text = NULL;
    if (mtp__manifest_parse((const char *)data, size, "fuzz", &m) != MTP_OK) {
        FUZZ_CHECK(m == NULL);
        return 0;
    }
    check_shards(m);
    FUZZ_CHECK(mtp__manifest_print(m, &text) == MTP_OK);
    FUZZ_CHECK(mtp__manifest_parse(text, strlen(text), "again", &again) == MTP_OK);
    check_same(m, again);
    free(text);
    mtp__manifest_free(again);
    mtp__manifest_free(m);
    return 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    (void)mtp_fuzz_accepts(data, size);
    return 0;
}
