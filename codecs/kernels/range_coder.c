/* An adaptive binary range coder, and numbers of any size by it; docs/delta-codecs.md, "Steps of 16-bit floats", specifies both.
 *
 * The coder narrows an interval of 64-bit numbers (Martin, "Range encoding", 1979). At least 33 bits of its size are in
 * use, so a bit costs one product and no division. The writer adds a carry to the bytes that it has written already. A
 * model learns the chance of a set bit at the rate of the Krichevsky-Trofimov estimator: fast at first, then slower.
 *
 * Memory safety: the writer counts bytes past the end of its buffer and does not write them, the reader takes zeros past
 * the end of its data, and every model index follows from a bit length that is bounded by the caller's `max_bits`. */
#include "kernels.h"
#include "rates.h"

enum { CHANCE_BITS = 22, CERTAIN = 1 << CHANCE_BITS, MIN_CHANCE = 1 << 8, MAX_CHANCE = CERTAIN - MIN_CHANCE };
enum { MODELED_BITS = 2 };  /* bits below the highest one of a number that have models; the others are even */
enum { MODELS_PER_BIT = 5 }; /* a number of at most b bits needs 5 b models */

/* The chance of a set bit in 2^-22, and how many bits the model has seen, up to SLOWEST_RATE. */
typedef struct {
    u32 chance, seen;
} BitModel;

static void reset_models(BitModel *models, i64 count) {
    for (i64 i = 0; i < count; i++) models[i] = (BitModel){CERTAIN / 2, 0};
}

INLINE u32 clamp_chance(u32 chance) {
    chance = chance < MIN_CHANCE ? (u32)MIN_CHANCE : chance;
    return chance > MAX_CHANCE ? (u32)MAX_CHANCE : chance;
}

/* A chance lies in [MIN_CHANCE, MAX_CHANCE] before, so one clamp to both ends suits either bit. */
INLINE void learn_bit(BitModel *model, bool bit) {
    u64 rate = ckpt_rates[model->seen];
    u32 chance = model->chance, more = CERTAIN - chance;
    u32 raised = chance + (u32)(more * rate >> RATE_BITS), lowered = chance - (u32)(chance * rate >> RATE_BITS);
    model->chance = clamp_chance(bit ? raised : lowered);
    model->seen += model->seen < SLOWEST_RATE;
}

/* ---- writing ---- */

/* The low end of the interval, its size, and how many bytes have left it: only those below `room` are in `out`. */
typedef struct {
    u64 low, size;
    u8 *out;
    i64 at, room;
} RangeWriter;

INLINE RangeWriter new_range_writer(u8 *out, i64 room) {
    return (RangeWriter){0, ~(u64)0, out, 0, room};
}

/* Adds one to the number whose last byte is out[end - 1]. There is a byte that is not 255: the interval began below 2^64. */
static __attribute__((noinline, cold)) void carry_into(u8 *out, i64 end) {
    while (end-- > 0)
        if (++out[end]) return;
}

static __attribute__((noinline, cold)) void write_bytes_that_fit(u8 *out, i64 at, i64 room, u64 word) {
    for (int i = 0; i < 4; i++, word <<= 8)
        if (at + i < room) out[at + i] = (u8)(word >> 56);
}

/* Narrows the interval to `size` numbers, `offset` above its low end. */
INLINE void narrow_range(RangeWriter *w, u64 offset, u64 size) {
    w->low += offset;
    if (RARE(w->low < offset)) carry_into(w->out, w->at < w->room ? w->at : w->room);
    if (RARE(!(size >> 32))) {
        if (w->at + 4 <= w->room) store32(w->out + w->at, __builtin_bswap32((u32)(w->low >> 32)));
        else write_bytes_that_fit(w->out, w->at, w->room, w->low);
        w->at += 4, w->low <<= 32, size <<= 32;
    }
    w->size = size;
}

INLINE void write_range_bit(RangeWriter *w, BitModel *model, bool bit) {
    u64 bound = (w->size >> CHANCE_BITS) * model->chance;
    narrow_range(w, bit ? 0 : bound, bit ? bound : w->size - bound);
    learn_bit(model, bit);
}

/* Up to 24 bits of which nothing is known beforehand, as one number. */
INLINE void write_even_bits(RangeWriter *w, u64 number, int bits) {
    u64 size = w->size >> bits;
    narrow_range(w, size * number, size);
}

/* A number from 1 to 2^max_bits - 1, with MODELS_PER_BIT * max_bits models. */
INLINE void write_number(RangeWriter *w, BitModel *models, int max_bits, u32 number) {
    int length = 32 - __builtin_clz(number), left = length - 1;
    u32 prefix = 1;
    for (int i = 0; i < length - 1; i++) write_range_bit(w, models + i, true);
    if (length < max_bits) write_range_bit(w, models + length - 1, false);
    BitModel *low_models = models + max_bits + 4 * (length - 1);
    for (int i = 0; i < MODELED_BITS && left > 0; i++) {
        u32 bit = number >> --left & 1;
        write_range_bit(w, low_models + prefix, bit);
        prefix = 2 * prefix + bit;
    }
    if (left > 0) write_even_bits(w, number & ((1u << left) - 1), left);
}

/* Writes as few bytes as tell the interval from its neighbours. Returns how many bytes there are in all. */
static i64 finish_range(RangeWriter *w) {
    u64 last = w->low + (w->size - 1);
    i64 at = w->at;
    if (last < w->low) { /* 2^64 lies in the interval: all further bytes are zeros, which the reader takes unasked */
        carry_into(w->out, at < w->room ? at : w->room);
        return at;
    }
    int drop = 56;
    while (drop && last >> drop << drop < w->low) drop -= 8;
    for (last = last >> drop << drop; last; last <<= 8, at++)
        if (at < w->room) w->out[at] = (u8)(last >> 56);
    return at;
}

/* ---- reading ---- */

/* What was read less the interval's low end, the interval's size, and how many bytes were asked for. */
typedef struct {
    u64 offset, size;
    const u8 *data;
    i64 at, data_size;
} RangeReader;

static __attribute__((noinline, cold)) u32 load_past_end(const u8 *data, i64 at, i64 data_size) {
    u32 word = 0;
    for (i64 i = at; i < at + 4; i++) word = word << 8 | (i < data_size ? data[i] : 0);
    return word;
}

INLINE u32 next_range_word(RangeReader *r) {
    u32 word = r->at + 4 <= r->data_size ? __builtin_bswap32(load32(r->data + r->at))
                                         : load_past_end(r->data, r->at, r->data_size);
    r->at += 4;
    return word;
}

INLINE RangeReader new_range_reader(const u8 *data, i64 data_size) {
    RangeReader r = {0, ~(u64)0, data, 0, data_size};
    u64 high = next_range_word(&r);
    r.offset = high << 32 | next_range_word(&r);
    return r;
}

INLINE void widen_range(RangeReader *r) {
    if (RARE(!(r->size >> 32))) {
        r->offset = r->offset << 32 | next_range_word(r);
        r->size <<= 32;
    }
}

/* A branch for each bit: a model that has learned makes most bits foreseeable, and then nothing waits for them. */
INLINE bool read_range_bit(RangeReader *r, BitModel *model) {
    u64 bound = (r->size >> CHANCE_BITS) * model->chance;
    bool bit = r->offset < bound;
    if (bit) {
        r->size = bound;
        learn_bit(model, true);
    } else {
        r->offset -= bound, r->size -= bound;
        learn_bit(model, false);
    }
    widen_range(r);
    return bit;
}

/* The interval has at least 2^32 numbers, so the divisor is at least 2^8. */
INLINE u32 read_even_bits(RangeReader *r, int bits) {
    u64 size = r->size >> bits, number = r->offset / size, most = ((u64)1 << bits) - 1;
    number = number < most ? number : most;
    r->offset -= number * size;
    r->size = size;
    widen_range(r);
    return (u32)number;
}

INLINE u32 read_number(RangeReader *r, BitModel *models, int max_bits) {
    int length = 1;
    while (length < max_bits && read_range_bit(r, models + length - 1)) length++;
    BitModel *low_models = models + max_bits + 4 * (length - 1);
    u32 prefix = 1;
    int left = length - 1;
    for (int i = 0; i < MODELED_BITS && left > 0; i++, left--) prefix = 2 * prefix + read_range_bit(r, low_models + prefix);
    return left > 0 ? prefix << left | read_even_bits(r, left) : prefix;
}

INLINE bool has_read_all(const RangeReader *r) {
    return r->at >= r->data_size;
}
