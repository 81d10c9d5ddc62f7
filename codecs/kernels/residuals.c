/* The exponents of moments as differences from predictions by their rows, their columns and another state.
 *
 * docs/codecs.md, "Predictions from rows, columns and another state", has the arithmetic. All of it is on integers, so that
 * every machine predicts the same, and in 32 bits, so that compilers make vectors of it.
 *
 * Memory safety: loops run over rows * columns values, which the caller has checked. A scale from a damaged file is an
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

/* Rows are worked on in blocks that stay in the nearest cache, each in several short loops, of which each has elements
 * of one width: compilers make better vectors of them than of one long loop. */
enum { ROW_BLOCK = 512 };
typedef struct {
    i32 predicted[ROW_BLOCK];
    u8 guesses[ROW_BLOCK], exponents[ROW_BLOCK];
} RowBlock;

INLINE void predict(i64 base_width, const u8 *restrict base, const i32 *restrict column, i32 scale, i64 count,
                    RowBlock *restrict block) {
    for (i64 j = 0; j < count; j++) {
        i32 predicted = expected_size(base_width, base, j) + scale * 16 + column[j];
        block->predicted[j] = predicted;
        block->guesses[j] = (u8)((u32)(predicted + 128) >> 8);
    }
}

/* Moves the columns towards the sizes of a row. `rests` are the bytes with the signs and the upper bits of mantissas. */
INLINE void follow(const RowBlock *restrict block, const u8 *restrict exponents, const u8 *restrict rests, i32 gain,
                   i64 count, i32 *restrict column) {
    for (i64 j = 0; j < count; j++) {
        u16 size = (u16)(exponents[j] << 8 | (rests[j] << 1 & 0xF0));
        i32 step = step_of((i32)size - block->predicted[j], gain);
        column[j] += size < 256 ? 0 : step;
    }
}

INLINE void residuals_of(const RowBlock *restrict block, const u8 *restrict exponents, i64 count, u8 *restrict residuals) {
    for (i64 j = 0; j < count; j++) {
        u8 guess = block->guesses[j], exponent = exponents[j], residual = (u8)(exponent - guess + 64);
        residual = residual ? residual : (u8)(64 - guess);
        residuals[j] = exponent ? residual : 0;
    }
}

/* An exponent of 0 has the residual 0; the exponent that would have it has the residual that 0 would have. */
INLINE void exponents_of(RowBlock *restrict block, const u8 *restrict residuals, i64 count) {
    for (i64 j = 0; j < count; j++) {
        u8 guess = block->guesses[j], residual = residuals[j], exponent = (u8)(residual + guess - 64);
        exponent = exponent ? exponent : (u8)(guess - 64);
        block->exponents[j] = residual ? exponent : 0;
    }
}

/* `planes` are those of the width, the one with the signs last. */
INLINE void rows_to_residuals(i64 width, i64 base_width, const Prediction *p, const u8 *words, u8 *const planes[3],
                              u8 *residuals) {
    i64 columns = p->columns;
    i32 scale = 0;
    RowBlock block;
    memset(p->column, 0, sizeof(i32) * (size_t)columns);
    for (i64 row = 0; row < p->rows; row++) {
        const u8 *row_words = words + width * row * columns, *base = p->base;
        if (base_width) base += base_width * row * columns;
        scale = scale_of_row(width, row_words, base_width, base, columns, p->column, scale);
        p->scales[row] = (i16)scale;
        i32 gain = gain_of_row(row);
        for (i64 begin = 0; begin < columns; begin += ROW_BLOCK) {
            i64 at = row * columns + begin, count = min(columns - begin, ROW_BLOCK);
            u8 *parts[8] = {planes[0] + at, width == 4 ? planes[1] + at : block.exponents,
                            width == 4 ? planes[2] + at : NULL, block.exponents};
            split_words(true, width, row_words + width * begin, count, parts);
            predict(base_width, base_width ? base + base_width * begin : NULL, p->column + begin, scale, count, &block);
            residuals_of(&block, block.exponents, count, residuals + at);
            const u8 *rests = parts[width - 2];
            if (gain == SLOWEST_GAIN)
                follow(&block, block.exponents, rests, SLOWEST_GAIN, count, p->column + begin);
            else
                follow(&block, block.exponents, rests, gain, count, p->column + begin);
        }
    }
}

INLINE void rows_from_residuals(i64 width, i64 base_width, const Prediction *p, const u8 *residuals,
                                const u8 *const planes[3], u8 *words) {
    i64 columns = p->columns;
    RowBlock block;
    memset(p->column, 0, sizeof(i32) * (size_t)columns);
    for (i64 row = 0; row < p->rows; row++) {
        i32 scale = p->scales[row], gain = gain_of_row(row);
        for (i64 begin = 0; begin < columns; begin += ROW_BLOCK) {
            i64 at = row * columns + begin, count = min(columns - begin, ROW_BLOCK);
            const u8 *base = base_width ? p->base + base_width * at : NULL, *rests = planes[width - 2] + at;
            const u8 *parts[8] = {planes[0] + at, width == 4 ? planes[1] + at : block.exponents,
                                  width == 4 ? planes[2] + at : NULL, block.exponents};
            predict(base_width, base, p->column + begin, scale, count, &block);
            exponents_of(&block, residuals + at, count);
            merge_words(true, width, parts, count, words + width * at);
            if (gain == SLOWEST_GAIN)
                follow(&block, block.exponents, rests, SLOWEST_GAIN, count, p->column + begin);
            else
                follow(&block, block.exponents, rests, gain, count, p->column + begin);
        }
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
