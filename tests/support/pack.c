#include "support.h"

#include "base/file.h"
#include "pack.h"

mtp_pack_options test_pack_options(const char *const *inputs, int64_t num_inputs, const mtp_verifier *verifier)
{
#ifndef MTP_TEST_HDF5
    print_message("skipped: this build has no HDF5 (MTP_HDF5=OFF)\n");
    skip();
#endif
    return (mtp_pack_options){.inputs = inputs,
                              .num_inputs = num_inputs,
                              .verifier = verifier,
                              .shard_bytes = (int64_t)4 << 30,
                              .workers = 1};
}

void test_same_directory(const char *one, const char *other)
{
    mtp__name_list left, right;
    assert_ok(mtp__dir_list(one, MTP__LIST_FILES, NULL, &left));
    assert_ok(mtp__dir_list(other, MTP__LIST_FILES, NULL, &right));
    for (size_t i = 0; i < left.count || i < right.count; i++) {
        size_t left_size, right_size;
        if (i >= left.count || i >= right.count || strcmp(left.names[i], right.names[i]) != 0)
            fail_msg("%s and %s hold different files: %s, %s", one, other, i < left.count ? left.names[i] : "-",
                     i < right.count ? right.names[i] : "-");
        char *a = test_read(test_path("%s/%s", one, left.names[i]), &left_size);
        char *b = test_read(test_path("%s/%s", other, left.names[i]), &right_size);
        if (left_size != right_size || memcmp(a, b, left_size) != 0) fail_msg("%s differs", left.names[i]);
        free(a);
        free(b);
    }
    mtp__name_list_free(&left);
    mtp__name_list_free(&right);
}
