/* Steps of optimizers as torch.optim does them on CPUs, to the last bit.
 *
 * The order of operations, and which of them are fused, was found by comparing with torch 2.13 (tests/test_stepping.py does
 * it again). Its fused kernels do whole vectors of 8 elements in one way, and what is left at the end of each tensor in
 * another: the products that make a moment are fused the other way round. An AVX-512 machine does the same, since these
 * kernels are compiled for AVX2 there, too. The for-loop and foreach implementations of SGD know no such end.
 *
 *   adam   g' = g + l2 w;   w' = w weight_factor
 *          m' = m + first_gain (g' - m)                fused; from the gradient's side where first_gain >= 1/2
 *          v' = (second_gain g') g' + v second_kept    the sum fused with the first product; at the end with the second
 *          w'' = w' + (step_size m') / (sqrt(v') / bias2_root + eps)
 *   sgd    g' = g + l2 w
 *          b' = gain g' + momentum b                   the sum fused with the first product; at the end with the second
 *          w' = w + step_size b'                       or of g' + momentum b' (Nesterov), or of g'
 *
 * l2, momentum and step_size multiply in fused operations. IEEE 754 leaves the bits of a NaN open: every NaN becomes one.
 *
 * Safe because: all arrays have n elements, and every loop is one over them. */
#include "stepping.h"

#if defined(__FMA__) || defined(__aarch64__)
INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
/* a * b + c, rounded once: the product of floats is exact in double, and the sum is rounded to odd there, so that the
 * rounding to float is the only one that counts (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums"). */
INLINE float fused(float a, float b, float c) {
    double product = (double)a * (double)b, addend = (double)c, sum = product + addend;
    double rest = sum - product, error = (product - (sum - rest)) + (addend - rest);
    u64 bits = bits_of_double(sum);
    bool is_inexact = error != 0 && (bits & 1) == 0 && __builtin_isfinite(sum);
    u64 odd = (error > 0) == (sum > 0) ? bits + 1 : bits - 1;
    return (float)double_of_bits(is_inexact ? odd : bits);
}
#endif

typedef struct {
    float gradient_sign, weight_factor, l2, first_gain, second_kept, second_gain, step_size, bias2_root, eps;
} Adam;

/* The end of a tensor is a few elements: its loops need not be fast, and would be half of the code. */
#ifdef __clang__
#define SMALL static __attribute__((noinline, minsize))
#else
#define SMALL static __attribute__((noinline, cold))
#endif

/* The kinds of Adam's loops: each has a body without branches. */
enum { HAS_L2 = 1, HAS_LARGEST = 2, IS_END = 4 };

INLINE void step_range_adam(float *restrict w, float *restrict m, float *restrict v, float *restrict largest,
                            const float *restrict g, i64 begin, i64 end, Adam by, int kind) {
    /* The lerp begins at the nearer end: m + gain (g - m), or g + (gain - 1) (g - m). */
    bool is_near = by.first_gain < 0.5f;
    float gain = is_near ? by.first_gain : by.first_gain - 1;
    for (i64 i = begin; i < end; i++) {
        float x = g[i] * by.gradient_sign;
        if (kind & HAS_L2) x = fused(w[i], by.l2, x);
        float moved = w[i] * by.weight_factor, gained = by.second_gain * x;
        m[i] = canonical_nan(fused(x - m[i], gain, is_near ? m[i] : x));
        float second = canonical_nan(kind & IS_END ? fused(v[i], by.second_kept, gained * x)
                                                   : fused(gained, x, v[i] * by.second_kept));
        v[i] = second;
        if (kind & HAS_LARGEST) {
            float larger = second > largest[i] ? second : largest[i];
            largest[i] = second = canonical_nan(second == second ? larger : second);
        }
        float under = __builtin_sqrtf(second) / by.bias2_root + by.eps;
        w[i] = canonical_nan(moved + (by.step_size * m[i]) / under);
    }
}

SMALL void step_end_adam(float *w, float *m, float *v, float *largest, const float *g, i64 begin, i64 end, Adam by,
                         int kind) {
    step_range_adam(w, m, v, largest, g, begin, end, by, kind | IS_END);
}

i64 API(step_adam)(float *weights, float *first, float *second, float *largest, const float *gradients, i64 n, i64 vectors,
                   float gradient_sign, float weight_factor, float l2, float first_gain, float second_kept,
                   float second_gain, float step_size, float bias2_root, float eps) {
    if (!is_size(n) || vectors < 0 || vectors > n) return BAD_SIZE;
    Adam by = {gradient_sign, weight_factor, l2, first_gain, second_kept, second_gain, step_size, bias2_root, eps};
    int kind = (l2 != 0 ? HAS_L2 : 0) | (largest ? HAS_LARGEST : 0);
    switch (kind) {
    case 0: step_range_adam(weights, first, second, NULL, gradients, 0, vectors, by, 0); break;
    case HAS_L2: step_range_adam(weights, first, second, NULL, gradients, 0, vectors, by, HAS_L2); break;
    case HAS_LARGEST: step_range_adam(weights, first, second, largest, gradients, 0, vectors, by, HAS_LARGEST); break;
    default: step_range_adam(weights, first, second, largest, gradients, 0, vectors, by, HAS_LARGEST | HAS_L2);
    }
    step_end_adam(weights, first, second, largest, gradients, vectors, n, by, kind);
    return 0;
}

typedef struct {
    float gradient_sign, l2, momentum, gain, step_size;
} Descent;

/* What becomes of the momentum: there is none, it begins, it goes on. */
enum { NO_BUFFER, FIRST_STEP, LATER_STEP };

INLINE void step_range_sgd(float *restrict w, float *restrict b, const float *restrict g, i64 begin, i64 end, Descent by,
                           int buffer, bool is_nesterov, bool is_end) {
    bool has_l2 = by.l2 != 0;
    for (i64 i = begin; i < end; i++) {
        float x = g[i] * by.gradient_sign;
        if (has_l2) x = fused(w[i], by.l2, x);
        if (buffer != NO_BUFFER) {
            float y = x;
            if (buffer == LATER_STEP && is_end) y = fused(b[i], by.momentum, x * by.gain);
            if (buffer == LATER_STEP && !is_end) y = fused(x, by.gain, b[i] * by.momentum);
            b[i] = canonical_nan(y);
            x = is_nesterov ? fused(y, by.momentum, x) : y;
        }
        w[i] = canonical_nan(fused(x, by.step_size, w[i]));
    }
}

SMALL void step_end_sgd(float *w, float *b, const float *g, i64 begin, i64 end, Descent by, int buffer, bool is_nesterov) {
    step_range_sgd(w, b, g, begin, end, by, buffer, is_nesterov, true);
}

i64 API(step_sgd)(float *weights, float *buffer, const float *gradients, i64 n, i64 vectors, float gradient_sign, float l2,
                  float momentum, float gain, int is_first, int is_nesterov, float step_size) {
    if (!is_size(n) || vectors < 0 || vectors > n) return BAD_SIZE;
    Descent by = {gradient_sign, l2, momentum, gain, step_size};
    int kind = !buffer ? NO_BUFFER : is_first ? FIRST_STEP : LATER_STEP;
    if (kind == NO_BUFFER) step_range_sgd(weights, NULL, gradients, 0, vectors, by, NO_BUFFER, false, false);
    else if (kind == FIRST_STEP) step_range_sgd(weights, buffer, gradients, 0, vectors, by, FIRST_STEP, is_nesterov != 0, false);
    else if (is_nesterov) step_range_sgd(weights, buffer, gradients, 0, vectors, by, LATER_STEP, true, false);
    else step_range_sgd(weights, buffer, gradients, 0, vectors, by, LATER_STEP, false, false);
    step_end_sgd(weights, buffer, gradients, vectors, n, by, kind, is_nesterov != 0);
    return 0;
}
