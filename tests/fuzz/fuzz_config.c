/* Protects: whatever the bytes, a drafter's config.json is refused, or gives a geometry that the kernels can compute
 * with and whose sizes do not overflow. */
#include "fuzz.h"

#include "formats/json.h"
#include "model/config.h"

static void check_geometry(const mtp_drafter_config *config)
{
    FUZZ_CHECK(config->vocab_size > 0 && config->hidden_size > 0 && config->backbone_hidden_size > 0);
    FUZZ_CHECK(config->num_layers > 0 && config->layer_types && config->num_heads > 0 && config->sliding_window > 0);
    FUZZ_CHECK(config->rms_norm_eps > 0);
    for (int64_t l = 0; l < config->num_layers; l++) {
        const mtp_layer_geometry *geometry = &config->geometry[config->layer_types[l]];
        FUZZ_CHECK(geometry->head_dim >= 16 && geometry->head_dim <= 512 && geometry->head_dim % 2 == 0);
        FUZZ_CHECK(geometry->num_kv_heads > 0 && config->num_heads % geometry->num_kv_heads == 0);
        FUZZ_CHECK(geometry->rope_theta > 0);
        FUZZ_CHECK(config->num_heads <= INT64_MAX / geometry->head_dim);
    }
    if (!config->ordered) return;
    FUZZ_CHECK(config->num_centroids > 0 && config->vocab_size % config->num_centroids == 0);
    FUZZ_CHECK(config->centroid_top_k > 0 && config->centroid_top_k <= config->num_centroids);
}

int mtp_fuzz_accepts(const uint8_t *data, size_t size)
{
    json_t *value;
    mtp_drafter_config config;
    if (mtp__json_parse((const char *)data, size, "config.json", 1, &value) != MTP_OK) return 0;
    const mtp_status status = mtp__drafter_config_parse(value, "config.json", &config);
    json_decref(value);
    if (status != MTP_OK) return 0;
    check_geometry(&config);
    mtp_drafter_config_free(&config);
    return 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    (void)mtp_fuzz_accepts(data, size);
    return 0;
}
