/* Units and contexts from the second moments of Adam, and their drift; docs/delta-codecs.md, "Grids" and
 * "Predictions". All are words of float32; arithmetic that may wrap is unsigned, and what is shifted right is cast to
 * signed first, since the compilers that are supported shift it arithmetically. */
#include "kernels.h"

i64 API(root_units)(const u32 *second, i64 n, int shift, u8 *out) {
    if (!is_size(n) || shift < -(1 << 15) || shift >= 1 << 15) return BAD_SIZE;
    for (i64 i = 0; i < n; i++) {
        i32 unit = (i32)(((second[i] >> 23 & 255) + 127) >> 1) + shift;
        unit = unit < 1 ? 1 : unit;
        out[i] = (u8)(unit < 254 ? unit : 254);
    }
    return 0;
}

i64 API(growth_contexts)(const u32 *before, const u32 *after, i64 n, int least, int count, u8 *out) {
    if (!is_size(n) || count < 1 || count > 256 || least < -(1 << 15) || least >= 1 << 15) return BAD_SIZE;
    i32 most = count - 1;
    for (i64 i = 0; i < n; i++) {
        i32 above = ((i32)(after[i] - before[i]) >> 21) - least;
        above = above < 0 ? 0 : above;
        out[i] = (u8)(above < most ? above : most);
    }
    return 0;
}

i64 API(apply_drift)(const u32 *words, const i8 *rows, i64 row_count, const i8 *columns, i64 column_count, u32 *out) {
    if (row_count < 0 || row_count > MAX_ELEMENTS || column_count < 0 || column_count > MAX_ELEMENTS) return BAD_SIZE;
    if (row_count * column_count > MAX_ELEMENTS) return BAD_SIZE;
    for (i64 i = 0; i < row_count; i++)
        for (i64 j = 0, at = i * column_count; j < column_count; j++)
            out[at + j] = words[at + j] + ((u32)(rows[i] + columns[j]) << 19);
    return 0;
}
