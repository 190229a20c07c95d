/* Protects: whatever the bytes, the JSON reader refuses them or gives a value that survives writing and reading. */
#include "fuzz.h"

#include <string.h>

#include "formats/json.h"

static void check_round_trip(json_t *value, unsigned flags)
{
    char *text;
    json_t *again;
    FUZZ_CHECK(mtp__json_dump(value, flags, &text) == MTP_OK);
    FUZZ_CHECK(mtp__json_parse(text, strlen(text), "again", 1, &again) == MTP_OK);
    FUZZ_CHECK(json_equal(value, again));
    json_decref(again);
    free(text);
}

/* Every getter on every member: none may do more than fail. */
static void use_members(json_t *value)
{
    const mtp__json_node root = mtp__json_root(value, "fuzz");
    const char *key, *string;
    json_t *member;
    mtp__json_node child;
    int64_t integer;
    double number;
    bool boolean;
    size_t count;
    json_object_foreach(value, key, member)
    {
        (void)mtp__json_get_int64(&root, key, 1, 100, &integer);
        (void)mtp__json_get_double(&root, key, &number);
        (void)mtp__json_get_bool(&root, key, &boolean);
        (void)mtp__json_get_string(&root, key, &string);
        if (mtp__json_get_array(&root, key, &child, &count) != MTP_OK) continue;
        for (size_t i = 0; i < count; i++) {
            const mtp__json_node item = mtp__json_item(&child, i);
            (void)mtp__json_as_string(&item, &string);
        }
    }
}

int mtp_fuzz_accepts(const uint8_t *data, size_t size)
{
    json_t *value;
    if (mtp__json_parse((const char *)data, size, "fuzz", 1, &value) != MTP_OK) return 0;
    check_round_trip(value, 0);
    check_round_trip(value, MTP__JSON_ONE_LINE | MTP__JSON_SORT_KEYS | MTP__JSON_NEWLINE);
    use_members(value);
    json_decref(value);
    return 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    (void)mtp_fuzz_accepts(data, size);
    return 0;
}
