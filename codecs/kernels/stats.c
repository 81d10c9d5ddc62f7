/* Figures of the values of a tensor.
 *
 * Why it is safe: a word of one or two bytes indexes a table that has an element for each; an exponent has 8 or 11 bits, and
 * its table 256 or 2,048 elements; every other loop is one over elements that the arguments count. */
#include "stats.h"

/* Neighbours count in different tables, so that an increment need not wait for the one before. */
#define TABLES 4
/* Values that are read several times while they are in the nearest cache. */
#define STATS_BLOCK 4096

static void count_words8(const u8 *words, i64 size, u32 *counts) {
    u32 tables[TABLES][256] = {{0}};
    i64 i = 0;
    for (; i + TABLES <= size; i += TABLES)
        for (int t = 0; t < TABLES; t++) tables[t][words[i + t]]++;
    for (; i < size; i++) tables[0][words[i]]++;
    for (int word = 0; word < 256; word++)
        for (int t = 0; t < TABLES; t++) counts[word] += tables[t][word];
}

static void count_words16(const u8 *words, i64 size, u32 *counts) {
    i64 i = 0;
    for (; i + 4 <= size; i += 4) {
        u64 four = load64(words + 2 * i);
        if (RARE(four == (four & 0xFFFF) * 0x0001000100010001u)) counts[four & 0xFFFF] += 4; /* as in tensors of zeros */
        else counts[four & 0xFFFF]++, counts[four >> 16 & 0xFFFF]++, counts[four >> 32 & 0xFFFF]++, counts[four >> 48]++;
    }
    for (; i < size; i++) counts[load16(words + 2 * i)]++;
}

i64 API(count_values)(i64 width, const u8 *words, i64 size, u32 *counts) {
    if (!is_size(size) || (width != 1 && width != 2)) return BAD_SIZE;
    if (width == 1) count_words8(words, size, counts);
    else count_words16(words, size, counts);
    return 0;
}

INLINE double real_of32(u32 bits) { return (double)float_of_bits(bits); }
INLINE double real_of64(u64 bits) { return double_of_bits(bits); }

/* The biased exponent, as a double, of a value below the normal ones of its type. It is not zero. */
INLINE i64 exponent_of_small32(u32 magnitude) { return 1023 - 149 + 31 - __builtin_clz(magnitude); }
INLINE i64 exponent_of_small64(u64 magnitude) { return (void)magnitude, 0; }

/* `fraction`: bits of the fraction; `shift`: what is added to an exponent of the type to make it one of a double. */
#define MEASURE(bits, real, fraction, shift)                                                                           \
    static void add_one##bits(u##bits word, i64 part, double *sums, real *low, real *high, i64 *counts) {               \
        const u##bits infinity = ((u##bits)1 << (bits - 1)) - ((u##bits)1 << fraction);                                 \
        u##bits magnitude = word & (((u##bits)1 << (bits - 1)) - 1);                                                    \
        if (magnitude >= infinity) {                                                                                    \
            counts[magnitude == infinity]++;                                                                            \
            return;                                                                                                     \
        }                                                                                                               \
        double value = real_of##bits(word);                                                                             \
        sums[part] += value, sums[SUM_PARTS + part] += value * value;                                                   \
        *low = min((real)value, *low), *high = max((real)value, *high);                                                 \
    }                                                                                                                   \
                                                                                                                        \
    /* Whole rounds of SUM_PARTS finite values, of which the first belongs to part 0. */                                \
    static void add_rounds##bits(const u8 *words, i64 rounds, double *sums, real *low, real *high) {                    \
        double own[SUM_PARTS], squares[SUM_PARTS];                                                                      \
        real lows[SUM_PARTS], highs[SUM_PARTS];                                                                         \
        for (int p = 0; p < SUM_PARTS; p++) {                                                                           \
            own[p] = sums[p], squares[p] = sums[SUM_PARTS + p], lows[p] = *low, highs[p] = *high;                       \
        }                                                                                                               \
        for (i64 round = 0; round < rounds; round++, words += SUM_PARTS * (bits / 8)) {                                 \
            for (int p = 0; p < SUM_PARTS; p++) {                                                                       \
                double value = real_of##bits(load##bits(words + p * (bits / 8)));                                       \
                own[p] += value, squares[p] += value * value;                                                           \
                lows[p] = min((real)value, lows[p]), highs[p] = max((real)value, highs[p]);                             \
            }                                                                                                           \
        }                                                                                                               \
        for (int p = 0; p < SUM_PARTS; p++) {                                                                           \
            sums[p] = own[p], sums[SUM_PARTS + p] = squares[p];                                                         \
            *low = min(lows[p], *low), *high = max(highs[p], *high);                                                    \
        }                                                                                                               \
    }                                                                                                                   \
                                                                                                                        \
    static void measure##bits(const u8 *words, i64 size, i64 index, double *sums, double *extremes, i64 *counts,        \
                              i64 *exponents) {                                                                         \
        enum { EXPONENTS = 1 << (bits - 1 - fraction), STRANGE = EXPONENTS - 1 };                                       \
        const u##bits magnitudes = ((u##bits)1 << (bits - 1)) - 1, least_normal = (u##bits)1 << fraction;               \
        u32 tables[TABLES][EXPONENTS] = {{0}};                                                                          \
        u32 strange = 0, small = 0; /* of the blocks before */                                                          \
        real low = (real)extremes[0], high = (real)extremes[1];                                                         \
        for (i64 start = 0; start < size; start += STATS_BLOCK) {                                                       \
            const u8 *block = words + start * (bits / 8);                                                               \
            i64 count = min(size - start, STATS_BLOCK), i = 0, first = (index + start) % SUM_PARTS;                     \
            for (; i + TABLES <= count; i += TABLES)                                                                    \
                for (int t = 0; t < TABLES; t++)                                                                        \
                    tables[t][(load##bits(block + (i + t) * (bits / 8)) >> fraction) & STRANGE]++;                      \
            for (; i < count; i++) tables[0][(load##bits(block + i * (bits / 8)) >> fraction) & STRANGE]++;             \
            u32 strange_now = 0, small_now = 0;                                                                         \
            for (int t = 0; t < TABLES; t++) strange_now += tables[t][STRANGE], small_now += tables[t][0];              \
            i = 0;                                                                                                      \
            if (strange_now == strange) {                                                                               \
                for (; i < count && (first + i) % SUM_PARTS; i++)                                                       \
                    add_one##bits(load##bits(block + i * (bits / 8)), (first + i) % SUM_PARTS, sums, &low, &high, counts); \
                i64 rounds = (count - i) / SUM_PARTS;                                                                   \
                add_rounds##bits(block + i * (bits / 8), rounds, sums, &low, &high);                                    \
                i += rounds * SUM_PARTS;                                                                                \
            }                                                                                                           \
            for (; i < count; i++)                                                                                      \
                add_one##bits(load##bits(block + i * (bits / 8)), (first + i) % SUM_PARTS, sums, &low, &high, counts);  \
            if (small_now != small) {                                                                                   \
                u##bits zeros = 0;                                                                                      \
                for (i = 0; i < count; i++) zeros += (load##bits(block + i * (bits / 8)) & magnitudes) == 0;            \
                counts[2] += (i64)zeros;                                                                                \
                for (i = 0; zeros < (u32)(small_now - small) && i < count; i++) {                                       \
                    u##bits magnitude = load##bits(block + i * (bits / 8)) & magnitudes;                                \
                    if (magnitude && magnitude < least_normal) exponents[exponent_of_small##bits(magnitude)]++;         \
                }                                                                                                       \
            }                                                                                                           \
            strange = strange_now, small = small_now;                                                                   \
        }                                                                                                               \
        for (int e = 1; e < STRANGE; e++)                                                                               \
            for (int t = 0; t < TABLES; t++) exponents[e + shift] += tables[t][e];                                      \
        extremes[0] = (double)low + 0.0, extremes[1] = (double)high + 0.0; /* -0.0 becomes 0.0 */                       \
    }

MEASURE(32, float, 23, 1023 - 127)
MEASURE(64, double, 52, 0)

i64 API(measure_floats)(i64 width, const u8 *words, i64 size, i64 index, double *sums, double *extremes, i64 *counts,
                        i64 *exponents) {
    if (!is_size(size) || index < 0 || index > INT64_MAX - MAX_ELEMENTS) return BAD_SIZE;
    switch (width) {
        case 4: measure32(words, size, index, sums, extremes, counts, exponents); return 0;
        case 8: measure64(words, size, index, sums, extremes, counts, exponents); return 0;
        default: return BAD_SIZE;
    }
}
