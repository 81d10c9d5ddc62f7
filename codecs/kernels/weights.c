/* Passes over the weights: their change scaled by row and column, as multiples of a step, and back.
 *
 * Why it is safe: sizes are checked at the top. Multiples of a step come from a file and may be any number; they are
 * only converted to floats. Floats are converted to integers only below 2^30. */
#include "kernels.h"

enum { CENTRED = 3 }; /* magnitudes up to this are decoded as the mean of what they stand for */
#define MOST_MULTIPLE 0x1p30f

i64 API(scale_change_scratch)(i64 m) { return is_size(m) ? PIECE(m * (i64)sizeof(double)) : BAD_SIZE; }

i64 API(scale_change)(const float *after, const float *before, i64 n, i64 m, const float *rows, const float *columns,
                      float *out, double *energy, u8 *scratch, i64 scratch_size) {
    if (!is_matrix(n, m)) return BAD_SIZE;
    double *squares = take(&(Scratch){scratch, scratch + scratch_size}, m * (i64)sizeof(double));
    if (!squares) return BAD_SIZE;
    memset(squares, 0, (size_t)m * sizeof *squares);
    for (i64 i = 0; i < n; i++) {
        float row = rows[i];
        for (i64 j = 0; j < m; j++) {
            i64 at = i * m + j;
            float change = before ? after[at] - before[at] : after[at];
            out[at] = (change * row) * columns[j];
        }
        for (i64 j = 0; j < m; j++) squares[j] += (double)out[i * m + j] * (double)out[i * m + j];
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

/* Adds to `sizes` and `counts` what the magnitudes of a block stand for, one after another. */
INLINE void add_centred(const float *values, const i32 *codes, i64 size, float step, double sizes[], i64 counts[]) {
    u16 places[QUANTIZE_BLOCK];
    i64 count = 0;
    for (i64 i = 0; i < size; i++) {
        places[count] = (u16)i;
        count += codes[i] != 0;
    }
    for (i64 i = 0; i < count; i++) {
        i32 code = codes[places[i]], magnitude = code < 0 ? -code : code;
        double steps = (double)__builtin_fabsf(values[places[i]] / step);
        /* Not to branch, each adds something or 0, which changes no sum that is not negative. */
        for (int k = 1; k <= CENTRED; k++) {
            sizes[k] += magnitude == k ? steps : 0;
            counts[k] += magnitude == k;
        }
    }
}

i64 API(quantize)(const float *values, i64 size, float step, float offset, i32 *codes, double *sizes, i64 *counts) {
    if (!is_size(size) || !(offset >= 0 && offset <= 1)) return BAD_SIZE;
    double all_sizes[CENTRED + 1] = {0};
    i64 all_counts[CENTRED + 1] = {0};
    for (i64 start = 0; start < size; start += QUANTIZE_BLOCK) {
        i64 width = min(size - start, QUANTIZE_BLOCK);
        u64 total = 0; /* 2^38 at most */
        u32 is_wrong = 0;
        for (i64 i = start; i < start + width; i++) {
            float steps = __builtin_fabsf(values[i] / step);
            is_wrong |= !(steps < MOST_MULTIPLE);
            i32 magnitude = (i32)((steps < MOST_MULTIPLE ? steps : 0) + offset);
            codes[i] = values[i] < 0 ? -magnitude : magnitude;
            total += (u32)magnitude;
        }
        if (is_wrong) return 0;
        all_counts[0] += (i64)total;
        if (total) add_centred(values + start, codes + start, width, step, all_sizes, all_counts);
    }
    memcpy(sizes, all_sizes, sizeof all_sizes);
    memcpy(counts, all_counts, sizeof all_counts);
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
