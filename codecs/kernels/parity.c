/* Sums of products over GF(2^8), for Reed-Solomon codes.
 *
 * A product with a constant is linear in the bits of a byte: it is the sum of a product of its low and one of its high four bits,
 * for which a table of 16 bytes is one shuffle (Plank, Greenan, Miller: Screaming fast Galois field arithmetic, FAST 2013); or an
 * 8 x 8 matrix of bits, for which GFNI has an instruction.
 *
 * Why it is safe: a table has an entry for each of the 16 values of four bits; every loop is over rows, columns and bytes that
 * the arguments count. */
#include "parity.h"

#ifdef __SSSE3__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* Blocks that one pass reads, and blocks to which it adds: sums of so many stay in registers. */
#define PASS_COLUMNS 32
#define PASS_ROWS 4

typedef struct {
    u8 low[16], high[16]; /* the constant times x, and times 16 x */
    u64 bits;             /* its matrix, as GFNI reads it: byte 7 - i has the bits of x whose sum is bit i */
} Multiplier;

static u8 times(u8 a, u8 b) {
    u8 product = 0;
    for (int bit = 0; bit < 8; bit++) {
        if (b >> bit & 1) product ^= a;
        a = (u8)(a << 1 ^ (a >> 7 ? 0x1D : 0));
    }
    return product;
}

static void prepare(Multiplier *made, u8 constant) {
    for (int x = 0; x < 16; x++) made->low[x] = times(constant, (u8)x), made->high[x] = times(constant, (u8)(x << 4));
    made->bits = 0;
    for (int from = 0; from < 8; from++)
        for (int bit = 0; bit < 8; bit++)
            if (times(constant, (u8)(1 << from)) >> bit & 1) made->bits |= (u64)1 << (8 * (7 - bit) + from);
}

/* What one pass adds: `multipliers` has PASS_COLUMNS for each row; outputs begin `stride` bytes apart. */
typedef struct {
    const Multiplier *multipliers;
    i64 columns, size, stride;
    const u8 *inputs;
    u8 *outputs;
} Pass;

/* For each kind of vector: how many bytes it has, and the sums of `rows` rows at one place, of two vectors each. */
#define ADD_VECTORS(name, target, width, vector, load, store, multiplier, prepared, multiply, add)                      \
    target static inline i64 name##_rows(const Pass *pass, int rows) {                                                  \
        i64 at = 0;                                                                                                     \
        for (; at + 2 * width <= pass->size; at += 2 * width) {                                                         \
            vector sums[PASS_ROWS][2];                                                                                  \
            for (int r = 0; r < rows; r++)                                                                              \
                for (int v = 0; v < 2; v++) sums[r][v] = load(pass->outputs + r * pass->stride + at + v * width);       \
            for (i64 c = 0; c < pass->columns; c++) {                                                                   \
                const u8 *input = pass->inputs + c * pass->size + at;                                                   \
                vector x = load(input), y = load(input + width);                                                        \
                for (int r = 0; r < rows; r++) {                                                                        \
                    multiplier by = prepared(pass->multipliers + r * PASS_COLUMNS + c);                                 \
                    sums[r][0] = add(sums[r][0], multiply(x, by));                                                      \
                    sums[r][1] = add(sums[r][1], multiply(y, by));                                                      \
                }                                                                                                       \
            }                                                                                                           \
            for (int r = 0; r < rows; r++)                                                                              \
                for (int v = 0; v < 2; v++) store(pass->outputs + r * pass->stride + at + v * width, sums[r][v]);       \
        }                                                                                                               \
        return at;                                                                                                      \
    }                                                                                                                   \
                                                                                                                        \
    /* With a constant number of rows, the sums are in registers. Returns how many bytes of each block are done. */     \
    target static i64 name(const Pass *pass, int rows) {                                                                \
        return rows == 4 ? name##_rows(pass, 4) : rows == 3 ? name##_rows(pass, 3)                                      \
             : rows == 2 ? name##_rows(pass, 2) : name##_rows(pass, 1);                                                 \
    }

#if defined(__AVX2__)

typedef struct {
    __m256i low, high;
} Tables;

INLINE __m256i load_vector(const u8 *at) { return _mm256_loadu_si256((const __m256i *)at); }
INLINE void store_vector(u8 *at, __m256i vector) { _mm256_storeu_si256((__m256i *)at, vector); }
INLINE Tables tables_of(const Multiplier *from) {
    return (Tables){_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from->low)),
                    _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from->high))};
}
INLINE __m256i multiplied(__m256i x, Tables by) {
    const __m256i four = _mm256_set1_epi8(15);
    return _mm256_xor_si256(_mm256_shuffle_epi8(by.low, _mm256_and_si256(x, four)),
                            _mm256_shuffle_epi8(by.high, _mm256_and_si256(_mm256_srli_epi16(x, 4), four)));
}
ADD_VECTORS(add_by_tables, , 32, __m256i, load_vector, store_vector, Tables, tables_of, multiplied, _mm256_xor_si256)

#define GFNI __attribute__((target("avx2,gfni")))
GFNI INLINE __m256i matrix_of(const Multiplier *from) { return _mm256_set1_epi64x((i64)from->bits); }
GFNI INLINE __m256i transformed(__m256i x, __m256i by) { return _mm256_gf2p8affine_epi64_epi8(x, by, 0); }
ADD_VECTORS(add_by_gfni, GFNI, 32, __m256i, load_vector, store_vector, __m256i, matrix_of, transformed, _mm256_xor_si256)

#elif defined(__SSSE3__)

typedef struct {
    __m128i low, high;
} Tables;

INLINE __m128i load_vector(const u8 *at) { return _mm_loadu_si128((const __m128i *)at); }
INLINE void store_vector(u8 *at, __m128i vector) { _mm_storeu_si128((__m128i *)at, vector); }
INLINE Tables tables_of(const Multiplier *from) { return (Tables){load_vector(from->low), load_vector(from->high)}; }
INLINE __m128i multiplied(__m128i x, Tables by) {
    const __m128i four = _mm_set1_epi8(15);
    return _mm_xor_si128(_mm_shuffle_epi8(by.low, _mm_and_si128(x, four)),
                         _mm_shuffle_epi8(by.high, _mm_and_si128(_mm_srli_epi16(x, 4), four)));
}
ADD_VECTORS(add_by_tables, , 16, __m128i, load_vector, store_vector, Tables, tables_of, multiplied, _mm_xor_si128)

#elif defined(__aarch64__)

typedef struct {
    uint8x16_t low, high;
} Tables;

INLINE Tables tables_of(const Multiplier *from) { return (Tables){vld1q_u8(from->low), vld1q_u8(from->high)}; }
INLINE uint8x16_t multiplied(uint8x16_t x, Tables by) {
    return veorq_u8(vqtbl1q_u8(by.low, vandq_u8(x, vdupq_n_u8(15))), vqtbl1q_u8(by.high, vshrq_n_u8(x, 4)));
}
ADD_VECTORS(add_by_tables, , 16, uint8x16_t, vld1q_u8, vst1q_u8, Tables, tables_of, multiplied, veorq_u8)

#else
static i64 add_by_tables(const Pass *pass, int rows) { return (void)pass, (void)rows, 0; }
#endif

/* What is left of a pass after `at` bytes of each block: all of it on other machines. */
static void add_bytes(const Pass *pass, int rows, i64 at) {
    for (int r = 0; r < rows; r++) {
        u8 *sums = pass->outputs + r * pass->stride;
        for (i64 c = 0; c < pass->columns; c++) {
            const Multiplier *by = pass->multipliers + r * PASS_COLUMNS + c;
            const u8 *input = pass->inputs + c * pass->size;
            for (i64 i = at; i < pass->size; i++) sums[i] ^= by->low[input[i] & 15] ^ by->high[input[i] >> 4];
        }
    }
}

i64 API(add_products)(i64 rows, i64 columns, const u8 *matrix, i64 size, const u8 *inputs, u8 *outputs, i64 stride, i64 gfni) {
    if (rows < 1 || rows > 255 || columns < 1 || columns > 255 || !is_size(size) || !is_size(stride) || stride < size)
        return BAD_SIZE;
    if (!is_size(rows * stride) || !is_size(columns * size) || (gfni != 0 && gfni != 1)) return BAD_SIZE;
    Multiplier multipliers[PASS_ROWS][PASS_COLUMNS];
    for (i64 row = 0; row < rows; row += PASS_ROWS) {
        int own_rows = (int)min(rows - row, PASS_ROWS);
        for (i64 column = 0; column < columns; column += PASS_COLUMNS) {
            i64 own_columns = min(columns - column, PASS_COLUMNS);
            for (int r = 0; r < own_rows; r++)
                for (i64 c = 0; c < own_columns; c++)
                    prepare(&multipliers[r][c], matrix[(row + r) * columns + column + c]);
            Pass pass = {multipliers[0], own_columns, size, stride, inputs + column * size, outputs + row * stride};
#ifdef __AVX2__
            i64 done = gfni ? add_by_gfni(&pass, own_rows) : add_by_tables(&pass, own_rows);
#else
            i64 done = add_by_tables(&pass, own_rows);
#endif
            add_bytes(&pass, own_rows, done);
        }
    }
    return 0;
}
