/* 8 outputs in a register of 256 bits. */

#include <immintrin.h>

#define WIDE 8
#define MOST 4
#define REGISTERS 16
#define PAIRS 1

typedef __m256i Bytes;
typedef __m256 Floats;

ALWAYS Floats zeros(void) { return _mm256_setzero_ps(); }
ALWAYS Floats all(float x) { return _mm256_set1_ps(x); }
ALWAYS Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
ALWAYS Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
ALWAYS Floats plus_times(Floats sum, Floats a, Floats b) { return _mm256_fmadd_ps(a, b, sum); }
ALWAYS Floats load_floats(const void *from) { return _mm256_loadu_ps(from); }
ALWAYS Floats load_halves(const void *from) { return _mm256_cvtph_ps(_mm_loadu_si128(from)); }
ALWAYS Floats load_brains(const void *from) {
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), 16);
}
ALWAYS Floats load_unsigned(const void *from) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from))); }
ALWAYS Floats load_signed(const void *from) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from))); }
ALWAYS void store(float *to, Floats x) { _mm256_storeu_ps(to, x); }

ALWAYS Bytes load_bytes(const void *from) { return _mm256_loadu_si256(from); }
ALWAYS Bytes masked(Bytes x, int mask) { return _mm256_and_si256(x, _mm256_set1_epi8((char)mask)); }
ALWAYS Bytes up(Bytes x, int bits) { return _mm256_slli_epi16(x, bits); }
ALWAYS Bytes down(Bytes x, int bits) { return _mm256_srli_epi16(x, bits); }
ALWAYS Bytes upper(Bytes x) { return masked(down(x, 4), 15); }
ALWAYS Bytes with_bits(Bytes a, Bytes b, int mask) { return _mm256_or_si256(a, masked(b, mask)); }

ALWAYS Floats numbers_of(Bytes codes, int place, int is_signed) {
    if (is_signed) return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(codes, 24 - 8 * place), 24));
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(codes, 8 * place), _mm256_set1_epi32(255)));
}

/* The float16 that byte `place` of every four becomes (tiles.h), as a float; and its number of sixteen. */
ALWAYS Floats halves_of(Bytes codes, int place, int bits) {
    __m256i x = _mm256_srli_epi32(codes, 8 * place), low = _mm256_set1_epi32((1 << (bits - 1)) - 1);
    __m256i sign = _mm256_slli_epi32(_mm256_andnot_si256(low, _mm256_and_si256(x, _mm256_set1_epi32(255))), 16 - bits);
    __m256i half = _mm256_or_si256(sign, _mm256_slli_epi32(_mm256_and_si256(x, low), HALF_SHIFT(bits)));
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}
ALWAYS Floats found_in(const float table[16], Bytes codes, int place) {
    __m256i x = _mm256_srli_epi32(codes, 8 * place);                 /* permutations look at the three low bits */
    Floats low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), x);
    Floats high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), x);
    return _mm256_blendv_ps(low, high, (Floats)_mm256_slli_epi32(x, 28));
}

ALWAYS Bytes four_of(const int8_t *from) { return _mm256_set1_epi32(*(const int32_t *)from); }

ALWAYS void widen(Bytes x, Bytes *even, Bytes *odd) {
    *even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
    *odd = _mm256_srai_epi16(x, 8);
}

ALWAYS Floats dots_of_pairs(const Bytes *codes, const int16_t *x) {
    Bytes sum = _mm256_setzero_si256();
    #pragma GCC unroll 8
    for (int i = 0; i < SHARE / 2; i++)
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes[i], _mm256_set1_epi32(((const int32_t *)x)[i])));
    return _mm256_cvtepi32_ps(sum);
}

/* Of 16 inputs. A sum of 16 bits holds 4 results of vpmaddubsw, two products each, of 4 or 5-bit codes and 2 of 6-bit ones. */
ALWAYS Floats dots(int bits, const Bytes *codes, const int8_t *x) {
    const int each = bits == 6 ? 2 : 4;
    Bytes total = _mm256_setzero_si256();
    #pragma GCC unroll 2
    for (int i = 0; i < SHARE / 4; i += each) {
        Bytes sum = _mm256_maddubs_epi16(codes[i], four_of(x + 4 * i));
        #pragma GCC unroll 3
        for (int j = i + 1; j < i + each; j++)
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes[j], four_of(x + 4 * j)));
        sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
        total = i == 0 ? sum : _mm256_add_epi32(total, sum);
    }
    return _mm256_cvtepi32_ps(total);
}
