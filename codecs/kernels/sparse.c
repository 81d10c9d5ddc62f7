/* Planes of few symbols, or mostly of one: as digits or as runs, below the one bit per symbol that a Huffman code needs.
 *
 * docs/codecs.md, "Runs" and "Digits", specifies the bytes. Memory safety: the writer is called for planes of 2048
 * symbols and more, and takes less space than the plane, as the comments prove; the reader checks each size
 * against the bytes left, each count against the scratch, and each place against the plane before it uses it. */
#include "lossless.h"

enum { MIN_DIGITS_BASE = 2, MAX_DIGITS_BASE = 16 };
/* The share of one symbol from which runs may be smaller. */
static const double MIN_RUNS_SHARE = 0.75;
/* A gap that stands for as many common symbols, and no other symbol yet. */
enum { LONG_GAP = 255 };

/* How many digits go into a byte. */
INLINE i64 digits_per_byte(i64 base) { return base == 2 ? 8 : base == 3 ? 5 : 2; }
INLINE i64 packed_size(i64 size, i64 base) {
    i64 per_byte = digits_per_byte(base);
    return (size + per_byte - 1) / per_byte;
}

/* The symbols as digits, the first one lowest; digits past the end of the plane are 0. */
static void pack_digits(const u8 *plane, i64 size, const u8 *symbols, i64 base, u8 *out) {
    u8 digits[256] = {0};
    for (i64 i = 0; i < base; i++) digits[symbols[i]] = (u8)i;
    i64 per_byte = digits_per_byte(base);
    for (i64 at = 0; at < size; at += per_byte) {
        i64 byte = 0;
        for (i64 i = min(at + per_byte, size) - 1; i >= at; i--) byte = byte * base + digits[plane[i]];
        *out++ = (u8)byte;
    }
}

/* The same for two digits per byte, with a table of pairs, of which only those of `symbols` are set and read. */
static void pack_pairs(const u8 *plane, i64 size, const u8 *symbols, i64 base, u8 *table, u8 *out) {
    for (i64 j = 0; j < base; j++)
        for (i64 i = 0; i < base; i++) table[symbols[i] | symbols[j] << 8] = (u8)(i + base * j);
    for (i64 i = 0; i < size / 2; i++) out[i] = table[load16(plane + 2 * i)];
    if (size & 1) out[size / 2] = table[plane[size - 1] | symbols[0] << 8];
}

static void unpack_digits(const u8 *packed, const u8 *symbols, i64 base, u8 *plane, i64 size) {
    i64 per_byte = digits_per_byte(base), at = 0;
    u8 table[256][8];
    for (int byte = 0; byte < 256; byte++) {
        i64 rest = byte;
        for (int i = 0; i < 8; i++, rest /= base) table[byte][i] = symbols[rest % base];
    }
    if (per_byte == 2)
        for (; at + 2 <= size; at += 2) memcpy(plane + at, table[packed[at / 2]], 2);
    else
        for (; at + 8 <= size; at += per_byte) memcpy(plane + at, table[*packed++], 8);
    if (per_byte == 2) packed += at / 2;
    for (; at < size; packed++)
        for (i64 i = 0; i < per_byte && at < size; i++) plane[at++] = table[*packed][i];
}

/* Appends an inner stream: its head, then the plane as it is, its only symbol, or its Huffman code. */
static u8 *put_inner(const u8 *plane, i64 size, u8 *out, Code *code) {
    count_symbols(plane, size, code);
    int used = assign_lengths(code, false), kind = HUFFMAN;
    i64 bytes = used < 2 ? used : huffman_size(code);
    if (used == 1) kind = CONSTANT;
    if (bytes >= size || !used) {
        kind = STORED;
        bytes = size;
    }
    out = put_head(out, kind, bytes);
    if (kind == HUFFMAN) write_huffman(plane, size, code, out);
    else if (kind == CONSTANT) out[0] = plane[0];
    else memcpy(out, plane, (size_t)size);
    return out + bytes;
}

/* At most 1 + 16 + ENTRY + size / 2 + 1 bytes, fewer than `size`; returns how many. */
static i64 write_digits(const u8 *plane, i64 size, const u8 *symbols, i64 base, u8 *packed, u8 *out, Code *code) {
    if (digits_per_byte(base) == 2) pack_pairs(plane, size, symbols, base, code->digits_of_pairs, packed);
    else pack_digits(plane, size, symbols, base, packed);
    out[0] = (u8)base;
    memcpy(out + 1, symbols, (size_t)base);
    return put_inner(packed, packed_size(size, base), out + 1 + base, code) - out;
}

/* The gaps and the others of a plane: how many of the common symbol stand before each other one. */
static i64 find_gaps(const u8 *plane, i64 size, u8 common, u8 *gaps, u8 *others) {
    i64 number = 0, run = 0;
    for (i64 i = 0; i < size; i++) {
        if (plane[i] == common) {
            run++;
            continue;
        }
        for (; run >= LONG_GAP; run -= LONG_GAP) gaps[number++] = LONG_GAP;
        gaps[number++] = (u8)run;
        *others++ = plane[i];
        run = 0;
    }
    return number;
}

/* A quarter of the symbols at most are others, so gaps and others take 9 + 2 * ENTRY + size / 2 + size / 255 bytes at
 * most, fewer than `size`; returns how many. */
static i64 write_runs(const u8 *plane, i64 size, u8 common, i64 others_size, u8 *gaps, u8 *others, u8 *out, Code *code) {
    i64 gaps_size = find_gaps(plane, size, common, gaps, others);
    out[0] = common;
    store32(out + 1, (u32)gaps_size);
    store32(out + 5, (u32)others_size);
    u8 *end = put_inner(gaps, gaps_size, out + 9, code);
    return put_inner(others, others_size, end, code) - out;
}

/* Writes the plane that was counted last, of at least 2048 symbols of which two differ, as digits or runs if one of
 * them takes less than its Huffman code: sets *kind and returns the number of bytes, else returns 0. Leaves the code of
 * another plane behind. `out` has `size` bytes. */
static i64 write_sparse(const u8 *plane, i64 size, i64 huffman_bytes, u8 *out, Scratch scratch, Code *code, int *kind) {
    u8 symbols[256], common = 0;
    i64 base = 0, smallest = huffman_bytes;
    u32 most = 0;
    for (int symbol = 0; symbol < 256; symbol++)
        if (code->totals[symbol]) {
            symbols[base++] = (u8)symbol;
            if (code->totals[symbol] > most) {
                most = code->totals[symbol];
                common = (u8)symbol;
            }
        }
    u8 *gaps = take(&scratch, size), *runs = take(&scratch, size);
    if (!gaps || !runs) return 0;
    if (base >= MIN_DIGITS_BASE && base <= MAX_DIGITS_BASE) {
        i64 bytes = write_digits(plane, size, symbols, base, gaps, out, code);
        if (bytes < smallest) {
            smallest = bytes;
            *kind = DIGITS;
        }
    }
    if ((double)most >= MIN_RUNS_SHARE * (double)size) {
        i64 others_size = size - most;
        i64 bytes = write_runs(plane, size, common, others_size, gaps, gaps + size - others_size, runs, code);
        if (bytes < smallest) {
            memcpy(out, runs, (size_t)bytes);
            smallest = bytes;
            *kind = RUNS;
        }
    }
    return smallest < huffman_bytes ? smallest : 0;
}

/* Fills `plane` from the inner stream at `source`; returns its size with its head, or 0 if it is damaged. */
static i64 read_inner(const u8 *source, i64 source_size, u8 *plane, i64 size, Scratch scratch, Code *code) {
    if (source_size < ENTRY) return 0;
    int kind = source[0];
    i64 bytes = load32(source + 1);
    bool is_inner = kind == STORED || kind == CONSTANT || kind == HUFFMAN;
    if (!is_inner || bytes > source_size - ENTRY) return 0;
    return read_stream(kind, source + ENTRY, bytes, plane, size, scratch, code) ? ENTRY + bytes : 0;
}

static bool read_digits(const u8 *source, i64 source_size, u8 *plane, i64 size, Scratch scratch, Code *code) {
    i64 base = source_size ? source[0] : 0;
    if (base < MIN_DIGITS_BASE || base > MAX_DIGITS_BASE || source_size < 1 + base) return false;
    const u8 *symbols = source + 1, *inner = symbols + base;
    i64 inner_size = source_size - 1 - base, bytes = packed_size(size, base);
    u8 *packed = take(&scratch, bytes);
    if (!packed || read_inner(inner, inner_size, packed, bytes, scratch, code) != inner_size) return false;
    unpack_digits(packed, symbols, base, plane, size);
    return true;
}

/* Fills `plane`; false if a gap leaves it, or if there are not as many gaps that end as others. */
static bool fill_gaps(const u8 *gaps, i64 gaps_size, const u8 *others, i64 others_size, u8 common, u8 *plane, i64 size) {
    i64 place = 0, filled = 0;
    memset(plane, common, (size_t)size);
    for (i64 i = 0; i < gaps_size; i++) {
        place += gaps[i];
        if (gaps[i] == LONG_GAP) continue;
        if (place >= size || filled >= others_size) return false;
        plane[place++] = others[filled++];
    }
    return filled == others_size && (!gaps_size || gaps[gaps_size - 1] != LONG_GAP);
}

static bool read_runs(const u8 *source, i64 source_size, u8 *plane, i64 size, Scratch scratch, Code *code) {
    if (source_size < 9) return false;
    i64 gaps_size = load32(source + 1), others_size = load32(source + 5);
    /* More than `scratch` holds is refused here, and more than the plane holds by `fill_gaps`: each other symbol and its
     * gap take a place of their own, and long gaps leave the plane before the last gap, which is not long. */
    u8 *gaps = take(&scratch, gaps_size), *others = take(&scratch, others_size);
    if (!gaps || !others) return false;
    i64 left = source_size - 9, bytes = read_inner(source + 9, left, gaps, gaps_size, scratch, code);
    if (!bytes) return false;
    const u8 *second = source + 9 + bytes;
    left -= bytes;
    if (read_inner(second, left, others, others_size, scratch, code) != left) return false;
    return fill_gaps(gaps, gaps_size, others, others_size, source[0], plane, size);
}
