/* Protects: which rows exist and what each draft step of a row takes in and is held to. One token off here is the most
 * common failure of this field: training looks better and serving collapses. */
#include "support.h"

#include "model/rows.h"

/* Two documents of 6 and 4 tokens; token value = 100 * document + position. */
static int32_t tokens[10] = {0, 1, 2, 3, 4, 5, 100, 101, 102, 103};
static uint8_t mask[10];
static int32_t begin[2] = {0, 6}, end[2] = {6, 10};

static mtp_batch two_documents(const char *ones)
{
    for (int i = 0; i < 10; i++) mask[i] = ones[i] == '1';
    return (mtp_batch){.batch = 1,
                       .seq = 10,
                       .token_ids = tokens,
                       .loss_mask = mask,
                       .num_documents = 2,
                       .document_begin = begin,
                       .document_end = end};
}

static void row_pairs_the_next_token_with_the_one_after(void **state)
{
    (void)state;
    mtp__rows rows;
    mtp_batch batch = two_documents("0001110011");
    assert_ok(mtp__rows_create(10, 2, &rows));
    assert_ok(mtp__rows_build(&batch, MTP__ROWS_SUPERVISED, NULL, &rows));
    /* document 0: t = 0 is there for its second step (target 3), t = 1..3; document 1: t = 0, 1 */
    const int32_t positions[] = {0, 1, 2, 3, 0, 1}, places[] = {0, 1, 2, 3, 6, 7}, documents[] = {0, 0, 0, 0, 1, 1};
    assert_int_equal(rows.num_rows, 6);
    for (int r = 0; r < 6; r++) {
        assert_int_equal(rows.position[r], positions[r]);
        assert_int_equal(rows.place[r], places[r]);
        assert_int_equal(rows.document[r], documents[r]);
        assert_int_equal(rows.doc_begin[r], begin[documents[r]]);
        for (int k = 0; k < 2; k++) {
            const int i = k * 6 + r, target = positions[r] + 2 + k, length = end[documents[r]] - begin[documents[r]];
            assert_int_equal(rows.valid[i], target < length);
            if (target >= length) {
                assert_int_equal(rows.input_token[i] | rows.target[i] | rows.supervised[i], 0);
                continue;
            }
            assert_int_equal(rows.input_token[i], 100 * documents[r] + target - 1);
            assert_int_equal(rows.target[i], 100 * documents[r] + target);
            assert_int_equal(rows.supervised[i], mask[begin[documents[r]] + target]);
        }
    }
    int64_t counts[2] = {0};
    mtp__rows_count(&rows, counts);
    assert_int_equal(counts[0], 5);
    assert_int_equal(counts[1], 4);
    mtp__rows_free(&rows);
}

static void a_step_never_crosses_into_the_next_document(void **state)
{
    (void)state;
    mtp__rows rows;
    mtp_batch batch = two_documents("1111111111");
    assert_ok(mtp__rows_create(10, 3, &rows));
    assert_ok(mtp__rows_build(&batch, MTP__ROWS_SUPERVISED, NULL, &rows));
    for (int64_t i = 0; i < 3 * rows.num_rows; i++)
        if (rows.valid[i]) assert_int_equal(rows.target[i] / 100, rows.document[i % rows.num_rows]);
    mtp__rows_free(&rows);
}

static void nothing_supervised_means_no_rows(void **state)
{
    (void)state;
    mtp__rows rows;
    mtp_batch batch = two_documents("1100001100"); /* only tokens that no step predicts */
    assert_ok(mtp__rows_create(10, 3, &rows));
    assert_ok(mtp__rows_build(&batch, MTP__ROWS_SUPERVISED, NULL, &rows));
    assert_int_equal(rows.num_rows, 0);
    mtp__rows_free(&rows);
}

static void rounds_start_at_the_last_prompt_token_and_leave_room_for_k_drafts(void **state)
{
    (void)state;
    mtp__rows rows;
    mtp_batch batch = two_documents("0000110011");
    const int64_t prompt_len[2] = {2, 2};
    assert_ok(mtp__rows_create(10, 2, &rows));
    assert_ok(mtp__rows_build(&batch, MTP__ROWS_ROUNDS, prompt_len, &rows));
    /* t >= prompt_len - 1 = 1 and t + 1 + 2 < length: t = 1, 2 in six tokens, none in four */
    assert_int_equal(rows.num_rows, 2);
    assert_int_equal(rows.position[0], 1);
    assert_int_equal(rows.position[1], 2);
    for (int i = 0; i < 4; i++) assert_int_equal(rows.valid[i], 1);
    mtp__rows_free(&rows);
}

static void more_rows_than_room_is_an_error(void **state)
{
    (void)state;
    mtp__rows rows;
    mtp_batch batch = two_documents("0001110011");
    assert_ok(mtp__rows_create(3, 2, &rows));
    assert_fails(mtp__rows_build(&batch, MTP__ROWS_SUPERVISED, NULL, &rows), MTP_E_INTERNAL, "more than the 3 rows");
    mtp__rows_free(&rows);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(row_pairs_the_next_token_with_the_one_after),
        cmocka_unit_test(a_step_never_crosses_into_the_next_document),
        cmocka_unit_test(nothing_supervised_means_no_rows),
        cmocka_unit_test(rounds_start_at_the_last_prompt_token_and_leave_room_for_k_drafts),
        cmocka_unit_test(more_rows_than_room_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
