/* Protects: shares of the moments cover every value once, on any number of ranks, and lie in stretches of memory that
 * do not overlap; updated share by share the values are the same bits as updated at once, with the norm of all. */
#include "support.h"

#include "base/real.h"
#include "optim/share.h"

/* Four tensors in one block, the first two and the last two behind each other, a frozen one of 100 values between. */
enum { TENSORS = 4, BLOCK = 1024, MOST_RANKS = 20 };
static const int64_t begins[TENSORS] = {0, 304, 432, 768}, counts[TENSORS] = {300, 16, 330, 200};
static const char *const names[TENSORS] = {"a", "b", "c", "d"};

static void make(float *values, float *grads, mtp__optim_tensor tensors[TENSORS])
{
    for (int i = 0; i < TENSORS; i++)
        tensors[i] = (mtp__optim_tensor){.name = names[i],
                                         .value = mtp_view_1d(values + begins[i], MTP_F32, counts[i]),
                                         .grad = mtp_view_1d(grads + begins[i], MTP_F32, counts[i]),
                                         .place = begins[i],
                                         .decays = i != 1};
    tensors[0].value = mtp_view_2d(values, MTP_F32, 30, 10);
    tensors[0].grad = mtp_view_2d(grads, MTP_F32, 30, 10);
}

static void every_value_once(void **state)
{
    (void)state;
    static float values[BLOCK], grads[BLOCK];
    mtp__optim_tensor tensors[TENSORS], parts[TENSORS];
    make(values, grads, tensors);
    for (int64_t world = 1; world <= MOST_RANKS; world++) {
        int seen[BLOCK] = {0}, in_stretch[BLOCK] = {0};
        int64_t most = 0, behind = 0;
        for (int64_t rank = 0; rank < world; rank++) {
            const mtp__optim_rank own = {.rank = rank, .world_size = world};
            const int64_t num = mtp__optim_share(tensors, TENSORS, &own, parts);
            int64_t sum = 0;
            for (int64_t i = 0, next, count; i < num; i = next) {
                next = mtp__optim_neighbours(parts, num, i, &count);
                const int64_t begin = (const float *)parts[i].value.data - values;
                assert_true(count >= 1 && begin >= behind && begin % 16 == 0);
                behind = begin + count;
                for (int64_t j = 0; j < count; j++) in_stretch[begin + j]++;
            }
            for (int64_t i = 0; i < num; i++) {
                const int64_t at = (const float *)parts[i].value.data - values, n = mtp_view_count(parts[i].value);
                const mtp__optim_tensor *whole = NULL;
                for (int j = 0; j < TENSORS; j++)
                    if (strcmp(names[j], parts[i].name) == 0) whole = &tensors[j];
                assert_non_null(whole);
                assert_int_equal((const float *)whole->value.data + parts[i].first - values, at);
                assert_int_equal((const float *)parts[i].grad.data - grads, at);
                assert_int_equal(parts[i].place, at);
                assert_int_equal(whole->decays, parts[i].decays);
                for (int64_t j = 0; j < n; j++) seen[at + j]++;
                sum += n;
            }
            if (sum > most) most = sum;
        }
        for (int i = 0; i < TENSORS; i++)
            for (int64_t j = 0; j < counts[i]; j++) {
                assert_int_equal(seen[begins[i] + j], 1);
                assert_int_equal(in_stretch[begins[i] + j], 1);
            }
        assert_int_equal(seen[350] + in_stretch[350], 0); /* the frozen one */
        assert_true(most < 846 / world + 128);            /* equal, but for where they may be cut */
    }
}

/* Between the tensors is padding. */
static void clear_padding(float *x)
{
    for (int i = 0; i < BLOCK; i++)
        if ((i >= 300 && i < 304) || (i >= 762 && i < 768)) x[i] = 0;
}

/* Both kinds of master weights: the random numbers of the rounding belong to places, not to ranks. */
static void the_same_bits(void **state)
{
    (void)state;
    static float values[2][BLOCK], grads[2][BLOCK];
    static uint16_t rounded[2][BLOCK];
    const mtp_context_options context_options = {.num_threads = 2};
    const mtp_adamw_config config = {
        .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1, .max_grad_norm = 3};
    mtp_context *context = NULL;
    assert_ok(mtp_context_create(&context_options, &context));
    for (int64_t world = 2; world <= MOST_RANKS; world += 3) {
        mtp__optim_tensor whole[TENSORS], shared[TENSORS];
        mtp__optimizer *alone = NULL, *ranks[MOST_RANKS];
        test_rng rng = {(uint64_t)world};
        test_fill(&rng, values[0], BLOCK, 1.0f);
        clear_padding(values[0]);
        memcpy(values[1], values[0], sizeof values[0]);
        make(values[0], grads[0], whole);
        make(values[1], grads[1], shared);
        for (int i = 0; i < TENSORS && world % 2 == 0; i++) {
            const int64_t n = counts[i];
            mtp__real_from_f32(rounded[0] + begins[i], MTP_BF16, values[0] + begins[i], n);
            memcpy(rounded[1] + begins[i], rounded[0] + begins[i], (size_t)n * sizeof(uint16_t));
            whole[i].value = mtp_view_1d(rounded[0] + begins[i], MTP_BF16, n);
            shared[i].value = mtp_view_1d(rounded[1] + begins[i], MTP_BF16, n);
            whole[i].grad = mtp_view_1d(whole[i].grad.data, MTP_F32, n);
            shared[i].grad = mtp_view_1d(shared[i].grad.data, MTP_F32, n);
        }
        assert_ok(mtp__optimizer_create(context, whole, TENSORS, &config, NULL, &alone));
        size_t bytes = 0;
        for (int64_t rank = 0; rank < world; rank++) {
            const mtp__optim_rank own = {.rank = rank, .world_size = world};
            assert_ok(mtp__optimizer_create(context, shared, TENSORS, &config, &own, &ranks[rank]));
            bytes += ranks[rank]->moment_bytes;
        }
        assert_true(bytes == alone->moment_bytes);
        for (int step = 0; step < 4; step++) {
            const mtp__optim_update update = {.learning_rate = 1e-2};
            mtp__optim_result one, other;
            test_fill(&rng, grads[0], BLOCK, 0.5f);
            clear_padding(grads[0]);
            memcpy(grads[1], grads[0], sizeof grads[0]);
            assert_ok(mtp__optimizer_step(alone, &update));
            assert_ok(mtp__optimizer_read(alone, &one));
            for (int64_t rank = 0; rank < world; rank++) {
                assert_ok(mtp__optimizer_step(ranks[rank], &update));
                assert_ok(mtp__optimizer_read(ranks[rank], &other));
                assert_true(one.norm == other.norm && one.factor == other.factor && one.factor < 1);
            }
            assert_memory_equal(values[0], values[1], sizeof values[0]);
            assert_memory_equal(rounded[0], rounded[1], sizeof rounded[0]);
        }
        for (int64_t rank = 0; rank < world; rank++) mtp__optimizer_free(ranks[rank]);
        mtp__optimizer_free(alone);
    }
    mtp_context_free(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_value_once),
        cmocka_unit_test(the_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
