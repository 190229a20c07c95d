#include "model/tokens.h"

#include <stdlib.h>

#include "base/error.h"
#include "ops.h"

int64_t mtp__tokens_capacity(int64_t max_rows, int32_t K)
{
    const int64_t most = K * max_rows, usual = 2 * max_rows + K;
    return most < usual ? most : usual;
}

mtp_status mtp__tokens_create(int64_t max_rows, int32_t K, mtp__tokens *tokens)
{
    MTP_REQUIRE(max_rows >= 1 && K >= 1);
    *tokens = (mtp__tokens){.capacity = mtp__tokens_capacity(max_rows, K), .max_rows = max_rows, .K = K};
    const size_t entries = (size_t)tokens->capacity, steps = (size_t)K;
    tokens->ids = calloc(entries, sizeof *tokens->ids);
    tokens->entry_of = calloc(steps * (size_t)max_rows, sizeof *tokens->entry_of);
    if (tokens->ids && tokens->entry_of) return MTP_OK;
    mtp__tokens_free(tokens);
    return MTP_FAIL(MTP_E_MEMORY, "out of memory for the tokens of %lld rows", (long long)max_rows);
}

void mtp__tokens_free(mtp__tokens *tokens)
{
    free(tokens->ids);
    free(tokens->entry_of);
    *tokens = (mtp__tokens){0};
}

/* The entries that may be shared: they stand for the places [begin, end), the last entry of the list for end - 1. */
typedef struct run {
    int64_t begin, end;
} run;

/* The entry of a place: one of the run, the next one, or the first of a new run. */
static int32_t entry_at(mtp__tokens *tokens, run *shared, int64_t place, int32_t token)
{
    const int64_t old = tokens->count - (shared->end - place);
    if (place >= shared->begin && place < shared->end && tokens->ids[old] == token) return (int32_t)old;
    if (place != shared->end) shared->begin = place;
    shared->end = place + 1;
    tokens->ids[tokens->count] = token;
    return (int32_t)tokens->count++;
}

void mtp__tokens_build(mtp__tokens *tokens, const mtp__rows *rows, int64_t first, int64_t *taken)
{
    const int64_t rest = rows->num_rows - first, most = rest < tokens->max_rows ? rest : tokens->max_rows;
    run shared = {0};
    int64_t count = 0;
    tokens->count = 0;
    for (; count < most; count++) {
        const int64_t r = first + count;
        const bool follows =
            count > 0 && rows->document[r] == rows->document[r - 1] && rows->place[r] > rows->place[r - 1];
        if (!follows) shared = (run){0};
        if (tokens->count + tokens->K > tokens->capacity) break;
        for (int32_t k = 0; k < tokens->K; k++) {
            const int64_t i = k * rows->num_rows + r;
            tokens->entry_of[k * tokens->max_rows + count] =
                rows->valid[i] ? entry_at(tokens, &shared, rows->place[r] + 1 + k, rows->input_token[i]) : MTP_NO_ROW;
        }
    }
    *taken = count;
}

void mtp__tokens_takers(const mtp__tokens *tokens, int64_t taken, int64_t rows, int64_t entries, int32_t *taken_by)
{
    for (int32_t k = 0; k < tokens->K; k++) {
        int32_t *by = taken_by + k * entries;
        const int32_t *entry = tokens->entry_of + k * tokens->max_rows;
        for (int64_t u = 0; u < entries; u++) by[u] = MTP_NO_ROW;
        for (int64_t r = 0; r < taken; r++)
            if (entry[r] != MTP_NO_ROW) by[entry[r]] = (int32_t)(k * rows + r);
    }
}
