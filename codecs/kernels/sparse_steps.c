/* Steps of 16-bit floats of which few are not zero: their places and sizes; docs/delta-codecs.md, "Sparse steps".
 *
 * A step is the signed difference between the words of a value and of its prediction. The bucket of a value follows
 * from its prediction. A gap is the number of a bucket's values before its next change.
 *
 * Memory safety: every bucket is compared with their number before it is an index, shifts of gaps are at most 24, and
 * sizes of buckets at most MAX_ELEMENTS, so that no sum of gaps leaves 64 bits. */
#include "kernels.h"

enum { MAX_BUCKETS = 16, SHIFT_BITS = 6, MAX_SHIFT = 24, STEP_BITS = 16 };
enum { SHIFT_MODELS = 0, SIGN_MODEL = MODELS_PER_BIT * SHIFT_BITS, BUCKET_MODELS };
/* For each bucket: one of "the gap ends here", then those of the sizes of its steps. */
enum { MODELS_PER_BUCKET = 1 + MODELS_PER_BIT * STEP_BITS };
enum { MAX_MODELS = BUCKET_MODELS + MAX_BUCKETS * MODELS_PER_BUCKET };

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

/* Of each change its bucket, its step and the gap after it; of each bucket its size and the gap before its first
 * change. Returns how many changes there are, at most `room`. */
i64 API(find_steps)(const u16 *predicted, const u16 *actual, const u8 *which, i64 n, i64 buckets, u8 *bucket_of,
                    i64 *gaps, u16 *steps, i64 room, i64 *sizes, i64 *first_gaps) {
    if (!is_size(n) || buckets < 1 || buckets > MAX_BUCKETS || room < 0) return BAD_SIZE;
    if (!all_bytes_below(which, n, (u32)buckets)) return BAD_SIZE;
    u32 seen[MAX_BUCKETS] = {0}, seen_at_change[MAX_BUCKETS] = {0}; /* values of each bucket so far, and to its last change */
    i64 *gap_after[MAX_BUCKETS], count = 0;                         /* where the next gap of each bucket goes */
    for (i64 c = 0; c < buckets; c++) gap_after[c] = first_gaps + c;
    for (i64 i = 0; i < n; i++) {
        u32 c = which[i], ordinal = seen[c]++;
        u16 step = (u16)(actual[i] - predicted[i]);
        if (RARE(step)) {
            if (count == room) return BAD_SIZE;
            *gap_after[c] = ordinal - seen_at_change[c];
            seen_at_change[c] = ordinal + 1;
            gap_after[c] = gaps + count;
            bucket_of[count] = (u8)c, steps[count++] = step;
        }
    }
    for (i64 c = 0; c < buckets; c++) sizes[c] = seen[c], *gap_after[c] = seen[c] - seen_at_change[c];
    return count;
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
    if (!is_size(count) || buckets < 1 || buckets > MAX_BUCKETS || room < 0) return BAD_SIZE;
    if (!all_bytes_below(bucket_of, count, (u32)buckets) || !all_bytes_below(shifts, buckets, MAX_SHIFT + 1)) return BAD_SIZE;
    if (!are_bucket_sizes(sizes, buckets, MAX_ELEMENTS)) return BAD_SIZE;
    BitModel models[MAX_MODELS];
    reset_models(models, BUCKET_MODELS + buckets * MODELS_PER_BUCKET);
    RangeWriter w = new_range_writer(out, room);
    i64 rest[MAX_BUCKETS];
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

i64 API(read_sparse_steps)(const u8 *data, i64 data_size, const u16 *predicted, const u8 *which, i64 n,
                           const i64 *sizes, i64 buckets, u16 *out) {
    if (data_size < 0 || !is_size(n) || buckets < 1 || buckets > MAX_BUCKETS) return BAD_SIZE;
    if (!all_bytes_below(which, n, (u32)buckets) || !are_bucket_sizes(sizes, buckets, n)) return BAD_SIZE;
    BitModel models[MAX_MODELS];
    reset_models(models, BUCKET_MODELS + buckets * MODELS_PER_BUCKET);
    RangeReader r = new_range_reader(data, data_size);
    i64 left[MAX_BUCKETS] = {0}, rest[MAX_BUCKETS]; /* values of a bucket before its next change, and after that */
    int shifts[MAX_BUCKETS] = {0}, shift = 0;
    for (i64 c = 0; c < buckets; c++) {
        rest[c] = sizes[c];
        if (!rest[c]) continue;
        int number = (int)read_number(&r, models + SHIFT_MODELS, SHIFT_BITS);
        shift += number & 1 ? number >> 1 : -(number >> 1);
        if (shift < 0 || shift > MAX_SHIFT) return 0;
        shifts[c] = shift;
        left[c] = read_step_gap(&r, flag_model(models, c), shift, rest[c]);
        rest[c] -= left[c] + 1;
    }
    for (i64 i = 0; i < n; i++) {
        i64 c = which[i];
        out[i] = predicted[i];
        if (RARE(--left[c] < 0)) {
            if (rest[c] < 0) return 0;
            BitModel *flag = flag_model(models, c);
            bool down = read_range_bit(&r, models + SIGN_MODEL);
            u32 size = read_number(&r, flag + 1, STEP_BITS);
            out[i] = (u16)(down ? predicted[i] - size : predicted[i] + size);
            left[c] = read_step_gap(&r, flag, shifts[c], rest[c]);
            rest[c] -= left[c] + 1;
        }
    }
    return has_read_all(&r);
}
