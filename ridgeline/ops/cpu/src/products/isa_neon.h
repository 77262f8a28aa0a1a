/* 4 outputs in a register of 128 bits, with sdot. */

#include <arm_neon.h>

#define WIDE 4
#define MOST 8
#define REGISTERS 8
/* Registers of outputs that are summed at once. A tile of few rows is then read from one end to the other, and multiplied while the
   next one is on its way; register by register, the first would wait for memory and the others for the arithmetic units. */
#define ABREAST(count) ((count) <= 2 ? 4 : (count) == 4 ? 2 : 1)

/* What comes after a group is asked for while the group is multiplied by. */
#define FETCH 1
ALWAYS void fetch(const uint8_t *from, int64_t bytes) {
    #pragma GCC unroll 8
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
}

typedef uint8x16_t Bytes;
typedef float32x4_t Floats;

ALWAYS Floats zeros(void) { return vdupq_n_f32(0.0f); }
ALWAYS Floats all(float x) { return vdupq_n_f32(x); }
ALWAYS Floats plus(Floats a, Floats b) { return vaddq_f32(a, b); }
ALWAYS Floats times(Floats a, Floats b) { return vmulq_f32(a, b); }
ALWAYS Floats plus_times(Floats sum, Floats a, Floats b) { return vfmaq_f32(sum, a, b); }
ALWAYS Floats load_floats(const void *from) { return vld1q_f32(from); }
ALWAYS Floats load_halves(const void *from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
ALWAYS Floats load_brains(const void *from) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from), 16)); }
/* Four of 16 bytes as floats. A byte below the top of a float's bits adds to 2^23: as a sum of dots, without a conversion. */
ALWAYS Floats above(uint8x16_t bytes, int part, float begin) {
    #define PLACES(i) {i, 255, 255, 255, i + 1, 255, 255, 255, i + 2, 255, 255, 255, i + 3, 255, 255, 255}
    static const uint8_t PLACES_OF[4][16] = {PLACES(0), PLACES(4), PLACES(8), PLACES(12)};
    #undef PLACES
    uint32x4_t words = vreinterpretq_u32_u8(vqtbl1q_u8(bytes, vld1q_u8(PLACES_OF[part])));
    return vsubq_f32(vreinterpretq_f32_u32(vorrq_u32(words, vdupq_n_u32(0x4b000000))), vdupq_n_f32(begin));
}
#define INNER 1
ALWAYS Floats inner_unsigned(const uint8_t *all, int part) { return above(vld1q_u8(all), part, 8388608.0f); }
ALWAYS Floats inner_signed(const uint8_t *all, int part) {
    return above(veorq_u8(vld1q_u8(all), vdupq_n_u8(128)), part, 8388736.0f);
}
ALWAYS void store(float *to, Floats x) { vst1q_f32(to, x); }

/* Numbers that registers are multiplied by, one lane after the other: a load into all lanes would take a slot of the arithmetic units. */
#define BY_LANE 1
typedef float32x4_t Few;
ALWAYS Few few(const float *from) { return vld1q_f32(from); }
#define times_lane(a, x, i) vmulq_laneq_f32(a, x, i)
#define plus_times_lane(sum, a, x, i) vfmaq_laneq_f32(sum, a, x, i)

ALWAYS Bytes load_bytes(const void *from) { return vld1q_u8(from); }
ALWAYS Bytes masked(Bytes x, int mask) { return vandq_u8(x, vdupq_n_u8((uint8_t)mask)); }
ALWAYS Bytes up(Bytes x, int bits) { return bits ? vshlq_u8(x, vdupq_n_s8((int8_t)bits)) : x; }
ALWAYS Bytes down(Bytes x, int bits) { return vshlq_u8(x, vdupq_n_s8((int8_t)-bits)); }
ALWAYS Bytes upper(Bytes x) { return vshrq_n_u8(x, 4); }           /* shifts stay within bytes: nothing to mask */
ALWAYS Bytes with_bits(Bytes a, Bytes b, int mask) { return vbslq_u8(vdupq_n_u8((uint8_t)mask), b, a); }

ALWAYS Floats numbers_of(Bytes codes, int place, int is_signed) {
    if (is_signed) {
        int32x4_t words = vshlq_s32(vreinterpretq_s32_u8(codes), vdupq_n_s32(24 - 8 * place));
        return vcvtq_f32_s32(vshrq_n_s32(words, 24));
    }
    uint32x4_t words = vshlq_u32(vreinterpretq_u32_u8(codes), vdupq_n_s32(-8 * place));
    return vcvtq_f32_u32(vandq_u32(words, vdupq_n_u32(255)));
}

/* The float16 that byte `place` of every four becomes (tiles.h), as a float; and its number of sixteen. */
ALWAYS Floats halves_of(Bytes codes, int place, int bits) {
    uint32x4_t x = vandq_u32(vshlq_u32(vreinterpretq_u32_u8(codes), vdupq_n_s32(-8 * place)), vdupq_n_u32(255));
    uint32x4_t low = vandq_u32(x, vdupq_n_u32((1u << (bits - 1)) - 1));
    uint32x4_t sign = vshlq_u32(veorq_u32(x, low), vdupq_n_s32(16 - bits));
    return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(vorrq_u32(sign, vshlq_u32(low, vdupq_n_s32(HALF_SHIFT(bits)))))));
}
ALWAYS Floats found_in(const float table[16], Bytes codes, int place) {
    uint32x4_t x = vandq_u32(vshlq_u32(vreinterpretq_u32_u8(codes), vdupq_n_s32(-8 * place)), vdupq_n_u32(15));
    uint8x16_t bytes = vreinterpretq_u8_u32(vmlaq_u32(vdupq_n_u32(0x03020100), x, vdupq_n_u32(0x04040404)));
    return vreinterpretq_f32_u8(vqtbl4q_u8(vld1q_u8_x4((const uint8_t *)table), bytes));
}

/* Codes of up to 7 bits and signed bytes are both signed numbers. The sum begins at the bits of the float 1.5 * 2^23, and stays far
   below 2^22: its bits are those of the float 1.5 * 2^23 + sum. To take 1.5 * 2^23 off is exact, and any arithmetic
   unit can do it, where one alone converts (Neoverse N1). */
#define BEGIN 12582912.0f

/* Rows whose sums are made side by side: an sdot that waits for the one before it holds up those behind it, the queues are short. */
#define BESIDE(count) ((count) % 2 ? 1 : 2)
#define SDOT(total, codes, x, lane) total = vdotq_laneq_s32(total, vreinterpretq_s8_u8(codes), x, lane)
/* `middle`, the code that means 0, is taken off with the first value of a sum. */
#define FOLDED 1
ALWAYS void dots_beside(const Bytes *codes, int middle, const Activations *x, int64_t at, int rows, Floats products[][HALVES]) {
    int32x4_t totals[2][HALVES];
    int8x16_t from[2][HALVES];
    #pragma GCC unroll 2
    for (int r = 0; r < rows; r++)
        #pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) {
            const int64_t tile = at + r * x->tiles;
            from[r][h] = vld1q_s8(x->codes + tile * DEEP + h * SHARE);
            totals[r][h] = vdupq_n_s32(0x4b400000 - middle * (middle ? x->facts[tile].counts[h] : 0));
        }
    #define QUAD(lane) \
        for (int h = 0; h < HALVES; h++) \
            for (int r = 0; r < rows; r++) SDOT(totals[r][h], codes[h * SHARE / 4 + lane], from[r][h], lane);
    QUAD(0) QUAD(1) QUAD(2) QUAD(3)
    #undef QUAD
    #pragma GCC unroll 2
    for (int h = 0; h < HALVES; h++)
        #pragma GCC unroll 2
        for (int r = 0; r < rows; r++) products[r][h] = vsubq_f32(vreinterpretq_f32_s32(totals[r][h]), vdupq_n_f32(BEGIN));
}
