/* How many GPUs a run on this machine may use. */
#ifndef MTPRUN_DEVICES_H
#define MTPRUN_DEVICES_H

/* The device files nvidia0, nvidia1, ... of `dir` ("/dev"), no more of them than CUDA_VISIBLE_DEVICES lists when it is
 * set: its entries count up to the first that is negative. Asks no driver, so one that does not load hangs nothing. */
int devices_count(const char *dir);

#endif
