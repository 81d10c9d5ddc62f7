/* Products of matrices, and Householder's reflections, whose sums have one order on every machine.
 *
 * Each element of a product is a sum of its own, from the first product on, each product and each sum rounded. So the
 * speed comes from many sums at once: a tile of rows and columns whose sums stay in registers.
 *
 * Why it is safe: sizes are checked at the top, and all that is read and written lies inside of the matrices. */
#include "kernels.h"

/* As many float32 as one register holds. */
#if defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));

enum {
    TILE_ROWS = 5,
    TILE_VECTORS = 2,
    TILE_COLUMNS = TILE_VECTORS * LANES,
    BLOCK = 128, /* terms of a sum before the next tile: what they are made of stays in the first cache */
};

INLINE Floats load_floats(const float *at) { Floats values; memcpy(&values, at, sizeof values); return values; }
INLINE void store_floats(float *at, Floats values) { memcpy(at, &values, sizeof values); }

/* A matrix whose rows or columns are those of another one's memory: element (i, j) is at[i * row + j * column]. */
typedef struct {
    const float *at;
    i64 row, column;
} Strided;

/* Adds the products of some columns of `a` and as many rows of `x` to `rows` by `vectors * LANES` sums. */
INLINE void add_tile(Strided a, const float *x, i64 terms, i64 k, float *out, bool begins, int rows, int vectors) {
    Floats sums[TILE_ROWS][TILE_VECTORS] = {0};
    if (!begins)
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < vectors; v++) sums[i][v] = load_floats(out + i * k + v * LANES);
    for (i64 term = 0; term < terms; term++) {
        Floats right[TILE_VECTORS];
        for (int v = 0; v < vectors; v++) right[v] = load_floats(x + term * k + v * LANES);
        for (int i = 0; i < rows; i++) {
            float left = a.at[i * a.row + term * a.column];
            for (int v = 0; v < vectors; v++) sums[i][v] += left * right[v];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) store_floats(out + i * k + v * LANES, sums[i][v]);
}

/* The same of columns that fill no register. */
static void add_rest(Strided a, const float *x, i64 terms, i64 k, float *out, bool begins, int rows, i64 columns) {
    for (int i = 0; i < rows; i++) {
        float *sums = out + i * k;
        if (begins) memset(sums, 0, (size_t)columns * sizeof *sums);
        for (i64 term = 0; term < terms; term++) {
            float left = a.at[i * a.row + term * a.column];
            for (i64 j = 0; j < columns; j++) sums[j] += left * x[term * k + j];
        }
    }
}

INLINE void add_rows(Strided a, const float *x, i64 terms, i64 k, float *out, bool begins, int rows) {
    i64 j = 0;
    for (; j + TILE_COLUMNS <= k; j += TILE_COLUMNS) add_tile(a, x + j, terms, k, out + j, begins, rows, TILE_VECTORS);
    for (; j + LANES <= k; j += LANES) add_tile(a, x + j, terms, k, out + j, begins, rows, 1);
    if (j < k) add_rest(a, x + j, terms, k, out + j, begins, rows, k - j);
}

/* out = a x, for a of n x m and x of m x k. */
static void multiply_strided(Strided a, i64 n, i64 m, const float *x, i64 k, float *out) {
    if (m == 0) memset(out, 0, (size_t)(n * k) * sizeof *out);
    for (i64 first = 0; first < m; first += BLOCK) {
        i64 terms = min(m - first, BLOCK), i = 0;
        Strided block = {a.at + first * a.column, a.row, a.column};
        for (; i + TILE_ROWS <= n; i += TILE_ROWS, block.at += TILE_ROWS * a.row)
            add_rows(block, x + first * k, terms, k, out + i * k, first == 0, TILE_ROWS);
        for (; i < n; i++, block.at += a.row) add_rows(block, x + first * k, terms, k, out + i * k, first == 0, 1);
    }
}

INLINE bool is_matrix(i64 n, i64 m) { return is_size(n) && is_size(m) && is_size(n * m); }

i64 API(multiply)(const float *a, i64 n, i64 m, const float *x, i64 k, float *out) {
    if (!is_matrix(n, m) || !is_matrix(m, k) || !is_matrix(n, k)) return BAD_SIZE;
    multiply_strided((Strided){a, m, 1}, n, m, x, k, out);
    return 0;
}

i64 API(multiply_transposed)(const float *a, i64 n, i64 m, const float *x, i64 k, float *out) {
    if (!is_matrix(n, m) || !is_matrix(n, k) || !is_matrix(m, k)) return BAD_SIZE;
    multiply_strided((Strided){a, 1, m}, m, n, x, k, out);
    return 0;
}

/* Subtracts from `rows` by `vectors * LANES` elements of y. `panel` holds the columns of b, row after row. */
INLINE void subtract_tile(float *y, i64 m, const float *a, i64 k, const float *panel, int rows, int vectors) {
    Floats rest[TILE_ROWS][TILE_VECTORS];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) rest[i][v] = load_floats(y + i * m + v * LANES);
    for (i64 term = 0; term < k; term++) {
        Floats right[TILE_VECTORS];
        for (int v = 0; v < vectors; v++) right[v] = load_floats(panel + (term * vectors + v) * LANES);
        for (int i = 0; i < rows; i++) {
            float left = a[i * k + term];
            for (int v = 0; v < vectors; v++) rest[i][v] -= left * right[v];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) store_floats(y + i * m + v * LANES, rest[i][v]);
}

INLINE void subtract_panel(float *y, i64 n, i64 m, const float *a, i64 k, const float *b, float *panel, int vectors) {
    for (i64 term = 0; term < k; term++)
        memcpy(panel + term * vectors * LANES, b + term * m, (size_t)vectors * sizeof(Floats));
    i64 i = 0;
    for (; i + TILE_ROWS <= n; i += TILE_ROWS) subtract_tile(y + i * m, m, a + i * k, k, panel, TILE_ROWS, vectors);
    for (; i < n; i++) subtract_tile(y + i * m, m, a + i * k, k, panel, 1, vectors);
}

i64 API(subtract_product_scratch)(i64 k) {
    return is_size(k) ? PIECE(k * TILE_COLUMNS * (i64)sizeof(float)) : BAD_SIZE;
}

i64 API(subtract_product)(float *y, i64 n, i64 m, const float *a, i64 k, const float *b, u8 *scratch,
                          i64 scratch_size) {
    if (!is_matrix(n, m) || !is_matrix(n, k) || !is_matrix(k, m)) return BAD_SIZE;
    float *panel = take(&(Scratch){scratch, scratch + scratch_size}, k * TILE_COLUMNS * (i64)sizeof(float));
    if (!panel) return BAD_SIZE;
    i64 j = 0;
    for (; j + TILE_COLUMNS <= m; j += TILE_COLUMNS) subtract_panel(y + j, n, m, a, k, b + j, panel, TILE_VECTORS);
    for (; j + LANES <= m; j += LANES) subtract_panel(y + j, n, m, a, k, b + j, panel, 1);
    for (i64 i = 0; i < n && j < m; i++)
        for (i64 term = 0; term < k; term++)
            for (i64 rest = j; rest < m; rest++) y[i * m + rest] -= a[i * k + term] * b[term * m + rest];
    return 0;
}

/* --- reflections (Schreiber and Van Loan, "A storage-efficient WY representation", 1989) */

/* The square of a length up to which a column has no direction. */
#define NO_LENGTH 1e-200

typedef struct {
    double *y, *v, *dots, *t;
    i64 n, k;
} Decomposition;

INLINE double square_of(const double *v, i64 first, i64 n) {
    double square = 0;
    for (i64 i = first; i < n; i++) square += v[i] * v[i];
    return square;
}

/* What is left of column c, which is in v, as a reflection in v, which takes its place in y; false if it has no
 * direction. */
static bool reflect_column(Decomposition *d, i64 c) {
    double square = square_of(d->v, c, d->n);
    bool has_direction = square > NO_LENGTH;
    if (has_direction) {
        double norm = __builtin_sqrt(square);
        d->v[c] += d->v[c] >= 0 ? norm : -norm;
        double scale = __builtin_sqrt(2.0 / square_of(d->v, c, d->n));
        for (i64 i = c; i < d->n; i++) d->v[i] *= scale;
    }
    for (i64 i = c; i < d->n; i++) d->y[i * d->k + c] = has_direction ? d->v[i] : 0;
    return has_direction;
}

enum { DOTS = 16 };

/* Products of v with `count` columns of y, from column j on. */
INLINE void multiply_columns(const Decomposition *d, i64 c, i64 j, int count) {
    double dots[DOTS] = {0};
    const double *row = d->y + c * d->k + j;
    for (i64 i = c; i < d->n; i++, row += d->k) {
        double v = d->v[i];
        for (int at = 0; at < count; at++) dots[at] += v * row[at];
    }
    memcpy(d->dots + j, dots, (size_t)count * sizeof *dots);
}

/* Products of v with all columns of y: with the reflections before it, and with the columns that are left. */
static void multiply_all_columns(const Decomposition *d, i64 c) {
    i64 j = 0;
    for (; j + DOTS <= d->k; j += DOTS) multiply_columns(d, c, j, DOTS);
    for (; j < d->k; j++) multiply_columns(d, c, j, 1);
}

/* Reflects the columns after c, and copies the next one to v. */
static void reflect_rest(Decomposition *d, i64 c) {
    for (i64 i = c; i < d->n; i++) {
        double v = d->v[i], *restrict row = d->y + i * d->k;
        for (i64 j = c + 1; j < d->k; j++) row[j] -= v * d->dots[j];
        d->v[i] = row[c + 1];
    }
}

i64 API(decompose_qr_scratch)(i64 n, i64 k) {
    if (!is_matrix(n, k) || !is_size(k * k)) return BAD_SIZE;
    const i64 size = sizeof(double);
    return PIECE(n * k * size) + PIECE(n * size) + PIECE(k * size) + PIECE(k * k * size);
}

i64 API(decompose_qr)(const float *y, i64 n, i64 k, float *w, float *t, u8 *scratch, i64 scratch_size) {
    if (!is_matrix(n, k) || !is_size(k * k) || k > n) return BAD_SIZE;
    Scratch pieces = {scratch, scratch + scratch_size};
    Decomposition d = {.n = n, .k = k};
    d.y = take(&pieces, n * k * (i64)sizeof(double));
    d.v = take(&pieces, n * (i64)sizeof(double));
    d.dots = take(&pieces, k * (i64)sizeof(double));
    d.t = take(&pieces, k * k * (i64)sizeof(double));
    if (!d.y || !d.v || !d.dots || !d.t) return BAD_SIZE;
    for (i64 i = 0; i < n * k; i++) d.y[i] = (double)y[i];
    memset(d.t, 0, (size_t)(k * k) * sizeof(double));
    bool is_next_in_v = false;
    for (i64 c = 0; c < k; c++) {
        if (!is_next_in_v)
            for (i64 i = c; i < n; i++) d.v[i] = d.y[i * k + c];
        is_next_in_v = false;
        if (!reflect_column(&d, c)) continue;
        multiply_all_columns(&d, c);
        if (c + 1 < k) {
            reflect_rest(&d, c);
            is_next_in_v = true;
        }
        for (i64 i = 0; i < c; i++) {
            double sum = 0;
            for (i64 j = 0; j < c; j++) sum += d.t[i * k + j] * d.dots[j];
            d.t[i * k + c] = -sum;
        }
        d.t[c * k + c] = 1;
    }
    for (i64 i = 0; i < n; i++)
        for (i64 j = 0; j < k; j++) w[i * k + j] = i < j ? 0 : (float)d.y[i * k + j];
    for (i64 i = 0; i < k * k; i++) t[i] = (float)d.t[i];
    return 0;
}
