/* Steps of 16-bit floats of which many are not zero, by asymmetric numeral systems; docs/delta-codecs.md, "Tables".
 *
 * Duda, "Asymmetric numeral systems" (2013), with 16 states that take turns, so that no value waits for the one before it
 * (Giesen, "Interleaved entropy coders", 2014). A step has a symbol: one for each step near zero, one for half an octave
 * of the others, whose low bits are stored as they are. Each bucket of values has a table of weights of its own.
 *
 * Safe because: a table is as large as its index can be (12 bits of a slot, 4 of a bucket), weights are checked to add up
 * to 4096, which bounds a state below 2^32, and words and bits are compared with what is left before they are taken. */
#include "kernels.h"

enum { ANS_STATES = 16, WEIGHT_BITS = 12, WEIGHT_SUM = 1 << WEIGHT_BITS, MIN_STATE = 1 << 16 };
enum { NEAR_STEPS = 32, NEAR_BITS = 5, FIRST_FAR_SYMBOL = 2 * NEAR_STEPS - 1, FAR_MARK = 255, STEP_SYMBOLS = 108 };
enum { MAX_TABLES = 16, BIT_PADDING = 8 };

/* ---- symbols ---- */

/* Of each value its bucket << 8, and its symbol or FAR_MARK. */
static void mark_step_symbols(const u16 *restrict predicted, const u16 *restrict actual, const u8 *restrict which,
                         u16 *restrict symbols, i64 n) {
    for (i64 i = 0; i < n; i++) {
        u16 step = (u16)(actual[i] - predicted[i]), down = (u16)-(step >> 15);
        u16 size = (u16)((step ^ down) - down), is_up = (u16)((size != 0) & ~down & 1);
        u16 symbol = size < NEAR_STEPS ? (u16)(2 * size - is_up) : (u16)FAR_MARK;
        symbols[i] = (u16)(which[i] << 8 | symbol);
    }
}

/* The symbol of a step beyond the near ones; the caller stores the `octave` - 1 lowest bits of its size. */
INLINE u32 far_symbol(u32 size, int octave, bool is_up) {
    u32 kind = NEAR_STEPS + 2 * (u32)(octave - NEAR_BITS) + (size >> (octave - 1) & 1);
    return 2 * kind - is_up;
}

i64 API(count_step_symbols_scratch)(void) {
    return 2 * PIECE(MAX_TABLES * 256 * (i64)sizeof(u32));
}

/* Returns how many bits the far steps take. `bits` has 2 bytes for each value and 16 more: no step stores over 14 bits,
 * and each store puts 8 bytes. */
i64 API(count_step_symbols)(const u16 *predicted, const u16 *actual, const u8 *which, i64 n, u16 *symbols, u32 *counts,
                            i64 buckets, u8 *bits, i64 bits_size, u8 *scratch, i64 scratch_size) {
    if (!is_size(n) || buckets < 1 || buckets > MAX_TABLES || bits_size < 2 * n + 2 * BIT_PADDING)
        return BAD_SIZE;
    Scratch s = {scratch, scratch + scratch_size};
    i64 table = MAX_TABLES * 256 * (i64)sizeof(u32);
    u32 *even = take(&s, table), *odd = take(&s, table); /* two tables by turns: one would wait for its own sums */
    if (!even || !odd || !all_bytes_below(which, n, (u32)buckets)) return BAD_SIZE;
    memset(even, 0, (size_t)table), memset(odd, 0, (size_t)table);
    mark_step_symbols(predicted, actual, which, symbols, n);
    u64 word = 0, held = 0;
    i64 at = 0;
    for (i64 i = 0; i < n; i++) {
        u32 symbol = symbols[i];
        if ((symbol & 255) == FAR_MARK) {
            u16 step = (u16)(actual[i] - predicted[i]);
            bool down = step >> 15;
            u32 size = down ? 0x10000u - step : step;
            int octave = 31 - __builtin_clz(size), low = octave - 1;
            symbol = (symbol & 0xFF00) | far_symbol(size, octave, !down);
            symbols[i] = (u16)symbol;
            word |= (u64)(size & ((1u << low) - 1)) << held;
            held += (u64)low;
            store64(bits + at, word);
            at += (i64)(held >> 3), word >>= held & 56, held &= 7;
        }
        (i & 1 ? odd : even)[symbol]++;
    }
    for (i64 c = 0; c < buckets; c++)
        for (int y = 0; y < STEP_SYMBOLS; y++) counts[c * STEP_SYMBOLS + y] = even[c << 8 | y] + odd[c << 8 | y];
    return 8 * at + (i64)held;
}

/* ---- writing ---- */

/* A state s becomes s + bias + q * (WEIGHT_SUM - weight), where q = s / weight is a product with `inverse`: Giesen. */
typedef struct {
    u64 inverse;
    u32 bias, weight;
} StepCode;

static bool are_step_weights(const u32 *weights, i64 buckets) {
    for (i64 c = 0; c < buckets; c++) {
        u64 sum = 0;
        for (int y = 0; y < STEP_SYMBOLS; y++) sum += weights[c * STEP_SYMBOLS + y];
        if (sum != WEIGHT_SUM) return false;
    }
    return true;
}

i64 API(write_ans_steps_scratch)(void) {
    return PIECE(MAX_TABLES * 256 * (i64)sizeof(StepCode));
}

/* The quotient is exact: states are below 2^32 and weights at most 2^12, so an error of less than 1 in the inverse, which
 * is 2^64 / weight rounded up, adds less than 2^-32 to it. A weight of 1 has no such inverse: there q is s - 1, and the
 * bias makes up for it. */
static void fill_step_codes(StepCode *codes, const u32 *weights, i64 buckets) {
    memset(codes, 0, MAX_TABLES * 256 * sizeof(StepCode)); /* no value has a symbol without weight; were there one, it would do no harm */
    for (i64 c = 0; c < buckets; c++) {
        u32 begin = 0;
        for (int y = 0; y < STEP_SYMBOLS; y++) {
            u32 weight = weights[c * STEP_SYMBOLS + y];
            if (weight == 1) codes[c << 8 | y] = (StepCode){~(u64)0, begin + WEIGHT_SUM - 1, 1};
            else if (weight) codes[c << 8 | y] = (StepCode){~(u64)0 / weight + 1, begin, weight};
            begin += weight;
        }
    }
}

/* Fills states and, from their end on, words; returns the place of the first. There is room for n + 1 words. */
i64 API(write_ans_steps)(const u16 *symbols, i64 n, const u32 *weights, i64 buckets, u32 *states, u16 *words,
                         i64 room, u8 *scratch, i64 scratch_size) {
    if (!is_size(n) || buckets < 1 || buckets > MAX_TABLES || room < n + 1) return BAD_SIZE;
    Scratch s = {scratch, scratch + scratch_size};
    StepCode *codes = take(&s, MAX_TABLES * 256 * (i64)sizeof(StepCode));
    if (!codes || !are_step_weights(weights, buckets)) return BAD_SIZE;
    fill_step_codes(codes, weights, buckets);
    u32 held[ANS_STATES];
    for (int j = 0; j < ANS_STATES; j++) held[j] = MIN_STATE;
    u16 *at = words + room - 1; /* goes down once a value at most, so not below the first */
    for (i64 i = n - 1; i >= 0; i--) {
        const StepCode *code = codes + (symbols[i] & (MAX_TABLES * 256 - 1));
        u32 state = held[i & (ANS_STATES - 1)];
        *at = (u16)state;
        bool is_full = state >= (u64)code->weight << 20;
        at -= is_full;
        state >>= is_full ? 16 : 0;
        u32 q = (u32)((unsigned __int128)state * code->inverse >> 64);
        held[i & (ANS_STATES - 1)] = state + code->bias + q * (WEIGHT_SUM - code->weight);
    }
    memcpy(states, held, sizeof held);
    return at + 1 - words;
}

/* ---- reading ---- */

/* For each bucket and slot: the symbol, its weight less one << 8, the slot's place in it << 20. */
static void fill_step_slots(u32 *slots, const u32 *weights, i64 buckets) {
    for (i64 k = 0; k < buckets * STEP_SYMBOLS; k++) {
        u32 entry = (u32)(k % STEP_SYMBOLS) | (weights[k] - 1) << 8;
        for (u32 place = 0; place < weights[k]; place++) *slots++ = entry | place << 20;
    }
}

/* The state below MIN_STATE takes a word. What is returned is less than 2^32: weight * (state >> 12) + place. */
INLINE u32 next_step_symbol(u32 *state, const u32 *slots, u8 *symbol) {
    u32 entry = slots[*state & (WEIGHT_SUM - 1)], rest = *state >> WEIGHT_BITS;
    *symbol = (u8)entry;
    return *state = (entry >> 8 & (WEIGHT_SUM - 1)) * rest + rest + (entry >> 20);
}

static bool read_step_symbols(const u8 *which, i64 n, const u32 *slots, const u32 *states, const u16 *words, i64 word_count,
                         u8 *symbols) {
    u32 held[ANS_STATES];
    memcpy(held, states, sizeof held);
    const u16 *at = words, *end = words + word_count;
    i64 i = 0;
    for (; i + ANS_STATES <= n && end - at >= ANS_STATES; i += ANS_STATES) /* each of these has a word to take */
        for (int j = 0; j < ANS_STATES; j++) {
            u32 state = next_step_symbol(held + j, slots + ((i64)which[i + j] << WEIGHT_BITS), symbols + i + j);
            bool is_empty = state < MIN_STATE;
            held[j] = is_empty ? state << 16 | *at : state;
            at += is_empty;
        }
    for (; i < n; i++) {
        u32 *state = held + (i & (ANS_STATES - 1));
        if (next_step_symbol(state, slots + ((i64)which[i] << WEIGHT_BITS), symbols + i) < MIN_STATE) {
            if (at == end) return false;
            *state = *state << 16 | *at++;
        }
    }
    for (int j = 0; j < ANS_STATES; j++)
        if (held[j] != MIN_STATE) return false;
    return at == end;
}

static void add_near_steps(const u16 *restrict predicted, const u8 *restrict symbols, u16 *restrict out, i64 n) {
    for (i64 i = 0; i < n; i++) {
        u16 kind = (u16)((symbols[i] + 1) >> 1), down = (u16)((symbols[i] & 1) - 1);
        out[i] = (u16)(predicted[i] + (u16)((kind ^ down) - down));
    }
}

/* Puts the far steps in their places. False if they take more bits than there are, or fewer. */
static bool add_far_steps(const u16 *predicted, const u8 *symbols, const u8 *bits, i64 bits_size, u16 *out, i64 n) {
    i64 bit = 0;
    for (i64 i = 0; i < n; i++) {
        if (symbols[i] < FIRST_FAR_SYMBOL) continue;
        u32 kind = (symbols[i] + 1u) >> 1;
        int low = NEAR_BITS + (int)((kind - NEAR_STEPS) >> 1) - 1;
        if ((bit >> 3) + BIT_PADDING > bits_size) return false;
        u32 rest = (u32)(load64(bits + (bit >> 3)) >> (bit & 7)) & ((1u << low) - 1);
        u32 size = (2 | (kind & 1)) << low | rest;
        out[i] = (u16)(symbols[i] & 1 ? predicted[i] + size : predicted[i] - size);
        bit += low;
    }
    return ((bit + 7) >> 3) + BIT_PADDING == bits_size;
}

i64 API(read_ans_steps_scratch)(i64 n) {
    return is_size(n) ? PIECE(MAX_TABLES * WEIGHT_SUM * (i64)sizeof(u32)) + PIECE(n) : BAD_SIZE;
}

i64 API(read_ans_steps)(const u16 *predicted, const u8 *which, i64 n, const u32 *weights, i64 buckets,
                        const u32 *states, const u16 *words, i64 word_count, const u8 *bits, i64 bits_size,
                        u16 *out, u8 *scratch, i64 scratch_size) {
    if (!is_size(n) || buckets < 1 || buckets > MAX_TABLES || word_count < 0 || bits_size < 0)
        return BAD_SIZE;
    Scratch s = {scratch, scratch + scratch_size};
    u32 *slots = take(&s, MAX_TABLES * WEIGHT_SUM * (i64)sizeof(u32));
    u8 *symbols = take(&s, n);
    if (!slots || !symbols || !all_bytes_below(which, n, (u32)buckets) || !are_step_weights(weights, buckets)) return BAD_SIZE;
    fill_step_slots(slots, weights, buckets);
    if (!read_step_symbols(which, n, slots, states, words, word_count, symbols)) return 0;
    add_near_steps(predicted, symbols, out, n);
    return add_far_steps(predicted, symbols, bits, bits_size, out, n);
}
