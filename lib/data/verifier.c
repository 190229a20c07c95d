/* The verifier's directory: geometry from config.json, embedding table and final norm from its safetensors. */
#include "mtp/verifier.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/real.h"
#include "base/text.h"
#include "data/verifier_config.h"
#include "mtp/safetensors.h"

struct mtp_verifier {
    mtp_verifier_config config;
    char *directory;
    mtp_safetensors_index *tensors; /* keeps the map behind `embedding` */
    mtp_view embedding;
    void *copy; /* behind `embedding` when the file does not align it */
    float *norm;
};

/* Longer than any prefix with any suffix below. */
enum { MAX_NAME = 128 };
static const char *const prefixes[] = {"model.", "model.language_model.", "language_model.model."};

/* What quantisers put beside "<prefix>embed_tokens.weight" or instead of it. */
static const char *const packed_suffixes[] = {
    /* AWQ, GPTQ */
    ".qweight", ".qzeros", ".scales", ".g_idx",
    /* bitsandbytes */
    ".weight.absmax", ".weight.quant_map", ".SCB",
    /* compressed-tensors, ModelOpt, fp8 */
    ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_shape", ".weight_zero_point"};

static mtp_status refuse_quantised(const char *directory, const char *name, const char *what)
{
    return MTP_FAIL(MTP_E_DATA,
                    "%s: the embedding is quantised (%s%s); set embedding_from to the directory of the same model in "
                    "bf16, f16 or fp32",
                    directory, name, what);
}

/* The prefix that the names of this directory carry. */
static mtp_status find_prefix(const mtp_safetensors_index *tensors, const char *directory, const char **prefix)
{
    char name[MAX_NAME];
    *prefix = NULL;
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        for (size_t j = 0; j < sizeof packed_suffixes / sizeof *packed_suffixes; j++) {
            snprintf(name, sizeof name, "%sembed_tokens%s", prefixes[i], packed_suffixes[j]);
            if (mtp_safetensors_index_has(tensors, name)) return refuse_quantised(directory, name, " is there");
        }
        snprintf(name, sizeof name, "%sembed_tokens.weight", prefixes[i]);
        if (!mtp_safetensors_index_has(tensors, name)) continue;
        if (*prefix)
            return MTP_FAIL(MTP_E_DATA, "%s: two embedding tables, %sembed_tokens.weight and %s", directory, *prefix,
                            name);
        *prefix = prefixes[i];
    }
    if (!*prefix)
        return MTP_FAIL(MTP_E_NOT_FOUND, "%s: no embedding table: none of %sembed_tokens.weight, %s... and %s...",
                        directory, prefixes[0], prefixes[1], prefixes[2]);
    return MTP_OK;
}

static mtp_status open_embedding(mtp_verifier *verifier, const char *directory, const char *prefix)
{
    const mtp_verifier_config *config = &verifier->config;
    const mtp_safetensors_entry *table = NULL;
    char name[MAX_NAME], what[32];
    snprintf(name, sizeof name, "%sembed_tokens.weight", prefix);
    MTP_TRY(mtp_safetensors_index_get(verifier->tensors, name, &table));
    snprintf(what, sizeof what, " is %s", mtp_dtype_name(table->dtype));
    if (!mtp_dtype_is_compute(table->dtype)) return refuse_quantised(directory, name, what);
    if (table->rank != 2)
        return MTP_FAIL(MTP_E_DATA, "%s: %s has %d axes, expected [vocab_size, hidden_size]", directory, name,
                        (int)table->rank);
    if (table->shape[0] != config->vocab_size || table->shape[1] != config->hidden_size)
        return MTP_FAIL(MTP_E_DATA,
                        "%s: %s is [%lld, %lld], but %s/config.json says vocab_size %lld and hidden_size %lld",
                        directory, name, (long long)table->shape[0], (long long)table->shape[1], verifier->directory,
                        (long long)config->vocab_size, (long long)config->hidden_size);
    if (table->aligned) return mtp_safetensors_view(table, &verifier->embedding);
    verifier->copy = malloc(table->size);
    if (!verifier->copy) return MTP_FAIL(MTP_E_MEMORY, "%s: no memory for a copy of %s", directory, name);
    verifier->embedding = mtp_view_2d(verifier->copy, table->dtype, table->shape[0], table->shape[1]);
    return mtp_safetensors_copy(table, verifier->copy, table->size);
}

static mtp_status read_norm(mtp_verifier *verifier, const char *directory, const char *prefix)
{
    const int64_t width = verifier->config.hidden_size;
    const mtp_safetensors_entry *norm = NULL;
    char name[MAX_NAME];
    snprintf(name, sizeof name, "%snorm.weight", prefix);
    MTP_TRY(mtp_safetensors_index_get(verifier->tensors, name, &norm));
    if (!mtp_dtype_is_compute(norm->dtype) || norm->rank != 1 || norm->shape[0] != width)
        return MTP_FAIL(MTP_E_DATA, "%s: %s must be F32, BF16 or F16 [%lld], it is %s with %d axes and %lld values",
                        directory, name, (long long)width, mtp_dtype_name(norm->dtype), (int)norm->rank,
                        (long long)norm->count);
    verifier->norm = malloc((size_t)width * sizeof *verifier->norm);
    if (!verifier->norm) return MTP_FAIL(MTP_E_MEMORY, "%s: no memory for %s", directory, name);
    mtp__real_to_f32(verifier->norm, norm->data, norm->dtype, width);
    const int64_t bad = mtp__real_find_nonfinite(verifier->norm, width);
    if (bad >= 0) return MTP_FAIL(MTP_E_DATA, "%s: %s[%lld] is not finite", directory, name, (long long)bad);
    return MTP_OK;
}

static mtp_status open_tensors(mtp_verifier *verifier, const char *directory)
{
    const char *prefix = NULL;
    MTP_TRY(mtp_safetensors_index_open(directory, &verifier->tensors));
    MTP_TRY(find_prefix(verifier->tensors, directory, &prefix));
    MTP_TRY(open_embedding(verifier, directory, prefix));
    return read_norm(verifier, directory, prefix);
}

mtp_status mtp_verifier_open(const char *directory, const char *embedding_from, mtp_verifier **verifier)
{
    MTP_REQUIRE(directory && verifier);
    *verifier = NULL;
    mtp_verifier *made = calloc(1, sizeof *made);
    if (made) made->directory = strdup(directory);
    if (!made || !made->directory) {
        free(made);
        return MTP_FAIL(MTP_E_MEMORY, "verifier %s: out of memory", directory);
    }
    mtp_status status = mtp__verifier_config_read(directory, &made->config);
    if (status == MTP_OK) status = open_tensors(made, embedding_from ? embedding_from : directory);
    if (status != MTP_OK) {
        mtp_verifier_close(made);
        return mtp__fail_prefix(status, "verifier");
    }
    *verifier = made;
    return MTP_OK;
}

void mtp_verifier_close(mtp_verifier *verifier)
{
    if (!verifier) return;
    mtp_safetensors_index_close(verifier->tensors);
    free(verifier->copy);
    free(verifier->norm);
    free(verifier->directory);
    free(verifier);
}

const mtp_verifier_config *mtp_verifier_get_config(const mtp_verifier *verifier)
{
    return &verifier->config;
}

const char *mtp_verifier_directory(const mtp_verifier *verifier)
{
    return verifier->directory;
}

mtp_view mtp_verifier_embedding(const mtp_verifier *verifier)
{
    return verifier->embedding;
}

const float *mtp_verifier_norm(const mtp_verifier *verifier)
{
    return verifier->norm;
}

/* ---- does a drafter fit --------------------------------------------------------------------------------------- */

static void compare(mtp__text *list, const char *key, const char *type, int64_t drafter, int64_t verifier)
{
    if (drafter == verifier) return;
    mtp__text_add(list, "%s%s%s%s is %lld, the verifier's is %lld", list->length ? "; " : "", key, type ? " of " : "",
                  type ? type : "", (long long)drafter, (long long)verifier);
}

static void compare_type(mtp__text *list, const mtp_verifier_config *verifier, const mtp_drafter_config *drafter,
                         mtp_layer_type type)
{
    const char *name = mtp__layer_type_name(type);
    const mtp_layer_geometry *geometry = &drafter->geometry[type];
    if (verifier->kv_layer[type] < 0) {
        mtp__text_add(list, "%sthere are %s layers, the verifier has none that owns K/V", list->length ? "; " : "",
                      name);
        return;
    }
    compare(list, "head_dim", name, geometry->head_dim, verifier->head_dim[type]);
    compare(list, "num_key_value_heads", name, geometry->num_kv_heads, verifier->num_kv_heads[type]);
    if (type == MTP_LAYER_SLIDING)
        compare(list, "sliding_window", NULL, drafter->sliding_window, verifier->sliding_window);
}

mtp_status mtp__verifier_config_check(const mtp_verifier_config *config, const char *directory,
                                      const mtp_drafter_config *drafter)
{
    mtp__text list = {0};
    compare(&list, "backbone_hidden_size", NULL, drafter->backbone_hidden_size, config->hidden_size);
    compare(&list, "vocab_size", NULL, drafter->vocab_size, config->vocab_size);
    bool present[MTP_LAYER_TYPES] = {false};
    for (int64_t i = 0; i < drafter->num_layers; i++) present[drafter->layer_types[i]] = true;
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        if (present[type]) compare_type(&list, config, drafter, (mtp_layer_type)type);
    if (drafter->ordered && (drafter->num_centroids < 1 || config->vocab_size % drafter->num_centroids != 0))
        mtp__text_add(&list, "%snum_centroids %lld does not divide the verifier's vocabulary of %lld",
                      list.length ? "; " : "", (long long)drafter->num_centroids, (long long)config->vocab_size);
    mtp_status status = mtp__text_check(&list);
    if (status == MTP_OK && list.length)
        status =
            MTP_FAIL(MTP_E_DATA, "the drafter was not made for the verifier %s: %s", directory, mtp__text_get(&list));
    mtp__text_free(&list);
    return status;
}

mtp_status mtp_verifier_check_drafter(const mtp_verifier *verifier, const mtp_drafter_config *drafter)
{
    MTP_REQUIRE(verifier && drafter);
    return mtp__verifier_config_check(&verifier->config, verifier->directory, drafter);
}
