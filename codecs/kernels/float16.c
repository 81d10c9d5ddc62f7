/* float32 rounded to float16, and back: IEEE 754, to nearest, ties to even. Not all processors have instructions for it.
 *
 * Memory safety: reads and writes exactly `count` elements. */
#include "lossless.h"

INLINE u16 rounded_to_float16(u32 word) {
    u32 sign = word >> 16 & 0x8000, size = word & 0x7FFFFFFF;
    u32 normal = (size - (112u << 23) + 0xFFF + (size >> 13 & 1)) >> 13; /* too large numbers round to infinity, too */
    /* The last bit of 0.5 as float32 is that of the smallest numbers of float16: the sum rounds. */
    u32 small = bits_of_float(float_of_bits(size) + 0.5f) - bits_of_float(0.5f);
    u32 finite = size < 113u << 23 ? small : normal;
    u32 special = size > 0x7F800000 ? 0x7E00 : 0x7C00;
    return (u16)(sign | (size < 143u << 23 ? finite : special));
}

INLINE u32 float32_of_float16(u32 half) {
    u32 sign = (half & 0x8000) << 16, size = half & 0x7FFF;
    u32 normal = (size << 13) + (112u << 23);
    u32 small = bits_of_float((float)(i32)size * 0x1p-24f);
    u32 special = size > 0x7C00 ? 0x7FC00000 : 0x7F800000;
    return sign | (size < 0x0400 ? small : size < 0x7C00 ? normal : special);
}

i64 API(to_float16)(const u32 *restrict words, i64 count, u16 *restrict out) {
    if (!is_size(count)) return BAD_SIZE;
    for (i64 i = 0; i < count; i++) out[i] = rounded_to_float16(words[i]);
    return 0;
}

i64 API(from_float16)(const u16 *restrict halves, i64 count, u32 *restrict out) {
    if (!is_size(count)) return BAD_SIZE;
    for (i64 i = 0; i < count; i++) out[i] = float32_of_float16(halves[i]);
    return 0;
}
