/* Chunks of gradients. docs/codecs.md, "Codecs of gradients", specifies the bytes.
 *
 * No result depends on how a machine treats denormal numbers: training switches them off as often as not. Words that
 * would need them are left to codecs that do no arithmetic.
 *
 * Why it is safe: every loop is one over elements that the arguments count, and splitting and merging compare each place
 * with the end of its buffer before they use it. */
#include "gradients.h"

enum { LARGEST_SHIFT = 24, SCALED_WORDS = 512 };
static const u32 ONE = 0x3F800000, LEAST_NORMAL = 0x00800000, INFINITE = 0x7F800000, STORED_BLOCK = 0x7FC00000;

i64 API(count_words)(const u32 *words, i64 count) {
    if (!is_size(count)) return BAD_SIZE;
    u32 zeros = 0;
    for (i64 i = 0; i < count; i++) zeros += words[i] == 0;
    return count - zeros;
}

/* Bytes of so many lows. */
INLINE i64 lows_bytes(i64 number, i64 shift) { return (number * shift + 7) / 8; }

/* The places of the words that are not zero among `size`, 256 at most; returns how many. Words of which many are zero and
 * many are not would mislead a branch for each. */
INLINE i64 find_places(const u32 *words, i64 size, u8 places[256]) {
    i64 total = 0, i = 0;
    for (; i + 8 <= size; i += 8) {
        u32 any = 0;
        for (i64 j = 0; j < 8; j++) any |= words[i + j];
        if (!any) continue;
        for (i64 j = 0; j < 8; j++) {
            places[total] = (u8)(i + j);
            total += words[i + j] != 0;
        }
    }
    for (; i < size; i++)
        if (words[i]) places[total++] = (u8)i;
    return total;
}

i64 API(split_sparse)(const u32 *words, i64 count, i64 shift, u8 *gaps, i64 gaps_size, u8 *lows, i64 lows_size,
                      u32 *values, i64 values_size) {
    if (!is_size(count) || !is_size(gaps_size) || !is_size(lows_size) || !is_size(values_size)) return BAD_SIZE;
    if (shift < 0 || shift > LARGEST_SHIFT || lows_size < lows_bytes(values_size, shift)) return BAD_SIZE;
    i64 number = 0, filled = 0, next = 0, fill = 0;
    u64 waiting = 0, mask = ((u64)1 << shift) - 1; /* fewer than 32 bits wait */
    for (i64 begin = 0; begin < count; begin += 256) {
        u8 places[256 + 1]; /* one more is written than there are */
        i64 total = find_places(words + begin, min(count - begin, 256), places);
        if (total > values_size - filled) return BAD_SIZE;
        for (i64 i = 0; i < total; i++) {
            i64 place = begin + places[i], run = place - next, high = run >> shift;
            for (; high >= LONG_GAP; high -= LONG_GAP) {
                if (number == gaps_size) return BAD_SIZE;
                gaps[number++] = LONG_GAP;
            }
            if (number == gaps_size) return BAD_SIZE;
            gaps[number++] = (u8)high;
            values[filled++] = words[place];
            next = place + 1;
            waiting |= ((u64)run & mask) << fill, fill += shift;
            if (fill >= 32) {
                store32(lows, (u32)waiting);
                lows += 4, waiting >>= 32, fill -= 32;
            }
        }
    }
    for (; fill > 0; fill -= 8, waiting >>= 8) *lows++ = (u8)waiting;
    return number;
}

i64 API(merge_sparse)(const u8 *gaps, i64 gaps_size, i64 shift, const u8 *lows, i64 lows_size, const u32 *values,
                      i64 values_size, u32 *words, i64 count) {
    if (!is_size(count) || !is_size(gaps_size) || !is_size(lows_size) || !is_size(values_size)) return BAD_SIZE;
    if (shift < 0 || shift > LARGEST_SHIFT || lows_size < lows_bytes(values_size, shift)) return BAD_SIZE;
    memset(words, 0, 4 * (size_t)count);
    i64 place = 0, filled = 0, fill = 0;
    u64 waiting = 0, mask = ((u64)1 << shift) - 1;
    for (i64 i = 0; i < gaps_size; i++) {
        place += (i64)gaps[i] << shift;
        if (place >= count) return 1;
        if (gaps[i] == LONG_GAP) continue;
        if (filled >= values_size) return 1;
        for (; fill < shift; fill += 8) waiting |= (u64)*lows++ << fill;
        place += (i64)(waiting & mask);
        waiting >>= shift, fill -= shift;
        if (place >= count) return 1;
        words[place++] = values[filled++];
    }
    return filled != values_size || (gaps_size && gaps[gaps_size - 1] == LONG_GAP);
}

/* The bits of a number that is neither zero, nor denormal, nor infinite, nor NaN. */
INLINE bool is_normal(u32 word) { return (word << 1) - (LEAST_NORMAL << 1) < (INFINITE - LEAST_NORMAL) << 1; }

/* To nearest, ties to even, of a number that is finite. */
INLINE u32 upper_half_rounded(u32 word) { return (word + 0x7FFF + (word >> 16 & 1)) >> 16; }

/* Does the word come back? Without branches, so that loops become vectors. */
INLINE u32 divide(u32 word, float factor, float inverse, u32 *number) {
    u32 value = upper_half_rounded(bits_of_float(float_of_bits(word) * inverse));
    *number = value;
    u32 is_zero = (word << 1 | value << 17) == 0, is_safe = (u32)is_normal(word) & (u32)is_normal(value << 16);
    u32 is_same = bits_of_float(float_of_bits(value << 16) * factor) == word;
    return (is_zero | is_safe) & is_same;
}

enum { PROBES = 512, SAMPLE = 64, MANTISSAS = 128, NEIGHBOURS = 5 };

/* As many normal words as there are in PROBES places, SAMPLE at most; their exponents become that of 1 if they are
 * multiples: the factor is that of the mantissas. */
static i64 take_sample(const u32 *words, i64 count, u32 sample[SAMPLE]) {
    i64 taken = 0, probes = min(count, PROBES);
    for (i64 i = 0; i < probes && taken < SAMPLE; i++) {
        u32 word = words[i * count / probes];
        if (is_normal(word)) sample[taken++] = (word & (LEAST_NORMAL - 1)) | ONE;
    }
    return taken;
}

static bool divides_all(const u32 *sample, i64 size, u32 factor) {
    float by = float_of_bits(factor), inverse = 1.0f / by;
    u32 value;
    for (i64 i = size - 1; i >= 0; i--) /* the first is a multiple of all candidates, nearly */
        if (!divide(sample[i], by, inverse, &value)) return false;
    return true;
}

i64 API(find_factor)(const u32 *words, i64 count) {
    if (!is_size(count)) return BAD_SIZE;
    u32 sample[SAMPLE];
    i64 taken = take_sample(words, count, sample);
    if (!taken) return 0;
    if (divides_all(sample, taken, ONE)) return ONE;
    /* The first is fl(factor * value), value = 1 + i / 128 or a half of it, so the quotient is the factor but for two
     * roundings. */
    for (u32 i = 0; i < MANTISSAS; i++) {
        float quotient = float_of_bits(sample[0]) / float_of_bits(ONE | i << 16);
        u32 middle = bits_of_float(quotient < 1 ? quotient * 2 : quotient);
        for (u32 j = 0; j < NEIGHBOURS; j++) {
            u32 factor = middle + (j & 1 ? j / 2 + 1 : -(j / 2)); /* 0, 1, -1, 2, -2 */
            if (factor > ONE && factor < ONE + LEAST_NORMAL && divides_all(sample, taken, factor)) return factor;
        }
    }
    return 0;
}

i64 API(divide_by_factor)(const u32 *words, i64 count, float factor, u16 *out) {
    if (!is_size(count)) return BAD_SIZE;
    u32 differs = 0;
    if (bits_of_float(factor) == ONE) {
        for (i64 i = 0; i < count; i++) {
            differs |= words[i] & 0xFFFF;
            out[i] = (u16)(words[i] >> 16);
        }
        return !differs;
    }
    if (!(factor >= 1 && factor < 2)) return 0;
    float inverse = 1.0f / factor;
    for (i64 begin = 0; begin < count && !differs; begin += 4096) {
        i64 end = min(begin + 4096, count);
        for (i64 i = begin; i < end; i++) {
            u32 value;
            differs |= divide(words[i], factor, inverse, &value) ^ 1;
            out[i] = (u16)value;
        }
    }
    return !differs;
}

i64 API(multiply_by_factor)(const u16 *values, i64 count, float factor, u32 *words) {
    if (!is_size(count)) return BAD_SIZE;
    if (bits_of_float(factor) == ONE)
        for (i64 i = 0; i < count; i++) words[i] = (u32)values[i] << 16;
    else
        for (i64 i = 0; i < count; i++)
            words[i] = bits_of_float(canonical_nan(float_of_bits((u32)values[i] << 16) * factor));
    return 0;
}

/* Scales have 16 significant bits, so that their products with codes of 7 bits are exact. */
INLINE bool is_scale(u32 scale) { return is_normal(scale) && scale < INFINITE && !(scale & 0xFF); }

/* The scale of a block, or STORED_BLOCK. `largest`: the bits of its largest magnitude, not 0. */
INLINE u32 scale_of(u32 largest) {
    if (largest >= INFINITE) return STORED_BLOCK;
    double quotient = (double)float_of_bits(largest) / 127;
    /* A denormal number is less than half of such a scale: its code is 0, whether a machine knows it or not. */
    if (largest < LEAST_NORMAL || quotient < 2 * (double)float_of_bits(LEAST_NORMAL)) return STORED_BLOCK;
    u32 scale = (bits_of_float((float)quotient) + 0xFF) & ~(u32)0xFF;
    return 127 * (double)float_of_bits(scale) <= (double)float_of_bits(INFINITE - 1) ? scale : STORED_BLOCK;
}

i64 API(quantise_blocks)(const u32 *words, i64 count, u32 *scales, i64 scales_size, u8 *codes) {
    if (!is_size(count) || !is_size(scales_size) || scales_size < (count + SCALED_WORDS - 1) / SCALED_WORDS) return BAD_SIZE;
    i64 stored = 0;
    for (i64 begin = 0; begin < count; begin += SCALED_WORDS) {
        i64 size = min(count - begin, SCALED_WORDS);
        u32 largest = 0;
        for (i64 i = 0; i < size; i++) largest = max(largest, words[begin + i] & 0x7FFFFFFF);
        u32 scale = largest ? scale_of(largest) : 0;
        *scales++ = scale;
        stored += scale == STORED_BLOCK;
        if (!scale || scale == STORED_BLOCK) {
            memset(codes + begin, 0, (size_t)size);
            continue;
        }
        double inverse = 1 / (double)float_of_bits(scale);
        for (i64 i = 0; i < size; i++)
            codes[begin + i] = (u8)(i32)__builtin_rint((double)float_of_bits(words[begin + i]) * inverse);
    }
    return stored;
}

i64 API(restore_blocks)(const u8 *codes, i64 count, const u32 *scales, i64 scales_size, u32 *words) {
    if (!is_size(count) || !is_size(scales_size) || scales_size != (count + SCALED_WORDS - 1) / SCALED_WORDS) return BAD_SIZE;
    for (i64 begin = 0; begin < count; begin += SCALED_WORDS) {
        i64 size = min(count - begin, SCALED_WORDS);
        u32 scale = *scales++;
        if (scale && scale != STORED_BLOCK && !is_scale(scale)) return 1;
        float by = scale == STORED_BLOCK ? 0 : float_of_bits(scale);
        for (i64 i = 0; i < size; i++) words[begin + i] = bits_of_float((float)(i8)codes[begin + i] * by);
    }
    return 0;
}
