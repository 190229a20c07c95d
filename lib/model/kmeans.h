/* Internal: balanced k-means, which gives every centroid the same number of tokens. */
#ifndef MTP_MODEL_KMEANS_H
#define MTP_MODEL_KMEANS_H

#include "base/context.h"

typedef struct mtp__kmeans_result {
    int64_t *ordering; /* [V]: the P tokens of centroid 0 ascending, then those of centroid 1, ...; free() it */
    double inertia;    /* mean squared distance to the own centroid over that to the mean of all rows */
    int64_t iterations;
} mtp__kmeans_result;

/* Cluster the rows of `table` (real [V, Hb], host) into `num_centroids`, which divides V.
 *
 * Lloyd's iterations with a capacity: rows choose in the order of what they lose by their second choice, a full
 * centroid is passed over. At most 12 iterations; each costs 2 V C Hb operations in products (1.6e12 for V = 262144, C
 * = 2048, Hb = 1536: 10 to 20 s on two free cores) and V times 32 candidates of memory (67 MB there). Deterministic in
 * `seed`. */
mtp_status mtp__balanced_kmeans(mtp_context *context, mtp_view table, int64_t num_centroids, uint64_t seed,
                                mtp__kmeans_result *result);

#endif
