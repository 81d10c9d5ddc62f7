/* Figures of values, for fuzz.c. */

static void fuzz_word_counts(void) {
    i64 width = 1 + random_below(2), size = random_below(one_in(8) ? 9000 : 60), elements = width == 1 ? 256 : 65536;
    u8 *words = random_bytes(width * size);
    u32 *counts = exact(4 * elements);
    memset(counts, 0, (size_t)(4 * elements));
    EXPECT(READ(count_values)(width, words, size, counts) == 0);
    i64 total = 0;
    for (i64 i = 0; i < elements; i++) total += counts[i];
    EXPECT(total == size);
    for (i64 turn = 0; turn < 4 && size; turn++) {
        i64 at = random_below(size), same = 0;
        u32 word = width == 1 ? words[at] : load16(words + 2 * at);
        for (i64 i = 0; i < size; i++) same += (width == 1 ? words[i] : load16(words + 2 * i)) == word;
        EXPECT(counts[word] == same);
    }
    EXPECT(READ(count_values)(width + 2, words, size, counts) == BAD_SIZE);
}

static void fuzz_float_figures(void) {
    i64 width = one_in(2) ? 4 : 8, size = random_below(one_in(8) ? 9000 : 60), index = random_below(100);
    u8 *words = random_bytes(width * size);
    double *sums[2], *extremes[2];
    i64 *counts[2], *exponents[2];
    for (int i = 0; i < 2; i++) {
        sums[i] = exact(16 * SUM_PARTS), extremes[i] = exact(16), counts[i] = exact(24), exponents[i] = exact(8 * EXPONENT_COUNT);
        memset(sums[i], 0, 16 * SUM_PARTS), memset(counts[i], 0, 24), memset(exponents[i], 0, 8 * EXPONENT_COUNT);
        extremes[i][0] = double_of_bits((u64)0x7FF << 52), extremes[i][1] = -extremes[i][0];
    }
    EXPECT(READ(measure_floats)(width, words, size, index, sums[0], extremes[0], counts[0], exponents[0]) == 0);
    i64 total = counts[0][0] + counts[0][1] + counts[0][2];
    for (int i = 0; i < EXPONENT_COUNT; i++) total += exponents[0][i];
    EXPECT(total == size);
    EXPECT(extremes[0][0] <= extremes[0][1] || counts[0][0] + counts[0][1] == size);
    i64 cut = random_below(size + 1); /* in two calls, all figures have the same bits */
    EXPECT(READ(measure_floats)(width, words, cut, index, sums[1], extremes[1], counts[1], exponents[1]) == 0);
    EXPECT(READ(measure_floats)(width, words + width * cut, size - cut, index + cut, sums[1], extremes[1], counts[1],
                                exponents[1]) == 0);
    EXPECT(!memcmp(sums[0], sums[1], 16 * SUM_PARTS) && !memcmp(extremes[0], extremes[1], 16));
    EXPECT(!memcmp(counts[0], counts[1], 24) && !memcmp(exponents[0], exponents[1], 8 * EXPONENT_COUNT));
    EXPECT(READ(measure_floats)(width, words, size, -1, sums[1], extremes[1], counts[1], exponents[1]) == BAD_SIZE);
}

static void fuzz_stats(void) {
    fuzz_word_counts();
    fuzz_float_figures();
}
