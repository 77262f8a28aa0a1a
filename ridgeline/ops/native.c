/* The float32 kernels of the CPU: the same ops as the definitions in plain torch, without torch's cost per call.

   C with OpenMP and the compiler's portable vectors, no headers of Python or torch: arrays come as pointers and element
   strides. `native.py` builds this file once for the machine it runs on, at installation. The order of additions in a row
   is written down here: it depends neither on the other rows of the batch nor on the number of threads. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define ENOUGH 16384                 /* elements from which a loop is worth waking the other threads for */
#define SPLIT 512                    /* positions of the KV cache that one task attends to */
#define MAX_HEAD 256
#define TILE 16                      /* positions whose scores are kept at a time */

/* Sixteen floats: one register with AVX-512, several on other machines. */
typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Places __attribute__((vector_size(64)));

/* e^x for x <= 0, with a relative error of about 1e-7: 2^n times a polynomial in the rest. Below -87 it stays at 1e-38,
   which is nothing beside the 1 that is always there; NaN stays NaN. Twice, because the compiler finds no vectors here. */
#define EXPONENTIAL(REAL, INT, CONVERT, SELECT) \
    x = SELECT(x < -87.0f, (REAL){0} - 87.0f, x); \
    INT n = CONVERT(x * 1.44269504088896341f - 0.5f, INT); \
    REAL whole = CONVERT(n, REAL); \
    REAL r = x - whole * 0.693359375f + whole * 2.12194440e-4f; \
    REAL p = r * 1.9875691500e-4f + 1.3981999507e-3f; \
    p = p * r + 8.3334519073e-3f; \
    p = p * r + 4.1665795894e-2f; \
    p = p * r + 1.6666665459e-1f; \
    p = p * r + 5.0000001201e-1f; \
    p = p * r * r + r + 1.0f;

#define CAST(x, T) ((T)(x))
#define EITHER(condition, a, b) ((condition) ? (a) : (b))
#define CHOOSE(condition, a, b) ((Lanes)(((Places)(a) & (condition)) | ((Places)(b) & ~(condition))))

static inline float exponential(float x) {
    EXPONENTIAL(float, int32_t, CAST, EITHER)
    union { int32_t bits; float value; } power = {(n + 127) << 23};
    return p * power.value;
}

static inline __attribute__((always_inline)) Lanes exponentials(Lanes x) {
    EXPONENTIAL(Lanes, Places, __builtin_convertvector, CHOOSE)
    return p * (Lanes)((n + 127) << 23);
}

#define PICK(a, b, ...) __builtin_shuffle(a, b, (Places){__VA_ARGS__})

static inline float sum_of(Lanes x) {
    x += PICK(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += PICK(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x += PICK(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    x += PICK(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return x[0];
}

/* tanh(x), also for small x, where 1 - e^(-2x) would cancel: tanhf is exact but scalar, and scores are few. */
static inline float capped(float score, float cap) { return cap * tanhf(score / cap); }

/* out = x / rms(x) * (weight + offset), of x + residual where there is one (kept in `sum`).
   x is [tokens, heads, width] with any token and head stride; the others are contiguous. */
void ridgeline_rms_norm(const float *x, const float *residual, const float *weight, float *out, float *sum,
                        int64_t tokens, int64_t heads, int64_t width, int64_t token_stride, int64_t head_stride,
                        float eps, float offset) {
    #pragma omp parallel for schedule(static) if (tokens * heads * width > ENOUGH)
    for (int64_t row = 0; row < tokens * heads; row++) {
        const float *in = x + row / heads * token_stride + row % heads * head_stride;
        float *to = out + row * width;
        if (residual) {
            const float *add = residual + row * width;
            float *keep = sum + row * width;
            for (int64_t i = 0; i < width; i++) keep[i] = in[i] + add[i];
            in = keep;
        }
        Lanes parts = {0};
        int64_t i = 0;
        for (; i + 16 <= width; i += 16) parts += *(const Lanes *)(in + i) * *(const Lanes *)(in + i);
        float squares = sum_of(parts);
        for (; i < width; i++) squares += in[i] * in[i];
        float scale = 1.0f / sqrtf(squares / (float)width + eps);
        for (i = 0; i < width; i++) to[i] = in[i] * scale * (weight[i] + offset);
    }
}

static void rotate(float *head, const float *cosine, const float *sine, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float first = head[i], second = head[i + half];
        head[i] = first * cosine[i] - second * sine[i];
        head[i + half] = second * cosine[i] + first * sine[i];
    }
}

/* In place on q [tokens, heads, width] and k [tokens, kv_heads, width], whose heads are contiguous.
   table is [positions, 2, half]: cosines and sines. */
void ridgeline_rotary(float *q, float *k, const int64_t *positions, const float *table, int64_t tokens, int64_t heads,
                      int64_t kv_heads, int64_t width, int64_t half, int64_t q_stride, int64_t k_stride) {
    #pragma omp parallel for schedule(static) if (tokens * (heads + kv_heads) * width > ENOUGH)
    for (int64_t token = 0; token < tokens; token++) {
        const float *cosine = table + positions[token] * 2 * half, *sine = cosine + half;
        for (int64_t h = 0; h < heads; h++) rotate(q + token * q_stride + h * width, cosine, sine, half);
        for (int64_t h = 0; h < kv_heads; h++) rotate(k + token * k_stride + h * width, cosine, sine, half);
    }
}

/* (1 + tanh(y)) / 2 = 1 / (1 + e^-2y): both activations are g / (1 + e^-z). */
#define GELU(g) (1.5957691216057308f * ((g) + 0.044715f * (g) * (g) * (g)))

/* out = act(gate) * up, x = [gate, up] in each row. kind: 0 silu, 1 gelu by tanh. */
void ridgeline_gated_activation(const float *x, float *out, int64_t tokens, int64_t width, int64_t stride, int64_t kind) {
    #pragma omp parallel for schedule(static) if (tokens * width > ENOUGH)
    for (int64_t token = 0; token < tokens; token++) {
        const float *gate = x + token * stride, *up = gate + width;
        float *to = out + token * width;
        int64_t i = 0;
        for (; i + 16 <= width; i += 16) {
            Lanes g = *(const Lanes *)(gate + i), z = g;
            if (kind == 1) z = GELU(g);
            Lanes e = exponentials(CHOOSE(z < 0.0f, z, -z));             /* e^-|z|: never overflows */
            *(Lanes *)(to + i) = CHOOSE(z < 0.0f, g * e, g) / (1.0f + e) * *(const Lanes *)(up + i);
        }
        for (; i < width; i++) {
            float g = gate[i], z = kind == 0 ? g : GELU(g), e = exponential(z < 0.0f ? z : -z);
            to[i] = (z < 0.0f ? g * e : g) / (1.0f + e) * up[i];
        }
    }
}

/* k, v [tokens, width] into their slots of caches [slots, width]. */
void ridgeline_kv_write(const float *k, const float *v, float *k_cache, float *v_cache, const int64_t *slots,
                        int64_t tokens, int64_t width, int64_t k_stride, int64_t v_stride) {
    for (int64_t token = 0; token < tokens; token++) {
        memcpy(k_cache + slots[token] * width, k + token * k_stride, width * sizeof(float));
        memcpy(v_cache + slots[token] * width, v + token * v_stride, width * sizeof(float));
    }
}

typedef struct {
    const float *k_cache, *v_cache;
    int64_t kv_heads, block_size;
    float scale, softcap;
} Cache;

/* Lane j of the result is the sum over x[j]: sixteen sums by halving, four times, what is left of two vectors each. */
static inline __attribute__((always_inline)) Lanes sums_of(const Lanes x[16]) {
    Lanes two[8], four[4], eight[2];
    for (int i = 0; i < 8; i++)
        two[i] = PICK(x[2 * i], x[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
               + PICK(x[2 * i], x[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    for (int i = 0; i < 4; i++)
        four[i] = PICK(two[2 * i], two[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
                + PICK(two[2 * i], two[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    for (int i = 0; i < 2; i++)
        eight[i] = PICK(four[2 * i], four[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
                 + PICK(four[2 * i], four[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    return PICK(eight[0], eight[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
         + PICK(eight[0], eight[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

static inline Lanes larger(Lanes a, Lanes b) { return CHOOSE(a > b, a, b); }

static inline float largest_of(Lanes x) {
    x = larger(x, PICK(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = larger(x, PICK(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = larger(x, PICK(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    x = larger(x, PICK(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return x[0];
}

/* Positions first..end of one row, for all heads: per head the weighted sum of values, the sum of the weights and the
   largest score, which the sums are relative to. A tile of positions serves every head before the next one is read: that
   is the order in which the cache lies in memory. `width` and `group` are constants where this is inlined, so that the
   inner sums stay in registers. */
static inline __attribute__((always_inline)) void attend(
    const Cache *cache, const float *q, const int32_t *table, int64_t first, int64_t end, int64_t width, int64_t group,
    float *value, float *weight, float *largest) {
    const int64_t parts = width / 16, heads = cache->kv_heads * group;
    const Places number = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t h = 0; h < heads; h++) {
        weight[h] = 0.0f;
        largest[h] = -INFINITY;
    }
    memset(value, 0, heads * width * sizeof(float));
    int64_t block = first / cache->block_size, offset = first % cache->block_size;
    for (int64_t start = first; start < end; start += TILE) {
        int64_t count = end - start < TILE ? end - start : TILE;
        Places seen = number < (int32_t)count;
        int64_t places[TILE];
        for (int64_t j = 0; j < TILE; j++) {
            if (j < count) {
                places[j] = ((int64_t)table[block] * cache->block_size + offset) * cache->kv_heads * parts;
                if (++offset == cache->block_size) offset = 0, block++;
            } else {
                places[j] = places[0];                   /* beyond the end: something to read, which is hidden below */
            }
        }
        for (int64_t h = 0; h < heads; h++) {
            const Lanes *query = (const Lanes *)q + h * parts;
            const Lanes *keys = (const Lanes *)cache->k_cache + h / group * parts;
            const Lanes *values = (const Lanes *)cache->v_cache + h / group * parts;
            Lanes dots[TILE];
            for (int64_t j = 0; j < TILE; j++) {
                dots[j] = query[0] * keys[places[j]];
                for (int64_t i = 1; i < parts; i++) dots[j] += query[i] * keys[places[j] + i];
            }
            Lanes scores = sums_of(dots) * cache->scale;
            if (cache->softcap > 0.0f)
                for (int64_t j = 0; j < TILE; j++) scores[j] = capped(scores[j], cache->softcap);
            scores = CHOOSE(seen, scores, (Lanes){0} - INFINITY);
            float top = largest_of(larger(scores, (Lanes){0} + largest[h]));
            float shrink = largest[h] == -INFINITY ? 0.0f : exponential(largest[h] - top);
            scores = CHOOSE(seen, exponentials(scores - top), (Lanes){0});
            weight[h] = weight[h] * shrink + sum_of(scores);
            largest[h] = top;
            Lanes sums[MAX_HEAD / 16], *kept = (Lanes *)value + h * parts;
            for (int64_t i = 0; i < parts; i++) sums[i] = kept[i] * shrink;
            for (int64_t j = 0; j < TILE; j++)
                for (int64_t i = 0; i < parts; i++) sums[i] += scores[j] * values[places[j] + i];
            for (int64_t i = 0; i < parts; i++) kept[i] = sums[i];
        }
    }
}

static void attend_any(const Cache *cache, const float *q, const int32_t *table, int64_t first, int64_t end, int64_t width,
                       int64_t group, float *value, float *weight, float *largest) {
    #define ATTEND(W) attend(cache, q, table, first, end, W, group, value, weight, largest)
    if (width == 64) ATTEND(64);
    else if (width == 96) ATTEND(96);
    else if (width == 128) ATTEND(128);
    else ATTEND(width);
    #undef ATTEND
}

/* One query per row: q [rows, heads, width] -> out, same shape, contiguous. The cache's positions are cut at multiples of
   SPLIT, so that one long row feeds every thread; the parts are merged in order. partial has room for
   rows * splits * heads * (width + 2) floats. */
void ridgeline_decode_attention(const float *q, const float *k_cache, const float *v_cache, const int32_t *table,
                                const int32_t *kv_len, float *out, float *partial, int64_t rows, int64_t kv_heads,
                                int64_t group, int64_t width, int64_t block_size, int64_t table_stride, int64_t q_stride,
                                int64_t splits, int64_t window, int64_t positions, float scale, float softcap) {
    Cache cache = {k_cache, v_cache, kv_heads, block_size, scale, softcap};
    int64_t heads = kv_heads * group, step = heads * (width + 2);
    #pragma omp parallel if (positions * heads * width > 8 * ENOUGH)
    {
        #pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < rows * splits; task++) {
            int64_t split = task % splits, row = task / splits, length = kv_len[row];
            int64_t first = window > 0 && length > window ? length - window : 0;
            int64_t begin = split * SPLIT, end = begin + SPLIT;
            if (begin < first) begin = first;
            if (end > length) end = length;
            float *value = partial + task * step, *weight = value + heads * width, *largest = weight + heads;
            if (begin < end)
                attend_any(&cache, q + row * q_stride, table + row * table_stride, begin, end, width, group, value, weight,
                           largest);
            else
                for (int64_t h = 0; h < heads; h++) largest[h] = -INFINITY;
        }
        #pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t h = 0; h < heads; h++) {
                float *to = out + (row * heads + h) * width;
                float top = -INFINITY, total = 0.0f;
                for (int64_t split = 0; split < splits; split++) {
                    float largest = partial[(row * splits + split) * step + heads * (width + 1) + h];
                    top = largest > top ? largest : top;
                }
                for (int64_t i = 0; i < width; i++) to[i] = 0.0f;
                for (int64_t split = 0; split < splits; split++) {
                    const float *part = partial + (row * splits + split) * step;
                    float largest = part[heads * (width + 1) + h];
                    if (largest == -INFINITY) continue;
                    float share = exponential(largest - top);
                    total += share * part[heads * width + h];
                    for (int64_t i = 0; i < width; i++) to[i] += share * part[h * width + i];
                }
                for (int64_t i = 0; i < width; i++) to[i] /= total;
            }
    }
}

/* out = x w^T + bias for one row of x: w [outputs, inputs], bias may be NULL. Every thread streams one run of rows of w,
   four at a time: that keeps enough reads in flight, and this product is nothing but reading w. */
static inline __attribute__((always_inline)) void few_outputs(const float *x, const float *w, const float *bias, float *out,
                                                              int64_t inputs, int count) {
    Lanes sums[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + 16 <= inputs; i += 16) {
        Lanes part = *(const Lanes *)(x + i);
        for (int o = 0; o < count; o++) sums[o] += part * *(const Lanes *)(w + o * inputs + i);
    }
    for (int o = 0; o < count; o++) {
        float total = sum_of(sums[o]);
        for (int64_t j = i; j < inputs; j++) total += x[j] * w[o * inputs + j];
        out[o] = bias ? total + bias[o] : total;
    }
}

void ridgeline_linear_row(const float *x, const float *w, const float *bias, float *out, int64_t inputs, int64_t outputs) {
    int64_t groups = outputs / 4;
    #pragma omp parallel for schedule(static) if (inputs * outputs > 4 * ENOUGH)
    for (int64_t group = 0; group < groups; group++)
        few_outputs(x, w + group * 4 * inputs, bias ? bias + group * 4 : bias, out + group * 4, inputs, 4);
    for (int64_t o = groups * 4; o < outputs; o++)
        few_outputs(x, w + o * inputs, bias ? bias + o : bias, out + o, inputs, 1);
}

/* Weights as a GGUF file stores them: blocks of 32 with their scales, read where they lie and multiplied in float32. */
typedef struct { _Float16 scale, least; uint8_t halves[16]; } BlockQ4_1;       /* w = scale * q + least, q in 0..15 */
typedef struct { _Float16 scale; int8_t values[32]; } BlockQ8_0;               /* w = scale * q, q in -128..127 */
enum { Q4_1, Q8_0 };

/* Sixteen bytes as floats; and sixteen halves of bytes, the low or the high ones. gcc finds AVX-512's widening moves in
   neither loops nor vector conversions. */
#ifdef __AVX512F__
static inline Lanes floats_of(const int8_t *from) {
    return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}

static inline Lanes halves_of(const uint8_t *from, int shift) {
    Places wide = (Places)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
    return (Lanes)_mm512_cvtepi32_ps((__m512i)((wide >> shift) & 15));
}
#else
static inline Lanes floats_of(const int8_t *from) {
    float to[16];
    for (int i = 0; i < 16; i++) to[i] = (float)from[i];
    return *(const Lanes *)to;
}

static inline Lanes halves_of(const uint8_t *from, int shift) {
    float to[16];
    for (int i = 0; i < 16; i++) to[i] = (float)(int32_t)((from[i] >> shift) & 15);
    return *(const Lanes *)to;
}
#endif

/* `rows` rows of w against `count` rows of x, all constants where this is inlined: enough sums to keep the units busy, and
   few enough for the registers. `sums` are the sums over each 32 values of x, for the constant part of Q4_1. */
static inline __attribute__((always_inline)) void dots(const char *w, int64_t row_bytes, int kind, const float *x,
                                                       const float *sums, int64_t inputs, int rows, int count, float *out,
                                                       int64_t outputs) {
    Lanes totals[4][8];
    float least[4][8];
    for (int o = 0; o < rows; o++)
        for (int r = 0; r < count; r++) totals[o][r] = (Lanes){0}, least[o][r] = 0.0f;
    for (int64_t b = 0; b < inputs / 32; b++)
        for (int o = 0; o < rows; o++) {
            Lanes low, high;
            float lowest = 0.0f;
            if (kind == Q4_1) {
                const BlockQ4_1 *block = (const BlockQ4_1 *)(w + o * row_bytes) + b;
                low = halves_of(block->halves, 0) * (float)block->scale;
                high = halves_of(block->halves, 4) * (float)block->scale;
                lowest = (float)block->least;
            } else {
                const BlockQ8_0 *block = (const BlockQ8_0 *)(w + o * row_bytes) + b;
                low = floats_of(block->values) * (float)block->scale;
                high = floats_of(block->values + 16) * (float)block->scale;
            }
            for (int r = 0; r < count; r++) {
                const Lanes *part = (const Lanes *)(x + r * inputs + b * 32);
                totals[o][r] += low * part[0];
                totals[o][r] += high * part[1];
                if (kind == Q4_1) least[o][r] += lowest * sums[r * (inputs / 32) + b];
            }
        }
    for (int o = 0; o < rows; o++)
        for (int r = 0; r < count; r++) out[r * outputs + o] = sum_of(totals[o][r]) + least[o][r];
}

static void four_outputs(const char *w, int64_t row_bytes, int kind, const float *x, const float *sums, int64_t inputs,
                         int64_t tokens, int64_t outputs, int last, float *out) {
    /* kind and the counts as constants, so that each case is compiled on its own */
    #define DOTS(O, R, C) (kind == Q4_1 ? dots(w + (O) * row_bytes, row_bytes, Q4_1, from, part, inputs, R, C, to + (O), outputs) \
                                        : dots(w + (O) * row_bytes, row_bytes, Q8_0, from, part, inputs, R, C, to + (O), outputs))
    for (int64_t t = 0; t < tokens;) {
        int64_t left = tokens - t, count = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        const float *from = x + t * inputs, *part = sums + t * (inputs / 32);
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
   sums has room for tokens * inputs / 32 floats. A row of x gives the same result in any company. */
void ridgeline_block_linear(const float *x, const char *w, const float *bias, float *out, float *sums, int64_t tokens,
                            int64_t inputs, int64_t outputs, int64_t kind) {
    int64_t row_bytes = inputs / 32 * (kind == Q4_1 ? sizeof(BlockQ4_1) : sizeof(BlockQ8_0));
    for (int64_t b = 0; b < tokens * (inputs / 32); b++) {
        const Lanes *part = (const Lanes *)(x + b * 32);
        sums[b] = sum_of(part[0] + part[1]);
    }
    #pragma omp parallel for schedule(static) if (inputs * outputs > 4 * ENOUGH)
    for (int64_t group = 0; group < (outputs + 3) / 4; group++) {
        int64_t first = group * 4;
        int last = outputs - first < 4 ? (int)(outputs - first) : 4;
        four_outputs(w + first * row_bytes, row_bytes, (int)kind, x, sums, inputs, tokens, outputs, last, out + first);
        if (bias)
            for (int64_t t = 0; t < tokens; t++)
                for (int o = 0; o < last; o++) out[t * outputs + first + o] += bias[first + o];
    }
}
