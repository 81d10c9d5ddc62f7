/* Hostile chunks and streams for the lossless kernels: see fuzz.c. */

/* Words as training makes them, and as nobody would: each kind leads to other kinds of streams. */
static u32 random_word(i64 kind, i64 i) {
    switch (kind) {
        case 0: return (u32)random64();                                          /* any bits */
        case 1: return 0x3F800000u + ((u32)random_below(3) << 23);               /* three values */
        case 2: return one_in(20) ? (u32)random64() : 0;                         /* mostly zeros */
        case 3: return (100u + (u32)__builtin_ctzll(random64() | 1 << 20)) << 23 /* weights */
                       | (u32)random_below(1 << 23) | (u32)random_below(2) << 31;
        case 4: return (u32)(i * 2654435761 % 97) << 23;                         /* exponents of equal shares */
        case 5: return 0x40000000u | (u32)random_below(2) << 24 | (one_in(40) ? (u32)random64() : 0); /* two, mostly */
        case 6: return (u32)(i / 50) << 22 | (u32)random_below(1 << 16);         /* slow growth */
        case 7: return (u32)random64() & 0x7F7F7F7F;                             /* bytes below 128 */
        default: return (100u + (u32)__builtin_ctzll(random64() | 1 << 3)) << 23; /* four, of unequal shares */
    }
}

static u8 *random_words(i64 width, i64 count) {
    i64 kind = random_below(9);
    u8 *words = exact(width * count);
    for (i64 i = 0; i < count; i++) {
        u64 word = random_word(kind, i);
        if (width == 2) word >>= 16;
        if (width == 8) word = word << 29 | (u64)random_word(kind, i) >> 3;
        if (width == 1) word = word >> 23;
        memcpy(words + width * i, &word, (size_t)width);
    }
    return words;
}

static i64 random_count(void) {
    static const i64 counts[] = {0, 1, 2, 15, 31, 600, 2049, 4096, 9000, 70000};
    return one_in(2) ? random_below(3000) : counts[random_below(one_in(8) ? 10 : 9)];
}

static u8 *lossless_scratch(i64 width, i64 count, i64 columns, i64 *size) {
    i64 needed = CALL(lossless_scratch)(width, count, columns);
    EXPECT(needed > 0);
    return exact_scratch(needed, size);
}

/* Changes the head of a Huffman code or of an inner stream, which begins where a stream of a chunk does. */
static u8 *mutate_stream(const u8 *chunk, i64 size, i64 streams, i64 *made) {
    u8 *bytes = exact_copy(chunk, size);
    i64 at = 1 + ENTRY * streams;
    for (i64 i = random_below(streams); i > 0; i--) at += load32(chunk + 2 + ENTRY * (i - 1));
    for (i64 changes = 1 + random_below(6); changes; changes--) {
        i64 place = at + random_below(60);
        if (place < size) bytes[place] = one_in(2) ? (u8)random64() : (u8)(bytes[place] ^ 1 << random_below(8));
    }
    *made = size;
    return bytes;
}

static u8 *hostile_chunk(const u8 *chunk, i64 size, i64 streams, i64 *made) {
    return one_in(3) ? mutate_stream(chunk, size, streams, made) : mutate(chunk, size, 1 + ENTRY * streams, made);
}

static void fuzz_planes(void) {
    i64 width = (i64)1 << random_below(4), count = random_count(), room, size;
    int floats = one_in(2);
    u8 *words = random_words(width, count), *back = exact(width * count);
    u8 *scratch = lossless_scratch(width, count, 0, &room);
    i64 out_size = 1 + width * (ENTRY + count);
    u8 *out = exact(out_size);
    double max_ratio = one_in(2) ? 1.0 : 0.9;
    i64 end = CALL(write_planes)(floats, width, words, count, max_ratio, one_in(2), out, out_size, scratch, room);
    EXPECT(end > 0 && end <= out_size);
    u8 *chunk = exact_copy(out, end);
    EXPECT(READ(read_planes)(floats, width, chunk, end, back, count, scratch, room) == 0);
    EXPECT(memcmp(words, back, (size_t)(width * count)) == 0);
    u8 *planes = exact(width * count);
    EXPECT(CALL(split_planes)(floats, width, words, count, planes, width * count) == 0);
    for (i64 turn = 0; turn < 40; turn++) {
        u8 *bytes = hostile_chunk(chunk, end, width, &size);
        i64 failed = READ(read_planes)(floats, width, bytes, size, back, count, scratch, room);
        EXPECT(failed >= 0 && failed <= 1 + width);
    }
}

static void fuzz_residuals(void) {
    i64 width = one_in(2) ? 4 : 2, base_width = one_in(3) ? 0 : one_in(2) ? 4 : 2, columns = 1 + random_below(300);
    i64 rows = 1 + random_below(one_in(10) ? 200 : 20), count = rows * columns, room, size;
    u8 *words = random_words(width, count), *base = base_width ? random_words(base_width, count) : NULL;
    u8 *back = exact(width * count), *scratch = lossless_scratch(width, count, columns, &room);
    i64 streams = width + 3, out_size = 1 + ENTRY * streams + width * count + 2 + 2 * rows;
    u8 *out = exact(out_size);
    i64 end = CALL(write_residuals)(width, words, count, base_width, base, columns, 1.0, one_in(2), 0.6, out, out_size,
                                    scratch, room);
    EXPECT(end >= 0 && end <= out_size);
    if (!end) { /* gains nothing: any residuals are read as well */
        for (i64 i = 0; i < streams; i++) {
            i64 place = i - (width - 1);
            store32(put_head(out + 1 + ENTRY * i, STORED, 0) - 4, (u32)(place == 0 ? 2 : place == 1 || place == 2 ? rows : count));
        }
        for (i64 i = 1 + ENTRY * streams; i < out_size; i++) out[i] = (u8)random64();
        end = out_size;
    }
    u8 *chunk = exact_copy(out, end);
    EXPECT(READ(read_residuals)(width, chunk, end, base_width, base, columns, back, count, scratch, room) == 0);
    EXPECT(end == out_size || memcmp(words, back, (size_t)(width * count)) == 0);
    for (i64 turn = 0; turn < 40; turn++) {
        u8 *bytes = hostile_chunk(chunk, end, streams, &size);
        i64 failed = READ(read_residuals)(width, bytes, size, base_width, base, columns, back, count, scratch, room);
        EXPECT(failed >= 0 && failed <= 1 + streams);
    }
}

/* One stream, of its own kind or said to be of another. */
static void fuzz_streams(void) {
    i64 count = random_count(), room, size;
    u8 *plane = random_words(1, count), *scratch = lossless_scratch(1, count, 0, &room);
    i64 sizes[] = {count}, place[] = {0}, out_size = 1 + ENTRY + count;
    double max_ratios[] = {1.0};
    u8 sampled[] = {(u8)one_in(2)}, *out = exact(out_size), *back = exact(count);
    if (count) memcpy(out + 1 + ENTRY, plane, (size_t)count);
    i64 end = CALL(write_streams)(sizes, max_ratios, sampled, 1, out, out_size, scratch, room);
    EXPECT(end > 0 && end <= out_size);
    i64 stream_size = end - 1 - ENTRY;
    u8 *stream = exact_copy(out + 1 + ENTRY, stream_size), kinds[] = {out[1]};
    i64 starts[] = {0, stream_size};
    EXPECT(READ(read_streams)(stream, stream_size, kinds, starts, sizes, place, 1, back, count, scratch, room) == 1);
    EXPECT(kinds[0] == STORED || memcmp(plane, back, (size_t)count) == 0);
    for (i64 turn = 0; turn < 40; turn++) {
        u8 *bytes = mutate(stream, stream_size, 60, &size);
        kinds[0] = one_in(5) ? (u8)random_below(9) : out[1];
        starts[1] = size;
        i64 done = READ(read_streams)(bytes, size, kinds, starts, sizes, place, 1, back, count, scratch, room);
        EXPECT(done == 0 || done == 1);
    }
    u8 *code = exact(count);
    i64 bytes = CALL(entropy_code)(plane, count, code, count, scratch, room);
    EXPECT(bytes >= 0 && (bytes < count || !bytes));
    EXPECT(CALL(estimate_bits)(plane, count) < 9);
}

/* Runs whose gaps and others are random, plain bytes: `mutate` seldom changes a coded gap so that its code still ends
 * where it should. Gaps often lead to the last place of the plane, or right behind it. */
static void fuzz_runs(void) {
    i64 count = random_below(one_in(4) ? 900 : 40), room, place[] = {0}, sizes[] = {count};
    u8 *scratch = lossless_scratch(1, count, 0, &room), *back = exact(count), *plane = exact(count), kinds[] = {RUNS};
    for (i64 turn = 0; turn < 20; turn++) {
        u8 gaps[64], others[64], common = (u8)random64();
        i64 gaps_size = random_below(one_in(2) ? 4 : 64), filled = 0, at = 0;
        bool fits = true;
        if (count) memset(plane, common, (size_t)count);
        for (i64 i = 0; i < gaps_size; i++) {
            i64 left = count - at - one_in(2);
            gaps[i] = (u8)(one_in(5) ? 255 : one_in(3) && left >= 0 && left < 255 ? left : random_below(3));
            at += gaps[i];
            if (gaps[i] == 255) continue;
            others[filled] = (u8)random64();
            fits = fits && at < count;
            if (fits) plane[at] = others[filled];
            at++, filled++;
        }
        i64 others_size = one_in(6) ? random_below(64) : filled, stated = one_in(20) ? (u32)random64() : others_size;
        for (i64 i = filled; i < others_size; i++) others[i] = 1;
        fits = fits && others_size == filled && stated == filled && (!gaps_size || gaps[gaps_size - 1] != 255);
        i64 size = 9 + 2 * ENTRY + gaps_size + others_size, starts[] = {0, size};
        u8 *bytes = exact_bytes(size);
        bytes[0] = common;
        store32(bytes + 1, (u32)gaps_size), store32(bytes + 5, (u32)stated);
        u8 *end = put_head(bytes + 9, STORED, gaps_size);
        memcpy(end, gaps, (size_t)gaps_size);
        memcpy(put_head(end + gaps_size, STORED, others_size), others, (size_t)others_size);
        i64 done = READ(read_streams)(bytes, size, kinds, starts, sizes, place, 1, back, count, scratch, room);
        EXPECT(done == fits && (!fits || !memcmp(back, plane, (size_t)count)));
    }
}

static void fuzz_bfloat16(void) {
    i64 count = random_below(300);
    u32 *words = exact(4 * count);
    u16 *rounded = exact(2 * count);
    for (i64 i = 0; i < count; i++) words[i] = random_word(0, i);
    EXPECT(CALL(to_bfloat16)(words, count, rounded) == 0);
    i64 is_copy = CALL(is_bfloat16_of)(words, rounded, count);
    EXPECT(is_copy == 0 || is_copy == 1);
}

static void fuzz_float16(void) {
    i64 count = random_below(300);
    u32 *words = exact(4 * count), *back = exact(4 * count);
    u16 *halves = exact(2 * count), *again = exact(2 * count);
    for (i64 i = 0; i < count; i++) halves[i] = (u16)random64();
    EXPECT(CALL(from_float16)(halves, count, words) == 0);
    EXPECT(CALL(to_float16)(words, count, again) == 0);
    for (i64 i = 0; i < count; i++) EXPECT(again[i] == halves[i] || (halves[i] & 0x7FFF) > 0x7C00);
    for (i64 i = 0; i < count; i++) words[i] = (u32)random64();
    EXPECT(CALL(to_float16)(words, count, again) == 0);
    EXPECT(CALL(from_float16)(again, count, back) == 0);
    for (i64 i = 0; i < count; i++) /* half of the last of 11 bits, or the smallest number */
        EXPECT((words[i] & 0x7FFFFFFF) >= 0x477FE000 ||
               __builtin_fabsf(float_of_bits(back[i]) - float_of_bits(words[i])) <=
                   __builtin_fabsf(float_of_bits(words[i])) * 0x1p-11f + 0x1p-25f);
}

static void fuzz_masked(void) {
    i64 width = (i64)1 << random_below(4), count = random_count();
    u8 *words = random_words(width, count);
    u64 mask = one_in(4) ? 0 : random64(), value = random64() & mask;
    i64 same = CALL(count_masked)(width, words, count, mask, value);
    EXPECT(same >= 0 && same <= count && (mask || same == count));
}

static void fuzz_lossless(void) {
    fuzz_planes();
    fuzz_residuals();
    fuzz_streams();
    fuzz_runs();
    fuzz_bfloat16();
    fuzz_float16();
    fuzz_masked();
}
