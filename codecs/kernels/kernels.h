/* What all kernels share: integer types, limits, errors, scratch memory, and the names of functions for Python.
 *
 * Rules that make them safe for any content of a file:
 * - Every buffer comes with its length. An exported function checks all lengths before it touches memory, and returns
 *   BAD_SIZE if they do not fit: that is a bug of the caller, never caused by a file.
 * - Nothing is allocated or stored between calls, and only the buffers of the caller are written.
 * - No buffer has more than MAX_ELEMENTS, so that no product of sizes overflows an i64.
 * - Bytes of a file are read by load16, load32 and load64, which accept any address.
 * - Signed numbers never overflow and are never shifted to the left while negative.
 * - Floating-point operations are rounded one by one, as in NumPy: the build forbids contraction and fast-math.
 *
 * Files are little-endian, and so is every machine that this compiles for. */
#ifndef CKPT_KERNELS_H
#define CKPT_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "only little-endian machines are supported"
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;

#define INLINE static inline __attribute__((always_inline))
/* What is long and called a few times a chunk: one copy of it in the library. */
#define OUTLINED __attribute__((noinline))
/* The same, as short as possible: what takes little of the time. */
#ifdef __clang__
#define SMALL __attribute__((noinline, minsize))
#else
#define SMALL __attribute__((noinline, cold))
#endif
#define RARE(condition) __builtin_expect(!!(condition), 0)
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))

/* The sources are compiled once for each level of CPU, and each level has its own prefix: v2_encode, v3_encode.
 * All functions that Python calls are named API(name) and declared in lossless.h, deltas.h, lossy.h,
 * stepping.h, gradients.h, quantised.h, stats.h or parity.h; all others are static. */
#ifndef LEVEL
#define LEVEL v1
#endif
#define JOIN_EXPANDED(a, b) a##_##b
#define JOIN(a, b) JOIN_EXPANDED(a, b)
#define API(name) JOIN(LEVEL, name)

/* The result of an exported function that is called with sizes that do not fit; any other result is >= 0. */
#define BAD_SIZE ((i64)-1)

#define MAX_ELEMENTS ((i64)1 << 28)

/* Is this the length of a buffer? */
INLINE bool is_size(i64 size) { return size >= 0 && size <= MAX_ELEMENTS; }

INLINE u16 load16(const u8 *at) { u16 word; memcpy(&word, at, sizeof word); return word; }
INLINE u32 load32(const u8 *at) { u32 word; memcpy(&word, at, sizeof word); return word; }
INLINE u64 load64(const u8 *at) { u64 word; memcpy(&word, at, sizeof word); return word; }
INLINE void store16(u8 *at, u16 word) { memcpy(at, &word, sizeof word); }
INLINE void store32(u8 *at, u32 word) { memcpy(at, &word, sizeof word); }
INLINE void store64(u8 *at, u64 word) { memcpy(at, &word, sizeof word); }

/* The bits of a float, and the float of bits. */
INLINE u32 bits_of_float(float value) { u32 bits; memcpy(&bits, &value, sizeof bits); return bits; }
INLINE float float_of_bits(u32 bits) { float value; memcpy(&value, &bits, sizeof value); return value; }
/* IEEE 754 does not define the bits of a NaN: all become one. */
INLINE float canonical_nan(float x) { return x == x ? x : float_of_bits(0x7FC00000); }
INLINE u64 bits_of_double(double value) { u64 bits; memcpy(&bits, &value, sizeof bits); return bits; }
INLINE double double_of_bits(u64 bits) { double value; memcpy(&value, &bits, sizeof value); return value; }

/* Scratch memory of the caller, which is divided into parts. Python aligns its start to 64 bytes. */
typedef struct {
    u8 *next, *end;
} Scratch;

/* The bytes that a part of `size` bytes takes in a Scratch, so that all parts are aligned. */
#define PIECE(size) (((i64)(size) + 63) & ~(i64)63)

/* The next `size` bytes, aligned like the start; NULL if there are not as many. */
INLINE void *take(Scratch *scratch, i64 size) {
    if (size < 0 || size > scratch->end - scratch->next || PIECE(size) > scratch->end - scratch->next) return NULL;
    u8 *piece = scratch->next;
    scratch->next += PIECE(size);
    return piece;
}

#endif
