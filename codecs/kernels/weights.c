/* Passes over the weights: their change scaled by row and column, as multiples of a step, and back.
 *
 * Why it is safe: sizes are checked at the top. Multiples of a step come from a file and may be any number; they are
 * only converted to floats. Floats are converted to integers only below 2^30. */
#include "kernels.h"

#define MOST_MULTIPLE 0x1p30f

/* Scales a row, and adds its squares to those of the columns. */
INLINE void scale_row(const float *after, const float *before, i64 m, float row, const float *columns,
                      float *restrict out, double *restrict squares) {
    for (i64 j = 0; j < m; j++) {
        float scaled = ((before ? after[j] - before[j] : after[j]) * row) * columns[j];
        out[j] = scaled;
        squares[j] += (double)scaled * (double)scaled;
    }
}

i64 API(scale_change_scratch)(i64 m) { return is_size(m) ? PIECE(m * (i64)sizeof(double)) : BAD_SIZE; }

i64 API(scale_change)(const float *after, const float *before, i64 n, i64 m, const float *rows, const float *columns,
                      float *out, double *energy, u8 *scratch, i64 scratch_size) {
    if (!is_matrix(n, m)) return BAD_SIZE;
    double *squares = take(&(Scratch){scratch, scratch + scratch_size}, m * (i64)sizeof(double));
    if (!squares) return BAD_SIZE;
    memset(squares, 0, (size_t)m * sizeof *squares);
    for (i64 i = 0, at = 0; i < n; i++, at += m) {
        if (before) scale_row(after + at, before + at, m, rows[i], columns, out + at, squares);
        else scale_row(after + at, NULL, m, rows[i], columns, out + at, squares);
    }
    double sum = 0;
    for (i64 j = 0; j < m; j++) sum += squares[j];
    *energy = sum;
    return 0;
}

i64 API(unscale_change)(const float *values, i64 n, i64 m, const float *rows, const float *columns,
                        const float *before, float *out) {
    if (!is_matrix(n, m)) return BAD_SIZE;
    for (i64 i = 0; i < n; i++) {
        float row = rows[i];
        for (i64 j = 0; j < m; j++) {
            i64 at = i * m + j;
            float change = (values[at] * row) * columns[j];
            out[at] = before ? before[at] + change : change;
        }
    }
    return 0;
}

enum { QUANTIZE_BLOCK = 256 };

/* Of magnitudes of 1 to 3: what they stand for in sum, and how many there are. */
typedef struct {
    double sizes[3];
    i64 counts[3];
} Centred;

/* Adds the sizes of a block, one after another. */
INLINE void add_sizes(const float *values, const i32 *codes, i64 size, float step, double sizes[3]) {
    u16 places[QUANTIZE_BLOCK];
    i64 count = 0;
    for (i64 i = 0; i < size; i++) {
        places[count] = (u16)i;
        count += codes[i] != 0;
    }
    double sum1 = sizes[0], sum2 = sizes[1], sum3 = sizes[2];
    for (i64 i = 0; i < count; i++) {
        double code = __builtin_fabs((double)codes[places[i]]);
        double steps = (double)__builtin_fabsf(values[places[i]] / step);
        /* Not to branch, each sum adds something or 0, which changes no sum that is not negative. */
        sum1 += code == 1 ? steps : 0;
        sum2 += code == 2 ? steps : 0;
        sum3 += code == 3 ? steps : 0;
    }
    sizes[0] = sum1, sizes[1] = sum2, sizes[2] = sum3;
}

/* Quantizes a block. Returns the sum of the magnitudes, at most 2^38; -1 where a value has no multiple. */
INLINE i64 quantize_block(const float *values, i64 size, float step, float offset, i32 *codes, i64 counts[3]) {
    u64 total = 0;
    u32 is_wrong = 0, count1 = 0, count2 = 0, count3 = 0;
    for (i64 i = 0; i < size; i++) {
        float steps = __builtin_fabsf(values[i] / step);
        is_wrong |= !(steps < MOST_MULTIPLE);
        i32 magnitude = (i32)((steps < MOST_MULTIPLE ? steps : 0) + offset);
        codes[i] = values[i] < 0 ? -magnitude : magnitude;
        total += (u32)magnitude;
        count1 += magnitude == 1, count2 += magnitude == 2, count3 += magnitude == 3;
    }
    counts[0] += count1, counts[1] += count2, counts[2] += count3;
    return is_wrong ? -1 : (i64)total;
}

i64 API(quantize)(const float *values, i64 size, float step, float offset, i32 *codes, double *sizes, i64 *counts) {
    if (!is_size(size) || !(offset >= 0 && offset <= 1)) return BAD_SIZE;
    Centred centred = {0};
    i64 total = 0;
    for (i64 start = 0; start < size; start += QUANTIZE_BLOCK) {
        i64 width = min(size - start, QUANTIZE_BLOCK);
        i64 sum = quantize_block(values + start, width, step, offset, codes + start, centred.counts);
        if (sum < 0) return 0;
        if (sum) add_sizes(values + start, codes + start, width, step, centred.sizes);
        total += sum;
    }
    sizes[0] = 0, counts[0] = total;
    memcpy(sizes + 1, centred.sizes, sizeof centred.sizes);
    memcpy(counts + 1, centred.counts, sizeof centred.counts);
    return 1;
}

i64 API(dequantize)(const i32 *codes, i64 size, const float *near, float step, float *out) {
    if (!is_size(size)) return BAD_SIZE;
    float one = near[1], two = near[2], three = near[3];
    for (i64 i = 0; i < size; i++) {
        i32 code = codes[i], magnitude = (i32)magnitude_of(code);
        float value = (float)magnitude * step;
        value = magnitude == 3 ? three : value;
        value = magnitude == 2 ? two : value;
        value = magnitude == 1 ? one : value;
        out[i] = code < 0 ? -value : value;
    }
    return 0;
}
