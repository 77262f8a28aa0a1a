/* Products of float32 activations with packed weights: the exact path. */

#include "../lanes.h"

/* Weights as a GGUF file stores them: blocks of 32 with their scales, read where they lie and multiplied in float32. */
typedef struct { uint16_t scale, least; uint8_t halves[16]; } BlockQ4_1;       /* w = scale * q + least, q in 0..15 */
typedef struct { uint16_t scale; int8_t values[32]; } BlockQ8_0;               /* w = scale * q, q in -128..127 */
enum { Q4_1, Q8_0 };
#define PREFETCHED 8                 /* rows ahead that are asked for: rows are too short for the machine to see where it goes */

/* A float16 as a float. Where that is not one plain instruction, a table takes the work off the vector units. */
#if defined(__ARM_NEON)
static inline float half(uint16_t bits) {
    union { uint16_t bits; __fp16 value; } same = {bits};
    return (float)same.value;
}
#else
static float halves[1 << 16];

static __attribute__((constructor)) void fill_halves(void) {
    for (int bits = 0; bits < 1 << 16; bits++) {
        int exponent = bits >> 10 & 31, mantissa = bits & 1023;
        float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                   : exponent ? ldexpf((float)(1024 + mantissa), exponent - 25) : ldexpf((float)mantissa, -24);
        halves[bits] = bits >> 15 ? -size : size;
    }
}

static inline float half(uint16_t bits) { return halves[bits]; }
#endif

/* The 32 weights of a block as floats, rounded as the definition rounds them. gcc finds the machines' widening moves in
   neither loops nor vector conversions. */
#if defined(__AVX512F__)
static inline __attribute__((always_inline)) void expand_q4_1(const BlockQ4_1 *block, Lanes w[2]) {
    /* Every weight is one of sixteen: a table of them, looked up by the low four bits of each lane. */
    __m512 scale = _mm512_set1_ps(half(block->scale)), least = _mm512_set1_ps(half(block->least));
    __m512 table = _mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)NUMBER), scale, least);
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)block->halves));
    w[0] = (Lanes)_mm512_permutexvar_ps(wide, table);
    w[1] = (Lanes)_mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), table);
}

static inline __attribute__((always_inline)) void expand_q8_0(const BlockQ8_0 *block, Lanes w[2]) {
    Lanes scale = (Lanes){0} + half(block->scale);
    for (int i = 0; i < 2; i++) {
        __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)block->values + i));
        w[i] = (Lanes)_mm512_cvtepi32_ps(wide) * scale;
    }
}
#elif defined(__ARM_NEON)
/* Sixteen bytes as floats, times scale, plus least. */
static inline __attribute__((always_inline)) void widen(int8x16_t bytes, float scale, float least, Lanes w[4]) {
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    float32x4_t add = vdupq_n_f32(least);
    w[0] = (Lanes)vfmaq_n_f32(add, vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), scale);
    w[1] = (Lanes)vfmaq_n_f32(add, vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))), scale);
    w[2] = (Lanes)vfmaq_n_f32(add, vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), scale);
    w[3] = (Lanes)vfmaq_n_f32(add, vcvtq_f32_s32(vmovl_s16(vget_high_s16(high))), scale);
}

static inline __attribute__((always_inline)) void expand_q4_1(const BlockQ4_1 *block, Lanes w[8]) {
    uint8x16_t halves = vld1q_u8(block->halves);
    widen(vreinterpretq_s8_u8(vandq_u8(halves, vdupq_n_u8(15))), half(block->scale), half(block->least), w);
    widen(vreinterpretq_s8_u8(vshrq_n_u8(halves, 4)), half(block->scale), half(block->least), w + 4);
}

static inline __attribute__((always_inline)) void expand_q8_0(const BlockQ8_0 *block, Lanes w[8]) {
    widen(vld1q_s8(block->values), half(block->scale), 0.0f, w);
    widen(vld1q_s8(block->values + 16), half(block->scale), 0.0f, w + 4);
}
#else
static inline __attribute__((always_inline)) void expand_q4_1(const BlockQ4_1 *block, Lanes w[32 / LANES]) {
    float *to = (float *)w, scale = half(block->scale), least = half(block->least);
    for (int i = 0; i < 16; i++) {
        to[i] = (float)(block->halves[i] & 15) * scale + least;
        to[i + 16] = (float)(block->halves[i] >> 4) * scale + least;
    }
}

static inline __attribute__((always_inline)) void expand_q8_0(const BlockQ8_0 *block, Lanes w[32 / LANES]) {
    float *to = (float *)w, scale = half(block->scale);
    for (int i = 0; i < 32; i++) to[i] = (float)block->values[i] * scale;
}
#endif

/* `rows` rows of w against `count` rows of x, all constants where this is inlined: enough sums to keep the units busy, and
   few enough for the registers. */
static inline __attribute__((always_inline)) void dots(const char *w, int64_t row_bytes, int kind, const float *x,
                                                       int64_t inputs, int rows, int count, float *out, int64_t outputs) {
    Lanes totals[4][8];
    #pragma GCC unroll 4
    for (int o = 0; o < rows; o++)
        #pragma GCC unroll 8
        for (int r = 0; r < count; r++) totals[o][r] = (Lanes){0};
    for (int64_t b = 0; b < inputs / 32; b++)
        #pragma GCC unroll 4
        for (int o = 0; o < rows; o++) {
            Lanes weights[32 / LANES];
            const char *block = w + o * row_bytes + b * (int64_t)(kind == Q4_1 ? sizeof(BlockQ4_1) : sizeof(BlockQ8_0));
            __builtin_prefetch(block + PREFETCHED * row_bytes);
            if (kind == Q4_1) expand_q4_1((const BlockQ4_1 *)block, weights);
            else expand_q8_0((const BlockQ8_0 *)block, weights);
            #pragma GCC unroll 8
            for (int r = 0; r < count; r++)
                #pragma GCC unroll 8
                for (int i = 0; i < 32 / LANES; i++)
                    totals[o][r] += weights[i] * ((const Lanes *)(x + r * inputs + b * 32))[i];
        }
    #pragma GCC unroll 4
    for (int o = 0; o < rows; o++)
        #pragma GCC unroll 8
        for (int r = 0; r < count; r++) out[r * outputs + o] = sum_of(totals[o][r]);
}

static void four_outputs(const char *w, int64_t row_bytes, int kind, const float *x, int64_t inputs,
                         int64_t tokens, int64_t outputs, int last, float *out) {
    /* kind and the counts as constants, so that each case is compiled on its own */
    #define DOTS(O, R, C) (kind == Q4_1 ? dots(w + (O) * row_bytes, row_bytes, Q4_1, from, inputs, R, C, to + (O), outputs) \
                                        : dots(w + (O) * row_bytes, row_bytes, Q8_0, from, inputs, R, C, to + (O), outputs))
    for (int64_t t = 0; t < tokens;) {
        int64_t left = tokens - t, count = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        const float *from = x + t * inputs;
        float *to = out + t * outputs;
        if (last < 4) for (int o = 0; o < last; o++) {
            if (count == 8) DOTS(o, 1, 8);
            else if (count == 4) DOTS(o, 1, 4);
            else if (count == 2) DOTS(o, 1, 2);
            else DOTS(o, 1, 1);
        }
        else if (count == 8) { DOTS(0, 2, 8); DOTS(2, 2, 8); }
        else if (count == 4) { DOTS(0, 2, 4); DOTS(2, 2, 4); }
        else if (count == 2) DOTS(0, 4, 2);
        else DOTS(0, 4, 1);
        t += count;
    }
    #undef DOTS
}

/* out [tokens, outputs] = x [tokens, inputs] w^T + bias. w: `outputs` rows of inputs / 32 blocks; kind: 0 Q4_1, 1 Q8_0.
   A row of x gives the same result in any company. */
void KERNEL(block_linear)(const float *x, const char *w, const float *bias, float *out, int64_t tokens, int64_t inputs,
                            int64_t outputs, int64_t kind) {
    int64_t row_bytes = inputs / 32 * (kind == Q4_1 ? sizeof(BlockQ4_1) : sizeof(BlockQ8_0));
    #pragma omp parallel for schedule(static) if (inputs * outputs > 4 * ENOUGH)
    for (int64_t group = 0; group < (outputs + 3) / 4; group++) {
        int64_t first = group * 4;
        int last = outputs - first < 4 ? (int)(outputs - first) : 4;
        four_outputs(w + first * row_bytes, row_bytes, (int)kind, x, inputs, tokens, outputs, last, out + first);
        if (bias)
            for (int64_t t = 0; t < tokens; t++)
                for (int o = 0; o < last; o++) out[t * outputs + first + o] += bias[first + o];
    }
}
