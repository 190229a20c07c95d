/* What the tests share. Include it first: it brings cmocka with the headers cmocka wants before it. */
#ifndef MTP_TESTS_SUPPORT_H
#define MTP_TESTS_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "mtp/status.h"

/* Fail with the error record unless `call` is MTP_OK. */
#define assert_ok(call)                                                                                          \
    do {                                                                                                         \
        if ((call) != MTP_OK)                                                                                    \
            fail_msg("%s: %s: %s", #call, mtp_status_name(mtp_last_error()->status), mtp_last_error()->message); \
    } while (0)
/* Fail unless `call` returns `expected` with `text` somewhere in its message. */
#define assert_fails(call, expected, text)                                                                \
    do {                                                                                                  \
        const mtp_status got_ = (call);                                                                   \
        if (got_ != (expected)) fail_msg("%s: got %s, want %s", #call, mtp_status_name(got_), #expected); \
        if (!strstr(mtp_last_error()->message, (text)))                                                   \
            fail_msg("%s: message \"%s\" does not say \"%s\"", #call, mtp_last_error()->message, (text)); \
    } while (0)

/* A fresh directory under $TMPDIR (or /tmp), removed with all its content when the process exits. The returned string
 * lives until then. */
const char *test_dir(void);
/* printf into a string that lives until the process exits: paths. */
const char *test_path(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Why there is no device "cuda:0" here; NULL when there is. */
const char *test_no_gpu(void);
/* The program that runs this, for tests that start themselves once more as ranks. */
const char *test_self(void);
/* Whole file, NUL-terminated; the caller frees. Fails the test when it cannot be read. */
char *test_read(const char *path, size_t *size);
/* Create or replace a file. Fails the test when it cannot. */
void test_write(const char *path, const void *data, size_t size);
/* Copy a directory tree (cp -r). */
void test_copy(const char *from, const char *to);

typedef struct test_run {
    int exit_code; /* 128 + signal when killed by one */
    char *out;     /* NUL-terminated; free with test_run_free */
    char *err;
} test_run;
/* Run a program (argv[0] a path, NULL-terminated) with an empty standard input and catch its output. */
test_run test_execute(const char *const *argv);
#define test_mtp(...) test_execute((const char *const[]){MTP_TEST_PROGRAM, __VA_ARGS__, NULL})
void test_run_free(test_run *run);
/* Fail unless the program ended with `exit_code` and printed texts that hold `out` and `err`; frees the run. */
void test_expect(test_run run, int exit_code, const char *out, const char *err);

/* ---- reproducible numbers ------------------------------------------------------------------------------------- */
typedef struct test_rng {
    uint64_t state;
} test_rng;
/* Uniform in (-1, 1). */
float test_uniform(test_rng *rng);
/* Uniform in [0, n). */
int64_t test_below(test_rng *rng, int64_t n);
/* n values of test_uniform times `scale`. */
void test_fill(test_rng *rng, float *x, int64_t n, float scale);

/* A buffer of n floats with sentinels on both sides: test_guarded_check fails the test when an op wrote beside it. */
float *test_guarded(int64_t n);
void test_guarded_check(const float *x);
void test_guarded_free(float *x);

#endif
