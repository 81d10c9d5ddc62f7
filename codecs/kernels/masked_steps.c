/* Steps of 16-bit floats of which few are not zero, class by class; docs/delta-codecs.md, "Masked steps".
 *
 * A value's class follows from its exponent before. The gaps between the changes of a class, and the sizes of its steps, are
 * symbols of asymmetric numeral systems (Duda, arXiv 1311.2540) and raw bits. Each class is coded by itself, so its tables
 * stay in the first cache and no symbol waits for a search; only then blocks of 64 values become masks, by which gaps are
 * found and placed. Chances come from fixed families of distributions: a class states three small numbers.
 *
 * Memory safety: the counts of changes add up to n at most, which bounds the gaps and steps in scratch. Gaps end with one that
 * no class can reach, so that no change is placed past them. A symbol is masked before it is an index, the place of bits
 * is limited before each load, and before each change as many words are left as it can take. */
#include "kernels.h"

enum { CHANCE_SUM_BITS = 11, CHANCE_SUM = 1 << CHANCE_SUM_BITS, LOWEST_STATE = 1 << 16 };
/* Symbols of gaps: 0 to 19 are themselves; then octaves, of which the first has four gaps and each other twice as many. */
enum { GAP_FAMILY = 20, GAP_SYMBOLS = 32, GAP_OCTAVES = 20, GAP_RAW_BITS = 2, MAX_QUOTIENT = 16 + (4 << (GAP_SYMBOLS - GAP_OCTAVES)) };
/* Symbols of sizes: 1, 2, 3; then half octaves up to 63; then all larger ones. */
enum { SIZE_FAMILY = 16, SIZE_SYMBOLS = 12, SIZE_ROW = 16, LARGE_SIZE = 64, LARGE_BITS = 15 };
/* What another member of the family of sizes than that of the class before costs. */
enum { COST_UNIT = 256, SIZES_COST = 4 * COST_UNIT };
/* A scale below FIRST_SHIFTED is a member of the family of gaps; the last SHIFTED members are used with shifts. */
enum { SHIFTED = 5, FIRST_SHIFTED = GAP_FAMILY, MAX_GAP_SHIFT = 20, MAX_SCALE = FIRST_SHIFTED + SHIFTED * MAX_GAP_SHIFT - 1 };
enum { TAIL_BITS = 30 };
/* Before the words are at least WORDS_START bytes: two changes take up to MOST_WORDS bytes of words. */
enum { STEPS_HEAD = 1, WORDS_START = 9, STATES_SIZE = 8, MOST_WORDS = 8 };
enum { MOST_ONES = 12, FAR_BITS = 30, SCALE_LOW_BITS = 1, FEW_UNCHANGED = 9 };
#define UNREACHED ((u32)1 << 30)

/* How much less likely each gap is than the one before: in 2^-16. */
static const u16 GAP_RATIOS[GAP_FAMILY] = {969,   3121,  7022,  11818, 16991, 21324, 24310, 27455, 30704, 33994,
                                           37259, 40436, 43468, 46307, 48921, 51289, 52774, 54139, 55386, 56519};
/* Weights of sizes: a step is an update in units of the last place, rounded up or down by chance. Updates of the first seven
 * members are spread evenly up to a largest one of 1.2 to 8 units; those of the others are normal, with deviations of 0.3 to
 * 80 units. Both rise by equal factors. */
static const u16 SIZE_WEIGHTS[SIZE_FAMILY][SIZE_SYMBOLS] = {
    {1980, 58, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
    {1665, 373, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
    {1157, 844, 38, 1, 1, 1, 1, 1, 1, 1, 1, 1},
    {782, 788, 467, 3, 1, 1, 1, 1, 1, 1, 1, 1},
    {539, 546, 546, 409, 1, 1, 1, 1, 1, 1, 1, 1},
    {384, 384, 384, 757, 132, 1, 1, 1, 1, 1, 1, 1},
    {273, 273, 273, 541, 546, 136, 1, 1, 1, 1, 1, 1},
    {2037, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
    {1930, 108, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
    {1361, 547, 118, 14, 1, 1, 1, 1, 1, 1, 1, 1},
    {723, 568, 377, 314, 55, 5, 1, 1, 1, 1, 1, 1},
    {354, 333, 300, 473, 303, 239, 39, 3, 1, 1, 1, 1},
    {171, 169, 164, 311, 277, 437, 272, 210, 33, 2, 1, 1},
    {84, 83, 83, 164, 159, 299, 266, 421, 258, 198, 31, 2},
    {41, 41, 41, 82, 81, 161, 156, 293, 261, 411, 252, 228},
    {20, 20, 20, 40, 40, 81, 80, 159, 154, 290, 257, 887},
};
static const u8 SIZE_BASES[SIZE_ROW] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, LARGE_SIZE};
static const u8 SIZE_BITS[SIZE_ROW] = {0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, LARGE_BITS};

/* A state s becomes s + bias + q * rest, where q = s / weight is a product with `inverse`. A state above `most` stores a word
 * first. fill_step_codes explains why the quotient is exact. */
typedef struct {
    u64 inverse;
    u32 most;
    u16 bias, rest;
} ChanceCode;

/* What one call of fill_masked_tables makes of the weights, for all others. A slot: the symbol, its weight less one << 8, the
 * slot's place in it << 20. Costs: a bit has COST_UNIT. */
typedef struct {
    u32 gap_slots[GAP_FAMILY][CHANCE_SUM], size_slots[SIZE_FAMILY][CHANCE_SUM];
    ChanceCode gap_codes[GAP_FAMILY][GAP_SYMBOLS], size_codes[SIZE_FAMILY][SIZE_ROW];
    u16 size_costs[SIZE_FAMILY][SIZE_ROW];
} MaskedTables;

INLINE u32 gap_octave_base(int octave) { return GAP_OCTAVES - 4 + (4u << octave); }

static void fill_chances(const u32 *weights, int symbols, u32 *slots, ChanceCode *codes) {
    u32 begin = 0;
    for (int y = 0; y < symbols; y++) {
        u32 weight = weights[y];
        codes[y].inverse = weight == 1 ? ~(u64)0 : ~(u64)0 / weight + 1;
        codes[y].bias = (u16)(weight == 1 ? begin + CHANCE_SUM - 1 : begin);
        codes[y].rest = (u16)(CHANCE_SUM - weight);
        codes[y].most = (u32)(((u64)weight << (32 - CHANCE_SUM_BITS)) - 1);
        for (u32 place = 0; place < weight; place++) slots[begin + place] = (u32)y | (weight - 1) << 8 | place << 20;
        begin += weight;
    }
}

/* How many of COST_UNIT a weight takes: it is multiplied by 2^(1/COST_UNIT) until it reaches the sum. */
static u16 cost_of_weight(u32 weight) {
    u64 scaled = (u64)weight << 20;
    u16 cost = 0;
    for (; scaled < (u64)CHANCE_SUM << 20; cost++) scaled += scaled * 178 >> 16;
    return cost;
}

/* Weights of the symbols of gaps, which begin at `bases`, where each number is `ratio` / 2^16 as likely as the one before. */
static void weigh_gaps(u32 ratio, const u32 *bases, u32 *weights) {
    u64 tail = (u64)1 << TAIL_BITS;
    u32 number = 0, left = CHANCE_SUM;
    int most = 0;
    for (int y = 0; y < GAP_SYMBOLS; y++) {
        u64 from = tail;
        if (y + 1 == GAP_SYMBOLS) tail = 0;
        else
            for (; number < bases[y + 1] && tail; number++) tail = tail * ratio >> 16;
        number = y + 1 == GAP_SYMBOLS ? number : bases[y + 1];
        u32 weight = (u32)((from - tail) >> (TAIL_BITS - CHANCE_SUM_BITS));
        weights[y] = max(weight, 1u);
        left -= weights[y];
        most = weights[y] > weights[most] ? y : most;
    }
    weights[most] += left; /* modulo 2^32: it may be less than nothing */
}

i64 API(fill_masked_tables)(u8 *out, i64 room) {
    if (!is_size(room)) return BAD_SIZE;
    if (room < (i64)sizeof(MaskedTables)) return (i64)sizeof(MaskedTables);
    MaskedTables *tables = (MaskedTables *)out;
    u32 bases[GAP_SYMBOLS], weights[GAP_SYMBOLS];
    memset(out, 0, sizeof *tables);
    for (int y = 0; y < GAP_SYMBOLS; y++) bases[y] = y < GAP_OCTAVES ? (u32)y : gap_octave_base(y - GAP_OCTAVES);
    for (int j = 0; j < GAP_FAMILY; j++) {
        weigh_gaps(GAP_RATIOS[j], bases, weights);
        fill_chances(weights, GAP_SYMBOLS, tables->gap_slots[j], tables->gap_codes[j]);
    }
    for (int j = 0; j < SIZE_FAMILY; j++) {
        for (int y = 0; y < SIZE_SYMBOLS; y++) weights[y] = SIZE_WEIGHTS[j][y];
        fill_chances(weights, SIZE_SYMBOLS, tables->size_slots[j], tables->size_codes[j]);
        for (int y = 0; y < SIZE_SYMBOLS; y++) tables->size_costs[j][y] = cost_of_weight(weights[y]);
    }
    return (i64)sizeof *tables;
}

/* The tables that fill_masked_tables has filled; NULL if there cannot be any. */
INLINE const MaskedTables *masked_tables(const u8 *tables, i64 size) {
    return !is_size(size) || size < (i64)sizeof(MaskedTables) ? NULL : (const MaskedTables *)tables;
}

INLINE int bit_length(u64 number) { return number ? 64 - __builtin_clzll(number) : 0; }

/* How the changes of a class are coded: how many there are, the scale of gaps, the member of the family of sizes. */
typedef struct {
    i64 count;
    int scale, sizes;
} ClassCode;

/* What the first class is compared with. */
#define FIRST_CLASS ((ClassCode){64, 0, SIZE_FAMILY - 1})

/* The raw bits of each gap, and the member of the family of gaps. */
INLINE int shift_of_scale(int scale) { return scale < FIRST_SHIFTED ? 0 : (scale - FIRST_SHIFTED) / SHIFTED + 1; }
INLINE int gaps_of_scale(int scale) { return scale - SHIFTED * shift_of_scale(scale); }

/* ---- writing ---- */

/* An eighth of the values may change, and 64 more. */
INLINE i64 most_changes(i64 n) { return n / 8 + MASKED; }

/* Values of a class so far are those in `seen` and those in its lane of `recent`. */
typedef struct {
    i64 room, total, counts[CLASSES];
    u64 recent[COUNT_WORDS];
    u32 seen[CLASSES], next[CLASSES]; /* and those up to the class's last change */
    u32 *gaps[CLASSES];               /* `room` of each class */
    u16 *steps[CLASSES];
} ChangeFinder;

INLINE void find_block_changes(ChangeFinder *f, const u16 *before, const u16 *after, u64 changed, const ClassBlock *block,
                               ClassRule rule) {
    if (changed) {
        u64 masks[CLASSES];
        masks_of_planes(block->planes, masks);
        for (; changed; changed &= changed - 1) {
            int i = __builtin_ctzll(changed), c = class_of(before[i], rule);
            u32 rank = (u32)count_bits(masks[c] & ((changed & -changed) - 1)), ordinal = f->seen[c] + lane_of(f->recent, c) + rank;
            i64 at = f->counts[c]++;
            f->gaps[c][at] = ordinal - f->next[c];
            f->steps[c][at] = (u16)(after[i] - before[i]);
            f->next[c] = ordinal + 1;
        }
    }
    for (int i = 0; i < COUNT_WORDS; i++) f->recent[i] += block->members[i];
}

/* False if there are more changes than `room`, which is compared before WORDS_AT_ONCE values; their number fits a lane. */
static bool find_changes(ChangeFinder *f, const u16 *before, const u16 *after, i64 n, ClassRule rule) {
    u16 old[MASKED], new[MASKED];
    for (i64 i = 0; i < n;) {
        ClassBlock blocks[BLOCKS_AT_ONCE];
        u64 changed[BLOCKS_AT_ONCE];
        const u16 *from = before + i, *to = after + i;
        int count = (int)min((n - i) / MASKED, (i64)BLOCKS_AT_ONCE);
        i64 found = 0, padding = count ? 0 : MASKED - (n - i);
        for (int c = 0; c < CLASSES; c++) found += f->counts[c];
        if (f->room - found < (count ? count : 1) * MASKED) return false;
        if (!count) {
            pad_block(from, n - i, old);
            pad_block(to, n - i, new);
            from = old, to = new, count = 1;
        }
        for (int b = 0; b < count; b++) changed[b] = changed_mask(from + b * MASKED, to + b * MASKED);
        look_at_blocks(from, count, rule, blocks);
        drop_padding(blocks, padding, rule);
        for (int b = 0; b < count; b++) find_block_changes(f, from + b * MASKED, to + b * MASKED, changed[b], blocks + b, rule);
        for (int c = 0; c < CLASSES; c++) f->seen[c] += lane_of(f->recent, c);
        memset(f->recent, 0, sizeof f->recent);
        i += count * MASKED;
    }
    for (int c = 0; c < CLASSES; c++) f->total += f->counts[c];
    return f->total <= most_changes(n);
}

/* The least exponent: one of 200 values of a sample has an exponent beyond those of the classes. */
static ClassRule choose_classes(const u16 *words, i64 n, int mantissa_bits) {
    u32 counts[256] = {0}, above = 0, taken = 0;
    i64 stride = max(n / 16, (i64)MASKED);
    for (i64 start = 0; start < n; start += stride)
        for (i64 i = start; i < min(start + MASKED, n); i++, taken++) counts[(words[i] & 0x7FFF) >> mantissa_bits]++;
    int highest = 255;
    while (highest > 0 && above + counts[highest] <= taken / 200) above += counts[highest--];
    return (ClassRule){mantissa_bits, max(highest - (CLASSES - 1), 0), CLASSES - 1};
}

INLINE u32 size_of_step(u16 step) { return step >> 15 ? 0x10000u - step : step; }

INLINE u32 size_symbol(u32 size) {
    if (size < 4) return size - 1;
    if (size >= LARGE_SIZE) return SIZE_SYMBOLS - 1;
    int octave = 31 - __builtin_clz(size);
    return (u32)(2 * octave - 1) + (size >> (octave - 1) & 1);
}

/* The member of the family of gaps by the mean of the quotients. */
static int nearest_gaps(u64 quotients, u64 count) {
    i32 ratio = (i32)((quotients << 16) / (quotients + count)), best = 0, nearest = CHANCE_SUM << 16;
    for (int j = 0; j < GAP_FAMILY; j++) {
        i32 off = ratio > GAP_RATIOS[j] ? ratio - GAP_RATIOS[j] : GAP_RATIOS[j] - ratio;
        if (off < nearest) nearest = off, best = j;
    }
    return best;
}

/* The symbol of a size replaces its step's place in `symbols`. `sizes`: those of the class before, which cost nothing. */
static ClassCode choose_class_code(const u32 *gaps, const u16 *steps, i64 count, int sizes, const MaskedTables *tables,
                                   u8 *symbols) {
    u64 sum = 0, quotients = 0;
    u32 most = 0, counts[SIZE_ROW] = {0};
    for (i64 i = 0; i < count; i++) sum += gaps[i], most = gaps[i] > most ? gaps[i] : most;
    int shift = max(bit_length(sum / (u64)count) - 3, 0);
    while (most >> shift >= MAX_QUOTIENT) shift++;
    shift = min(shift, MAX_GAP_SHIFT);
    for (i64 i = 0; i < count; i++) quotients += gaps[i] >> shift;
    for (i64 i = 0; i < count; i++) counts[symbols[i] = (u8)size_symbol(size_of_step(steps[i]))]++;
    int member = nearest_gaps(quotients, (u64)count);
    ClassCode code = {count, SHIFTED * shift + (shift ? max(member, FIRST_SHIFTED - SHIFTED) : member), 0};
    u64 least = ~(u64)0;
    for (int j = 0; j < SIZE_FAMILY; j++) {
        u64 cost = j == sizes ? 0 : SIZES_COST;
        for (int y = 0; y < SIZE_SYMBOLS; y++) cost += (u64)counts[y] * tables->size_costs[j][y];
        if (cost < least) least = cost, code.sizes = j;
    }
    return code;
}

/* A number that is close to another one: twice the difference, less 1 if it is below, as a Rice code of `low` raw bits. */
static void pack_near(BitPacker *w, i64 number, i64 expected, int low) {
    u64 off = number < expected ? (u64)(2 * (expected - number) - 1) : (u64)(2 * (number - expected)), ones = off >> low;
    if (ones < MOST_ONES) pack_bits(w, ((u64)1 << ones) - 1, ones + 1);
    else pack_bits(w, ((u64)1 << MOST_ONES) - 1, MOST_ONES), low = FAR_BITS;
    pack_bits(w, off & (((u64)1 << low) - 1), (u64)low);
}

INLINE int count_low_bits(i64 count) { return max(bit_length((u64)count) - 2, 0); }

/* The scale of gaps that is expected after another one: gaps double from exponent to exponent, unless most values change. */
INLINE int next_scale(int scale) { return scale < FEW_UNCHANGED ? scale + 2 : scale + SHIFTED; }

/* Of each class its count, the scale of its gaps and the member of the family of sizes. */
static void write_class_codes(BitPacker *w, const ClassCode codes[CLASSES]) {
    ClassCode last = FIRST_CLASS;
    for (int c = 0; c < CLASSES; c++) {
        const ClassCode *code = codes + c;
        pack_near(w, code->count, last.count, count_low_bits(last.count));
        last.count = code->count;
        if (!code->count) continue;
        pack_near(w, code->scale, next_scale(last.scale), SCALE_LOW_BITS);
        if (code->sizes == last.sizes) pack_bits(w, 0, 1);
        else pack_bits(w, 1 | (u64)code->sizes << 1, 5);
        last = *code;
    }
}

/* The raw bits of the changes of a class, in their order; fills the symbols of their gaps. */
static void write_class_bits(BitPacker *w, ClassCode code, const u32 *gaps, const u16 *steps, const u8 *sizes, u8 *symbols) {
    int shift = shift_of_scale(code.scale);
    u32 low_mask = ((u32)1 << shift) - 1;
    for (i64 i = 0; i < code.count; i++) {
        u32 quotient = gaps[i] >> shift, above = quotient - (GAP_OCTAVES - 4), gap_bits = 0;
        u64 size = size_of_step(steps[i]) - SIZE_BASES[sizes[i]], size_bits = SIZE_BITS[sizes[i]];
        u64 raw = steps[i] >> 15 | size << 1, bits = 1 + size_bits;
        symbols[i] = (u8)quotient;
        if (RARE(quotient >= GAP_OCTAVES)) {
            int octave = 31 - __builtin_clz(above) - GAP_RAW_BITS;
            symbols[i] = (u8)(GAP_OCTAVES + octave);
            gap_bits = (u32)(octave + GAP_RAW_BITS);
            raw |= (u64)(above - (4u << octave)) << bits;
        }
        bits += gap_bits;
        pack_bits(w, raw | (u64)(gaps[i] & low_mask) << bits, bits + (u64)shift);
    }
}

/* Stores a word, and keeps it if the state is full; returns where the next word goes. */
INLINE u16 *write_chance(u32 *held, const ChanceCode *code, u16 *at) {
    u32 state = *held, is_full = state > code->most;
    *at = (u16)state;
    state >>= is_full << 4;
    u32 quotient = (u32)((unsigned __int128)state * code->inverse >> 64);
    *held = state + code->bias + quotient * code->rest;
    return at + is_full;
}

/* From the last change to the first, since a reader takes the words from the last to the first. */
static u16 *write_class_words(u32 states[2], ClassCode code, const u8 *gap_symbols, const u8 *size_symbols,
                              const MaskedTables *tables, u16 *at) {
    const ChanceCode *gaps = tables->gap_codes[gaps_of_scale(code.scale)], *sizes = tables->size_codes[code.sizes];
    u32 even = states[0], odd = states[1];
    i64 i = code.count;
    if (i & 1) {
        i--;
        at = write_chance(&even, sizes + size_symbols[i], at);
        at = write_chance(&even, gaps + gap_symbols[i], at);
    }
    while (i) {
        i -= 2;
        at = write_chance(&odd, sizes + size_symbols[i + 1], at);
        at = write_chance(&even, sizes + size_symbols[i], at);
        at = write_chance(&odd, gaps + gap_symbols[i + 1], at);
        at = write_chance(&even, gaps + gap_symbols[i], at);
    }
    states[0] = even, states[1] = odd;
    return at;
}

i64 API(write_masked_steps_scratch)(i64 n) {
    if (!is_size(n)) return BAD_SIZE;
    i64 room = most_changes(n) + WORDS_AT_ONCE;
    return CLASSES * (PIECE(4 * room) + PIECE(2 * room)) + 2 * PIECE(room) + PIECE(4 * room + 2);
}

i64 API(write_masked_steps)(const u16 *before, const u16 *after, i64 n, int mantissa_bits, const u8 *tables_data,
                            i64 tables_size, u8 *out, i64 room, u8 *scratch, i64 scratch_size) {
    const MaskedTables *tables = masked_tables(tables_data, tables_size);
    if (!is_size(n) || !is_class_rule(mantissa_bits, 0, CLASSES) || !tables || room < 2 * n + 1024) return BAD_SIZE;
    i64 most = most_changes(n) + WORDS_AT_ONCE;
    Scratch s = {scratch, scratch + scratch_size};
    ChangeFinder f = {.room = most};
    for (int c = 0; c < CLASSES; c++) f.gaps[c] = take(&s, 4 * most), f.steps[c] = take(&s, 2 * most);
    u8 *gap_symbols = take(&s, most), *size_symbols = take(&s, most);
    u16 *words = take(&s, 4 * most + 2), *word = words;
    if (!words || !gap_symbols || !size_symbols || !f.gaps[CLASSES - 1] || !f.steps[CLASSES - 1]) return BAD_SIZE;
    ClassRule rule = choose_classes(before, n, mantissa_bits);
    if (!find_changes(&f, before, after, n, rule)) return room + 1;
    if (!f.total) return 0;
    ClassCode codes[CLASSES] = {{0}};
    BitPacker w = {out + STEPS_HEAD, 0, 0};
    out[0] = (u8)rule.least;
    i64 starts[CLASSES], start = 0;
    int sizes = FIRST_CLASS.sizes;
    for (int c = 0; c < CLASSES; start += f.counts[c++]) {
        starts[c] = start;
        if (!f.counts[c]) continue;
        codes[c] = choose_class_code(f.gaps[c], f.steps[c], f.counts[c], sizes, tables, size_symbols + start);
        sizes = codes[c].sizes;
    }
    write_class_codes(&w, codes);
    for (int c = 0; c < CLASSES; c++)
        write_class_bits(&w, codes[c], f.gaps[c], f.steps[c], size_symbols + starts[c], gap_symbols + starts[c]);
    u32 states[2] = {LOWEST_STATE, LOWEST_STATE};
    for (int c = CLASSES - 1; c >= 0; c--)
        word = write_class_words(states, codes[c], gap_symbols + starts[c], size_symbols + starts[c], tables, word);
    u8 *at = w.at + (w.held > 0);
    while (at < out + WORDS_START) *at++ = 0;
    memcpy(at, words, (size_t)((u8 *)word - (u8 *)words));
    at += (u8 *)word - (u8 *)words;
    memcpy(at, states, STATES_SIZE);
    return at + STATES_SIZE - out;
}

/* ---- reading ---- */

typedef struct {
    const u8 *data, *words; /* the words that are left end here */
    i64 bit, last;          /* the next bit, and the last byte from which eight can be loaded */
    u32 states[2];
} ChangeReader;

INLINE u64 peek_bits(const ChangeReader *r) {
    i64 at = r->bit >> 3;
    return load64(r->data + (at < r->last ? at : r->last)) >> (r->bit & 7);
}

INLINE u32 take_bits(ChangeReader *r, int bits) {
    u32 number = (u32)(peek_bits(r) & (((u64)1 << bits) - 1));
    r->bit += bits;
    return number;
}

INLINE u32 read_chance(u32 *state, const u32 *slots, u32 symbols, const u8 **words) {
    u32 entry = slots[*state & (CHANCE_SUM - 1)], rest = *state >> CHANCE_SUM_BITS;
    u32 next = (entry >> 8 & 0xFFF) * rest + rest + (entry >> 20), is_empty = next < LOWEST_STATE;
    *words -= is_empty << 1;
    *state = next << (is_empty << 4) | (load16(*words) & -is_empty);
    return entry & (symbols - 1);
}

/* Undoes pack_near. What is damaged may be negative. */
static i64 take_near(ChangeReader *r, i64 expected, int low) {
    int ones = __builtin_ctz(~(u32)peek_bits(r) | 1u << MOST_ONES);
    r->bit += ones < MOST_ONES ? ones + 1 : MOST_ONES;
    if (ones == MOST_ONES) ones = 0, low = FAR_BITS;
    i64 off = (i64)ones << low | take_bits(r, low);
    return off & 1 ? expected - (off + 1) / 2 : expected + off / 2;
}

/* False if a number is impossible, or there are more changes than n, or none. */
static bool read_class_codes(ChangeReader *r, i64 n, ClassCode codes[CLASSES]) {
    ClassCode last = FIRST_CLASS;
    i64 total = 0;
    for (int c = 0; c < CLASSES; c++) {
        last.count = take_near(r, last.count, count_low_bits(last.count));
        total += last.count;
        if (last.count < 0 || total > n) return false;
        codes[c] = last;
        if (!last.count) continue;
        i64 scale = take_near(r, next_scale(last.scale), SCALE_LOW_BITS);
        if (scale < 0 || scale > MAX_SCALE) return false;
        last.scale = (int)scale;
        if (take_bits(r, 1)) last.sizes = (int)take_bits(r, 4);
        codes[c] = last;
    }
    return total > 0;
}

/* The bits of a change, after its symbols. */
INLINE void read_change_bits(ChangeReader *r, u32 quotient, u32 size, int shift, u32 *gap, u16 *step) {
    u64 raw = peek_bits(r);
    int bits = SIZE_BITS[size], gap_bits = 0;
    u16 down = (u16)-(raw & 1);
    raw >>= 1;
    u16 magnitude = (u16)(SIZE_BASES[size] + (raw & (((u64)1 << bits) - 1)));
    raw >>= bits;
    *step = (u16)((magnitude ^ down) - down);
    if (RARE(quotient >= GAP_OCTAVES)) {
        int octave = (int)quotient - GAP_OCTAVES;
        gap_bits = octave + GAP_RAW_BITS;
        quotient = gap_octave_base(octave) + (u32)(raw & (((u64)1 << gap_bits) - 1));
        raw >>= gap_bits;
    }
    u64 whole = (u64)quotient << shift | (raw & (((u64)1 << shift) - 1));
    *gap = whole < UNREACHED ? (u32)whole : UNREACHED - 1;
    r->bit += 1 + bits + gap_bits + shift;
}

/* Of each class, gaps and steps of its changes, and a gap that nothing reaches. False if there are too few words. */
static bool read_class_changes(ChangeReader *r, ClassCode code, const MaskedTables *tables, u32 *gaps, u16 *steps) {
    const u32 *gap_slots = tables->gap_slots[gaps_of_scale(code.scale)], *size_slots = tables->size_slots[code.sizes];
    u32 even = r->states[0], odd = r->states[1];
    int shift = shift_of_scale(code.scale);
    i64 i = 0;
    for (; i + 2 <= code.count; i += 2) {
        if (RARE(r->words - r->data < MOST_WORDS)) return false;
        u32 even_gap = read_chance(&even, gap_slots, GAP_SYMBOLS, &r->words);
        u32 odd_gap = read_chance(&odd, gap_slots, GAP_SYMBOLS, &r->words);
        u32 even_size = read_chance(&even, size_slots, SIZE_ROW, &r->words);
        u32 odd_size = read_chance(&odd, size_slots, SIZE_ROW, &r->words);
        read_change_bits(r, even_gap, even_size, shift, gaps + i, steps + i);
        read_change_bits(r, odd_gap, odd_size, shift, gaps + i + 1, steps + i + 1);
    }
    if (i < code.count) {
        if (RARE(r->words - r->data < MOST_WORDS)) return false;
        u32 gap = read_chance(&even, gap_slots, GAP_SYMBOLS, &r->words);
        u32 size = read_chance(&even, size_slots, SIZE_ROW, &r->words);
        read_change_bits(r, gap, size, shift, gaps + i, steps + i);
    }
    gaps[code.count] = UNREACHED;
    r->states[0] = even, r->states[1] = odd;
    return true;
}

/* Of each class, how many of its values come before its next change: in its lane of `near`, up to MAX_COUNT of them, and in
 * `beyond`; then the gap before that, the last gap, and the step. */
typedef struct {
    u64 near[COUNT_WORDS];
    u32 beyond[CLASSES];
    const u32 *gaps[CLASSES], *ends[CLASSES];
    const u16 *steps[CLASSES];
} ChangePlacer;

INLINE void set_left(ChangePlacer *p, int c, u32 left) {
    u64 near = left < MAX_COUNT ? left : MAX_COUNT;
    int shift = c % COUNT_LANES * COUNT_BITS;
    p->near[c / COUNT_LANES] = (p->near[c / COUNT_LANES] & ~((u64)0xFFFF << shift)) | near << shift;
    p->beyond[c] = left - (u32)near;
}

/* Changes the 64 values of a block in `out`, which may be `before`; returns the mask of their places. */
INLINE u64 place_block_changes(ChangePlacer *p, const u16 *before, const ClassBlock *block, u16 *out) {
    u64 left[COUNT_WORDS], masks[CLASSES], reached = 0, changed = 0;
    for (int i = 0; i < COUNT_WORDS; i++) {
        u64 rest = (p->near[i] | COUNT_TOPS) - block->members[i]; /* no lane borrows: a top is more than 64 */
        left[i] = p->near[i];
        p->near[i] = rest & ~COUNT_TOPS;
        reached |= (~rest & COUNT_TOPS) >> (COUNT_BITS - 1 - i);
    }
    if (!reached) return 0;
    masks_of_planes(block->planes, masks);
    for (; reached; reached &= reached - 1) {
        int bit = __builtin_ctzll(reached), c = bit % COUNT_BITS * COUNT_LANES + bit / COUNT_BITS;
        u32 count = lane_of(block->members, c), rank = lane_of(left, c) + p->beyond[c];
        for (; rank < count; rank += 1 + *++p->gaps[c]) {
            int place = place_of_rank(masks[c], rank);
            out[place] = (u16)(before[place] + *p->steps[c]++);
            changed |= (u64)1 << place;
        }
        set_left(p, c, rank - count);
    }
    return changed;
}

i64 API(read_masked_steps_scratch)(i64 n) {
    return is_size(n) ? PIECE(4 * (n + CLASSES)) + PIECE(2 * (n + CLASSES)) : BAD_SIZE;
}

/* Reads all changes; false if the bytes are damaged. `gaps` and `steps` have n + CLASSES elements. */
static bool read_changes(const u8 *data, i64 size, i64 n, const MaskedTables *tables, u32 *gaps, u16 *steps, ChangePlacer *p) {
    if (size < STEPS_HEAD + STATES_SIZE) return false;
    ChangeReader r = {.data = data, .words = data + size - STATES_SIZE, .bit = 8 * STEPS_HEAD, .last = size - 8};
    memcpy(r.states, r.words, STATES_SIZE);
    ClassCode codes[CLASSES] = {{0}};
    if (!read_class_codes(&r, n, codes)) return false;
    for (int c = 0; c < CLASSES; c++) {
        if (!read_class_changes(&r, codes[c], tables, gaps, steps)) return false;
        set_left(p, c, *gaps);
        p->gaps[c] = gaps, p->steps[c] = steps;
        gaps += codes[c].count, steps += codes[c].count;
        p->ends[c] = gaps++;
    }
    if (r.states[0] != LOWEST_STATE || r.states[1] != LOWEST_STATE) return false;
    i64 used = (r.bit + 7) >> 3, start = max(used, (i64)WORDS_START);
    if (start != r.words - data || (r.bit & 7 && data[used - 1] >> (r.bit & 7))) return false;
    for (; used < start; used++)
        if (data[used]) return false;
    return true;
}

INLINE bool has_placed_all(const ChangePlacer *p) {
    for (int c = 0; c < CLASSES; c++)
        if (p->gaps[c] != p->ends[c]) return false;
    return true;
}

i64 API(read_masked_steps)(const u8 *data, i64 size, const u16 *before, i64 n, int mantissa_bits, const u8 *tables_data,
                           i64 tables_size, u16 *out, u8 *scratch, i64 scratch_size) {
    const MaskedTables *tables = masked_tables(tables_data, tables_size);
    if (size < 0 || !is_size(n) || !is_class_rule(mantissa_bits, 0, CLASSES) || !tables) return BAD_SIZE;
    Scratch s = {scratch, scratch + scratch_size};
    u32 *gaps = take(&s, 4 * (n + CLASSES));
    u16 *steps = take(&s, 2 * (n + CLASSES));
    if (!gaps || !steps) return BAD_SIZE;
    ChangePlacer p = {.near = {0}};
    if (!read_changes(data, size, n, tables, gaps, steps, &p)) return 0;
    ClassRule rule = {mantissa_bits, data[0], CLASSES - 1};
    if (out != before && n) memcpy(out, before, (size_t)n * sizeof *out); /* faster than block by block beside the reads */
    for (i64 i = 0; i < n;) {
        ClassBlock blocks[BLOCKS_AT_ONCE];
        u16 padded[MASKED], *words = out + i;
        int count = (int)min((n - i) / MASKED, (i64)BLOCKS_AT_ONCE);
        i64 padding = count ? 0 : MASKED - (n - i);
        if (!count) pad_block(words, n - i, padded), words = padded, count = 1;
        look_at_blocks(words, count, rule, blocks);
        drop_padding(blocks, padding, rule);
        for (int b = 0; b < count; b++) place_block_changes(&p, words + b * MASKED, blocks + b, words + b * MASKED);
        if (words == padded) memcpy(out + i, padded, (size_t)(n - i) * sizeof *out);
        i += count * MASKED;
    }
    return has_placed_all(&p);
}

i64 API(list_masked_steps)(const u8 *data, i64 size, const u16 *before, i64 n, int mantissa_bits, const u8 *tables_data,
                           i64 tables_size, i64 *places, u16 *words, i64 room, u8 *scratch, i64 scratch_size) {
    const MaskedTables *tables = masked_tables(tables_data, tables_size);
    if (size < 0 || !is_size(n) || !is_class_rule(mantissa_bits, 0, CLASSES) || !tables || room < n) return BAD_SIZE;
    Scratch s = {scratch, scratch + scratch_size};
    u32 *gaps = take(&s, 4 * (n + CLASSES));
    u16 *steps = take(&s, 2 * (n + CLASSES));
    if (!gaps || !steps) return BAD_SIZE;
    ChangePlacer p = {.near = {0}};
    if (!read_changes(data, size, n, tables, gaps, steps, &p)) return 0;
    ClassRule rule = {mantissa_bits, data[0], CLASSES - 1};
    i64 count = 0;
    for (i64 i = 0; i < n;) {
        ClassBlock blocks[BLOCKS_AT_ONCE];
        u16 padded[MASKED], changed_words[MASKED];
        const u16 *from = before + i;
        int ready = (int)min((n - i) / MASKED, (i64)BLOCKS_AT_ONCE);
        i64 padding = ready ? 0 : MASKED - (n - i);
        if (!ready) pad_block(from, n - i, padded), from = padded, ready = 1;
        look_at_blocks(from, ready, rule, blocks);
        drop_padding(blocks, padding, rule);
        for (int b = 0; b < ready; b++, i += MASKED) {
            u64 changed = place_block_changes(&p, from + b * MASKED, blocks + b, changed_words);
            for (; changed; changed &= changed - 1) {
                int place = __builtin_ctzll(changed);
                places[count] = i + place;
                words[count++] = changed_words[place];
            }
        }
    }
    return has_placed_all(&p) ? count : 0;
}
