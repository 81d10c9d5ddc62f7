/* Symbols grouped by contexts, in their order, and back; docs/delta-codecs.md, "Grids" and
 * "Steps of 16-bit floats".
 *
 * Memory safety: a context is a byte and tables have 256 entries; places are sums of counts of the same contexts. */
#include "kernels.h"

/* Four tables by turns: one would wait for its own sums. */
static void count_context_bytes(const u8 *plane, i64 n, u32 counts[256]) {
    u32 tables[4][256] = {{0}};
    i64 i = 0;
    for (; i + 4 <= n; i += 4)
        for (int j = 0; j < 4; j++) tables[j][plane[i + j]]++;
    for (; i < n; i++) tables[0][plane[i]]++;
    for (int c = 0; c < 256; c++) counts[c] = tables[0][c] + tables[1][c] + tables[2][c] + tables[3][c];
}

/* Where the symbols of each context begin. */
static void find_context_starts(const u8 *contexts, i64 n, u32 starts[256]) {
    u32 at = 0;
    count_context_bytes(contexts, n, starts);
    for (int c = 0; c < 256; c++) {
        u32 count = starts[c];
        starts[c] = at;
        at += count;
    }
}

i64 API(count_contexts)(const u8 *contexts, i64 n, i64 *counts) {
    if (!is_size(n)) return BAD_SIZE;
    u32 sums[256];
    count_context_bytes(contexts, n, sums);
    for (int c = 0; c < 256; c++) counts[c] = sums[c];
    return 0;
}

i64 API(exponent_buckets)(const u16 *words, i64 n, int mantissa_bits, int least, int count, u8 *out) {
    if (!is_size(n) || mantissa_bits < 0 || mantissa_bits > 15) return BAD_SIZE;
    if (least < 0 || least > 255 || count < 1 || count > 256) return BAD_SIZE;
    i16 most = (i16)(count - 1), first = (i16)least;
    for (i64 i = 0; i < n; i++) {
        i16 above = (i16)(((words[i] & 0x7FFF) >> mantissa_bits) - first);
        above = above < 0 ? 0 : above;
        out[i] = (u8)(above < most ? above : most);
    }
    return 0;
}

i64 API(gather)(const u8 *contexts, const u8 *plane, i64 n, u8 *out) {
    if (!is_size(n)) return BAD_SIZE;
    u32 places[256];
    find_context_starts(contexts, n, places);
    for (i64 i = 0; i < n; i++) out[places[contexts[i]]++] = plane[i];
    return 0;
}

i64 API(scatter)(const u8 *contexts, const u8 *plane, i64 n, u8 *out) {
    if (!is_size(n)) return BAD_SIZE;
    u32 places[256];
    find_context_starts(contexts, n, places);
    for (i64 i = 0; i < n; i++) out[i] = plane[places[contexts[i]]++];
    return 0;
}
