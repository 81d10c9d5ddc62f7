/* The entropy of a plane: of all of its symbols, or estimated from a sample.
 *
 * Encoders choose by these numbers, so they must be the same on every machine: log2 is implemented here, and every sum has a
 * fixed order. Memory safety: a sample lies within the plane by its construction. */
#include "lossless.h"

/* log2 of x >= 1 up to 2^53, exact for powers of two, else within 1e-15 of its value: x = 2^k * m with m from sqrt(1/2)
 * to sqrt(2), and log2(m) = 2 / ln(2) * atanh(s), s = (m - 1) / (m + 1), by its series up to s^21. Without branches, so
 * that compilers make vectors of it. */
INLINE double log2_of(double x) {
    const u64 mantissa = ((u64)1 << 52) - 1, one = (u64)1023 << 52, two_to_52 = (u64)1075 << 52;
    u64 word = bits_of_double(x);
    double m = double_of_bits((word & mantissa) | one);
    double k = double_of_bits(word >> 52 | two_to_52) - (0x1p52 + 1023); /* the exponent, converted to a double by hand */
    bool above = m > 0x1.6a09e667f3bcdp+0;
    m = above ? m * 0.5 : m;
    k = above ? k + 1 : k;
    double s = (m - 1) / (m + 1), square = s * s, sum = 1.0 / 21;
    for (int odd = 19; odd >= 1; odd -= 2) sum = sum * square + 1.0 / odd;
    return k + 0x1.71547652b82fep+1 * (s * sum);
}

/* Takes count * log2(count) of each symbol, the first one first, away from `bits`; sets *used to how many occur. */
static double take_known_bits(const u32 counts[256], double bits, int *used) {
    double terms[256];
    for (int symbol = 0; symbol < 256; symbol++) {
        double count = counts[symbol];
        terms[symbol] = count * log2_of(max(count, 1));
    }
    *used = 0;
    for (int symbol = 0; symbol < 256; symbol++) {
        bits -= terms[symbol];
        *used += counts[symbol] > 0;
    }
    return bits;
}

/* The bits that all symbols of a plane take at their entropy. */
static double entropy_of_plane(const u32 counts[256]) {
    double size = 0;
    int used;
    for (int symbol = 0; symbol < 256; symbol++) size += counts[symbol];
    return take_known_bits(counts, 0, &used) + size * log2_of(max(size, 1));
}

/* A sample is 256 neighbours, or an even number of fewer, from each sixteenth of a plane. */
enum { SAMPLES = 16, SAMPLE_SIZE = 256 };

/* A sample has on average less entropy than what it is taken from, by this for each symbol but one: G. A. Miller,
 * "Note on the bias of information estimates" (1955). It is 1 / (2 ln 2). */
static const double MISSING_BITS = 0.5 / 0x1.62e42fefa39efp-1;

/* Of an empty sample, this is negative. */
static double bits_per_symbol(const u32 counts[2][256], i64 size) {
    u32 both[256];
    int used;
    for (int symbol = 0; symbol < 256; symbol++) both[symbol] = counts[0][symbol] + counts[1][symbol];
    double whole = (double)max(size, 1), bits = take_known_bits(both, (double)size * log2_of(whole), &used);
    return (bits + (used - 1) * MISSING_BITS) / whole;
}

INLINE i64 sample_size(i64 size) { return min(size / SAMPLES, SAMPLE_SIZE) / 2 * 2; }

/* Bits per symbol of a plane. */
static double estimated_bits(const u8 *plane, i64 size) {
    u32 counts[2][256] = {{0}};
    i64 length = sample_size(size);
    for (i64 s = 0; s < SAMPLES; s++) {
        const u8 *sample = plane + s * (size / SAMPLES);
        for (i64 i = 0; i < length; i += 2) {
            counts[0][sample[i]]++;
            counts[1][sample[i + 1]]++;
        }
    }
    return bits_per_symbol(counts, SAMPLES * length);
}

/* The same of the plane of exponents of float32 or bfloat16, without the plane. */
static double estimated_bits_of_exponents(i64 width, const u8 *words, i64 count) {
    u32 counts[2][256] = {{0}};
    i64 length = sample_size(count);
    for (i64 s = 0; s < SAMPLES; s++) {
        const u8 *sample = words + s * (count / SAMPLES) * width + width - 2;
        for (i64 i = 0; i < length; i++) counts[i & 1][load16(sample + i * width) >> 7 & 255]++;
    }
    return bits_per_symbol(counts, SAMPLES * length);
}

double API(estimate_bits)(const u8 *plane, i64 size) { return is_size(size) ? estimated_bits(plane, size) : BAD_SIZE; }
