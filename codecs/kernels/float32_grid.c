/* Float32 words on a grid for each value; docs/delta-codecs.md, "Grids".
 *
 * The exponent of a grid's unit is a byte. A symbol says how many units a value is from its prediction; the bits of the
 * mantissa below a unit are stored as they are; of a value below one unit, a depth says how far below.
 *
 * A block of values goes through two passes: one computes on vectors, the other moves bits. The second takes eight values
 * at a time, and tests once if one of them is of a rare kind.
 *
 * Memory safety: shifts are masked; the bits have 8 bytes more than they need, so that each load and store is of a whole
 * word; depths and bits are compared with the remaining ones before they are read. */
#include "kernels.h"

enum { MANTISSA_BITS = 23, GRID_MIDDLE = 127, GRID_FARTHEST = 126, DEPTH_PLUS_ZERO = 255, DEPTH_MINUS_ZERO = 254 };
/* What a value leaves: up to 23 bits; or FAR_WORD, all of its bits; or, with HAS_DEPTH added, sign and mantissa or nothing. */
enum { FAR_WORD = 32, HAS_DEPTH = 64, SMALL_BITS = 24, GRID_BLOCK = 1024, GRID_PADDING = 8 };

/* How many whole units a value has, with its sign; 0 also where its exponent is below the unit's or more than 23 above. */
INLINE i32 units_of(u32 word, i32 unit) {
    i32 above = (i32)(word >> MANTISSA_BITS & 255) - unit;
    u32 mantissa = (word & 0x7FFFFF) | 0x800000;
    i32 units = (i32)(mantissa >> ((MANTISSA_BITS - above) & 31));
    bool is_inside = (above >= 0) & (above <= MANTISSA_BITS);
    units = is_inside ? units : 0;
    return word >> 31 ? -units : units;
}

/* Symbols; the bits that each value leaves, and how many. */
static void split_to_grid(const u32 *restrict predicted, const u32 *restrict actual, const u8 *restrict units,
                          u8 *restrict symbols, u32 *restrict low_bits, u8 *restrict lefts, i64 n) {
    for (i64 i = 0; i < n; i++) {
        u32 value = actual[i];
        i32 unit = units[i], above = (i32)(value >> MANTISSA_BITS & 255) - unit;
        i32 step = units_of(value, unit) - units_of(predicted[i], unit);
        bool is_far = (above > MANTISSA_BITS) | (step > GRID_FARTHEST) | (step < -GRID_FARTHEST), is_small = above < 0;
        u32 left = (u32)(MANTISSA_BITS - above) & 31, below = value & ((1u << left) - 1);
        u32 with_sign = (value & 0x7FFFFF) | value >> 31 << MANTISSA_BITS;
        bool is_zero = (value & 0x7FFFFFFF) == 0;
        symbols[i] = is_far ? 0 : (u8)(step + GRID_MIDDLE);
        low_bits[i] = is_far ? value : is_small ? (is_zero ? 0 : with_sign) : below;
        lefts[i] = is_far ? FAR_WORD : is_small ? (is_zero ? HAS_DEPTH : HAS_DEPTH + SMALL_BITS) : (u8)left;
    }
}

/* How far below its unit a value lies: its exponent is unit - 1 - depth. */
INLINE u8 depth_of(u32 value, u8 unit) {
    if (!(value & 0x7FFFFFFF)) return value ? DEPTH_MINUS_ZERO : DEPTH_PLUS_ZERO;
    return (u8)(unit - 1 - (value >> MANTISSA_BITS & 255));
}

i64 API(to_grid)(const u32 *predicted, const u32 *actual, const u8 *units, i64 n, u8 *symbols, u8 *depths,
                 i64 *depth_count, u8 *bits, i64 bits_size) {
    if (!is_size(n) || bits_size < 4 * n + GRID_PADDING) return BAD_SIZE;
    u32 low_bits[GRID_BLOCK];
    u8 lefts[GRID_BLOCK];
    BitPacker w = {bits, 0, 0};
    i64 depth = 0;
    for (i64 start = 0; start < n; start += GRID_BLOCK) {
        i64 size = min(n - start, (i64)GRID_BLOCK), i = 0;
        split_to_grid(predicted + start, actual + start, units + start, symbols + start, low_bits, lefts, size);
        while (i < size) {
            const u64 rare = 0x0101010101010101 * (FAR_WORD | HAS_DEPTH);
            if (i + 8 <= size && !(load64(lefts + i) & rare)) {
                for (i64 end = i + 8; i < end; i += 2) /* two at a time: each pair waits for the one before it */
                    pack_bits(&w, low_bits[i] | (u64)low_bits[i + 1] << lefts[i], (u64)lefts[i] + lefts[i + 1]);
                continue;
            }
            for (i64 end = min(i + 8, size); i < end; i++) {
                u8 has_depth = lefts[i] & HAS_DEPTH;
                if (has_depth) depths[depth++] = depth_of(actual[start + i], units[start + i]);
                pack_bits(&w, low_bits[i], lefts[i] - has_depth);
            }
        }
    }
    *depth_count = depth;
    return 8 * (w.at - bits) + (i64)w.held;
}

/* ---- back ---- */

/* All of each value but the bits that are stored, and how many these are. False if a mantissa has less than none left. */
static bool merge_from_grid(const u32 *restrict predicted, const u8 *restrict units, const u8 *restrict symbols,
                            u8 *restrict lefts, u32 *restrict out, i64 n) {
    i32 worst = 0;
    for (i64 i = 0; i < n; i++) {
        i32 unit = units[i], symbol = symbols[i], place = units_of(predicted[i], unit) + symbol - GRID_MIDDLE;
        i32 size = place < 0 ? -place : place;
        /* The exponent of the size as a float is the place of its highest bit. What is rounded has 25 bits: too many. */
        i32 above = (i32)(bits_of_float((float)size) >> MANTISSA_BITS) - 127, left = MANTISSA_BITS - above;
        bool is_far = symbol == 0, is_small = place == 0, is_elsewhere = is_far | is_small;
        worst |= is_elsewhere ? 0 : left;
        u32 kept = (u32)left & 31, sign = place < 0 ? 0x80000000u : 0;
        u32 mantissa = (u32)size << kept & 0x7FFFFF, exponent = (u32)((unit + above) & 255) << MANTISSA_BITS;
        out[i] = is_elsewhere ? 0 : sign | exponent | mantissa;
        lefts[i] = is_far ? FAR_WORD : is_small ? HAS_DEPTH : (u8)kept;
    }
    return worst >= 0;
}

/* What is left of bits and depths. `last` is the last bit from which a word can be loaded. */
typedef struct {
    const u8 *bits, *depths;
    i64 bit, last, depth, depth_count;
} GridReader;

INLINE u32 low_mask(u32 width) { return (1u << width) - 1; }

/* Words that begin with the bits of eight values of up to 23 each: two from each load. Returns the place after the bits. */
INLINE i64 load_eight_words(const u8 *restrict bits, i64 bit, const u8 *restrict lefts, u32 *restrict words) {
    for (int i = 0; i < 8; i += 2) {
        u64 both = load64(bits + (bit >> 3)) >> (bit & 7);
        words[i] = (u32)both;
        words[i + 1] = (u32)(both >> lefts[i]);
        bit += lefts[i] + lefts[i + 1];
    }
    return bit;
}

static void add_low_bits(const u32 *restrict words, const u8 *restrict lefts, u32 *restrict out, i64 n) {
    for (i64 i = 0; i < n; i++) out[i] |= words[i] & low_mask(lefts[i] & 31);
}

/* Any value. False if there are no bits or no depth left for it. */
INLINE bool read_grid_value(GridReader *r, u8 unit, u8 left, u32 *out) {
    if (r->bit > r->last) return false;
    u32 word = (u32)(load64(r->bits + (r->bit >> 3)) >> (r->bit & 7));
    if (left < FAR_WORD) {
        *out |= word & low_mask(left);
        r->bit += left;
    } else if (left == FAR_WORD) {
        *out = word;
        r->bit += 32;
    } else {
        if (r->depth == r->depth_count) return false;
        u8 depth = r->depths[r->depth++];
        if (depth >= DEPTH_MINUS_ZERO) {
            *out = depth == DEPTH_MINUS_ZERO ? 0x80000000u : 0;
        } else {
            u32 exponent = (u32)(unit - 1 - depth) & 255;
            *out = (word & 0x800000) << 8 | exponent << MANTISSA_BITS | (word & 0x7FFFFF);
            r->bit += SMALL_BITS;
        }
    }
    return true;
}

i64 API(from_grid)(const u32 *predicted, const u8 *units, const u8 *symbols, i64 n, const u8 *depths, i64 depth_count,
                   const u8 *bits, i64 bits_size, u32 *out) {
    if (!is_size(n) || depth_count < 0 || bits_size < 0) return BAD_SIZE;
    u8 lefts[GRID_BLOCK];
    u32 words[GRID_BLOCK];
    GridReader r = {bits, depths, 0, 8 * (bits_size - GRID_PADDING), 0, depth_count};
    for (i64 start = 0; start < n; start += GRID_BLOCK) {
        i64 size = min(n - start, (i64)GRID_BLOCK), i = 0;
        u32 *values = out + start;
        if (!merge_from_grid(predicted + start, units + start, symbols + start, lefts, values, size)) return 0;
        while (i < size) {
            const u64 rare = 0x0101010101010101 * (FAR_WORD | HAS_DEPTH);
            if (i + 8 <= size && !(load64(lefts + i) & rare) && r.bit + 8 * MANTISSA_BITS <= r.last) {
                r.bit = load_eight_words(bits, r.bit, lefts + i, words + i);
                i += 8;
                continue;
            }
            for (i64 end = min(i + 8, size); i < end; i++) {
                if (!read_grid_value(&r, units[start + i], lefts[i], values + i)) return 0;
                words[i] = lefts[i] = 0; /* the value is whole */
            }
        }
        add_low_bits(words, lefts, values, size);
    }
    return r.depth == depth_count && ((r.bit + 7) >> 3) + GRID_PADDING == bits_size;
}
