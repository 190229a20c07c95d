/* Protects: balanced k-means (exactly P tokens a centroid, better than chance, the same for the same seed), the leading
 * directions, and that mtp_init makes a drafter that loads, fits its verifier and passes the export validator. */
#include "edit.h"

#include <math.h>

#include "base/context.h"
#include "base/file.h"
#include "model/directions.h"
#include "model/drafter.h"
#include "model/init.h"
#include "model/kmeans.h"
#include "mtp/export.h"
#include "mtp/init.h"

#define SAMPLE MTP_TEST_DATA "/sample/"
#define VERIFIER SAMPLE "verifier"

static mtp_context *context;

static int setup(void **state)
{
    (void)state;
    const mtp_context_options options = {.num_threads = 2};
    return mtp_context_create(&options, &context) == MTP_OK ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    mtp_context_free(context);
    return 0;
}

/* ---- k-means -------------------------------------------------------------------------------------------------- */

/* Mean squared distance to the own mean over that to the mean of all, in double, from the ordering alone. */
static double inertia_of(const float *x, int64_t V, int64_t width, int64_t C, const int64_t *ordering)
{
    double own = 0, all = 0;
    const int64_t P = V / C;
    for (int64_t i = 0; i < width; i++) {
        double total = 0, squares = 0;
        for (int64_t c = 0; c < C; c++) {
            double mean = 0;
            for (int64_t p = 0; p < P; p++) mean += (double)x[ordering[c * P + p] * width + i] / (double)P;
            for (int64_t p = 0; p < P; p++) {
                const double value = (double)x[ordering[c * P + p] * width + i];
                own += (value - mean) * (value - mean);
                total += value;
                squares += value * value;
            }
        }
        all += squares - total * total / (double)V;
    }
    return own / all;
}

static void check_permutation(const int64_t *ordering, int64_t V, int64_t P)
{
    bool *seen = calloc((size_t)V, sizeof *seen);
    for (int64_t slot = 0; slot < V; slot++) {
        assert_in_range(ordering[slot], 0, V - 1);
        assert_false(seen[ordering[slot]]);
        seen[ordering[slot]] = true;
        if (slot % P) assert_true(ordering[slot] > ordering[slot - 1]); /* ascending within a centroid */
    }
    free(seen);
}

/* Well separated equal groups are found exactly. */
static void test_separated_groups(void **state)
{
    (void)state;
    enum { GROUPS = 4, EACH = 300, WIDTH = 5, V = GROUPS * EACH };
    test_rng rng = {3};
    float *x = malloc(sizeof(float) * V * WIDTH);
    for (int64_t row = 0; row < V; row++)
        for (int64_t i = 0; i < WIDTH; i++)
            x[row * WIDTH + i] = (i == row % GROUPS ? 10.0f : 0.0f) + 0.1f * test_uniform(&rng);
    mtp__kmeans_result result;
    bool found = false;
    for (uint64_t seed = 0; seed < 20 && !found;
         seed++) { /* Lloyd's iteration may start badly; balance makes it rare */
        assert_ok(mtp__balanced_kmeans(context, mtp_view_2d(x, MTP_F32, V, WIDTH), GROUPS, seed, &result));
        check_permutation(result.ordering, V, EACH);
        found = true;
        for (int64_t slot = 0; slot < V; slot++)
            found = found && result.ordering[slot] % GROUPS == result.ordering[slot / EACH * EACH] % GROUPS;
        free(result.ordering);
    }
    assert_true(found);
    free(x);
}

static void test_kmeans(void **state)
{
    (void)state;
    enum { V = 1500, WIDTH = 7, C = 50 }; /* more rows than a block, more centroids than candidates */
    test_rng rng = {5};
    float *x = malloc(sizeof(float) * V * WIDTH);
    test_fill(&rng, x, V * WIDTH, 1);
    for (int64_t row = 0; row < V; row++) x[row * WIDTH] *= 4; /* crowded: many rows want the same centroids */
    const mtp_view view = mtp_view_2d(x, MTP_F32, V, WIDTH);
    mtp__kmeans_result first, second, other;
    assert_ok(mtp__balanced_kmeans(context, view, C, 1, &first));
    assert_ok(mtp__balanced_kmeans(context, view, C, 1, &second));
    assert_ok(mtp__balanced_kmeans(context, view, C, 2, &other));
    check_permutation(first.ordering, V, V / C);
    check_permutation(other.ordering, V, V / C);
    assert_memory_equal(first.ordering, second.ordering, V * sizeof *first.ordering);
    assert_true(memcmp(first.ordering, other.ordering, V * sizeof *first.ordering) != 0);
    const double measured = inertia_of(x, V, WIDTH, C, first.ordering);
    assert_true(fabs(measured - first.inertia) < 1e-6);
    int64_t *by_id = malloc(V * sizeof *by_id);
    for (int64_t i = 0; i < V; i++) by_id[i] = i;
    assert_true(measured < 0.5 * inertia_of(x, V, WIDTH, C, by_id));
    free(by_id);
    free(first.ordering);
    free(second.ordering);
    free(other.ordering);

    /* a thread more or less changes nothing */
    mtp_context *single;
    const mtp_context_options options = {.num_threads = 1};
    assert_ok(mtp_context_create(&options, &single));
    assert_ok(mtp__balanced_kmeans(context, view, C, 1, &first));
    assert_ok(mtp__balanced_kmeans(single, view, C, 1, &second));
    assert_memory_equal(first.ordering, second.ordering, V * sizeof *first.ordering);
    free(first.ordering);
    free(second.ordering);
    mtp_context_free(single);
    free(x);
}

static void test_kmeans_edges(void **state)
{
    (void)state;
    float x[6 * 2] = {0}; /* all rows equal */
    mtp__kmeans_result result;
    for (int64_t C = 1; C <= 6; C++) {
        if (6 % C) continue;
        assert_ok(mtp__balanced_kmeans(context, mtp_view_2d(x, MTP_F32, 6, 2), C, 0, &result));
        check_permutation(result.ordering, 6, 6 / C);
        assert_true(result.inertia == 0);
        free(result.ordering);
    }
    assert_fails(mtp__balanced_kmeans(context, mtp_view_2d(x, MTP_F32, 6, 2), 4, 0, &result), MTP_E_ARGUMENT,
                 "% num_centroids");
}

/* ---- directions ----------------------------------------------------------------------------------------------- */

/* A table whose variance lies in known orthogonal directions: the strongest are found. */
static void test_directions(void **state)
{
    (void)state;
    enum { V = 1100, WIDTH = 24, COUNT = 3 };
    test_rng rng = {7};
    float *x = calloc(V * WIDTH, sizeof *x), q[COUNT * WIDTH];
    for (int64_t row = 0; row < V; row++)
        for (int64_t i = 0; i < WIDTH; i++) x[row * WIDTH + i] = (i % 8 == 2 ? 20.0f : 0.5f) * test_uniform(&rng);
    assert_ok(mtp__leading_directions(context, mtp_view_2d(x, MTP_F32, V, WIDTH), COUNT, 1, q));
    for (int a = 0; a < COUNT; a++) {
        double inside = 0;
        for (int i = 2; i < WIDTH; i += 8) inside += (double)q[a * WIDTH + i] * (double)q[a * WIDTH + i];
        assert_true(inside > 0.9999);
        for (int b = 0; b < COUNT; b++) {
            double dot = 0;
            for (int i = 0; i < WIDTH; i++) dot += (double)q[a * WIDTH + i] * (double)q[b * WIDTH + i];
            assert_true(fabs(dot - (a == b)) < 1e-5);
        }
    }
    /* lower rank than asked for, and more directions than the width: still finite, the first ones orthonormal */
    float wide[(WIDTH + 4) * WIDTH];
    for (int64_t i = 0; i < V * WIDTH; i++) x[i] = i % WIDTH == 0 ? 1.0f : 0.0f;
    assert_ok(mtp__leading_directions(context, mtp_view_2d(x, MTP_F32, V, WIDTH), WIDTH + 4, 1, wide));
    for (int a = 0; a < WIDTH + 4; a++) {
        double norm = 0;
        for (int i = 0; i < WIDTH; i++) norm += (double)wide[a * WIDTH + i] * (double)wide[a * WIDTH + i];
        assert_true(a < WIDTH ? fabs(norm - 1) < 1e-4 : norm > 0.1 && norm < 4);
    }
    free(x);
}

/* ---- mtp_init ------------------------------------------------------------------------------------------------- */

static void download(const mtp_drafter *drafter, const mtp__param *param, float *values)
{
    assert_ok(mtp__param_read(drafter, param, 0, values, param->count));
}

static void check_values(const char *directory)
{
    mtp_drafter *drafter;
    assert_ok(mtp_drafter_load(context, directory, &drafter));
    const mtp_drafter_config *config = &drafter->config;
    const int64_t V = config->vocab_size, H = config->hidden_size;
    float *embed = malloc((size_t)(V * H) * sizeof *embed), small[4096];
    double squares = 0, sum = 0;
    download(drafter, drafter->embed, embed);
    for (int64_t i = 0; i < V * H; i++) {
        squares += (double)embed[i] * (double)embed[i];
        sum += (double)embed[i];
    }
    const double n = (double)(V * H), deviation = sqrt(squares / n - sum / n * (sum / n));
    assert_true(fabs(deviation * sqrt((double)H) - 0.8) < 0.01);
    download(drafter, drafter->layers[0].q_norm, small);
    assert_true(small[0] == 0.5f && small[config->geometry[config->layer_types[0]].head_dim - 1] == 0.5f);
    download(drafter, drafter->layers[0].layer_scalar, small);
    assert_true(small[0] == 1.0f);
    download(drafter, drafter->final_norm, small);
    assert_true(small[H - 1] == 1.0f);
    float *matrix = malloc((size_t)drafter->pre_projection->count * sizeof *matrix);
    download(drafter, drafter->pre_projection, matrix);
    squares = 0;
    for (int64_t i = 0; i < drafter->pre_projection->count; i++) squares += (double)matrix[i] * (double)matrix[i];
    assert_true(fabs(squares / (double)H - 1) < 0.1); /* rows of length about 1 */
    free(matrix);
    if (config->ordered) {
        const int64_t C = config->num_centroids, P = V / C;
        float *centroids = malloc((size_t)(C * H) * sizeof *centroids);
        download(drafter, drafter->centroids, centroids);
        for (int64_t c = 0; c < C; c++)
            for (int64_t i = 0; i < H; i++) {
                double mean = 0, largest = 0;
                for (int64_t p = 0; p < P; p++) {
                    const double value = (double)embed[(c * P + p) * H + i];
                    mean += value / (double)P;
                    largest = fmax(largest, fabs(value));
                }
                /* both were rounded to bf16: half a unit in the 8th bit each */
                assert_true(fabs(mean - (double)centroids[c * H + i]) <= largest / 256);
            }
        free(centroids);
    }
    free(embed);
    mtp_drafter_free(drafter);
}

static void test_from_config(void **state)
{
    (void)state;
    const char *directory = test_dir(), *output = test_path("%s/a", directory), *again = test_path("%s/b", directory);
    mtp_init_result result;
    mtp_init_options options = {.verifier = VERIFIER,
                                .config = SAMPLE "drafter_init/config.json",
                                .output = output,
                                .seed = 11,
                                .num_speculative_tokens = 3};
    assert_ok(mtp_init(context, &options, &result));
    assert_true(result.cluster_inertia > 0 && result.cluster_inertia < 0.95);
    assert_int_equal(result.num_parameters, 439524);
    mtp_export_report report;
    assert_ok(mtp_validate_export(output, VERIFIER, &report));
    assert_int_equal(report.num_findings, 0);
    mtp_export_report_free(&report);
    check_values(output);
    assert_true(test_same_file(test_path("%s/tokenizer.json", output), VERIFIER "/tokenizer.json"));

    options.output = again;
    assert_ok(mtp_init(context, &options, NULL));
    assert_true(test_same_file(test_path("%s/model.safetensors", output), test_path("%s/model.safetensors", again)));
    options.seed = 12;
    assert_fails(mtp_init(context, &options, NULL), MTP_E_EXISTS, "--force");
    options.force = true;
    assert_ok(mtp_init(context, &options, NULL));
    assert_false(test_same_file(test_path("%s/model.safetensors", output), test_path("%s/model.safetensors", again)));
}

static void test_given_ordering(void **state)
{
    (void)state;
    const char *output = test_path("%s/out", test_dir());
    mtp_init_options options = {.verifier = VERIFIER,
                                .config = SAMPLE "drafter_init/config.json",
                                .token_ordering = SAMPLE "drafter_reference/model.safetensors",
                                .output = output,
                                .num_speculative_tokens = 3};
    mtp_init_result result;
    assert_ok(mtp_init(context, &options, &result));
    assert_true(result.cluster_inertia == 0);
    check_values(output);
    test_tensors made = test_tensors_open(test_path("%s/model.safetensors", output));
    test_tensors source = test_tensors_open(SAMPLE "drafter_reference/model.safetensors");
    assert_memory_equal(test_tensors_find(&made, "masked_embedding.token_ordering")->data,
                        test_tensors_find(&source, "masked_embedding.token_ordering")->data, 2048 * 8);
    test_tensors_close(&made);
    test_tensors_close(&source);
    options.force = true;
    options.token_ordering = SAMPLE "drafter_init_dense/model.safetensors";
    assert_fails(mtp_init(context, &options, NULL), MTP_E_NOT_FOUND, "token_ordering");
    options.config = SAMPLE "drafter_init_dense/config.json";
    assert_fails(mtp_init(context, &options, NULL), MTP_E_CONFIG, "the head is dense");
}

/* Without a config file: geometry from the verifier and the sizes asked for. */
static void test_from_sizes(void **state)
{
    (void)state;
    const char *output = test_path("%s/out", test_dir());
    mtp_init_options options = {.verifier = VERIFIER,
                                .geometry = {.hidden_size = 32, .num_hidden_layers = 2},
                                .output = output,
                                .num_speculative_tokens = 5};
    assert_ok(mtp_init(context, &options, NULL));
    mtp_drafter_config config;
    assert_ok(mtp_drafter_config_read(output, &config));
    assert_int_equal(config.hidden_size, 32);
    assert_int_equal(config.intermediate_size, 256);
    assert_int_equal(config.num_layers, 2);
    assert_int_equal(config.layer_types[0], MTP_LAYER_SLIDING);
    assert_int_equal(config.layer_types[1], MTP_LAYER_FULL);
    assert_int_equal(config.num_heads, 4);
    assert_int_equal(config.geometry[MTP_LAYER_FULL].num_kv_heads, 1);
    assert_int_equal(config.geometry[MTP_LAYER_FULL].head_dim, 64);
    assert_true(config.geometry[MTP_LAYER_FULL].proportional);
    assert_int_equal(config.max_position_embeddings, 1024);
    assert_false(config.ordered);
    mtp_drafter_config_free(&config);
    check_values(output);
    assert_ok(mtp_validate_export(output, VERIFIER, NULL));
    char *tokens = test_json_get(test_path("%s/generation_config.json", output), "num_assistant_tokens");
    assert_string_equal(tokens, "5");
    free(tokens);

    options.force = true;
    options.geometry.num_centroids = 32;
    options.geometry.centroid_intermediate_top_k = 4;
    assert_ok(mtp_init(context, &options, NULL));
    check_values(output);
    options.geometry.num_centroids = 33;
    assert_fails(mtp_init(context, &options, NULL), MTP_E_CONFIG, "does not divide the vocabulary");
    options.geometry.num_centroids = 0;
    assert_fails(mtp_init(context, &options, NULL), MTP_E_CONFIG, "needs num_centroids");
    options.config = SAMPLE "drafter_init/config.json";
    assert_fails(mtp_init(context, &options, NULL), MTP_E_CONFIG, "gives the geometry already");
}

static void test_refused(void **state)
{
    (void)state;
    const char *directory = test_dir(), *config = test_path("%s/config.json", directory);
    test_copy(SAMPLE "drafter_init/config.json", config);
    test_json_set(config, "backbone_hidden_size", "256");
    mtp_init_options options = {
        .verifier = VERIFIER, .config = config, .output = test_path("%s/out", directory), .num_speculative_tokens = 3};
    assert_fails(mtp_init(context, &options, NULL), MTP_E_DATA, "backbone_hidden_size");
    options.num_speculative_tokens = 0;
    assert_fails(mtp_init(context, &options, NULL), MTP_E_CONFIG, "num_speculative_tokens");
    options.num_speculative_tokens = 3;
    options.config = test_path("%s/none.json", directory);
    assert_fails(mtp_init(context, &options, NULL), MTP_E_NOT_FOUND, "none.json");
    options.config = config;
    options.verifier = directory;
    assert_fails(mtp_init(context, &options, NULL), MTP_E_DATA, "drafter");
    assert_false(mtp__path_exists(options.output));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_separated_groups), cmocka_unit_test(test_kmeans),
        cmocka_unit_test(test_kmeans_edges),     cmocka_unit_test(test_directions),
        cmocka_unit_test(test_from_config),      cmocka_unit_test(test_given_ordering),
        cmocka_unit_test(test_from_sizes),       cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
