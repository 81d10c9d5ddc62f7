/* One step of an optimizer, in place, as the CPU kernels of PyTorch or of DeepSpeed round it. A state of n elements can be stepped in parts of any
 * size: elements are independent, and only `vectors` depends on where in a part the last whole vector of the state ends. A step
 * without `vectors` rounds all elements in the same way.
 *
 * Nothing here reads bytes of a file: sizes that do not fit are a bug of the caller. */
#ifndef CKPT_STEPPING_H
#define CKPT_STEPPING_H

#include "kernels.h"

/* Adam and AdamW. `largest` is the largest `second` so far, or NULL without amsgrad. `weight_factor` is 1 - lr * decay
 * (AdamW; else 1), `l2` the share of the weights that is added to the gradient (Adam; else 0), `gradient_sign` is -1 to maximize. */
i64 API(step_adam)(float *weights, float *first, float *second, float *largest, const float *gradients, i64 n, i64 vectors,
                   float gradient_sign, float weight_factor, float l2, float first_gain, float second_decay,
                   float second_gain, float step_size, float bias2_root, float eps);

/* Gradient descent. `buffer` is the momentum, or NULL without; the first step sets it to the gradient. `gain` is
 * 1 - dampening, `step_size` -lr. */
i64 API(step_sgd)(float *weights, float *buffer, const float *gradients, i64 n, i64 vectors, float gradient_sign, float l2,
                  float momentum, float gain, int is_first, int is_nesterov, float step_size);

/* What multiples of the weights are added to: nothing, the gradient (Adam), the weights (AdamW). */
enum { NO_DECAY, DECAYS_GRADIENT, DECAYS_WEIGHTS };

/* Adam and AdamW of DeepSpeed's operator for CPUs. `decay` is the factor of the weights in the sum that `decaying`
 * selects: the weight decay, or -lr * weight decay. `bias2_scale` is 1 / sqrt(1 - beta2^t), `step_size` -lr / (1 - beta1^t). */
i64 API(step_adam_deepspeed)(float *weights, float *first, float *second, const float *gradients, i64 n, i64 vectors,
                             int decaying, float decay, float first_decay, float first_gain, float second_decay,
                             float second_gain, float step_size, float bias2_scale, float eps);

/* Adagrad. `sum` is that of the squares, `rate` is lr / (1 + (t - 1) * lr_decay), `l2` and `gradient_sign` as Adam's. */
i64 API(step_adagrad)(float *weights, float *sum, const float *gradients, i64 n, float gradient_sign, float l2, float rate,
                      float eps);

/* Lion. `average` is that of the gradients, `near_gain` is 1 - beta1, `far_gain` 1 - beta2, `weight_factor` 1 - lr * decay,
 * `rate` lr. */
i64 API(step_lion)(float *weights, float *average, const float *gradients, i64 n, float near_gain, float far_gain,
                   float weight_factor, float rate);

#endif
