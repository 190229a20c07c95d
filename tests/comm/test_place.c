/* Protects: what a process learns from its environment about the others: every launcher's variables, the store's
 * address and secret, and a message that names the variable for whatever is missing or contradicts itself. */
#include "support.h"

#include "comm/place.h"

static const char *const all[] = {"RANK",
                                  "WORLD_SIZE",
                                  "LOCAL_RANK",
                                  "LOCAL_WORLD_SIZE",
                                  "SLURM_PROCID",
                                  "SLURM_STEP_NUM_TASKS",
                                  "SLURM_LOCALID",
                                  "OMPI_COMM_WORLD_RANK",
                                  "OMPI_COMM_WORLD_SIZE",
                                  "OMPI_COMM_WORLD_LOCAL_RANK",
                                  "OMPI_COMM_WORLD_LOCAL_SIZE",
                                  "MASTER_ADDR",
                                  "MASTER_PORT",
                                  "MTP_RDZV_ENDPOINT",
                                  "MTP_RDZV_PORT",
                                  "MTP_RDZV_SECRET",
                                  "TORCHELASTIC_RUN_ID",
                                  "TORCHELASTIC_RESTART_COUNT"};

/* Only these: "NAME=value" each. */
static void environment(const char *const *settings)
{
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) unsetenv(all[i]);
    for (; *settings; settings++) {
        char name[64];
        const char *equals = strchr(*settings, '=');
        snprintf(name, sizeof name, "%.*s", (int)(equals - *settings), *settings);
        setenv(name, equals + 1, 1);
    }
}

static void alone(void **state)
{
    (void)state;
    mtp__meeting meeting;
    environment((const char *const[]){NULL});
    assert_ok(mtp__meeting_read(&meeting));
    assert_int_equal(meeting.place.rank, 0);
    assert_int_equal(meeting.place.world_size, 1);
    assert_int_equal(meeting.place.local_world_size, 1);
    /* one rank needs neither store nor secret */
    environment((const char *const[]){"RANK=0", "WORLD_SIZE=1", NULL});
    assert_ok(mtp__meeting_read(&meeting));
    assert_string_equal(meeting.endpoint, "");
    assert_true(meeting.one_node);
}

static void with_store(void **state)
{
    (void)state;
    mtp__meeting meeting;
    environment((const char *const[]){"RANK=5", "WORLD_SIZE=8", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=4",
                                      "MTP_RDZV_ENDPOINT=[fe80::1]:4000", "MTP_RDZV_SECRET=a secret of mine",
                                      "TORCHELASTIC_RUN_ID=run7", "TORCHELASTIC_RESTART_COUNT=2", NULL});
    assert_ok(mtp__meeting_read(&meeting));
    assert_int_equal(meeting.place.rank, 5);
    assert_int_equal(meeting.place.world_size, 8);
    assert_int_equal(meeting.place.local_rank, 1);
    assert_int_equal(meeting.place.local_world_size, 4);
    assert_false(meeting.host);
    assert_false(meeting.one_node);
    assert_string_equal(meeting.endpoint, "[fe80::1]:4000");
    assert_string_equal(meeting.secret, "a secret of mine");
    assert_string_equal(meeting.run, "run7/2");
    unsetenv("MTP_RDZV_SECRET");
    assert_fails(mtp__meeting_read(&meeting), MTP_E_CONFIG, "MTP_RDZV_SECRET");
    setenv("MTP_RDZV_ENDPOINT", "nowhere", 1);
    assert_fails(mtp__meeting_read(&meeting), MTP_E_CONFIG, "MTP_RDZV_ENDPOINT: 'nowhere'");
}

/* torchrun: no store of ours; rank 0 hosts one beside MASTER_PORT. */
static void without_store(void **state)
{
    (void)state;
    mtp__meeting meeting;
    environment((const char *const[]){"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=2",
                                      "MASTER_ADDR=some.host", "MASTER_PORT=29500", NULL});
    assert_ok(mtp__meeting_read(&meeting));
    assert_true(meeting.host);
    /* all on one node: nobody outside can connect, whatever MASTER_ADDR says */
    assert_string_equal(meeting.endpoint, "127.0.0.1:29501");
    setenv("MTP_RDZV_PORT", "4001", 1);
    setenv("RANK", "1", 1);
    setenv("LOCAL_RANK", "1", 1);
    assert_ok(mtp__meeting_read(&meeting));
    assert_false(meeting.host);
    assert_string_equal(meeting.endpoint, "127.0.0.1:4001");

    environment((const char *const[]){"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1",
                                      "MASTER_ADDR=some.host", "MASTER_PORT=29500", NULL});
    assert_fails(mtp__meeting_read(&meeting), MTP_E_CONFIG, "MTP_RDZV_SECRET");
    setenv("MTP_RDZV_SECRET", "a secret of mine", 1);
    assert_ok(mtp__meeting_read(&meeting));
    assert_string_equal(meeting.endpoint, "some.host:29501");
    unsetenv("MASTER_ADDR");
    assert_fails(mtp__meeting_read(&meeting), MTP_E_CONFIG, "MASTER_ADDR");
    setenv("MASTER_ADDR", "some.host", 1);
    unsetenv("MASTER_PORT");
    assert_fails(mtp__meeting_read(&meeting), MTP_E_CONFIG, "MASTER_PORT");
    setenv("MASTER_PORT", "65535", 1);
    assert_fails(mtp__meeting_read(&meeting), MTP_E_CONFIG, "MASTER_PORT is '65535'");
}

static void other_launchers(void **state)
{
    (void)state;
    mtp__meeting meeting;
    environment((const char *const[]){"OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=3",
                                      "OMPI_COMM_WORLD_LOCAL_RANK=2", "OMPI_COMM_WORLD_LOCAL_SIZE=3",
                                      "MTP_RDZV_PORT=4001", NULL});
    assert_ok(mtp__meeting_read(&meeting));
    assert_int_equal(meeting.place.rank, 2);
    assert_true(meeting.one_node);
    /* srun does not say how many tasks this node has: taken for several nodes */
    environment((const char *const[]){"SLURM_PROCID=3", "SLURM_STEP_NUM_TASKS=4", "SLURM_LOCALID=1",
                                      "MASTER_ADDR=node0", "MTP_RDZV_PORT=4001", "MTP_RDZV_SECRET=a secret of mine",
                                      NULL});
    assert_ok(mtp__meeting_read(&meeting));
    assert_int_equal(meeting.place.rank, 3);
    assert_int_equal(meeting.place.local_rank, 1);
    assert_false(meeting.one_node);
    /* a batch script, in which srun started nothing yet */
    environment((const char *const[]){"SLURM_PROCID=0", NULL});
    assert_ok(mtp__meeting_read(&meeting));
    assert_int_equal(meeting.place.world_size, 1);
}

static void contradictions(void **state)
{
    (void)state;
    mtp__meeting meeting;
    environment((const char *const[]){"RANK=0", NULL});
    assert_fails(mtp__meeting_read(&meeting), MTP_E_CONFIG, "has RANK but no WORLD_SIZE");
    environment((const char *const[]){"WORLD_SIZE=2", NULL});
    assert_fails(mtp__meeting_read(&meeting), MTP_E_CONFIG, "has WORLD_SIZE but no RANK: ranks are started by mtprun");
    environment((const char *const[]){"RANK=2", "WORLD_SIZE=2", NULL});
    assert_fails(mtp__meeting_read(&meeting), MTP_E_CONFIG, "RANK is '2'; it must be a number from 0 to 1");
    environment((const char *const[]){"RANK=1", "WORLD_SIZE=2x", NULL});
    assert_fails(mtp__meeting_read(&meeting), MTP_E_CONFIG, "WORLD_SIZE is '2x'");
    environment((const char *const[]){"RANK=1", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=3", NULL});
    assert_fails(mtp__meeting_read(&meeting), MTP_E_CONFIG, "LOCAL_WORLD_SIZE is '3'");
    environment((const char *const[]){"RANK=1", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=1", "LOCAL_RANK=1", NULL});
    assert_fails(mtp__meeting_read(&meeting), MTP_E_CONFIG, "LOCAL_RANK is '1'");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(alone),           cmocka_unit_test(with_store),     cmocka_unit_test(without_store),
        cmocka_unit_test(other_launchers), cmocka_unit_test(contradictions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
