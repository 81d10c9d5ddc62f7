/* Float32 words on a grid of its own for each value; docs/delta-codecs.md, "Grids".
 *
 * The exponent of a grid's unit is a byte. A symbol says how many units a value is from its prediction; the bits of the
 * mantissa below a unit are stored as they are; of a value below one unit, a depth says how far below.
 *
 * Safe because: shifts are masked to 31; the bits have 8 bytes more than they need, so that each load and store is of a
 * whole word; depths and bits are compared with what is left before they are taken. */
#include "kernels.h"

enum { MANTISSA_BITS = 23, GRID_MIDDLE = 127, GRID_FARTHEST = 126, DEPTH_PLUS_ZERO = 255, DEPTH_MINUS_ZERO = 254 };
/* How many bits a value leaves: up to 23; all, FAR_WORD; or those of a value below one unit. */
enum { FAR_WORD = 32, BELOW_UNIT = 33, HAS_DEPTH = 64, SMALL_BITS = 24, GRID_BLOCK = 1024, GRID_PADDING = 8 };

/* How many whole units a value has, with its sign; 0 also where its exponent is below the unit's or more than 23 above. */
INLINE i32 units_of(u32 word, i32 unit) {
    i32 above = (i32)(word >> MANTISSA_BITS & 255) - unit;
    u32 mantissa = (word & 0x7FFFFF) | 0x800000;
    i32 units = (i32)(mantissa >> ((MANTISSA_BITS - above) & 31));
    bool is_inside = (above >= 0) & (above <= MANTISSA_BITS);
    units = is_inside ? units : 0;
    return word >> 31 ? -units : units;
}

/* Symbols; the bits that each leaves, and how many, HAS_DEPTH more where a depth is told. */
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
    u64 word = 0, held = 0;
    i64 at = 0, depth = 0;
    for (i64 start = 0; start < n; start += GRID_BLOCK) {
        i64 size = n - start < GRID_BLOCK ? n - start : GRID_BLOCK;
        split_to_grid(predicted + start, actual + start, units + start, symbols + start, low_bits, lefts, size);
        for (i64 i = 0; i < size; i++) {
            u64 left = lefts[i];
            if (left >= HAS_DEPTH) {
                depths[depth++] = depth_of(actual[start + i], units[start + i]);
                left -= HAS_DEPTH;
            }
            word |= (u64)low_bits[i] << held;
            store64(bits + at, word);
            held += left;
            at += (i64)(held >> 3), word >>= held & 56, held &= 7;
        }
    }
    *depth_count = depth;
    return 8 * at + (i64)held;
}

/* All of each value but the bits that are stored, and how many these are. False if a mantissa has less than none left. */
static bool merge_from_grid(const u32 *restrict predicted, const u8 *restrict units, const u8 *restrict symbols,
                            u8 *restrict lefts, u32 *restrict out, i64 n) {
    i32 worst = 0;
    for (i64 i = 0; i < n; i++) {
        i32 unit = units[i], symbol = symbols[i], units_now = units_of(predicted[i], unit) + symbol - GRID_MIDDLE;
        i32 size = units_now < 0 ? -units_now : units_now;
        /* A size has 24 bits and a little, so its exponent as a float is the place of its highest bit. */
        i32 above = (i32)(bits_of_float((float)size) >> MANTISSA_BITS) - 127, left = MANTISSA_BITS - above;
        bool is_far = symbol == 0, is_small = units_now == 0, is_elsewhere = is_far | is_small;
        worst |= is_elsewhere ? 0 : left;
        u32 kept = (u32)left & 31, sign = units_now < 0 ? 0x80000000u : 0;
        u32 mantissa = (u32)size << kept & 0x7FFFFF, exponent = (u32)((unit + above) & 255) << MANTISSA_BITS;
        out[i] = is_elsewhere ? 0 : sign | exponent | mantissa;
        lefts[i] = is_far ? FAR_WORD : is_small ? BELOW_UNIT : (u8)kept;
    }
    return worst >= 0;
}

i64 API(from_grid_scratch)(i64 n) {
    return is_size(n) ? PIECE(n) : BAD_SIZE;
}

i64 API(from_grid)(const u32 *predicted, const u8 *units, const u8 *symbols, i64 n, const u8 *depths, i64 depth_count,
                   const u8 *bits, i64 bits_size, u32 *out, u8 *scratch, i64 scratch_size) {
    if (!is_size(n) || depth_count < 0 || bits_size < 0) return BAD_SIZE;
    Scratch s = {scratch, scratch + scratch_size};
    u8 *lefts = take(&s, n);
    if (n && !lefts) return BAD_SIZE;
    if (!merge_from_grid(predicted, units, symbols, lefts, out, n)) return 0;
    i64 at = 0, depth = 0, last = 8 * (bits_size - GRID_PADDING);
    for (i64 i = 0; i < n; i++) {
        if (at > last) return 0;
        u32 left = lefts[i], word = (u32)(load64(bits + (at >> 3)) >> (at & 7));
        if (left <= MANTISSA_BITS) {
            out[i] |= word & ((1u << left) - 1);
            at += left;
        } else if (left == FAR_WORD) {
            out[i] = word;
            at += 32;
        } else {
            if (depth == depth_count) return 0;
            u8 below = depths[depth++];
            if (below >= DEPTH_MINUS_ZERO) {
                out[i] = below == DEPTH_MINUS_ZERO ? 0x80000000u : 0;
            } else {
                u32 exponent = (u32)(units[i] - 1 - below) & 255;
                out[i] = (word & 0x800000) << 8 | exponent << MANTISSA_BITS | (word & 0x7FFFFF);
                at += SMALL_BITS;
            }
        }
    }
    return depth == depth_count && ((at + 7) >> 3) + GRID_PADDING == bits_size;
}
