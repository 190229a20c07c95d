/* Protects: several processes train as one: the same losses for 1 to 4 ranks and any accumulation with the same global
 * batch, with uneven rows and with ranks that have none. */
#include "dist.h"

#include <math.h>

/* ---- losses --------------------------------------------------------------------------------------------------- */

static void any_world_and_accumulation(void **state)
{
    (void)state;
    dist_needs_gloo();
    const bool few = getenv("MTP_DIST_FEW") != NULL; /* a sanitizer makes each run slow: three of them */
    const char *reference = dist_train_with(1, dist_budget(DIST_GLOBAL));
    json_t *lines = dist_lines(reference, "train");
    const double first = dist_number(json_array_get(lines, 0), "loss"),
                 last = dist_number(json_array_get(lines, DIST_STEPS - 1), "loss");
    assert_true(last < 0.95 * first); /* it learns: the steps are not all the same */
    json_decref(lines);
    for (int world = 1; world <= 4; world++)
        for (int steps = 1; steps <= 3; steps++) {
            if (world * steps == 1 || (few && world != steps + 1)) continue;
            const char *run =
                dist_train_with(world, dist_budget(DIST_GLOBAL / (world * steps)), dist_accumulation(steps));
            dist_same_training(reference, run, DIST_STEPS);
        }
}

/* Nine micro-batches an epoch, four an update: the last update has one, so three ranks of four have none. */
static void the_last_update_may_leave_ranks_without_rows(void **state)
{
    (void)state;
    dist_needs_gloo();
    const char *const epochs[] = {"num_train_epochs=1", "max_steps=0", dist_budget(16), dist_accumulation(4), NULL};
    const char *reference = dist_train(1, epochs);
    const int worlds[] = {2, 4};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        const char *run = dist_train_with(worlds[i], "num_train_epochs=1", "max_steps=0", dist_budget(16),
                                          dist_accumulation(4 / worlds[i]));
        dist_same_training(reference, run, 3);
    }
    /* more ranks than the run has micro-batches */
    reference = dist_train_with(1, "num_train_epochs=1", "max_steps=0", dist_budget(48), dist_accumulation(4));
    dist_same_training(reference, dist_train_with(4, "num_train_epochs=1", "max_steps=0", dist_budget(48)), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_world_and_accumulation),
        cmocka_unit_test(the_last_update_may_leave_ranks_without_rows),
    };
    return cmocka_run_group_tests(tests, dist_setup, NULL);
}
