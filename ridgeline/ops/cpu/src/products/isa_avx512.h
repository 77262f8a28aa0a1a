/* 16 outputs in a register of 512 bits. */

#include <immintrin.h>

#define WIDE 16                      /* outputs in a register */
#define MOST 8                       /* rows of activations that share an unpacked tile */
#define REGISTERS 16                 /* of the unpacked codes of a tile, at most */
#if !defined(__AVX512VNNI__)
#define PAIRS 1                      /* 8-bit weights are multiplied in 16 bits */
#endif

typedef __m512i Bytes;
typedef __m512 Floats;

ALWAYS Floats zeros(void) { return _mm512_setzero_ps(); }
ALWAYS Floats all(float x) { return _mm512_set1_ps(x); }
ALWAYS Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
ALWAYS Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
ALWAYS Floats plus_times(Floats sum, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, sum); }
ALWAYS Floats load_floats(const void *from) { return _mm512_loadu_ps(from); }
ALWAYS Floats load_halves(const void *from) { return _mm512_cvtph_ps(_mm256_loadu_si256(from)); }
ALWAYS Floats load_brains(const void *from) {
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from)), 16);
}
ALWAYS Floats load_unsigned(const void *from) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from))); }
ALWAYS Floats load_signed(const void *from) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from))); }
ALWAYS void store(float *to, Floats x) { _mm512_storeu_ps(to, x); }

ALWAYS Bytes load_bytes(const void *from) { return _mm512_loadu_si512(from); }
ALWAYS Bytes masked(Bytes x, int mask) { return _mm512_and_si512(x, _mm512_set1_epi8((char)mask)); }
ALWAYS Bytes up(Bytes x, int bits) { return _mm512_slli_epi16(x, bits); }        /* within 16 bits: mask afterwards */
ALWAYS Bytes down(Bytes x, int bits) { return _mm512_srli_epi16(x, bits); }
ALWAYS Bytes upper(Bytes x) { return masked(down(x, 4), 15); }                 /* the high halves of bytes */
ALWAYS Bytes with_bits(Bytes a, Bytes b, int mask) { return _mm512_or_si512(a, masked(b, mask)); }

/* Byte `place` of every four, as numbers. */
ALWAYS Floats numbers_of(Bytes codes, int place, int is_signed) {
    if (is_signed) return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(codes, 24 - 8 * place), 24));
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(codes, 8 * place), _mm512_set1_epi32(255)));
}

/* The float16 that byte `place` of every four becomes (tiles.h), as a float; and its number of sixteen. */
ALWAYS Floats halves_of(Bytes codes, int place, int bits) {
    __m512i x = _mm512_srli_epi32(codes, 8 * place), low = _mm512_set1_epi32((1 << (bits - 1)) - 1);
    __m512i sign = _mm512_slli_epi32(_mm512_andnot_si512(low, _mm512_and_si512(x, _mm512_set1_epi32(255))), 16 - bits);
    __m512i half = _mm512_or_si512(sign, _mm512_slli_epi32(_mm512_and_si512(x, low), HALF_SHIFT(bits)));
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(half));
}
ALWAYS Floats found_in(const float table[16], Bytes codes, int place) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 8 * place), _mm512_loadu_ps(table));     /* by the four low bits */
}

ALWAYS Bytes four_of(const int8_t *from) { return _mm512_set1_epi32(*(const int32_t *)from); }

#if defined(PAIRS)
/* The 16-bit numbers of a register of signed bytes: even ones and odd ones. */
ALWAYS void widen(Bytes x, Bytes *even, Bytes *odd) {
    *even = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8);
    *odd = _mm512_srai_epi16(x, 8);
}

ALWAYS Floats dots_of_pairs(const Bytes *codes, const int16_t *x) {
    Bytes sum = _mm512_setzero_si512();
    #pragma GCC unroll 8
    for (int i = 0; i < SHARE / 2; i++)
        sum = _mm512_add_epi32(sum, _mm512_madd_epi16(codes[i], _mm512_set1_epi32(((const int32_t *)x)[i])));
    return _mm512_cvtepi32_ps(sum);
}

/* Of 16 inputs. A sum of 16 bits holds 4 results of vpmaddubsw, two products each, of 4 or 5-bit codes and 2 of 6-bit ones. */
ALWAYS Floats dots(int bits, const Bytes *codes, const int8_t *x) {
    const int each = bits == 6 ? 2 : 4;
    Bytes total = _mm512_setzero_si512();
    #pragma GCC unroll 2
    for (int i = 0; i < SHARE / 4; i += each) {
        Bytes sum = _mm512_maddubs_epi16(codes[i], four_of(x + 4 * i));
        #pragma GCC unroll 3
        for (int j = i + 1; j < i + each; j++)
            sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(codes[j], four_of(x + 4 * j)));
        sum = _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
        total = i == 0 ? sum : _mm512_add_epi32(total, sum);
    }
    return _mm512_cvtepi32_ps(total);
}
#else
ALWAYS Floats dots(int bits, const Bytes *codes, const int8_t *x) {
    Bytes total = _mm512_setzero_si512();
    (void)bits;
    #pragma GCC unroll 4
    for (int i = 0; i < SHARE / 4; i++) total = _mm512_dpbusd_epi32(total, codes[i], four_of(x + 4 * i));
    return _mm512_cvtepi32_ps(total);
}
#endif
