#include "opened.h"

#include "support.h"

test_opened test_open(const char *drafter, const char *verifier, const char *samples)
{
    test_opened o = {0};
    const char *paths[] = {test_path(MTP_TEST_DATA "/%s", samples)};
    assert_ok(mtp_context_create(&(mtp_context_options){0}, &o.context));
    assert_ok(mtp_verifier_open(test_path(MTP_TEST_DATA "/%s", verifier), NULL, &o.verifier));
    assert_ok(mtp_drafter_load(o.context, test_path(MTP_TEST_DATA "/%s", drafter), &o.drafter));
    assert_ok(mtp_dataset_open(paths, 1, o.verifier, &(mtp_dataset_options){0}, &o.dataset));
    return o;
}

void test_close(test_opened *o)
{
    mtp_dataset_close(o->dataset);
    mtp_drafter_free(o->drafter);
    mtp_verifier_close(o->verifier);
    mtp_context_free(o->context);
}
