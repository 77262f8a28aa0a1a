/* 4 outputs in a register of 128 bits, with sdot. */

#include <arm_neon.h>

#define WIDE 4
#define MOST 8
#define REGISTERS 8

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
ALWAYS Floats load_unsigned(const void *from) {
    uint8x8_t bytes = vreinterpret_u8_u32(vld1_dup_u32(from));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
}
ALWAYS Floats load_signed(const void *from) {
    int8x8_t bytes = vreinterpret_s8_u32(vld1_dup_u32(from));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
}
ALWAYS void store(float *to, Floats x) { vst1q_f32(to, x); }

ALWAYS Bytes load_bytes(const void *from) { return vld1q_u8(from); }
ALWAYS Bytes masked(Bytes x, int mask) { return vandq_u8(x, vdupq_n_u8((uint8_t)mask)); }
ALWAYS Bytes up(Bytes x, int bits) { return vshlq_u8(x, vdupq_n_s8((int8_t)bits)); }
ALWAYS Bytes down(Bytes x, int bits) { return vshlq_u8(x, vdupq_n_s8((int8_t)-bits)); }
ALWAYS Bytes upper(Bytes x) { return vshrq_n_u8(x, 4); }           /* shifts stay within bytes: nothing to mask */
ALWAYS Bytes either(Bytes a, Bytes b) { return vorrq_u8(a, b); }

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

/* Codes of up to 7 bits and signed bytes are both signed numbers. */
ALWAYS Floats dots(int bits, const Bytes *codes, const int8_t *x) {
    int32x4_t total = vdupq_n_s32(0);
    (void)bits;
    for (int i = 0; i < SHARE / 4; i += 4) {
        int8x16_t four = vld1q_s8(x + 4 * i);
        total = vdotq_laneq_s32(total, vreinterpretq_s8_u8(codes[i]), four, 0);
        total = vdotq_laneq_s32(total, vreinterpretq_s8_u8(codes[i + 1]), four, 1);
        total = vdotq_laneq_s32(total, vreinterpretq_s8_u8(codes[i + 2]), four, 2);
        total = vdotq_laneq_s32(total, vreinterpretq_s8_u8(codes[i + 3]), four, 3);
    }
    return vcvtq_f32_s32(total);
}
