/* The lossy kernels that Python calls. docs/lossy-codecs.md specifies what they compute, bit for bit.
 *
 * Matrices lie row by row without gaps; n and m are rows and columns. None of the memory of an output is that of an
 * input. Sums of floats are computed one by one in the order that is written here, so that all machines get the same. */
#ifndef CKPT_LOSSY_H
#define CKPT_LOSSY_H

#include "kernels.h"

/* --- symbol_coder.c */

/* Bytes of scratch for symbols in rows of so many columns. */
i64 API(symbols_scratch)(i64 columns);

/* The binary decisions that encode `size` symbols, in rows of `columns`: 15 bits of the probability of a 0, and in the
 * highest bit what was decided. The lowest `shift` bits of a symbol (at most 24) are stored as they are. Returns how
 * many decisions there are; BAD_SIZE also where `room`, the length of `decisions`, does not suffice: 3 + shift for each
 * symbol, 2 for each unit of the magnitudes above the shift, and 2048 always do. */
i64 API(model_symbols)(const i32 *symbols, i64 size, i64 columns, i64 shift, u16 *decisions, i64 room, u8 *scratch,
                       i64 scratch_size);

/* Codes decisions with a range coder. The code ends where `out` does. Returns where it begins; BAD_SIZE also where a
 * decision is 0, which has no probability. `room` is at least 4 bytes and 2 for each decision. */
i64 API(code_decisions)(const u16 *decisions, i64 count, u8 *out, i64 room);

/* Decodes `size` symbols from a code of `length` bytes. Returns 1, or 0 where it is not the code of so many symbols. */
i64 API(decode_symbols)(const u8 *code, i64 length, i64 columns, i64 shift, i32 *symbols, i64 size, u8 *scratch,
                        i64 scratch_size);

/* --- matrices.c: sums from the first index on, beginning with 0. Returns 0. */

/* out = a x, for a of n x m and x of m x k. */
i64 API(multiply)(const float *a, i64 n, i64 m, const float *x, i64 k, float *out);

/* out = aT x, for a of n x m and x of n x k. */
i64 API(multiply_transposed)(const float *a, i64 n, i64 m, const float *x, i64 k, float *out);

/* Bytes of scratch for k columns of a. */
i64 API(subtract_product_scratch)(i64 k);

/* y -= a b, product after product, for y of n x m, a of n x k and b of k x m. */
i64 API(subtract_product)(float *y, i64 n, i64 m, const float *a, i64 k, const float *b, u8 *scratch,
                          i64 scratch_size);

/* Bytes of scratch for y of n x k. */
i64 API(decompose_qr_scratch)(i64 n, i64 k);

/* The Householder reflections of y's QR decomposition, for y of n x k: 1 - w t wT is orthogonal, and its first columns
 * span those of y. w is n x k, t is k x k and triangular. Computed in double precision. */
i64 API(decompose_qr)(const float *y, i64 n, i64 k, float *w, float *t, u8 *scratch, i64 scratch_size);

/* --- moments.c */

/* 1 if these are the bits of finite float32, else 0. */
i64 API(is_finite)(const u32 *words, i64 size);

/* The sums of the values of each row and of each column, and the least and the largest bits, in `extremes`. Returns 0. */
i64 API(sum_rows_and_columns)(const float *values, i64 n, i64 m, double *rows, double *columns, u32 *extremes);

/* The sums of the levels (eighths of an octave, rounded down; signs are ignored) in each row and column. Returns 0. */
i64 API(sum_levels)(const u32 *words, i64 n, i64 m, i64 *rows, i64 *columns);

/* The multiples of a step that are nearest to what is left of the levels of values, which are not negative, without
 * those of their row and column; 0 for zeros. `step` is 1 to 255 levels; `fine_levels` are the 4097 of `log_levels`;
 * levels of rows and columns are below 2^13. Returns the sum of the magnitudes. */
i64 API(encode_residuals)(const u32 *words, i64 n, i64 m, const i32 *rows, const i32 *columns, i64 step,
                          const i32 *fine_levels, i64 fine_count, i32 *residuals);

/* The float32 of levels: the sum of row's and column's, and `step` (at most 255) for each unit of `residuals`, if that
 * is not NULL; 0 where `zeros`, if that is not NULL, is not 0. Levels of rows and columns are below 2^13. Returns 0. */
i64 API(decode_levels)(const i32 *rows, const i32 *columns, i64 n, i64 m, i64 step, const i32 *residuals,
                       const i32 *zeros, float *out);

/* The first moment over the root of the second, clipped to 16, 0 where the second is at most 1e-30; then times row and
 * column. Returns 1 if any is not 0. */
i64 API(update_direction)(const float *first, const float *second, i64 n, i64 m, const float *rows,
                          const float *columns, float *out);

/* A first moment: `factor` times the change of the weights, times the root of the second moment if that is not NULL.
 * Returns 0. */
i64 API(derive_first_moment)(float factor, const float *after, const float *before, const float *second, i64 size,
                             float *out);

/* Bytes of scratch for m columns. */
i64 API(fit_first_moment_scratch)(i64 m);

/* Of what derive_first_moment computes for the factor 1: the sum of its squares, and of its products with `moment`,
 * into `sums`. Each is the sum of the columns' sums. Returns 0. */
i64 API(fit_first_moment)(const float *after, const float *before, const float *second, const float *moment, i64 n,
                          i64 m, double *sums, u8 *scratch, i64 scratch_size);

/* --- weights.c */

/* Bytes of scratch for m columns. */
i64 API(scale_change_scratch)(i64 m);

/* What changed since `before`, if that is not NULL, times row and column; the sum of its squares, which is the sum of
 * the columns' sums, into `energy`. Returns 0. */
i64 API(scale_change)(const float *after, const float *before, i64 n, i64 m, const float *rows, const float *columns,
                      float *out, double *energy, u8 *scratch, i64 scratch_size);

/* Values times row and column, added to `before` if that is not NULL. Returns 0. */
i64 API(unscale_change)(const float *values, i64 n, i64 m, const float *rows, const float *columns,
                        const float *before, float *out);

/* Values as multiples of a step. Magnitudes are rounded down after `offset` is added, which is from 0 to 1.
 * `counts[0]` is the sum of all magnitudes. For each magnitude i of 1 to 3, `counts[i]` is how many there are, and
 * `sizes[i]` the sum of the absolute values in steps. Returns 1, or 0 where a value is not finite, or not below 2^30
 * steps. */
i64 API(quantize)(const float *values, i64 size, float step, float offset, i32 *codes, double *sizes, i64 *counts);

/* Multiples of a step as values: magnitudes of 0 to 3 as `near`, which is 4 floats, others as so many steps.
 * Returns 0. */
i64 API(dequantize)(const i32 *codes, i64 size, const float *near, float step, float *out);

#endif
