/* Protects: the inner loops of every instruction set: exact conversions of all 16-bit values, exp to 2 ulp with its
 * limits, sums, and lengths that are no multiple of a vector, at any address, without a touch beyond the end. */
#include "ops_check.h"

#include "cpu/vec.h"

static void each(void (*body)(const mtp__vec *vec))
{
    int found = 0;
    for (int i = 0; i < OPS_ISAS; i++) {
        const mtp__vec *vec = mtp__vec_choose(ops_isas[i]);
        if (!vec) continue;
        assert_string_equal(vec->isa, ops_isas[i]);
        body(vec);
        ops_release();
        found++;
    }
    assert_true(found > 0);
    assert_non_null(mtp__vec_choose(NULL));
    assert_null(mtp__vec_choose("sse9"));
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- conversions ------------------------------------------------------------------------------------------------- */

static double value_of_f16(uint32_t h)
{
    const int exponent = (int)(h >> 10 & 31u);
    const double mantissa = h & 1023u;
    const double magnitude = exponent == 31  ? (mantissa != 0 ? NAN : INFINITY)
                             : exponent == 0 ? ldexp(mantissa, -24)
                                             : ldexp(1024 + mantissa, exponent - 25);
    return h & 0x8000u ? -magnitude : magnitude;
}

static void all_16_bit_values(const mtp__vec *vec)
{
    uint16_t *half = ops_bytes(65536 * sizeof *half), *back = ops_bytes(65536 * sizeof *back);
    float *wide = ops_bytes(65536 * sizeof *wide);
    for (uint32_t i = 0; i < 65536; i++) half[i] = (uint16_t)i;
    vec->to_f32(wide, half, MTP_BF16, 65536);
    vec->from_f32(back, MTP_BF16, wide, 65536);
    for (uint32_t i = 0; i < 65536; i++) {
        assert_int_equal(bits_of(wide[i]), i << 16);
        const uint32_t want = (i & 0x7fffu) > 0x7f80u ? i | 0x40u : i; /* a signalling NaN becomes a quiet one */
        assert_int_equal(back[i], want);
    }
    vec->to_f32(wide, half, MTP_F16, 65536);
    vec->from_f32(back, MTP_F16, wide, 65536);
    for (uint32_t i = 0; i < 65536; i++) {
        const double want = value_of_f16(i);
        if (isnan(want)) {
            assert_true(isnan(wide[i]));
            assert_int_equal(back[i] & 0xfc00u, i & 0xfc00u);
            assert_int_not_equal(back[i] & 0x3ffu, 0);
        } else {
            assert_true((double)wide[i] == want && !signbit(wide[i]) == !signbit(want));
            assert_int_equal(back[i], i);
        }
    }
}

/* Halfway cases, denormals and the edge of overflow, against exact rounding in double. */
static void rounding_to_nearest_even(const mtp__vec *vec)
{
    test_rng rng = {2};
    enum { count = 20000 };
    float *x = ops_bytes(count * sizeof *x);
    uint16_t *bf16 = ops_bytes(count * sizeof *bf16), *f16 = ops_bytes(count * sizeof *f16);
    for (int i = 0; i < count; i++) {
        const int exponent = (int)test_below(&rng, 40) - 26;
        x[i] = ldexpf(test_uniform(&rng), exponent);
        if (i % 3 == 0) x[i] = float_of(bits_of(x[i]) & 0xffff8000u); /* halfway for bf16 */
        if (i % 3 == 1) x[i] = float_of(bits_of(x[i]) & 0xfffff000u); /* halfway for normal f16 */
    }
    vec->from_f32(bf16, MTP_BF16, x, count);
    vec->from_f32(f16, MTP_F16, x, count);
    for (int i = 0; i < count; i++) {
        assert_int_equal(bf16[i], ops_bits16(ops_rounded(x[i], MTP_BF16), MTP_BF16));
        assert_int_equal(f16[i], ops_bits16(ops_rounded(x[i], MTP_F16), MTP_F16));
    }
    const float edges[] = {65519.996f, 65520.0f, -1e30f, INFINITY, 0x1p-25f, 0x1.000002p-25f, 3.4e38f, -0.0f};
    const uint16_t as_f16[] = {0x7bff, 0x7c00, 0xfc00, 0x7c00, 0x0000, 0x0001, 0x7c00, 0x8000};
    vec->from_f32(f16, MTP_F16, edges, 8);
    for (int i = 0; i < 8; i++) assert_int_equal(f16[i], as_f16[i]);
    const float high[] = {3.4e38f, float_of(0x7f7fffffu), float_of(0x7f800001u)};
    vec->from_f32(bf16, MTP_BF16, high, 3);
    assert_int_equal(bf16[0], 0x7f80);
    assert_int_equal(bf16[1], 0x7f80);
    assert_true((bf16[2] & 0x7fffu) > 0x7f80u);
}

/* ---- exponentials ------------------------------------------------------------------------------------------------ */

static void exp_is_accurate(const mtp__vec *vec)
{
    double worst = 0;
    for (float x = -103.9f; x < 88.72f; x += 0.00313f) {
        float e;
        vec->softmax_scaled(&e, &x, 0.0f, 1.0f, 1);
        const double want = exp((double)x), unit = want < 0x1p-126 ? 0x1p-149 : ldexp(1.0, ilogb(want) - 23);
        const double error = fabs((double)e - want) / unit;
        worst = error > worst ? error : worst;
    }
    if (worst > 2.0) fail_msg("%s: exp is off by %.3f ulp", vec->isa, worst);
    float x[] = {0.0f, -INFINITY, -1000.0f, 1000.0f, INFINITY, NAN};
    vec->softmax_scaled(x, x, 0.0f, 1.0f, 6);
    assert_true(x[0] == 1.0f && x[1] == 0.0f && x[2] == 0.0f && isinf(x[3]) && isinf(x[4]) && isnan(x[5]));
}

static double gelu_of(double g)
{
    return g / (1.0 + exp(-2.0 * sqrt(2.0 / acos(-1.0)) * (g + 0.044715 * g * g * g)));
}

static void gelu_is_accurate(const mtp__vec *vec)
{
    const float one = 1.0f;
    for (double g = 1e-30; g < 1e30; g *= 1.07)
        for (int sign = -1; sign <= 1; sign += 2) {
            const float gate = (float)(sign * g);
            float y, dgate;
            vec->geglu(&y, &gate, &one, 1);
            vec->geglu_bwd(NULL, &dgate, NULL, &gate, &one, &one, 1);
            const double want = gelu_of((double)gate);
            if (fabs((double)y - want) > 1e-5 * fabs(want) + 1e-37) /* relative: tails as well as tiny arguments */
                fail_msg("%s: gelu(%g) is %.9g, want %.9g", vec->isa, (double)gate, (double)y, want);
            const double h = 1e-6 * (1.0 + g),
                         slope = (gelu_of((double)gate + h) - gelu_of((double)gate - h)) / (2 * h);
            if (g < 1e6 && fabs((double)dgate - slope) > 1e-6)
                fail_msg("%s: gelu'(%g) is %.9g, want %.9g", vec->isa, (double)gate, (double)dgate, slope);
            assert_true(isfinite(y) && isfinite(dgate));
        }
}

/* ---- every function at every length and address ------------------------------------------------------------------ */

typedef struct operands {
    float *x, *y, *w, *out;
} operands;

static void close_to(const char *isa, const char *name, int n, double got, double want, double magnitude)
{
    if (!(fabs(got - want) <= 1e-6 * magnitude + 1e-30))
        fail_msg("%s: %s of %d elements is %.9g, want %.9g", isa, name, n, got, want);
}

static void check_sums(const mtp__vec *vec, const operands *o, int n)
{
    double dot = 0, dot3 = 0, squares = 0, exps = 0, magnitude = 0;
    float most = -INFINITY;
    int64_t at = 0;
    for (int i = 0; i < n; i++) {
        const double x = (double)o->x[i], y = (double)o->y[i], w = (double)o->w[i];
        dot += x * y;
        dot3 += x * y * w;
        squares += x * x;
        exps += exp(x - 0.5);
        magnitude += fabs(x * y);
        if (o->x[i] > most) most = o->x[i], at = i;
    }
    close_to(vec->isa, "dot", n, (double)vec->dot(o->x, o->y, n), dot, magnitude);
    close_to(vec->isa, "dot3", n, (double)vec->dot3(o->x, o->w, o->y, n), dot3, magnitude);
    close_to(vec->isa, "sumsq", n, vec->sumsq(o->x, n), squares, squares * 1e-7);
    close_to(vec->isa, "sum_exp", n, (double)vec->sum_exp(o->x, 0.5f, n), exps, exps);
    assert_true(vec->max(o->x, n) == most);
    if (n > 0) assert_int_equal(vec->argmax(o->x, n), at);
    memcpy(o->out, o->x, (size_t)n * sizeof(float));
    close_to(vec->isa, "exp_shift_sum", n, (double)vec->exp_shift_sum(o->out, 0.5f, n), exps, exps);
    for (int i = 0; i < n; i++) close_to(vec->isa, "exp_shift", n, (double)o->out[i], exp((double)o->x[i] - 0.5), 3);
}

static void check_elementwise(const mtp__vec *vec, const operands *o, int n)
{
    const size_t bytes = (size_t)n * sizeof(float);
#define EACH(name, call, expression)                                                    \
    do {                                                                                \
        memcpy(o->out, o->y, bytes);                                                    \
        vec->call;                                                                      \
        for (int i = 0; i < n; i++) {                                                   \
            const double x = (double)o->x[i], y = (double)o->y[i], w = (double)o->w[i]; \
            (void)x, (void)y, (void)w;                                                  \
            close_to(vec->isa, name, n, (double)o->out[i], (expression), 1.0);          \
        }                                                                               \
    } while (0)
    EACH("axpy", axpy(o->out, 0.5f, o->x, n), y + 0.5 * x);
    EACH("scale", scale(o->out, 0.5f, o->x, n), 0.5 * x);
    EACH("scale in place", scale(o->out, 0.5f, o->out, n), 0.5 * y);
    EACH("mul", mul(o->out, o->x, o->w, 0.5f, n), 0.5 * x * w);
    EACH("mul_add", mul_add(o->out, o->x, o->w, 0.5f, n), y + 0.5 * x * w);
    EACH("add_mul", add_mul(o->out, o->y, o->x, o->w, 0.5f, 0.25f, n), 0.25 * (y + 0.5 * x * w));
    EACH("norm_dx", norm_dx(o->out, o->x, o->w, o->y, 0.5f, 0.25f, n), 0.5 * w * y - 0.25 * x);
    EACH("softmax_scaled", softmax_scaled(o->out, o->x, 1.0f, 0.5f, n), 0.5 * exp(x - 1.0));
    EACH("attention_ds", attention_ds(o->out, o->x, 1.0f, 0.5f, n), exp(x - 1.0) * (y - 0.5));
    EACH("geglu", geglu(o->out, o->x, o->w, n), gelu_of(x) * w);
    EACH("geglu_bwd dup", geglu_bwd(NULL, NULL, o->out, o->x, o->w, o->y, n), y * gelu_of(x));
    EACH("geglu_bwd y", geglu_bwd(o->out, NULL, NULL, o->x, o->w, o->y, n), w * gelu_of(x));
#undef EACH
}

static void every_length_and_address(const mtp__vec *vec)
{
    test_rng rng = {9};
    for (int n = 0; n <= 150; n++)
        for (int shift = 0; shift < 3; shift++) {
            /* the buffers end where the operands end: AddressSanitizer and the guards see a step beyond */
            const size_t bytes = (size_t)(n + shift) * sizeof(float);
            const operands o = {(float *)ops_bytes(bytes) + shift, (float *)ops_bytes(bytes) + shift,
                                (float *)ops_bytes(bytes) + shift, (float *)ops_bytes(bytes) + shift};
            test_fill(&rng, o.x, n, 1.0f);
            test_fill(&rng, o.y, n, 1.0f);
            test_fill(&rng, o.w, n, 1.0f);
            check_sums(vec, &o, n);
            check_elementwise(vec, &o, n);
            ops_release_buffers();
        }
}

static void argmax_takes_the_lowest_of_equals(const mtp__vec *vec)
{
    enum { n = 5000 };
    float *x = ops_bytes(n * sizeof *x);
    for (int i = 0; i < n; i++) x[i] = -1.0f;
    assert_int_equal(vec->argmax(x, n), 0);
    x[4999] = x[3000] = x[1023] = 2.0f;
    assert_int_equal(vec->argmax(x, n), 1023);
    x[1024] = 3.0f;
    assert_int_equal(vec->argmax(x, n), 1024);
    for (int i = 0; i < n; i++) x[i] = -INFINITY;
    assert_int_equal(vec->argmax(x, n), 0);
}

/* The bits of a sum depend on neither the address nor what follows. */
static void sums_do_not_depend_on_the_address(const mtp__vec *vec)
{
    test_rng rng = {4};
    enum { n = 333 };
    float *values = ops_bytes(n * sizeof *values), *moved = ops_bytes((n + 32) * sizeof *moved);
    test_fill(&rng, values, n, 1.0f);
    const float first = vec->dot(values, values, n), exps = vec->sum_exp(values, 1.0f, n);
    for (int shift = 0; shift < 32; shift++) {
        memcpy(moved + shift, values, n * sizeof *values);
        assert_true(vec->dot(moved + shift, moved + shift, n) == first);
        assert_true(vec->sum_exp(moved + shift, 1.0f, n) == exps);
    }
}

#define ON_EVERY_ISA(name)                \
    static void test_##name(void **state) \
    {                                     \
        (void)state;                      \
        each(name);                       \
    }
ON_EVERY_ISA(all_16_bit_values)
ON_EVERY_ISA(rounding_to_nearest_even)
ON_EVERY_ISA(exp_is_accurate)
ON_EVERY_ISA(gelu_is_accurate)
ON_EVERY_ISA(every_length_and_address)
ON_EVERY_ISA(argmax_takes_the_lowest_of_equals)
ON_EVERY_ISA(sums_do_not_depend_on_the_address)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_16_bit_values),
        cmocka_unit_test(test_rounding_to_nearest_even),
        cmocka_unit_test(test_exp_is_accurate),
        cmocka_unit_test(test_gelu_is_accurate),
        cmocka_unit_test(test_every_length_and_address),
        cmocka_unit_test(test_argmax_takes_the_lowest_of_equals),
        cmocka_unit_test(test_sums_do_not_depend_on_the_address),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
