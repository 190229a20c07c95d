/* What a training step of the official sizes will take on many GPUs, foretold from operations and bytes. Estimates:
 * rates are those that kernels of each kind are expected to reach, not measured ones. */
#ifndef MTP_SCALE_H
#define MTP_SCALE_H

#include <stdint.h>

#include "mtp/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mtp_scale_options {
    int64_t world_size; /* ranks, one GPU each */
    double bandwidth;   /* bytes/s of an all-reduce: what nccl-tests call bus bandwidth. > 0 with several ranks */
    double matrix_rate; /* bf16 operations/s of one GPU; 0: 790e12, an H200 */
    double memory_rate; /* bytes/s of one GPU's memory; 0: 4.3e12 */
    int64_t positions;  /* supervised positions of one rank and step; 0: 16384 */
    int64_t length;     /* tokens of a document; 0: 4096 */
    int64_t num_speculative_steps; /* K; 0: 3 */
    int64_t bucket_bytes;          /* of gradients that travel together; 0: 25 MiB */
    int64_t zero_stage;            /* 1: each rank keeps the moments of its share of the parameters; memory only */
} mtp_scale_options;

typedef struct mtp_scale {
    const char *name; /* of the verifier: "E2B" */
    int64_t num_parameters;
    double operations;      /* of one position, forward and backward; a multiplication with its addition counts as 2 */
    double compute_seconds; /* forward and backward */
    double optimizer_seconds;     /* reading and writing masters, moments and gradients */
    double all_reduce_seconds;    /* of all gradients in fp32, were nothing else done */
    double exposed_seconds;       /* the part of it that no backward pass hides */
    double step_seconds;          /* compute, exposed and optimizer */
    double positions_per_second;  /* of all ranks */
    double efficiency;            /* step of one rank alone / this step */
    uint64_t memory_bytes;        /* of one rank: parameters and their bf16 copy, gradients, moments, the step's own
                                     memory, two batches, the verifier's embedding table */
    double data_bytes_per_second; /* that one rank reads: hidden states and K/V in bf16, every token supervised */
} mtp_scale;

/* The sizes by index from 0, as mtp_pack_official names them. MTP_E_NOT_FOUND behind the last; MTP_E_CONFIG for numbers
 * that make no sense. */
MTP_API mtp_status mtp_scale_predict(int64_t index, const mtp_scale_options *options, mtp_scale *scale);

#ifdef __cplusplus
}
#endif
#endif
