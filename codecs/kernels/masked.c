/* How many words have the same bits under a mask: how NaN and infinity are counted, whatever the type of float.
 *
 * Memory safety: reads exactly `count` words, at any address. Sums are as wide as the words, so that a vector adds as
 * many at once as it compares; a block is too short for its sum to overflow. */
#include "lossless.h"

INLINE u8 load8(const u8 *at) { return *at; }

#define COUNT_MASKED(bits, block)                                                                                   \
    static i64 count_masked##bits(const u8 *words, i64 count, u##bits mask, u##bits value) {                        \
        i64 total = 0;                                                                                              \
        for (i64 at = 0; at < count;) {                                                                             \
            i64 stop = min(count, at + (block));                                                                    \
            u##bits same = 0;                                                                                       \
            for (; at < stop; at++) same = (u##bits)(same + ((load##bits(words + bits / 8 * at) & mask) == value)); \
            total += (i64)same;                                                                                     \
        }                                                                                                           \
        return total;                                                                                               \
    }

COUNT_MASKED(8, 128)
COUNT_MASKED(16, 1 << 15)
COUNT_MASKED(32, MAX_ELEMENTS)
COUNT_MASKED(64, MAX_ELEMENTS)

i64 API(count_masked)(i64 width, const u8 *words, i64 count, u64 mask, u64 value) {
    if (!is_size(count)) return BAD_SIZE;
    switch (width) {
        case 1: return count_masked8(words, count, (u8)mask, (u8)value);
        case 2: return count_masked16(words, count, (u16)mask, (u16)value);
        case 4: return count_masked32(words, count, (u32)mask, (u32)value);
        case 8: return count_masked64(words, count, mask, value);
        default: return BAD_SIZE;
    }
}
