/* The op tests on a device whose memory is not the host's: MTP_TEST_DEVICE=cuda. A table whose ops take host views as
 * the tests make them, copy the buffers behind them to the device (guards on both sides), run the device's op on the
 * copies, and copy everything back. Views of one buffer stay views of one buffer, and addresses keep their alignment,
 * so aliases and odd addresses reach the device as the test meant them. Included by ops_check.h. */
#ifndef MTP_TESTS_OPS_MIRROR_H
#define MTP_TESTS_OPS_MIRROR_H

enum { MIRROR_GUARD = 256, MIRROR_REGIONS = 32, MIRROR_FILL = 1 << 16 };

typedef struct mirror_region {
    char *host;
    size_t size, shift; /* shift: of the host address from a multiple of 64 */
    char *device;       /* block: guard, shift, `size` bytes, guard */
} mirror_region;

typedef struct mirror {
    mtp_device *device;
    mirror_region regions[MIRROR_REGIONS];
    int count;
    void *scratch;
} mirror;

static struct {
    const mtp_backend *real;
    mtp_backend table; /* real's device functions, mirrored ops */
} mirror_of;

/* The buffer that `data` points into: one of the registry, or else what the view spans. */
static inline void mirror_extent(const mtp_view *view, char **begin, size_t *size)
{
    char *data = view->data;
    for (int i = 0; i < ops_owned.count; i++) {
        char *memory = (char *)ops_owned.blocks[i].memory + OPS_GUARD;
        if (data < memory || data >= memory + ops_owned.blocks[i].size) continue;
        *begin = memory;
        *size = ops_owned.blocks[i].size;
        return;
    }
    int64_t last = 0;
    for (int32_t axis = 0; axis < view->rank && axis < MTP_MAX_RANK; axis++)
        last += (view->shape[axis] - 1) * view->stride[axis];
    *begin = data;
    *size = (size_t)(last + 1) * mtp_dtype_size(view->dtype);
}

static inline mtp_status mirror_check_guards(const mirror_region *r, const char *block)
{
    const size_t before = MIRROR_GUARD + r->shift, all = before + r->size + MIRROR_GUARD;
    for (size_t i = 0; i < all; i++) {
        const bool inside = i >= before && i < before + r->size;
        if (!inside && (unsigned char)block[i] != 0xa5)
            fail_msg("an op wrote %s a buffer of %zu bytes", i < before ? "before" : "after", r->size);
    }
    return MTP_OK;
}

/* The whole block of a region, from or to the host. */
static inline mtp_status mirror_copy(mirror *m, const mirror_region *r, bool back)
{
    const size_t before = MIRROR_GUARD + r->shift, all = before + r->size + MIRROR_GUARD;
    char *block = malloc(all);
    if (!block) fail_msg("out of memory");
    mtp_status status;
    if (back) {
        status = mirror_of.real->download(m->device, block, r->device, all);
        if (status == MTP_OK) status = mirror_check_guards(r, block);
        if (status == MTP_OK) memcpy(r->host, block + before, r->size);
    } else {
        memset(block, 0xa5, all);
        memcpy(block + before, r->host, r->size);
        status = mirror_of.real->upload(m->device, r->device, block, all);
    }
    free(block);
    return status;
}

static inline void mirror_view(mirror *m, mtp_view *view)
{
    char *begin;
    size_t size;
    if (!view->data) return;
    mirror_extent(view, &begin, &size);
    int i = 0;
    while (i < m->count && !(begin >= m->regions[i].host && begin < m->regions[i].host + m->regions[i].size)) i++;
    mirror_region *r = &m->regions[i];
    if (i == m->count) {
        if (m->count == MIRROR_REGIONS) fail_msg("too many buffers in one op");
        m->count++;
        *r = (mirror_region){.host = begin, .size = size, .shift = (uintptr_t)begin % 64};
        void *memory = NULL;
        assert_ok(mirror_of.real->memory_alloc(m->device, 2 * MIRROR_GUARD + r->shift + size, &memory));
        r->device = memory;
        assert_ok(mirror_copy(m, r, false));
    }
    view->data = r->device + MIRROR_GUARD + r->shift + ((char *)view->data - r->host);
}

static inline void mirror_begin(mirror *m, mtp_device *device, void *args, const size_t *views, size_t num_views)
{
    *m = (mirror){.device = device};
    for (size_t i = 0; i < num_views; i++) mirror_view(m, (mtp_view *)(void *)((char *)args + views[i]));
}

/* Scratch of the same size and alignment, with NaN at its beginning. */
static inline void mirror_scratch(mirror *m, mtp_scratch *scratch)
{
    if (!scratch->data) return;
    const size_t shift = (uintptr_t)scratch->data % 64,
                 fill = scratch->size < MIRROR_FILL ? scratch->size : MIRROR_FILL;
    assert_ok(mirror_of.real->memory_alloc(m->device, scratch->size + 64, &m->scratch));
    char *noise = malloc(fill + 1);
    if (!noise) fail_msg("out of memory");
    memset(noise, 0xff, fill);
    scratch->data = (char *)m->scratch + shift;
    assert_ok(mirror_of.real->upload(m->device, scratch->data, noise, fill));
    free(noise);
}

/* Results to the host. An op that failed must have left everything as it was; a download that fails reports what a
 * kernel found out about an index, as the model would see it. */
static inline mtp_status mirror_end(mirror *m, mtp_status status)
{
    for (int i = 0; i < m->count; i++) {
        const mtp_status copied = mirror_copy(m, &m->regions[i], true);
        if (status == MTP_OK) status = copied;
        mirror_of.real->memory_free(m->device, m->regions[i].device);
    }
    mirror_of.real->memory_free(m->device, m->scratch);
    return status;
}

/* ---- the views of every argument struct -------------------------------------------------------------------------- */

#define AT_1(args, a) offsetof(args, a)
#define AT_2(args, a, ...) offsetof(args, a), AT_1(args, __VA_ARGS__)
#define AT_3(args, a, ...) offsetof(args, a), AT_2(args, __VA_ARGS__)
#define AT_4(args, a, ...) offsetof(args, a), AT_3(args, __VA_ARGS__)
#define AT_5(args, a, ...) offsetof(args, a), AT_4(args, __VA_ARGS__)
#define AT_6(args, a, ...) offsetof(args, a), AT_5(args, __VA_ARGS__)
#define AT_7(args, a, ...) offsetof(args, a), AT_6(args, __VA_ARGS__)
#define AT_9(args, a, b, ...) offsetof(args, a), offsetof(args, b), AT_7(args, __VA_ARGS__)
#define AT_11(args, a, b, ...) offsetof(args, a), offsetof(args, b), AT_9(args, __VA_ARGS__)
#define AT_16(args, a, b, c, d, e, ...) AT_5(args, a, b, c, d, e), AT_11(args, __VA_ARGS__)
#define AT_13(args, a, b, ...) offsetof(args, a), offsetof(args, b), AT_11(args, __VA_ARGS__)

static const size_t views_of_mtp_embed_args[] = {AT_3(mtp_embed_args, table, ids, y)};
static const size_t views_of_mtp_gather_args[] = {AT_3(mtp_gather_args, src, index, dst)};
static const size_t views_of_mtp_convert_args[] = {AT_2(mtp_convert_args, src, dst)};
static const size_t views_of_mtp_axpy_args[] = {AT_2(mtp_axpy_args, x, y)};
static const size_t views_of_mtp_linear_args[] = {AT_3(mtp_linear_args, x, w, y)};
static const size_t views_of_mtp_rmsnorm_args[] = {AT_9(mtp_rmsnorm_args, x, w, y, rstd, dy, dx, dw, cos, sin)};
static const size_t views_of_mtp_residual_norm_args[] = {AT_16(mtp_residual_norm_args, residual, x, w, scalar, y, rstd,
                                                               dy, dresidual, dx, dw, dscalar, next_w, next_y,
                                                               next_rstd, next_dy, next_dw)};
static const size_t views_of_mtp_geglu_args[] = {AT_6(mtp_geglu_args, gate, up, y, dy, dgate, dup)};
static const size_t views_of_mtp_rope_table_args[] = {AT_4(mtp_rope_table_args, positions, inv_freq, cos, sin)};
static const size_t views_of_mtp_rope_args[] = {AT_4(mtp_rope_args, x, cos, sin, y)};
static const size_t views_of_mtp_attention_args[] = {
    AT_9(mtp_attention_args, q, kv, key_begin, key_end, doc_begin, o, lse, do_, dq)};
static const size_t views_of_mtp_topk_args[] = {AT_2(mtp_topk_args, scores, selected)};
static const size_t views_of_mtp_xent_args[] = {AT_5(mtp_xent_args, logits, target, scale, loss, dlogits)};
static const size_t views_of_mtp_head_args[] = {
    AT_13(mtp_head_args, x, e, order, slot_of, selected, target, scale, loss, argmax, miss, logits, dx, de)};
static const size_t views_of_mtp_tally_args[] = {
    AT_7(mtp_tally_args, index, target, argmax, loss, centroid_loss, miss, sums)};
static const size_t views_of_mtp_sumsq_args[] = {AT_2(mtp_sumsq_args, x, result)};
static const size_t views_of_mtp_clip_args[] = {AT_2(mtp_clip_args, control, watch)};
static const size_t views_of_mtp_adamw_args[] = {AT_7(mtp_adamw_args, p, m, v, g, shadow, decays, control)};

#define MIRROR_SCRATCH_0
#define MIRROR_SCRATCH_1 mirror_scratch(&m, &copy.scratch);
#define MIRROR(op, args, scratch)                                                                  \
    static inline mtp_status mirror_##op(mtp_device *device, const args *a)                        \
    {                                                                                              \
        mirror m;                                                                                  \
        args copy = *a;                                                                            \
        mirror_begin(&m, device, &copy, views_of_##args, sizeof views_of_##args / sizeof(size_t)); \
        MIRROR_SCRATCH_##scratch return mirror_end(&m, mirror_of.real->op(device, &copy));         \
    }
MTP_OP_LIST(MIRROR)
#undef MIRROR

static inline const mtp_backend *mirror_open(const char *name)
{
    int index = 0;
    if (mirror_of.real) return &mirror_of.table;
    assert_ok(mtp__backend_of(name, &mirror_of.real, &index));
    mirror_of.table = *mirror_of.real;
#define MIRROR(op, args, scratch) mirror_of.table.op = mirror_##op;
    MTP_OP_LIST(MIRROR)
#undef MIRROR
    return &mirror_of.table;
}

#endif
