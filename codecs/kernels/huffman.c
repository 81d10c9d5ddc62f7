/* Huffman codes of at most 11 bits over one plane of bytes, written as eight bit streams.
 *
 * docs/codecs.md, "Huffman streams", specifies the bytes. Code lengths come from the counts by the in-place method of
 * Moffat and Katajainen, "In-Place Calculation of Minimum-Redundancy Codes" (1995), and are then limited to 11 bits.
 *
 * Memory safety. The writer knows the size of each bit stream before it writes it, and the caller's buffer is as large as
 * their sum. The reader builds its table only from a complete code, so every entry of the table is set. Both have one
 * fast loop without checks; it runs a number of rounds that follows from the smallest remaining buffer. */
#include "lossless.h"

/* ---- counting ---- */

/* The number of symbols in each stream but the last ones. */
INLINE i64 share_of(i64 size) { return (size + STREAMS - 1) / STREAMS; }

static void smallest_and_largest(const u8 *plane, i64 size, int *smallest, int *largest) {
    u8 low = 255, high = 0;
    for (i64 i = 0; i < size; i++) {
        low = min(low, plane[i]);
        high = max(high, plane[i]);
    }
    *smallest = low;
    *largest = high;
}

/* Eight tables in turn: if two neighbours are equal, the second need not wait for the sum of the first. */
static void count_singles(const u8 *plane, i64 size, u32 counts[256]) {
    u32 tables[8][256] = {{0}};
    i64 i = 0;
    for (; i + 8 <= size; i += 8) {
        u64 word = load64(plane + i);
        for (int turn = 0; turn < 8; turn++) tables[turn][word >> 8 * turn & 255]++;
    }
    for (; i < size; i++) tables[0][plane[i]]++;
    for (int symbol = 0; symbol < 256; symbol++) {
        u32 sum = 0;
        for (int turn = 0; turn < 8; turn++) sum += tables[turn][symbol];
        counts[symbol] = sum;
    }
}

/* The same if the lowest `bits` bits, 5 or 6, tell all symbols apart: counts pairs of symbols, which halves the number
 * of sums. `tables` has room for 2^12 counts, and stays in the nearest cache. */
INLINE void count_pairs(const u8 *plane, i64 size, int smallest, int largest, int bits, u32 *tables, u32 counts[256]) {
    const int turns = bits == 5 ? 4 : 2, pairs = 1 << 2 * bits, mask = (1 << bits) - 1;
    const u64 first = 0x0001000100010001 * (u64)mask, second = first << bits;
    memset(tables, 0, sizeof(u32) * (size_t)(turns * pairs));
    i64 i = 0;
    for (; i + 8 <= size; i += 8) {
        u64 word = load64(plane + i);
        word = (word & first) | (word >> (8 - bits) & second);
        for (int turn = 0; turn < 4; turn++) tables[turn % turns * pairs + (int)(word >> 16 * turn & 0xFFFF)]++;
    }
    u32 as_first[1 << 6] = {0}, as_second[1 << 6] = {0};
    for (int turn = 0; turn < turns; turn++)
        for (int b = 0; b <= mask; b++) {
            const u32 *row = tables + turn * pairs + (b << bits);
            u32 sum = 0;
            for (int a = 0; a <= mask; a++) {
                as_first[a] += row[a];
                sum += row[a];
            }
            as_second[b] += sum;
        }
    memset(counts, 0, sizeof(u32) * 256);
    for (int symbol = smallest; symbol <= largest; symbol++)
        counts[symbol] = as_first[symbol & mask] + as_second[symbol & mask];
    for (; i < size; i++) counts[plane[i]]++;
}

/* Fills code->counts with how often each symbol occurs in each stream. */
static OUTLINED void count_symbols(const u8 *plane, i64 size, Code *code) {
    i64 share = share_of(size);
    int smallest = 0, largest = 255;
    if (share >= 4096) smallest_and_largest(plane, size, &smallest, &largest);
    for (int s = 0; s < STREAMS; s++) {
        i64 begin = min(s * share, size), end = min((s + 1) * share, size);
        u32 *counts = code->counts[s];
        if (largest - smallest < 32)
            count_pairs(plane + begin, end - begin, smallest, largest, 5, code->pair_counts, counts);
        else if (largest - smallest < 64 && share >= 16384)
            count_pairs(plane + begin, end - begin, smallest, largest, 6, code->pair_counts, counts);
        else
            count_singles(plane + begin, end - begin, counts);
    }
    memset(code->totals, 0, sizeof code->totals);
    for (int s = 0; s < STREAMS; s++)
        for (int symbol = 0; symbol < 256; symbol++) code->totals[symbol] += code->counts[s][symbol];
}

/* ---- code lengths ---- */

/* Replaces ascending weights by the depths of their leaves in an optimal tree; n >= 2. */
static void weights_to_depths(i64 *a, int n) {
    a[0] += a[1];
    int root = 0, leaf = 2;
    for (int node = 1; node < n - 1; node++) {
        if (leaf >= n || a[root] < a[leaf]) {
            a[node] = a[root];
            a[root++] = node;
        } else {
            a[node] = a[leaf++];
        }
        if (leaf >= n || (root < node && a[root] < a[leaf])) {
            a[node] += a[root];
            a[root++] = node;
        } else {
            a[node] += a[leaf++];
        }
    }
    a[n - 2] = 0;
    for (int node = n - 3; node >= 0; node--) a[node] = a[a[node]] + 1;
    int free = 1, depth = 0, node = n - 1;
    root = n - 2;
    while (free > 0) {
        int inner = 0;
        for (; root >= 0 && a[root] == depth; root--) inner++;
        for (; free > inner; free--) a[node--] = depth;
        free = 2 * inner;
        depth++;
    }
}

/* Limits lengths, of symbols in ascending order of their counts, to MAX_LENGTH. The rarest symbols that can be longer
 * pay for it; what is left over goes to the most frequent. The code stays complete. */
static SMALL void limit_lengths(i64 *lengths, int n) {
    i64 taken = 0;
    for (int i = 0; i < n; i++) {
        lengths[i] = min(lengths[i], MAX_LENGTH);
        taken += 1 << (MAX_LENGTH - lengths[i]);
    }
    for (int rarest = 0; taken > TABLE_SIZE;) {
        while (lengths[rarest] == MAX_LENGTH) rarest++;
        lengths[rarest]++;
        taken -= 1 << (MAX_LENGTH - lengths[rarest]);
    }
    while (taken < TABLE_SIZE) {
        for (int i = n - 1; i >= 0; i--) {
            i64 step = 1 << (MAX_LENGTH - lengths[i]);
            if (lengths[i] > 1 && taken + step <= TABLE_SIZE) {
                lengths[i]--;
                taken += step;
                break;
            }
        }
    }
}

/* The same, nearly as short as can be: symbols whose longer codes cost the fewest bits for the room that they leave pay for
 * it, and what is left over goes to those for which it saves the most. `counts` belongs to `lengths`. */
static SMALL void limit_lengths_well(i64 *lengths, const u32 counts[256], int n) {
    i64 taken = 0;
    for (int i = 0; i < n; i++) {
        lengths[i] = min(lengths[i], MAX_LENGTH);
        taken += 1 << (MAX_LENGTH - lengths[i]);
    }
    while (taken > TABLE_SIZE) {
        int cheapest = 0;
        u64 least = UINT64_MAX;
        for (int i = 0; i < n; i++) {
            u64 cost = (u64)counts[i] << lengths[i];
            if (lengths[i] < MAX_LENGTH && cost <= least) least = cost, cheapest = i;
        }
        lengths[cheapest]++;
        taken -= 1 << (MAX_LENGTH - lengths[cheapest]);
    }
    while (taken < TABLE_SIZE) {
        int dearest = 0;
        u64 most = 0;
        for (int i = 0; i < n; i++) {
            u64 cost = (u64)counts[i] << lengths[i];
            if (taken + (1 << (MAX_LENGTH - lengths[i])) <= TABLE_SIZE && cost >= most) most = cost, dearest = i;
        }
        taken += 1 << (MAX_LENGTH - lengths[dearest]);
        lengths[dearest]--;
    }
}

/* Sets code->lengths from code->totals; returns how many symbols occur. With fewer than two, all lengths are 0. `well`:
 * takes a few microseconds to find shorter codes where some would be too long. */
static SMALL int assign_lengths(Code *code, bool well) {
    i64 weights[256];
    u8 symbols[256];
    int used = 0;
    memset(code->lengths, 0, sizeof code->lengths);
    for (int symbol = 0; symbol < 256; symbol++) {
        u32 count = code->totals[symbol];
        if (!count) continue;
        int at = used++;
        for (; at && weights[at - 1] > count; at--) {
            weights[at] = weights[at - 1];
            symbols[at] = symbols[at - 1];
        }
        weights[at] = count;
        symbols[at] = (u8)symbol;
    }
    if (used < 2) return used;
    weights_to_depths(weights, used);
    if (well) {
        u32 counts[256];
        for (int i = 0; i < used; i++) counts[i] = code->totals[symbols[i]];
        limit_lengths_well(weights, counts, used);
    } else {
        limit_lengths(weights, used);
    }
    for (int i = 0; i < used; i++) code->lengths[symbols[i]] = (u8)weights[i];
    return used;
}

/* The first and the last symbol that has a code. */
static void span_of(const u8 lengths[256], int *first, int *last) {
    *first = 0;
    *last = 255;
    while (*first < 255 && !lengths[*first]) ++*first;
    while (*last > *first && !lengths[*last]) --*last;
}

static i64 stream_size(const u32 counts[256], const u8 lengths[256]) {
    u64 bits = 7;
    for (int symbol = 0; symbol < 256; symbol++) bits += (u64)counts[symbol] * lengths[symbol];
    return (i64)(bits >> 3);
}

/* The number of bytes that write_huffman will write; sets code->stream_sizes. */
static OUTLINED i64 huffman_size(Code *code) {
    int first, last;
    span_of(code->lengths, &first, &last);
    i64 size = 2 + (last - first + 2) / 2 + 4 * STREAMS;
    for (int s = 0; s < STREAMS; s++) {
        code->stream_sizes[s] = stream_size(code->counts[s], code->lengths);
        size += code->stream_sizes[s];
    }
    return size;
}

/* Sets code->bits: canonical codes, their first bit lowest. */
static SMALL void canonical_code(Code *code) {
    u32 next[MAX_LENGTH + 1] = {0}, number[MAX_LENGTH + 1] = {0};
    for (int symbol = 0; symbol < 256; symbol++) number[code->lengths[symbol]]++;
    for (int length = 1; length < MAX_LENGTH; length++) next[length + 1] = (next[length] + number[length]) << 1;
    for (int symbol = 0; symbol < 256; symbol++) {
        u32 length = code->lengths[symbol], bits = length ? next[length]++ : 0, reversed = 0;
        for (u32 i = 0; i < length; i++) reversed |= (bits >> i & 1) << (length - 1 - i);
        code->bits[symbol] = (u16)reversed;
    }
}

/* ---- writing ---- */

/* The last symbols of each stream are written byte by byte: each has a bit at least, so there are 8 bytes left for
 * every 8-byte store before them. */
enum { CAREFUL_SYMBOLS = 64 };
/* Below this size no table is worth its time. */
enum { MIN_SIZE_FOR_TABLES = 8193 };
/* The table of pairs is worth its time if there are so many symbols for each pair. */
enum { SYMBOLS_PER_PAIR = 8 };

/* The bits of each symbol as the topmost of its entry, and how many these are in its low byte. */
static void make_singles(Code *code) {
    for (int symbol = 0; symbol < 256; symbol++) {
        u32 length = code->lengths[symbol];
        code->singles[symbol] = length ? (u64)code->bits[symbol] << (64 - length) | length : 0;
    }
}

/* For two symbols, the first in the low byte of the index: their bits as the topmost of the entry, and how many these
 * are in its low byte. An entry can then be the count of its own shift. */
static void make_pairs(Code *code) {
    int used[256], n = 0;
    for (int symbol = 0; symbol < 256; symbol++)
        if (code->lengths[symbol]) used[n++] = symbol;
    for (int j = 0; j < n; j++) {
        u64 *row = code->pairs + (used[j] << 8);
        u32 second_bits = code->bits[used[j]], second_length = code->lengths[used[j]];
        for (int i = 0; i < n; i++) {
            u32 length = code->lengths[used[i]] + second_length;
            u32 bits = code->bits[used[i]] | second_bits << code->lengths[used[i]];
            row[used[i]] = (u64)bits << (64 - length) | length;
        }
    }
}

/* A bit stream in the writing. The pending bits, 56 at most, are the topmost of `word`; their number is the low byte
 * of `pending`. The bits below them, and those above that byte, are leftovers that shifts carry away. */
typedef struct {
    u8 *to;
    const u8 *from;
    u64 word, pending;
} BitWriter;

/* Writes whole bytes; there is at least one pending bit before, and there are fewer than 8 after. */
INLINE void flush(BitWriter *w) {
    u8 pending = (u8)w->pending;
    store64(w->to, w->word >> (-pending & 63));
    w->to += pending >> 3;
    w->pending = pending & 7;
}

INLINE u64 followed_by(u64 a, u64 b) { return a >> (b & 63) | b; }

/* Appends twice four symbols; fewer than 8 bits are pending, and 7 + 4 * 11 are fewer than 56. */
INLINE void append8(BitWriter *w, u64 front, u64 front_length, u64 back, u64 back_length) {
    w->word = w->word >> (front_length & 63) | front;
    w->pending += front_length;
    if (__builtin_expect((u8)(w->pending + back_length) > 56, 0)) flush(w);
    w->word = w->word >> (back_length & 63) | back;
    w->pending += back_length;
    flush(w);
}

INLINE void put8(BitWriter *w, const u64 *pairs) {
    u64 a = pairs[load16(w->from)], b = pairs[load16(w->from + 2)];
    u64 c = pairs[load16(w->from + 4)], d = pairs[load16(w->from + 6)];
    u64 front = followed_by(a, b), front_length = a + b, back = followed_by(c, d), back_length = c + d;
    w->from += 8;
    append8(w, front, front_length, back, back_length);
}

/* Does the same with two look-ups for each pair. */
INLINE void put8_singly(BitWriter *w, const u64 *singles) {
    u64 parts[4], lengths[4];
    for (int i = 0; i < 4; i++) {
        u64 a = singles[w->from[2 * i]], b = singles[w->from[2 * i + 1]];
        parts[i] = followed_by(a, b);
        lengths[i] = a + b;
    }
    w->from += 8;
    append8(w, parts[0] >> (lengths[1] & 63) | parts[1], lengths[0] + lengths[1],
            parts[2] >> (lengths[3] & 63) | parts[3], lengths[2] + lengths[3]);
}

static void put_rest(BitWriter *w, const u8 *end, const Code *code) {
    u64 pending = w->pending & 7, word = pending ? w->word >> (64 - pending) : 0;
    u8 *to = w->to;
    for (const u8 *from = w->from; from < end; from++) {
        word |= (u64)code->bits[*from] << pending;
        for (pending += code->lengths[*from]; pending >= 8; pending -= 8, word >>= 8) *to++ = (u8)word;
    }
    if (pending) *to = (u8)word;
}

/* Writes the code and the streams of the plane that was counted last: huffman_size(code) bytes. */
static OUTLINED void write_huffman(const u8 *plane, i64 size, Code *code, u8 *out) {
    int first, last;
    canonical_code(code);
    span_of(code->lengths, &first, &last);
    *out++ = (u8)first;
    *out++ = (u8)last;
    for (int symbol = first; symbol <= last; symbol += 2)
        *out++ = (u8)(code->lengths[symbol] | (symbol < last ? code->lengths[symbol + 1] : 0) << 4);
    i64 share = share_of(size), rounds = 0;
    int used = 0;
    for (int symbol = first; symbol <= last; symbol++) used += code->lengths[symbol] > 0;
    bool in_pairs = SYMBOLS_PER_PAIR * used * used <= size;
    if (size >= MIN_SIZE_FOR_TABLES) {
        if (in_pairs) make_pairs(code);
        else make_singles(code);
        rounds = max(0, size - (STREAMS - 1) * share - CAREFUL_SYMBOLS) / 8;
    }
    u8 *sizes = out;
    out += 4 * STREAMS;
    for (int s = 0; s < STREAMS; s++) {
        BitWriter w = {out, plane + min(s * share, size), 0, 0};
        if (in_pairs)
            for (i64 i = 0; i < rounds; i++) put8(&w, code->pairs);
        else
            for (i64 i = 0; i < rounds; i++) put8_singly(&w, code->singles);
        put_rest(&w, plane + min((s + 1) * share, size), code);
        store32(sizes + 4 * s, (u32)code->stream_sizes[s]);
        out += code->stream_sizes[s];
    }
}

/* ---- reading ---- */

/* An entry of the table, for 11 bits of a stream: in the low byte, how many of them its symbols take, so that the entry
 * can be the count of a shift; above it up to six symbols; in the top byte, how many these are. */
enum { SYMBOLS_PER_LOOKUP = 6 };
/* After each 8-byte load: 5 * 11 bits, up to 7 bits to the next byte and a mark fit into 64 bits. */
enum { LOOKUPS_PER_LOAD = 5 };
enum { BITS_PER_ROUND = LOOKUPS_PER_LOAD * MAX_LENGTH, SYMBOLS_PER_ROUND = LOOKUPS_PER_LOAD * SYMBOLS_PER_LOOKUP };

/* Sets code->lengths; returns the number of bytes read, or 0 if this is not a complete code. */
static SMALL i64 read_lengths(const u8 *source, i64 source_size, Code *code) {
    if (source_size < 2) return 0;
    int first = source[0], last = source[1], taken = 0;
    i64 bytes = (last - first + 2) / 2;
    if (last <= first || source_size < 2 + bytes + 4 * STREAMS) return 0;
    memset(code->lengths, 0, sizeof code->lengths);
    for (int i = 0; i <= last - first; i++) {
        int length = source[2 + i / 2] >> 4 * (i & 1) & 15;
        if (length > MAX_LENGTH) return 0;
        code->lengths[first + i] = (u8)length;
        if (length) taken += TABLE_SIZE >> length;
    }
    return taken == TABLE_SIZE ? 2 + bytes : 0;
}

INLINE u32 symbols_in(u64 entry) { return (u32)(entry >> 56); }

/* Puts a symbol before those of an entry, which has fewer than six. */
INLINE u64 prepend(u64 entry, u32 symbol, u32 length) {
    return ((entry & 0xFF) + length) | (u64)symbol << 8 | (entry & 0x0000FFFFFFFFFF00) << 8 |
           ((entry & (u64)0xFF << 56) + ((u64)1 << 56));
}

/* Fills code->table. The table for `width` bits is made from those for fewer bits: a symbol, then what the bits after
 * it give. The table for `width` bits begins at 2^width; entry 0 of the smallest has no symbols. */
static void make_table(Code *code) {
    canonical_code(code);
    u8 symbols[256];
    int n = 0, shortest = MAX_LENGTH;
    for (int symbol = 0; symbol < 256; symbol++)
        if (code->lengths[symbol]) {
            symbols[n++] = (u8)symbol;
            shortest = min(shortest, code->lengths[symbol]);
        }
    u64 *tables = code->tables;
    memset(tables, 0, sizeof(u64) << (MAX_LENGTH - shortest + 1));
    for (int width = shortest; width <= MAX_LENGTH; width++) {
        if (width > MAX_LENGTH - shortest && width < MAX_LENGTH) continue; /* no symbol is followed by so many bits */
        u64 *table = tables + (1 << width);
        for (int i = 0; i < n; i++) {
            u32 symbol = symbols[i], length = code->lengths[symbol];
            if ((int)length > width) continue;
            u64 *to = table + code->bits[symbol];
            for (u32 rest = 0, rests = 1u << (width - (int)length); rest < rests; rest++) {
                u64 next = tables[rests + rest];
                for (u32 fewer = rests >> 1; symbols_in(next) == SYMBOLS_PER_LOOKUP; fewer >>= 1)
                    next = tables[fewer + (rest & (fewer - 1))];
                to[(u64)rest << length] = prepend(next, symbol, length);
            }
        }
    }
}

/* A bit stream in the reading. */
typedef struct {
    const u8 *from, *from_end; /* the byte that has the next bit, and the end of the stream */
    u8 *to, *to_end;           /* where the next symbol goes, and the end of this stream's share of the plane */
    u32 bit;                   /* the next bit, below 8 */
} BitReader;

/* How many rounds are safe: before and after each, 8 bytes of the stream are left to load, and each stores 8 bytes within
 * the share. */
INLINE i64 safe_rounds(const BitReader *r) {
    i64 bits = 8 * (r->from_end - r->from - 8) - r->bit;
    return bits < 0 ? 0 : min(bits / BITS_PER_ROUND, (r->to_end - r->to - 2) / SYMBOLS_PER_ROUND);
}

/* The next bits with a mark above them: the number of zeros above the mark is the number of bits used. */
INLINE u64 load_bits(const u8 *from, u32 bit) { return (load64(from) | (u64)1 << 63) >> bit; }

INLINE void look_up(u8 **to, u64 *bits, const u64 *table) {
    u64 entry = table[*bits & (TABLE_SIZE - 1)];
    *bits >>= entry & 63;
    store64(*to, entry >> 8);
    *to += entry >> 56;
}

INLINE void reload(const u8 **from, u64 *bits) {
    u32 used = (u32)__builtin_clzll(*bits);
    *from += used >> 3;
    *bits = load_bits(*from, used & 7);
}

/* Streams are read by fours: one alone would wait for each look-up, and eight have more state than there are registers.
 * Three registers for each: their next bits are loaded at the end of a round. */
enum { AT_ONCE = 4 };

static void read_four(BitReader r[AT_ONCE], const u64 *table) {
    for (;;) {
        i64 rounds = min(min(safe_rounds(r), safe_rounds(r + 1)), min(safe_rounds(r + 2), safe_rounds(r + 3)));
        if (rounds <= 0) return;
        const u8 *from[AT_ONCE];
        u8 *to[AT_ONCE];
        u64 bits[AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++) {
            from[i] = r[i].from;
            to[i] = r[i].to;
            bits[i] = load_bits(from[i], r[i].bit);
        }
        for (; rounds; rounds--) {
#pragma GCC unroll 5
            for (int lookup = 0; lookup < LOOKUPS_PER_LOAD; lookup++)
#pragma GCC unroll 4
                for (int i = 0; i < AT_ONCE; i++) look_up(&to[i], &bits[i], table);
#pragma GCC unroll 4
            for (int i = 0; i < AT_ONCE; i++) reload(&from[i], &bits[i]);
        }
        for (int i = 0; i < AT_ONCE; i++) {
            r[i].from = from[i];
            r[i].to = to[i];
            r[i].bit = (u32)__builtin_clzll(bits[i]);
        }
    }
}

/* Reads a stream to its end; false unless that is where its last symbol ends. */
static bool read_rest(BitReader r, const Code *code) {
    const u64 *table = code->tables + TABLE_SIZE;
    for (i64 rounds; (rounds = safe_rounds(&r)) > 0;) {
        u64 bits = load_bits(r.from, r.bit);
        for (; rounds; rounds--) {
            for (int i = 0; i < LOOKUPS_PER_LOAD; i++) look_up(&r.to, &bits, table);
            reload(&r.from, &bits);
        }
        r.bit = (u32)__builtin_clzll(bits);
    }
    while (r.to < r.to_end) {
        u32 bits = 0; /* zeros follow the end */
        i64 bytes = r.from_end - r.from;
        for (int i = 0; i < 3 && i < bytes; i++) bits |= (u32)r.from[i] << 8 * i;
        u8 symbol = (u8)(table[bits >> r.bit & (TABLE_SIZE - 1)] >> 8);
        r.bit += code->lengths[symbol];
        if (r.bit > 8 * bytes) return false;
        *r.to++ = symbol;
        r.from += r.bit >> 3;
        r.bit &= 7;
    }
    return r.from_end - r.from == (r.bit > 0);
}

/* Fills a plane; false, with anything in the plane, if these are not bytes that write_huffman writes. */
static OUTLINED bool read_huffman(const u8 *source, i64 source_size, Code *code, u8 *plane, i64 size) {
    i64 at = read_lengths(source, source_size, code);
    if (!at) return false;
    BitReader readers[STREAMS];
    i64 share = share_of(size), begin = at + 4 * STREAMS;
    for (int s = 0; s < STREAMS; s++) {
        i64 bytes = load32(source + at + 4 * s);
        if (bytes > source_size - begin) return false;
        u8 *to = plane + min(s * share, size), *to_end = plane + min((s + 1) * share, size);
        readers[s] = (BitReader){source + begin, source + begin + bytes, to, to_end, 0};
        begin += bytes;
    }
    if (begin != source_size) return false;
    make_table(code);
    for (int s = 0; s < STREAMS; s += AT_ONCE) read_four(readers + s, code->tables + TABLE_SIZE);
    for (int s = 0; s < STREAMS; s++)
        if (!read_rest(readers[s], code)) return false;
    return true;
}
