/* Protects: master weights in bf16. A run that is stopped and resumed is the run that was not, with any number of
 * threads; checkpoints and exports have the values as they are; the plan says what is saved; and a run does not change
 * the type of its weights on the way. */
#include "support.h"

#include "edit.h"
#include "mtp/safetensors.h"
#include "train.h"

#define BF16 "master_weights=bf16"

static const char *checkpoint(const char *run, int step)
{
    return test_path("%s/checkpoints/step-%08d", run, step);
}

/* Six steps, and three and three more by another number of threads. */
static void stopped_is_whole(void **state)
{
    (void)state;
    const char *whole = test_path("%s/whole", test_dir()), *parts = test_path("%s/parts", test_dir());
    test_run_training(whole, BF16, "max_steps=6", "weight_decay=0.1", "num_threads=2");
    test_run_training(parts, BF16, "max_steps=3", "weight_decay=0.1", "num_threads=1");
    const mtp_train_result rest =
        test_run_training(parts, BF16, "max_steps=6", "weight_decay=0.1", "num_threads=3", "resume=auto");
    assert_int_equal(rest.resumed_from, 3);
    test_same_checkpoint(checkpoint(whole, 6), checkpoint(parts, 6));
    assert_true(test_same_file(test_path("%s/export/model.safetensors", whole),
                               test_path("%s/export/model.safetensors", parts)));
}

/* Tensors of a file whose names begin with `prefix`, by the rest of the name. */
static const mtp_safetensors_entry *find(const mtp_safetensors *file, const char *prefix, const char *name)
{
    return mtp_safetensors_find(file, test_path("%s%s", prefix, name));
}

static void files_have_the_values_as_they_are(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir()), *other = test_path("%s/other", test_dir());
    mtp_safetensors *shard = NULL, *exported = NULL, *others = NULL;
    /* a dense drafter: the rows of its head have one order everywhere */
    static const char dense[] = "drafter=\"" MTP_TEST_DATA "/sample/drafter_init_dense\"";
    test_run_training(run, BF16, dense, "max_steps=4");
    test_run_training(other, BF16, dense, "max_steps=4", "seed=8", "shuffle=false");
    assert_ok(mtp_safetensors_open(test_path("%s/shard-00000-of-00001.safetensors", checkpoint(run, 4)), &shard));
    assert_ok(mtp_safetensors_open(test_path("%s/export/model.safetensors", run), &exported));
    assert_ok(mtp_safetensors_open(test_path("%s/export/model.safetensors", other), &others));
    /* exported once more from the checkpoint, by a drafter with fp32 masters */
    const char *again = test_path("%s/again", test_dir());
    test_run done = test_execute((const char *const[]){MTP_TEST_PROGRAM, "export", run, again, NULL});
    assert_int_equal(done.exit_code, 0);
    test_run_free(&done);
    assert_true(
        test_same_file(test_path("%s/model.safetensors", again), test_path("%s/export/model.safetensors", run)));
    int64_t matrices = 0, different = 0;
    for (size_t i = 0; i < mtp_safetensors_count(exported); i++) {
        const mtp_safetensors_entry *out = mtp_safetensors_at(exported, i);
        const mtp_safetensors_entry *value = find(shard, "param.", out->name);
        assert_non_null(value);
        assert_int_equal(value->dtype, value->rank == 2 ? MTP_BF16 : MTP_F32);
        if (value->rank != 2) continue;
        matrices++;
        assert_int_equal(value->size, out->size);
        assert_memory_equal(value->data, out->data, out->size);
        assert_int_equal(find(shard, "exp_avg.", out->name)->dtype, MTP_F32);
        different += memcmp(out->data, mtp_safetensors_find(others, out->name)->data, out->size) != 0;
    }
    assert_true(matrices > 20);
    assert_int_equal(different, matrices); /* another seed rounds otherwise */
    mtp_safetensors_close(shard);
    mtp_safetensors_close(exported);
    mtp_safetensors_close(others);
}

static void a_run_keeps_the_type_of_its_weights(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    test_run_training(run, BF16, "max_steps=2");
    mtp_train_config *config = test_config(run, "resume=auto", "max_steps=3");
    assert_fails(test_train(config, NULL), MTP_E_CONFIG, "optimizer.master_weights: \"bf16\" then, \"fp32\" now");
    mtp_train_config_free(config);
}

static uint64_t line_of(const mtp_plan *plan, const char *what)
{
    for (int64_t i = 0; i < plan->num_lines; i++)
        if (strcmp(plan->lines[i].what, what) == 0) return plan->lines[i].bytes;
    return 0;
}

static void the_plan_says_what_is_saved(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    mtp_plan *plans[2];
    for (int i = 0; i < 2; i++) {
        mtp_train_config *config = test_config(run, i ? BF16 : "master_weights=fp32");
        assert_ok(mtp_plan_create(config, 1, NULL, &plans[i]));
        mtp_train_config_free(config);
    }
    const uint64_t all = (uint64_t)plans[0]->num_parameters,
                   saved = line_of(plans[0], "parameters") - line_of(plans[1], "parameters");
    assert_int_equal(line_of(plans[0], "parameters"), 4 * all);
    assert_true(saved > 2 * all - all / 50 && saved < 2 * all); /* all but the norms */
    assert_int_equal(plans[0]->checkpoint_bytes - plans[1]->checkpoint_bytes, saved);
    assert_int_equal(line_of(plans[0], "checkpoint copy") - line_of(plans[1], "checkpoint copy"), saved);
    assert_int_equal(line_of(plans[0], "optimizer moments"), line_of(plans[1], "optimizer moments"));
    for (int i = 0; i < 2; i++) mtp_plan_free(plans[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stopped_is_whole),
        cmocka_unit_test(files_have_the_values_as_they_are),
        cmocka_unit_test(a_run_keeps_the_type_of_its_weights),
        cmocka_unit_test(the_plan_says_what_is_saved),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
