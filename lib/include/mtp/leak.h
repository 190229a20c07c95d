/* The leak test: does a row of the drafter read only what serving will show it?
 *
 * A row at position t may read its own hidden state, the tokens it is fed, and K/V of its own document at j <= t
 * (sliding layers: t - W < j <= t). Everything else is changed, piece by piece, and no output of the row may move by a
 * bit: hidden and state vectors, selected centroids, logits, argmax, loss. Then the same rows are computed in other
 * company (alone, padded, in chunks of other sizes), which may change nothing either. A control changes a key that a
 * row does see and must be noticed: a test that finds nothing there proves nothing. */
#ifndef MTP_LEAK_H
#define MTP_LEAK_H

#include "mtp/data.h"
#include "mtp/loss.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mtp_leak_kind {
    MTP_LEAK_FUTURE,    /* K/V after t changed */
    MTP_LEAK_WINDOW,    /* sliding K/V at j <= t - W changed */
    MTP_LEAK_ROWS,      /* hidden states of all other positions, tokens the row is neither fed nor asked for */
    MTP_LEAK_DOCUMENTS, /* everything of all other documents of the batch */
    MTP_LEAK_ALONE,     /* its document alone in the batch */
    MTP_LEAK_PADDED,    /* documents one a line, padded, instead of packed */
    MTP_LEAK_CHUNKS,    /* rows in chunks of 1, 7, 64 and 512 */
    MTP_LEAK_CONTROL,   /* K/V at t, which every row sees, changed: must move */
    MTP_LEAK_KINDS
} mtp_leak_kind;

typedef struct mtp_leak_options {
    int32_t num_speculative_steps; /* K, 1..64; 0: 3 */
    int32_t position_offset;       /* 0 or 1 */
    int64_t rows_per_document;     /* supervised positions tried in each document, spread evenly over it; 0: 64 */
    int64_t tokens_per_batch;      /* documents are packed up to this many tokens; 0: 4096 */
    /* Called before each batch with the documents done so far; returning false ends the test with MTP_E_INTERRUPTED.
     * May be NULL. */
    bool (*progress)(void *user, int64_t documents_done, int64_t documents);
    void *user;
} mtp_leak_options;

typedef struct mtp_leak_property {
    const char *name;  /* "other documents" */
    const char *claim; /* one sentence */
    bool exact;        /* compared bit for bit; else values within `tolerance` of the report */
    bool holds;        /* also when there was no row to compare: see rows */
    int64_t rows;      /* comparisons of a row */
    int64_t moved;     /* of them, those that differed */
    char first[512];   /* the first that differed: sample, position, draft step, output; for the control, the first that
                          did not. Empty when there is none */
} mtp_leak_property;

typedef struct mtp_leak_report {
    mtp_leak_property properties[MTP_LEAK_KINDS]; /* by kind */
    bool holds;                                   /* all of them */
    bool rows_exact;       /* of the context: when false, ALONE, PADDED and CHUNKS hold to float order only, so hidden,
                              state and loss are compared as |a - b| <= tolerance * max(1, |a|, |b|), and choices (argmax,
                              centroids, logits), which a tie may turn, are not */
    const char *rows_note; /* of the context: one sentence about it */
    double tolerance;
    int64_t documents; /* with a supervised position */
    int64_t skipped;   /* without one */
} mtp_leak_report;

/* Run every test of the list over all samples of the data set. A leak is not an error: it is in the report. MTP_E_DATA
 * when no sample has a supervised position. */
MTP_API mtp_status mtp_leak_check(mtp_drafter *drafter, const mtp_verifier *verifier, const mtp_dataset *dataset,
                                  const mtp_leak_options *options, mtp_leak_report *report);

#ifdef __cplusplus
}
#endif
#endif
