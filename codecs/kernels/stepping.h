/* One step of an optimizer, in place, as the CPU kernels of PyTorch or of DeepSpeed round it. A state of n elements is stepped in pieces of any
 * size: elements are independent, and only `vectors` says where in a piece the last whole vector of the whole state ends. A step
 * without `vectors` rounds all elements alike.
 *
 * Nothing here reads bytes of a file: sizes that do not fit are a mistake of the caller. */
#ifndef CKPT_STEPPING_H
#define CKPT_STEPPING_H

#include "kernels.h"

/* Adam and AdamW. `largest` is the largest `second` so far, or NULL without amsgrad. `weight_factor` is 1 - lr * decay
 * (AdamW; else 1), `l2` what is added of the weights to the gradient (Adam; else 0), `gradient_sign` is -1 to maximize. */
i64 API(step_adam)(float *weights, float *first, float *second, float *largest, const float *gradients, i64 n, i64 vectors,
                   float gradient_sign, float weight_factor, float l2, float first_gain, float second_kept,
                   float second_gain, float step_size, float bias2_root, float eps);

/* Gradient descent. `buffer` is the momentum, or NULL without; at its first step it becomes the gradient. `gain` is
 * 1 - dampening, `step_size` -lr. */
i64 API(step_sgd)(float *weights, float *buffer, const float *gradients, i64 n, i64 vectors, float gradient_sign, float l2,
                  float momentum, float gain, int is_first, int is_nesterov, float step_size);

/* What multiples of the weights are added to: nothing, the gradient (Adam), the weights (AdamW). */
enum { NO_DECAY, DECAYS_GRADIENT, DECAYS_WEIGHTS };

/* Adam and AdamW of DeepSpeed's operator for CPUs. `decay` is what weights are multiplied by where `decaying` says that they
 * are: the decay, or -lr * decay. `bias2_scale` is 1 / sqrt(1 - beta2^t), `step_size` -lr / (1 - beta1^t). */
i64 API(step_adam_deepspeed)(float *weights, float *first, float *second, const float *gradients, i64 n, i64 vectors,
                             int decaying, float decay, float first_kept, float first_gain, float second_kept,
                             float second_gain, float step_size, float bias2_scale, float eps);

/* Adagrad. `sum` is that of the squares, `rate` is lr / (1 + (t - 1) * lr_decay), `l2` and `gradient_sign` as Adam's. */
i64 API(step_adagrad)(float *weights, float *sum, const float *gradients, i64 n, float gradient_sign, float l2, float rate,
                      float eps);

/* Lion. `average` is that of the gradients, `near_gain` is 1 - beta1, `far_gain` 1 - beta2, `weight_factor` 1 - lr * decay,
 * `rate` lr. */
i64 API(step_lion)(float *weights, float *average, const float *gradients, i64 n, float near_gain, float far_gain,
                   float weight_factor, float rate);

#endif
