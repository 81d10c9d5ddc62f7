/* The kernels of delta codecs that Python calls. A reader of bytes returns 1, or 0 if they are damaged; its output is then
 * undefined. A writer returns the number of coded bytes, and writes as many of them as its buffer has. */
#ifndef CKPT_DELTAS_H
#define CKPT_DELTAS_H

#include "kernels.h"

/* ---- zigzag.c: words of `width` 1, 2, 4 or 8 bytes; `count` planes of n bytes, 1 to `width` of them ---- */

/* Returns the number of bits of the largest zigzagged difference, 0 to 64. */
i64 API(zigzag_bits)(int width, const void *before, const void *after, i64 n);
/* Fills each plane with one of the lowest bytes of the zigzagged differences. */
i64 API(split_zigzags)(int width, const void *before, const void *after, i64 n, u8 *const *planes, int count);
i64 API(merge_zigzags)(int width, const void *before, const u8 *const *planes, int count, void *out, i64 n);

/* ---- contexts.c ---- */

/* Exponents of 16-bit floats minus `least`, limited to 0 and count - 1. */
i64 API(exponent_buckets)(const u16 *words, i64 n, int mantissa_bits, int least, int count, u8 *out);
/* How often each of 256 contexts occurs. */
i64 API(count_contexts)(const u8 *contexts, i64 n, i64 *counts);
/* Groups the symbols by context, in their order; and undoes it. */
i64 API(gather)(const u8 *contexts, const u8 *plane, i64 n, u8 *out);
i64 API(scatter)(const u8 *contexts, const u8 *plane, i64 n, u8 *out);

/* ---- second_moments.c: words of float32 ---- */

/* Exponents of square roots plus `shift`, limited to 1 and 254. */
i64 API(root_units)(const u32 *second, i64 n, int shift, u8 *out);
/* Growth of values in quarter octaves, minus `least`, limited to 0 and count - 1. */
i64 API(growth_contexts)(const u32 *before, const u32 *after, i64 n, int least, int count, u8 *out);
/* Values grown by the drifts of their rows and columns, in sixteenths of an octave. */
i64 API(apply_drift)(const u32 *words, const i8 *rows, i64 row_count, const i8 *columns, i64 column_count, u32 *out);

/* ---- float32_grid.c: words of float32; bits end with 8 bytes of padding ---- */

/* Writes n symbols and up to n depths; returns the number of bits. `bits` has 4 bytes per value and 8 more. */
i64 API(to_grid)(const u32 *predicted, const u32 *actual, const u8 *units, i64 n, u8 *symbols, u8 *depths,
                 i64 *depth_count, u8 *bits, i64 bits_size);
i64 API(from_grid)(const u32 *predicted, const u8 *units, const u8 *symbols, i64 n, const u8 *depths, i64 depth_count,
                   const u8 *bits, i64 bits_size, u32 *out);

/* ---- byte_rows.c: rows of `columns` bytes, none of which is 255 ---- */

i64 API(write_rows)(const u8 *rows, i64 size, i64 columns, u8 *out, i64 room);
i64 API(read_rows)(const u8 *data, i64 data_size, i64 columns, u8 *rows, i64 size);

/* ---- class_masks.c: words of 16-bit floats ---- */

/* Returns how many words differ. */
i64 API(count_changed)(const u16 *before, const u16 *after, i64 n);

/* ---- sparse_steps.c: words of 16-bit floats, in up to 16 buckets by the exponents of their predictions ---- */

/* Of each change its bucket, its step and the gap after it; of each bucket its size and the gap before its first change.
 * Returns the number of changes, at most `room`. */
i64 API(find_steps)(const u16 *predicted, const u16 *actual, i64 n, int mantissa_bits, int least, i64 buckets,
                    u8 *bucket_of, i64 *gaps, u16 *steps, i64 room, i64 *sizes, i64 *first_gaps);
/* `shifts`: of each bucket, the bits of a gap with equal probabilities, 0 to 24. */
i64 API(write_sparse_steps)(const u8 *bucket_of, const i64 *gaps, const u16 *steps, i64 count, const i64 *sizes,
                            const i64 *first_gaps, const u8 *shifts, i64 buckets, u8 *out, i64 room);
/* `out` may be `predicted`. */
i64 API(read_sparse_steps)(const u8 *data, i64 data_size, const u16 *predicted, i64 n, int mantissa_bits, int least,
                           i64 buckets, u16 *out);

/* ---- ans_steps.c: words of 16-bit floats, each of one of up to 16 buckets; tables of 108 symbols for each bucket ---- */

/* Each value's bucket << 8 plus symbol, and how often each symbol occurs in each bucket; returns the number of bits of large
 * steps. `bits` has 2 bytes per value and 16 more. */
i64 API(count_step_symbols_scratch)(void);
i64 API(count_step_symbols)(const u16 *predicted, const u16 *actual, const u8 *which, i64 n, u16 *symbols, u32 *counts,
                            i64 buckets, u8 *bits, i64 bits_size, u8 *scratch, i64 scratch_size);
/* Fills 16 states and the last words of `words`, which has n + 1 or more; returns the index of the first word. The weights
 * of each bucket add up to 4096. */
i64 API(write_ans_steps_scratch)(void);
i64 API(write_ans_steps)(const u16 *symbols, i64 n, const u32 *weights, i64 buckets, u32 *states, u16 *words, i64 room,
                         u8 *scratch, i64 scratch_size);
/* The bits of large steps end with 8 bytes of padding. */
i64 API(read_ans_steps_scratch)(i64 n);
i64 API(read_ans_steps)(const u16 *predicted, const u8 *which, i64 n, const u32 *weights, i64 buckets,
                        const u32 *states, const u16 *words, i64 word_count, const u8 *bits, i64 bits_size, u16 *out,
                        u8 *scratch, i64 scratch_size);

/* ---- masked_steps.c: words of 16-bit floats ---- */

/* Fills the tables that the others take, and returns their size; fills nothing if there is less room. */
i64 API(fill_masked_tables)(u8 *out, i64 room);
/* Returns the number of bytes: 0 if nothing changed, `room` + 1 if more than an eighth did. `out` has 2 bytes for each value
 * and 1024 more. */
i64 API(write_masked_steps_scratch)(i64 n);
i64 API(write_masked_steps)(const u16 *before, const u16 *after, i64 n, int mantissa_bits, const u8 *tables,
                            i64 tables_size, u8 *out, i64 room, u8 *scratch, i64 scratch_size);
/* `out` may be `before`. */
i64 API(read_masked_steps_scratch)(i64 n);
i64 API(read_masked_steps)(const u8 *data, i64 size, const u16 *before, i64 n, int mantissa_bits, const u8 *tables,
                           i64 tables_size, u16 *out, u8 *scratch, i64 scratch_size);
/* Returns the number of changes, or 0 if the bytes are damaged: their places in order, and the words there after the step. There
 * is room for n; the scratch is that of read_masked_steps. */
i64 API(list_masked_steps)(const u8 *data, i64 size, const u16 *before, i64 n, int mantissa_bits, const u8 *tables,
                           i64 tables_size, i64 *places, u16 *words, i64 room, u8 *scratch, i64 scratch_size);

/* ---- optimizer_steps.c: arrays of n floats; its head explains the orders of operations ---- */

i64 API(infer_gradients)(const float *m0, const float *m1, i64 n, double gain, float *out);
i64 API(infer_bfloat16_gradients)(const float *m0, const float *m1, i64 n, double scale, float decay, float gain,
                                  int form, u16 *out);
/* Returns how many of m1 are exact if gradients are bfloat16 times `scale`. */
i64 API(count_bfloat16_matches)(const float *m0, const float *m1, i64 n, double scale, float decay, float gain, int form);
i64 API(step_first_moments)(const float *m, const float *g, i64 n, float decay, float gain, int form, float *out);
i64 API(step_second_moments)(const float *v, const float *g, i64 n, float decay, float gain, int form, float *out);
i64 API(step_adam_torch)(const float *w, const float *m, const float *v, i64 n, double weight_factor, double step_size,
                         float bias2_root, float eps, float *out);
i64 API(step_adam_fused)(const float *w, const float *m, const float *v, i64 n, double weight_factor, double step_size,
                         float bias2_root, float eps, float *out);
i64 API(step_adam_deepspeed_cpu)(const float *w, const float *m, const float *v, i64 n, double weight_factor,
                                 double step_size, float bias2_root, float eps, float *out);
i64 API(step_adam_apex)(const float *w, const float *m, const float *v, i64 n, double weight_factor, double step_size,
                        float bias2_factor, float eps, float bias1_factor, float *out);
i64 API(extrapolate_weights)(const float *w, const float *m0, const float *v0, const float *m1, const float *v1, i64 n,
                             double weight_factor, double old_direction, double new_direction, float *out);
i64 API(step_momentum)(const float *w, const float *b, i64 n, double weight_factor, double step_size, float *out);
i64 API(mix)(const float *x, const float *y, i64 n, double a, double b, float *out);
i64 API(scale)(const float *x, i64 n, double factor, float *out);

#endif
