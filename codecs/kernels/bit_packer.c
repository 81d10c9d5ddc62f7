/* Numbers of some bits each, one after another, from the lowest bit of each byte up. */
#include "kernels.h"

/* Less than 8 bits wait in `word`. */
typedef struct {
    u8 *at;
    u64 word, held;
} BitPacker;

/* Up to 56 bits. The store is of 8 bytes. */
INLINE void pack_bits(BitPacker *w, u64 bits, u64 width) {
    w->word |= bits << w->held;
    store64(w->at, w->word);
    w->held += width;
    w->at += w->held >> 3, w->word >>= w->held & 56, w->held &= 7;
}
