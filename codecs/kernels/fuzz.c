/* Calls every kernel with hostile bytes, in buffers of exact size, under the sanitizers of address and undefined behaviour.
 *
 *     gcc -g -O1 -std=gnu11 -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all fuzz.c -lm -o fuzz
 *     ./fuzz SEED READS [FAMILY]
 *
 * It stops after READS hostile reads, spread over the families, and prints how often each kernel was called. A finding
 * ends it at once with a status other than zero. Without the sanitizer of addresses (zig has none), each buffer ends where
 * a page begins that nobody may touch. tests/campaigns/fuzz_kernels.py builds and runs it, and compares the names with
 * the headers.
 *
 * Each family has a file fuzz_FAMILY.c with one function, `static void fuzz_FAMILY(void)`: one round, which makes a
 * valid stream, reads it back and compares, then reads what `mutate` makes of it, and bytes that are random altogether.
 * It calls kernels by READ(name)(...) where they are given hostile bytes, and by CALL(name)(...) elsewhere. */
#include "kernels.c"
#include "level.c"
#include "rates.c"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#define HAS_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAS_ADDRESS_SANITIZER 1
#endif
#endif

/* Random numbers: Marsaglia's xorshift64, so that a seed gives the same run everywhere. */
static u64 random_state;

static u64 random64(void) {
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return random_state * 0x2545F4914F6CDD1Du;
}

/* A number from 0 to `count` - 1; 0 if there is none. */
static i64 random_below(i64 count) { return count > 0 ? (i64)((random64() >> 11) % (u64)count) : 0; }

static bool one_in(i64 count) { return random_below(count) == 0; }

/* Calls of one kernel at one place of the program. */
typedef struct Site {
    const char *name;
    bool hostile, seen;
    i64 calls;
    struct Site *next;
} Site;

static Site *sites;
static i64 hostile_reads;

static void visit(Site *site) {
    if (!site->seen) site->seen = true, site->next = sites, sites = site;
    site->calls++;
    hostile_reads += site->hostile;
}

#define VISIT(kernel, is_hostile) \
    (*({ static Site site = {.name = #kernel, .hostile = is_hostile}; visit(&site); &API(kernel); }))
/* A kernel that is given what a file may hold. */
#define READ(kernel) VISIT(kernel, true)
/* A kernel that is given what ckpt itself has checked or computed. */
#define CALL(kernel) VISIT(kernel, false)

/* Ends the program where something does not hold. */
#define EXPECT(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
            abort(); \
        } \
    } while (0)

/* The buffers of this round. */
static struct {
    u8 *start;
    size_t size;
} buffers[4096];
static int buffer_count;

/* A buffer of exactly `size` bytes, filled with 0xA5, until the round ends. Elements of 2, 4 and 8 bytes are aligned in
 * it if their size divides `size`. */
static void *exact(i64 size) {
    EXPECT(size >= 0 && buffer_count < 4096);
#ifdef HAS_ADDRESS_SANITIZER
    size_t whole = (size_t)size;
    void *start = NULL;
    EXPECT(posix_memalign(&start, 64, whole ? whole : 1) == 0);
    u8 *buffer = start;
#else
    enum { PAGE = 65536 }; /* a multiple of every machine's page */
    size_t room = ((size_t)size + PAGE - 1) / PAGE * PAGE, whole = room + PAGE;
    u8 *start = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(start != MAP_FAILED && mprotect(start + room, PAGE, PROT_NONE) == 0);
    u8 *buffer = start + room - (size_t)size;
#endif
    memset(buffer, 0xA5, (size_t)size);
    buffers[buffer_count].start = start;
    buffers[buffer_count++].size = whole;
    return buffer;
}

/* Bytes of a file: a buffer of exactly `size` bytes at an odd address as often as not. */
static u8 *exact_bytes(i64 size) {
    i64 offset = one_in(2);
    return (u8 *)exact(size + offset) + offset;
}

/* Scratch of at least `size` bytes, aligned to 64 like what Python passes; `*whole` is its size. */
static u8 *exact_scratch(i64 size, i64 *whole) { return exact(*whole = PIECE(size)); }

/* The same elements in a buffer of their exact size. */
static void *exact_copy(const void *elements, i64 size) {
    u8 *copy = exact(size);
    if (size) memcpy(copy, elements, (size_t)size);
    return copy;
}

static void release_all(void) {
    while (buffer_count) {
        buffer_count--;
#ifdef HAS_ADDRESS_SANITIZER
        free(buffers[buffer_count].start);
#else
        munmap(buffers[buffer_count].start, buffers[buffer_count].size);
#endif
    }
}

/* `size` random bytes, of all values or of few. */
static u8 *random_bytes(i64 size) {
    u8 *bytes = exact_bytes(size);
    i64 values = one_in(2) ? 256 : 1 + random_below(8);
    for (i64 i = 0; i < size; i++) bytes[i] = (u8)random_below(values);
    return bytes;
}

/* What a damaged or malicious file holds in place of `size` valid bytes, in a buffer of exact size: cut, extended,
 * with bits or bytes changed (in the first `head` bytes as often as in all of them, for sizes and kinds are there),
 * with parts moved, or nothing but random bytes. `*made` is its size. */
static u8 *mutate(const u8 *valid, i64 size, i64 head, i64 *made) {
    i64 way = random_below(8);
    *made = way == 0 ? random_below(size + 1) : way == 1 ? size + random_below(20) : size;
    if (way == 7) return random_bytes(*made = random_below(2 * size + 2));
    u8 *bytes = exact_bytes(*made);
    for (i64 i = 0; i < *made; i++) bytes[i] = i < size ? valid[i] : (u8)random64();
    if (!*made || way < 2) return bytes;
    for (i64 changes = 1 + random_below(one_in(4) ? 40 : 3); changes; changes--) {
        i64 at = random_below(way % 2 ? min(head, *made) : *made);
        if (way < 4) bytes[at] ^= (u8)(1 << random_below(8));
        else if (way < 6) bytes[at] = one_in(3) ? (u8)-(int)random_below(2) : (u8)random64();
        else {
            i64 from = random_below(*made), length = random_below(min(*made - max(at, from), 64) + 1);
            memmove(bytes + at, bytes + from, (size_t)length);
        }
    }
    return bytes;
}

#include "fuzz_lossless.c"
#include "fuzz_deltas.c"
#include "fuzz_lossy.c"
#include "fuzz_gradients.c"
#include "fuzz_quantised.c"
#include "fuzz_stats.c"
#include "fuzz_parity.c"

static struct {
    const char *name;
    void (*round)(void);
    i64 reads, rounds;
} families[] = {{"lossless", fuzz_lossless, 0, 0},
                {"deltas", fuzz_deltas, 0, 0},
                {"lossy", fuzz_lossy, 0, 0},
                {"gradients", fuzz_gradients, 0, 0},
                {"quantised", fuzz_quantised, 0, 0},
                {"stats", fuzz_stats, 0, 0},
                {"parity", fuzz_parity, 0, 0}};
enum { FAMILIES = sizeof families / sizeof *families };

int main(int count, char **arguments) {
    if (count < 3) return fprintf(stderr, "usage: fuzz SEED READS [FAMILY]\n"), 2;
    random_state = (strtoull(arguments[1], NULL, 10) + 1) * 0x9E3779B97F4A7C15u;
    random_state |= random_state == 0; /* xorshift has no way out of zero */
    i64 reads = strtoll(arguments[2], NULL, 10), families_left = 0;
    for (int i = 0; i < FAMILIES; i++) {
        bool wanted = count < 4 || strcmp(arguments[3], families[i].name) == 0;
        families[i].reads = wanted ? 0 : -1;
        families_left += wanted;
    }
    if (!families_left) return fprintf(stderr, "%s is no family\n", arguments[3]), 2;
    for (int i = 0; i < FAMILIES; i++) {
        if (families[i].reads < 0) continue;
        i64 share = (reads + families_left - 1) / families_left, before = hostile_reads;
        while (hostile_reads - before < share) {
            families[i].round();
            release_all();
            families[i].rounds++;
            EXPECT(families[i].rounds < 1000 || hostile_reads > before); /* or it would never end */
        }
        printf("%s: %lld rounds, %lld hostile reads\n", families[i].name, (long long)families[i].rounds,
               (long long)(hostile_reads - before));
    }
    for (Site *site = sites; site; site = site->next)
        printf("%s %s %lld\n", site->hostile ? "read" : "call", site->name, (long long)site->calls);
    return 0;
}
