/* The inner loops, compiled once per instruction set with MTP__ISA naming it (kernels/CMakeLists.txt).
 *
 * Elementwise functions run over whole vectors; a rest shorter than a vector goes through a zero-padded copy. Sums have
 * one order for every instruction set: element i belongs to lane i mod 64, the last incomplete block of 64 is padded
 * with the neutral element, and the 64 lanes are folded in halves. */
#include "cpu/vec.h"

#include <math.h>

#include "cpu/lanes.h"
#include "philox.h"

/* ---- loops ------------------------------------------------------------------------------------------------------- */

LANE_FUNCTION vf load_part(const float *x, int64_t count)
{
    float part[LANES] = {0};
    memcpy(part, x, (size_t)count * sizeof *x);
    return load(part);
}

LANE_FUNCTION void store_part(float *x, vf v, int64_t count)
{
    float part[LANES];
    store(part, v);
    memcpy(x, part, (size_t)count * sizeof *x);
}

/* out[i] = expression for n elements; the expression reads its operands with IN(pointer). It is expanded twice: for
 * whole vectors, and on padded copies for the rest. */
#define ELEMENTWISE(out, n, expression)                  \
    do {                                                 \
        int64_t at = 0;                                  \
        for (; at + LANES <= (n); at += LANES) {         \
            enum { whole = 1 };                          \
            const int64_t count = LANES;                 \
            (void)count;                                 \
            store((out) + at, (expression));             \
        }                                                \
        if (at < (n)) {                                  \
            enum { whole = 0 };                          \
            const int64_t count = (n)-at;                \
            store_part((out) + at, (expression), count); \
        }                                                \
    } while (0)
#define IN(x) (whole ? load((x) + at) : load_part((x) + at, count))

/* The 64 partial sums of a reduction. */
typedef struct lanes64 {
    vf v[VECTORS_OF_A_BLOCK];
} lanes64;

LANE_FUNCTION float fold_sum(const lanes64 *sums)
{
    float t[FLOATS_OF_A_BLOCK];
    for (int i = 0; i < VECTORS_OF_A_BLOCK; i++) store(t + i * LANES, sums->v[i]);
    for (int width = FLOATS_OF_A_BLOCK / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) t[i] += t[i + width];
    return t[0];
}

/* Copies the last n mod 64 elements to `block`, the rest of which is `neutral`; returns their number. */
LANE_FUNCTION int64_t last_block(float block[FLOATS_OF_A_BLOCK], const float *x, int64_t n, float neutral)
{
    const int64_t count = n % FLOATS_OF_A_BLOCK;
    for (int i = 0; i < FLOATS_OF_A_BLOCK; i++) block[i] = neutral;
    memcpy(block, x + (n - count), (size_t)count * sizeof *x);
    return count;
}

/* ---- conversions ------------------------------------------------------------------------------------------------- */

typedef enum half_kind { HALF_BF16, HALF_F16 } half_kind;

LANE_FUNCTION vf widen(vh x, half_kind kind)
{
    return kind == HALF_BF16 ? from_bf16(x) : from_f16(x);
}

LANE_FUNCTION vh narrow(vf x, half_kind kind)
{
    return kind == HALF_BF16 ? to_bf16(x) : to_f16(x);
}

LANE_FUNCTION vf widen_scaled(vh x, half_kind kind, float factor, int scaled)
{
    const vf value = widen(x, kind);
    return scaled ? widen(narrow(factor * value, kind), kind) : value;
}

LANE_FUNCTION void half_to_float(float *dst, const uint16_t *src, int64_t n, half_kind kind, float factor, int scaled)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(dst + i, widen_scaled(*(const vh_mem *)(src + i), kind, factor, scaled));
    if (i < n) {
        uint16_t part[LANES] = {0};
        memcpy(part, src + i, (size_t)(n - i) * sizeof *part);
        store_part(dst + i, widen_scaled(*(const vh_mem *)part, kind, factor, scaled), n - i);
    }
}

LANE_FUNCTION void float_to_half(uint16_t *dst, const float *src, int64_t n, half_kind kind)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) *(vh_mem *)(dst + i) = narrow(load(src + i), kind);
    if (i < n) {
        uint16_t part[LANES];
        *(vh_mem *)part = narrow(load_part(src + i, n - i), kind);
        memcpy(dst + i, part, (size_t)(n - i) * sizeof *part);
    }
}

static void to_f32(float *dst, const void *src, mtp_dtype src_dtype, int64_t n)
{
    if (src_dtype == MTP_F32)
        memcpy(dst, src, (size_t)n * sizeof *dst);
    else if (src_dtype == MTP_BF16)
        half_to_float(dst, src, n, HALF_BF16, 1.0f, 0);
    else
        half_to_float(dst, src, n, HALF_F16, 1.0f, 0);
}

static void from_f32(void *dst, mtp_dtype dst_dtype, const float *src, int64_t n)
{
    if (dst_dtype == MTP_F32)
        memcpy(dst, src, (size_t)n * sizeof *src);
    else
        float_to_half(dst, src, n, dst_dtype == MTP_BF16 ? HALF_BF16 : HALF_F16);
}

static void scale(float *y, float alpha, const float *x, int64_t n)
{
    ELEMENTWISE(y, n, alpha * IN(x));
}

static void scale_rounded(float *dst, const void *src, mtp_dtype src_dtype, float factor, int64_t n)
{
    if (src_dtype == MTP_F32)
        scale(dst, factor, src, n);
    else if (src_dtype == MTP_BF16)
        half_to_float(dst, src, n, HALF_BF16, factor, 1);
    else
        half_to_float(dst, src, n, HALF_F16, factor, 1);
}

/* ---- sums -------------------------------------------------------------------------------------------------------- */

LANE_FUNCTION void add_products(lanes64 *sums, const float *x, const float *y)
{
    for (int i = 0; i < VECTORS_OF_A_BLOCK; i++) sums->v[i] += load(x + i * LANES) * load(y + i * LANES);
}

static float dot(const float *x, const float *y, int64_t n)
{
    lanes64 sums = {0};
    int64_t i = 0;
    for (; i + FLOATS_OF_A_BLOCK <= n; i += FLOATS_OF_A_BLOCK) add_products(&sums, x + i, y + i);
    if (i < n) {
        float last_x[FLOATS_OF_A_BLOCK], last_y[FLOATS_OF_A_BLOCK];
        last_block(last_x, x, n, 0.0f);
        last_block(last_y, y, n, 0.0f);
        add_products(&sums, last_x, last_y);
    }
    return fold_sum(&sums);
}

LANE_FUNCTION void add_triples(lanes64 *sums, const float *x, const float *w, const float *y)
{
    for (int i = 0; i < VECTORS_OF_A_BLOCK; i++)
        sums->v[i] += load(x + i * LANES) * (load(w + i * LANES) * load(y + i * LANES));
}

static float dot3(const float *x, const float *w, const float *y, int64_t n)
{
    lanes64 sums = {0};
    int64_t i = 0;
    for (; i + FLOATS_OF_A_BLOCK <= n; i += FLOATS_OF_A_BLOCK) add_triples(&sums, x + i, w + i, y + i);
    if (i < n) {
        float last_x[FLOATS_OF_A_BLOCK], last_w[FLOATS_OF_A_BLOCK], last_y[FLOATS_OF_A_BLOCK];
        last_block(last_x, x, n, 0.0f);
        last_block(last_w, w, n, 0.0f);
        last_block(last_y, y, n, 0.0f);
        add_triples(&sums, last_x, last_w, last_y);
    }
    return fold_sum(&sums);
}

LANE_FUNCTION void keep_larger(lanes64 *most, const float *x)
{
    for (int i = 0; i < VECTORS_OF_A_BLOCK; i++) most->v[i] = larger(load(x + i * LANES), most->v[i]);
}

static float max(const float *x, int64_t n)
{
    lanes64 most;
    int64_t i = 0;
    for (int k = 0; k < VECTORS_OF_A_BLOCK; k++) most.v[k] = splat(-INFINITY);
    for (; i + FLOATS_OF_A_BLOCK <= n; i += FLOATS_OF_A_BLOCK) keep_larger(&most, x + i);
    if (i < n) {
        float last[FLOATS_OF_A_BLOCK];
        last_block(last, x, n, -INFINITY);
        keep_larger(&most, last);
    }
    float t[FLOATS_OF_A_BLOCK];
    for (int k = 0; k < VECTORS_OF_A_BLOCK; k++) store(t + k * LANES, most.v[k]);
    for (int width = FLOATS_OF_A_BLOCK / 2; width > 0; width /= 2)
        for (int k = 0; k < width; k++) t[k] = t[k] > t[k + width] ? t[k] : t[k + width];
    return t[0];
}

/* Sixteen double lanes, in parts of half a float vector. */
enum { DOUBLES = LANES / 2, DOUBLE_VECTORS = 16 / DOUBLES };

LANE_FUNCTION void add_squares(vd sums[DOUBLE_VECTORS], const float *x)
{
    for (int i = 0; i < DOUBLE_VECTORS; i++) {
        const vd value = __builtin_convertvector(*(const vf_half_mem *)(x + i * DOUBLES), vd);
        sums[i] += value * value;
    }
}

static double sumsq(const float *x, int64_t n)
{
    vd sums[DOUBLE_VECTORS] = {{0}};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) add_squares(sums, x + i);
    if (i < n) {
        float last[16] = {0};
        memcpy(last, x + i, (size_t)(n - i) * sizeof *x);
        add_squares(sums, last);
    }
    double t[16];
    memcpy(t, sums, sizeof t);
    for (int width = 8; width > 0; width /= 2)
        for (int k = 0; k < width; k++) t[k] += t[k + width];
    return t[0];
}

/* ---- elementwise ------------------------------------------------------------------------------------------------- */

static void axpy(float *y, float alpha, const float *x, int64_t n)
{
    ELEMENTWISE(y, n, IN(y) + alpha * IN(x));
}

static void mul(float *y, const float *x, const float *w, float alpha, int64_t n)
{
    ELEMENTWISE(y, n, alpha * IN(x) * IN(w));
}

static void mul_add(float *y, const float *x, const float *w, float alpha, int64_t n)
{
    ELEMENTWISE(y, n, IN(y) + alpha * IN(x) * IN(w));
}

static void add_mul(float *y, const float *base, const float *x, const float *w, float alpha, float factor, int64_t n)
{
    ELEMENTWISE(y, n, factor * (IN(base) + alpha * IN(x) * IN(w)));
}

static void norm_dx(float *dx, const float *x, const float *w, const float *dy, float alpha, float beta, int64_t n)
{
    ELEMENTWISE(dx, n, alpha * (IN(w) * IN(dy)) - beta * IN(x));
}

static void rotate(float *y, const float *x, const float *cosine, const float *sine, float sign, int64_t half)
{
    int64_t i = 0;
    for (; i < half; i += LANES) {
        const int64_t count = half - i < LANES ? half - i : LANES;
        const int whole = count == LANES;
        const vf x1 = whole ? load(x + i) : load_part(x + i, count);
        const vf x2 = whole ? load(x + half + i) : load_part(x + half + i, count);
        const vf c = whole ? load(cosine + i) : load_part(cosine + i, count);
        const vf s = sign * (whole ? load(sine + i) : load_part(sine + i, count));
        const vf y1 = x1 * c - x2 * s;
        const vf y2 = x2 * c + x1 * s;
        if (whole) {
            store(y + i, y1);
            store(y + half + i, y2);
        } else {
            store_part(y + i, y1, count);
            store_part(y + half + i, y2, count);
        }
    }
}

/* ---- exponentials ------------------------------------------------------------------------------------------------ */

static float exp_shift_sum(float *x, float shift, int64_t n)
{
    lanes64 sums = {0};
    int64_t i = 0;
    for (; i + FLOATS_OF_A_BLOCK <= n; i += FLOATS_OF_A_BLOCK)
        for (int k = 0; k < VECTORS_OF_A_BLOCK; k++) {
            const vf e = exponential(load(x + i + k * LANES) - shift);
            store(x + i + k * LANES, e);
            sums.v[k] += e;
        }
    if (i < n) {
        float last[FLOATS_OF_A_BLOCK];
        last_block(last, x, n, -INFINITY);
        for (int k = 0; k < VECTORS_OF_A_BLOCK; k++) {
            const vf e = exponential(load(last + k * LANES) - shift);
            store(last + k * LANES, e);
            sums.v[k] += e;
        }
        memcpy(x + i, last, (size_t)(n - i) * sizeof *x);
    }
    return fold_sum(&sums);
}

static float sum_exp(const float *x, float shift, int64_t n)
{
    lanes64 sums = {0};
    int64_t i = 0;
    for (; i + FLOATS_OF_A_BLOCK <= n; i += FLOATS_OF_A_BLOCK)
        for (int k = 0; k < VECTORS_OF_A_BLOCK; k++) sums.v[k] += exponential(load(x + i + k * LANES) - shift);
    if (i < n) {
        float last[FLOATS_OF_A_BLOCK];
        last_block(last, x, n, -INFINITY);
        for (int k = 0; k < VECTORS_OF_A_BLOCK; k++) sums.v[k] += exponential(load(last + k * LANES) - shift);
    }
    return fold_sum(&sums);
}

static void softmax_scaled(float *p, const float *x, float lse, float factor, int64_t n)
{
    ELEMENTWISE(p, n, factor * exponential(IN(x) - lse));
}

static void attention_ds(float *g, const float *s, float lse, float d, int64_t n)
{
    ELEMENTWISE(g, n, exponential(IN(s) - lse) * (IN(g) - d));
}

LANE_FUNCTION vf gelu_value(vf g)
{
    vf value, slope;
    gelu(g, &value, &slope);
    return value;
}

static void geglu(float *y, const float *gate, const float *up, int64_t n)
{
    ELEMENTWISE(y, n, gelu_value(IN(gate)) * IN(up));
}

static void geglu_bwd(float *y, float *dgate, float *dup, const float *gate, const float *up, const float *dy,
                      int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t count = n - i < LANES ? n - i : LANES;
        const int whole = count == LANES;
        const vf g = whole ? load(gate + i) : load_part(gate + i, count);
        const vf u = whole ? load(up + i) : load_part(up + i, count);
        const vf d = whole ? load(dy + i) : load_part(dy + i, count);
        vf value, slope;
        gelu(g, &value, &slope);
        const vf results[3] = {value * u, d * u * slope, d * value};
        float *const outputs[3] = {y, dgate, dup};
        for (int k = 0; k < 3; k++) {
            if (!outputs[k]) continue;
            if (whole)
                store(outputs[k] + i, results[k]);
            else
                store_part(outputs[k] + i, results[k], count);
        }
    }
}

static int64_t argmax(const float *x, int64_t n)
{
    enum { chunk = 1024 };
    int64_t best_chunk = 0;
    float best = -INFINITY;
    for (int64_t i = 0; i < n; i += chunk) {
        const float most = max(x + i, n - i < chunk ? n - i : chunk);
        if (most > best) {
            best = most;
            best_chunk = i;
        }
    }
    for (int64_t i = best_chunk; i < n; i++)
        if (x[i] == best) return i;
    return 0; /* nothing but NaN */
}

/* ---- optimizer --------------------------------------------------------------------------------------------------- */

static void adamw(float *p, float *m, float *v, const float *g, int64_t n, const mtp__vec_adamw *step)
{
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t count = n - i < LANES ? n - i : LANES;
        const int whole = count == LANES;
        const vf gradient = step->grad_scale * (whole ? load(g + i) : load_part(g + i, count));
        const vf m0 = whole ? load(m + i) : load_part(m + i, count);
        const vf v0 = whole ? load(v + i) : load_part(v + i, count);
        const vf p0 = whole ? load(p + i) : load_part(p + i, count);
        const vf m1 = step->beta1 * m0 + step->rest1 * gradient;
        const vf v1 = step->beta2 * v0 + step->rest2 * (gradient * gradient);
        const vf p1 = step->decay * p0 - step->step_size * m1 / (square_root(v1) * step->inv_root_bias2 + step->eps);
        if (whole) {
            store(m + i, m1);
            store(v + i, v1);
            store(p + i, p1);
        } else {
            store_part(m + i, m1, count);
            store_part(v + i, v1, count);
            store_part(p + i, p1, count);
        }
    }
}

/* mtp__random_block of `BLOCKS` neighbouring blocks, side by side so that the compiler makes vectors of them: the 16
 * bits of each of their values. */
enum { BLOCKS = 16, OF_A_BLOCK = 8, OF_ALL_BLOCKS = BLOCKS * OF_A_BLOCK };

static void random_blocks(uint32_t random[OF_ALL_BLOCKS], uint64_t seed, uint64_t step, uint64_t block)
{
    uint32_t x[4][BLOCKS], key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < BLOCKS; i++) {
        const uint64_t counter = block + (uint64_t)i;
        x[0][i] = (uint32_t)counter;
        x[1][i] = (uint32_t)(counter >> 32);
        x[2][i] = (uint32_t)step;
        x[3][i] = (uint32_t)(step >> 32);
    }
    for (int round = 0; round < MTP__PHILOX_ROUNDS; round++) {
        for (int i = 0; i < BLOCKS; i++) {
            const uint64_t a = (uint64_t)MTP__PHILOX_M0 * x[0][i], b = (uint64_t)MTP__PHILOX_M1 * x[2][i];
            x[0][i] = (uint32_t)(b >> 32) ^ x[1][i] ^ key0;
            x[1][i] = (uint32_t)b;
            x[2][i] = (uint32_t)(a >> 32) ^ x[3][i] ^ key1;
            x[3][i] = (uint32_t)a;
        }
        key0 += MTP__PHILOX_W0;
        key1 += MTP__PHILOX_W1;
    }
    for (int i = 0; i < BLOCKS; i++)
        for (int j = 0; j < OF_A_BLOCK; j++) random[OF_A_BLOCK * i + j] = x[j / 2][i] >> (16 * (j % 2)) & 0xffffu;
}

static void round_stochastic(uint16_t *dst, const float *src, int64_t n, uint64_t seed, uint64_t step, uint64_t place)
{
    for (int64_t i = 0; i < n; i += OF_ALL_BLOCKS) {
        const size_t count = (size_t)(n - i < OF_ALL_BLOCKS ? n - i : OF_ALL_BLOCKS);
        uint32_t random[OF_ALL_BLOCKS], bits[OF_ALL_BLOCKS] = {0};
        uint16_t rounded[OF_ALL_BLOCKS];
        random_blocks(random, seed, step, (place + (uint64_t)i) / OF_A_BLOCK);
        memcpy(bits, src + i, count * sizeof *bits);
        for (int j = 0; j < OF_ALL_BLOCKS; j++) rounded[j] = (uint16_t)(mtp__round_to_bf16(bits[j], random[j]) >> 16);
        memcpy(dst + i, rounded, count * sizeof *rounded);
    }
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

const mtp__vec JOIN(mtp__vec_, MTP__ISA) = {
    .isa = TEXT(MTP__ISA),
    .to_f32 = to_f32,
    .from_f32 = from_f32,
    .scale_rounded = scale_rounded,
    .dot = dot,
    .dot3 = dot3,
    .max = max,
    .sumsq = sumsq,
    .axpy = axpy,
    .scale = scale,
    .mul = mul,
    .mul_add = mul_add,
    .add_mul = add_mul,
    .norm_dx = norm_dx,
    .rotate = rotate,
    .exp_shift_sum = exp_shift_sum,
    .sum_exp = sum_exp,
    .softmax_scaled = softmax_scaled,
    .attention_ds = attention_ds,
    .geglu = geglu,
    .geglu_bwd = geglu_bwd,
    .argmax = argmax,
    .adamw = adamw,
    .round_stochastic = round_stochastic,
};
