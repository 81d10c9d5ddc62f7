/* The lossless codecs: chunks of planes and residuals, and the streams in them. docs/codecs.md specifies all bytes.
 *
 * The exported kernels come first, then what the files of this family share. */
#ifndef CKPT_LOSSLESS_H
#define CKPT_LOSSLESS_H
#include "kernels.h"

/* ---- exported: called by codecs/ckpt_codecs/native/lossless.py ---- */

/* The bytes of scratch with which every kernel below can work on `count` values of `width` bytes (or planes of `count`
 * bytes, width 1) in rows of `columns` values. */
i64 API(lossless_scratch)(i64 width, i64 count, i64 columns);

/* Write a chunk of planes after its first byte, out[0]: the directory, then `width` streams. `words`: `count` values of
 * 1, 2, 4 or 8 bytes. `floats`: 1 if the exponent has its own plane, 0 for the bytes as they are. `max_ratio`
 * and `sampled` as for write_streams. `out` needs 1 + width * (5 + count) bytes. Returns the end of the chunk in `out`. */
i64 API(write_planes)(int floats, i64 width, const u8 *words, i64 count, double max_ratio, int sampled, u8 *out,
                      i64 out_size, u8 *scratch, i64 scratch_size);

/* Fill `words` from a chunk of planes, whose first byte is not read. Returns 0; or 1 + the number of the
 * first damaged stream; or 1 + width if the directory is damaged. */
i64 API(read_planes)(int floats, i64 width, const u8 *source, i64 source_size, u8 *words, i64 count, u8 *scratch,
                     i64 scratch_size);

/* Write a chunk of residuals after its first byte: the exponents of float32 (width 4) or bfloat16 (width 2) as
 * differences from the predictions by rows, columns and `base`. `base`: `count` values of `base_width` 2 or 4 bytes, or NULL
 * with base_width 0. `columns` divides `count`. `row_max_ratio`: as max_ratio, for the streams of row scales. `out`
 * needs 1 + 5 * (width + 3) + width * count + 2 + 2 * rows bytes. Returns the end of the chunk, or 0 if the residuals
 * would not be smaller than the exponents. */
i64 API(write_residuals)(i64 width, const u8 *words, i64 count, i64 base_width, const u8 *base, i64 columns,
                         double max_ratio, int sampled, double row_max_ratio, u8 *out, i64 out_size, u8 *scratch,
                         i64 scratch_size);

/* Fill `words` from a chunk of residuals. Returns as read_planes, of width + 3 streams. */
i64 API(read_residuals)(i64 width, const u8 *source, i64 source_size, i64 base_width, const u8 *base, i64 columns,
                        u8 *words, i64 count, u8 *scratch, i64 scratch_size);

/* Turn planes into streams in place. They lie in `out` one after another, from 1 + 5 * count on, plane i of sizes[i]
 * bytes; the directory goes to out[1]. A plane is coded if that makes it smaller than max_ratios[i] of its size; if
 * sampled[i], a plane is not tried if a sample predicts that its stream is larger. Returns the end of the last stream. */
i64 API(write_streams)(const i64 *sizes, const double *max_ratios, const u8 *sampled, i64 count, u8 *out, i64 out_size,
                       u8 *scratch, i64 scratch_size);

/* Fill planes from streams: stream i is source[starts[i]] to source[starts[i + 1]], of kinds[i]; its plane of sizes[i]
 * bytes goes to out[places[i]]. The caller handles stored streams. Returns the number of the first damaged stream,
 * or `count`. */
i64 API(read_streams)(const u8 *source, i64 source_size, const u8 *kinds, const i64 *starts, const i64 *sizes,
                      const i64 *places, i64 count, u8 *out, i64 out_size, u8 *scratch, i64 scratch_size);

/* Entropy-code a plane if that makes it smaller. Returns the number of bytes in `out`, which needs `size` bytes: 1 for
 * the symbol of a constant plane, more for a Huffman code, 0 if the plane should be stored. */
i64 API(entropy_code)(const u8 *plane, i64 size, u8 *out, i64 out_size, u8 *scratch, i64 scratch_size);

/* Returns the entropy of a plane in bits per symbol, estimated from 4096 symbols. Negative if the plane is too small. */
double API(estimate_bits)(const u8 *plane, i64 size);

/* Split `count` values of `width` bytes into planes of `count` bytes, one after another. `floats` as for
 * write_planes. */
i64 API(split_planes)(int floats, i64 width, const u8 *words, i64 count, u8 *planes, i64 planes_size);

/* Round float32 to bfloat16: to nearest, ties to even. A NaN keeps its sign and no payload. */
i64 API(to_bfloat16)(const u32 *words, i64 count, u16 *out);

/* Returns 1 if `rounded` are the float32 `words` as to_bfloat16 rounds them and none is a NaN, else 0. */
i64 API(is_bfloat16_of)(const u32 *words, const u16 *rounded, i64 count);

/* Round float32 to float16: to nearest, ties to even. A NaN keeps its sign and no payload. */
i64 API(to_float16)(const u32 *words, i64 count, u16 *out);

/* Write float16 numbers as float32. A NaN keeps its sign and no payload. */
i64 API(from_float16)(const u16 *halves, i64 count, u32 *out);

/* Returns how many of `count` words of `width` 1, 2, 4 or 8 bytes, at any address, have the bits of `value` where `mask`
 * has ones: NaN and infinity, if both are the exponent's bits. */
i64 API(count_masked)(i64 width, const u8 *words, i64 count, u64 mask, u64 value);

/* ---- shared by the files of this family ---- */

/* How a stream holds its plane: the numbers in files, as in ckpt_codecs.format_ids. */
enum { STORED, CONSTANT, PACKED7, HUFFMAN, RUNS, DIGITS };
/* Bytes of a stream's entry in a directory, which is also the head of an inner stream: its kind, its size in 4 bytes. */
enum { ENTRY = 5 };
enum { STREAMS = 8, MAX_LENGTH = 11, TABLE_SIZE = 1 << MAX_LENGTH };

/* A Huffman code, and the tables with which planes are counted, written and read. It lives in scratch. */
typedef struct {
    u32 counts[STREAMS][256];
    u32 totals[256]; /* the sums of counts */
    i64 stream_sizes[STREAMS];
    u8 lengths[256]; /* of codes, in bits; 0: the symbol does not occur */
    u16 bits[256];   /* of codes, the first one lowest */
    union {
        u32 pair_counts[1 << 13];
        u64 pairs[1 << 16];
        u64 singles[256];
        u64 tables[2 * TABLE_SIZE];
        u8 digits_of_pairs[1 << 16];
    };
} Code;

/* huffman.c */
static void count_symbols(const u8 *plane, i64 size, Code *code);
static int assign_lengths(Code *code, bool well);
static i64 huffman_size(Code *code);
static void write_huffman(const u8 *plane, i64 size, Code *code, u8 *out);
static bool read_huffman(const u8 *source, i64 source_size, Code *code, u8 *plane, i64 size);

/* planes.c */
static bool has_planes(i64 width);
static void split_words(bool floats, i64 width, const u8 *words, i64 count, u8 *const planes[8]);
static void merge_words(bool floats, i64 width, const u8 *const planes[8], i64 count, u8 *words);
static bool all_below_128(const u8 *plane, i64 size);
static void pack7(const u8 *plane, i64 size, u8 *out);
static void unpack7(const u8 *packed, u8 *plane, i64 size);

/* entropy.c */
static double entropy_of_plane(const u32 counts[256]);
static double estimated_bits(const u8 *plane, i64 size);
static double estimated_bits_of_exponents(i64 width, const u8 *words, i64 count);

/* residuals.c */
typedef struct {
    i64 width, base_width, rows, columns;
    const u8 *base;
    i32 *column; /* scratch: what each column adds to a prediction */
    i16 *scales; /* of rows */
} Prediction;
static void to_residuals(const Prediction *p, const u8 *words, u8 *const planes[3], u8 *residuals);
static void from_residuals(const Prediction *p, const u8 *residuals, const u8 *const planes[3], u8 *words);

/* sparse.c */
static i64 write_sparse(const u8 *plane, i64 size, i64 huffman_bytes, u8 *out, Scratch scratch, Code *code, int *kind);
static bool read_digits(const u8 *source, i64 source_size, u8 *plane, i64 size, Scratch scratch, Code *code);
static bool read_runs(const u8 *source, i64 source_size, u8 *plane, i64 size, Scratch scratch, Code *code);

/* streams.c */
static u8 *put_head(u8 *out, int kind, i64 size);
static int write_stream(const u8 *plane, i64 size, double max_ratio, bool sampled, u8 *out, Scratch scratch, Code *code,
                        i64 *stream_size);
static bool read_stream(int kind, const u8 *source, i64 source_size, u8 *plane, i64 size, Scratch scratch, Code *code);

#endif
