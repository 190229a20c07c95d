/* Protects: after the first step, kernels, model and optimizer allocate nothing. Every allocation function of libc is
 * replaced here by one that counts. */
#include "fixture.h"

#include <stdatomic.h>

#include "run/trained.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define INTERPOSED 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define INTERPOSED 0
#endif
#endif
#ifndef INTERPOSED
#define INTERPOSED 1
#endif

static atomic_long allocations;

#if INTERPOSED
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *old, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);

void *malloc(size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_realloc(old, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_memalign(alignment, size);
}

int posix_memalign(void **memory, size_t alignment, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    *memory = __libc_memalign(alignment, size);
    return *memory ? 0 : 12;
}
#endif

static void count_after_first_step(const char *name, mtp_head_mode mode, mtp_feeding feeding)
{
    fixture f;
    mtp__step *step;
    mtp__optimizer *optimizer;
    mtp__step_sums sums[3];
    const mtp_adamw_config adamw = {.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .max_grad_norm = 1};
    fixture_open(&f, name, mode);
    f.config.feeding = feeding;
    mtp_drafter *drafter = fixture_drafter(&f, "*.layer_scalar");
    mtp__optim_tensor *tensors = calloc((size_t)drafter->num_params, sizeof *tensors);
    const int64_t count = mtp__trained_tensors(drafter, tensors);
    assert_ok(mtp__optimizer_create(f.context, tensors, count, &adamw, NULL, &optimizer));
    assert_int_equal(optimizer->num_spans, 1); /* one launch, with the scalars frozen as they are by default */
    assert_ok(mtp__step_create(drafter, f.verifier, &f.config, MTP__STEP_TRAIN, &step));
    long before = 0;
    for (int i = 0; i < 3; i++) {
        mtp__optim_result result;
        if (i == 1) before = atomic_load(&allocations);
        assert_ok(mtp__step_run(step, f.batch, &f.rows, f.counts, sums, NULL));
        assert_ok(mtp__optimizer_step(optimizer, &(mtp__optim_update){.learning_rate = 1e-3}));
        assert_ok(mtp__optimizer_read(optimizer, &result));
        assert_false(result.skipped);
    }
    assert_int_equal(atomic_load(&allocations), before);
    mtp__step_free(step);
    mtp__optimizer_free(optimizer);
    free(tensors);
    mtp_drafter_free(drafter);
    fixture_close(&f);
}

static void steps_after_the_first_allocate_nothing(void **state)
{
    (void)state;
    if (!INTERPOSED) {
        print_message("the sanitizer owns malloc in this build\n");
        skip();
    }
    const long start = atomic_load(&allocations);
    void *volatile block = malloc(1);
    free(block);
    assert_true(atomic_load(&allocations) > start); /* the counter counts */
    count_after_first_step("e2b_masked", MTP_HEAD_MASKED, MTP_FEED_TEACHER);
    count_after_first_step("e2b_masked", MTP_HEAD_HIERARCHICAL, MTP_FEED_SELF);
    count_after_first_step("e2b_masked", MTP_HEAD_FLAT, MTP_FEED_TEACHER);
    count_after_first_step("m26b_flat", MTP_HEAD_FLAT, MTP_FEED_SELF);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(steps_after_the_first_allocate_nothing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
