/* The values of quantised weights, for fuzz.c. */

static float *random_floats(i64 count) {
    float *values = exact(4 * count);
    for (i64 i = 0; i < count; i++) values[i] = float_of_bits((u32)random64());
    return values;
}

static void fuzz_scaled_codes(void) {
    i64 rows = random_below(one_in(8) ? 300 : 12), columns = random_below(one_in(8) ? 700 : 40);
    i64 row_block = 1 + random_below(one_in(2) ? 140 : 5), column_block = 1 + random_below(one_in(2) ? 140 : 9);
    i64 skipped_rows = random_below(row_block), skipped_columns = random_below(column_block);
    i64 down = rows ? (skipped_rows + rows + row_block - 1) / row_block : 0;
    i64 across = columns ? (skipped_columns + columns + column_block - 1) / column_block : 0;
    float *table = random_floats(256), *scales = random_floats(down * across), *out = exact(4 * rows * columns);
    u8 *codes = random_bytes(rows * columns);
    EXPECT(READ(scale_codes)(codes, rows, columns, table, scales, down * across, skipped_rows, row_block, skipped_columns,
                             column_block, out) == 0);
    for (i64 turn = 0; turn < 4 && rows * columns > 0; turn++) {
        i64 row = random_below(rows), column = random_below(columns), at = row * columns + column;
        float scale = scales[(skipped_rows + row) / row_block * across + (skipped_columns + column) / column_block];
        float value = table[codes[at]] * scale;
        EXPECT(bits_of_float(canonical_nan(out[at])) == bits_of_float(canonical_nan(value)));
    }
    EXPECT(READ(scale_codes)(codes, rows, columns, table, scales, down * across + 1, skipped_rows, row_block,
                             skipped_columns, column_block, out) == BAD_SIZE);
}

static void fuzz_scaled_nibbles(void) {
    i64 size = random_below(one_in(8) ? 3000 : 60), block = 2 + 2 * random_below(40);
    i64 blocks = (2 * size + block - 1) / block, high_first = random_below(2);
    float *table = random_floats(16), *scales = random_floats(blocks), *out = exact(8 * size);
    u8 *packed = random_bytes(size);
    EXPECT(READ(scale_nibbles)(packed, size, high_first, table, scales, blocks, block, out) == 0);
    if (size) {
        i64 at = random_below(2 * size);
        float value = table[packed[at / 2] >> (at % 2 == high_first ? 0 : 4) & 15] * scales[at / block];
        EXPECT(bits_of_float(canonical_nan(out[at])) == bits_of_float(canonical_nan(value)));
    }
    EXPECT(READ(scale_nibbles)(packed, size, high_first, table, scales, blocks + 1, block, out) == BAD_SIZE);
}

static void fuzz_scaled_integers(void) {
    i64 count = random_below(one_in(8) ? 300 : 10), block = random_below(40), offset = random_below(5);
    i64 stride = offset + block + random_below(3), size = count * stride;
    float *scales = random_floats(count), *out = exact(4 * count * block);
    u8 *bytes = random_bytes(size);
    EXPECT(READ(scale_integers)(bytes, size, stride, offset, block, scales, count, out) == 0);
    if (count * block > 0) {
        i64 at = random_below(count * block);
        float value = (float)(i8)bytes[at / block * stride + offset + at % block] * scales[at / block];
        EXPECT(bits_of_float(canonical_nan(out[at])) == bits_of_float(canonical_nan(value)));
    }
    EXPECT(READ(scale_integers)(bytes, size + 1, stride, offset, block, scales, count, out) == BAD_SIZE);
}

static void fuzz_quantised(void) {
    fuzz_scaled_codes();
    fuzz_scaled_nibbles();
    fuzz_scaled_integers();
}
