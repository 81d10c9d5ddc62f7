/* Whole chunks in one call: words to planes to streams, and back.
 *
 * Memory safety: every exported kernel first checks its sizes, so that planes, streams and scratch are inside the
 * caller's buffers; streams are never larger than their planes. */
#include "lossless.h"

enum { MAX_STREAMS = 64 };

/* What all kernels need: tables for codes, and scratch for what they call. */
INLINE Code *take_code(Scratch *scratch) { return take(scratch, (i64)sizeof(Code)); }
INLINE Scratch lent(u8 *scratch, i64 size) { return (Scratch){scratch, scratch + max(size, 0)}; }

/* What write_sparse, read_digits and read_runs need for a plane. */
INLINE i64 sparse_scratch(i64 size) { return PIECE(size) + PIECE(size + size / 255); }
INLINE bool has_room(const Scratch *scratch, i64 size) { return scratch->end - scratch->next >= size; }

i64 API(lossless_scratch)(i64 width, i64 count, i64 columns) {
    if (!has_planes(width) || !is_size(count) || columns < 0 || columns > count) return BAD_SIZE;
    i64 rows = columns ? count / columns : 0, planes = max(width, 2) * count + 2 + 2 * rows;
    return PIECE(sizeof(Code)) + PIECE(4 * columns) + PIECE(2 * rows) + PIECE(planes) + PIECE(count) +
           sparse_scratch(count);
}

/* A chunk in the writing: its directory is filled stream by stream. */
typedef struct {
    u8 *out;
    i64 end;      /* of the last stream */
    int streams;  /* how many are written */
    u8 *spare;    /* where a stream is made whose plane lies where it will go */
    Code *code;
    Scratch scratch;
} Chunk;

/* Appends the stream of a plane, which begins at c->end or above it, or is `apart`: outside of c->out, which then has
 * `size` bytes left, so that the stream can be made where it will stay. */
static void append_stream(Chunk *c, const u8 *plane, i64 size, double max_ratio, bool sampled, bool apart) {
    i64 bytes;
    u8 *to = c->out + c->end, *made = apart ? to : c->spare;
    int kind = write_stream(plane, size, max_ratio, sampled, made, c->scratch, c->code, &bytes);
    const u8 *stream = kind == STORED ? plane : made;
    if (to != stream) memmove(to, stream, (size_t)bytes);
    put_head(c->out + 1 + ENTRY * c->streams, kind, bytes);
    c->streams++;
    c->end += bytes;
}

i64 API(write_streams)(const i64 *sizes, const double *max_ratios, const u8 *sampled, i64 count, u8 *out, i64 out_size,
                       u8 *scratch, i64 scratch_size) {
    Scratch s = lent(scratch, scratch_size);
    if (count < 0 || count > MAX_STREAMS) return BAD_SIZE;
    i64 largest = 0, end = 1 + ENTRY * count;
    for (i64 i = 0; i < count; i++) {
        if (!is_size(sizes[i])) return BAD_SIZE;
        largest = max(largest, sizes[i]);
        end += sizes[i];
    }
    Code *code = take_code(&s);
    u8 *spare = take(&s, largest);
    if (!code || !spare || !has_room(&s, sparse_scratch(largest)) || end > out_size) return BAD_SIZE;
    Chunk c = {out, 1 + ENTRY * count, 0, spare, code, s};
    const u8 *plane = out + c.end;
    for (i64 i = 0; i < count; plane += sizes[i++]) append_stream(&c, plane, sizes[i], max_ratios[i], sampled[i], false);
    return c.end;
}

i64 API(write_planes)(int floats, i64 width, const u8 *words, i64 count, double max_ratio, int sampled, u8 *out,
                      i64 out_size, u8 *scratch, i64 scratch_size) {
    Scratch s = lent(scratch, scratch_size);
    if (!has_planes(width) || !is_size(count) || out_size < 1 + width * (ENTRY + count)) return BAD_SIZE;
    Code *code = take_code(&s);
    u8 *spare = take(&s, count), *last = take(&s, count), *planes[8];
    if (!code || !spare || !last || !has_room(&s, sparse_scratch(count))) return BAD_SIZE;
    Chunk c = {out, 1 + ENTRY * width, 0, spare, code, s};
    for (i64 i = 0; i < 8; i++) planes[i] = i < width - 1 ? out + c.end + i * count : last;
    split_words(floats, width, words, count, planes);
    for (i64 i = 0; i < width; i++) {
        bool exponents = floats && i == width - 1 && (width == 2 || width == 4); /* a code surely pays */
        append_stream(&c, planes[i], count, max_ratio, sampled && !exponents, i == width - 1);
    }
    return c.end;
}

/* The scales of rows as three planes: two bytes of the least, then the lower and the higher bytes of what the others
 * are more. */
static void put_scales(const i16 *scales, i64 rows, u8 *out) {
    i32 least = scales[0];
    for (i64 row = 1; row < rows; row++) least = min(least, scales[row]);
    store16(out, (u16)least);
    for (i64 row = 0; row < rows; row++) {
        u32 more = (u32)(scales[row] - least);
        out[2 + row] = (u8)more;
        out[2 + rows + row] = (u8)(more >> 8);
    }
}

static void get_scales(const u8 *least, const u8 *lower, const u8 *higher, i64 rows, i16 *scales) {
    for (i64 row = 0; row < rows; row++) {
        u16 scale = (u16)(load16(least) + lower[row] + 256 * higher[row]);
        memcpy(scales + row, &scale, 2); /* modulo 2^16 */
    }
}

INLINE bool is_prediction(i64 width, i64 count, i64 base_width, const u8 *base, i64 columns) {
    return (width == 2 || width == 4) && is_size(count) && (base_width ? base != NULL : base == NULL) &&
           (base_width == 0 || base_width == 2 || base_width == 4) && columns > 0 && count >= columns &&
           count % columns == 0;
}

i64 API(write_residuals)(i64 width, const u8 *words, i64 count, i64 base_width, const u8 *base, i64 columns,
                         double max_ratio, int sampled, double row_max_ratio, u8 *out, i64 out_size, u8 *scratch,
                         i64 scratch_size) {
    Scratch s = lent(scratch, scratch_size);
    if (!is_prediction(width, count, base_width, base, columns)) return BAD_SIZE;
    i64 rows = count / columns;
    if (out_size < 1 + ENTRY * (width + 3) + width * count + 2 + 2 * rows) return BAD_SIZE;
    Code *code = take_code(&s);
    Prediction p = {width, base_width, rows, columns, base, take(&s, 4 * columns), take(&s, 2 * rows)};
    u8 *spare = take(&s, count), *residuals = take(&s, count), *planes[3];
    if (!code || !spare || !residuals || !p.column || !p.scales || !has_room(&s, sparse_scratch(count))) return BAD_SIZE;
    Chunk c = {out, 1 + ENTRY * (width + 3), 0, spare, code, s};
    for (i64 i = 0; i < 3; i++) planes[i] = out + c.end + min(i, width - 2) * count;
    u8 *scales = planes[width - 2] + count;
    to_residuals(&p, words, planes, residuals);
    double without = estimated_bits_of_exponents(width, words, count) * (double)count;
    if (without <= estimated_bits(residuals, count) * (double)count + (double)(8 * rows)) return 0;
    put_scales(p.scales, rows, scales);
    for (i64 i = 0; i < width - 1; i++) append_stream(&c, planes[i], count, max_ratio, sampled, false);
    append_stream(&c, scales, 2, row_max_ratio, true, false);
    append_stream(&c, scales + 2, rows, row_max_ratio, true, false);
    append_stream(&c, scales + 2 + rows, rows, row_max_ratio, true, false);
    append_stream(&c, residuals, count, max_ratio, false, true);
    return c.end;
}

/* Sets where each stream begins, and the last one ends; false if that is not where the chunk ends. */
static bool read_directory(const u8 *source, i64 source_size, i64 count, i64 *starts) {
    starts[0] = 1 + ENTRY * count;
    if (source_size < starts[0]) return false;
    for (i64 i = 0; i < count; i++) starts[i + 1] = starts[i] + load32(source + 2 + ENTRY * i);
    return starts[count] == source_size;
}

/* The plane of the i-th stream: in the source if it is stored, else in `buffer`; NULL if it is damaged. */
static const u8 *read_plane(const u8 *source, const i64 *starts, i64 i, u8 *buffer, i64 size, Scratch scratch,
                            Code *code) {
    int kind = source[1 + ENTRY * i];
    const u8 *stream = source + starts[i];
    i64 bytes = starts[i + 1] - starts[i];
    if (kind == STORED) return bytes == size ? stream : NULL;
    return read_stream(kind, stream, bytes, buffer, size, scratch, code) ? buffer : NULL;
}

i64 API(read_planes)(int floats, i64 width, const u8 *source, i64 source_size, u8 *words, i64 count, u8 *scratch,
                     i64 scratch_size) {
    Scratch s = lent(scratch, scratch_size);
    if (!has_planes(width) || !is_size(count) || source_size < 0) return BAD_SIZE;
    Code *code = take_code(&s);
    u8 *buffer = take(&s, width * count);
    if (!code || !buffer || !has_room(&s, sparse_scratch(count))) return BAD_SIZE;
    i64 starts[9];
    if (!read_directory(source, source_size, width, starts)) return 1 + width;
    const u8 *planes[8];
    for (i64 i = 0; i < width; i++) {
        planes[i] = read_plane(source, starts, i, buffer + i * count, count, s, code);
        if (!planes[i]) return 1 + i;
    }
    merge_words(floats, width, planes, count, words);
    return 0;
}

i64 API(read_residuals)(i64 width, const u8 *source, i64 source_size, i64 base_width, const u8 *base, i64 columns,
                        u8 *words, i64 count, u8 *scratch, i64 scratch_size) {
    Scratch s = lent(scratch, scratch_size);
    if (!is_prediction(width, count, base_width, base, columns) || source_size < 0) return BAD_SIZE;
    i64 rows = count / columns, streams = width + 3, starts[8];
    Code *code = take_code(&s);
    Prediction p = {width, base_width, rows, columns, base, take(&s, 4 * columns), take(&s, 2 * rows)};
    u8 *buffer = take(&s, width * count + 2 + 2 * rows);
    if (!code || !p.column || !p.scales || !buffer || !has_room(&s, sparse_scratch(count))) return BAD_SIZE;
    if (!read_directory(source, source_size, streams, starts)) return 1 + streams;
    const u8 *planes[7];
    for (i64 i = 0; i < streams; i++) {
        i64 place = i - (width - 1), size = place == 0 ? 2 : place == 1 || place == 2 ? rows : count;
        planes[i] = read_plane(source, starts, i, buffer, size, s, code);
        if (!planes[i]) return 1 + i;
        buffer += size;
    }
    get_scales(planes[width - 1], planes[width], planes[width + 1], rows, p.scales);
    from_residuals(&p, planes[width + 2], planes, words);
    return 0;
}

i64 API(read_streams)(const u8 *source, i64 source_size, const u8 *kinds, const i64 *starts, const i64 *sizes,
                      const i64 *places, i64 count, u8 *out, i64 out_size, u8 *scratch, i64 scratch_size) {
    Scratch s = lent(scratch, scratch_size);
    if (count < 0 || count > MAX_STREAMS) return BAD_SIZE;
    i64 largest = 0;
    for (i64 i = 0; i < count; i++) {
        if (starts[i] < 0 || starts[i] > starts[i + 1] || starts[i + 1] > source_size) return BAD_SIZE;
        if (!is_size(sizes[i]) || places[i] < 0 || sizes[i] > out_size || places[i] > out_size - sizes[i])
            return BAD_SIZE;
        largest = max(largest, sizes[i]);
    }
    Code *code = take_code(&s);
    if (!code || !has_room(&s, sparse_scratch(largest))) return BAD_SIZE;
    for (i64 i = 0; i < count; i++) {
        if (kinds[i] == STORED) continue;
        const u8 *stream = source + starts[i];
        if (!read_stream(kinds[i], stream, starts[i + 1] - starts[i], out + places[i], sizes[i], s, code)) return i;
    }
    return count;
}

i64 API(entropy_code)(const u8 *plane, i64 size, u8 *out, i64 out_size, u8 *scratch, i64 scratch_size) {
    Scratch s = lent(scratch, scratch_size);
    Code *code = take_code(&s);
    if (!is_size(size) || out_size < size || !code) return BAD_SIZE;
    count_symbols(plane, size, code);
    int used = assign_lengths(code, false);
    i64 bytes = used < 2 ? used : huffman_size(code);
    if (bytes >= size) return 0;
    if (used == 1) out[0] = plane[0];
    else write_huffman(plane, size, code, out);
    return bytes;
}
