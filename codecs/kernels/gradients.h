/* Chunks of gradients: the values that are not zero, bfloat16 numbers times one factor, blocks of 8-bit codes.
 * docs/codecs.md, "Codecs of gradients", specifies all bytes. Words are the bits of float32. */
#ifndef CKPT_GRADIENTS_H
#define CKPT_GRADIENTS_H

#include "kernels.h"

/* Returns how many words are not zero. That of -0.0 is not. */
i64 API(count_words)(const u32 *words, i64 count);

/* Split words into those that are not zero and the gaps before them: how many zeros. Of a gap, the lowest `shift` bits, 24
 * at most, go to `lows`, from the lowest bit of each byte up; the rest is a byte, where 255 stands for itself and no word
 * yet. `values` needs as many elements as there are words that are not zero, `gaps` as many and count / 255, `lows` as
 * many times `shift` bits, rounded up. Returns how many bytes of `gaps`. */
i64 API(split_sparse)(const u32 *words, i64 count, i64 shift, u8 *gaps, i64 gaps_size, u8 *lows, i64 lows_size,
                      u32 *values, i64 values_size);

/* The words again. `lows` needs `shift` bits for each value, rounded up. Returns 0, or 1 if a gap leaves the words or if
 * there are not as many gaps that end as values. */
i64 API(merge_sparse)(const u8 *gaps, i64 gaps_size, i64 shift, const u8 *lows, i64 lows_size, const u32 *values,
                      i64 values_size, u32 *words, i64 count);

/* Returns the bits of the float32 factor from 1 up to 2 of which 64 of the words are multiples by bfloat16 numbers; 0 if
 * there is none. Whether all words are, divide_by_factor says. */
i64 API(find_factor)(const u32 *words, i64 count);

/* Write the bfloat16 numbers of which the words are the products with a factor from 1 up to 2, rounded. Returns 1 if all
 * words come back by multiply_by_factor, else 0: `out` is then of no use. With another factor than 1, a word that is not
 * zero or normal never comes back. */
i64 API(divide_by_factor)(const u32 *words, i64 count, float factor, u16 *out);

/* Multiply bfloat16 numbers by a factor, to float32. With the factor 1, every bit is copied. A NaN that a product makes
 * is the canonical one. */
i64 API(multiply_by_factor)(const u16 *values, i64 count, float factor, u32 *words);

/* Quantise blocks of 512 words, the last one shorter, to codes from -127 to 127 with a scale for each block. The scale of
 * a block that must be stored as it is has the bits 0x7FC00000, and its codes are 0. `scales` needs count / 512 elements,
 * rounded up. Returns how many blocks are to be stored. */
i64 API(quantise_blocks)(const u32 *words, i64 count, u32 *scales, i64 scales_size, u8 *codes);

/* Write codes in four classes, by their rows and columns: a range of the elements of a matrix, from `skipped` elements
 * after the beginning of a row on. `skipped` is below `columns`, which are at most `count` and 2^16. Written are a table of
 * classes, groups of columns and of rows, a directory, and the stream of the codes of each class. `out` needs
 * 36 + (columns + 1) / 2 + (count / columns + 3) / 2 + count bytes. Returns how many are used; 0 if one stream of all codes
 * would be smaller, or any class cannot be coded. */
i64 API(write_columns)(const u8 *codes, i64 count, i64 columns, i64 skipped, u8 *out, i64 out_size, u8 *scratch,
                       i64 scratch_size);

/* The codes again, from the beginning of `source`. Returns how many bytes they take, or 0 if they are damaged. */
i64 API(read_columns)(const u8 *source, i64 source_size, i64 columns, i64 skipped, u8 *codes, i64 count, u8 *scratch,
                      i64 scratch_size);

/* The bytes of scratch for write_columns and read_columns. */
i64 API(columns_scratch)(i64 count, i64 columns);

/* The words again, zeros in blocks that are stored. Returns 0, or 1 if a scale is none that quantise_blocks writes. */
i64 API(restore_blocks)(const u8 *codes, i64 count, const u32 *scales, i64 scales_size, u32 *words);

#endif
