/* A tiny verifier and sample files for it, to be bent into every variant and every fault. */
#ifndef MTP_TESTS_SAMPLES_H
#define MTP_TESTS_SAMPLES_H

#include "support.h"

#include "mtp/safetensors.h"
#include "mtp/verifier.h"

/* Geometry of the tiny verifier. */
enum {
    TINY_VOCAB = 32,
    TINY_HB = 8,
    TINY_LOCAL_HEADS = 2,
    TINY_LOCAL_DIM = 4,
    TINY_GLOBAL_HEADS = 1,
    TINY_GLOBAL_DIM = 6,
    TINY_WINDOW = 4
};

/* A fresh directory with the tiny verifier: layers sliding, full; random bf16 embedding; norm weights 1 + i / 8. */
const char *test_tiny_verifier(void);

typedef struct test_tensor {
    char name[48];
    mtp_dtype dtype;
    int32_t rank;
    int64_t shape[6];
    int64_t count;
    void *data;
} test_tensor;

/* A sample in memory. Zero-initialise or make; free with test_sample_free. */
typedef struct test_sample {
    test_tensor tensors[16];
    int num_tensors;
    mtp_safetensors_pair metadata[8];
    int num_metadata;
} test_sample;

/* A complete sample of S tokens for the tiny verifier: F32 values that bf16 and f16 hold exactly, I64 ids, U8 mask that
 * is 1 from token `prompt_len` on, metadata hidden_norm = post. */
test_sample test_sample_make(int64_t num_tokens, int64_t prompt_len, uint64_t seed);
/* A stored sample with its metadata. */
test_sample test_sample_load(const char *path);
void test_sample_free(test_sample *sample);
/* Fails the test when there is no such tensor. */
test_tensor *test_sample_find(test_sample *sample, const char *name);
void test_sample_remove(test_sample *sample, const char *name);
/* A new tensor of zeros. */
test_tensor *test_sample_add(test_sample *sample, const char *name, mtp_dtype dtype, int32_t rank,
                             const int64_t *shape);
#define test_sample_put(sample, name, dtype, ...)                                                                   \
    test_sample_add((sample), (name), (dtype), (int32_t)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), \
                    (const int64_t[]){__VA_ARGS__})
/* Change the type of a tensor; values are rounded to it. Not for 8-bit floats. */
void test_sample_retype(test_sample *sample, const char *name, mtp_dtype dtype);
/* Values by flat index; of 8-bit types (floats too) the byte. */
double test_tensor_get(const test_tensor *tensor, int64_t index);
void test_tensor_set(test_tensor *tensor, int64_t index, double value);
void test_sample_write(const test_sample *sample, const char *path);
/* Make, write and free one. */
void test_sample_file(const char *path, int64_t num_tokens, int64_t prompt_len, uint64_t seed);

#endif
