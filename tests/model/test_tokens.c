/* Protects: the list of tokens that the rows of a chunk are fed with. Whatever the rows are, each takes at each step
 * the token that the data says and no other row's gradient; and the rows of a stretch of text share what they can. */
#include "support.h"

#include "model/tokens.h"
#include "ops.h"

enum { K = 3, LENGTH = 40 };

static int32_t token_ids[2 * LENGTH];
static uint8_t loss_mask[2 * LENGTH];
static int32_t begin[2] = {0, LENGTH}, end[2] = {LENGTH, 2 * LENGTH};

/* Two documents, of which every `every`th token is supervised. */
static mtp__rows rows_of(int every)
{
    const mtp_batch batch = {.batch = 1,
                             .seq = 2 * LENGTH,
                             .token_ids = token_ids,
                             .loss_mask = loss_mask,
                             .num_documents = 2,
                             .document_begin = begin,
                             .document_end = end};
    mtp__rows rows;
    for (int i = 0; i < 2 * LENGTH; i++) {
        token_ids[i] = 1000 + i;
        loss_mask[i] = i % every == 0;
    }
    assert_ok(mtp__rows_create(2 * LENGTH, K, &rows));
    assert_ok(mtp__rows_build(&batch, MTP__ROWS_SUPERVISED, NULL, &rows));
    return rows;
}

/* What must hold of any list; returns how many rows it is for. */
static int64_t check(mtp__tokens *tokens, const mtp__rows *rows, int64_t first)
{
    static int32_t taken_by[K * 8 * LENGTH];
    int64_t taken = 0, pairs = 0, found = 0;
    mtp__tokens_build(tokens, rows, first, &taken);
    assert_in_range(taken, 1, tokens->max_rows);
    assert_in_range(tokens->count, 0, tokens->capacity);
    const int64_t padded = taken + 5, entries = tokens->count + 3;
    mtp__tokens_takers(tokens, taken, padded, entries, taken_by);
    for (int32_t k = 0; k < K; k++) {
        for (int64_t r = 0; r < taken; r++) {
            const int64_t i = k * rows->num_rows + first + r;
            const int32_t entry = tokens->entry_of[k * tokens->max_rows + r];
            if (!rows->valid[i]) {
                assert_int_equal(entry, MTP_NO_ROW);
                continue;
            }
            pairs++;
            assert_in_range(entry, 0, tokens->count - 1);
            assert_int_equal(tokens->ids[entry], rows->input_token[i]);
            assert_int_equal(taken_by[k * entries + entry], k * padded + r);
        }
        for (int64_t u = 0; u < entries; u++) found += taken_by[k * entries + u] != MTP_NO_ROW;
    }
    assert_int_equal(found, pairs); /* each pair once, and nothing else */
    return taken;
}

static void a_stretch_of_text_has_one_entry_a_token(void **state)
{
    (void)state;
    mtp__rows rows = rows_of(1);
    mtp__tokens tokens;
    assert_ok(mtp__tokens_create(2 * LENGTH, K, &tokens));
    assert_int_equal(check(&tokens, &rows, 0), 2 * (LENGTH - 2));
    assert_int_equal(tokens.count, 2 * (LENGTH - 2)); /* all but the first and the last token of a document */
    mtp__tokens_free(&tokens);
    /* in chunks: a chunk takes K - 1 tokens of the next one's */
    assert_ok(mtp__tokens_create(10, K, &tokens));
    assert_int_equal(check(&tokens, &rows, 5), 10);
    assert_int_equal(tokens.count, 10 + K - 1);
    for (int64_t first = 0; first < rows.num_rows;) first += check(&tokens, &rows, first);
    mtp__tokens_free(&tokens);
    mtp__rows_free(&rows);
}

static void scattered_rows_fit_or_make_the_chunk_shorter(void **state)
{
    (void)state;
    for (int every = 2; every < 20; every++)
        for (int64_t max_rows = 1; max_rows < 30; max_rows += 4) {
            mtp__rows rows = rows_of(every);
            mtp__tokens tokens;
            assert_ok(mtp__tokens_create(max_rows, K, &tokens));
            int64_t first = 0, chunks = 0;
            for (; first < rows.num_rows; chunks++) first += check(&tokens, &rows, first);
            /* supervised text is never so scattered that a chunk is cut */
            assert_int_equal(chunks, (rows.num_rows + max_rows - 1) / max_rows);
            /* rows that nobody would make: K tokens each, none of them shared */
            for (int64_t r = 0; r < rows.num_rows; r++) rows.place[r] *= K;
            for (first = 0; first < rows.num_rows;) first += check(&tokens, &rows, first);
            mtp__tokens_free(&tokens);
            mtp__rows_free(&rows);
        }
}

/* The leak check hands out rows of its choice, and tokens that differ from one row to the next. */
static void rows_in_any_order_with_any_tokens(void **state)
{
    (void)state;
    mtp__rows rows = rows_of(1);
    mtp__tokens tokens;
    test_rng rng = {5};
    assert_ok(mtp__tokens_create(24, K, &tokens));
    for (int round = 0; round < 200; round++) {
        for (int64_t r = 0; r < rows.num_rows; r++) {
            rows.place[r] = (int32_t)test_below(&rng, LENGTH);
            if (r > 0 && round % 2) rows.place[r] = rows.place[r - 1] + (int32_t)test_below(&rng, 3);
            for (int k = 0; k < K; k++) {
                const int64_t i = k * rows.num_rows + r;
                rows.valid[i] = test_below(&rng, 10) > 0;
                rows.input_token[i] = test_below(&rng, 10) > 0 ? rows.place[r] + k : 7;
            }
        }
        for (int64_t first = 0; first < rows.num_rows;) first += check(&tokens, &rows, first);
    }
    mtp__tokens_free(&tokens);
    mtp__rows_free(&rows);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stretch_of_text_has_one_entry_a_token),
        cmocka_unit_test(scattered_rows_fit_or_make_the_chunk_shorter),
        cmocka_unit_test(rows_in_any_order_with_any_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
