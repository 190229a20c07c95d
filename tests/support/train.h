/* A small, quick training run on the sample, for tests of everything around the step. */
#ifndef MTP_TESTS_TRAIN_H
#define MTP_TESTS_TRAIN_H

#include "mtp/train.h"

/* The text of a configuration: six documents, two of them in a micro-batch, K 2, one thread, every step logged, 6 steps
 * of a constant learning rate, no evaluation. `more` follows the last table, [train]: keys of it first, then other
 * tables that are not [model], [data], [loss], [optimizer], [output] or [device]; use overrides for those. Lives until
 * the process exits. */
const char *test_train_text(const char *output_dir, const char *more);
/* Writes it to a file of a fresh directory; returns the path. */
const char *test_train_file(const char *output_dir);
/* Loaded, with overrides up to a NULL; mtp_train_config_free. */
mtp_train_config *test_train_config(const char *output_dir, const char *const *overrides);
#define test_config(output_dir, ...) test_train_config(output_dir, (const char *const[]){__VA_ARGS__, NULL})
/* Train silently. */
mtp_status test_train(const mtp_train_config *config, mtp_train_result *result);
/* Train with these overrides; fails the test when training fails. */
mtp_train_result test_train_ok(const char *output_dir, const char *const *overrides);
#define test_run_training(output_dir, ...) test_train_ok(output_dir, (const char *const[]){__VA_ARGS__, NULL})

/* train/sample_<number> with hidden states so large that their squares overflow: finite in the file, not in the step.
 */
const char *test_huge_sample(int number);

/* metrics.jsonl of a run without what depends on the clock: each line without its "time". free() it. */
char *test_train_metrics(const char *output_dir);
/* Fail unless two checkpoint directories hold the same step, position and tensors, bit for bit. */
void test_same_checkpoint(const char *one, const char *other);

#endif
