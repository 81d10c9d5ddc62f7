/* Words to planes of bytes and back, and operations on the bytes of a plane.
 *
 * docs/codecs.md, "Float planes". Of floats, the last plane has the eight bits below the sign, which are the exponent of
 * float32 and bfloat16; the sign takes the place of the highest of them in the plane before.
 *
 * Memory safety: every function reads and writes exactly as many bytes as its count and width say. */
#include "lossless.h"

static bool has_planes(i64 width) { return width == 1 || width == 2 || width == 4 || width == 8; }

/* 16 bytes: one register at every level of CPU. */
typedef u8 Bytes16 __attribute__((vector_size(16)));
typedef u16 Words16 __attribute__((vector_size(16)));
typedef u32 Longs16 __attribute__((vector_size(16)));
typedef u64 Pairs16 __attribute__((vector_size(16)));

INLINE Bytes16 load_bytes(const u8 *p) {
    Bytes16 v;
    memcpy(&v, p, 16);
    return v;
}
INLINE void store_bytes(u8 *p, Bytes16 v) { memcpy(p, &v, 16); }

INLINE Bytes16 even_bytes(Bytes16 a, Bytes16 b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
INLINE Bytes16 odd_bytes(Bytes16 a, Bytes16 b) {
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
/* Of four words, the lowest bytes, then the next ones, and so on. */
INLINE Longs16 by_place(const u8 *p) {
    Bytes16 v = load_bytes(p);
    return (Longs16)__builtin_shufflevector(v, v, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
}
INLINE Pairs16 zip_low_longs(Longs16 a, Longs16 b) { return (Pairs16)__builtin_shufflevector(a, b, 0, 4, 1, 5); }
INLINE Pairs16 zip_high_longs(Longs16 a, Longs16 b) { return (Pairs16)__builtin_shufflevector(a, b, 2, 6, 3, 7); }
INLINE Bytes16 low_pairs(Pairs16 a, Pairs16 b) { return (Bytes16)__builtin_shufflevector(a, b, 0, 2); }
INLINE Bytes16 high_pairs(Pairs16 a, Pairs16 b) { return (Bytes16)__builtin_shufflevector(a, b, 1, 3); }
INLINE Bytes16 zip_low_bytes(Bytes16 a, Bytes16 b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
INLINE Bytes16 zip_high_bytes(Bytes16 a, Bytes16 b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
INLINE Words16 zip_low_words(Bytes16 a, Bytes16 b) {
    return __builtin_shufflevector((Words16)a, (Words16)b, 0, 8, 1, 9, 2, 10, 3, 11);
}
INLINE Words16 zip_high_words(Bytes16 a, Bytes16 b) {
    return __builtin_shufflevector((Words16)a, (Words16)b, 4, 12, 5, 13, 6, 14, 7, 15);
}

/* The two highest bytes of floats, `second` and `top`, to sign with mantissa and exponent, and back. */
INLINE Bytes16 sign_and_mantissa(Bytes16 top, Bytes16 second) { return (second & 0x7F) | (top & 0x80); }
INLINE Bytes16 exponent(Bytes16 top, Bytes16 second) { return top << 1 | second >> 7; }
INLINE Bytes16 top_byte(Bytes16 exponent, Bytes16 rest) { return exponent >> 1 | (rest & 0x80); }
INLINE Bytes16 second_byte(Bytes16 exponent, Bytes16 rest) { return exponent << 7 | (rest & 0x7F); }

/* Of one word, as above for any width: the exponent, and the rest with the sign in its highest place. */
INLINE u64 load_word(i64 width, const u8 *p) {
    return width == 1 ? p[0] : width == 2 ? load16(p) : width == 4 ? load32(p) : load64(p);
}
INLINE void store_word(i64 width, u8 *p, u64 word) { memcpy(p, &word, (size_t)width); }

INLINE void split_from(i64 i, bool floats, i64 width, const u8 *words, i64 count, u8 *const planes[8]) {
    for (; i < count; i++) {
        u64 word = load_word(width, words + width * i);
        if (floats && width > 1) {
            i64 places = 8 * width - 9;
            u64 sign = word >> (8 * width - 1);
            planes[width - 1][i] = (u8)(word >> places);
            word = (word & (((u64)1 << places) - 1)) | sign << places;
            for (i64 k = 0; k < width - 1; k++) planes[k][i] = (u8)(word >> 8 * k);
        } else {
            for (i64 k = 0; k < width; k++) planes[k][i] = (u8)(word >> 8 * k);
        }
    }
}

INLINE void merge_from(i64 i, bool floats, i64 width, const u8 *const planes[8], i64 count, u8 *words) {
    for (; i < count; i++) {
        u64 word = 0;
        if (floats && width > 1) {
            i64 places = 8 * width - 9;
            for (i64 k = 0; k < width - 1; k++) word |= (u64)planes[k][i] << 8 * k;
            u64 sign = word >> places;
            word = (word & (((u64)1 << places) - 1)) | (u64)planes[width - 1][i] << places | sign << (8 * width - 1);
        } else {
            for (i64 k = 0; k < width; k++) word |= (u64)planes[k][i] << 8 * k;
        }
        store_word(width, words + width * i, word);
    }
}

static i64 split_floats_of_2(const u8 *restrict words, i64 count, u8 *restrict low, u8 *restrict top) {
    i64 i = 0;
    for (; i + 16 <= count; i += 16) {
        Bytes16 a = load_bytes(words + 2 * i), b = load_bytes(words + 2 * i + 16);
        Bytes16 second = even_bytes(a, b), first = odd_bytes(a, b);
        store_bytes(low + i, sign_and_mantissa(first, second));
        store_bytes(top + i, exponent(first, second));
    }
    return i;
}

static i64 merge_floats_of_2(const u8 *restrict low, const u8 *restrict top, i64 count, u8 *restrict words) {
    i64 i = 0;
    for (; i + 16 <= count; i += 16) {
        Bytes16 rest = load_bytes(low + i), exponents = load_bytes(top + i);
        Bytes16 second = second_byte(exponents, rest), first = top_byte(exponents, rest);
        store_bytes(words + 2 * i, zip_low_bytes(second, first));
        store_bytes(words + 2 * i + 16, zip_high_bytes(second, first));
    }
    return i;
}

static i64 split_floats_of_4(const u8 *restrict words, i64 count, u8 *restrict low, u8 *restrict middle,
                             u8 *restrict high, u8 *restrict top) {
    i64 i = 0;
    for (; i + 16 <= count; i += 16) {
        const u8 *p = words + 4 * i;
        Longs16 a = by_place(p), b = by_place(p + 16), c = by_place(p + 32), d = by_place(p + 48);
        Pairs16 ab = zip_low_longs(a, b), cd = zip_low_longs(c, d);
        Pairs16 ab2 = zip_high_longs(a, b), cd2 = zip_high_longs(c, d);
        Bytes16 second = low_pairs(ab2, cd2), first = high_pairs(ab2, cd2);
        store_bytes(low + i, low_pairs(ab, cd));
        store_bytes(middle + i, high_pairs(ab, cd));
        store_bytes(high + i, sign_and_mantissa(first, second));
        store_bytes(top + i, exponent(first, second));
    }
    return i;
}

static i64 merge_floats_of_4(const u8 *restrict low, const u8 *restrict middle, const u8 *restrict high,
                             const u8 *restrict top, i64 count, u8 *restrict words) {
    i64 i = 0;
    for (; i + 16 <= count; i += 16) {
        Bytes16 a = load_bytes(low + i), b = load_bytes(middle + i);
        Bytes16 rest = load_bytes(high + i), exponents = load_bytes(top + i);
        Bytes16 c = second_byte(exponents, rest), d = top_byte(exponents, rest);
        Bytes16 ab = zip_low_bytes(a, b), cd = zip_low_bytes(c, d);
        Bytes16 ab2 = zip_high_bytes(a, b), cd2 = zip_high_bytes(c, d);
        u8 *p = words + 4 * i;
        store_bytes(p, (Bytes16)zip_low_words(ab, cd));
        store_bytes(p + 16, (Bytes16)zip_high_words(ab, cd));
        store_bytes(p + 32, (Bytes16)zip_low_words(ab2, cd2));
        store_bytes(p + 48, (Bytes16)zip_high_words(ab2, cd2));
    }
    return i;
}

/* Splits words; plane i has `count` bytes at planes[i]. */
static void split_words(bool floats, i64 width, const u8 *words, i64 count, u8 *const planes[8]) {
    if (floats && width == 2)
        split_from(split_floats_of_2(words, count, planes[0], planes[1]), true, 2, words, count, planes);
    else if (floats && width == 4)
        split_from(split_floats_of_4(words, count, planes[0], planes[1], planes[2], planes[3]), true, 4, words, count,
                   planes);
    else if (floats && width == 8)
        split_from(0, true, 8, words, count, planes);
    else if (width == 1)
        memcpy(planes[0], words, (size_t)count);
    else if (width == 2)
        split_from(0, false, 2, words, count, planes);
    else if (width == 4)
        split_from(0, false, 4, words, count, planes);
    else
        split_from(0, false, 8, words, count, planes);
}

static void merge_words(bool floats, i64 width, const u8 *const planes[8], i64 count, u8 *words) {
    if (floats && width == 2)
        merge_from(merge_floats_of_2(planes[0], planes[1], count, words), true, 2, planes, count, words);
    else if (floats && width == 4)
        merge_from(merge_floats_of_4(planes[0], planes[1], planes[2], planes[3], count, words), true, 4, planes, count,
                   words);
    else if (floats && width == 8)
        merge_from(0, true, 8, planes, count, words);
    else if (width == 1)
        memcpy(words, planes[0], (size_t)count);
    else if (width == 2)
        merge_from(0, false, 2, planes, count, words);
    else if (width == 4)
        merge_from(0, false, 4, planes, count, words);
    else
        merge_from(0, false, 8, planes, count, words);
}

static bool all_below_128(const u8 *plane, i64 size) {
    u8 all = 0;
    for (i64 i = 0; i < size; i++) all |= plane[i];
    return all < 128;
}

/* Eight runs of bytes below 128 become seven: the bits of the last run go to the top bits of the others. */
static void pack7(const u8 *restrict plane, i64 size, u8 *restrict out) {
    i64 run = size / 8;
    for (int j = 0; j < 7; j++)
        for (i64 i = 0; i < run; i++) out[j * run + i] = (u8)(plane[j * run + i] | (plane[7 * run + i] >> j & 1) << 7);
    for (i64 i = 8 * run; i < size; i++) out[i - run] = plane[i];
}

static void unpack7(const u8 *restrict packed, u8 *restrict plane, i64 size) {
    i64 run = size / 8;
    for (i64 i = 0; i < run; i++) {
        u8 last = 0;
        for (int j = 0; j < 7; j++) {
            u8 byte = packed[j * run + i];
            plane[j * run + i] = byte & 127;
            last |= (u8)(byte >> 7 << j);
        }
        plane[7 * run + i] = last;
    }
    for (i64 i = 8 * run; i < size; i++) plane[i] = packed[i - run];
}

i64 API(split_planes)(int floats, i64 width, const u8 *words, i64 count, u8 *planes, i64 planes_size) {
    if (!has_planes(width) || !is_size(count) || planes_size < width * count) return BAD_SIZE;
    u8 *each[8];
    for (i64 i = 0; i < 8; i++) each[i] = planes + min(i, width - 1) * count;
    split_words(floats, width, words, count, each);
    return 0;
}
