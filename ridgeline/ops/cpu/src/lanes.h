/* One register of floats, and what the float kernels do with it: the compiler's portable vectors, for every machine.

   The order of additions in a row is written down here and in the kernels: it depends neither on the other rows of the batch
   nor on the number of threads. */

#ifndef RIDGELINE_LANES_H
#define RIDGELINE_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "level.h"

/* One register of floats. A wider vector than the machine's would be portable too, but gcc keeps those in memory. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
/* Elements from which a loop is worth waking the other threads for. */
#if defined(__aarch64__)
#define ENOUGH 4096
#else
#define ENOUGH 16384
#endif
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Places __attribute__((vector_size(4 * LANES)));

static const Places NUMBER = {
    0, 1, 2, 3,
#if LANES > 4
    4, 5, 6, 7,
#endif
#if LANES > 8
    8, 9, 10, 11, 12, 13, 14, 15,
#endif
};

/* e^x - 1 for x <= 0 is (p + 1) 2^n - 1: the p of this polynomial has a relative error of about 1e-7. Below -87 e^x stays
   at 1e-38, which is nothing beside the 1 that is always there; NaN stays NaN. n is rounded by an addition: 1.5 * 2^23 leaves it in
   the lowest bits, and conversions take longer on some machines. Once for a float and once for vectors. */
#define ROUNDING 12582912.0f
#define EXPONENTIAL(REAL, SELECT) \
    x = SELECT(x < -87.0f, (REAL){0} - 87.0f, x); \
    REAL n = x * 1.44269504088896341f + ROUNDING, whole = n - ROUNDING; \
    REAL r = x - whole * 0.693359375f + whole * 2.12194440e-4f; \
    REAL p = r * 1.9875691500e-4f + 1.3981999507e-3f; \
    p = p * r + 8.3334519073e-3f; \
    p = p * r + 4.1665795894e-2f; \
    p = p * r + 1.6666665459e-1f; \
    p = p * r + 5.0000001201e-1f; \
    p = p * r * r + r;

/* 2^n: the bits of 1.5 * 2^23 are shifted out. */
#define POWER(bits) (((bits) << 23) + (127 << 23))

#define EITHER(condition, a, b) ((condition) ? (a) : (b))
#define CHOOSE(condition, a, b) ((Lanes)(((Places)(a) & (condition)) | ((Places)(b) & ~(condition))))

static inline float exponential(float x) {
    EXPONENTIAL(float, EITHER)
    union { float value; uint32_t bits; } power = {n};
    power.bits = POWER(power.bits);
    return (p + 1.0f) * power.value;
}

static inline __attribute__((always_inline)) Lanes exponentials(Lanes x) {
    EXPONENTIAL(Lanes, CHOOSE)
    return (p + 1.0f) * (Lanes)POWER((Places)n);
}

/* cap * tanh(score / cap), where tanh x = -m / (2 + m) with m = e^-2x - 1 for x >= 0: exact for small x, too. */
static inline __attribute__((always_inline)) Lanes capped(Lanes scores, float cap) {
    Lanes ratio = scores * (1.0f / cap), x = ratio * 2.0f;
    x = CHOOSE(x > 0.0f, -x, x);
    EXPONENTIAL(Lanes, CHOOSE)
    Lanes power = (Lanes)POWER((Places)n), m = p * power + (power - 1.0f);
    Lanes t = cap * -m / (2.0f + m);
    return CHOOSE(ratio < 0.0f, -t, t);
}

/* Each lane with its partner, whose number differs in one bit: after all bits every lane holds the result of all. */
static inline __attribute__((always_inline)) float sum_of(Lanes x) {
    for (int bit = LANES / 2; bit > 0; bit /= 2) x += __builtin_shuffle(x, NUMBER ^ bit);
    return x[0];
}

static inline __attribute__((always_inline)) Lanes larger(Lanes a, Lanes b) { return CHOOSE(a > b, a, b); }

static inline __attribute__((always_inline)) float largest_of(Lanes x) {
    for (int bit = LANES / 2; bit > 0; bit /= 2) x = larger(x, __builtin_shuffle(x, NUMBER ^ bit));
    return x[0];
}

/* Of two rows of a square of lanes, a and b, whose numbers differ in one bit: what belongs to the columns without that
   bit (AHEAD) and with it (BEHIND). Over all bits and pairs this transposes the square. */
#define WITH(bit) ((NUMBER & (bit)) * (LANES / (bit)))
#define AHEAD(a, b, bit) __builtin_shuffle(a, b, (NUMBER & ~(bit)) + WITH(bit))
#define BEHIND(a, b, bit) __builtin_shuffle(a, b, (NUMBER | (bit)) + WITH(bit))

static inline __attribute__((always_inline)) void transpose(Lanes x[LANES]) {
    #pragma GCC unroll 4
    for (int bit = 1; bit < LANES; bit *= 2)
        #pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & bit)) {
                Lanes a = x[i], b = x[i | bit];
                x[i] = AHEAD(a, b, bit);
                x[i | bit] = BEHIND(a, b, bit);
            }
}

/* Lane j of the result is the sum over x[j]: a transposition that adds as it goes. */
static inline __attribute__((always_inline)) Lanes sums_of(Lanes x[LANES]) {
    #pragma GCC unroll 4
    for (int bit = 1; bit < LANES; bit *= 2)
        #pragma GCC unroll 16
        for (int i = 0; i < LANES; i += 2 * bit)
            x[i] = AHEAD(x[i], x[i + bit], bit) + BEHIND(x[i], x[i + bit], bit);
    return x[0];
}

#endif
