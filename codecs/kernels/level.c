/* The level of kernels that this CPU can run, by cpuid: __builtin_cpu_supports returns 0 for everything in what zig links.
 * Compiled once, for the oldest CPU of the platform. */
#include "level.h"

#ifdef __x86_64__
#include <cpuid.h>

/* Bits of cpuid: leaf 1, register ecx; leaf 7, ebx, then ecx; leaf 0x80000001, ecx. */
enum { SSE3 = 1 << 0, SSSE3 = 1 << 9, FMA = 1 << 12, CX16 = 1 << 13, SSE41 = 1 << 19, SSE42 = 1 << 20, MOVBE = 1 << 22,
       POPCNT = 1 << 23, OSXSAVE = 1 << 27, AVX = 1 << 28, F16C = 1 << 29 };
enum { BMI1 = 1 << 3, AVX2 = 1 << 5, BMI2 = 1 << 8 };
enum { GFNI_BIT = 1 << 8 };
enum { LAHF = 1 << 0, LZCNT = 1 << 5 };
/* Bits of XCR0: the operating system saves the registers of SSE and of AVX. */
enum { SAVES_AVX = 6 };

int64_t ckpt_level(void) {
    unsigned a, b, basic = 0, d, wide = 0, c, extended = 0;
    if (!__get_cpuid(1, &a, &b, &basic, &d) || !__get_cpuid(0x80000001, &a, &b, &extended, &d)) return 0;
    const unsigned v2 = SSE3 | SSSE3 | CX16 | SSE41 | SSE42 | POPCNT;
    if ((basic & v2) != v2 || !(extended & LAHF)) return 0;

    const unsigned v3 = FMA | MOVBE | OSXSAVE | AVX | F16C, v3_wide = BMI1 | AVX2 | BMI2;
    if ((basic & v3) != v3 || !(extended & LZCNT)) return 2;
    if (!__get_cpuid_count(7, 0, &a, &wide, &c, &d) || (wide & v3_wide) != v3_wide) return 2;
    __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (a & SAVES_AVX) == SAVES_AVX ? 3 : 2;
}

int64_t ckpt_features(void) {
    unsigned a, b, c = 0, d;
    return ckpt_level() == 3 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & GFNI_BIT) ? 1 : 0;
}
#else
int64_t ckpt_level(void) { return 1; }
int64_t ckpt_features(void) { return 0; }
#endif

#ifndef SOURCES_HASH
#define SOURCES_HASH 0
#endif

int64_t ckpt_sources(void) { return SOURCES_HASH; }
