/* Protects: that a drafter's weights are read exactly, refused with the whole list of what is wrong, and written back
 * byte for byte when nothing was trained; which parameters are trained; where gradients lie; the rotary frequencies. */
#include "edit.h"

#include <math.h>

#include "base/context.h"
#include "base/real.h"
#include "model/drafter.h"
#include "model/weights.h"
#include "mtp/drafter.h"

#define SAMPLE MTP_TEST_DATA "/sample/"

static mtp_context *context;

static int setup(void **state)
{
    (void)state;
    const mtp_context_options options = {.device = getenv("MTP_TEST_DEVICE"), .num_threads = 1};
    return mtp_context_create(&options, &context) == MTP_OK ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    mtp_context_free(context);
    return 0;
}

/* A copy of drafter_init opened for change, and written. */
static test_tensors edit(const char *directory)
{
    return test_tensors_open(test_path("%s/model.safetensors", directory));
}

static void finish(test_tensors *tensors, const char *directory)
{
    test_tensors_write(tensors, test_path("%s/model.safetensors", directory));
    test_tensors_close(tensors);
}

/* The rows of the file in the order in which memory has them. */
static void bring_rows_in_order(const mtp_drafter *drafter, const mtp__param *param, float *values)
{
    const size_t row = (size_t)param->shape[1];
    float *file = malloc((size_t)param->count * sizeof *file);
    memcpy(file, values, (size_t)param->count * sizeof *file);
    for (int64_t i = 0; i < param->shape[0]; i++)
        memcpy(values + (size_t)i * row, file + (size_t)drafter->token_ordering[i] * row, row * sizeof *file);
    free(file);
}

static void test_values(void **state)
{
    (void)state;
    mtp_drafter *drafter;
    assert_ok(mtp_drafter_load(context, SAMPLE "drafter_reference", &drafter));
    test_tensors file = test_tensors_open(SAMPLE "drafter_reference/model.safetensors");
    assert_int_equal(mtp_drafter_num_parameters(drafter), 49);
    assert_int_equal(file.count, 50);
    int64_t values = 0;
    for (int64_t i = 0; i < 49; i++) {
        const mtp_parameter param = mtp_drafter_parameter(drafter, i);
        const mtp_safetensors_source *source = test_tensors_find(&file, param.name);
        const mtp__param *internal = &drafter->params[i];
        float *expected = malloc((size_t)internal->count * sizeof *expected),
              *got = malloc((size_t)internal->count * 4);
        mtp__real_to_f32(expected, source->data, source->dtype, internal->count);
        assert_int_equal(internal->by_slot, internal == drafter->embed);
        if (internal->by_slot) bring_rows_in_order(drafter, internal, expected);
        assert_ok(context->ops->download(context->device, got, param.value, (size_t)internal->count * sizeof *got));
        assert_memory_equal(got, expected, (size_t)internal->count * sizeof *got);
        assert_int_equal(param.stored, MTP_BF16);
        assert_true(param.trained);
        assert_int_equal((uintptr_t)param.value % 64, 0);
        if (i > 0) assert_true(strcmp(drafter->params[i - 1].name, param.name) < 0);
        values += internal->count;
        free(expected);
        free(got);
    }
    assert_int_equal(mtp_drafter_num_trained(drafter), values);
    const int64_t *ordering = test_tensors_find(&file, "masked_embedding.token_ordering")->data;
    assert_memory_equal(drafter->token_ordering, ordering, 2048 * sizeof *ordering);
    int32_t order[2048], slot_of[2048];
    assert_ok(context->ops->download(context->device, order, drafter->order, sizeof order));
    assert_ok(context->ops->download(context->device, slot_of, drafter->slot_of, sizeof slot_of));
    for (int i = 0; i < 2048; i++) {
        assert_int_equal(order[i], ordering[i]);
        assert_int_equal(slot_of[order[i]], i);
    }
    assert_string_equal(drafter->layers[3].q_proj->name, "model.layers.3.self_attn.q_proj.weight");
    assert_int_equal(drafter->layers[3].q_proj->shape[0], 4 * 64);
    assert_int_equal(mtp__param_value(drafter->embed).shape[1], 64);
    assert_null(mtp__param_grad(drafter->embed).data);
    test_tensors_close(&file);
    mtp_drafter_free(drafter);
}

/* Nothing trained: the file comes back as the Python package wrote it. */
static void test_identical(void **state)
{
    (void)state;
    static const char *const names[] = {"drafter_init", "drafter_init_dense", "drafter_reference"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        mtp_drafter *drafter;
        const char *path = test_path("%s/out.safetensors", test_dir());
        assert_ok(mtp_drafter_load(context, test_path(SAMPLE "%s", names[i]), &drafter));
        assert_ok(mtp_drafter_save_weights(drafter, path));
        assert_true(test_same_file(path, test_path(SAMPLE "%s/model.safetensors", names[i])));
        mtp_drafter_free(drafter);
    }
}

/* fp32 and f16 sources: the same values, written as BF16. */
static void test_other_dtypes(void **state)
{
    (void)state;
    const char *directory = test_model_copy("drafter_init"), *path = test_path("%s/out.safetensors", directory);
    test_tensors file = edit(directory);
    for (size_t i = 0; i < file.count; i++)
        if (file.items[i].dtype == MTP_BF16) test_tensors_convert(&file, file.items[i].name, MTP_F32);
    test_tensors_convert(&file, "model.layers.1.layer_scalar", MTP_F16); /* 1.0 in both */
    finish(&file, directory);
    mtp_drafter *drafter;
    assert_ok(mtp_drafter_load(context, directory, &drafter));
    assert_int_equal(drafter->embed->stored, MTP_F32);
    assert_int_equal(drafter->layers[1].layer_scalar->stored, MTP_F16);
    assert_ok(mtp_drafter_save_weights(drafter, path));
    assert_true(test_same_file(path, SAMPLE "drafter_init/model.safetensors"));
    mtp_drafter_free(drafter);
}

static void test_all_problems_at_once(void **state)
{
    (void)state;
    const char *directory = test_model_copy("drafter_init");
    test_tensors file = edit(directory);
    test_tensors_drop(&file, "model.layers.2.layer_scalar");
    test_tensors_drop(&file, "model.norm.weight");
    test_tensors_put(&file, "lm_head.weight", MTP_BF16, 2, (int64_t[]){2048, 64});
    test_tensors_put(&file, "model.layers.0.self_attn.k_proj.weight", MTP_BF16, 2, (int64_t[]){64, 64});
    test_tensors_put(&file, "extra", MTP_BF16, 1, (int64_t[]){1});
    test_tensors_put(&file, "post_projection.weight", MTP_BF16, 2, (int64_t[]){64, 128});
    test_tensors_put(&file, "model.layers.1.layer_scalar", MTP_BF16, 0, NULL);
    test_tensors_put(&file, "masked_embedding.token_ordering", MTP_I32, 1, (int64_t[]){2048});
    test_tensors_put(&file, "model.layers.3.self_attn.q_norm.weight", MTP_F64, 1, (int64_t[]){64});
    finish(&file, directory);
    mtp_drafter *drafter;
    assert_fails(mtp_drafter_load(context, directory, &drafter), MTP_E_DATA, "does not fit its config.json");
    assert_null(drafter);
    static const char *const said[] = {
        "model.layers.2.layer_scalar is missing",
        "model.norm.weight is missing",
        "unknown tensor lm_head.weight: the head of a drafter is its model.embed_tokens.weight",
        "unknown tensor model.layers.0.self_attn.k_proj.weight: a drafter has no keys",
        "unknown tensor extra",
        "post_projection.weight has shape [64, 128], expected [128, 64]",
        "model.layers.1.layer_scalar has shape [], expected [1]",
        "token_ordering is I32, expected I64",
        "q_norm.weight is F64, expected F32, BF16 or F16",
    };
    for (size_t i = 0; i < sizeof said / sizeof *said; i++)
        if (!strstr(mtp_last_error()->message, said[i]))
            fail_msg("does not say \"%s\": %s", said[i], mtp_last_error()->message);
}

static void test_dense_and_ordered(void **state)
{
    (void)state;
    mtp_drafter *drafter;
    const char *directory = test_model_copy("drafter_init_dense");
    assert_ok(mtp_drafter_load(context, directory, &drafter));
    assert_int_equal(mtp_drafter_num_parameters(drafter), 48);
    assert_null(drafter->centroids);
    assert_null(drafter->order);
    mtp_drafter_free(drafter);
    test_json_set(test_path("%s/config.json", directory), "use_ordered_embeddings", "true");
    assert_fails(mtp_drafter_load(context, directory, &drafter), MTP_E_DATA, "centroids.weight is missing");
    directory = test_model_copy("drafter_init");
    test_json_set(test_path("%s/config.json", directory), "use_ordered_embeddings", "false");
    assert_fails(mtp_drafter_load(context, directory, &drafter), MTP_E_DATA, "use_ordered_embeddings is false");
}

static void test_bad_values(void **state)
{
    (void)state;
    mtp_drafter *drafter;
    const char *directory = test_model_copy("drafter_init");
    test_tensors file = edit(directory);
    uint16_t *norm = test_tensors_put(&file, "model.norm.weight", MTP_BF16, 1, (int64_t[]){64});
    norm[17] = 0x7fc0;
    finish(&file, directory);
    assert_fails(mtp_drafter_load(context, directory, &drafter), MTP_E_DATA,
                 "model.norm.weight holds nan at element 17");
    file = edit(directory);
    norm = test_tensors_put(&file, "model.norm.weight", MTP_BF16, 1, (int64_t[]){64});
    norm[63] = 0xff80;
    finish(&file, directory);
    assert_fails(mtp_drafter_load(context, directory, &drafter), MTP_E_DATA,
                 "model.norm.weight holds -inf at element 63");

    directory = test_model_copy("drafter_init");
    file = edit(directory);
    int64_t *ordering = test_tensors_put(&file, "masked_embedding.token_ordering", MTP_I64, 1, (int64_t[]){2048});
    for (int i = 0; i < 2048; i++) ordering[i] = i;
    ordering[5] = 4;
    finish(&file, directory);
    assert_fails(mtp_drafter_load(context, directory, &drafter), MTP_E_DATA, "token 4 stands in slot 5");
    file = edit(directory);
    ordering = test_tensors_put(&file, "masked_embedding.token_ordering", MTP_I64, 1, (int64_t[]){2048});
    for (int i = 0; i < 2048; i++) ordering[i] = i;
    ordering[7] = INT64_C(1) << 32;
    finish(&file, directory);
    assert_fails(mtp_drafter_load(context, directory, &drafter), MTP_E_DATA, "slot 7 holds token 4294967296");
    assert_int_equal(remove(test_path("%s/model.safetensors", directory)), 0);
    assert_fails(mtp_drafter_load(context, directory, &drafter), MTP_E_NOT_FOUND, "model.safetensors");
}

/* A diverged weight is not written over a good file. */
static void test_save_refuses_nan(void **state)
{
    (void)state;
    mtp_drafter *drafter;
    const char *path = test_path("%s/out.safetensors", test_dir());
    const float bad = NAN;
    assert_ok(mtp_drafter_load(context, SAMPLE "drafter_init", &drafter));
    assert_ok(mtp_drafter_save_weights(drafter, path));
    assert_ok(mtp__param_write(drafter, drafter->pre_projection, 9, &bad, 1));
    assert_fails(mtp_drafter_save_weights(drafter, path), MTP_E_DATA, "pre_projection.weight holds nan at element 9");
    assert_true(test_same_file(path, SAMPLE "drafter_init/model.safetensors"));
    mtp_drafter_free(drafter);
}

static void test_freeze(void **state)
{
    (void)state;
    mtp_drafter *drafter;
    assert_ok(mtp_drafter_load(context, SAMPLE "drafter_init", &drafter));
    const int64_t all = mtp_drafter_num_trained(drafter);
    assert_ok(mtp_drafter_freeze(drafter, "*.layer_scalar"));
    assert_int_equal(mtp_drafter_num_trained(drafter), all - 4);
    assert_false(drafter->layers[0].layer_scalar->trained);
    assert_fails(mtp_drafter_freeze(drafter, "layer_scalar"), MTP_E_CONFIG, "model.layers.0.layer_scalar");
    assert_fails(mtp_drafter_freeze(drafter, "model.layers.9.*"), MTP_E_CONFIG, "\"model.layers.9.*\"");
    assert_ok(mtp_drafter_freeze(drafter, "model.layers.?.mlp.*"));
    assert_int_equal(mtp_drafter_num_trained(drafter), all - 4 - 4 * 3 * 64 * 256);
    assert_true(mtp__param_decays(drafter->embed));
    assert_false(mtp__param_decays(drafter->final_norm));
    assert_ok(mtp_drafter_freeze(drafter, "*embed_tokens*"));
    assert_false(mtp__param_decays(drafter->embed));
    assert_ok(mtp_drafter_freeze(drafter, "*"));
    assert_fails(mtp__drafter_alloc_grads(drafter), MTP_E_CONFIG, "every parameter is frozen");
    mtp_drafter_free(drafter);
}

/* One block, frozen ones left out, in the order in which a backward pass finishes them: matrices, then vectors. */
static void test_grads(void **state)
{
    (void)state;
    mtp_drafter *drafter;
    assert_ok(mtp_drafter_load(context, SAMPLE "drafter_init", &drafter));
    assert_ok(mtp_drafter_freeze(drafter, "*.layer_scalar"));
    assert_ok(mtp__drafter_alloc_grads(drafter));
    const float *end = drafter->grads;
    const mtp__param *const order[] = {drafter->embed,
                                       drafter->centroids,
                                       drafter->post_projection,
                                       drafter->layers[3].down_proj,
                                       drafter->layers[3].q_proj,
                                       drafter->layers[0].down_proj,
                                       drafter->pre_projection,
                                       drafter->final_norm,
                                       drafter->layers[3].input_norm,
                                       drafter->layers[0].post_feedforward_norm};
    assert_ptr_equal(drafter->embed->grad, drafter->grads);
    for (size_t i = 0; i < sizeof order / sizeof *order; i++) {
        assert_true(order[i]->grad >= end);
        assert_int_equal((uintptr_t)order[i]->grad % 64, 0);
        end = order[i]->grad + order[i]->count;
    }
    assert_true(end <= (float *)drafter->grads + drafter->num_grads);
    assert_true(drafter->num_grads >= mtp_drafter_num_trained(drafter));
    assert_true(drafter->num_grads < mtp_drafter_num_trained(drafter) + 16 * drafter->num_params);
    assert_null(drafter->layers[2].layer_scalar->grad);
    for (int64_t i = 0; i < drafter->num_params; i++) {
        const mtp__param *param = &drafter->params[i];
        float value = 1;
        if (!param->trained) continue;
        assert_non_null(param->grad);
        assert_ok(context->ops->download(context->device, &value, param->grad + param->count - 1, sizeof value));
        assert_true(value == 0);
        assert_int_equal(mtp__param_grad(param).rank, param->rank);
    }
    assert_fails(mtp__drafter_alloc_grads(drafter), MTP_E_ARGUMENT, "one trainer");
    assert_fails(mtp_drafter_freeze(drafter, "*"), MTP_E_ARGUMENT, "freeze before");
    mtp_drafter_free(drafter);
}

static void test_inv_freq(void **state)
{
    (void)state;
    float f[256];
    mtp_layer_geometry sliding = {.head_dim = 256, .rope_theta = 1e4, .partial_rotary_factor = 1, .rope_factor = 1};
    mtp__inv_freq(&sliding, f);
    for (int i = 0; i < 128; i++) {
        const double exact = pow(1e4, -2.0 * i / 256);
        assert_true(fabs((double)f[i] - exact) <= 3e-7 * exact);
        assert_true(f[i] == 1.0f / powf(1e4f, (float)(2 * i) / 256.0f));
    }
    mtp_layer_geometry full = {
        .head_dim = 512, .rope_theta = 1e6, .partial_rotary_factor = 0.25, .rope_factor = 1, .proportional = true};
    mtp__inv_freq(&full, f);
    for (int i = 0; i < 256; i++) {
        const double exact = i < 64 ? pow(1e6, -2.0 * i / 512) : 0; /* the denominator stays the whole head width */
        assert_true(fabs((double)f[i] - exact) <= 3e-7 * exact);
    }
    full.rope_factor = 8;
    float scaled[256];
    mtp__inv_freq(&full, scaled);
    for (int i = 0; i < 256; i++) assert_true(scaled[i] == f[i] / 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_identical),
        cmocka_unit_test(test_other_dtypes),
        cmocka_unit_test(test_all_problems_at_once),
        cmocka_unit_test(test_dense_and_ordered),
        cmocka_unit_test(test_bad_values),
        cmocka_unit_test(test_save_refuses_nan),
        cmocka_unit_test(test_freeze),
        cmocka_unit_test(test_grads),
        cmocka_unit_test(test_inv_freq),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
