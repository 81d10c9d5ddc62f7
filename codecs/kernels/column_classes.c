/* 8-bit codes of gradients in four classes, by the row and the column of a matrix, each with its own Huffman code.
 *
 * The gradient of a matrix is a sum of outer products, so rows and columns differ in magnitude. docs/codecs.md, "Columns",
 * specifies the bytes. Memory safety: three bits are always one of eight groups and two bits one of four classes, sizes of
 * classes follow from them and from the caller's sizes, and a stream is read into a plane of known size, or refused. */
#include "gradients.h"
#include "lossless.h"

enum { GROUPS = 8, GROUP_CLASSES = 4, TABLE_BYTES = GROUPS * GROUPS / 4, MAX_COLUMNS = 1 << 16 };
enum { MEAN_BITS = 2, MEANS = 129 << MEAN_BITS }; /* quarters of a code */

/* A range of the elements of a matrix, which begins in its first row after `skipped` elements. */
typedef struct {
    i64 columns, skipped, rows, end; /* end: of the last row */
} Matrix;

INLINE Matrix range_of_matrix(i64 count, i64 columns, i64 skipped) {
    i64 rows = (skipped + count + columns - 1) / columns;
    return (Matrix){columns, skipped, rows, skipped + count - (rows - 1) * columns};
}
INLINE i64 row_begin(const Matrix *m, i64 row) { return row ? 0 : m->skipped; }
INLINE i64 row_end(const Matrix *m, i64 row) { return row < m->rows - 1 ? m->columns : m->end; }
INLINE i64 groups_bytes(i64 size) { return (size + 1) / 2; }
INLINE i64 classes_bytes(const Matrix *m) { return TABLE_BYTES + groups_bytes(m->columns) + groups_bytes(m->rows); }
INLINE int group_at(const u8 *groups, i64 i) { return groups[i / 2] >> 4 * (i & 1) & (GROUPS - 1); }
INLINE int class_at(const u8 *table, int row, int column) { return table[2 * row + column / 4] >> column % 4 * 2 & 3; }
INLINE bool are_sizes(i64 count, i64 columns, i64 skipped) {
    return is_size(count) && columns >= 1 && columns <= min(count, MAX_COLUMNS) && skipped >= 0 && skipped < columns;
}

i64 API(columns_scratch)(i64 count, i64 columns) {
    if (!are_sizes(count, columns, 0)) return BAD_SIZE;
    return PIECE(sizeof(Code)) + PIECE(count) + PIECE(2 * GROUPS * columns) + PIECE(4 * (count / columns + 2)) +
           sparse_scratch(count);
}

/* ---- choosing classes ---- */

/* How many rows or columns a group has, and the sum of their means. */
typedef struct {
    u64 numbers[GROUPS], sums[GROUPS];
} Groups;

/* Writes the group of each mean: by how many are smaller, in eighths, and half of those that are equal. */
static SMALL Groups write_groups(const u32 *means, i64 size, u8 *out) {
    Groups g = {{0}, {0}};
    u32 number[MEANS] = {0};
    u8 group_of[MEANS];
    for (i64 i = 0; i < size; i++) number[means[i]]++;
    i64 before = 0;
    for (int mean = 0; mean < MEANS; mean++) {
        group_of[mean] = (u8)(GROUPS * (before + number[mean] / 2) / size);
        before += number[mean];
    }
    memset(out, 0, (size_t)groups_bytes(size));
    for (i64 i = 0; i < size; i++) {
        int group = group_of[means[i]];
        out[i / 2] |= (u8)(group << 4 * (i & 1));
        g.numbers[group]++;
        g.sums[group] += means[i];
    }
    return g;
}

/* Writes the class of each pair of groups: in the order of the products of their mean magnitudes, about as many codes in
 * each. Returns false if there is only one class. */
static SMALL bool write_table(const Groups *rows, const Groups *columns, u8 *table) {
    u64 products[GROUPS * GROUPS], all = 0, before = 0;
    u8 pairs[GROUPS * GROUPS];
    int used = 0, classes = 0;
    for (int pair = 0; pair < GROUPS * GROUPS; pair++) {
        int row = pair / GROUPS, column = pair % GROUPS;
        u64 number = rows->numbers[row] * columns->numbers[column];
        if (!number) continue;
        u64 row_mean = (rows->sums[row] << 8) / rows->numbers[row];
        u64 product = row_mean * ((columns->sums[column] << 8) / columns->numbers[column]);
        int at = used++;
        for (; at && products[at - 1] > product; at--) products[at] = products[at - 1], pairs[at] = pairs[at - 1];
        products[at] = product;
        pairs[at] = (u8)pair;
        all += number;
    }
    memset(table, 0, TABLE_BYTES);
    for (int i = 0; i < used; i++) {
        int row = pairs[i] / GROUPS, column = pairs[i] % GROUPS;
        u64 number = rows->numbers[row] * columns->numbers[column];
        int class = (int)(GROUP_CLASSES * (before + number / 2) / all);
        table[2 * row + column / 4] |= (u8)(class << column % 4 * 2);
        classes |= 1 << class;
        before += number;
    }
    return classes & (classes - 1);
}

/* Adds the magnitudes of a row to the sums of columns; returns their own. */
static OUTLINED u32 add_magnitudes(const u8 *codes, i64 size, u32 *sums) {
    u32 sum = 0;
    for (i64 i = 0; i < size; i++) {
        i32 code = (i8)codes[i];
        u32 magnitude = (u32)(code < 0 ? -code : code);
        sums[i] += magnitude;
        sum += magnitude;
    }
    return sum;
}

static SMALL bool find_classes(const Matrix *m, const u8 *codes, u32 *sums, u32 *row_means, u8 *out) {
    memset(sums, 0, 4 * (size_t)m->columns);
    for (i64 row = 0; row < m->rows; row++) {
        i64 begin = row_begin(m, row), width = row_end(m, row) - begin;
        row_means[row] = (u32)(((u64)add_magnitudes(codes, width, sums + begin) << MEAN_BITS) / (u64)width);
        codes += width;
    }
    for (i64 i = 0; i < m->columns; i++)
        sums[i] = (u32)(((u64)sums[i] << MEAN_BITS) / (u64)(m->rows - (i < m->skipped) - (i >= m->end)));
    Groups columns = write_groups(sums, m->columns, out + TABLE_BYTES);
    Groups rows = write_groups(row_means, m->rows, out + TABLE_BYTES + groups_bytes(m->columns));
    return write_table(&rows, &columns, out);
}

/* ---- the codes of a class ---- */

/* The columns of each class, ascending, in the rows of each group. */
typedef struct {
    const u8 *row_groups;
    const u16 *places;                      /* those of each group of rows: `columns`, class by class */
    i64 begins[GROUPS][GROUP_CLASSES + 1];  /* of each class among them */
} Classes;

static OUTLINED Classes sort_columns(const Matrix *m, const u8 *classes, u16 *places) {
    const u8 *groups = classes + TABLE_BYTES;
    Classes c = {.row_groups = groups + groups_bytes(m->columns), .places = places};
    i64 numbers[GROUPS] = {0};
    for (i64 i = 0; i < m->columns; i++) numbers[group_at(groups, i)]++;
    for (int row = 0; row < GROUPS; row++) {
        i64 next[GROUP_CLASSES] = {0}, begin = row * m->columns;
        u8 class_of[GROUPS];
        for (int column = 0; column < GROUPS; column++) {
            class_of[column] = (u8)class_at(classes, row, column);
            next[class_of[column]] += numbers[column];
        }
        for (int class = 0; class < GROUP_CLASSES; class++) {
            i64 number = next[class];
            c.begins[row][class] = next[class] = begin;
            begin += number;
        }
        c.begins[row][GROUP_CLASSES] = begin;
        for (i64 i = 0; i < m->columns; i++) places[next[class_of[group_at(groups, i)]]++] = (u16)i;
    }
    return c;
}

/* Moves the codes of a class between a matrix and a plane; returns how many there are. */
INLINE i64 move_class(const Matrix *m, const Classes *c, int class, const u8 *codes, u8 *back, u8 *plane,
                      bool gathers) {
    i64 filled = 0;
    for (i64 row = 0; row < m->rows; row++) {
        int group = group_at(c->row_groups, row);
        const u16 *places = c->places + c->begins[group][class];
        i64 width = c->begins[group][class + 1] - c->begins[group][class], first = row * m->columns - m->skipped;
        i64 begin = row_begin(m, row), end = row_end(m, row);
        if (begin || end < m->columns) {
            while (width && places[width - 1] >= end) width--;
            while (width && places[0] < begin) places++, width--;
        }
        if (gathers)
            for (i64 i = 0; i < width; i++) plane[filled + i] = codes[first + places[i]];
        else
            for (i64 i = 0; i < width; i++) back[first + places[i]] = plane[filled + i];
        filled += width;
    }
    return filled;
}

static OUTLINED i64 gather(const Matrix *m, const Classes *c, int class, const u8 *codes, u8 *plane) {
    return move_class(m, c, class, codes, NULL, plane, true);
}

static OUTLINED void scatter(const Matrix *m, const Classes *c, int class, u8 *plane, u8 *codes) {
    move_class(m, c, class, NULL, codes, plane, false);
}

static SMALL i64 size_of_class(const Matrix *m, const Classes *c, int class) {
    i64 size = 0;
    for (i64 row = 0; row < m->rows; row++) {
        const i64 *begins = c->begins[group_at(c->row_groups, row)];
        i64 begin = row_begin(m, row), end = row_end(m, row);
        if (!begin && end == m->columns) size += begins[class + 1] - begins[class];
        else
            for (i64 i = begins[class]; i < begins[class + 1]; i++) size += c->places[i] >= begin && c->places[i] < end;
    }
    return size;
}

/* ---- whole chunks ---- */

/* At most the bytes of one stream of all codes, and of its entry, from how often each symbol occurs; 0 if it may be stored
 * as runs or digits. */
static SMALL i64 single_size(i64 count, const u32 totals[256], Code *code) {
    memcpy(code->totals, totals, sizeof code->totals);
    memset(code->counts, 0, sizeof code->counts);
    memcpy(code->counts[0], totals, sizeof code->totals);
    assign_lengths(code, false); /* as write_stream does */
    i64 bytes = huffman_size(code);
    if (may_be_sparse(count, bytes, code)) return 0;
    bool seven_bits = true;
    for (int symbol = 128; symbol < 256; symbol++) seven_bits &= !totals[symbol];
    return ENTRY + (seven_bits ? min(bytes, count - count / 8) : bytes);
}

SMALL i64 API(write_columns)(const u8 *codes, i64 count, i64 columns, i64 skipped, u8 *out, i64 out_size, u8 *scratch,
                       i64 scratch_size) {
    Scratch s = lent(scratch, scratch_size);
    if (!are_sizes(count, columns, skipped)) return BAD_SIZE;
    Matrix m = range_of_matrix(count, columns, skipped);
    Code *code = take_code(&s);
    u8 *plane = take(&s, count);
    u16 *places = take(&s, 2 * GROUPS * columns);
    u32 *row_means = take(&s, 4 * m.rows);
    i64 directory = classes_bytes(&m), at = directory + GROUP_CLASSES * ENTRY;
    if (!code || !plane || !places || !row_means || out_size < at + count) return BAD_SIZE;
    if (!find_classes(&m, codes, (u32 *)(void *)places, row_means, out)) return 0;
    Classes c = sort_columns(&m, out, places);
    u32 totals[256] = {0};
    for (int class = 0; class < GROUP_CLASSES; class++) {
        i64 size = gather(&m, &c, class, codes, plane);
        count_symbols(plane, size, code);
        i64 bytes = assign_lengths(code, true) < 2 ? size : huffman_size(code);
        if (size && bytes >= size) return 0;
        for (int symbol = 0; symbol < 256; symbol++) totals[symbol] += code->totals[symbol];
        put_head(out + directory + class * ENTRY, size ? HUFFMAN : STORED, bytes);
        if (size) write_huffman(plane, size, code, out + at);
        at += bytes;
    }
    return at < single_size(count, totals, code) ? at : 0;
}

SMALL i64 API(read_columns)(const u8 *source, i64 source_size, i64 columns, i64 skipped, u8 *codes, i64 count, u8 *scratch,
                      i64 scratch_size) {
    Scratch s = lent(scratch, scratch_size);
    if (!are_sizes(count, columns, skipped) || source_size < 0) return BAD_SIZE;
    Matrix m = range_of_matrix(count, columns, skipped);
    Code *code = take_code(&s);
    u8 *plane = take(&s, count);
    u16 *places = take(&s, 2 * GROUPS * columns);
    if (!code || !plane || !places || !has_room(&s, sparse_scratch(count))) return BAD_SIZE;
    i64 directory = classes_bytes(&m), at = directory + GROUP_CLASSES * ENTRY;
    if (at > source_size) return 0;
    Classes c = sort_columns(&m, source, places);
    for (int class = 0; class < GROUP_CLASSES; class++) {
        const u8 *head = source + directory + class * ENTRY;
        i64 bytes = load32(head + 1);
        if (bytes > source_size - at) return 0;
        if (!read_stream(head[0], source + at, bytes, plane, size_of_class(&m, &c, class), s, code)) return 0;
        scatter(&m, &c, class, plane, codes);
        at += bytes;
    }
    return at;
}
