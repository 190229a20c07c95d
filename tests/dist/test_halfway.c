/* Protects: a rank whose device fails in the middle of a backward pass, or after it, ends all ranks with its message,
 * and none of them waits for the time limit. */
#include "dist.h"

#include "run/trainer.h"

/* The backend with one op that fails from its `left`-th call on. */
static mtp_backend broken;
static const mtp_backend *whole;
static int left;

static mtp_status failing_dw(mtp_device *device, const mtp_linear_args *args)
{
    if (left-- > 0) return whole->linear_dw(device, args);
    return MTP_FAIL(MTP_E_BACKEND, "the device is lost");
}

static mtp_status failing_adamw(mtp_device *device, const mtp_adamw_args *args)
{
    if (left-- > 0) return whole->adamw(device, args);
    return MTP_FAIL(MTP_E_BACKEND, "the device is lost");
}

static void break_device(mtp_context *context, bool in_backward)
{
    whole = context->ops;
    broken = *whole;
    left = in_backward ? 3 : 0; /* one product of many, or the one launch of AdamW */
    if (in_backward)
        broken.linear_dw = failing_dw;
    else
        broken.adamw = failing_adamw;
    context->ops = &broken;
}

static mtp_status update(mtp__trainer *trainer, int64_t done)
{
    mtp__update update;
    bool stopped;
    MTP_TRY(mtp__trainer_launch(trainer, done, false, &stopped));
    return mtp__trainer_read(trainer, &update);
}

/* The program of a rank: two good updates; then the device of rank 1 breaks. */
static mtp_status train(const char *config_path, bool in_backward, mtp__ranks *ranks, mtp__trainer *trainer,
                        mtp_train_config **config)
{
    const char *const overrides[] = {"output_dir=unused", dist_budget(6)};
    MTP_TRY(mtp_train_config_load(config_path, overrides, 2, config));
    const mtp_comm_options comm = {.seconds = 100};
    MTP_TRY(mtp__ranks_open(&comm, ranks));
    const mtp__trainer_options options = {.ranks = ranks};
    MTP_TRY(mtp__trainer_open(*config, &options, trainer));
    MTP_TRY(mtp__trainer_connect(trainer));
    for (int64_t step = 0; step < 2; step++) MTP_TRY(update(trainer, step));
    if (ranks->rank == 1) break_device(trainer->context, in_backward);
    MTP_TRY(update(trainer, 2));
    return update(trainer, 3);
}

static int be_a_rank(const char *config_path, bool in_backward)
{
    mtp__ranks ranks = {0};
    mtp__trainer trainer = {0};
    mtp_train_config *config = NULL;
    const mtp_status status = mtp__ranks_leave(&ranks, train(config_path, in_backward, &ranks, &trainer, &config));
    printf("status %d: %s\n", (int)status, mtp_last_error()->message);
    mtp__trainer_close(&trainer);
    mtp__ranks_close(&ranks);
    mtp_train_config_free(config);
    return 0; /* mtprun ends the others when one fails; here each shall come to its own end */
}

static void ends_all(const char *where)
{
    const char *const self = test_self();
    dist_needs_gloo();
    test_run run = test_execute(
        (const char *const[]){MTP_TEST_LAUNCHER, "--nproc-per-node=3", self, "rank", dist_config(), where, NULL});
    if (run.exit_code != 0) fail_msg("exit code %d:\n%s%s", run.exit_code, run.out, run.err);
    for (int rank = 0; rank < 3; rank++) {
        const char *said = strstr(run.out, test_path("[%d] status %d: ", rank, (int)MTP_E_BACKEND));
        const char *reason = said ? strstr(said, "the device is lost") : NULL;
        if (!said || !reason || strcspn(said, "\n") < (size_t)(reason - said)) fail_msg("rank %d:\n%s", rank, run.out);
        if (rank != 1 && !strstr(said, ": rank 1: ")) fail_msg("rank %d does not name rank 1:\n%s", rank, run.out);
    }
    test_run_free(&run);
}

static void in_the_backward_pass(void **state)
{
    (void)state;
    ends_all("backward");
}

static void in_the_update(void **state)
{
    (void)state;
    ends_all("update");
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "rank") == 0) return be_a_rank(argv[2], strcmp(argv[3], "backward") == 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_the_backward_pass),
        cmocka_unit_test(in_the_update),
    };
    return cmocka_run_group_tests(tests, dist_setup, NULL);
}
