/* 4 outputs at a time with the compiler's portable vectors, for machines without the instructions of the other files. */

#include <string.h>

#include "halves.h"

#define WIDE 4
#define MOST 4
#define REGISTERS 8

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Words __attribute__((vector_size(16)));

ALWAYS Floats zeros(void) { return (Floats){0}; }
ALWAYS Floats all(float x) { return (Floats){x, x, x, x}; }
ALWAYS Floats plus(Floats a, Floats b) { return a + b; }
ALWAYS Floats times(Floats a, Floats b) { return a * b; }
ALWAYS Floats plus_times(Floats sum, Floats a, Floats b) { return sum + a * b; }
ALWAYS Floats load_floats(const void *from) {
    Floats x;
    memcpy(&x, from, sizeof x);
    return x;
}
ALWAYS Floats load_halves(const void *from) {
    const uint16_t *h = from;
    return (Floats){half(h[0]), half(h[1]), half(h[2]), half(h[3])};
}
ALWAYS Floats load_brains(const void *from) {
    const uint16_t *h = from;
    return (Floats)(Words){h[0] << 16, h[1] << 16, h[2] << 16, h[3] << 16};
}
ALWAYS Floats load_unsigned(const void *from) {
    const uint8_t *b = from;
    return (Floats){b[0], b[1], b[2], b[3]};
}
ALWAYS Floats load_signed(const void *from) {
    const int8_t *b = from;
    return (Floats){b[0], b[1], b[2], b[3]};
}
ALWAYS void store(float *to, Floats x) { memcpy(to, &x, sizeof x); }

ALWAYS Bytes load_bytes(const void *from) {
    Bytes x;
    memcpy(&x, from, sizeof x);
    return x;
}
ALWAYS Bytes masked(Bytes x, int mask) { return x & (uint8_t)mask; }
ALWAYS Bytes up(Bytes x, int bits) { return x << bits; }
ALWAYS Bytes down(Bytes x, int bits) { return x >> bits; }
ALWAYS Bytes upper(Bytes x) { return x >> 4; }                     /* shifts stay within bytes: nothing to mask */
ALWAYS Bytes with_bits(Bytes a, Bytes b, int mask) { return a | masked(b, mask); }

ALWAYS Floats numbers_of(Bytes codes, int place, int is_signed) {
    Words words = (Words)codes << (24 - 8 * place);
    words = is_signed ? words >> 24 : words >> 24 & 255;
    return __builtin_convertvector(words, Floats);
}

/* The float16 that byte `place` of every four becomes (tiles.h), as a float; and its number of sixteen. */
ALWAYS Floats halves_of(Bytes codes, int place, int bits) {
    Floats found;
    for (int i = 0; i < 4; i++) {
        unsigned x = codes[4 * i + place], low = x & ((1u << (bits - 1)) - 1);
        found[i] = half((uint16_t)((x ^ low) << (16 - bits) | low << HALF_SHIFT(bits)));
    }
    return found;
}
ALWAYS Floats found_in(const float table[16], Bytes codes, int place) {
    return (Floats){table[codes[place]], table[codes[4 + place]], table[codes[8 + place]], table[codes[12 + place]]};
}

ALWAYS Floats dots(int bits, const Bytes *codes, const int8_t *x) {
    Words total = {0};
    (void)bits;
    #pragma GCC unroll 4
    for (int i = 0; i < SHARE / 4; i++) {
        Words words = (Words)codes[i];
        total += (words << 24 >> 24) * x[4 * i] + (words << 16 >> 24) * x[4 * i + 1] + (words << 8 >> 24) * x[4 * i + 2]
                 + (words >> 24) * x[4 * i + 3];
    }
    return __builtin_convertvector(total, Floats);
}
