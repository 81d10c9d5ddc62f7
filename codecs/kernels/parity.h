/* Reed-Solomon codes: sums of products of blocks over GF(2^8), of the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d). */
#ifndef CKPT_PARITY_H
#define CKPT_PARITY_H

#include "kernels.h"

/* Add the products of a matrix and `columns` blocks to `rows` blocks: outputs[r] ^= sum over c of matrix[r][c] * inputs[c], byte
 * by byte. Rows and columns are 1 to 255.
 *
 * matrix     rows * columns, row by row
 * inputs     columns * size: one block after another
 * outputs    rows of `size` bytes, each of which begins `stride` bytes, at least `size`, after the one before
 * gfni       1 if this CPU has GFNI (`ckpt_features`), else 0. The bytes are the same */
i64 API(add_products)(i64 rows, i64 columns, const u8 *matrix, i64 size, const u8 *inputs, u8 *outputs, i64 stride, i64 gfni);

#endif
