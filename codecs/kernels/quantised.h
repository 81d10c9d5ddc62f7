/* The values of quantised weights: codes of one byte, half bytes and integers, times the scales of their blocks. Products are
 * float32, rounded once. docs/quantised-weights.md lists the schemes. */
#ifndef CKPT_QUANTISED_H
#define CKPT_QUANTISED_H

#include "kernels.h"

/* Write table[code] * scale for a matrix of codes. `table` has 256 elements. A scale serves `row_block` rows and
 * `column_block` columns; the first block has `skipped_rows` and `skipped_columns` elements before the matrix, fewer than a
 * block has. `scales` needs an element for each block, row by row. */
i64 API(scale_codes)(const u8 *codes, i64 rows, i64 columns, const float *table, const float *scales, i64 scales_size,
                     i64 skipped_rows, i64 row_block, i64 skipped_columns, i64 column_block, float *out);

/* Write table[half byte] * scale for `2 * size` half bytes, the low one of each byte first, or the high one if `high_first`
 * is not 0. `table` has 16 elements. A scale serves `block` values, an even number, the last one as many as there are. */
i64 API(scale_nibbles)(const u8 *packed, i64 size, i64 high_first, const float *table, const float *scales,
                       i64 scales_size, i64 block, float *out);

/* Write integer * scale for `count` blocks of `stride` bytes each, in which `block` signed integers of a byte begin at
 * `offset`. `bytes` has count * stride bytes, `scales` has `count` elements, `out` needs count * block. */
i64 API(scale_integers)(const u8 *bytes, i64 size, i64 stride, i64 offset, i64 block, const float *scales, i64 count,
                        float *out);

/* Write the integers of `bits` bits in words of 32 bits: `per_word` of each word, number k from bit shifts[k] on, at most
 * 32 - bits. If `down` is 1, those of a word follow each other along the columns, and out[(row * per_word + k) * columns +
 * column] is written, else out[(row * columns + column) * per_word + k]. */
i64 API(unpack_words)(const u32 *words, i64 rows, i64 columns, i64 bits, const u8 *shifts, i64 per_word, i64 down, u8 *out);

/* Write (code - zero) * scale for a matrix of codes, transposed: out[column * rows + row]. groups[row] is the row of
 * `zeros` and `scales`, which have `columns` columns and scales_size elements. Returns 1, with `out` unspecified, if there
 * is no such row. */
i64 API(scale_columns)(const u8 *codes, i64 rows, i64 columns, const i32 *groups, const float *zeros, const float *scales,
                       i64 scales_size, float *out);

/* Write MXFP4 of `count` groups of 32 finite numbers: 16 bytes of codes for each group, the low half of a byte first, and a
 * scale, which is the exponent of the largest size less 2, plus 127. Codes are the nearest, ties to even, at most 6. */
i64 API(encode_mxfp4)(const float *values, i64 count, u8 *codes, u8 *scales);

#endif
