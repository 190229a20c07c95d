/* Protects: arenas measure what they later serve; Philox gives the published numbers; checksums the standard ones. */
#include "support.h"

#include "base/arena.h"
#include "base/hash.h"
#include "base/rng.h"

static void layout(mtp__arena *arena)
{
    mtp__arena_take(arena, "weights", 1000);
    mtp__arena_take(arena, "scratch", 5000);
    mtp__arena_take(arena, "scratch", 300);
}

static void measured_size_is_exactly_enough(void **state)
{
    (void)state;
    mtp__arena measured, real;
    mtp__arena_measure(&measured);
    layout(&measured);
    void *memory = aligned_alloc(MTP__ARENA_ALIGN, measured.used);
    assert_non_null(memory);
    mtp__arena_wrap(&real, memory, measured.used);
    layout(&real);
    assert_int_equal(real.failure, MTP_OK);
    assert_int_equal(real.used, measured.used);
    assert_int_equal(measured.num_labels, 2);
    assert_true(measured.labels[1].bytes >= 5300);
    assert_int_equal(measured.labels[0].bytes + measured.labels[1].bytes, measured.used);
    mtp__arena_unwrap(&real);

    mtp__arena_wrap(&real, memory, measured.used - MTP__ARENA_ALIGN);
    layout(&real);
    assert_int_equal(real.failure, MTP_E_MEMORY);
    assert_non_null(strstr(mtp_last_error()->message, "scratch"));
    mtp__arena_unwrap(&real);
    free(memory);
}

static void absurd_size_is_refused(void **state)
{
    (void)state;
    mtp__arena arena;
    mtp__arena_measure(&arena);
    assert_null(mtp__arena_take(&arena, "x", SIZE_MAX - 10));
    assert_int_equal(arena.failure, MTP_E_MEMORY);
}

static void philox_gives_the_published_vectors(void **state)
{
    (void)state; /* Random123's known-answer tests for philox4x32-10 */
    const mtp__philox zero = mtp__philox_block(0, 0, 0);
    assert_int_equal(zero.word[0], 0x6627e8d5u);
    assert_int_equal(zero.word[3], 0x9b00dbd8u);
    const mtp__philox ones = mtp__philox_block(UINT64_MAX, UINT64_MAX, UINT64_MAX);
    assert_int_equal(ones.word[0], 0x408f276du);
    assert_int_equal(ones.word[3], 0x6d5451fdu);
    const mtp__philox pi = mtp__philox_block(0x299f31d0a4093822u, 0x0370734413198a2eu, 0x85a308d3243f6a88u);
    assert_int_equal(pi.word[0], 0xd16cfe09u);
    assert_int_equal(pi.word[1], 0x94fdccebu);
    assert_int_equal(pi.word[2], 0x5001e420u);
    assert_int_equal(pi.word[3], 0x24126ea1u);
}

static void permutation_holds_every_index_once(void **state)
{
    (void)state;
    uint32_t order[257];
    unsigned char seen[257] = {0};
    mtp__rng rng = mtp__rng_make(3, 1), other = mtp__rng_make(3, 2);
    mtp__rng_permutation(&rng, 257, order);
    for (int i = 0; i < 257; i++) seen[order[i]]++;
    for (int i = 0; i < 257; i++) assert_int_equal(seen[i], 1);
    uint32_t second[257];
    mtp__rng_permutation(&other, 257, second);
    assert_memory_not_equal(order, second, sizeof order);
}

/* The definition, bit by bit. */
static uint32_t plain_crc32c(uint32_t crc, const unsigned char *byte, size_t size)
{
    crc = ~crc;
    for (size_t i = 0; i < size; i++) {
        crc ^= byte[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

/* Sizes around those that are taken apart into stretches, aligned or not, begun or continued. */
static void checksums_of_long_data(void **state)
{
    (void)state;
    enum { SIZE = 30000 };
    static unsigned char data[SIZE];
    static const size_t sizes[] = {0, 1, 7, 8, 9, 4095, 12287, 12288, 12289, 16384, 24575, 24576, 24599, SIZE - 5};
    test_rng rng = {7};
    for (int i = 0; i < SIZE; i++) data[i] = (unsigned char)test_below(&rng, 256);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t begin = 0; begin < 5; begin += 3) {
            const uint32_t start = (uint32_t)i * 0x9e3779b9u;
            assert_int_equal(mtp__crc32c(start, data + begin, sizes[i]), plain_crc32c(start, data + begin, sizes[i]));
        }
}

static void checksums_are_the_standard_ones(void **state)
{
    (void)state;
    assert_int_equal(mtp__crc32c(0, "123456789", 9), 0xe3069283u);
    assert_int_equal(mtp__crc32c(mtp__crc32c(0, "1234", 4), "56789", 5), 0xe3069283u);
    assert_true(mtp__fnv1a(MTP__FNV_START, "a", 1) == 0xaf63dc4c8601ec8cu);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(checksums_of_long_data),
        cmocka_unit_test(measured_size_is_exactly_enough),
        cmocka_unit_test(absurd_size_is_refused),
        cmocka_unit_test(philox_gives_the_published_vectors),
        cmocka_unit_test(permutation_holds_every_index_once),
        cmocka_unit_test(checksums_are_the_standard_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
