/* The deltas family: every reader of bytes is given what a valid stream becomes when it is damaged, and bytes that are
 * random altogether; the other kernels that meet values of a file are given words of any bits. */

/* Words of 16-bit floats before and after a step, and the bucket of each. */
typedef struct {
    i64 n, buckets;
    int mantissa, least;
    u16 *predicted, *actual;
    u8 *which;
} FuzzHalves;

static FuzzHalves fuzz_halves(void) {
    FuzzHalves h = {.n = one_in(20) ? random_below(3) : random_below(one_in(10) ? 5000 : 700), .buckets = 1 + random_below(16)};
    h.predicted = exact(2 * h.n), h.actual = exact(2 * h.n), h.which = exact(h.n);
    i64 rarity = 1 + random_below(one_in(2) ? 3 : 60), octaves = 1 + random_below(16);
    h.mantissa = one_in(2) ? 7 : 10, h.least = (int)random_below(one_in(4) ? 256 : 4);
    for (i64 i = 0; i < h.n; i++) {
        h.predicted[i] = (u16)random64();
        u16 step = one_in(rarity) ? (u16)(random64() & ((1u << (1 + random_below(octaves))) - 1)) : 0;
        h.actual[i] = (u16)(one_in(2) ? h.predicted[i] + step : h.predicted[i] - step);
    }
    EXPECT(READ(exponent_buckets)(h.predicted, h.n, h.mantissa, h.least, (int)h.buckets, h.which) == 0);
    return h;
}

static void fuzz_rows(void) {
    i64 size = random_below(600), columns = 1 + random_below(120), room = 2 * size + 9;
    u8 *rows = exact(size), *out = exact(room), *decoded = exact(size);
    i64 values = 1 + random_below(one_in(3) ? 255 : 6);
    for (i64 i = 0; i < size; i++) rows[i] = (u8)random_below(values);
    i64 length = CALL(write_rows)(rows, size, columns, out, room);
    EXPECT(length >= 0 && length <= room);
    i64 short_room = random_below(length + 1); /* the writer counts what does not fit, and writes no further */
    EXPECT(CALL(write_rows)(rows, size, columns, exact(short_room), short_room) == length);
    EXPECT(READ(read_rows)(exact_copy(out, length), length, columns, decoded, size) == 1);
    EXPECT(!size || memcmp(rows, decoded, (size_t)size) == 0);
    for (int i = 0; i < 12; i++) {
        i64 damaged;
        u8 *data = mutate(out, length, 8, &damaged);
        EXPECT(READ(read_rows)(data, damaged, columns, decoded, size) >= 0);
    }
}

static void fuzz_sparse_steps(void) {
    FuzzHalves h = fuzz_halves();
    i64 n = h.n, buckets = h.buckets, counts[256], room = 12 * n + 64;
    CALL(count_contexts)(h.which, n, counts);
    u8 *bucket_of = exact(n), *shifts = exact(buckets), *out = exact(room);
    u16 *steps = exact(2 * n), *decoded = exact(2 * n);
    i64 *gaps = exact(8 * n), *sizes = exact(8 * buckets), *first_gaps = exact(8 * buckets);
    i64 count = CALL(count_changed)(h.predicted, h.actual, n);
    EXPECT(CALL(find_steps)(h.predicted, h.actual, n, h.mantissa, h.least, buckets, bucket_of, gaps, steps, count, sizes,
                            first_gaps) == count);
    EXPECT(memcmp(sizes, counts, (size_t)buckets * 8) == 0);
    i64 most = one_in(3) ? 25 : 8;
    for (i64 c = 0; c < buckets; c++) shifts[c] = (u8)random_below(most);
    i64 length = CALL(write_sparse_steps)(bucket_of, gaps, steps, count, sizes, first_gaps, shifts, buckets, out, room);
    EXPECT(length >= 0);
    if (length > room) return; /* a bit for each value, where shifts are 0 */
    u8 *whole = exact_copy(out, length);
    EXPECT(READ(read_sparse_steps)(whole, length, h.predicted, n, h.mantissa, h.least, buckets, decoded) == 1);
    EXPECT(!n || memcmp(decoded, h.actual, (size_t)n * 2) == 0);
    for (int i = 0; i < 16; i++) {
        i64 damaged;
        u8 *data = mutate(out, length, 12, &damaged);
        EXPECT(READ(read_sparse_steps)(data, damaged, h.predicted, n, h.mantissa, h.least, buckets, decoded) >= 0);
    }
}

static void fuzz_masked_steps(void) {
    static u8 *tables; /* of exact size, for all rounds: to fill them takes longer than a round */
    i64 tables_size = CALL(fill_masked_tables)(NULL, 0), whole;
    if (!tables) {
        EXPECT(posix_memalign((void **)&tables, 64, (size_t)tables_size) == 0);
        EXPECT(CALL(fill_masked_tables)(tables, tables_size) == tables_size);
    }
    FuzzHalves h = fuzz_halves();
    i64 n = h.n, room = 2 * n + 1024, *places = exact(8 * n);
    i64 few = one_in(3) ? 1 : 1 + random_below(20);
    for (i64 i = 0; i < n; i++) h.actual[i] = one_in(few) ? h.actual[i] : h.predicted[i];
    if (one_in(2)) /* exponents as weights have them */
        for (i64 i = 0; i < n; i++) {
            u16 step = (u16)(h.actual[i] - h.predicted[i]);
            h.predicted[i] = (u16)((h.predicted[i] & 0x80FF) | (u16)(48 + random_below(16)) << 8);
            h.actual[i] = (u16)(h.predicted[i] + step);
        }
    u8 *out = exact(room), *scratch = exact_scratch(CALL(write_masked_steps_scratch)(n), &whole);
    u16 *decoded = exact(2 * n), *words = exact(2 * n);
    i64 length = CALL(write_masked_steps)(h.predicted, h.actual, n, h.mantissa, tables, tables_size, out, room, scratch, whole);
    EXPECT(length >= 0);
    i64 changed = CALL(count_changed)(h.predicted, h.actual, n);
    EXPECT(length ? length <= room || changed > n / 8 + 64 : !changed);
    scratch = exact_scratch(CALL(read_masked_steps_scratch)(n), &whole);
    if (!length || length > room) length = random_below(60), memcpy(out, random_bytes(length), (size_t)length);
    else {
        u8 *data = exact_copy(out, length);
        EXPECT(READ(read_masked_steps)(data, length, h.predicted, n, h.mantissa, tables, tables_size, decoded, scratch, whole) == 1);
        EXPECT(memcmp(decoded, h.actual, (size_t)n * 2) == 0);
        EXPECT(READ(list_masked_steps)(data, length, h.predicted, n, h.mantissa, tables, tables_size, places, words, n, scratch,
                                       whole) == changed);
        for (i64 k = 0; k < changed; k++)
            EXPECT(h.predicted[places[k]] != words[k] && h.actual[places[k]] == words[k] && (!k || places[k - 1] < places[k]));
    }
    for (int i = 0; i < 16; i++) {
        i64 damaged;
        u8 *data = mutate(out, length, 30, &damaged);
        bool in_place = one_in(2);
        memcpy(decoded, h.predicted, (size_t)n * 2);
        i64 accepted = READ(read_masked_steps)(data, damaged, in_place ? decoded : h.predicted, n, h.mantissa, tables,
                                               tables_size, decoded, scratch, whole);
        i64 listed = READ(list_masked_steps)(data, damaged, h.predicted, n, h.mantissa, tables, tables_size, places, words, n,
                                             scratch, whole);
        EXPECT(accepted ? listed > 0 : !listed);
        for (i64 k = 0; k < listed; k++) EXPECT(decoded[places[k]] == words[k]);
    }
}

/* Weights that add up to 4096: as an encoder chooses them, or as a file may hold them. */
static u32 *fuzz_step_weights(const u32 *counts, i64 buckets) {
    u32 *weights = exact(buckets * STEP_SYMBOLS * 4);
    for (i64 c = 0; c < buckets; c++) {
        const u32 *row = counts + c * STEP_SYMBOLS;
        u32 *to = weights + c * STEP_SYMBOLS, left = WEIGHT_SUM, most = 0;
        u64 sum = 1;
        for (int y = 0; y < STEP_SYMBOLS; y++) sum += row[y];
        for (u32 y = 0; y < STEP_SYMBOLS; y++) {
            to[y] = row[y] ? 1 + (u32)((u64)row[y] * 3900 / sum) : 0;
            left -= to[y];
            most = row[y] > row[most] ? y : most;
        }
        to[most] += left;
    }
    return weights;
}

static void fuzz_ans_steps(void) {
    FuzzHalves h = fuzz_halves();
    i64 n = h.n, buckets = h.buckets, bits_size = 2 * n + 16, whole;
    u16 *symbols = exact(2 * n), *words = exact(2 * (n + 1)), *decoded = exact(2 * n);
    u32 *counts = exact(buckets * STEP_SYMBOLS * 4), *states = exact(64);
    u8 *bits = exact(bits_size), *scratch = exact_scratch(CALL(count_step_symbols_scratch)(), &whole);
    i64 used = CALL(count_step_symbols)(h.predicted, h.actual, h.which, n, symbols, counts, buckets, bits, bits_size,
                                        scratch, whole);
    EXPECT(used >= 0 && used <= 14 * n);
    u32 *weights = fuzz_step_weights(counts, buckets);
    scratch = exact_scratch(CALL(write_ans_steps_scratch)(), &whole);
    i64 begin = CALL(write_ans_steps)(symbols, n, weights, buckets, states, words, n + 1, scratch, whole);
    EXPECT(begin >= 0 && begin <= n + 1);
    i64 word_count = n + 1 - begin, size = (used + 7) / 8 + 8;
    memset(bits + (used + 7) / 8, 0, 8);
    bits = exact_copy(bits, size), words = exact_copy(words + begin, 2 * word_count);
    scratch = exact_scratch(CALL(read_ans_steps_scratch)(n), &whole);
    EXPECT(READ(read_ans_steps)(h.predicted, h.which, n, weights, buckets, states, words, word_count, bits, size,
                                decoded, scratch, whole) == 1);
    EXPECT(!n || memcmp(decoded, h.actual, (size_t)n * 2) == 0);
    for (int i = 0; i < 16; i++) {
        i64 damaged = size, damaged_words = 2 * word_count, state_bytes = 64;
        u8 *data = one_in(2) ? mutate(bits, size, 8, &damaged) : bits;
        u8 *given_words = one_in(2) ? mutate((u8 *)words, 2 * word_count, 8, &damaged_words) : (u8 *)words;
        u8 *given_states = one_in(2) ? mutate((u8 *)states, 64, 64, &state_bytes) : (u8 *)states;
        u32 *aligned_states = exact(64);
        memcpy(aligned_states, given_states, (size_t)min(state_bytes, 64));
        damaged_words &= ~(i64)1;
        u16 *aligned_words = exact_copy(given_words, damaged_words);
        EXPECT(READ(read_ans_steps)(h.predicted, h.which, n, weights, buckets, aligned_states, aligned_words,
                                    damaged_words / 2, data, damaged, decoded, scratch, whole) >= 0);
    }
}

/* Words of float32. */
static u32 *fuzz_float_words(i64 n) {
    u32 *words = exact(4 * n);
    u32 fixed = one_in(3) ? 0 : 0x7C000000; /* of any size, or of a few octaves */
    for (i64 i = 0; i < n; i++) words[i] = ((u32)random64() & ~fixed) | (fixed & 0x38000000);
    return words;
}

static void fuzz_grid(void) {
    i64 n = one_in(20) ? random_below(3) : random_below(2500), bits_size = 4 * n + 8, *depth_count = exact(8);
    u32 *predicted = fuzz_float_words(n), *actual = fuzz_float_words(n), *decoded = exact(4 * n);
    u8 *units = exact(n), *symbols = exact(n), *depths = exact(n), *bits = exact(bits_size);
    if (one_in(2))
        for (i64 i = 0; i < n; i++) actual[i] = predicted[i] + (u32)random_below(1 << 20) - (1 << 19);
    if (one_in(3)) memset(units, (int)random_below(256), (size_t)n);
    else EXPECT(READ(root_units)(fuzz_float_words(n), n, (int)random_below(60) - 30, units) == 0);
    i64 used = CALL(to_grid)(predicted, actual, units, n, symbols, depths, depth_count, bits, bits_size);
    EXPECT(used >= 0 && used <= 32 * n && *depth_count <= n);
    i64 size = (used + 7) / 8 + 8;
    u8 *padded = exact(size);
    memcpy(padded, bits, (size_t)(size - 8)), memset(padded + size - 8, 0, 8);
    u8 *exact_depths = exact_copy(depths, *depth_count);
    i64 accepted = READ(from_grid)(predicted, units, symbols, n, exact_depths, *depth_count, padded, size, decoded);
    /* ckpt itself has units from 1 to 254 alone */
    bool usual = true;
    for (i64 i = 0; i < n; i++) usual &= units[i] >= 1 && units[i] <= 254;
    EXPECT(!usual || (accepted == 1 && (!n || memcmp(decoded, actual, (size_t)n * 4) == 0)));
    for (int i = 0; i < 12; i++) {
        i64 damaged = size, deep = *depth_count, other = n;
        u8 *data = one_in(2) ? mutate(padded, size, 8, &damaged) : padded;
        u8 *given_depths = one_in(2) ? mutate(depths, *depth_count, 8, &deep) : exact_depths;
        u8 *given = one_in(2) ? mutate(symbols, n, n, &other) : symbols;
        u8 *exact_symbols = exact(n);
        memcpy(exact_symbols, given, (size_t)min(n, other));
        EXPECT(READ(from_grid)(predicted, units, exact_symbols, n, given_depths, deep, data, damaged, decoded) >= 0);
    }
}

static void fuzz_zigzags(void) {
    i64 n = random_below(300);
    int width = 1 << random_below(4), count = 1 + (int)random_below(width);
    u8 *before = exact(n * width), *after = exact(n * width), *back = exact(n * width), *planes[8] = {0};
    for (i64 i = 0; i < n * width; i++) before[i] = (u8)random64(), after[i] = (u8)random64();
    for (int k = 0; k < count; k++) planes[k] = exact(n);
    i64 bits = CALL(zigzag_bits)(width, before, after, n);
    EXPECT(bits >= 0 && bits <= 8 * width);
    EXPECT(CALL(split_zigzags)(width, before, after, n, planes, count) == 0);
    EXPECT(READ(merge_zigzags)(width, before, (const u8 *const *)planes, count, back, n) == 0);
    EXPECT(bits > 8 * count || !n || memcmp(after, back, (size_t)(n * width)) == 0);
    for (int k = 0; k < count; k++)
        for (i64 i = 0; i < n; i++) planes[k][i] = (u8)random64();
    EXPECT(READ(merge_zigzags)(width, before, (const u8 *const *)planes, count, back, n) == 0);
}

static void fuzz_contexts(void) {
    i64 n = random_below(500), columns = 1 + random_below(30), rows = random_below(20), counts[256];
    u8 *contexts = exact(n), *plane = exact(n), *gathered = exact(n), *back = exact(n);
    i64 values = 1 + random_below(256);
    for (i64 i = 0; i < n; i++) contexts[i] = (u8)random_below(values), plane[i] = (u8)random64();
    EXPECT(READ(count_contexts)(contexts, n, counts) == 0);
    EXPECT(READ(gather)(contexts, plane, n, gathered) == 0 && READ(scatter)(contexts, gathered, n, back) == 0);
    EXPECT(!n || memcmp(plane, back, (size_t)n) == 0);
    EXPECT(READ(growth_contexts)(fuzz_float_words(n), fuzz_float_words(n), n, (int)random_below(256) - 128, 8, contexts)
           == 0);
    u8 *drift = exact(rows + columns);
    for (i64 i = 0; i < rows + columns; i++) drift[i] = (u8)random64();
    const i8 *by_row = exact_copy(drift, rows), *by_column = exact_copy(drift + rows, columns);
    u32 *words = fuzz_float_words(rows * columns), *out = exact(4 * rows * columns);
    EXPECT(READ(apply_drift)(words, by_row, rows, by_column, columns, out) == 0);
}

/* A number of a rule, which is part of a file: any double that is finite. */
static double fuzz_number(void) {
    double number = one_in(2) ? (double)(i64)random64() * 0x1p-63 : double_of_bits(random64());
    return number - number == 0 ? number : 0;
}

static float fuzz_single(void) { return (float)(one_in(4) ? fuzz_number() : (double)(i64)random64() * 0x1p-63); }

static void fuzz_optimizer_steps(void) {
    i64 n = random_below(100);
    float *a[5], *out = exact(4 * n);
    u16 *words = exact(2 * n);
    for (int i = 0; i < 5; i++) a[i] = (float *)fuzz_float_words(n);
    double x = fuzz_number(), y = fuzz_number(), z = fuzz_number();
    float p = fuzz_single(), q = fuzz_single(), r = fuzz_single();
    int form = (int)random_below(3);
    EXPECT(READ(infer_gradients)(a[0], a[1], n, x, out) == 0);
    EXPECT(READ(infer_bfloat16_gradients)(a[0], a[1], n, x, p, q, form, words) == 0);
    EXPECT(READ(count_bfloat16_matches)(a[0], a[1], n, x, p, q, form) <= n);
    EXPECT(READ(step_first_moments)(a[0], a[1], n, p, q, form, out) == 0);
    EXPECT(READ(step_second_moments)(a[0], a[1], n, p, q, form, out) == 0);
    EXPECT(READ(step_adam_torch)(a[0], a[1], a[2], n, x, y, p, q, out) == 0);
    EXPECT(READ(step_adam_fused)(a[0], a[1], a[2], n, x, y, p, q, out) == 0);
    EXPECT(READ(step_adam_deepspeed_cpu)(a[0], a[1], a[2], n, x, y, p, q, out) == 0);
    EXPECT(READ(step_adam_apex)(a[0], a[1], a[2], n, x, y, p, q, r, out) == 0);
    EXPECT(READ(extrapolate_weights)(a[0], a[1], a[2], a[3], a[4], n, x, y, z, out) == 0);
    EXPECT(READ(step_momentum)(a[0], a[1], n, x, y, out) == 0);
    EXPECT(READ(mix)(a[0], a[1], n, x, y, out) == 0);
    EXPECT(READ(scale)(a[0], n, x, out) == 0);
}

static void fuzz_deltas(void) {
    fuzz_rows();
    fuzz_sparse_steps();
    fuzz_masked_steps();
    fuzz_ans_steps();
    fuzz_grid();
    fuzz_zigzags();
    fuzz_contexts();
    if (one_in(8)) fuzz_optimizer_steps();
}
