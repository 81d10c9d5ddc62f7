/* The exponents of moments as differences from what their rows, their columns and another state predict.
 *
 * docs/codecs.md, "What rows, columns and another state foretell", has the arithmetic. All of it is on integers, so that
 * every machine predicts the same, and in 32 bits, so that compilers make vectors of it.
 *
 * Why it is safe: loops run over rows * columns values, which the caller has checked. A scale from a hostile file is an
 * int16; a column stays below 2^21 in magnitude, since it moves towards differences of numbers below 2^20 by at most
 * their own size; so no sum below leaves 2^24, and no product with a gain leaves 31 bits. */
#include "lossless.h"

/* A row after the fifteenth moves its columns by a sixteenth of their error. */
enum { SLOWEST_ROW = 15, SLOWEST_GAIN = 256 / (SLOWEST_ROW + 1) };
/* The scale of a row is taken from its first 512 values, or a quarter of them if that is more. */
enum { MIN_SCALE_VALUES = 512 };

/* bfloat16 is the upper half of a float32. */
INLINE u32 load_float(i64 width, const u8 *p, i64 i) {
    return width == 4 ? load32(p + 4 * i) : (u32)load16(p + 2 * i) << 16;
}

/* The logarithm of a float32 in 256ths, to a precision of 16ths: the exponent and four bits of the mantissa. */
INLINE i32 size_of(u32 word) { return (i32)(word >> 15 & 0xFFF0); }
/* The same of the square root of a value of the base. */
INLINE i32 expected_size(i64 base_width, const u8 *base, i64 i) {
    return base_width ? (i32)(load_float(base_width, base, i) >> 16 & 0x7FF0) + 1016 * 16 : 0;
}

INLINE i64 divide_down(i64 a, i64 b) { return a / b - (a % b < 0); } /* towards minus infinity; b > 0 */

/* How far a row is from what is expected, on average, in 16ths; `previous` for a row of zeros. */
INLINE i32 scale_of_row(i64 width, const u8 *words, i64 base_width, const u8 *base, i64 columns, const i32 *column,
                        i32 previous) {
    i64 number = min(columns, max(MIN_SCALE_VALUES, columns / 4)), sum = 0, nonzero = 0;
    for (i64 j = 0; j < number;) {
        i32 part = 0, part_nonzero = 0; /* of 1024 numbers below 2^20: no overflow */
        for (i64 end = min(j + 1024, number); j < end; j++) {
            i32 size = size_of(load_float(width, words, j)), mask = -(size >= 256);
            part += (size - expected_size(base_width, base, j) - column[j]) & mask;
            part_nonzero -= mask;
        }
        sum += part;
        nonzero += part_nonzero;
    }
    return nonzero ? (i32)((divide_down(sum, nonzero) + 8) >> 4) : previous;
}

INLINE i32 gain_of_row(i64 row) { return (i32)(256 / (min(row, SLOWEST_ROW) + 1)); }
INLINE i32 step_of(i32 error, i32 gain) { return gain == SLOWEST_GAIN ? error >> 4 : error * gain >> 8; }

INLINE void row_to_residuals(i64 width, const u8 *restrict words, i64 base_width, const u8 *restrict base, i64 columns,
                             i32 scale, i32 gain, i32 *restrict column, u8 *restrict low, u8 *restrict middle,
                             u8 *restrict high, u8 *restrict residuals) {
    for (i64 j = 0; j < columns; j++) {
        u32 word = load_float(width, words, j), exponent = word >> 23 & 255;
        i32 predicted = expected_size(base_width, base, j) + scale * 16 + column[j];
        u32 guess = (u32)(predicted + 128) >> 8, of_zero = (64 - guess) & 255;
        u32 residual = (exponent - guess + 64) & 255;
        residual = residual ? residual : of_zero;
        residuals[j] = (u8)(exponent ? residual : 0);
        column[j] += exponent ? step_of(size_of(word) - predicted, gain) : 0;
        high[j] = (u8)((word >> 16 & 0x7F) | (word >> 24 & 0x80));
        if (width == 4) {
            low[j] = (u8)word;
            middle[j] = (u8)(word >> 8);
        }
    }
}

INLINE void row_from_residuals(i64 width, const u8 *restrict residuals, const u8 *restrict low,
                               const u8 *restrict middle, const u8 *restrict high, i64 base_width,
                               const u8 *restrict base, i64 columns, i32 scale, i32 gain, i32 *restrict column,
                               u8 *restrict words) {
    for (i64 j = 0; j < columns; j++) {
        i32 predicted = expected_size(base_width, base, j) + scale * 16 + column[j];
        u32 guess = (u32)(predicted + 128) >> 8, of_zero = (64 - guess) & 255, residual = residuals[j];
        u32 exponent = (residual == of_zero ? guess - 64 : residual + guess - 64) & 255, rest = high[j];
        exponent = residual ? exponent : 0;
        u32 word = exponent << 23 | (rest & 0x7F) << 16 | (rest & 0x80) << 24;
        column[j] += exponent ? step_of(size_of(word) - predicted, gain) : 0;
        if (width == 4) store32(words + 4 * j, word | (u32)middle[j] << 8 | low[j]);
        else store16(words + 2 * j, (u16)(word >> 16));
    }
}

/* `planes` are those of the width, the one with the signs last. */
INLINE void rows_to_residuals(i64 width, i64 base_width, const Prediction *p, const u8 *words, u8 *const planes[3],
                              u8 *residuals) {
    i64 columns = p->columns;
    i32 scale = 0;
    memset(p->column, 0, sizeof(i32) * (size_t)columns);
    for (i64 row = 0, at = 0; row < p->rows; row++, at += columns) {
        const u8 *from = words + width * at, *base = base_width ? p->base + base_width * at : NULL;
        u8 *low = width == 4 ? planes[0] + at : NULL, *middle = width == 4 ? planes[1] + at : NULL;
        u8 *high = planes[width - 2] + at;
        scale = scale_of_row(width, from, base_width, base, columns, p->column, scale);
        p->scales[row] = (i16)scale;
        i32 gain = gain_of_row(row);
        if (gain == SLOWEST_GAIN)
            row_to_residuals(width, from, base_width, base, columns, scale, SLOWEST_GAIN, p->column, low, middle, high,
                             residuals + at);
        else
            row_to_residuals(width, from, base_width, base, columns, scale, gain, p->column, low, middle, high,
                             residuals + at);
    }
}

INLINE void rows_from_residuals(i64 width, i64 base_width, const Prediction *p, const u8 *residuals,
                                const u8 *const planes[3], u8 *words) {
    i64 columns = p->columns;
    memset(p->column, 0, sizeof(i32) * (size_t)columns);
    for (i64 row = 0, at = 0; row < p->rows; row++, at += columns) {
        const u8 *base = base_width ? p->base + base_width * at : NULL;
        const u8 *low = width == 4 ? planes[0] + at : NULL, *middle = width == 4 ? planes[1] + at : NULL;
        const u8 *high = planes[width - 2] + at;
        u8 *to = words + width * at;
        i32 scale = p->scales[row], gain = gain_of_row(row);
        if (gain == SLOWEST_GAIN)
            row_from_residuals(width, residuals + at, low, middle, high, base_width, base, columns, scale, SLOWEST_GAIN,
                               p->column, to);
        else
            row_from_residuals(width, residuals + at, low, middle, high, base_width, base, columns, scale, gain,
                               p->column, to);
    }
}

/* A loop for each case, in which widths are constants. */
static void to_residuals(const Prediction *p, const u8 *words, u8 *const planes[3], u8 *residuals) {
    if (p->width == 4 && p->base_width == 4) rows_to_residuals(4, 4, p, words, planes, residuals);
    else if (p->width == 4 && p->base_width == 2) rows_to_residuals(4, 2, p, words, planes, residuals);
    else if (p->width == 4) rows_to_residuals(4, 0, p, words, planes, residuals);
    else if (p->base_width == 4) rows_to_residuals(2, 4, p, words, planes, residuals);
    else if (p->base_width == 2) rows_to_residuals(2, 2, p, words, planes, residuals);
    else rows_to_residuals(2, 0, p, words, planes, residuals);
}

static void from_residuals(const Prediction *p, const u8 *residuals, const u8 *const planes[3], u8 *words) {
    if (p->width == 4 && p->base_width == 4) rows_from_residuals(4, 4, p, residuals, planes, words);
    else if (p->width == 4 && p->base_width == 2) rows_from_residuals(4, 2, p, residuals, planes, words);
    else if (p->width == 4) rows_from_residuals(4, 0, p, residuals, planes, words);
    else if (p->base_width == 4) rows_from_residuals(2, 4, p, residuals, planes, words);
    else if (p->base_width == 2) rows_from_residuals(2, 2, p, residuals, planes, words);
    else rows_from_residuals(2, 0, p, residuals, planes, words);
}
