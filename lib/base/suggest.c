#include "mtp/suggest.h"

#include <string.h>

enum { MAX_LENGTH = 63 };

static char folded(char c)
{
    if (c >= 'A' && c <= 'Z') return (char)(c - 'A' + 'a');
    return c == '-' ? '_' : c;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Optimal string alignment distance, three rows of the table at a time. Both words have at most MAX_LENGTH letters. */
static size_t distance(const char *a, const char *b)
{
    size_t rows[3][MAX_LENGTH + 1];
    size_t *before = rows[0], *last = rows[1], *row = rows[2];
    const size_t n = strlen(b);
    for (size_t j = 0; j <= n; j++) last[j] = j;
    for (size_t j = 0; j <= n; j++) before[j] = 0;
    for (size_t i = 1; a[i - 1]; i++) {
        row[0] = i;
        for (size_t j = 1; j <= n; j++) {
            const char x = folded(a[i - 1]), y = folded(b[j - 1]);
            row[j] = smaller(smaller(last[j], row[j - 1]) + 1, last[j - 1] + (x != y));
            if (i > 1 && j > 1 && x == folded(b[j - 2]) && folded(a[i - 2]) == y)
                row[j] = smaller(row[j], before[j - 2] + 1);
        }
        size_t *oldest = before;
        before = last;
        last = row;
        row = oldest;
    }
    return last[n];
}

const char *mtp_suggest(const char *word, const char *const *known, size_t count)
{
    const size_t length = word ? strlen(word) : 0;
    if (length == 0 || length > MAX_LENGTH) return NULL;
    const size_t third = length / 3;
    size_t best = (third > 2 ? third : 2) + 1;
    const char *nearest = NULL;
    for (size_t i = 0; i < count; i++) {
        if (strlen(known[i]) > MAX_LENGTH) continue;
        const size_t d = distance(word, known[i]);
        /* two edits turn any word of two letters into any other */
        if (d < best && d < length) {
            best = d;
            nearest = known[i];
        }
    }
    return nearest;
}
