/* Rows of bytes, each similar to the one above it, by the range coder; docs/delta-codecs.md, "ANS steps".
 *
 * Memory safety: a bit length of a byte is 0 to 8, and there is a group of models for each. */
#include "kernels.h"

enum { BYTE_MODELS = 8 * MODELS_PER_BIT, ROW_MODELS = 9 * BYTE_MODELS };

/* The models of byte i: chosen by the bit length of the byte above it, in the first row of the byte before it. */
INLINE BitModel *models_of_byte(BitModel *models, const u8 *rows, i64 i, i64 columns) {
    u32 like = i ? rows[i >= columns ? i - columns : i - 1] : 0;
    return models + BYTE_MODELS * (like ? 32 - __builtin_clz(like) : 0);
}

i64 API(write_rows)(const u8 *rows, i64 size, i64 columns, u8 *out, i64 room) {
    if (!is_size(size) || columns < 1 || room < 0) return BAD_SIZE;
    for (i64 i = 0; i < size; i++)
        if (rows[i] == 255) return BAD_SIZE; /* 256 would need nine bits */
    BitModel models[ROW_MODELS];
    reset_models(models, ROW_MODELS);
    RangeWriter w = new_range_writer(out, room);
    for (i64 i = 0; i < size; i++) write_number(&w, models_of_byte(models, rows, i, columns), 8, rows[i] + 1u);
    return finish_range(&w);
}

i64 API(read_rows)(const u8 *data, i64 data_size, i64 columns, u8 *rows, i64 size) {
    if (!is_size(size) || columns < 1 || data_size < 0) return BAD_SIZE;
    BitModel models[ROW_MODELS];
    reset_models(models, ROW_MODELS);
    RangeReader r = new_range_reader(data, data_size);
    for (i64 i = 0; i < size; i++) rows[i] = (u8)(read_number(&r, models_of_byte(models, rows, i, columns), 8) - 1);
    return has_read_all(&r);
}
