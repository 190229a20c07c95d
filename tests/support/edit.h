/* Altered copies of model directories: safetensors files with tensors added, dropped and changed, JSON files with keys
 * set. */
#ifndef MTP_TESTS_EDIT_H
#define MTP_TESTS_EDIT_H

#include "support.h"

#include "mtp/safetensors.h"

/* A copy, to be changed, of the model directory tests/data/sample/NAME. */
const char *test_model_copy(const char *name);

/* The tensors of a file as a list that can be changed before it is written again. */
typedef struct test_tensors {
    mtp_safetensors *file;
    mtp_safetensors_source *items;
    size_t count;
    void **owned; /* [num_owned] */
    size_t num_owned;
} test_tensors;

test_tensors test_tensors_open(const char *path);
/* The tensor with this name; fails the test when there is none. */
mtp_safetensors_source *test_tensors_find(test_tensors *tensors, const char *name);
void test_tensors_drop(test_tensors *tensors, const char *name);
void test_tensors_rename(test_tensors *tensors, const char *name, const char *to);
/* A zeroed tensor of this form; returns its memory. Replaces one of the same name. */
void *test_tensors_put(test_tensors *tensors, const char *name, mtp_dtype dtype, int32_t rank, const int64_t *shape);
/* Convert a real tensor to another real dtype. */
void test_tensors_convert(test_tensors *tensors, const char *name, mtp_dtype dtype);
/* Write to `path` with metadata {"format": "pt"}. */
void test_tensors_write(const test_tensors *tensors, const char *path);
void test_tensors_close(test_tensors *tensors);

/* Set `key` ("text_config.head_dim", or "sub.3.key") of a JSON file to a value given as JSON; NULL removes it. */
void test_json_set(const char *path, const char *key, const char *value);
/* The value of a key as one line of JSON; free() it. NULL when absent. */
char *test_json_get(const char *path, const char *key);
/* Do the two files hold the same bytes? */
bool test_same_file(const char *a, const char *b);

#endif
