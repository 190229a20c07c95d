#include "floor.h"

/* Keys that a row sees in the mean: min(t + 1, window) over the rows t of a document; no window: all before it. */
static double mean_keys(int64_t document, int64_t window)
{
    const double T = (double)document, W = (double)window;
    if (window <= 0 || window >= document) return (T + 1) / 2;
    return (W * (W + 1) / 2 + W * (T - W)) / T;
}

static void count_head(const mtp_drafter_config *c, mtp_head_mode head, double n, floor_count *count)
{
    const double h = (double)c->hidden_size, V = (double)c->vocab_size;
    if (head == MTP_HEAD_FLAT) { /* gradients are formed in the forward pass: no logits twice */
        count->forward[FLOOR_HEAD] = 2 * V * h * n;
        count->backward[FLOOR_HEAD] = 4 * V * h * n;
        return;
    }
    const double C = (double)c->num_centroids, selected = head == MTP_HEAD_MASKED ? (double)c->centroid_top_k : 0;
    const double candidates = (selected + 1) * V / C; /* the target's centroid among them */
    count->forward[FLOOR_HEAD] = (2 * C * h + 2 * candidates * h) * n;
    count->backward[FLOOR_HEAD] = 3 * 2 * candidates * h * n;
}

floor_count floor_operations(const mtp_drafter_config *c, mtp_head_mode head, int64_t document, int64_t K)
{
    floor_count count = {.total = 0};
    double *f = count.forward, *b = count.backward;
    const double B = (double)c->backbone_hidden_size, h = (double)c->hidden_size, n = (double)K;
    const double I = (double)c->intermediate_size, heads = (double)c->num_heads;
    f[FLOOR_PRE_PROJECTION] = 2 * B * h + 2 * B * h * n;
    b[FLOOR_PRE_PROJECTION] = f[FLOOR_PRE_PROJECTION] + 2 * B * h * (n - 1); /* dW; dx of the state only */
    f[FLOOR_POST_PROJECTION] = 2 * h * B * (n - 1);
    b[FLOOR_POST_PROJECTION] = 2 * f[FLOOR_POST_PROJECTION];
    for (int64_t layer = 0; layer < c->num_layers; layer++) {
        const bool full = c->layer_types[layer] == MTP_LAYER_FULL;
        const double width = heads * (double)c->geometry[c->layer_types[layer]].head_dim;
        const double keys = mean_keys(document, full ? 0 : c->sliding_window);
        f[FLOOR_Q_AND_O] += 4 * h * width * n;
        f[FLOOR_MLP] += 6 * h * I * n;
        f[full ? FLOOR_FULL : FLOOR_SLIDING] += 4 * width * keys * n;
    }
    b[FLOOR_Q_AND_O] = 2 * f[FLOOR_Q_AND_O];
    b[FLOOR_MLP] = 2 * f[FLOOR_MLP];
    b[FLOOR_SLIDING] = 1.5 * f[FLOOR_SLIDING]; /* S, dP, dQ against S, O */
    b[FLOOR_FULL] = 1.5 * f[FLOOR_FULL];
    count_head(c, head, n, &count);
    for (int part = 0; part < FLOOR_PARTS; part++) count.total += f[part] + b[part];
    return count;
}
