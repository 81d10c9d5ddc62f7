/* Steps of 16-bit floats of which few are not zero: their places and sizes; docs/delta-codecs.md, "Sparse steps".
 *
 * A step is the signed difference between the words of a value and of its prediction. The bucket of a value follows
 * from its prediction. A gap is the number of a bucket's values before its next change.
 *
 * Memory safety: every bucket is compared with their number before it is an index, shifts of gaps are at most 24, and
 * sizes of buckets at most MAX_ELEMENTS, so that no sum of gaps leaves 64 bits. A rank is less than the number of the
 * bucket's values in its block. */
#include "kernels.h"

enum { SHIFT_BITS = 6, MAX_SHIFT = 24, STEP_BITS = 16 };
enum { SHIFT_MODELS = 0, SIGN_MODEL = MODELS_PER_BIT * SHIFT_BITS, BUCKET_MODELS };
/* For each bucket: one of "the gap ends here", then those of the sizes of its steps. */
enum { MODELS_PER_BUCKET = 1 + MODELS_PER_BIT * STEP_BITS };
enum { MAX_MODELS = BUCKET_MODELS + CLASSES * MODELS_PER_BUCKET };

static bool all_bytes_below(const u8 *values, i64 n, u32 limit) {
    u8 greatest = 0;
    for (i64 i = 0; i < n; i++) greatest = values[i] > greatest ? values[i] : greatest;
    return greatest < limit || n == 0;
}

static bool are_bucket_sizes(const i64 *sizes, i64 buckets, i64 n) {
    for (i64 c = 0; c < buckets; c++)
        if (sizes[c] < 0 || sizes[c] > n) return false;
    return true;
}

/* What find_steps knows of each bucket, and where the results go. */
typedef struct {
    i64 seen[CLASSES], seen_at_change[CLASSES]; /* values of the bucket so far, and to its last change */
    i64 *gap_after[CLASSES];                    /* where the bucket's next gap goes */
    u8 *bucket_of;
    i64 *gaps, count, room;
    u16 *steps;
} StepFinder;

/* The changes of 64 values: a gap is a difference of ranks. False if there is no room for them. */
INLINE bool find_block_steps(StepFinder *f, const u16 *predicted, const u16 *actual, ClassRule rule, u64 valid) {
    u64 changed = changed_mask(predicted, actual), masks[CLASSES];
    class_masks(predicted, rule, masks);
    if (changed) {
        if (f->room - f->count < count_bits(changed)) return false;
        for (; changed; changed &= changed - 1) {
            int i = __builtin_ctzll(changed), c = class_of(predicted[i], rule);
            i64 ordinal = f->seen[c] + count_bits(masks[c] & (((u64)1 << i) - 1));
            *f->gap_after[c] = ordinal - f->seen_at_change[c];
            f->seen_at_change[c] = ordinal + 1;
            f->gap_after[c] = f->gaps + f->count;
            f->bucket_of[f->count] = (u8)c, f->steps[f->count++] = (u16)(actual[i] - predicted[i]);
        }
    }
    for (int c = 0; c < CLASSES; c++) f->seen[c] += count_bits(masks[c] & valid);
    return true;
}

/* Of each change its bucket, its step and the gap after it; of each bucket its size and the gap before its first
 * change. Returns how many changes there are, at most `room`. */
i64 API(find_steps)(const u16 *predicted, const u16 *actual, i64 n, int mantissa_bits, int least, i64 buckets,
                    u8 *bucket_of, i64 *gaps, u16 *steps, i64 room, i64 *sizes, i64 *first_gaps) {
    if (!is_size(n) || !is_class_rule(mantissa_bits, least, buckets) || room < 0) return BAD_SIZE;
    ClassRule rule = {mantissa_bits, least, (int)buckets - 1};
    i64 first[CLASSES];
    StepFinder f = {.bucket_of = bucket_of, .gaps = gaps, .room = room, .steps = steps};
    for (int c = 0; c < CLASSES; c++) f.gap_after[c] = first + c;
    u16 before[MASKED], after[MASKED];
    for (i64 i = 0; i < n; i += MASKED) {
        const u16 *from = predicted + i, *to = actual + i;
        u64 valid = ~(u64)0;
        if (n - i < MASKED) {
            valid = pad_block(from, n - i, before);
            pad_block(to, n - i, after);
            from = before, to = after;
        }
        if (!find_block_steps(&f, from, to, rule, valid)) return BAD_SIZE;
    }
    for (i64 c = 0; c < buckets; c++) sizes[c] = f.seen[c], *f.gap_after[c] = f.seen[c] - f.seen_at_change[c];
    memcpy(first_gaps, first, (size_t)buckets * sizeof *first);
    return f.count;
}

/* Of `rest` values of a bucket, `gap` come before its next change; all, if there is none. A bit says whether the change is
 * among the next 2^shift, again and again; then its place among them is told evenly. */
INLINE void write_step_gap(RangeWriter *w, BitModel *flag, int shift, i64 gap, i64 rest) {
    for (i64 passed = 0; passed < rest; passed += (i64)1 << shift) {
        bool ends = gap < rest && gap < passed + ((i64)1 << shift);
        write_range_bit(w, flag, ends);
        if (ends) {
            if (shift) write_even_bits(w, (u64)(gap - passed), shift);
            return;
        }
    }
}

/* The gap is greater than `rest` only if the bytes are damaged. */
INLINE i64 read_step_gap(RangeReader *r, BitModel *flag, int shift, i64 rest) {
    for (i64 gap = 0; gap < rest; gap += (i64)1 << shift)
        if (read_range_bit(r, flag)) return gap + read_even_bits(r, shift);
    return rest;
}

INLINE BitModel *flag_model(BitModel *models, i64 bucket) {
    return models + BUCKET_MODELS + bucket * MODELS_PER_BUCKET;
}

i64 API(write_sparse_steps)(const u8 *bucket_of, const i64 *gaps, const u16 *steps, i64 count, const i64 *sizes,
                            const i64 *first_gaps, const u8 *shifts, i64 buckets, u8 *out, i64 room) {
    if (!is_size(count) || buckets < 1 || buckets > CLASSES || room < 0) return BAD_SIZE;
    if (!all_bytes_below(bucket_of, count, (u32)buckets) || !all_bytes_below(shifts, buckets, MAX_SHIFT + 1)) return BAD_SIZE;
    if (!are_bucket_sizes(sizes, buckets, MAX_ELEMENTS)) return BAD_SIZE;
    BitModel models[MAX_MODELS];
    reset_models(models, BUCKET_MODELS + buckets * MODELS_PER_BUCKET);
    RangeWriter w = new_range_writer(out, room);
    i64 rest[CLASSES];
    int last = 0;
    for (i64 c = 0; c < buckets; c++) {
        rest[c] = sizes[c];
        if (!rest[c]) continue;
        int more = shifts[c] - last;
        last = shifts[c];
        write_number(&w, models + SHIFT_MODELS, SHIFT_BITS, (u32)(more >= 0 ? 2 * more + 1 : -2 * more));
        write_step_gap(&w, flag_model(models, c), last, first_gaps[c], rest[c]);
        rest[c] -= first_gaps[c] + 1;
    }
    for (i64 i = 0; i < count; i++) {
        i64 c = bucket_of[i];
        bool down = steps[i] >> 15;
        u32 size = down ? 0x10000u - steps[i] : steps[i];
        if (!size) return BAD_SIZE; /* a step of zero is no change */
        BitModel *flag = flag_model(models, c);
        write_range_bit(&w, models + SIGN_MODEL, down);
        write_number(&w, flag + 1, STEP_BITS, size);
        write_step_gap(&w, flag, shifts[c], gaps[i], rest[c]);
        rest[c] -= gaps[i] + 1;
    }
    return finish_range(&w);
}

/* How many values each bucket has. */
static void count_bucket_sizes(const u16 *predicted, i64 n, ClassRule rule, i64 sizes[CLASSES]) {
    u64 masks[CLASSES];
    i64 i = 0;
    memset(sizes, 0, CLASSES * sizeof *sizes);
    for (; i + MASKED <= n; i += MASKED) {
        class_masks(predicted + i, rule, masks);
        for (int c = 0; c < CLASSES; c++) sizes[c] += count_bits(masks[c]);
    }
    for (; i < n; i++) sizes[class_of(predicted[i], rule)]++;
}

typedef struct {
    RangeReader range;
    BitModel models[MAX_MODELS];
    i64 left[CLASSES], rest[CLASSES]; /* values of a bucket before its next change, and after that */
    int shifts[CLASSES];
} StepsReader;

/* Changes 64 values. A place at which a bucket changes next is a bit of `next`: the lowest one is read first. */
INLINE bool read_block_steps(StepsReader *s, u16 *words, ClassRule rule, u64 valid) {
    u64 masks[CLASSES], next = 0;
    i64 members[CLASSES];
    class_masks(words, rule, masks);
    for (int c = 0; c < CLASSES; c++) {
        members[c] = count_bits(masks[c] & valid);
        if (RARE(s->left[c] < members[c])) next |= (u64)1 << place_of_rank(masks[c], s->left[c]);
    }
    for (; next; next &= next - 1) {
        int i = __builtin_ctzll(next), c = class_of(words[i], rule);
        if (s->rest[c] < 0) return false;
        BitModel *flag = flag_model(s->models, c);
        bool down = read_range_bit(&s->range, s->models + SIGN_MODEL);
        u32 size = read_number(&s->range, flag + 1, STEP_BITS);
        words[i] = (u16)(down ? words[i] - size : words[i] + size);
        i64 gap = read_step_gap(&s->range, flag, s->shifts[c], s->rest[c]);
        s->rest[c] -= gap + 1, s->left[c] += gap + 1;
        if (s->left[c] < members[c]) next |= (u64)1 << place_of_rank(masks[c], s->left[c]);
    }
    for (int c = 0; c < CLASSES; c++) s->left[c] -= members[c];
    return true;
}

i64 API(read_sparse_steps)(const u8 *data, i64 data_size, const u16 *predicted, i64 n, int mantissa_bits, int least,
                           i64 buckets, u16 *out) {
    if (data_size < 0 || !is_size(n) || !is_class_rule(mantissa_bits, least, buckets)) return BAD_SIZE;
    ClassRule rule = {mantissa_bits, least, (int)buckets - 1};
    StepsReader s = {.range = new_range_reader(data, data_size)};
    reset_models(s.models, BUCKET_MODELS + buckets * MODELS_PER_BUCKET);
    count_bucket_sizes(predicted, n, rule, s.rest);
    int shift = 0;
    for (i64 c = 0; c < buckets; c++) {
        if (!s.rest[c]) continue;
        int number = (int)read_number(&s.range, s.models + SHIFT_MODELS, SHIFT_BITS);
        shift += number & 1 ? number >> 1 : -(number >> 1);
        if (shift < 0 || shift > MAX_SHIFT) return 0;
        s.shifts[c] = shift;
        s.left[c] = read_step_gap(&s.range, flag_model(s.models, c), shift, s.rest[c]);
        s.rest[c] -= s.left[c] + 1;
    }
    if (out != predicted && n) memcpy(out, predicted, (size_t)n * sizeof *out);
    for (i64 i = 0; i < n; i += MASKED) {
        u16 padded[MASKED], *words = out + i;
        u64 valid = ~(u64)0;
        if (n - i < MASKED) valid = pad_block(words, n - i, padded), words = padded;
        if (!read_block_steps(&s, words, rule, valid)) return 0;
        if (words == padded) memcpy(out + i, padded, (size_t)(n - i) * sizeof *out);
    }
    return has_read_all(&s.range);
}
