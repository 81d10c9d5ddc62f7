/* float32 rounded to bfloat16, as every trainer casts its master weights: IEEE 754, to nearest, ties to even.
 *
 * Memory safety: reads and writes exactly `count` elements. */
#include "lossless.h"

INLINE bool is_nan(u32 word) { return (word & 0x7FFFFFFF) > 0x7F800000; }

INLINE u16 rounded_to_bfloat16(u32 word) {
    u32 nearest = (word + 0x7FFF + (word >> 16 & 1)) >> 16, nan = (word >> 16 & 0x8000) | 0x7FC0;
    return (u16)(is_nan(word) ? nan : nearest);
}

i64 API(to_bfloat16)(const u32 *restrict words, i64 count, u16 *restrict out) {
    if (!is_size(count)) return BAD_SIZE;
    for (i64 i = 0; i < count; i++) out[i] = rounded_to_bfloat16(words[i]);
    return 0;
}

i64 API(is_bfloat16_of)(const u32 *restrict words, const u16 *restrict rounded, i64 count) {
    if (!is_size(count)) return BAD_SIZE;
    u32 differs = 0;
    for (i64 i = 0; i < count; i++)
        differs |= is_nan(words[i]) ? 1u : (u32)(rounded_to_bfloat16(words[i]) ^ rounded[i]);
    return !differs;
}
