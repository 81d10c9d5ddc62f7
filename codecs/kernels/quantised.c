/* Codes of quantised weights times their scales.
 *
 * Why it is safe: a code indexes a table that has an element for each, and every loop is one over elements that the
 * arguments count; the blocks that a matrix touches are compared with the scales before it begins. */
#include "quantised.h"

/* Blocks of `block` elements that `count` elements touch, of which the first block lacks `skipped`. */
INLINE i64 blocks_of(i64 skipped, i64 count, i64 block) { return count ? (skipped + count + block - 1) / block : 0; }

i64 API(scale_codes)(const u8 *codes, i64 rows, i64 columns, const float *table, const float *scales, i64 scales_size,
                     i64 skipped_rows, i64 row_block, i64 skipped_columns, i64 column_block, float *out) {
    if (!is_size(rows) || !is_size(columns) || !is_size(rows * columns) || !is_size(scales_size)) return BAD_SIZE;
    if (!is_size(row_block) || !is_size(column_block) || skipped_rows < 0 || skipped_rows >= row_block) return BAD_SIZE;
    if (skipped_columns < 0 || skipped_columns >= column_block) return BAD_SIZE;
    i64 across = blocks_of(skipped_columns, columns, column_block);
    if (blocks_of(skipped_rows, rows, row_block) * across != scales_size) return BAD_SIZE;
    for (i64 row = 0; row < rows; row++) {
        const float *own = scales + (skipped_rows + row) / row_block * across;
        i64 start = 0, stop = column_block - skipped_columns;
        for (; start < columns; start = stop, stop += column_block, own++) {
            float scale = *own;
            for (i64 i = start, end = min(stop, columns); i < end; i++) out[i] = table[codes[i]] * scale;
        }
        codes += columns, out += columns;
    }
    return 0;
}

i64 API(scale_nibbles)(const u8 *packed, i64 size, i64 high_first, const float *table, const float *scales,
                       i64 scales_size, i64 block, float *out) {
    if (!is_size(size) || !is_size(2 * size) || !is_size(scales_size)) return BAD_SIZE;
    if (high_first < 0 || high_first > 1 || !is_size(block) || block < 2 || block % 2) return BAD_SIZE;
    if (blocks_of(0, 2 * size, block) != scales_size) return BAD_SIZE;
    float first[256], second[256]; /* of each byte */
    for (int byte = 0; byte < 256; byte++) {
        first[byte] = table[high_first ? byte >> 4 : byte & 15];
        second[byte] = table[high_first ? byte & 15 : byte >> 4];
    }
    for (i64 start = 0, bytes = block / 2; start < size; start += bytes) {
        float scale = *scales++;
        for (i64 i = start, end = min(start + bytes, size); i < end; i++) {
            out[2 * i] = first[packed[i]] * scale;
            out[2 * i + 1] = second[packed[i]] * scale;
        }
    }
    return 0;
}

i64 API(scale_integers)(const u8 *bytes, i64 size, i64 stride, i64 offset, i64 block, const float *scales, i64 count,
                        float *out) {
    if (!is_size(size) || !is_size(stride) || !is_size(block) || !is_size(count) || !is_size(count * block)) return BAD_SIZE;
    if (offset < 0 || offset > stride - block || count * stride != size) return BAD_SIZE;
    for (i64 number = 0; number < count; number++, bytes += stride, out += block) {
        const i8 *own = (const i8 *)bytes + offset;
        float scale = scales[number];
        for (i64 i = 0; i < block; i++) out[i] = (float)own[i] * scale;
    }
    return 0;
}

i64 API(unpack_words)(const u32 *restrict words, i64 rows, i64 columns, i64 bits, const u8 *restrict shifts, i64 per_word,
                      i64 down, u8 *restrict out) {
    if (!is_size(rows) || !is_size(columns) || !is_size(rows * columns) || bits < 1 || bits > 8) return BAD_SIZE;
    if (per_word < 1 || per_word > 32 || !is_size(rows * columns * per_word) || down < 0 || down > 1) return BAD_SIZE;
    u32 mask = (1u << bits) - 1, starts[32] = {0};
    for (i64 k = 0; k < per_word; k++) {
        if (shifts[k] > 32 - bits) return BAD_SIZE;
        starts[k] = shifts[k];
    }
    if (!down) {
        i64 size = rows * columns;
        if (per_word == 8) { /* the usual one, with a length that the compiler knows */
            for (i64 i = 0; i < size; i++)
                for (i64 k = 0; k < 8; k++) out[8 * i + k] = (u8)(words[i] >> starts[k] & mask);
            return 0;
        }
        for (i64 i = 0; i < size; i++)
            for (i64 k = 0; k < per_word; k++) out[i * per_word + k] = (u8)(words[i] >> starts[k] & mask);
        return 0;
    }
    for (i64 row = 0; row < rows; row++, words += columns)
        for (i64 k = 0; k < per_word; k++, out += columns)
            for (i64 column = 0; column < columns; column++) out[column] = (u8)(words[column] >> starts[k] & mask);
    return 0;
}

/* Rows and columns that are computed at once, and then written in columns: several lines of the cache of each. */
#define TILE_ROWS 64
#define TILE_COLUMNS 16

typedef float Four __attribute__((vector_size(16)));
INLINE Four load_four(const float *at) { Four four; memcpy(&four, at, sizeof four); return four; }
INLINE void store_four(float *at, Four four) { memcpy(at, &four, sizeof four); }

/* Write the columns of 4 x 4 numbers, of rows that are `in_stride` apart, as rows that are `out_stride` apart. */
INLINE void transpose_four(const float *in, i64 in_stride, float *out, i64 out_stride) {
    Four a = load_four(in), b = load_four(in + in_stride), c = load_four(in + 2 * in_stride), d = load_four(in + 3 * in_stride);
    Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    Four ef = __builtin_shufflevector(a, b, 2, 6, 3, 7), gh = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    store_four(out, __builtin_shufflevector(ab, cd, 0, 1, 4, 5));
    store_four(out + out_stride, __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
    store_four(out + 2 * out_stride, __builtin_shufflevector(ef, gh, 0, 1, 4, 5));
    store_four(out + 3 * out_stride, __builtin_shufflevector(ef, gh, 2, 3, 6, 7));
}

i64 API(scale_columns)(const u8 *restrict codes, i64 rows, i64 columns, const i32 *restrict groups,
                       const float *restrict zeros, const float *restrict scales, i64 scales_size, float *restrict out) {
    if (!is_size(rows) || !is_size(columns) || !is_size(rows * columns) || !is_size(scales_size)) return BAD_SIZE;
    if (columns ? scales_size % columns : scales_size) return BAD_SIZE;
    i64 count = columns ? scales_size / columns : 0;
    for (i64 row = 0; row < rows; row++)
        if (columns && (groups[row] < 0 || groups[row] >= count)) return 1;
    float products[TILE_ROWS][TILE_COLUMNS];
    for (i64 left = 0; left < columns; left += TILE_COLUMNS) {
        i64 width = min(TILE_COLUMNS, columns - left);
        for (i64 top = 0; top < rows; top += TILE_ROWS) {
            i64 height = min(TILE_ROWS, rows - top);
            for (i64 row = 0; row < height; row++) {
                const u8 *own = codes + (top + row) * columns + left;
                const float *zero = zeros + groups[top + row] * columns + left, *scale = scales + (zero - zeros);
                if (width == TILE_COLUMNS)
                    for (i64 i = 0; i < TILE_COLUMNS; i++) products[row][i] = ((float)own[i] - zero[i]) * scale[i];
                else
                    for (i64 i = 0; i < width; i++) products[row][i] = ((float)own[i] - zero[i]) * scale[i];
            }
            float *target = out + left * rows + top;
            if (width == TILE_COLUMNS && height == TILE_ROWS) {
                for (i64 i = 0; i < TILE_COLUMNS; i += 4)
                    for (i64 row = 0; row < TILE_ROWS; row += 4)
                        transpose_four(&products[row][i], TILE_COLUMNS, target + i * rows + row, rows);
            } else
                for (i64 i = 0; i < width; i++)
                    for (i64 row = 0; row < height; row++) target[i * rows + row] = products[row][i];
        }
    }
    return 0;
}

#define MX_GROUP 32

i64 API(encode_mxfp4)(const float *restrict values, i64 count, u8 *restrict codes, u8 *restrict scales) {
    if (!is_size(count) || !is_size(MX_GROUP * count)) return BAD_SIZE;
    for (i64 group = 0; group < count; group++, values += MX_GROUP, codes += MX_GROUP / 2) {
        u32 largest = 0;
        for (i64 i = 0; i < MX_GROUP; i++) largest = max(largest, bits_of_float(values[i]) & 0x7FFFFFFF);
        i32 exponent = max((i32)(largest >> 23) - 127 - 2, -127);
        float power = float_of_bits((u32)(127 - exponent) << 23);
        u8 own[MX_GROUP];
        for (i64 i = 0; i < MX_GROUP; i++) {
            float scaled = values[i] * power, absolute = __builtin_fabsf(scaled), size = absolute < 6 ? absolute : 6;
            u32 word = bits_of_float(size);
            /* A code is an exponent and one bit of mantissa; below 1, a multiple of 0.5, the last bit of 2^22. */
            i32 normal = (i32)((word + 0x1FFFFF + (word >> 22 & 1)) >> 22) - 252;
            i32 small = (i32)(bits_of_float(size + 0x1p22f) - bits_of_float(0x1p22f));
            own[i] = (u8)((bits_of_float(scaled) >> 28 & 8) | (u32)max(normal, min(small, 2)));
        }
        for (i64 i = 0; i < MX_GROUP / 2; i++) codes[i] = (u8)(own[2 * i] | own[2 * i + 1] << 4);
        scales[group] = (u8)(exponent + 127);
    }
    return 0;
}
