/* The rates of range_coder.c. Compiled once: the levels of CPU share the table, which is 16 KiB. */
#include "rates.h"

/* 2^21 / (2 c + 3) for each count c up to the slowest. */
#define RATE_1(c) (2u << RATE_BITS) / (2 * (c) + 3)
#define RATE_8(c) RATE_1(c), RATE_1(c + 1), RATE_1(c + 2), RATE_1(c + 3), RATE_1(c + 4), RATE_1(c + 5), RATE_1(c + 6), RATE_1(c + 7)
#define RATE_64(c) RATE_8(c), RATE_8(c + 8), RATE_8(c + 16), RATE_8(c + 24), RATE_8(c + 32), RATE_8(c + 40), RATE_8(c + 48), RATE_8(c + 56)
#define RATE_512(c) RATE_64(c), RATE_64(c + 64), RATE_64(c + 128), RATE_64(c + 192), RATE_64(c + 256), RATE_64(c + 320), RATE_64(c + 384), RATE_64(c + 448)
const uint32_t ckpt_rates[SLOWEST_RATE + 1] = {RATE_512(0), RATE_512(512), RATE_512(1024), RATE_512(1536),
                                               RATE_512(2048), RATE_512(2560), RATE_512(3072), RATE_512(3584)};
