/* Protects: how the cost of a training step grows (performance model): linear in draft steps and in supervised rows, in
 * nothing that is not supervised, in the vocabulary only with a dense head, in packed documents as their sum, and for
 * what follows from a token alone once a token.
 *
 * Cost is the multiply-adds that the step hands to BLAS, padding included, counted where it calls it: products are
 * where the time goes, and the count is the same on every machine. */
#include <cblas.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "model/step.h"
#include "support.h"
#include "synthetic.h"

static _Atomic int64_t multiply_adds;

#define COUNTED(type, name)                                                                                      \
    void __real_##name(enum CBLAS_ORDER order, enum CBLAS_TRANSPOSE op_a, enum CBLAS_TRANSPOSE op_b, blasint m,  \
                       blasint n, blasint k, type alpha, const type *a, blasint lda, const type *b, blasint ldb, \
                       type beta, type *c, blasint ldc);                                                         \
    void __wrap_##name(enum CBLAS_ORDER order, enum CBLAS_TRANSPOSE op_a, enum CBLAS_TRANSPOSE op_b, blasint m,  \
                       blasint n, blasint k, type alpha, const type *a, blasint lda, const type *b, blasint ldb, \
                       type beta, type *c, blasint ldc);                                                         \
    void __wrap_##name(enum CBLAS_ORDER order, enum CBLAS_TRANSPOSE op_a, enum CBLAS_TRANSPOSE op_b, blasint m,  \
                       blasint n, blasint k, type alpha, const type *a, blasint lda, const type *b, blasint ldb, \
                       type beta, type *c, blasint ldc)                                                          \
    {                                                                                                            \
        atomic_fetch_add(&multiply_adds, (int64_t)m *n *k);                                                      \
        __real_##name(order, op_a, op_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                          \
    }
COUNTED(float, cblas_sgemm)
COUNTED(double, cblas_dgemm)

enum { H = 128, P = 128, WINDOW = 64, TOP_K = 8 };

/* A step of a small drafter over documents of equal length. A document of n tokens, all of them supervised, has n - 2
 * rows, with any number of draft steps. */
typedef struct work {
    mtp_head_mode head;
    int32_t K;
    int64_t documents, length;
    int64_t prompt; /* tokens at the start of each document that are not supervised */
    int64_t V;
    bool full_attention; /* in the last layer; the others see WINDOW tokens */
    int64_t Hb;
} work;

static const work usual = {.head = MTP_HEAD_MASKED, .K = 3, .documents = 1, .length = 386, .V = 8192, .Hb = 192};

static mtp_drafter_config make_config(const work *w)
{
    mtp_drafter_config config;
    assert_ok(synthetic_config("e2b", w->V, &config));
    config.backbone_hidden_size = w->Hb;
    config.hidden_size = H;
    config.intermediate_size = 256;
    config.geometry[MTP_LAYER_SLIDING].head_dim = 64;
    config.geometry[MTP_LAYER_FULL].head_dim = 128;
    config.sliding_window = WINDOW;
    config.centroid_top_k = TOP_K;
    if (!w->full_attention) config.layer_types[config.num_layers - 1] = MTP_LAYER_SLIDING;
    return config;
}

static void make_batch(const work *w, const mtp_drafter_config *config, mtp_batch *batch)
{
    const int64_t tokens = w->documents * w->length;
    const size_t documents = (size_t)w->documents;
    assert_ok(synthetic_batch(config, tokens, batch));
    free(batch->document_begin);
    free(batch->document_end);
    free(batch->document_sample);
    batch->num_documents = w->documents;
    batch->document_begin = calloc(documents, sizeof *batch->document_begin);
    batch->document_end = calloc(documents, sizeof *batch->document_end);
    batch->document_sample = calloc(documents, sizeof *batch->document_sample);
    for (int64_t t = 0; t < tokens; t++) {
        batch->document_ids[t] = (int32_t)(t / w->length);
        batch->loss_mask[t] = t % w->length >= w->prompt;
    }
    for (int64_t d = 0; d < w->documents; d++) {
        batch->document_begin[d] = (int32_t)(d * w->length);
        batch->document_end[d] = (int32_t)((d + 1) * w->length);
    }
}

/* Multiply-adds of a training step. */
static double cost_of(work w)
{
    const mtp_context_options options = {.num_threads = 2};
    const mtp_step_config step_config = {.num_speculative_steps = w.K,
                                         .step_weight_beta = 0.6,
                                         .centroid_weight = w.head == MTP_HEAD_MASKED ? 0.1 : 0,
                                         .rows_per_chunk = w.documents * w.length,
                                         .head_mode = w.head};
    const int64_t tokens = w.documents * w.length;
    mtp_drafter_config config = make_config(&w);
    mtp_context *context;
    mtp_verifier *verifier;
    mtp_drafter *drafter;
    mtp_batch batch;
    mtp__rows rows;
    mtp__step *step;
    mtp__step_sums sums[MTP_MAX_SPECULATIVE_STEPS];
    int64_t counts[MTP_MAX_SPECULATIVE_STEPS] = {0};
    make_batch(&w, &config, &batch);
    assert_ok(mtp_context_create(&options, &context));
    assert_ok(synthetic_verifier(test_dir(), &config, batch.token_ids, tokens, &verifier));
    assert_ok(synthetic_drafter(context, &config, &drafter));
    assert_ok(mtp__drafter_alloc_grads(drafter));
    assert_ok(mtp__rows_create(tokens, w.K, &rows));
    assert_ok(mtp__rows_build(&batch, MTP__ROWS_SUPERVISED, NULL, &rows));
    mtp__rows_count(&rows, counts);
    assert_ok(mtp__step_create(drafter, verifier, &step_config, MTP__STEP_TRAIN, &step));
    atomic_store(&multiply_adds, 0);
    assert_ok(mtp__step_run(step, &batch, &rows, counts, sums, NULL));
    const double cost = (double)atomic_load(&multiply_adds);
    mtp__step_free(step);
    mtp__rows_free(&rows);
    mtp_drafter_free(drafter);
    mtp_verifier_close(verifier);
    synthetic_batch_free(&batch);
    mtp_drafter_config_free(&config);
    mtp_context_free(context);
    return cost;
}

static void assert_between(const char *what, double value, double least, double most)
{
    if (!(value >= least && value <= most)) fail_msg("%s: %g, wanted %g to %g", what, value, least, most);
}

static void draft_steps(void **state)
{
    (void)state;
    work w = usual;
    double cost[3];
    for (int i = 0; i < 3; i++) {
        w.K = 3 * (i + 1);
        cost[i] = cost_of(w);
    }
    assert_between("K 6 against 3", cost[1] / cost[0], 1.9, 2.1);
    assert_between("K 9 - 6 against 6 - 3", (cost[2] - cost[1]) / (cost[1] - cost[0]), 0.97, 1.03);
}

/* The width of the verifier is in three products a draft step: the state half of the pre-projection (its output, its
 * weight's gradient, and its state's but for the first step) and the whole post-projection (not after the last step).
 * The token half (its output, its weight's gradient) is there once a token, whatever the draft steps: 386 tokens of the
 * 384 rows but for the first one and the last. */
static void verifier_width(void **state)
{
    (void)state;
    for (int32_t K = 1; K <= 7; K += 3) {
        work narrow = usual, wide = usual;
        narrow.K = wide.K = K;
        narrow.head = wide.head = MTP_HEAD_FLAT; /* the padding of the other heads follows what they select */
        narrow.Hb = 768;                         /* factors so large that rows are not padded */
        wide.Hb = 2 * narrow.Hb;
        const double products = 2.0 * K + (K - 1) + 3.0 * (K - 1) + 2;
        const double width = (double)(wide.Hb - narrow.Hb) * H * 384;
        assert_between("products as wide as the verifier", (cost_of(wide) - cost_of(narrow)) / width, 0.99 * products,
                       1.01 * products);
    }
}

/* Beyond the window a row costs the same wherever it stands. */
static void supervised_rows(void **state)
{
    (void)state;
    work w = usual;
    double cost[3];
    for (int i = 0; i < 3; i++) {
        w.length = 2 + (384LL << i);
        cost[i] = cost_of(w);
    }
    assert_between("768 rows against 384", cost[1] / cost[0], 1.8, 2.1);
    assert_between("1536 - 768 rows against 768 - 384", (cost[2] - cost[1]) / (cost[1] - cost[0]), 1.9, 2.1);
}

/* A prompt costs its reading, nothing here: 256 supervised tokens after 130 others and after 1794. */
static void prompts(void **state)
{
    (void)state;
    work near = usual, far = usual;
    near.prompt = near.length - 256;
    far.length = 2050;
    far.prompt = far.length - 256;
    assert_between("a long prompt against a short one", cost_of(far) / cost_of(near), 0.97, 1.03);
}

/* With as many candidates as before, twice the tokens add the scores of the centroids (three products: scores, and the
 * gradients of both factors) and some padding: there are twice as many groups of rows, one a centroid, each filled up
 * to whole blocks. With a dense head the same step costs nearly twice as much. */
static void vocabulary_with_centroids(void **state)
{
    (void)state;
    work few = usual;
    few.K = 1;
    few.length = 2 + 3072;
    work many = few;
    many.V = 2 * few.V;
    const double scores = 3 * 3072.0 * H * (double)((many.V - few.V) / P);
    assert_between("twice the vocabulary", (cost_of(many) - scores) / cost_of(few), 0.97, 1.1);
}

static void vocabulary_of_a_dense_head(void **state)
{
    (void)state;
    work w = usual;
    double cost[3];
    w.head = MTP_HEAD_FLAT;
    for (int i = 0; i < 3; i++) {
        w.V = 8192LL << i;
        cost[i] = cost_of(w);
    }
    assert_between("V 32768 - 16384 against 16384 - 8192", (cost[2] - cost[1]) / (cost[1] - cost[0]), 1.98, 2.02);
}

/* Full attention costs the square of a document, so four short ones must not cost what one long one does. */
static void packed_documents(void **state)
{
    (void)state;
    work one = usual, packed = usual, joined = usual;
    one.full_attention = packed.full_attention = joined.full_attention = true;
    one.length = 514;
    packed.length = one.length;
    packed.documents = 4;
    joined.length = 4 * one.length;
    const double alone = cost_of(one), together = cost_of(packed);
    assert_between("four documents against one, four times", together / (4 * alone), 0.85, 1.03);
    assert_between("one document of the same length", cost_of(joined) / together, 1.05, 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(draft_steps),
        cmocka_unit_test(verifier_width),
        cmocka_unit_test(supervised_rows),
        cmocka_unit_test(prompts),
        cmocka_unit_test(vocabulary_with_centroids),
        cmocka_unit_test(vocabulary_of_a_dense_head),
        cmocka_unit_test(packed_documents),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
