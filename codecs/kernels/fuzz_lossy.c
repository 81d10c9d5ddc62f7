/* The lossy family: symbols of hostile codes; multiples, residuals, levels and factors that such codes may hold, in the
 * passes that read them; and matrices and moments of any bits, which a hostile state before a delta has. */

enum { FUZZ_FINE = 4097 };

/* `count` words of any bits, of few bits, or of one value. */
static void *fuzz_words(i64 count) {
    u32 *words = exact(4 * count), one = (u32)random64();
    i64 way = random_below(4);
    for (i64 i = 0; i < count; i++) {
        u32 word = (u32)(random64() >> 16);
        words[i] = way == 0 ? word : way == 1 ? word & 0x807FFFFF : way == 2 ? one : word % 7;
    }
    return words;
}

/* Floats of ordinary sizes. */
static float *fuzz_floats(i64 count) {
    float *values = exact(4 * count);
    for (i64 i = 0; i < count; i++) values[i] = (float)(i64)(random64() >> 40) * 0x1p-24f - 0.5f;
    return values;
}

/* Levels of rows or columns, of any size that a kernel takes. */
static i32 *fuzz_levels(i64 count) {
    i32 *levels = exact(4 * count);
    i64 most = one_in(2) ? 2000 : (1 << 13) - 1;
    for (i64 i = 0; i < count; i++) levels[i] = (i32)(random_below(2 * most + 1) - most);
    return levels;
}

static i32 *fuzz_fine_levels(void) {
    i32 *levels = exact(4 * FUZZ_FINE);
    for (i64 i = 0; i < FUZZ_FINE; i++) levels[i] = (i32)(i * 2048); /* from 1 to 2 in a straight line */
    return levels;
}

static void fuzz_symbols(void) {
    i64 columns = 1 + random_below(one_in(8) ? 300 : 30), size = random_below(4 * columns + 2);
    i64 shift = one_in(2) ? 0 : random_below(25);
    i32 *symbols = exact(4 * size);
    i64 rarity = 1 + random_below(20), most = (i64)1 << random_below(32);
    for (i64 i = 0; i < size; i++)
        symbols[i] = one_in(rarity) ? (i32)(random_below(2 * most - 1) - (most - 1)) : 0;
    i64 room = size * 112 + 2048, whole;
    u16 *decisions = exact(2 * room);
    u8 *scratch = exact_scratch(CALL(symbols_scratch)(columns), &whole);
    i64 count = CALL(model_symbols)(symbols, size, columns, shift, decisions, room, scratch, whole);
    EXPECT(count >= 0);
    decisions = exact_copy(decisions, 2 * count);
    i64 length = 4 + 2 * count;
    u8 *out = exact(length);
    i64 begin = CALL(code_decisions)(decisions, count, out, length);
    EXPECT(begin >= 0 && begin <= length - 4);
    length -= begin;
    u8 *code = exact_copy(out + begin, length);
    i32 *decoded = exact(4 * size);
    EXPECT(READ(decode_symbols)(code, length, columns, shift, decoded, size, scratch, whole) == 1);
    EXPECT(memcmp(decoded, symbols, (size_t)size * 4) == 0);
    for (int i = 0; i < 20; i++) {
        i64 made;
        u8 *hostile = mutate(code, length, 12, &made);
        i64 other = one_in(4) ? random_below(size + 40) : size, wide = one_in(4) ? 1 + random_below(columns) : columns;
        i64 result = READ(decode_symbols)(hostile, made, wide, one_in(4) ? random_below(25) : shift, exact(4 * other),
                                          other, scratch, whole);
        EXPECT(result == 0 || result == 1);
    }
    EXPECT(CALL(model_symbols)(symbols, size, columns, 25, decisions, room, scratch, whole) == BAD_SIZE);
    /* Decisions that no model makes give other bytes, and nothing worse. */
    i64 others = random_below(300);
    CALL(code_decisions)((u16 *)fuzz_words(others / 2 + 1), others, exact(4 + 2 * others), 4 + 2 * others);
}

static void fuzz_matrices(void) {
    i64 n = random_below(40), m = random_below(40), k = random_below(40), whole;
    bool any = one_in(2);
    const float *a = any ? fuzz_words(n * m) : fuzz_floats(n * m);
    EXPECT(READ(multiply)(a, n, m, fuzz_floats(m * k), k, exact(4 * n * k)) == 0);
    EXPECT(READ(multiply_transposed)(a, n, m, fuzz_floats(n * k), k, exact(4 * m * k)) == 0);
    u8 *scratch = exact_scratch(CALL(subtract_product_scratch)(k), &whole);
    float *y = exact_copy(a, 4 * n * m);
    EXPECT(READ(subtract_product)(y, n, m, fuzz_floats(n * k), k, fuzz_words(k * m), scratch, whole) == 0);
    k = min(n, m);
    y = any ? fuzz_words(n * k) : fuzz_floats(n * k);
    scratch = exact_scratch(CALL(decompose_qr_scratch)(n, k), &whole);
    EXPECT(READ(decompose_qr)(y, n, k, exact(4 * n * k), exact(4 * k * k), scratch, whole) == 0);
}

static void fuzz_moments(void) {
    i64 n = random_below(12), m = random_below(40), size = n * m, whole;
    u32 *words = fuzz_words(size);
    double *sums = exact(16);
    EXPECT(READ(is_finite)(words, size) >= 0);
    EXPECT(READ(sum_rows_and_columns)((float *)words, n, m, exact(8 * n), exact(8 * m), exact(8)) == 0);
    EXPECT(READ(sum_levels)(words, n, m, exact(8 * n), exact(8 * m)) == 0);
    EXPECT(READ(encode_residuals)(words, n, m, fuzz_levels(n), fuzz_levels(m), 1 + random_below(255),
                                  fuzz_fine_levels(), FUZZ_FINE, exact(4 * size)) >= 0);
    const i32 *residuals = one_in(3) ? NULL : fuzz_words(size), *zeros = one_in(2) ? NULL : fuzz_words(size);
    EXPECT(READ(decode_levels)(fuzz_levels(n), fuzz_levels(m), n, m, random_below(256), residuals, zeros,
                               exact(4 * size)) == 0);
    const float *second = fuzz_words(size), *optional = one_in(2) ? second : NULL;
    EXPECT(READ(update_direction)((float *)words, second, n, m, fuzz_words(n), fuzz_floats(m), exact(4 * size)) >= 0);
    float factor = *(float *)fuzz_words(1);
    EXPECT(READ(derive_first_moment)(factor, (float *)words, second, optional, size, exact(4 * size)) == 0);
    u8 *scratch = exact_scratch(CALL(fit_first_moment_scratch)(m), &whole);
    EXPECT(READ(fit_first_moment)((float *)words, second, optional, fuzz_words(size), n, m, sums, scratch, whole) == 0);
}

static void fuzz_weights(void) {
    i64 n = random_below(12), m = random_below(40), size = n * m, whole;
    if (one_in(10)) n = 1, m = size = random_below(1000); /* more than one block */
    const float *values = one_in(2) ? fuzz_words(size) : fuzz_floats(size);
    const float *before = one_in(2) ? NULL : fuzz_words(size);
    u8 *scratch = exact_scratch(CALL(scale_change_scratch)(m), &whole);
    EXPECT(READ(scale_change)(values, before, n, m, fuzz_words(n), fuzz_words(m), exact(4 * size), exact(8), scratch,
                              whole) == 0);
    EXPECT(READ(unscale_change)(values, n, m, fuzz_words(n), fuzz_words(m), before, exact(4 * size)) == 0);
    float step = *(float *)fuzz_words(1);
    EXPECT(READ(quantize)(values, size, one_in(2) ? step : 0.1f, 0.4f, exact(4 * size), exact(32), exact(32)) >= 0);
    EXPECT(READ(dequantize)(fuzz_words(size), size, fuzz_words(4), step, exact(4 * size)) == 0);
}

static void fuzz_lossy(void) {
    fuzz_symbols();
    fuzz_matrices();
    fuzz_moments();
    fuzz_weights();
}
