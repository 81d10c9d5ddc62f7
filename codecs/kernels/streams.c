/* One plane as a stream: this file chooses its kind.
 *
 * docs/codecs.md, "A stream", specifies the kinds. Memory safety: a plane is coded only after the size of its code is
 * known to be smaller than the plane; a stream is read into a plane of known size, or refused. */
#include "lossless.h"

/* The bytes that a Huffman code takes before its first symbol, about. */
enum { CODE_OVERHEAD = 40 };
/* Digits and runs are tried for planes of so many symbols or more ... */
enum { MIN_SPARSE_SIZE = 2048 };
/* ... whose code takes fewer bits per symbol than this, and so much more than the entropy: a code loses up to a bit on
 * each symbol, and here it matters. */
static const double MAX_SPARSE_BITS = 1.6, MIN_SPARSE_WASTE = 1.03;

static u8 *put_head(u8 *out, int kind, i64 size) {
    out[0] = (u8)kind;
    store32(out + 1, (u32)size);
    return out + ENTRY;
}

INLINE bool may_be_sparse(i64 size, i64 huffman_bytes, const Code *code) {
    return size >= MIN_SPARSE_SIZE && (double)(8 * huffman_bytes) < MAX_SPARSE_BITS * (double)size &&
           (double)huffman_bytes > MIN_SPARSE_WASTE * entropy_of_plane(code->totals) / 8;
}

/* Writes a plane as a stream to `out`, which has `size` bytes; returns its kind and sets *stream_size. If the kind is
 * STORED, nothing of use is in `out`: the plane itself is the stream. */
static int write_stream(const u8 *plane, i64 size, double max_ratio, bool sampled, u8 *out, Scratch scratch, Code *code,
                        i64 *stream_size) {
    *stream_size = size;
    if (!size) return STORED;
    double bits = sampled ? estimated_bits(plane, size) : 0;
    bool seven_bits = 5.0 < bits && bits < 7.01 && all_below_128(plane, size);
    i64 max_size = (i64)((double)(seven_bits ? size - size / 8 : size) * max_ratio);
    if ((double)size * bits / 8 + CODE_OVERHEAD < (double)max_size) {
        count_symbols(plane, size, code);
        if (assign_lengths(code, false) == 1) {
            out[0] = plane[0];
            *stream_size = 1;
            return CONSTANT;
        }
        i64 bytes = huffman_size(code);
        if (may_be_sparse(size, bytes, code)) {
            int kind;
            *stream_size = write_sparse(plane, size, bytes, out, scratch, code, &kind);
            if (*stream_size) return kind;
            count_symbols(plane, size, code);
            assign_lengths(code, false);
            huffman_size(code);
        }
        if (bytes < max_size) {
            write_huffman(plane, size, code, out);
            *stream_size = bytes;
            return HUFFMAN;
        }
    }
    *stream_size = size;
    if (size < 8 || !(seven_bits || (bits == 0 && all_below_128(plane, size)))) return STORED;
    pack7(plane, size, out);
    *stream_size = size - size / 8;
    return PACKED7;
}

/* Fills a plane from a stream of any kind but STORED at the top level; false if it is damaged. */
static bool read_stream(int kind, const u8 *source, i64 source_size, u8 *plane, i64 size, Scratch scratch, Code *code) {
    switch (kind) {
        case STORED:
            if (source_size != size) return false;
            memcpy(plane, source, (size_t)size);
            return true;
        case CONSTANT:
            if (source_size != 1) return false;
            memset(plane, source[0], (size_t)size);
            return true;
        case PACKED7:
            if (source_size != size - size / 8) return false;
            unpack7(source, plane, size);
            return true;
        case HUFFMAN: return read_huffman(source, source_size, code, plane, size);
        case RUNS: return read_runs(source, source_size, plane, size, scratch, code);
        case DIGITS: return read_digits(source, source_size, plane, size, scratch, code);
        default: return false;
    }
}
