/* Protects: whatever the bytes, a sample file is refused with a message or gives values that are inside the vocabulary
 * and finite, and no read or write leaves its buffer. The verifier: V 32, Hb 8, sliding 2 x 4, full 1 x 6, window 4. */
#include "fuzz.h"

#include <math.h>

#include "data/sample.h"

static const mtp_verifier_config verifier = {.vocab_size = 32,
                                             .hidden_size = 8,
                                             .num_layers = 2,
                                             .head_dim = {4, 6},
                                             .num_kv_heads = {2, 1},
                                             .kv_layer = {0, 1},
                                             .sliding_window = 4,
                                             .rms_norm_eps = 1e-6};

/* Buffers of exactly the size that is needed, so that a sanitizer sees a step beyond. */
static int read_field(const mtp__field *field, int64_t tokens, mtp__final_norm norm, mtp_dtype to)
{
    const int64_t values = field->heads * field->width;
    void *rows = malloc((size_t)(tokens * values) * mtp_dtype_size(to));
    float *scratch = malloc(2 * (size_t)values * sizeof *scratch);
    FUZZ_CHECK(rows && scratch);
    const int accepted = mtp__field_read(field, tokens, norm, norm.weight != NULL, to, rows, values, scratch) == MTP_OK;
    for (int64_t i = 0; accepted && to == MTP_F32 && i < tokens * values; i++)
        FUZZ_CHECK(isfinite(((const float *)rows)[i]));
    free(scratch);
    free(rows);
    return accepted;
}

static int read_integers(const mtp__sample *sample)
{
    const size_t tokens = (size_t)sample->num_tokens;
    int32_t *ids = malloc(tokens * sizeof *ids);
    uint8_t *mask = malloc(tokens);
    FUZZ_CHECK(ids && mask);
    int accepted = mtp__sample_read_ids(sample, verifier.vocab_size, sample->num_tokens, ids) == MTP_OK;
    for (size_t i = 0; accepted && i < tokens; i++) FUZZ_CHECK(ids[i] >= 0 && ids[i] < verifier.vocab_size);
    if (sample->loss_mask && mtp__sample_read_mask(sample, sample->num_tokens, mask) != MTP_OK) accepted = 0;
    for (size_t i = 0; accepted && sample->loss_mask && i < tokens; i++) FUZZ_CHECK(mask[i] <= 1);
    free(mask);
    free(ids);
    return accepted;
}

static int read_all(const mtp__sample *sample)
{
    static const float weight[8] = {1, 2, 3, 4, -1, 0.5f, 1, 1};
    const mtp__final_norm none = {.weight = NULL}, norm = {.weight = weight, .eps = 1e-6};
    const int64_t tokens = sample->num_tokens;
    const mtp__field *hidden = &sample->hidden;
    int accepted = read_integers(sample);
    accepted &= read_field(hidden, tokens, none, hidden->dtype) & read_field(hidden, tokens, none, MTP_F32);
    accepted &= read_field(hidden, tokens, norm, hidden->dtype) & read_field(hidden, tokens, norm, MTP_F32);
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        for (int part = 0; part < MTP__KV; part++) {
            const mtp__field *field = &sample->kv[type][part];
            accepted &= read_field(field, tokens, none, field->dtype) & read_field(field, tokens, none, MTP_F32);
        }
    return accepted;
}

int mtp_fuzz_accepts(const uint8_t *data, size_t size)
{
    mtp_safetensors *file;
    mtp__sample sample;
    if (mtp_safetensors_from_memory(data, size, "fuzz", &file) != MTP_OK) return 0;
    int accepted = mtp__sample_describe(file, &verifier, &sample) == MTP_OK;
    if (accepted) {
        FUZZ_CHECK(sample.num_tokens >= 1 && (size_t)sample.num_tokens < size);
        accepted = read_all(&sample);
    }
    mtp_safetensors_close(file);
    return accepted;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    (void)mtp_fuzz_accepts(data, size);
    return 0;
}
