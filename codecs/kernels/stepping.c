/* Steps of optimizers as torch.optim and DeepSpeed do them on CPUs, to the last bit.
 *
 * The order of operations, and which of them are fused, was found by comparison with torch 2.13 (tests/test_stepping.py repeats
 * it). Its fused kernels compute whole vectors of 8 elements in one way, and the remaining elements of each tensor in
 * another: of the two products of a moment, the other one is fused. An AVX-512 machine does the same, since these
 * kernels are compiled for AVX2 there, too. The for-loop and foreach implementations of SGD have no such end.
 *
 *   adam   g' = g + l2 w;   w' = w weight_factor
 *          m' = m + first_gain (g' - m)                fused; from the gradient's side where first_gain >= 1/2
 *          v' = (second_gain g') g' + v second_decay    the sum fused with the first product; at the end with the second
 *          w'' = w' + (step_size m') / (sqrt(v') / bias2_root + eps)
 *   sgd    g' = g + l2 w
 *          b' = gain g' + momentum b                   the sum fused with the first product; at the end with the second
 *          w' = w + step_size b'                       or of g' + momentum b' (Nesterov), or of g'
 *
 *   adagrad  g' = g + l2 w;   s' = s + g' g'           fused
 *          w' = w - (rate g') / (sqrt(s') + eps)
 *   lion   w' = w weight_factor - rate sign(m + near_gain (g - m))
 *          m' = m + far_gain (g - m)                   fused, and from either side, as Adam's
 *
 * l2, momentum and step_size multiply in fused operations. DeepSpeed's operator fuses more, and its vectors have 16 elements
 * where it was built for AVX-512, 8 for AVX2:
 *
 *   adam   g' = g + l2 w
 *          m' = first_gain g' + first_decay m           the sum fused with the first product; at the end with the second
 *          v' = second_gain (g' g') + second_decay v    likewise
 *          w' = w + decay w
 *          w'' = w' + step_size (m' / (sqrt(v') bias2_scale + eps))
 *
 * IEEE 754 does not define the bits of a NaN: every NaN becomes one.
 *
 * Memory safety: all arrays have n elements, and every loop is one over them. */
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
    float gradient_sign, weight_factor, l2, first_gain, second_decay, second_gain, step_size, bias2_root, eps;
} Adam;

/* m + gain (x - m), as torch's lerp: from the nearer end. */
INLINE float lerp(float m, float x, float gain) {
    bool is_near = gain < 0.5f;
    return fused(x - m, is_near ? gain : gain - 1, is_near ? m : x);
}

/* The kinds of Adam's loops: each has a body without branches. */
enum { HAS_L2 = 1, HAS_LARGEST = 2, IS_END = 4 };

INLINE void step_range_adam(float *restrict w, float *restrict m, float *restrict v, float *restrict largest,
                            const float *restrict g, i64 begin, i64 end, Adam by, int kind) {
    for (i64 i = begin; i < end; i++) {
        float x = g[i] * by.gradient_sign;
        if (kind & HAS_L2) x = fused(w[i], by.l2, x);
        float moved = w[i] * by.weight_factor, gained = by.second_gain * x;
        m[i] = canonical_nan(lerp(m[i], x, by.first_gain));
        float second = canonical_nan(kind & IS_END ? fused(v[i], by.second_decay, gained * x)
                                                   : fused(gained, x, v[i] * by.second_decay));
        v[i] = second;
        if (kind & HAS_LARGEST) {
            float larger = second > largest[i] ? second : largest[i];
            largest[i] = second = canonical_nan(second == second ? larger : second);
        }
        float under = __builtin_sqrtf(second) / by.bias2_root + by.eps;
        w[i] = canonical_nan(moved + (by.step_size * m[i]) / under);
    }
}

/* The end of a tensor is a few elements: its loops need not be fast, and would be half of the code. */
static SMALL void step_end_adam(float *w, float *m, float *v, float *largest, const float *g, i64 begin, i64 end,
                                Adam by, int kind) {
    step_range_adam(w, m, v, largest, g, begin, end, by, kind | IS_END);
}

i64 API(step_adam)(float *weights, float *first, float *second, float *largest, const float *gradients, i64 n, i64 vectors,
                   float gradient_sign, float weight_factor, float l2, float first_gain, float second_decay,
                   float second_gain, float step_size, float bias2_root, float eps) {
    if (!is_size(n) || vectors < 0 || vectors > n) return BAD_SIZE;
    Adam by = {gradient_sign, weight_factor, l2, first_gain, second_decay, second_gain, step_size, bias2_root, eps};
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

static SMALL void step_end_sgd(float *w, float *b, const float *g, i64 begin, i64 end, Descent by, int buffer,
                              bool is_nesterov) {
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

typedef struct {
    float decay, first_decay, first_gain, second_decay, second_gain, step_size, bias2_scale, eps;
} DeepSpeedAdam;

INLINE void step_range_adam_deepspeed(float *restrict w, float *restrict m, float *restrict v, const float *restrict g,
                                      i64 begin, i64 end, DeepSpeedAdam by, int decaying, bool is_end) {
    for (i64 i = begin; i < end; i++) {
        float x = g[i], y = w[i];
        if (decaying == DECAYS_GRADIENT) x = fused(y, by.decay, x);
        float first = is_end ? fused(m[i], by.first_decay, x * by.first_gain) : fused(x, by.first_gain, m[i] * by.first_decay);
        float square = x * x;
        float second = is_end ? fused(v[i], by.second_decay, square * by.second_gain)
                              : fused(square, by.second_gain, v[i] * by.second_decay);
        float moved = first / fused(__builtin_sqrtf(second), by.bias2_scale, by.eps);
        if (decaying == DECAYS_WEIGHTS) y = fused(y, by.decay, y);
        m[i] = canonical_nan(first);
        v[i] = canonical_nan(second);
        w[i] = canonical_nan(fused(moved, by.step_size, y));
    }
}

static SMALL void step_end_adam_deepspeed(float *w, float *m, float *v, const float *g, i64 begin, i64 end,
                                          DeepSpeedAdam by, int decaying) {
    step_range_adam_deepspeed(w, m, v, g, begin, end, by, decaying, true);
}

i64 API(step_adam_deepspeed)(float *weights, float *first, float *second, const float *gradients, i64 n, i64 vectors,
                             int decaying, float decay, float first_decay, float first_gain, float second_decay,
                             float second_gain, float step_size, float bias2_scale, float eps) {
    if (!is_size(n) || vectors < 0 || vectors > n) return BAD_SIZE;
    DeepSpeedAdam by = {decay, first_decay, first_gain, second_decay, second_gain, step_size, bias2_scale, eps};
    switch (decaying) {
    case NO_DECAY: step_range_adam_deepspeed(weights, first, second, gradients, 0, vectors, by, NO_DECAY, false); break;
    case DECAYS_GRADIENT:
        step_range_adam_deepspeed(weights, first, second, gradients, 0, vectors, by, DECAYS_GRADIENT, false);
        break;
    default: step_range_adam_deepspeed(weights, first, second, gradients, 0, vectors, by, DECAYS_WEIGHTS, false);
    }
    step_end_adam_deepspeed(weights, first, second, gradients, vectors, n, by, decaying);
    return 0;
}

i64 API(step_adagrad)(float *restrict weights, float *restrict sum, const float *restrict gradients, i64 n,
                      float gradient_sign, float l2, float rate, float eps) {
    if (!is_size(n)) return BAD_SIZE;
    bool has_l2 = l2 != 0;
    for (i64 i = 0; i < n; i++) {
        float x = gradients[i] * gradient_sign;
        if (has_l2) x = fused(weights[i], l2, x);
        sum[i] = canonical_nan(fused(x, x, sum[i]));
        weights[i] = canonical_nan(weights[i] - (rate * x) / (__builtin_sqrtf(sum[i]) + eps));
    }
    return 0;
}

i64 API(step_lion)(float *restrict weights, float *restrict average, const float *restrict gradients, i64 n, float near_gain,
                   float far_gain, float weight_factor, float rate) {
    if (!is_size(n)) return BAD_SIZE;
    for (i64 i = 0; i < n; i++) {
        float direction = lerp(average[i], gradients[i], near_gain);
        float sign = (float)(direction > 0) - (float)(direction < 0); /* 0 of a NaN, too */
        weights[i] = canonical_nan(weights[i] * weight_factor - rate * sign);
        average[i] = canonical_nan(lerp(average[i], gradients[i], far_gain));
    }
    return 0;
}
