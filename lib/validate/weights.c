/* What the verifier's directory says about how K is made, and what can be tested with it. */
#include <math.h>
#include <stdlib.h>

#include "validate/check.h"

/* Do K of position and of position + 1 look different? Turning a pair changes the RMS over the weights only where the
 * two weights of the pair differ: mean over pairs of sin(f)^2 times the relative difference of squared weights. */
static double power_of(const mtp__verifier_key *key)
{
    const int64_t pairs = key->width / 2;
    double sum = 0;
    for (int64_t i = 0; i < pairs; i++) {
        const double a = (double)key->norm[i] * (double)key->norm[i];
        const double b = (double)key->norm[i + pairs] * (double)key->norm[i + pairs];
        const double turned = sin(key->frequency[i]) * (a / b - b / a) / 2;
        sum += turned * turned;
    }
    return sqrt(sum) / (double)key->width;
}

static void note_key(mtp_check *check, int type)
{
    static const char *const tests[MTP_LAYER_TYPES] = {"positions of local K", "positions of global K"};
    mtp__verifier_key *key = &check->keys[type];
    if (!key->norm || !key->frequency) {
        mtp__check_note(check, tests[type], false, "the verifier's directory has no %s for this layer",
                        key->norm ? "rope_parameters that are known" : "k_norm weight");
        return;
    }
    for (int64_t i = 0; i < key->width; i++)
        if (fabsf(key->norm[i]) < 1e-6f) {
            free(key->norm);
            key->norm = NULL;
            mtp__check_note(check, tests[type], false, "a weight of k_norm is zero");
            return;
        }
    const double power = power_of(key);
    /* the noise of bf16 is 0.0006, see README */
    mtp__check_note(check, tests[type], power > 0.003,
                    power > 0.003 ? "k_norm's weights tell a turn by one position (%.2g)"
                                  : "k_norm's weights are too equal to tell a turn by one position (%.2g)",
                    power);
}

mtp_status mtp__check_read_weights(mtp_check *check)
{
    const mtp_verifier_config *config = mtp_verifier_get_config(check->verifier);
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        mtp__verifier_key *key = &check->keys[type];
        if (config->kv_layer[type] < 0) continue;
        key->heads = config->num_kv_heads[type];
        key->width = config->head_dim[type];
        if (!check->options.structure_only) MTP_TRY(mtp__verifier_key_read(check->verifier, (mtp_layer_type)type, key));
    }
    for (int type = 0; type < MTP_LAYER_TYPES && !check->options.structure_only; type++)
        if (check->keys[type].heads) note_key(check, type);
    return MTP_OK;
}
