/* A float16 as a float, one at a time. */

#ifndef RIDGELINE_HALVES_H
#define RIDGELINE_HALVES_H

#include <stdint.h>

static inline float half(uint16_t bits) {
#if defined(__aarch64__)
    union { uint16_t bits; __fp16 value; } same = {bits};
    return (float)same.value;
#else
    /* The exponent moves from 15 to 127; numbers below the smallest normal one are a difference of two that are normal. */
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = (uint32_t)(bits & 0x7fff) << 13;
    union { uint32_t bits; float value; } x = {rest}, least = {113u << 23};
    if (rest >= 0x0f800000u) x.bits += 224u << 23;                   /* infinity and NaN */
    else if (rest >= 0x00800000u) x.bits += 112u << 23;
    else x.bits += 113u << 23, x.value -= least.value;
    x.bits |= sign;
    return x.value;
#endif
}

#endif
