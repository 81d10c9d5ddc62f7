/* Zigzagged differences of words, as planes of bytes and back; docs/delta-codecs.md, "Residuals".
 *
 * The difference modulo the width is a signed number; zigzag maps 0, -1, 1, -2 ... to 0, 1, 2, 3 ..., so that small
 * numbers of either sign have few bits. Plane i has byte i of each. All arithmetic is of unsigned words. */
#include "kernels.h"

/* As ((d << 1) ^ (d >> (w - 1))) with the second shift arithmetic. */
INLINE u8 zigzag8(u8 before, u8 after) {
    u8 step = (u8)(after - before);
    return (u8)((u8)(step << 1) ^ (u8)-(step >> 7));
}
INLINE u16 zigzag16(u16 before, u16 after) {
    u16 step = (u16)(after - before);
    return (u16)((u16)(step << 1) ^ (u16)-(step >> 15));
}
INLINE u32 zigzag32(u32 before, u32 after) {
    u32 step = after - before;
    return step << 1 ^ -(step >> 31);
}
INLINE u64 zigzag64(u64 before, u64 after) {
    u64 step = after - before;
    return step << 1 ^ -(step >> 63);
}

INLINE u16 unzigzag16(u16 word) {
    return (u16)(word >> 1 ^ (u16)-(word & 1));
}
INLINE u32 unzigzag32(u32 word) {
    return word >> 1 ^ -(word & 1);
}
INLINE u64 unzigzag64(u64 word) {
    return word >> 1 ^ -(word & 1);
}

#define UNION_OF_ZIGZAGS(bits)                                                                     \
    static u64 union_of_zigzags##bits(const u##bits *before, const u##bits *after, i64 n) {        \
        u##bits all = 0;                                                                           \
        for (i64 i = 0; i < n; i++) all |= zigzag##bits(before[i], after[i]);                      \
        return all;                                                                                \
    }
UNION_OF_ZIGZAGS(8)
UNION_OF_ZIGZAGS(16)
UNION_OF_ZIGZAGS(32)
UNION_OF_ZIGZAGS(64)

i64 API(zigzag_bits)(int width, const void *before, const void *after, i64 n) {
    if (!is_size(n)) return BAD_SIZE;
    u64 all;
    switch (width) {
    case 1: all = union_of_zigzags8(before, after, n); break;
    case 2: all = union_of_zigzags16(before, after, n); break;
    case 4: all = union_of_zigzags32(before, after, n); break;
    case 8: all = union_of_zigzags64(before, after, n); break;
    default: return BAD_SIZE;
    }
    return all ? 64 - __builtin_clzll(all) : 0;
}

/* `count` is a constant where this is called, so that each call is a loop of vectors. */
INLINE void split_zigzags16(const u16 *restrict before, const u16 *restrict after, i64 n, u8 *const *planes, int count) {
    u8 *restrict p0 = planes[0], *restrict p1 = planes[1];
    for (i64 i = 0; i < n; i++) {
        u16 word = zigzag16(before[i], after[i]);
        p0[i] = (u8)word;
        if (count > 1) p1[i] = (u8)(word >> 8);
    }
}

INLINE void split_zigzags32(const u32 *restrict before, const u32 *restrict after, i64 n, u8 *const *planes, int count) {
    u8 *restrict p0 = planes[0], *restrict p1 = planes[1], *restrict p2 = planes[2], *restrict p3 = planes[3];
    for (i64 i = 0; i < n; i++) {
        u32 word = zigzag32(before[i], after[i]);
        p0[i] = (u8)word;
        if (count > 1) p1[i] = (u8)(word >> 8);
        if (count > 2) p2[i] = (u8)(word >> 16);
        if (count > 3) p3[i] = (u8)(word >> 24);
    }
}

i64 API(split_zigzags)(int width, const void *before, const void *after, i64 n, u8 *const *planes, int count) {
    if (!is_size(n) || count < 1 || count > width || width > 8) return BAD_SIZE;
    switch (10 * width + count) {
    case 11: {
        const u8 *b = before, *a = after;
        for (i64 i = 0; i < n; i++) planes[0][i] = zigzag8(b[i], a[i]);
        return 0;
    }
    case 21: split_zigzags16(before, after, n, planes, 1); return 0;
    case 22: split_zigzags16(before, after, n, planes, 2); return 0;
    case 41: split_zigzags32(before, after, n, planes, 1); return 0;
    case 42: split_zigzags32(before, after, n, planes, 2); return 0;
    case 43: split_zigzags32(before, after, n, planes, 3); return 0;
    case 44: split_zigzags32(before, after, n, planes, 4); return 0;
    }
    if (width != 8) return BAD_SIZE;
    const u64 *b = before, *a = after;
    for (int k = 0; k < count; k++)
        for (i64 i = 0; i < n; i++) planes[k][i] = (u8)(zigzag64(b[i], a[i]) >> 8 * k);
    return 0;
}

INLINE void merge_zigzags16(const u16 *restrict before, const u8 *const *planes, u16 *restrict out, i64 n, int count) {
    const u8 *restrict p0 = planes[0], *restrict p1 = planes[1];
    for (i64 i = 0; i < n; i++) {
        u16 word = p0[i];
        if (count > 1) word = (u16)(word | p1[i] << 8);
        out[i] = (u16)(before[i] + unzigzag16(word));
    }
}

INLINE void merge_zigzags32(const u32 *restrict before, const u8 *const *planes, u32 *restrict out, i64 n, int count) {
    const u8 *restrict p0 = planes[0], *restrict p1 = planes[1], *restrict p2 = planes[2], *restrict p3 = planes[3];
    for (i64 i = 0; i < n; i++) {
        u32 word = p0[i];
        if (count > 1) word |= (u32)p1[i] << 8;
        if (count > 2) word |= (u32)p2[i] << 16;
        if (count > 3) word |= (u32)p3[i] << 24;
        out[i] = before[i] + unzigzag32(word);
    }
}

i64 API(merge_zigzags)(int width, const void *before, const u8 *const *planes, int count, void *out, i64 n) {
    if (!is_size(n) || count < 1 || count > width || width > 8) return BAD_SIZE;
    switch (10 * width + count) {
    case 11: {
        const u8 *b = before;
        u8 *o = out;
        for (i64 i = 0; i < n; i++) o[i] = (u8)(b[i] + (planes[0][i] >> 1 ^ -(planes[0][i] & 1)));
        return 0;
    }
    case 21: merge_zigzags16(before, planes, out, n, 1); return 0;
    case 22: merge_zigzags16(before, planes, out, n, 2); return 0;
    case 41: merge_zigzags32(before, planes, out, n, 1); return 0;
    case 42: merge_zigzags32(before, planes, out, n, 2); return 0;
    case 43: merge_zigzags32(before, planes, out, n, 3); return 0;
    case 44: merge_zigzags32(before, planes, out, n, 4); return 0;
    }
    if (width != 8) return BAD_SIZE;
    const u64 *b = before;
    u64 *o = out;
    for (i64 i = 0; i < n; i++) {
        u64 word = 0;
        for (int k = 0; k < count; k++) word |= (u64)planes[k][i] << 8 * k;
        o[i] = b[i] + unzigzag64(word);
    }
    return 0;
}
