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

static void fuzz_packed_words(void) {
    i64 rows = random_below(6), columns = random_below(one_in(8) ? 300 : 20), bits = 1 + random_below(8);
    i64 per_word = 1 + random_below(one_in(2) ? 8 : 32), down = random_below(2), size = rows * columns;
    u32 *words = exact(4 * size);
    for (i64 i = 0; i < size; i++) words[i] = (u32)random64();
    u8 *shifts = random_bytes(per_word), *out = exact(size * per_word);
    for (i64 k = 0; k < per_word; k++) shifts[k] = (u8)(shifts[k] % (33 - bits));
    EXPECT(READ(unpack_words)(words, rows, columns, bits, shifts, per_word, down, out) == 0);
    if (size) {
        i64 row = random_below(rows), column = random_below(columns), k = random_below(per_word);
        i64 at = down ? (row * per_word + k) * columns + column : (row * columns + column) * per_word + k;
        EXPECT(out[at] == (words[row * columns + column] >> shifts[k] & ((1u << bits) - 1)));
    }
    shifts[random_below(per_word)] = (u8)(33 - bits);
    EXPECT(READ(unpack_words)(words, rows, columns, bits, shifts, per_word, down, out) == BAD_SIZE);
}

static void fuzz_scaled_columns(void) {
    i64 rows = random_below(one_in(8) ? 300 : 12), columns = random_below(one_in(8) ? 300 : 40), count = 1 + random_below(5);
    float *zeros = random_floats(count * columns), *scales = random_floats(count * columns), *out = exact(4 * rows * columns);
    u8 *codes = random_bytes(rows * columns);
    i32 *groups = exact(4 * rows);
    for (i64 row = 0; row < rows; row++) groups[row] = (i32)random_below(count);
    EXPECT(READ(scale_columns)(codes, rows, columns, groups, zeros, scales, count * columns, out) == 0);
    if (rows * columns == 0) return;
    for (i64 turn = 0; turn < 4; turn++) {
        i64 row = random_below(rows), column = random_below(columns), at = groups[row] * columns + column;
        float difference = (float)codes[row * columns + column] - zeros[at], value = difference * scales[at];
        EXPECT(bits_of_float(canonical_nan(out[column * rows + row])) == bits_of_float(canonical_nan(value)));
    }
    groups[random_below(rows)] = one_in(2) ? -1 : (i32)(count + random_below(1 << 30));
    EXPECT(READ(scale_columns)(codes, rows, columns, groups, zeros, scales, count * columns, out) == 1);
}

static void fuzz_mxfp4(void) {
    static const float sizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    i64 count = random_below(8);
    float *values = random_floats(32 * count);
    u8 *codes = exact(16 * count), *scales = exact(count);
    EXPECT(READ(encode_mxfp4)(values, count, codes, scales) == 0);
    for (i64 i = 0; i < 32 * count; i++) { /* no other code is nearer */
        float value = values[i], power = float_of_bits((u32)(254 - scales[i / 32]) << 23), size = __builtin_fabsf(value) * power;
        if (!(size <= 6)) continue;
        u8 code = codes[i / 2] >> (i % 2 * 4) & 15;
        float distance = __builtin_fabsf(size - sizes[code & 7]);
        for (i64 k = 0; k < 8; k++) EXPECT(distance <= __builtin_fabsf(size - sizes[k]));
        EXPECT(code >> 3 == bits_of_float(value) >> 31);
    }
    EXPECT(READ(encode_mxfp4)(values, -1, codes, scales) == BAD_SIZE);
}

static void fuzz_quantised(void) {
    fuzz_scaled_codes();
    fuzz_scaled_nibbles();
    fuzz_scaled_integers();
    fuzz_packed_words();
    fuzz_scaled_columns();
    fuzz_mxfp4();
}
