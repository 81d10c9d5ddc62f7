/* Planes of bytes that are mostly zero, as version 0.3.0 wrote them: read, and written no more; docs/delta-codecs.md,
 * "Rare changes".
 *
 * An older coder than that of range_coder.c: the interval has two ends of 32 bits, and a byte leaves it as soon as both
 * ends agree on it, so that nothing carries.
 *
 * Safe because: contexts are at most 16, for which there are models; places are compared with the end of their context,
 * and these ends are sums that were compared with the size of the plane. */
#include "kernels.h"

enum { PLANE_CONTEXTS = 16, DENSE = 255, MAX_GAP_SHIFT = 24 };
enum { PLANE_FLAGS = 0, PLANE_VALUES = PLANE_FLAGS + PLANE_CONTEXTS, VALUE_BITS = 8, GAP_BITS = 32 };
enum { PLANE_GAPS = PLANE_VALUES + PLANE_CONTEXTS * 5 * VALUE_BITS, PLANE_MODELS = PLANE_GAPS + 5 * GAP_BITS };
enum { HALF_CHANCE = 1 << 15, MIN_PLANE_CHANCE = 32, MAX_PLANE_CHANCE = 65536 - MIN_PLANE_CHANCE, SLOWEST_SEEN = 255 };

/* The chance of a set bit in 65536ths, and how many bits the model has seen. */
typedef struct {
    u32 chance, seen;
} PlaneModel;

typedef struct {
    u32 low, high, word;
    const u8 *data;
    i64 at, data_size;
} PlaneReader;

INLINE u32 next_plane_byte(PlaneReader *r) {
    u32 byte = r->at < r->data_size ? r->data[r->at] : 0;
    r->at++;
    return byte;
}

/* A bit of which a set one has `chance` 65536ths. */
INLINE bool read_plane_chance(PlaneReader *r, u32 chance) {
    u32 middle = r->low + (u32)((u64)(r->high - r->low) * chance >> 16);
    bool bit = r->word <= middle;
    if (bit) r->high = middle;
    else r->low = middle + 1;
    while ((r->low ^ r->high) >> 24 == 0) {
        r->low <<= 8;
        r->high = r->high << 8 | 255;
        r->word = r->word << 8 | next_plane_byte(r);
    }
    return bit;
}

INLINE bool read_plane_bit(PlaneReader *r, PlaneModel *model) {
    bool bit = read_plane_chance(r, model->chance);
    u32 divisor = 2 * model->seen + 3;
    if (bit) {
        u32 chance = model->chance + (65535 - model->chance) * 2 / divisor;
        model->chance = chance < MAX_PLANE_CHANCE ? chance : (u32)MAX_PLANE_CHANCE;
    } else {
        u32 chance = model->chance - model->chance * 2 / divisor;
        model->chance = chance > MIN_PLANE_CHANCE ? chance : (u32)MIN_PLANE_CHANCE;
    }
    model->seen += model->seen < SLOWEST_SEEN;
    return bit;
}

/* A number of 1 and more: its bit length, the two bits below the highest by models, the others evenly. */
static u32 read_plane_number(PlaneReader *r, PlaneModel *models, int max_bits) {
    int length = 1;
    while (length < max_bits && read_plane_bit(r, models + length - 1)) length++;
    PlaneModel *low_models = models + max_bits + 4 * (length - 1);
    u32 number = 1;
    for (int i = 0; i < length - 1; i++)
        number = 2 * number + (i < 2 ? read_plane_bit(r, low_models + number) : read_plane_chance(r, HALF_CHANCE));
    return number;
}

static bool are_contexts(const i64 *counts, const u8 *shifts, i64 contexts, i64 size) {
    i64 sum = 0;
    for (i64 c = 0; c < contexts; c++) {
        if (counts[c] < 0 || counts[c] > size || (shifts[c] > MAX_GAP_SHIFT && shifts[c] != DENSE)) return false;
        sum += counts[c];
    }
    return sum == size;
}

i64 API(read_sparse_plane)(const u8 *data, i64 data_size, const i64 *counts, const u8 *shifts, i64 contexts, u8 *plane,
                           i64 size) {
    if (data_size < 0 || !is_size(size) || contexts < 0 || contexts > PLANE_CONTEXTS) return BAD_SIZE;
    if (!are_contexts(counts, shifts, contexts, size)) return BAD_SIZE;
    PlaneModel models[PLANE_MODELS];
    for (int i = 0; i < PLANE_MODELS; i++) models[i] = (PlaneModel){HALF_CHANCE, 0};
    PlaneReader r = {0, 0xFFFFFFFF, 0, data, 0, data_size};
    for (int i = 0; i < 4; i++) r.word = r.word << 8 | next_plane_byte(&r);
    memset(plane, 0, (size_t)size);
    i64 at = 0;
    for (i64 c = 0; c < contexts; c++) {
        PlaneModel *values = models + PLANE_VALUES + c * 5 * VALUE_BITS;
        i64 end = at + counts[c];
        if (shifts[c] == DENSE) {
            for (; at < end; at++)
                if (read_plane_bit(&r, models + PLANE_FLAGS + c)) plane[at] = (u8)read_plane_number(&r, values, VALUE_BITS);
            continue;
        }
        while (true) {
            i64 gap = (i64)read_plane_number(&r, models + PLANE_GAPS, GAP_BITS) - 1; /* 32 bits, and 24 more */
            for (int i = 0; i < shifts[c]; i++) gap = 2 * gap + read_plane_chance(&r, HALF_CHANCE);
            if (gap > end - at) return 0;
            if (gap == end - at) break;
            at += gap;
            plane[at++] = (u8)read_plane_number(&r, values, VALUE_BITS);
        }
        at = end;
    }
    return r.at == data_size;
}
