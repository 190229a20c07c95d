/* Protects: each file of corpus/<name>/good is accepted and each of bad refused with a message, and no damage of them
 * (truncations, a thousand small changes of each, 200 of long bad ones) crashes the reader. Stands in for libFuzzer's
 * main.
 */
#include <stdbool.h>
#include <string.h>

#include "base/file.h"
#include "fuzz.h"

enum { MUTANTS = 1000, MUTANTS_OF_BAD = 200, LONG_INPUT = 4096, MAX_INPUT = 1 << 20 };

/* An allocation of the exact size, so that a sanitizer sees the first byte read behind the end. */
static int accepts_copy(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);
    FUZZ_CHECK(copy != NULL);
    memcpy(copy, data, size);
    const int accepted = mtp_fuzz_accepts(copy, size);
    free(copy);
    return accepted;
}

static uint32_t next_random(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    return *state ^= *state << 5;
}

/* One to four places get a random byte, a flipped bit, or a byte from elsewhere in the input. */
static void mutate(uint8_t *data, size_t size, uint32_t *state)
{
    for (uint32_t changes = 1 + next_random(state) % 4; changes > 0; changes--) {
        uint8_t *place = &data[next_random(state) % size];
        const uint32_t choice = next_random(state);
        if (choice % 3 == 0)
            *place = (uint8_t)(choice >> 8);
        else if (choice % 3 == 1)
            *place = (uint8_t)(*place ^ 1u << (choice >> 8) % 8);
        else
            *place = data[(choice >> 8) % size];
    }
}

/* Every length; of a long input those in front (headers) and at the end, and each 61st between. */
static size_t next_cut(size_t length, size_t size)
{
    enum { FRONT = 512, END = 128, STRIDE = 61 };
    const bool middle = size > LONG_INPUT && length >= FRONT && length + END + STRIDE < size;
    return length + (middle ? STRIDE : 1);
}

static void damage(const uint8_t *data, size_t size, bool bad)
{
    uint32_t state = 1;
    uint8_t *mutant = malloc(size ? size : 1);
    FUZZ_CHECK(mutant != NULL);
    for (size_t length = 0; length < size; length = next_cut(length, size)) (void)accepts_copy(data, length);
    const int mutants = bad && size > LONG_INPUT ? MUTANTS_OF_BAD : MUTANTS;
    for (int i = 0; size > 0 && i < mutants; i++) {
        memcpy(mutant, data, size);
        mutate(mutant, size, &state);
        (void)accepts_copy(mutant, size);
    }
    free(mutant);
}

/* Returns how many files went wrong; -1 when there is no file. */
static int replay(const char *corpus, const char *kind, int expected)
{
    char *directory;
    mtp__name_list list;
    int wrong = 0;
    if (mtp__path_join(corpus, kind, &directory) != MTP_OK ||
        mtp__dir_list(directory, MTP__LIST_FILES, NULL, &list) != MTP_OK || list.count == 0) {
        fprintf(stderr, "%s/%s holds no inputs\n", corpus, kind);
        return -1;
    }
    for (size_t i = 0; i < list.count; i++) {
        char *path, *data;
        size_t size;
        if (mtp__path_join(directory, list.names[i], &path) != MTP_OK) return -1;
        if (mtp__file_read(path, MAX_INPUT, &data, &size) != MTP_OK) {
            fprintf(stderr, "%s\n", mtp_last_error()->message);
            return -1;
        }
        const int accepted = accepts_copy((const uint8_t *)data, size);
        if (accepted != expected) {
            fprintf(stderr, "%s was %s%s\n", path,
                    accepted ? "accepted" : "refused: ", accepted ? "" : mtp_last_error()->message);
            wrong++;
        }
        damage((const uint8_t *)data, size, !expected);
        free(data);
        free(path);
    }
    printf("%s: %zu inputs\n", directory, list.count);
    mtp__name_list_free(&list);
    free(directory);
    return wrong;
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s CORPUS    (a directory with good/ and bad/)\n", argv[0]);
        return 2;
    }
    const int good = replay(argv[1], "good", 1), bad = replay(argv[1], "bad", 0);
    return good == 0 && bad == 0 ? 0 : 1;
}
