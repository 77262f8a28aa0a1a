/* float16 in memory, float32 in registers. Rounded to nearest, ties to even; what is too large becomes infinite. */

#ifndef RIDGELINE_KV_HALVES_H
#define RIDGELINE_KV_HALVES_H

#include "../lanes.h"

#if defined(__AVX512F__)
static inline __attribute__((always_inline)) Lanes widened(const uint16_t *from) {
    return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}
static inline __attribute__((always_inline)) void narrow(uint16_t *to, Lanes x) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__) && LANES == 8
static inline __attribute__((always_inline)) Lanes widened(const uint16_t *from) {
    return (Lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}
static inline __attribute__((always_inline)) void narrow(uint16_t *to, Lanes x) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__aarch64__)
static inline __attribute__((always_inline)) Lanes widened(const uint16_t *from) {
    return (Lanes)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}
static inline __attribute__((always_inline)) void narrow(uint16_t *to, Lanes x) {
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
}
#else
#define HALVES_BY_BITS
#endif

typedef union { uint32_t bits; float value; } Bits;

static inline float wide(uint16_t bits) {
    /* Exponent and fraction at their places in a float, then times 2^112: exact for subnormal numbers, too. */
    Bits found = {(uint32_t)(bits & 0x7fff) << 13}, scale = {(254 - 15) << 23};
    found.value *= scale.value;
    if ((bits & 0x7c00) == 0x7c00) found.bits = 0x7f800000 | (uint32_t)(bits & 0x3ff) << 13;
    found.bits |= (uint32_t)(bits & 0x8000) << 16;
    return found.value;
}

static inline uint16_t narrowed(float x) {
    Bits in = {.value = x};
    uint16_t sign = (uint16_t)(in.bits >> 16 & 0x8000);
    in.bits &= 0x7fffffff;
    if (in.bits > 0x7f800000) return sign | 0x7e00;                      /* NaN */
    if (in.bits >= 0x477ff000) return sign | 0x7c00;                     /* 65520 and more */
    if (in.bits < 0x38800000) {                                          /* subnormal: an addition rounds it */
        Bits shift = {.value = 0.5f}, sum = {.value = in.value + shift.value};
        return sign | (uint16_t)(sum.bits - shift.bits);
    }
    uint32_t odd = in.bits >> 13 & 1;
    return sign | (uint16_t)((in.bits - 0x38000000 + 0xfff + odd) >> 13);
}

#ifdef HALVES_BY_BITS
static inline Lanes widened(const uint16_t *from) {
    Lanes x;
    for (int i = 0; i < LANES; i++) x[i] = wide(from[i]);
    return x;
}
static inline void narrow(uint16_t *to, Lanes x) {
    for (int i = 0; i < LANES; i++) to[i] = narrowed(x[i]);
}
#endif

/* `count` floats, any number of them. */
static inline void narrow_all(uint16_t *to, const float *from, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) narrow(to + i, *(const Lanes *)(from + i));
    for (; i < count; i++) to[i] = narrowed(from[i]);
}

#endif
