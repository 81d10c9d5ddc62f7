/* What Python asks the library before it binds the kernels. */
#ifndef CKPT_LEVEL_H
#define CKPT_LEVEL_H

#include <stdint.h>

/* The highest level of kernels that this CPU runs: 3 or 2 for x86-64-v3 or v2, 1 on other machines, which have one
 * level; 0 if the CPU is older than all of them. */
int64_t ckpt_level(void);

/* Bit 0: this CPU has GFNI, for vectors of 32 bytes, which levels do not say. */
int64_t ckpt_features(void);

/* CRC-32 of the sources that the library was built from, as `ckpt_codecs.native.sources` computes it. */
int64_t ckpt_sources(void);

#endif
