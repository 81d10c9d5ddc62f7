/* Blocks of 64 words of 16-bit floats as masks: which of them differ, and which are of each class of exponents. A value's
 * rank in its class is then a count of bits, and the way back a search for the bit of a rank; docs/delta-codecs.md,
 * "Steps of 16-bit floats".
 *
 * Memory safety: a block has MASKED words, and the caller pads the last one; a class is less than CLASSES. */
#include "kernels.h"

#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

enum { MASKED = 64, CLASSES = 16, CLASS_BITS = 4 };

/* The class of a value is its exponent minus `least`, limited to 0 and `most`, which is less than CLASSES. */
typedef struct {
    int mantissa_bits, least, most;
} ClassRule;

/* An exponent has 8 bits at most. */
INLINE bool is_class_rule(int mantissa_bits, int least, i64 classes) {
    return mantissa_bits >= 7 && mantissa_bits <= 15 && least >= 0 && least <= 255 && classes >= 1 && classes <= CLASSES;
}

INLINE int class_of(u16 word, ClassRule rule) {
    int above = ((word & 0x7FFF) >> rule.mantissa_bits) - rule.least;
    above = above < 0 ? 0 : above;
    return above < rule.most ? above : rule.most;
}

#ifdef __AVX2__
/* Sixty-four bytes, in two registers. */
INLINE __m256i pack_words(__m256i low, __m256i high) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xD8); /* packing leaves quarters as 0 2 1 3 */
}

INLINE u64 top_bits(__m256i low, __m256i high) {
    return (u32)_mm256_movemask_epi8(low) | (u64)(u32)_mm256_movemask_epi8(high) << 32;
}

INLINE __m256i load_words(const u16 *words, int i) { return _mm256_loadu_si256((const __m256i *)words + i); }

INLINE u64 changed_mask(const u16 *a, const u16 *b) {
    __m256i equal[4];
    for (int i = 0; i < 4; i++) equal[i] = _mm256_cmpeq_epi16(load_words(a, i), load_words(b, i));
    __m256i low = _mm256_packs_epi16(equal[0], equal[1]), high = _mm256_packs_epi16(equal[2], equal[3]);
    return ~top_bits(_mm256_permute4x64_epi64(low, 0xD8), _mm256_permute4x64_epi64(high, 0xD8));
}

INLINE __m256i eight_bit_exponents(const u16 *words, int i, __m128i mantissa_bits) {
    const __m256i unsigned_bits = _mm256_set1_epi16(0x7FFF);
    __m256i low = _mm256_and_si256(load_words(words, i), unsigned_bits);
    __m256i high = _mm256_and_si256(load_words(words, i + 1), unsigned_bits);
    return pack_words(_mm256_srl_epi16(low, mantissa_bits), _mm256_srl_epi16(high, mantissa_bits));
}

/* Plane p has bit p of each class. */
INLINE void class_planes(const u16 *words, ClassRule rule, u64 planes[CLASS_BITS]) {
    __m128i mantissa_bits = _mm_cvtsi32_si128(rule.mantissa_bits);
    __m256i least = _mm256_set1_epi8((char)rule.least), most = _mm256_set1_epi8((char)rule.most), class[2];
    for (int i = 0; i < 2; i++) {
        __m256i above = _mm256_subs_epu8(eight_bit_exponents(words, 2 * i, mantissa_bits), least);
        /* The class goes to the top of its byte; bits that come from the byte below stay below it. */
        class[i] = _mm256_slli_epi16(_mm256_min_epu8(above, most), 8 - CLASS_BITS);
    }
    for (int p = CLASS_BITS - 1; p >= 0; p--) {
        planes[p] = top_bits(class[0], class[1]);
        class[0] = _mm256_slli_epi16(class[0], 1), class[1] = _mm256_slli_epi16(class[1], 1);
    }
}
#elif defined(__ARM_NEON)
/* One bit of each of 64 bytes that are 0 or 255. */
INLINE u64 mask_of_bytes(const uint8x16_t bytes[4]) {
    static const u8 PLACES[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8x16_t places = vld1q_u8(PLACES);
    uint8x16_t low = vpaddq_u8(vandq_u8(bytes[0], places), vandq_u8(bytes[1], places));
    uint8x16_t high = vpaddq_u8(vandq_u8(bytes[2], places), vandq_u8(bytes[3], places));
    uint8x16_t sums = vpaddq_u8(low, high);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(sums, sums)), 0);
}

INLINE u64 changed_mask(const u16 *a, const u16 *b) {
    uint8x16_t equal[4];
    for (int i = 0; i < 4; i++)
        equal[i] = vcombine_u8(vmovn_u16(vceqq_u16(vld1q_u16(a + 16 * i), vld1q_u16(b + 16 * i))),
                               vmovn_u16(vceqq_u16(vld1q_u16(a + 16 * i + 8), vld1q_u16(b + 16 * i + 8))));
    return ~mask_of_bytes(equal);
}

INLINE uint8x8_t eight_bit_exponents(const u16 *words, int16x8_t down) {
    return vmovn_u16(vshlq_u16(vandq_u16(vld1q_u16(words), vdupq_n_u16(0x7FFF)), down));
}

INLINE void class_planes(const u16 *words, ClassRule rule, u64 planes[CLASS_BITS]) {
    int16x8_t down = vdupq_n_s16((i16)-rule.mantissa_bits);
    uint8x16_t least = vdupq_n_u8((u8)rule.least), most = vdupq_n_u8((u8)rule.most), class[4], set[4];
    for (int i = 0; i < 4; i++) {
        uint8x8_t low = eight_bit_exponents(words + 16 * i, down), high = eight_bit_exponents(words + 16 * i + 8, down);
        class[i] = vminq_u8(vqsubq_u8(vcombine_u8(low, high), least), most);
    }
    for (int p = 0; p < CLASS_BITS; p++) {
        for (int i = 0; i < 4; i++) set[i] = vtstq_u8(class[i], vdupq_n_u8((u8)(1 << p)));
        planes[p] = mask_of_bytes(set);
    }
}
#else
/* Bit `bit` of each of 64 bytes: a product gathers those of eight bytes in its highest byte. */
INLINE u64 mask_of_bits(const u8 bytes[MASKED], int bit) {
    u64 mask = 0;
    for (int i = 0; i < MASKED; i += 8) {
        u64 bits = load64(bytes + i) >> bit & 0x0101010101010101u;
        mask |= (bits * 0x0102040810204080u) >> 56 << i;
    }
    return mask;
}

INLINE u64 changed_mask(const u16 *a, const u16 *b) {
    u8 changed[MASKED];
    for (int i = 0; i < MASKED; i++) changed[i] = a[i] != b[i];
    return mask_of_bits(changed, 0);
}

INLINE void class_planes(const u16 *words, ClassRule rule, u64 planes[CLASS_BITS]) {
    u8 class[MASKED];
    i16 least = (i16)rule.least, most = (i16)rule.most;
    for (int i = 0; i < MASKED; i++) {
        i16 above = (i16)(((words[i] & 0x7FFF) >> rule.mantissa_bits) - least);
        above = above < 0 ? 0 : above;
        class[i] = (u8)(above < most ? above : most);
    }
    for (int p = 0; p < CLASS_BITS; p++) planes[p] = mask_of_bits(class, p);
}
#endif

INLINE i64 count_bits(u64 mask) { return __builtin_popcountll(mask); }

/* Of each class, which of 64 words are of it. */
INLINE void masks_of_planes(const u64 p[CLASS_BITS], u64 masks[CLASSES]) {
    u64 low[4] = {~p[1] & ~p[0], ~p[1] & p[0], p[1] & ~p[0], p[1] & p[0]};
    u64 high[4] = {~p[3] & ~p[2], ~p[3] & p[2], p[3] & ~p[2], p[3] & p[2]};
    for (int c = 0; c < CLASSES; c++) masks[c] = high[c >> 2] & low[c & 3];
}

INLINE void class_masks(const u16 *words, ClassRule rule, u64 masks[CLASSES]) {
    u64 planes[CLASS_BITS];
    class_planes(words, rule, planes);
    masks_of_planes(planes, masks);
}

/* Numbers of 16 bits, one for each class, four in a word: they are added and compared four at a time. */
enum { COUNT_LANES = 4, COUNT_BITS = 16, COUNT_WORDS = CLASSES / COUNT_LANES, MAX_COUNT = (1 << (COUNT_BITS - 1)) - 1 };
#define COUNT_TOPS 0x8000800080008000u

INLINE u32 lane_of(const u64 lanes[COUNT_WORDS], int c) {
    return (u32)(lanes[c / COUNT_LANES] >> (c % COUNT_LANES * COUNT_BITS) & 0xFFFF);
}

/* How many words are of each class. */
INLINE void count_classes(const u64 p[CLASS_BITS], u64 lanes[COUNT_WORDS]) {
    u64 masks[CLASSES];
    masks_of_planes(p, masks);
    for (int i = 0; i < COUNT_WORDS; i++) {
        const u64 *four = masks + i * COUNT_LANES;
        lanes[i] = (u64)count_bits(four[0]) | (u64)count_bits(four[1]) << COUNT_BITS |
                   (u64)count_bits(four[2]) << 2 * COUNT_BITS | (u64)count_bits(four[3]) << 3 * COUNT_BITS;
    }
}

/* What is known of 64 words: their classes, and how many are of each. Several blocks are looked at before any of them is changed or
 * searched, so that no vector instruction waits for a branch that nobody can foresee. */
typedef struct {
    u64 planes[CLASS_BITS], members[COUNT_WORDS];
} ClassBlock;

enum { BLOCKS_AT_ONCE = 16, WORDS_AT_ONCE = BLOCKS_AT_ONCE * MASKED };

static __attribute__((noinline)) void look_at_blocks(const u16 *words, int count, ClassRule rule, ClassBlock *blocks) {
    for (int b = 0; b < count; b++) {
        class_planes(words + b * MASKED, rule, blocks[b].planes);
        count_classes(blocks[b].planes, blocks[b].members);
    }
}

/* The last zeros of a padded block are no members. */
INLINE void drop_padding(ClassBlock *block, i64 padding, ClassRule rule) {
    int c = class_of(0, rule);
    block->members[c / COUNT_LANES] -= (u64)padding << (c % COUNT_LANES * COUNT_BITS);
}

/* The place of the set bit that has `rank` set bits below it; there is one. */
INLINE int place_of_rank(u64 mask, i64 rank) {
#ifdef __BMI2__
    return __builtin_ctzll(__builtin_ia32_pdep_di((u64)1 << (rank & 63), mask));
#else
    while (rank--) mask &= mask - 1;
    return __builtin_ctzll(mask);
#endif
}

/* The last block of n words, which is not whole, with zeros for what is missing; returns the mask of what is there. */
INLINE u64 pad_block(const u16 *words, i64 count, u16 padded[MASKED]) {
    memset(padded, 0, MASKED * sizeof *padded);
    memcpy(padded, words, (size_t)count * sizeof *padded);
    return ((u64)1 << count) - 1;
}

/* How many of n words differ. */
i64 API(count_changed)(const u16 *before, const u16 *after, i64 n) {
    if (!is_size(n)) return BAD_SIZE;
    i64 count = 0;
    for (i64 i = 0; i < n; i++) count += before[i] != after[i];
    return count;
}
