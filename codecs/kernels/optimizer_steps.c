/* The steps of Adam and of gradient descent, element by element, rounded as an optimizer rounds.
 *
 * A delta predicts a state by the arithmetic that computed it; docs/delta-codecs.md, "The steps of optimizers", has the
 * formulas. `(float)` marks each rounding to single precision; all other operations are of doubles. A product and a sum
 * of doubles, rounded once, stand for a fused multiply-add of floats: nearly always the same number, and the same on every
 * machine. Every operation is one of IEEE 754, and the build forbids contraction and reordering. IEEE 754 does not define
 * the bits of a NaN, so every NaN becomes one.
 *
 * m and v are Adam's moments `exp_avg` and `exp_avg_sq`, b the `momentum_buffer`, w the weights, g the gradient. `decay` is
 * beta and `gain` is 1 - beta, each rounded to single precision where a formula says so.
 *
 * The orders of operations of AdamW. All take m and v after the step; w * weight_factor is the decoupled weight decay, 1 - lr * decay;
 * step_size is -lr / (1 - beta1^t), but for apex -lr; eps is in single precision.
 *
 *   torch          w * weight_factor + (step_size * m) / (sqrt(v) / bias2_root + eps)
 *                  torch.optim on CPUs, for-loop, foreach and fused: it multiplies first. bias2_root = sqrt(1 - beta2^t).
 *   fused          w * weight_factor + step_size * (m / (sqrt(v) / bias2_root + eps))
 *                  torch.optim on GPUs: its addcdiv divides first.
 *   deepspeed_cpu  w * weight_factor + step_size * (m / (sqrt(v) * bias2_root + eps))
 *                  DeepSpeedCPUAdam: vectors with fused multiply-adds; bias2_root is the reciprocal, 1 / sqrt(1 - beta2^t).
 *   apex           w + step_size * (w * weight_factor + (m / bias1_factor) / (sqrt(v / bias2_factor) + eps))
 *                  apex's and DeepSpeed's FusedAdam: they correct the moments themselves and decay within the update, so
 *                  weight_factor is the decay, and the factors are 1 - beta^t.
 *
 * Moments have several orders, too: torch's m is the lerp, and its v is SECOND_LEFT on CPUs; others differ in the order of products
 * and in what is fused. `fit` tries all of them to find the one of a run.
 *
 * Memory safety: all arrays have n elements, and every loop is one over them. */
#include "kernels.h"

/* ---- moments ---- */

/* How the two terms of a moment are put together. The loops below have one body for each, without a branch. */
enum { FIRST_LERP, FIRST_SUM, FIRST_FUSED_SUM };   /* m + gain (g - m); gain g + decay m; the same, fused */
enum { SECOND_LEFT, SECOND_SQUARE, SECOND_PLAIN }; /* (gain g) g + decay v, fused; gain (g g) + decay v, fused; not fused */

INLINE float first_moment(float m, float g, float decay, float gain, int form) {
    if (form == FIRST_LERP) return (float)((double)gain * (double)(float)(g - m) + (double)m);
    if (form == FIRST_SUM) return (float)(gain * g) + (float)(decay * m);
    return (float)((double)gain * (double)g + (double)(float)(decay * m));
}

INLINE float second_moment(float v, float g, float decay, float gain, int form) {
    if (form == SECOND_LEFT) return (float)((double)(float)(gain * g) * (double)g + (double)(float)(v * decay));
    if (form == SECOND_SQUARE) return (float)((double)(float)(g * g) * (double)gain + (double)(float)(v * decay));
    return (float)((float)(gain * g) * g) + (float)(v * decay);
}

#define FOR_EACH for (i64 i = 0; i < n; i++)

i64 API(step_first_moments)(const float *restrict m, const float *restrict g, i64 n, float decay, float gain, int form,
                            float *restrict out) {
    if (!is_size(n)) return BAD_SIZE;
    switch (form) {
    case FIRST_LERP: FOR_EACH out[i] = canonical_nan(first_moment(m[i], g[i], decay, gain, FIRST_LERP)); return 0;
    case FIRST_SUM: FOR_EACH out[i] = canonical_nan(first_moment(m[i], g[i], decay, gain, FIRST_SUM)); return 0;
    case FIRST_FUSED_SUM: FOR_EACH out[i] = canonical_nan(first_moment(m[i], g[i], decay, gain, FIRST_FUSED_SUM)); return 0;
    }
    return BAD_SIZE;
}

i64 API(step_second_moments)(const float *restrict v, const float *restrict g, i64 n, float decay, float gain, int form,
                             float *restrict out) {
    if (!is_size(n)) return BAD_SIZE;
    switch (form) {
    case SECOND_LEFT: FOR_EACH out[i] = canonical_nan(second_moment(v[i], g[i], decay, gain, SECOND_LEFT)); return 0;
    case SECOND_SQUARE: FOR_EACH out[i] = canonical_nan(second_moment(v[i], g[i], decay, gain, SECOND_SQUARE)); return 0;
    case SECOND_PLAIN: FOR_EACH out[i] = canonical_nan(second_moment(v[i], g[i], decay, gain, SECOND_PLAIN)); return 0;
    }
    return BAD_SIZE;
}

/* ---- gradients from moments ---- */

INLINE float infer_gradient(float m0, float m1, double gain) {
    return (float)((double)m0 + ((double)m1 - (double)m0) / gain);
}

i64 API(infer_gradients)(const float *restrict m0, const float *restrict m1, i64 n, double gain, float *restrict out) {
    if (!is_size(n)) return BAD_SIZE;
    FOR_EACH out[i] = canonical_nan(infer_gradient(m0[i], m1[i], gain));
    return 0;
}

/* Rounded to the nearest bfloat16, ties to even. `x` is no NaN. */
INLINE u16 nearest_bfloat16(float x) {
    u32 word = bits_of_float(x);
    return (u16)((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

/* The quiet NaN of a gradient, with the sign of the moment that is one, else with that of x86's own. */
INLINE u16 bfloat16_nan(float m0, float m1) {
    u32 sign = m0 != m0 ? bits_of_float(m0) : m1 != m1 ? bits_of_float(m1) : 0x80000000u;
    return (u16)((sign >> 16 & 0x8000) | 0x7FC0);
}

/* The bfloat16 gradient, before it was multiplied by `scale`, that leads from m0 to m1; zero if zero does. */
INLINE u16 infer_bfloat16_gradient(float m0, float m1, double scale, float decay, float gain, int form) {
    float x = (float)((double)infer_gradient(m0, m1, (double)gain) / scale);
    u16 word = x == x ? nearest_bfloat16(x) : bfloat16_nan(m0, m1);
    return first_moment(m0, 0, decay, gain, form) == m1 ? 0 : word;
}

INLINE void infer_bfloat16_form(const float *restrict m0, const float *restrict m1, i64 n, double scale, float decay,
                                float gain, int form, u16 *restrict out) {
    FOR_EACH out[i] = infer_bfloat16_gradient(m0[i], m1[i], scale, decay, gain, form);
}

i64 API(infer_bfloat16_gradients)(const float *m0, const float *m1, i64 n, double scale, float decay, float gain,
                                  int form, u16 *out) {
    if (!is_size(n)) return BAD_SIZE;
    switch (form) {
    case FIRST_LERP: infer_bfloat16_form(m0, m1, n, scale, decay, gain, FIRST_LERP, out); return 0;
    case FIRST_SUM: infer_bfloat16_form(m0, m1, n, scale, decay, gain, FIRST_SUM, out); return 0;
    case FIRST_FUSED_SUM: infer_bfloat16_form(m0, m1, n, scale, decay, gain, FIRST_FUSED_SUM, out); return 0;
    }
    return BAD_SIZE;
}

INLINE i64 count_bfloat16_form(const float *restrict m0, const float *restrict m1, i64 n, double scale, float decay,
                               float gain, int form) {
    i64 count = 0;
    FOR_EACH {
        u16 word = infer_bfloat16_gradient(m0[i], m1[i], scale, decay, gain, form);
        float g = canonical_nan((float)((double)float_of_bits((u32)word << 16) * scale));
        count += bits_of_float(canonical_nan(first_moment(m0[i], g, decay, gain, form))) == bits_of_float(m1[i]);
    }
    return count;
}

/* How many first moments come out to the bit if gradients were bfloat16 times `scale`. */
i64 API(count_bfloat16_matches)(const float *m0, const float *m1, i64 n, double scale, float decay, float gain, int form) {
    if (!is_size(n)) return BAD_SIZE;
    switch (form) {
    case FIRST_LERP: return count_bfloat16_form(m0, m1, n, scale, decay, gain, FIRST_LERP);
    case FIRST_SUM: return count_bfloat16_form(m0, m1, n, scale, decay, gain, FIRST_SUM);
    case FIRST_FUSED_SUM: return count_bfloat16_form(m0, m1, n, scale, decay, gain, FIRST_FUSED_SUM);
    }
    return BAD_SIZE;
}

/* ---- weights ---- */

i64 API(step_adam_torch)(const float *restrict w, const float *restrict m, const float *restrict v, i64 n,
                         double weight_factor, double step_size, float bias2_root, float eps, float *restrict out) {
    if (!is_size(n)) return BAD_SIZE;
    FOR_EACH {
        float under = (float)(__builtin_sqrtf(v[i]) / bias2_root) + eps;
        out[i] = canonical_nan((float)((double)w[i] * weight_factor) + (float)((float)(step_size * (double)m[i]) / under));
    }
    return 0;
}

i64 API(step_adam_fused)(const float *restrict w, const float *restrict m, const float *restrict v, i64 n,
                         double weight_factor, double step_size, float bias2_root, float eps, float *restrict out) {
    if (!is_size(n)) return BAD_SIZE;
    FOR_EACH {
        float under = (float)(__builtin_sqrtf(v[i]) / bias2_root) + eps;
        out[i] = canonical_nan((float)((double)w[i] * weight_factor) + (float)(step_size * (double)(float)(m[i] / under)));
    }
    return 0;
}

i64 API(step_adam_deepspeed_cpu)(const float *restrict w, const float *restrict m, const float *restrict v, i64 n,
                                 double weight_factor, double step_size, float bias2_root, float eps,
                                 float *restrict out) {
    if (!is_size(n)) return BAD_SIZE;
    FOR_EACH {
        float under = (float)((double)__builtin_sqrtf(v[i]) * (double)bias2_root + (double)eps);
        float decay = (float)((double)w[i] * weight_factor);
        out[i] = canonical_nan((float)((double)decay + step_size * (double)(float)(m[i] / under)));
    }
    return 0;
}

i64 API(step_adam_apex)(const float *restrict w, const float *restrict m, const float *restrict v, i64 n,
                        double weight_factor, double step_size, float bias2_factor, float eps, float bias1_factor,
                        float *restrict out) {
    if (!is_size(n)) return BAD_SIZE;
    FOR_EACH {
        float under = __builtin_sqrtf((float)(v[i] / bias2_factor)) + eps;
        float ratio = (float)((float)(m[i] / bias1_factor) / under);
        float update = (float)((double)w[i] * weight_factor + (double)ratio);
        out[i] = canonical_nan((float)((double)w[i] + step_size * (double)update));
    }
    return 0;
}

/* Weights some steps on: the updates between are unknown, so each stands for those near it. 1e-12 is for v of zero. */
i64 API(extrapolate_weights)(const float *restrict w, const float *restrict m0, const float *restrict v0,
                             const float *restrict m1, const float *restrict v1, i64 n, double weight_factor,
                             double old_direction, double new_direction, float *restrict out) {
    if (!is_size(n)) return BAD_SIZE;
    const float tiny = 1e-12f;
    FOR_EACH {
        double old_update = (double)(float)(m0[i] / (float)(__builtin_sqrtf(v0[i]) + tiny)) * old_direction;
        double new_update = (double)(float)(m1[i] / (float)(__builtin_sqrtf(v1[i]) + tiny)) * new_direction;
        out[i] = canonical_nan((float)((double)w[i] * weight_factor + (old_update + new_update)));
    }
    return 0;
}

/* Gradient descent with momentum. */
i64 API(step_momentum)(const float *restrict w, const float *restrict b, i64 n, double weight_factor, double step_size,
                       float *restrict out) {
    if (!is_size(n)) return BAD_SIZE;
    FOR_EACH out[i] = canonical_nan((float)((double)w[i] * weight_factor + step_size * (double)b[i]));
    return 0;
}

/* a x + b y: the momentum that Nesterov's step looks ahead to. */
i64 API(mix)(const float *restrict x, const float *restrict y, i64 n, double a, double b, float *restrict out) {
    if (!is_size(n)) return BAD_SIZE;
    FOR_EACH out[i] = canonical_nan((float)((double)x[i] * a + (double)y[i] * b));
    return 0;
}

i64 API(scale)(const float *restrict x, i64 n, double factor, float *restrict out) {
    if (!is_size(n)) return BAD_SIZE;
    FOR_EACH out[i] = canonical_nan((float)((double)x[i] * factor));
    return 0;
}

#undef FOR_EACH
