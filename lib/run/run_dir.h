/* Internal: the directory of a run, and who may write in it. */
#ifndef MTP_RUN_RUN_DIR_H
#define MTP_RUN_RUN_DIR_H

#include <stdbool.h>
#include <stdint.h>

#include "mtp/status.h"

#define MTP__RUN_FORMAT "mtp-run"
enum { MTP__RUN_VERSION = 1 };

/* Zero-initialise; `lock` is held while `locked`. */
typedef struct mtp__run_dir {
    char *path;
    int lock;
    bool locked;
    uint64_t device, inode; /* of its run.json, while it is locked */
} mtp__run_dir;

/* Does `path` hold a run: run.json is there. MTP_E_VERSION when a newer mtp wrote it. A directory without run.json that
 * has files of the names that a run writes is MTP_E_EXISTS. */
mtp_status mtp__run_dir_inspect(const char *path, bool *is_run);
/* Make the directory when missing, take its lock (MTP_E_EXISTS when another process has it), write run.json when it is
 * not there. `fresh`: another process must not have made a run of it meanwhile. Close with mtp__run_dir_close. */
mtp_status mtp__run_dir_open(const char *path, bool fresh, mtp__run_dir *directory);
/* Remove what a killed process left of files that it was writing: temporaries of the names that a run writes itself, in
 * the directory of the run and in its export. Only for who holds the lock. */
mtp_status mtp__run_dir_remove_leftovers(const mtp__run_dir *directory);
/* Is it still there, and the one that was opened: MTP_E_IO when somebody removed, moved or replaced it. MTP_OK for who
 * does not write there. */
mtp_status mtp__run_dir_check(const mtp__run_dir *directory);
void mtp__run_dir_close(mtp__run_dir *directory); /* accepts a zeroed struct */
/* Refuse when the file system of `path` (its nearest existing parent) has less than `bytes` free. `what` says what they
 * are for. */
mtp_status mtp__run_dir_check_space(const char *path, uint64_t bytes, const char *what);

#endif
