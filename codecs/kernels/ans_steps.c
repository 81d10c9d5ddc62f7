/* Steps of 16-bit floats of which many are not zero, by asymmetric numeral systems; docs/delta-codecs.md, "ANS steps".
 *
 * Duda, "Asymmetric numeral systems" (2013), with 16 states in turn, so that no value waits for the one before it
 * (Giesen, "Interleaved entropy coders", 2014). A step has a symbol: one for each step near zero, one for half an octave
 * of the others, whose low bits are stored as they are. Each bucket of values has its own table of weights.
 *
 * Memory safety: a table is as large as its index can be (12 bits of a slot, 4 of a bucket), weights are checked to add up
 * to 4096, which bounds a state below 2^32, and words and bits are compared with the remaining ones before they are read. */
#include "kernels.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { ANS_STATES = 16, WEIGHT_BITS = 12, WEIGHT_SUM = 1 << WEIGHT_BITS, MIN_STATE = 1 << 16 };
enum { NEAR_STEPS = 32, NEAR_BITS = 5, FIRST_FAR_SYMBOL = 2 * NEAR_STEPS - 1, FAR_MARK = 255, STEP_SYMBOLS = 108 };
enum { MAX_TABLES = 16, BIT_PADDING = 8, STEP_BLOCK = 1024 };

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

/* The places in a block whose symbols are at least `least`: nobody can foresee these, so there is no branch. `low_byte` is
 * that of a symbol in the element. Returns how many there are. */
#define FIND_FAR(name, type)                                                       \
    static int name(const type *restrict symbols, u32 least, u16 *restrict places, int n) { \
        int count = 0;                                                             \
        for (int i = 0; i < n; i++) {                                              \
            places[count] = (u16)i;                                                \
            count += (symbols[i] & 255u) >= least;                                 \
        }                                                                          \
        return count;                                                              \
    }
FIND_FAR(find_far_symbols, u8)
FIND_FAR(find_far_marks, u16)

/* The symbol of a step beyond the near ones; the `octave` - 1 lowest bits of its size are stored. */
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
    if (!is_size(n) || buckets < 1 || buckets > MAX_TABLES || bits_size < 2 * n + 2 * BIT_PADDING) return BAD_SIZE;
    Scratch s = {scratch, scratch + scratch_size};
    i64 table = MAX_TABLES * 256 * (i64)sizeof(u32);
    u32 *even = take(&s, table), *odd = take(&s, table); /* two tables by turns: one would wait for its own sums */
    if (!even || !odd || !all_bytes_below(which, n, (u32)buckets)) return BAD_SIZE;
    memset(even, 0, (size_t)table), memset(odd, 0, (size_t)table);
    u16 places[STEP_BLOCK];
    BitPacker w = {bits, 0, 0};
    for (i64 start = 0; start < n; start += STEP_BLOCK) {
        int size = (int)min(n - start, (i64)STEP_BLOCK), i = 0;
        u16 *block = symbols + start;
        mark_step_symbols(predicted + start, actual + start, which + start, block, size);
        int far = find_far_marks(block, FAR_MARK, places, size);
        for (int k = 0; k < far; k++) {
            u16 step = (u16)(actual[start + places[k]] - predicted[start + places[k]]);
            bool down = step >> 15;
            u32 magnitude = down ? 0x10000u - step : step;
            int octave = 31 - __builtin_clz(magnitude);
            block[places[k]] = (u16)((block[places[k]] & 0xFF00) | far_symbol(magnitude, octave, !down));
            pack_bits(&w, magnitude & ((1u << (octave - 1)) - 1), (u64)octave - 1);
        }
        for (; i + 2 <= size; i += 2) even[block[i]]++, odd[block[i + 1]]++;
        if (i < size) even[block[i]]++;
    }
    for (i64 c = 0; c < buckets; c++)
        for (int y = 0; y < STEP_SYMBOLS; y++) counts[c * STEP_SYMBOLS + y] = even[c << 8 | y] + odd[c << 8 | y];
    return 8 * (w.at - bits) + (i64)w.held;
}

/* ---- writing ---- */

/* A state s becomes s + bias + q * rest, where q = s / weight is a product with `inverse`, and rest is WEIGHT_SUM - weight:
 * Giesen, "rANS with static probability distributions" (2014). A state above `most` stores a word first. */
typedef struct {
    u64 inverse;
    u32 most;
    u16 bias, rest;
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
    memset(codes, 0, MAX_TABLES * 256 * sizeof(StepCode)); /* a symbol without weight does not occur, or does no harm */
    for (i64 c = 0; c < buckets; c++) {
        u32 begin = 0;
        for (int y = 0; y < STEP_SYMBOLS; y++) {
            u32 weight = weights[c * STEP_SYMBOLS + y];
            StepCode *code = codes + (c << 8 | y);
            if (weight) {
                code->inverse = weight == 1 ? ~(u64)0 : ~(u64)0 / weight + 1;
                code->bias = (u16)(weight == 1 ? begin + WEIGHT_SUM - 1 : begin);
                code->rest = (u16)(WEIGHT_SUM - weight);
                code->most = (u32)(((u64)weight << 20) - 1);
            }
            begin += weight;
        }
    }
}

/* Stores a word, and keeps it if the state is full; returns where the next word goes. */
INLINE u16 *write_step_symbol(u32 *held, const StepCode *codes, u16 symbol, u16 *at) {
    const StepCode *code = codes + (symbol & (MAX_TABLES * 256 - 1));
    u32 state = *held, is_full = state > code->most;
    *at = (u16)state;
    state >>= is_full << 4;
    u32 quotient = (u32)((unsigned __int128)state * code->inverse >> 64);
    *held = state + code->bias + quotient * code->rest;
    return at - is_full;
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
    i64 i = n;
    while (i & (ANS_STATES - 1)) i--, at = write_step_symbol(held + (i & (ANS_STATES - 1)), codes, symbols[i], at);
    while (i) {
        i -= ANS_STATES;
        for (int j = ANS_STATES - 1; j >= 0; j--) at = write_step_symbol(held + j, codes, symbols[i + j], at);
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

/* Where the words of sixteen states that take turns are. */
typedef struct {
    u32 states[ANS_STATES];
    const u16 *words, *end;
} StepReader;

#ifdef __AVX2__
/* For each set of empty states among eight, which of the next words each takes. */
static void fill_word_order(u8 order[256][8]) {
    for (int empty = 0; empty < 256; empty++)
        for (int j = 0, word = 0; j < 8; j++) {
            order[empty][j] = (u8)word;
            word += empty >> j & 1;
        }
}

/* The symbols of eight states, one in each element; at least eight words are left. */
INLINE __m256i next_eight_symbols(__m256i *states, const u8 *which, const u32 *slots, u8 order[256][8], const u16 **words) {
    const __m256i low12 = _mm256_set1_epi32(WEIGHT_SUM - 1);
    __m256i table = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)which)), WEIGHT_BITS);
    __m256i slot = _mm256_or_si256(table, _mm256_and_si256(*states, low12));
    __m256i entry = _mm256_i32gather_epi32((const int *)slots, slot, 4), rest = _mm256_srli_epi32(*states, WEIGHT_BITS);
    __m256i weight_less_one = _mm256_and_si256(_mm256_srli_epi32(entry, 8), low12);
    __m256i next = _mm256_add_epi32(_mm256_mullo_epi32(weight_less_one, rest), rest);
    next = _mm256_add_epi32(next, _mm256_srli_epi32(entry, 20));
    __m256i is_empty = _mm256_cmpeq_epi32(_mm256_srli_epi32(next, 16), _mm256_setzero_si256());
    int empty = _mm256_movemask_ps(_mm256_castsi256_ps(is_empty));
    __m256i taken = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)*words));
    taken = _mm256_permutevar8x32_epi32(taken, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)order[empty])));
    __m256i filled = _mm256_or_si256(_mm256_slli_epi32(next, 16), taken);
    *states = _mm256_blendv_epi8(next, filled, is_empty);
    *words += __builtin_popcount((unsigned)empty);
    return _mm256_and_si256(entry, _mm256_set1_epi32(255));
}

/* Whole turns, while there are as many words as they may take. Returns how many values there are in them. */
static i64 read_step_turns(StepReader *r, const u8 *which, i64 n, const u32 *slots, u8 *symbols) {
    u8 order[256][8];
    fill_word_order(order);
    __m256i low = _mm256_loadu_si256((const __m256i *)r->states), high = _mm256_loadu_si256((const __m256i *)(r->states + 8));
    const u16 *words = r->words;
    i64 i = 0;
    for (; i + ANS_STATES <= n && r->end - words >= ANS_STATES; i += ANS_STATES) {
        __m256i first = next_eight_symbols(&low, which + i, slots, order, &words);
        __m256i second = next_eight_symbols(&high, which + i + 8, slots, order, &words);
        /* Packing leaves the halves of 128 bits interleaved: elements 0-3 8-11 4-7 12-15. */
        __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);
        __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        _mm_storeu_si128((__m128i *)(symbols + i), bytes);
    }
    _mm256_storeu_si256((__m256i *)r->states, low), _mm256_storeu_si256((__m256i *)(r->states + 8), high);
    r->words = words;
    return i;
}
#else
static i64 read_step_turns(StepReader *r, const u8 *which, i64 n, const u32 *slots, u8 *symbols) {
    const u16 *words = r->words;
    i64 i = 0;
    for (; i + ANS_STATES <= n && r->end - words >= ANS_STATES; i += ANS_STATES)
        for (int j = 0; j < ANS_STATES; j++) {
            u32 state = next_step_symbol(r->states + j, slots + ((i64)which[i + j] << WEIGHT_BITS), symbols + i + j);
            u32 is_empty = state < MIN_STATE; /* as often as not, so there is no branch */
            r->states[j] = state << (is_empty << 4) | (*words & -is_empty);
            words += is_empty;
        }
    r->words = words;
    return i;
}
#endif

static bool read_step_symbols(const u8 *which, i64 n, const u32 *slots, const u32 *states, const u16 *words, i64 word_count,
                              u8 *symbols) {
    StepReader r = {.words = words, .end = words + word_count};
    memcpy(r.states, states, sizeof r.states);
    for (i64 i = read_step_turns(&r, which, n, slots, symbols); i < n; i++) {
        u32 *state = r.states + (i & (ANS_STATES - 1));
        if (next_step_symbol(state, slots + ((i64)which[i] << WEIGHT_BITS), symbols + i) < MIN_STATE) {
            if (r.words == r.end) return false;
            *state = *state << 16 | *r.words++;
        }
    }
    for (int j = 0; j < ANS_STATES; j++)
        if (r.states[j] != MIN_STATE) return false;
    return r.words == r.end;
}

static void add_near_steps(const u16 *restrict predicted, const u8 *restrict symbols, u16 *restrict out, i64 n) {
    for (i64 i = 0; i < n; i++) {
        u16 kind = (u16)((symbols[i] + 1) >> 1), down = (u16)((symbols[i] & 1) - 1);
        out[i] = (u16)(predicted[i] + (u16)((kind ^ down) - down));
    }
}

/* Puts the far steps in their places. False if they take more bits than there are, or fewer. */
static bool add_far_steps(const u16 *predicted, const u8 *symbols, const u8 *bits, i64 bits_size, u16 *out, i64 n) {
    u16 places[STEP_BLOCK];
    i64 bit = 0;
    for (i64 start = 0; start < n; start += STEP_BLOCK) {
        int size = (int)min(n - start, (i64)STEP_BLOCK);
        int far = find_far_symbols(symbols + start, FIRST_FAR_SYMBOL, places, size);
        for (int k = 0; k < far; k++) {
            i64 i = start + places[k];
            u32 kind = (symbols[i] + 1u) >> 1;
            int low = NEAR_BITS + (int)((kind - NEAR_STEPS) >> 1) - 1;
            if ((bit >> 3) + BIT_PADDING > bits_size) return false;
            u32 rest = (u32)(load64(bits + (bit >> 3)) >> (bit & 7)) & ((1u << low) - 1);
            u32 magnitude = (2 | (kind & 1)) << low | rest;
            out[i] = (u16)(symbols[i] & 1 ? predicted[i] + magnitude : predicted[i] - magnitude);
            bit += low;
        }
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
