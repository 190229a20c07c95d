/* Protects: the learning rate of every step is the closed form of its schedule, from the first warm-up step to beyond
 * the last one. */
#include "support.h"

#include <math.h>

#include "optim/schedule.h"

static const double peak = 3e-4;

static mtp__schedule schedule(mtp_lr_scheduler type)
{
    return (mtp__schedule){.type = type,
                           .learning_rate = peak,
                           .min_lr_ratio = 0.1,
                           .warmup_steps = 10,
                           .decay_steps = 25,
                           .max_steps = 110};
}

static void near(double got, double want)
{
    if (fabs(got - want) > 1e-15) fail_msg("got %.17g, want %.17g", got, want);
}

static void warm_up_is_linear_and_learns_at_once(void **state)
{
    (void)state;
    for (int type = MTP_LR_CONSTANT; type <= MTP_LR_WSD; type++) {
        const mtp__schedule s = schedule((mtp_lr_scheduler)type);
        near(mtp__schedule_lr(&s, 0), peak / 10);
        near(mtp__schedule_lr(&s, 4), peak * 5 / 10);
        near(mtp__schedule_lr(&s, 9), peak);
        near(mtp__schedule_lr(&s, 10), peak);
    }
}

static void no_warm_up_starts_at_the_peak(void **state)
{
    (void)state;
    for (int type = MTP_LR_CONSTANT; type <= MTP_LR_WSD; type++) {
        mtp__schedule s = schedule((mtp_lr_scheduler)type);
        s.warmup_steps = 0;
        near(mtp__schedule_lr(&s, 0), peak);
    }
}

static void constant_stays(void **state)
{
    (void)state;
    const mtp__schedule s = schedule(MTP_LR_CONSTANT);
    near(mtp__schedule_lr(&s, 50), peak);
    near(mtp__schedule_lr(&s, 5000), peak);
}

static void linear_falls_to_the_minimum(void **state)
{
    (void)state;
    const mtp__schedule s = schedule(MTP_LR_LINEAR);
    near(mtp__schedule_lr(&s, 35), peak * (0.1 + 0.9 * 0.75));
    near(mtp__schedule_lr(&s, 60), peak * 0.55);
    near(mtp__schedule_lr(&s, 109), peak * (0.1 + 0.9 * 0.01));
    near(mtp__schedule_lr(&s, 110), peak * 0.1);
    near(mtp__schedule_lr(&s, 111), peak * 0.1);
}

static void cosine_is_half_way_in_the_middle(void **state)
{
    (void)state;
    const mtp__schedule s = schedule(MTP_LR_COSINE);
    near(mtp__schedule_lr(&s, 60), peak * 0.55);
    near(mtp__schedule_lr(&s, 35), peak * (0.1 + 0.9 * (1 + sqrt(0.5)) / 2));
    near(mtp__schedule_lr(&s, 85), peak * (0.1 + 0.9 * (1 - sqrt(0.5)) / 2));
    near(mtp__schedule_lr(&s, 110), peak * 0.1);
    near(mtp__schedule_lr(&s, 400), peak * 0.1);
}

static void wsd_is_stable_then_decays(void **state)
{
    (void)state;
    const mtp__schedule s = schedule(MTP_LR_WSD);
    near(mtp__schedule_lr(&s, 84), peak);
    near(mtp__schedule_lr(&s, 85), peak);
    near(mtp__schedule_lr(&s, 86), peak * (0.1 + 0.9 * 24 / 25));
    near(mtp__schedule_lr(&s, 109), peak * (0.1 + 0.9 * 1 / 25));
    near(mtp__schedule_lr(&s, 110), peak * 0.1);
}

/* The decay lasts the whole run when warm-up and decay meet, and a schedule of warm-up alone never divides by zero. */
static void edges(void **state)
{
    (void)state;
    mtp__schedule s = schedule(MTP_LR_LINEAR);
    s.warmup_steps = s.max_steps;
    near(mtp__schedule_lr(&s, 109), peak);
    near(mtp__schedule_lr(&s, 110), peak * 0.1);
    s = schedule(MTP_LR_WSD);
    s.decay_steps = 100;
    near(mtp__schedule_lr(&s, 60), peak * 0.55);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(warm_up_is_linear_and_learns_at_once),
        cmocka_unit_test(no_warm_up_starts_at_the_peak),
        cmocka_unit_test(constant_stays),
        cmocka_unit_test(linear_falls_to_the_minimum),
        cmocka_unit_test(cosine_is_half_way_in_the_middle),
        cmocka_unit_test(wsd_is_stable_then_decays),
        cmocka_unit_test(edges),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
