/* Programs that a test starts and does not wait for. */
#ifndef MTP_TESTS_BACKGROUND_H
#define MTP_TESTS_BACKGROUND_H

#include <stdbool.h>
#include <sys/types.h>

/* Start a program (argv[0] a path, NULL-terminated); all its output goes to a file. */
pid_t test_start(const char *output_path, const char *const *argv);
/* Wait for its end: its exit code, 128 + signal when killed by one. */
int test_end(pid_t pid);
/* Wait until a file is there, or says something; fails the test after some seconds. */
void test_wait_for_file(const char *path);
void test_wait_for_text(const char *path, const char *part);
/* Fail the test unless the file says that. */
void test_file_says(const char *path, const char *part);
/* Whether a process whose number stands in a file is gone, or goes within some seconds. */
bool test_process_gone(const char *path);

#endif
