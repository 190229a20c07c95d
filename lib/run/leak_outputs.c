#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "run/leak.h"

static const size_t LOGITS_BUDGET = (size_t)64 << 20;

mtp_status mtp__leak_outputs_create(const mtp_drafter_config *config, int32_t K, int64_t num_rows,
                                    mtp__leak_outputs *outputs)
{
    const size_t places = (size_t)K * (size_t)num_rows;
    const int64_t per_centroid = config->ordered ? config->vocab_size / config->num_centroids : 0;
    *outputs = (mtp__leak_outputs){
        .num_rows = num_rows,
        .K = K,
        .hidden_size = (size_t)config->hidden_size,
        .state_size = (size_t)config->backbone_hidden_size,
        .selected_size = (size_t)(config->ordered ? config->centroid_top_k : 0),
        .logits_size = (size_t)(config->ordered ? config->centroid_top_k * per_centroid : config->vocab_size)};
    if (outputs->logits_size > LOGITS_BUDGET / sizeof(float) / places)
        outputs->logits_size = outputs->selected_size = 0;
    mtp__step_outputs *arrays = &outputs->arrays;
    arrays->argmax = calloc(places, sizeof *arrays->argmax);
    arrays->loss = calloc(places, sizeof *arrays->loss);
    arrays->centroid_loss = calloc(places, sizeof *arrays->centroid_loss);
    arrays->miss = calloc(places, sizeof *arrays->miss);
    arrays->hidden = calloc(places, outputs->hidden_size * sizeof *arrays->hidden);
    arrays->state = calloc(places, outputs->state_size * sizeof *arrays->state);
    if (outputs->selected_size) arrays->selected = calloc(places, outputs->selected_size * sizeof *arrays->selected);
    if (outputs->logits_size) arrays->logits = calloc(places, outputs->logits_size * sizeof *arrays->logits);
    if (arrays->argmax && arrays->loss && arrays->centroid_loss && arrays->miss && arrays->hidden && arrays->state &&
        (arrays->selected || !outputs->selected_size) && (arrays->logits || !outputs->logits_size))
        return MTP_OK;
    mtp__leak_outputs_free(outputs);
    return MTP_FAIL(MTP_E_MEMORY, "out of memory for the outputs of %lld rows of %d draft steps; try fewer rows",
                    (long long)num_rows, K);
}

void mtp__leak_outputs_free(mtp__leak_outputs *outputs)
{
    free(outputs->arrays.argmax);
    free(outputs->arrays.loss);
    free(outputs->arrays.centroid_loss);
    free(outputs->arrays.miss);
    free(outputs->arrays.hidden);
    free(outputs->arrays.state);
    free(outputs->arrays.selected);
    free(outputs->arrays.logits);
    *outputs = (mtp__leak_outputs){0};
}

/* One kind of output of both runs. */
typedef struct output_pair {
    const char *name;
    const void *a, *b;
    size_t bytes;    /* of a row and step */
    bool continuous; /* small differences of the input make small differences of it */
} output_pair;

static bool near(const float *a, const float *b, size_t count, double tolerance)
{
    for (size_t i = 0; i < count; i++) {
        const double scale = fmax(1, fmax(fabs((double)a[i]), fabs((double)b[i])));
        if (!(fabs((double)a[i] - (double)b[i]) <= tolerance * scale)) return false;
    }
    return true;
}

bool mtp__leak_same(const mtp__leak_outputs *a, int64_t row_a, const mtp__leak_outputs *b, int64_t row_b,
                    double tolerance, int32_t *step, const char **output)
{
    const mtp__step_outputs *x = &a->arrays, *y = &b->arrays;
    const bool logits = x->logits && y->logits;
    const output_pair pairs[] = {
        {"hidden", x->hidden, y->hidden, a->hidden_size * sizeof(float), true},
        {"state", x->state, y->state, a->state_size * sizeof(float), true},
        {"selected centroids", x->selected, y->selected,
         x->selected && y->selected ? a->selected_size * sizeof(int32_t) : 0, false},
        {"logits", x->logits, y->logits, logits ? a->logits_size * sizeof(float) : 0, false},
        {"argmax", x->argmax, y->argmax, sizeof(int32_t), false},
        {"centroid_miss", x->miss, y->miss, 1, false},
        {"loss", x->loss, y->loss, sizeof(float), true},
        {"centroid loss", x->centroid_loss, y->centroid_loss, sizeof(float), true},
    };
    for (int32_t k = 0; k < a->K; k++) {
        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
            const output_pair *pair = &pairs[i];
            if (pair->bytes == 0 || (tolerance > 0 && !pair->continuous)) continue;
            const void *of_a = (const char *)pair->a + (size_t)(k * a->num_rows + row_a) * pair->bytes;
            const void *of_b = (const char *)pair->b + (size_t)(k * b->num_rows + row_b) * pair->bytes;
            if (tolerance > 0 ? near(of_a, of_b, pair->bytes / sizeof(float), tolerance)
                              : memcmp(of_a, of_b, pair->bytes) == 0)
                continue;
            *step = k;
            *output = pair->name;
            return false;
        }
    }
    return true;
}
