/* Passes over moments: second moments as levels (eighths of an octave) of rows and columns with residuals; first
 * moments from the change of the weights.
 *
 * Why it is safe: sizes are checked at the top, and levels of rows and columns where they come in, so that no sum of
 * them overflows. Residuals come from a file and may be any number: they are clipped before they are multiplied. */
#include "kernels.h"

enum {
    LOWEST_LEVEL = -149 * 8,     /* of the least denormal */
    HIGHEST_LEVEL = 128 * 8 - 1, /* of the largest finite float32 */
    LEVEL_OF_ONE = 127 * 8,      /* the upper twelve bits of 1, which levels are counted from */
    LEVEL_LIMIT = 1 << 13,
    MOST_RESIDUAL = 4096,
    MOST_RESIDUAL_STEP = 255,
    FINE_COUNT = 4097,
};

i64 API(is_finite)(const u32 *words, i64 size) {
    if (!is_size(size)) return BAD_SIZE;
    u32 most = 0;
    for (i64 i = 0; i < size; i++) most = max(most, words[i] & 0x7FFFFFFF);
    return most < 0x7F800000;
}

enum { ROWS_AT_ONCE = 8 };

/* The sums of some rows, and those of columns further on. A sum waits for itself, but not for those of other rows. */
INLINE void sum_some_rows(const float *values, i64 m, double *restrict rows, double *restrict columns, int count) {
    for (i64 j = 0; j < m; j++) {
        double sum = columns[j];
        for (int i = 0; i < count; i++) sum += (double)values[i * m + j];
        columns[j] = sum;
    }
    double sums[ROWS_AT_ONCE] = {0};
    for (i64 j = 0; j < m; j++)
        for (int i = 0; i < count; i++) sums[i] += (double)values[i * m + j];
    for (int i = 0; i < count; i++) rows[i] = sums[i];
}

i64 API(sum_rows_and_columns)(const float *values, i64 n, i64 m, double *rows, double *columns, u32 *extremes) {
    if (!is_matrix(n, m)) return BAD_SIZE;
    for (i64 j = 0; j < m; j++) columns[j] = 0;
    u32 least = 0xFFFFFFFF, most = 0;
    for (i64 at = 0; at < n * m; at++) {
        u32 word = bits_of_float(values[at]);
        least = min(least, word);
        most = max(most, word);
    }
    extremes[0] = least;
    extremes[1] = most;
    i64 i = 0;
    for (; i + ROWS_AT_ONCE <= n; i += ROWS_AT_ONCE)
        sum_some_rows(values + i * m, m, rows + i, columns, ROWS_AT_ONCE);
    for (; i < n; i++) sum_some_rows(values + i * m, m, rows + i, columns, 1);
    return 0;
}

i64 API(sum_levels)(const u32 *words, i64 n, i64 m, i64 *rows, i64 *columns) {
    if (!is_matrix(n, m)) return BAD_SIZE;
    memset(columns, 0, (size_t)m * sizeof *columns);
    for (i64 i = 0; i < n; i++) {
        i64 row = 0;
        for (i64 j = 0; j < m; j++) {
            i32 level = (i32)(words[i * m + j] >> 20 & 0x7FF) - LEVEL_OF_ONE;
            columns[j] += level;
            row += level;
        }
        rows[i] = row;
    }
    return 0;
}

static bool are_levels(const i32 *levels, i64 size) {
    bool is_beyond = false;
    for (i64 i = 0; i < size; i++) is_beyond |= levels[i] <= -LEVEL_LIMIT || levels[i] >= LEVEL_LIMIT;
    return !is_beyond;
}

/* The multiple nearest to the level of a positive number without `level`: ties go to even. */
static i32 nearest_residual(u32 word, i32 level, const i32 *fine_levels, double each) {
    if (word < 1 << 23) { /* denormals: their bits are a whole number of 2^-149 */
        word = bits_of_float((float)word * 0x1p-125f);
        level += 24 * 8;
    }
    u32 at = word >> 11 & 4095;
    i32 first = fine_levels[at], low = word & 2047;
    i32 fine = first + ((fine_levels[at + 1] - first) * low >> 11);
    double off = (double)((i32)(word >> 23) * 8 - LEVEL_OF_ONE - level) + (double)fine * 0x1p-20;
    return (i32)((off * each + 0x1.8p52) - 0x1.8p52);
}

/* Most residuals follow from bounds. The bits of a positive number are its logarithm, in 2^-23 octaves, less what
 * log2(1 + x) is above x: 0 to 0.0861 octaves, which is 0 to 176.3 units of 2^-8 levels. A whole number that is nearest
 * to both bounds is nearest to all between them. Bounds are below 2^23 units, so exact as floats; times `each` they are
 * off by less than half a unit, and the table of fine levels by less than that. */
enum { BOUND_BITS = 8, BOUND_WIDTH = 177, BOUND_SLACK = 2, RESIDUAL_BLOCK = 64 };

/* Writes what bounds say of the residuals of a block, and whether they leave it open, as one byte each. */
INLINE void bound_residuals(const u32 *words, i64 size, i32 row, const i32 *columns, float each, i32 *residuals,
                            u8 *is_open) {
    const float nearest = 0x1.8p23f; /* added and subtracted, it rounds to whole numbers below 2^22 */
    for (i64 j = 0; j < size; j++) {
        i32 level = row + columns[j];
        i32 bound = (i32)(words[j] >> 12 & 0x7FFFF) - (LEVEL_OF_ONE + level) * (1 << BOUND_BITS);
        float low = ((float)(bound - BOUND_SLACK) * each + nearest) - nearest;
        float high = ((float)(bound + BOUND_WIDTH + BOUND_SLACK) * each + nearest) - nearest;
        residuals[j] = (i32)low;
        is_open[j] = (low != high) | (words[j] << 1 < 1 << 24);
    }
}

i64 API(encode_residuals)(const u32 *words, i64 n, i64 m, const i32 *rows, const i32 *columns, i64 step,
                          const i32 *fine_levels, i64 fine_count, i32 *residuals) {
    if (!is_matrix(n, m) || step < 1 || step > MOST_RESIDUAL_STEP || fine_count != FINE_COUNT) return BAD_SIZE;
    if (!are_levels(rows, n) || !are_levels(columns, m)) return BAD_SIZE;
    double each = 1.0 / (double)step;
    i64 total = 0;
    for (i64 i = 0; i < n; i++)
        for (i64 start = 0; start < m; start += RESIDUAL_BLOCK) {
            i64 width = min(m - start, RESIDUAL_BLOCK), at = i * m + start;
            u8 is_open[RESIDUAL_BLOCK] = {0};
            bound_residuals(words + at, width, rows[i], columns + start, (float)each / (1 << BOUND_BITS),
                            residuals + at, is_open);
            for (i64 group = 0; group < width; group += 8) {
                for (u64 open = load64(is_open + group); open; open &= open - 1) {
                    i64 j = group + __builtin_ctzll(open) / 8;
                    u32 word = words[at + j] & 0x7FFFFFFF;
                    i32 level = rows[i] + columns[start + j];
                    residuals[at + j] = word ? nearest_residual(word, level, fine_levels, each) : 0;
                }
            }
            u32 sum = 0; /* of 64 that are below 2^16 */
            for (i64 j = at; j < at + width; j++) sum += magnitude_of(residuals[j]);
            total += sum;
        }
    return total;
}

/* 2^(i/8) for i from 0 to 7, rounded down, as the mantissa of a float32 with its highest bit. */
INLINE u32 mantissa_of_level(u32 level) {
    u32 even = level & 4 ? (level & 2 ? 0xD744FC : 0xB504F3) : (level & 2 ? 0x9837F0 : 0x800000);
    u32 odd = level & 4 ? (level & 2 ? 0xEAC0C6 : 0xC5672A) : (level & 2 ? 0xA5FED6 : 0x8B95C1);
    return level & 1 ? odd : even;
}

/* The value of a level from LOWEST_LEVEL to HIGHEST_LEVEL. */
static float value_of_level(i32 level) {
    u32 above = (u32)(level - LOWEST_LEVEL), mantissa = mantissa_of_level(above), exponent = above >> 3;
    if (exponent >= 23) return float_of_bits((exponent - 22) << 23 | (mantissa & 0x7FFFFF));
    return float_of_bits(mantissa >> (23 - exponent)); /* a denormal */
}

/* Decodes one row. Its values are normal but for few, so that denormals are left to a second pass. */
INLINE void decode_row(i32 row, const i32 *columns, i64 m, i32 step, const i32 *residuals, float *out) {
    i32 least = HIGHEST_LEVEL;
    for (i64 j = 0; j < m; j++) {
        i32 level = row + columns[j];
        if (residuals) level += step * min(max(residuals[j], -MOST_RESIDUAL), MOST_RESIDUAL);
        level = min(max(level, LOWEST_LEVEL), HIGHEST_LEVEL);
        least = min(least, level);
        u32 above = (u32)(level - LOWEST_LEVEL);
        out[j] = float_of_bits(((above >> 3) - 22) << 23 | (mantissa_of_level(above) & 0x7FFFFF));
    }
    if (least >= LOWEST_LEVEL + 23 * 8) return;
    for (i64 j = 0; j < m; j++) {
        i32 level = row + columns[j];
        if (residuals) level += step * min(max(residuals[j], -MOST_RESIDUAL), MOST_RESIDUAL);
        out[j] = value_of_level(min(max(level, LOWEST_LEVEL), HIGHEST_LEVEL));
    }
}

i64 API(decode_levels)(const i32 *rows, const i32 *columns, i64 n, i64 m, i64 step, const i32 *residuals,
                       const i32 *zeros, float *out) {
    if (!is_matrix(n, m) || step < 0 || step > MOST_RESIDUAL_STEP) return BAD_SIZE;
    if (!are_levels(rows, n) || !are_levels(columns, m)) return BAD_SIZE;
    for (i64 i = 0; i < n; i++, out += m) {
        if (residuals) decode_row(rows[i], columns, m, (i32)step, residuals + i * m, out);
        else decode_row(rows[i], columns, m, 0, NULL, out);
        for (i64 j = 0; j < m && zeros; j++) out[j] = zeros[i * m + j] ? 0 : out[j];
    }
    return 0;
}

#define MOST_DIRECTION 16.0f
#define LEAST_SECOND_MOMENT 1e-30f

i64 API(update_direction)(const float *first, const float *second, i64 n, i64 m, const float *rows,
                          const float *columns, float *out) {
    if (!is_matrix(n, m)) return BAD_SIZE;
    u32 any = 0;
    for (i64 i = 0; i < n; i++) {
        float row = rows[i];
        for (i64 j = 0; j < m; j++) {
            i64 at = i * m + j;
            bool is_known = second[at] > LEAST_SECOND_MOMENT;
            float direction = first[at] / __builtin_sqrtf(is_known ? second[at] : 1);
            direction = direction > MOST_DIRECTION ? MOST_DIRECTION : direction;
            direction = direction < -MOST_DIRECTION ? -MOST_DIRECTION : direction;
            float scaled = ((is_known ? direction : 0) * row) * columns[j];
            out[at] = scaled;
            any |= scaled != 0;
        }
    }
    return any;
}

INLINE float first_moment_of(float after, float before, float second) {
    return (after - before) * __builtin_sqrtf(__builtin_fabsf(second));
}

i64 API(derive_first_moment)(float factor, const float *after, const float *before, const float *second, i64 size,
                             float *out) {
    if (!is_size(size)) return BAD_SIZE;
    if (second)
        for (i64 i = 0; i < size; i++) out[i] = factor * first_moment_of(after[i], before[i], second[i]);
    else
        for (i64 i = 0; i < size; i++) out[i] = factor * (after[i] - before[i]);
    return 0;
}

/* Adds the squares of some columns of a row, and the products, to those of the columns. */
INLINE void fit_columns(const float *after, const float *before, const float *second, const float *moment, i64 count,
                        double *restrict squares, double *restrict products) {
    for (i64 j = 0; j < count; j++) {
        float change = after[j] - before[j];
        double fitted = second ? (double)(change * __builtin_sqrtf(__builtin_fabsf(second[j]))) : (double)change;
        squares[j] += fitted * fitted;
        products[j] += fitted * (double)moment[j];
    }
}

i64 API(fit_first_moment_scratch)(i64 m) { return is_size(m) ? 2 * PIECE(m * (i64)sizeof(double)) : BAD_SIZE; }

i64 API(fit_first_moment)(const float *after, const float *before, const float *second, const float *moment, i64 n,
                          i64 m, double *sums, u8 *scratch, i64 scratch_size) {
    if (!is_matrix(n, m)) return BAD_SIZE;
    Scratch pieces = {scratch, scratch + scratch_size};
    double *squares = take(&pieces, m * (i64)sizeof(double)), *products = take(&pieces, m * (i64)sizeof(double));
    if (!squares || !products) return BAD_SIZE;
    for (i64 j = 0; j < m; j++) squares[j] = products[j] = 0;
    for (i64 at = 0; at < n * m; at += m) {
        if (second) fit_columns(after + at, before + at, second + at, moment + at, m, squares, products);
        else fit_columns(after + at, before + at, NULL, moment + at, m, squares, products);
    }
    sums[0] = sums[1] = 0;
    for (i64 j = 0; j < m; j++) {
        sums[0] += squares[j];
        sums[1] += products[j];
    }
    return 0;
}
