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
