/* 4 outputs in a register of 128 bits, with sdot. */

#include <arm_neon.h>

#define WIDE 4
#define MOST 8
#define OWN_SUMS 1                   /* sums_neon.h */
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
/* Four of 16 bytes as floats, 0 to 255. A byte in the middle of the bits of 2^15 adds to it: no conversion (sums_neon.h). The
   bits of 2^15 are loaded, because to copy a register takes an arithmetic unit. */
ALWAYS Floats four_of(uint8x16_t bytes, int part, float begin) {
    #define PLACES(i) {255, i, 255, 255, 255, i + 1, 255, 255, 255, i + 2, 255, 255, 255, i + 3, 255, 255}
    static const uint8_t PLACES_OF[4][16] = {PLACES(0), PLACES(4), PLACES(8), PLACES(12)};
    #undef PLACES
    static const float ABOVE[4] = {32768.0f, 32768.0f, 32768.0f, 32768.0f};
    Floats found;
    __asm__("ldr %q0, %3\n\ttbx %0.16b, {%1.16b}, %2.16b"
            : "=&w"(found) : "w"(bytes), "w"(vld1q_u8(PLACES_OF[part])), "m"(ABOVE));
    return vsubq_f32(found, vdupq_n_f32(begin));
}
ALWAYS Floats inner_unsigned(const uint8_t *all, int part) { return four_of(vld1q_u8(all), part, 32768.0f); }
ALWAYS Floats inner_signed(const uint8_t *all, int part) {
    return four_of(veorq_u8(vld1q_u8(all), vdupq_n_u8(128)), part, 32768.0f + 128.0f);
}
ALWAYS void store(float *to, Floats x) { vst1q_f32(to, x); }

ALWAYS Bytes load_bytes(const void *from) { return vld1q_u8(from); }
ALWAYS Bytes masked(Bytes x, int mask) { return vandq_u8(x, vdupq_n_u8((uint8_t)mask)); }
ALWAYS Bytes up(Bytes x, int bits) { return x << bits; }
ALWAYS Bytes down(Bytes x, int bits) { return x >> bits; }
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
