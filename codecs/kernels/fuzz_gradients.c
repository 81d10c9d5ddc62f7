/* Hostile chunks of gradients: see fuzz.c. */

/* Mostly zeros, multiples of one factor, or any bits. */
static u32 *random_gradients(i64 count) {
    u32 *words = exact(4 * count);
    i64 kind = random_below(3), share = 1 + random_below(600);
    float factor = float_of_bits(ONE | (u32)random_below(1 << 23));
    for (i64 i = 0; i < count; i++) {
        words[i] = random_word(kind == 2 ? 0 : 3, i);
        if (kind == 0 && !one_in(share)) words[i] = 0;
        if (kind == 1) words[i] = bits_of_float(float_of_bits(words[i] & 0xFFFF0000) * factor);
    }
    return words;
}

static void fuzz_sparse(void) {
    i64 count = random_count(), shift = random_below(one_in(4) ? LARGEST_SHIFT + 1 : 8), size;
    u32 *words = random_gradients(count), *back = exact(4 * count);
    i64 filled = CALL(count_words)(words, count);
    i64 most = filled + count / LONG_GAP, lows_size = lows_bytes(filled, shift);
    u8 *gaps = exact(most), *lows = exact(lows_size);
    u32 *values = exact(4 * filled);
    i64 number = CALL(split_sparse)(words, count, shift, gaps, most, lows, lows_size, values, filled);
    EXPECT(number >= filled && number <= most);
    u8 *valid = exact_copy(gaps, number);
    EXPECT(READ(merge_sparse)(valid, number, shift, lows, lows_size, values, filled, back, count) == 0);
    EXPECT(count == 0 || memcmp(words, back, 4 * (size_t)count) == 0);
    for (i64 turn = 0; turn < 20; turn++) {
        u8 *bytes = mutate(valid, number, number, &size), *others = random_bytes(lows_size);
        u8 *used = one_in(2) ? lows : others;
        i64 failed = READ(merge_sparse)(bytes, size, shift, used, lows_size, values, filled, back, count);
        EXPECT(failed == 0 || failed == 1);
    }
}

static void fuzz_factor(void) {
    i64 count = random_count();
    u32 *words = random_gradients(count), *back = exact(4 * count);
    u16 *numbers = exact(2 * count);
    i64 factor = CALL(find_factor)(words, count);
    EXPECT(factor == 0 || (factor >= ONE && factor < ONE + LEAST_NORMAL));
    float by = float_of_bits(one_in(8) ? (u32)random64() : (u32)factor);
    if (CALL(divide_by_factor)(words, count, by, numbers)) {
        EXPECT(READ(multiply_by_factor)(numbers, count, by, back) == 0);
        EXPECT(count == 0 || memcmp(words, back, 4 * (size_t)count) == 0);
    }
    for (i64 i = 0; i < count; i++) numbers[i] = (u16)random64();
    EXPECT(READ(multiply_by_factor)(numbers, count, by, back) == 0);
}

static void fuzz_blocks(void) {
    i64 count = random_count(), blocks = (count + SCALED_WORDS - 1) / SCALED_WORDS;
    u32 *words = random_gradients(count), *back = exact(4 * count), *scales = exact(4 * blocks);
    u8 *codes = exact(count);
    i64 stored = CALL(quantise_blocks)(words, count, scales, blocks, codes);
    EXPECT(stored >= 0 && stored <= blocks);
    EXPECT(READ(restore_blocks)(codes, count, scales, blocks, back) == 0);
    for (i64 turn = 0; turn < 4; turn++) {
        u8 *hostile = random_bytes(count);
        if (blocks) scales[random_below(blocks)] = (u32)random64() & (one_in(2) ? 0xFFFFFF00 : 0xFFFFFFFF);
        i64 failed = READ(restore_blocks)(hostile, count, scales, blocks, back);
        EXPECT(failed == 0 || failed == 1);
    }
}

/* Codes of columns that differ. */
static u8 *random_codes(i64 count, i64 columns) {
    u8 *codes = exact(count);
    i64 most = 1 + random_below(127);
    for (i64 i = 0; i < count; i++) codes[i] = (u8)(random_below(1 + (i % columns & 3) * most / 3) - one_in(2));
    return codes;
}

static void fuzz_columns(void) {
    i64 count = 1 + random_count(), columns = 1 + random_below(one_in(2) ? min(count, 64) : min(count, 1 << 16)), room, size;
    i64 skipped = random_below(columns);
    u8 *codes = random_codes(count, columns), *back = exact(count);
    i64 directory = 36 + (columns + 1) / 2 + (count / columns + 3) / 2, out_size = directory + count;
    u8 *out = exact(out_size), *scratch = exact_scratch(CALL(columns_scratch)(count, columns), &room);
    i64 end = CALL(write_columns)(codes, count, columns, skipped, out, out_size, scratch, room);
    EXPECT(end >= 0 && end <= out_size);
    if (end) {
        u8 *valid = exact_copy(out, end);
        EXPECT(READ(read_columns)(valid, end, columns, skipped, back, count, scratch, room) == end);
        EXPECT(memcmp(codes, back, (size_t)count) == 0);
    }
    u8 *valid = exact_copy(out, end ? end : directory);
    for (i64 turn = 0; turn < 30; turn++) {
        u8 *bytes = mutate(valid, end ? end : directory, one_in(2) ? directory : directory + 160, &size);
        i64 others = one_in(4) ? 1 + random_below(min(count, 1 << 16)) : columns;
        i64 taken = READ(read_columns)(bytes, size, others, random_below(others), back, count, scratch, others == columns ? room : -1);
        EXPECT(taken >= 0 || others != columns);
        EXPECT(taken <= size);
    }
}

static void fuzz_gradients(void) {
    fuzz_columns();
    fuzz_sparse();
    fuzz_factor();
    fuzz_blocks();
}
