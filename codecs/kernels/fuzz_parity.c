/* Reed-Solomon codes, for fuzz.c. */

static void fuzz_parity(void) {
    i64 rows = 1 + random_below(one_in(8) ? 12 : 5), columns = 1 + random_below(one_in(8) ? 80 : 9);
    i64 size = random_below(one_in(8) ? 5000 : 200), gfni = ckpt_features() && one_in(2);
    i64 stride = size + (one_in(2) ? random_below(70) : 0), room = size ? (rows - 1) * stride + size : 0;
#ifndef __AVX2__
    gfni = one_in(2); /* without AVX2 it has no meaning */
#endif
    u8 *matrix = random_bytes(rows * columns), *inputs = random_bytes(columns * size), *sums = random_bytes(room);
    u8 *expected = exact_copy(sums, room);
    EXPECT(READ(add_products)(rows, columns, matrix, size, inputs, sums, stride, gfni) == 0);
    for (i64 turn = 0; turn < 8 && size; turn++) {
        i64 row = random_below(rows), at = random_below(size);
        u8 sum = expected[row * stride + at];
        for (i64 c = 0; c < columns; c++) sum ^= times(matrix[row * columns + c], inputs[c * size + at]);
        EXPECT(sums[row * stride + at] == sum);
    }
    /* What is added twice is gone. */
    EXPECT(READ(add_products)(rows, columns, matrix, size, inputs, sums, stride, 0) == 0);
    EXPECT(!memcmp(sums, expected, (size_t)room));
    EXPECT(READ(add_products)(rows, columns, matrix, size, inputs, sums, size - 1, 0) == BAD_SIZE);
    EXPECT(READ(add_products)(256, columns, matrix, size, inputs, sums, stride, 0) == BAD_SIZE);
    EXPECT(READ(add_products)(rows, 0, matrix, size, inputs, sums, stride, 0) == BAD_SIZE);
}
