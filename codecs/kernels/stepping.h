/* One step of an optimizer, in place, as PyTorch's CPU kernels round it. A state of n elements is stepped in pieces of any
 * size: elements are independent, and only `vectors` says where in a piece the last whole vector of the whole state ends.
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

#endif
