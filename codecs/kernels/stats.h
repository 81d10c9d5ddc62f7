/* Figures of the values of a tensor: how often each short word occurs, and sums, extremes and exponents of floats. */
#ifndef CKPT_STATS_H
#define CKPT_STATS_H

#include "kernels.h"

/* Sums of floats have so many parts: an element belongs to the part of its index in the tensor, modulo this number. */
#define SUM_PARTS 16

/* Exponents of float64, whose counts are a histogram. */
#define EXPONENT_COUNT 2048

/* Increase counts[word] for each of `size` words of `width` bytes, 1 or 2. `counts` has 256 or 65,536 elements, and wraps at
 * 2^32. */
i64 API(count_values)(i64 width, const u8 *words, i64 size, u32 *counts);

/* Add `size` floats of `width` bytes, 4 or 8, to figures of a tensor. `index` is that of the first one in the tensor, 0 or
 * more: the sums depend on it alone, and not on where a tensor was divided among calls.
 *
 * sums        2 * SUM_PARTS: of the finite values, then of their squares, each rounded to double
 * extremes    2: the least and the greatest finite value so far. Begin with +infinity and -infinity. Zero has no sign
 * counts      3: NaN, infinite, zero
 * exponents   EXPONENT_COUNT: of the finite values that are not zero, the biased exponents that they have as doubles. Those
 *             of doubles below 2^-1022 are 0 */
i64 API(measure_floats)(i64 width, const u8 *words, i64 size, i64 index, double *sums, double *extremes, i64 *counts,
                        i64 *exponents);

#endif
