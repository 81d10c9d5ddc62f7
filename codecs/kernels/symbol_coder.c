/* Small signed numbers as bytes: an adaptive binary model, whose contexts are the numbers near by, and a range coder.
 *
 * Each binary decision has the probability of a 0 in parts of 2^15, the mean of two estimates that follow what was
 * decided, one quickly and one slowly. The coder is rANS (Duda, "Asymmetric numeral systems", 2013), with 32 bits of
 * state and 16 bits moved at a time. It codes the last decision first, so modelling and coding are two kernels.
 *
 * Why it is safe: what the decoder writes is counted by `size`, never by the code. It reads past the end of the code as
 * zeros. An estimate does not shrink below 15 or 127, nor grow nearer to 2^15, so no probability is 0 or 1. Averages of
 * magnitudes stay below 2^15, so the sum of two is an index of the table of contexts whatever the code is. */
#include "kernels.h"

enum {
    SYMBOL_GROUP = 8, /* neighbours in a row that one decision can say to be zero */
    SYMBOL_CONTEXTS = 20,
    MOST_UNARY = 14, /* magnitudes up to this have a decision for each unit; of larger ones the rest is Exp-Golomb */
    MOST_REST_BITS = 30,
    MOST_SHIFT = 24,
    MOST_DECISIONS = 112, /* of a symbol, at the very most, with those of its group */
    AVERAGED_MOST = 8, /* magnitudes are averaged as if they were at most this */
    AVERAGE_BITS = 12, /* after the point */
    CONTEXT_INDICES = (2 * AVERAGED_MOST << AVERAGE_BITS) / 8 + 1,
    DECISION_BITS = 15,
    DECISION_ONE = 1 << DECISION_BITS,
};
#define LOWEST_STATE ((u32)1 << 16)

/* Sums of two averages from which the next context begins. */
static const u16 CONTEXT_STEPS[SYMBOL_CONTEXTS - 1] = {
    40,   64,   104,  160,   256,   408,   648,   1024,  1624, 2584,
    4096, 6504, 10320, 16384, 22000, 30000, 38000, 46000, 56000,
};

/* An estimate in each half of a word: the quick one below, the slow one above. */
typedef u32 Estimates;
#define EVEN_ESTIMATES ((Estimates)(DECISION_ONE / 2) * 0x10001)

typedef struct {
    Estimates any[SYMBOL_CONTEXTS];              /* is any symbol of the group not zero? */
    Estimates some[SYMBOL_CONTEXTS];             /* is this one not zero? */
    Estimates more[SYMBOL_CONTEXTS][MOST_UNARY]; /* is its magnitude more than 1, 2, ...? */
    u8 contexts[CONTEXT_INDICES];                /* by an eighth of the sum of two averages */
    u16 *columns; /* the average magnitude in each column; 0 in what fills up the last group */
} SymbolModel;

INLINE i64 whole_groups(i64 columns) { return (columns + SYMBOL_GROUP - 1) / SYMBOL_GROUP * SYMBOL_GROUP; }

static void begin_model(SymbolModel *model, i64 columns, u16 *averages) {
    for (int i = 0; i < SYMBOL_CONTEXTS; i++) {
        model->any[i] = model->some[i] = EVEN_ESTIMATES;
        for (int j = 0; j < MOST_UNARY; j++) model->more[i][j] = EVEN_ESTIMATES;
    }
    int from = 0;
    for (int i = 0; i < SYMBOL_CONTEXTS; i++) {
        int until = i < SYMBOL_CONTEXTS - 1 ? (CONTEXT_STEPS[i] + 7) / 8 : CONTEXT_INDICES;
        memset(model->contexts + from, i, (size_t)(until - from));
        from = until;
    }
    model->columns = averages;
    memset(averages, 0, (size_t)whole_groups(columns) * sizeof *averages);
}

/* The probability of a 0: the mean. The upper half of the sum is that of both halves. */
INLINE u32 chance_of(Estimates estimates) { return (estimates + (estimates << 16)) >> 17; }

/* Estimates shrink by 1/16 and 1/128 after a 1, and grow by so much of what is left to 2^15 after a 0. */
INLINE Estimates after_one(Estimates e) { return e - ((e >> 4 & 0x0FFF) | (e >> 7 & 0x01FF0000)); }
INLINE Estimates after_zero(Estimates e) {
    u32 rest = 0x80008000 - e;
    return e + ((rest >> 4 & 0x0FFF) | (rest >> 7 & 0x01FF0000));
}

/* The context of a whole group: the mean of its columns' averages, and the row's. */
INLINE u32 context_of_group(const SymbolModel *model, u32 row, i64 left) {
    const u64 pairs = 0x0000FFFF0000FFFF;
    u64 a, b;
    memcpy(&a, model->columns + left, 8);
    memcpy(&b, model->columns + left + 4, 8);
    u64 sums = (a & pairs) + (b & pairs) + (a >> 16 & pairs) + (b >> 16 & pairs);
    u32 sum = (u32)(sums + (sums >> 32));
    return model->contexts[((sum >> 3) + row) >> 3];
}

INLINE u32 context_of_symbol(const SymbolModel *model, u32 row, i64 column) {
    return model->contexts[(model->columns[column] + row) >> 3];
}

/* A group of zeros: each column's average shrinks by (itself + 15) >> 4. Returns the row's. */
INLINE u32 learn_zeros(SymbolModel *model, u32 row, i64 left) {
    for (i64 i = left; i < left + SYMBOL_GROUP; i += 4) {
        u64 averages;
        memcpy(&averages, model->columns + i, 8);
        averages -= (averages + 0x000F000F000F000F) >> 4 & 0x0FFF0FFF0FFF0FFF;
        memcpy(model->columns + i, &averages, 8);
    }
    return row - (row * 103 >> 8);
}

INLINE u32 magnitude_of(i32 symbol) { return symbol < 0 ? 0 - (u32)symbol : (u32)symbol; }

/* Averages move by 1/16 towards a magnitude, rounded down. */
INLINE u32 now_of(u32 magnitude) { return min(magnitude, (u32)AVERAGED_MOST) << AVERAGE_BITS; }
INLINE u32 average_with(u32 average, u32 now) { return (15 * average + now) >> 4; }

/* The averages of a group's columns, all at once. */
INLINE void learn_columns(u16 *columns, const i32 *symbols, i64 width, int shift) {
    for (i64 i = 0; i < width; i++)
        columns[i] = (u16)average_with(columns[i], now_of(magnitude_of(symbols[i]) >> shift));
}

/* --- encoding */

INLINE u16 *add_bits(u16 *next, u32 value, int bits) {
    for (int i = bits - 1; i >= 0; i--) *next++ = (u16)(DECISION_ONE / 2 | (value >> i & 1) << DECISION_BITS);
    return next;
}

INLINE u16 *add_decision(u16 *next, Estimates *estimates, u32 bit) {
    Estimates e = *estimates;
    *next = (u16)(chance_of(e) | bit << DECISION_BITS);
    *estimates = bit ? after_one(e) : after_zero(e);
    return next + 1;
}

/* How far a magnitude goes beyond 1. */
static u16 *add_magnitude(u16 *next, Estimates *more, u32 magnitude) {
    for (u32 i = 1; i <= min(magnitude, (u32)MOST_UNARY); i++) next = add_decision(next, more + i - 1, magnitude > i);
    if (magnitude <= MOST_UNARY) return next;
    u32 rest = magnitude - MOST_UNARY;
    int bits = 31 - __builtin_clz(rest);
    next = add_bits(next, ((u32)1 << bits) - 1, bits);
    next = add_bits(next, 0, 1);
    return add_bits(next, rest, bits);
}

INLINE u16 *add_symbol(u16 *next, SymbolModel *model, u32 *row, i64 column, i32 symbol, int shift) {
    u32 magnitude = magnitude_of(symbol), high = magnitude >> shift, context = context_of_symbol(model, *row, column);
    if (!high) next = add_decision(next, &model->some[context], 0);
    else {
        next = add_decision(next, &model->some[context], 1);
        next = add_magnitude(next, model->more[context], high);
    }
    if (shift) next = add_bits(next, magnitude, shift);
    if (magnitude) next = add_bits(next, symbol < 0, 1);
    *row = average_with(*row, now_of(high));
    return next;
}

INLINE bool is_any(const i32 *symbols, i64 count, int shift) {
    u32 any = 0;
    for (i64 i = 0; i < count; i++) any |= magnitude_of(symbols[i]);
    return any >> shift != 0;
}

INLINE u16 *add_group(u16 *next, SymbolModel *model, u32 *row, i64 left, i64 width, const i32 *symbols,
                       int shift) {
    if (width > 1) {
        bool any = is_any(symbols, width, shift);
        next = add_decision(next, &model->any[context_of_group(model, *row, left)], any);
        if (!any && !shift) {
            *row = learn_zeros(model, *row, left);
            return next;
        }
    }
    for (i64 i = 0; i < width; i++) next = add_symbol(next, model, row, left + i, symbols[i], shift);
    learn_columns(model->columns + left, symbols, width, shift);
    return next;
}

i64 API(symbols_scratch)(i64 columns) {
    if (!is_size(columns) || columns == 0) return BAD_SIZE;
    return PIECE(sizeof(SymbolModel)) + PIECE(whole_groups(columns) * (i64)sizeof(u16));
}

static SymbolModel *take_model(i64 columns, u8 *scratch, i64 scratch_size) {
    if (!is_size(columns) || columns == 0) return NULL;
    Scratch pieces = {scratch, scratch + scratch_size};
    SymbolModel *model = take(&pieces, sizeof *model);
    u16 *averages = take(&pieces, whole_groups(columns) * (i64)sizeof(u16));
    if (!model || !averages) return NULL;
    begin_model(model, columns, averages);
    return model;
}

/* In a last row that is shorter, the last group has no more columns. */
INLINE void end_columns(SymbolModel *model, i64 width) {
    memset(model->columns + width, 0, (size_t)(whole_groups(width) - width) * sizeof(u16));
}

i64 API(model_symbols)(const i32 *symbols, i64 size, i64 columns, i64 shift, u16 *decisions, i64 room, u8 *scratch,
                       i64 scratch_size) {
    if (!is_size(size) || room < 0 || shift < 0 || shift > MOST_SHIFT) return BAD_SIZE;
    SymbolModel *model = take_model(columns, scratch, scratch_size);
    if (!model) return BAD_SIZE;
    u16 *next = decisions;
    u32 row = 0; /* the average of the last magnitudes, whatever row they are in */
    for (i64 start = 0; start < size; start += columns) {
        i64 width = min(columns, size - start);
        end_columns(model, width);
        for (i64 left = 0; left < width; left += SYMBOL_GROUP) {
            if (room - (next - decisions) < SYMBOL_GROUP * MOST_DECISIONS) return BAD_SIZE;
            const i32 *group = symbols + start + left;
            /* Most groups are whole and most shifts are 0: the constants let the compiler unroll. */
            if (width - left < SYMBOL_GROUP) next = add_group(next, model, &row, left, width - left, group, (int)shift);
            else if (shift) next = add_group(next, model, &row, left, SYMBOL_GROUP, group, (int)shift);
            else next = add_group(next, model, &row, left, SYMBOL_GROUP, group, 0);
        }
    }
    return next - decisions;
}

/* state / share is state * reciprocal(share) >> 47, for share below 2^15 and state below share << 17. The reciprocal is
 * 2^47 / share and at most 1 more; so the quotient is at most 2^32 / 2^47 more, less than 1 / share, and stays below
 * the next whole number. The product stays below 2^64. The quotient of doubles is rounded, but not up to a whole number:
 * that is at least 2^-15 away. */
INLINE u64 reciprocal(u32 share) { return (u64)(i64)(0x1p47 / (double)share) + 1; }

i64 API(code_decisions)(const u16 *decisions, i64 count, u8 *out, i64 room) {
    if (count < 0 || room < 4 || count > (room - 4) / 2) return BAD_SIZE;
    bool is_impossible = false; /* the model decides nothing that has no probability */
    for (i64 i = 0; i < count; i++) is_impossible |= decisions[i] == 0;
    if (is_impossible) return BAD_SIZE;
    u64 state = LOWEST_STATE;
    u8 *next = out + room;
    for (i64 i = count - 1; i >= 0; i--) {
        /* No branches: decisions are as good as random where they cost anything. */
        u32 chance = decisions[i] & (DECISION_ONE - 1), is_one = -(u32)(decisions[i] >> DECISION_BITS);
        u32 share = (chance ^ is_one) - is_one + (is_one & DECISION_ONE);
        u64 factor = reciprocal(share);
        if (RARE(state >= (u64)share << 17)) { /* the state waits for no branch, and few are mispredicted */
            store16(next -= 2, (u16)state);
            state >>= 16;
        }
        state += (state * factor >> 47) * (DECISION_ONE - share) + (chance & is_one);
    }
    store32(next - 4, (u32)state);
    return next - 4 - out;
}

/* --- decoding */

typedef struct {
    const u8 *code;
    i64 length, next; /* `next` may be past the length: zeros were read there */
    u32 state;
} DecisionReader;

INLINE void refill(DecisionReader *reader) {
    if (reader->state >= LOWEST_STATE) return;
    reader->state <<= 16;
    if (reader->next + 2 <= reader->length) reader->state |= load16(reader->code + reader->next);
    reader->next += 2;
}

INLINE u32 decode_bit(DecisionReader *reader) {
    u32 state = reader->state, bit = state >> 14 & 1;
    reader->state = (state >> 15 << 14) | (state & 0x3FFF);
    refill(reader);
    return bit;
}

INLINE u32 decode_bits(DecisionReader *reader, int bits) {
    u32 value = 0;
    for (int i = 0; i < bits; i++) value = value << 1 | decode_bit(reader);
    return value;
}

/* A branch for each decision, since the processor predicts most of them and need not wait for the state. */
INLINE bool decode_decision(DecisionReader *reader, Estimates *estimates) {
    Estimates e = *estimates;
    u32 chance = chance_of(e), low = reader->state & (DECISION_ONE - 1), high = reader->state >> DECISION_BITS;
    bool bit = low >= chance;
    if (bit) {
        reader->state = (DECISION_ONE - chance) * high + low - chance;
        *estimates = after_one(e);
    } else {
        reader->state = chance * high + low;
        *estimates = after_zero(e);
    }
    refill(reader);
    return bit;
}

#define NO_MAGNITUDE ((u64)1 << 40)

/* The magnitude of what is above the shift, of a symbol that is not 0; NO_MAGNITUDE where no symbol has it. */
INLINE u64 decode_magnitude(DecisionReader *reader, Estimates *more) {
    u32 magnitude = 1;
    while (magnitude <= MOST_UNARY && decode_decision(reader, more + magnitude - 1)) magnitude++;
    if (magnitude <= MOST_UNARY) return magnitude;
    int bits = 0;
    while (decode_bit(reader))
        if (++bits > MOST_REST_BITS) return NO_MAGNITUDE;
    return MOST_UNARY + (u64)((u32)1 << bits | decode_bits(reader, bits));
}

/* The state after a decision that had `share` of the probability, and leaves `rest` of the state's low bits. */
INLINE void leave_decision(DecisionReader *reader, u32 share, u32 rest) {
    reader->state = share * (reader->state >> DECISION_BITS) + rest;
    refill(reader);
}

INLINE bool decode_symbol(DecisionReader *reader, SymbolModel *model, u32 *row, i64 column, i32 *symbol, int shift) {
    u32 context = context_of_symbol(model, *row, column);
    Estimates e = model->some[context];
    u32 chance = chance_of(e), low = reader->state & (DECISION_ONE - 1);
    u64 high;
    if (low < chance) {
        model->some[context] = after_zero(e);
        leave_decision(reader, chance, low);
        *row = average_with(*row, 0);
        if (!shift) return true;
        high = 0;
    } else {
        model->some[context] = after_one(e);
        leave_decision(reader, DECISION_ONE - chance, low - chance);
        high = decode_magnitude(reader, model->more[context]);
        *row = average_with(*row, now_of((u32)high));
    }
    u64 magnitude = shift ? high << shift | decode_bits(reader, shift) : high;
    if (RARE(magnitude >= (u64)1 << 31)) return false;
    if (magnitude) *symbol = decode_bit(reader) ? -(i32)magnitude : (i32)magnitude;
    return true;
}

INLINE bool decode_group(DecisionReader *reader, SymbolModel *model, u32 *row, i64 left, i64 width, i32 *symbols,
                       int shift) {
    memset(symbols, 0, (size_t)width * sizeof *symbols);
    if (width > 1) {
        bool any = decode_decision(reader, &model->any[context_of_group(model, *row, left)]);
        if (!any && !shift) {
            *row = learn_zeros(model, *row, left);
            return true;
        }
    }
    for (i64 i = 0; i < width; i++)
        if (!decode_symbol(reader, model, row, left + i, symbols + i, shift)) return false;
    learn_columns(model->columns + left, symbols, width, shift);
    return true;
}

i64 API(decode_symbols)(const u8 *code, i64 length, i64 columns, i64 shift, i32 *symbols, i64 size, u8 *scratch,
                        i64 scratch_size) {
    if (!is_size(size) || length < 0 || shift < 0 || shift > MOST_SHIFT) return BAD_SIZE;
    SymbolModel *model = take_model(columns, scratch, scratch_size);
    if (!model) return BAD_SIZE;
    if (length < 4) return 0;
    DecisionReader reader = {code, length, 4, load32(code)};
    u32 row = 0;
    for (i64 start = 0; start < size; start += columns) {
        if (reader.next > length) return 0;
        i64 width = min(columns, size - start);
        end_columns(model, width);
        for (i64 left = 0; left < width; left += SYMBOL_GROUP) {
            i32 *group = symbols + start + left;
            bool is_read;
            if (width - left < SYMBOL_GROUP)
                is_read = decode_group(&reader, model, &row, left, width - left, group, (int)shift);
            else if (shift) is_read = decode_group(&reader, model, &row, left, SYMBOL_GROUP, group, (int)shift);
            else is_read = decode_group(&reader, model, &row, left, SYMBOL_GROUP, group, 0);
            if (!is_read) return 0;
        }
    }
    return reader.next == length && reader.state == LOWEST_STATE;
}
