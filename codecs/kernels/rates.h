/* The rates at which the bit models of range_coder.c learn: the same for every level of CPU. */
#ifndef CKPT_RATES_H
#define CKPT_RATES_H

#include <stdint.h>

enum { RATE_BITS = 20, SLOWEST_RATE = 4095 };

/* By how many bits a model has seen, in 2^-20. */
extern const uint32_t ckpt_rates[SLOWEST_RATE + 1] __attribute__((visibility("hidden")));

#endif
