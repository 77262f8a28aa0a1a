/* The float32 kernels of the CPU: the same ops as the definitions in plain torch, without torch's cost per call.

   C with OpenMP and the compiler's portable vectors, no headers of Python or torch: arrays come as pointers and element
   strides. `native.py` builds this file once for the machine it runs on, at installation. The order of additions in a row
   is written down here: it depends neither on the other rows of the batch nor on the number of threads. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define ENOUGH 16384                 /* elements from which a loop is worth waking the other threads for */
#define SPLIT 512                    /* positions of the KV cache that one task of a decode attends to */
#define MAX_HEAD 256                 /* floats of a head; always a multiple of 16 */

/* One register of floats. A wider vector than the machine's would be portable too, but gcc keeps those in memory. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
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
   at 1e-38, which is nothing beside the 1 that is always there; NaN stays NaN. Once for a float and once for vectors. */
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
    p = p * r * r + r;

#define CAST(x, T) ((T)(x))
#define EITHER(condition, a, b) ((condition) ? (a) : (b))
#define CHOOSE(condition, a, b) ((Lanes)(((Places)(a) & (condition)) | ((Places)(b) & ~(condition))))

static inline float exponential(float x) {
    EXPONENTIAL(float, int32_t, CAST, EITHER)
    union { int32_t bits; float value; } power = {(n + 127) << 23};
    return (p + 1.0f) * power.value;
}

static inline __attribute__((always_inline)) Lanes exponentials(Lanes x) {
    EXPONENTIAL(Lanes, Places, __builtin_convertvector, CHOOSE)
    return (p + 1.0f) * (Lanes)((n + 127) << 23);
}

/* cap * tanh(score / cap), where tanh x = -m / (2 + m) with m = e^-2x - 1 for x >= 0: exact for small x, too. */
static inline __attribute__((always_inline)) Lanes capped(Lanes scores, float cap) {
    Lanes ratio = scores * (1.0f / cap), x = ratio * 2.0f;
    x = CHOOSE(x > 0.0f, -x, x);
    EXPONENTIAL(Lanes, Places, __builtin_convertvector, CHOOSE)
    Lanes power = (Lanes)((n + 127) << 23), m = p * power + (power - 1.0f);
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
        for (; i + LANES <= width; i += LANES) parts += *(const Lanes *)(in + i) * *(const Lanes *)(in + i);
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
        for (; i + LANES <= width; i += LANES) {
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
    #pragma omp parallel for schedule(static) if (tokens * width > 2 * ENOUGH)
    for (int64_t token = 0; token < tokens; token++) {
        memcpy(k_cache + slots[token] * width, k + token * k_stride, width * sizeof(float));
        memcpy(v_cache + slots[token] * width, v + token * v_stride, width * sizeof(float));
    }
}

typedef struct {
    const float *k_cache, *v_cache;
    int64_t kv_heads, width, block_size;
    float scale, softcap;
} Cache;

/* Where each of a row's positions first..first + count lies in a cache: the start of its slot, all heads. */
static inline void find_slots(const Cache *cache, const int32_t *table, int64_t first, int64_t count, int64_t *slots) {
    int64_t block = first / cache->block_size, offset = first % cache->block_size;
    for (int64_t j = 0; j < count; j++) {
        slots[j] = ((int64_t)table[block] * cache->block_size + offset) * cache->kv_heads * cache->width;
        if (++offset == cache->block_size) offset = 0, block++;
    }
}

#define TILE 16                      /* positions whose scores a decode keeps at a time */
#define CHUNK 8                      /* registers of a head's sums that are added up at a time */

/* Positions first..end of one row, for all heads: per head the weighted sum of values, the sum of the weights and the
   largest score, which the sums are relative to. A tile of positions serves every head before the next one is read: that
   is the order in which the cache lies in memory. `width` is a constant where this is inlined, so that the inner sums stay
   in registers. */
static inline __attribute__((always_inline)) void attend(
    const Cache *cache, const float *q, const int32_t *table, int64_t first, int64_t end, int64_t width, int64_t group,
    float *value, float *weight, float *largest) {
    const int64_t heads = cache->kv_heads * group;
    for (int64_t h = 0; h < heads; h++) {
        weight[h] = 0.0f;
        largest[h] = -INFINITY;
    }
    memset(value, 0, heads * width * sizeof(float));
    for (int64_t start = first; start < end; start += TILE) {
        int64_t count = end - start < TILE ? end - start : TILE, slots[TILE];
        find_slots(cache, table, start, count, slots);
        for (int64_t j = count; j < TILE; j++) slots[j] = slots[0];      /* something to read, which is hidden below */
        for (int64_t h = 0; h < heads; h++) {
            const float *query = q + h * width;
            const float *keys = cache->k_cache + h / group * width, *values = cache->v_cache + h / group * width;
            Lanes scores[TILE / LANES], top = (Lanes){0} + largest[h];
            for (int part = 0; part < TILE / LANES; part++) {
                Lanes dots[LANES];
                for (int j = 0; j < LANES; j++) {
                    const float *key = keys + slots[part * LANES + j];
                    dots[j] = *(const Lanes *)query * *(const Lanes *)key;
                    for (int64_t i = LANES; i < width; i += LANES)
                        dots[j] += *(const Lanes *)(query + i) * *(const Lanes *)(key + i);
                }
                scores[part] = sums_of(dots) * cache->scale;
                if (cache->softcap > 0.0f) scores[part] = capped(scores[part], cache->softcap);
                scores[part] = CHOOSE(NUMBER + part * LANES < (int32_t)count, scores[part], (Lanes){0} - INFINITY);
                top = larger(scores[part], top);
            }
            float highest = largest_of(top);
            float shrink = largest[h] == -INFINITY ? 0.0f : exponential(largest[h] - highest);
            Lanes total = {0};
            for (int part = 0; part < TILE / LANES; part++) {
                Places seen = NUMBER + part * LANES < (int32_t)count;
                scores[part] = CHOOSE(seen, exponentials(scores[part] - highest), (Lanes){0});
                total += scores[part];
            }
            weight[h] = weight[h] * shrink + sum_of(total);
            largest[h] = highest;
            for (int64_t i = 0; i < width; i += CHUNK * LANES) {
                int64_t chunk = width - i < CHUNK * LANES ? (width - i) / LANES : CHUNK;
                Lanes sums[CHUNK], *kept = (Lanes *)(value + h * width + i);
                for (int64_t c = 0; c < chunk; c++) sums[c] = kept[c] * shrink;
                for (int64_t j = 0; j < TILE; j++)
                    for (int64_t c = 0; c < chunk; c++)
                        sums[c] += scores[j / LANES][j % LANES] * ((const Lanes *)(values + slots[j] + i))[c];
                for (int64_t c = 0; c < chunk; c++) kept[c] = sums[c];
            }
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
    Cache cache = {k_cache, v_cache, kv_heads, width, block_size, scale, softcap};
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

/* Chunks of prompts. A task is one KV head and QUERY_ROWS rows of a sequence's queries, a row being one query with one of
   the heads that share the KV head. It walks over the keys in tiles at multiples of KEYS: a tile is transposed once, and
   then serves all rows in blocks of ROWS x COLUMNS sums, which fill the registers. What no row of a block may see is not
   computed. A query's numbers depend neither on the chunk it comes in nor on where the chunk was cut into tasks. */
#define KEYS 64
#define QUERY_ROWS 128
#define ROWS 6
#if defined(__AVX512F__) || defined(__aarch64__)
#define COLUMNS 4                    /* registers; 6 x 4 sums fit into 32 of them */
#else
#define COLUMNS 2
#endif
#define PANEL (COLUMNS * LANES)      /* keys whose scores are computed at a time */

typedef struct {
    const float *query[ROWS];
    float *out[ROWS];                /* sums of values so far */
    int64_t position[ROWS];
} QueryBlock;

typedef struct {
    float largest[ROWS];
    Lanes weight[ROWS];              /* sums of the weights so far, lane by lane */
} Softmax;

/* The panels of a tile, [KEYS / PANEL][width][PANEL]: keys side by side, as the sums want them. */
static void transpose_keys(const Cache *cache, const float *keys, const int64_t *slots, int64_t low, int64_t high, float *to) {
    for (int64_t j = 0; j < KEYS; j += LANES) {
        if (j + LANES <= low || j >= high) continue;
        float *column = to + j / PANEL * PANEL * cache->width + j % PANEL;
        for (int64_t i = 0; i < cache->width; i += LANES) {
            Lanes square[LANES];
            for (int64_t lane = 0; lane < LANES; lane++) {
                int64_t key = j + lane;                  /* hidden slots may hold anything: not read */
                square[lane] = key >= low && key < high ? *(const Lanes *)(keys + slots[key] + i) : (Lanes){0};
            }
            transpose(square);
            for (int64_t lane = 0; lane < LANES; lane++) *(Lanes *)(column + (i + lane) * PANEL) = square[lane];
        }
    }
}

/* scores [ROWS][KEYS] of one panel. */
static inline __attribute__((always_inline)) void panel_scores(const QueryBlock *block, const float *panel, int64_t width,
                                                               float *scores) {
    Lanes sums[ROWS][COLUMNS] = {{{0}}};
    for (int64_t i = 0; i < width; i++)
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < COLUMNS; c++) sums[r][c] += block->query[r][i] * ((const Lanes *)(panel + i * PANEL))[c];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) ((Lanes *)(scores + r * KEYS))[c] = sums[r][c];
}

/* Scores of a tile become weights relative to the largest score so far; shrink is what the older sums are worth now.
   hidden: some of them must not be seen. */
static inline __attribute__((always_inline)) void tile_weights(
    const Cache *cache, const QueryBlock *block, Softmax *softmax, int64_t tile, int64_t window, int hidden, float *scores,
    float *shrink) {
    for (int r = 0; r < ROWS; r++) {
        Lanes *row = (Lanes *)(scores + r * KEYS), top = (Lanes){0} + softmax->largest[r];
        int32_t last = (int32_t)(block->position[r] - tile), first = window > 0 ? last - (int32_t)window + 1 : 0;
        for (int c = 0; c < KEYS / LANES; c++) {
            row[c] = row[c] * cache->scale;
            if (cache->softcap > 0.0f) row[c] = capped(row[c], cache->softcap);
            if (hidden) {
                Places key = NUMBER + c * LANES;
                row[c] = CHOOSE((key <= last) & (key >= first), row[c], (Lanes){0} - INFINITY);
            }
            top = larger(row[c], top);
        }
        float highest = largest_of(top);
        /* Nothing seen so far: -inf less -inf must not become NaN. */
        float reference = highest == -INFINITY ? 0.0f : highest;
        shrink[r] = exponential(softmax->largest[r] - reference);
        softmax->largest[r] = highest;
        Lanes total = softmax->weight[r] * shrink[r];
        for (int c = 0; c < KEYS / LANES; c++) {
            Lanes weights = exponentials(row[c] - reference);
            if (hidden) weights = CHOOSE(row[c] == -INFINITY, (Lanes){0}, weights);
            row[c] = weights;
            total += weights;
        }
        softmax->weight[r] = total;
    }
}

/* out = out * shrink + weights x values for `columns` registers of a head from `values` on; keys low..high of the tile. */
static inline __attribute__((always_inline)) void add_values(
    const QueryBlock *block, const float *weights, const float *shrink, const float *values, const int64_t *slots,
    int64_t low, int64_t high, int64_t at, int columns) {
    Lanes sums[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < columns; c++) sums[r][c] = ((const Lanes *)(block->out[r] + at))[c] * shrink[r];
    for (int64_t j = low; j < high; j++) {
        const Lanes *value = (const Lanes *)(values + slots[j] + at);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < columns; c++) sums[r][c] += weights[r * KEYS + j] * value[c];
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < columns; c++) ((Lanes *)(block->out[r] + at))[c] = sums[r][c];
}

/* One block's share of one tile. keys are the tile's panels. */
static void attend_tile(const Cache *cache, const QueryBlock *block, Softmax *softmax, const float *keys,
                        const float *values, const int64_t *slots, int64_t tile, int64_t window) {
    int64_t oldest = block->position[0], newest = block->position[ROWS - 1];
    int64_t low = window > 0 && oldest - window + 1 > tile ? oldest - window + 1 - tile : 0;
    int64_t high = newest + 1 - tile < KEYS ? newest + 1 - tile : KEYS;
    if (low >= high) return;
    float scores[ROWS * KEYS] __attribute__((aligned(64))), shrink[ROWS];
    for (int64_t j = low / PANEL * PANEL; j < high; j += PANEL)
        panel_scores(block, keys + j * cache->width, cache->width, scores + j);
    if (oldest + 1 - tile >= KEYS && (window <= 0 || newest - window < tile))
        tile_weights(cache, block, softmax, tile, window, 0, scores, shrink);
    else
        tile_weights(cache, block, softmax, tile, window, 1, scores, shrink);
    int64_t at = 0;
    for (; at + PANEL <= cache->width; at += PANEL)
        add_values(block, scores, shrink, values, slots, low, high, at, COLUMNS);
    for (; at < cache->width; at += LANES) add_values(block, scores, shrink, values, slots, low, high, at, 1);
}

/* q [queries, heads, width] of rows with any number of queries each -> out, same shape, contiguous. Row r has the queries
   query_start[r]..query_start[r + 1], the last of them at position kv_len[r] - 1. longest: the most queries of a row. */
void ridgeline_prefill_attention(const float *q, const float *k_cache, const float *v_cache, const int32_t *table,
                                 const int32_t *query_start, const int32_t *kv_len, float *out, int64_t rows,
                                 int64_t kv_heads, int64_t group, int64_t width, int64_t block_size, int64_t table_stride,
                                 int64_t q_stride, int64_t longest, int64_t window, float scale, float softcap) {
    Cache cache = {k_cache, v_cache, kv_heads, width, block_size, scale, softcap};
    int64_t heads = kv_heads * group, most = group < QUERY_ROWS ? QUERY_ROWS / group : 1;
    int64_t pieces = (longest + most - 1) / most;
    /* The last piece of a row sees most: it begins first. */
    #pragma omp parallel for schedule(dynamic) if (longest * heads * width > ENOUGH)
    for (int64_t task = 0; task < pieces * rows * kv_heads; task++) {
        int64_t row = task / kv_heads % rows, kv_head = task % kv_heads;
        int64_t queries = query_start[row + 1] - query_start[row], begin = (pieces - 1 - task / kv_heads / rows) * most;
        if (begin >= queries) continue;
        int64_t count = (queries - begin < most ? queries - begin : most) * group;
        int64_t blocks = (count + ROWS - 1) / ROWS, start = kv_len[row] - queries + begin;
        int64_t end = start + (count - 1) / group + 1, first = window > 0 && start + 1 > window ? start + 1 - window : 0;
        float spare[MAX_HEAD] __attribute__((aligned(64))), keys[KEYS * MAX_HEAD] __attribute__((aligned(64)));
        QueryBlock block[blocks];
        Softmax softmax[blocks];
        memset(spare, 0, sizeof spare);
        for (int64_t pair = 0; pair < blocks * ROWS; pair++) {
            QueryBlock *to = &block[pair / ROWS];
            int64_t real = pair < count ? pair : count - 1;          /* the last one again, to fill the block */
            int64_t token = query_start[row] + begin + real / group, head = kv_head * group + real % group;
            to->query[pair % ROWS] = q + token * q_stride + head * width;
            to->position[pair % ROWS] = start + real / group;
            to->out[pair % ROWS] = pair < count ? out + (token * heads + head) * width : spare;
            memset(to->out[pair % ROWS], 0, width * sizeof(float));
            softmax[pair / ROWS].largest[pair % ROWS] = -INFINITY;
            softmax[pair / ROWS].weight[pair % ROWS] = (Lanes){0};
        }
        for (int64_t tile = first / KEYS * KEYS; tile < end; tile += KEYS) {
            int64_t low = first > tile ? first - tile : 0, high = end - tile < KEYS ? end - tile : KEYS, slots[KEYS];
            find_slots(&cache, table + row * table_stride, tile + low, high - low, slots + low);
            transpose_keys(&cache, k_cache + kv_head * width, slots, low, high, keys);
            for (int64_t b = 0; b < blocks; b++)
                attend_tile(&cache, &block[b], &softmax[b], keys, v_cache + kv_head * width, slots, tile, window);
        }
        for (int64_t pair = 0; pair < count; pair++) {
            float *to = block[pair / ROWS].out[pair % ROWS];
            float share = 1.0f / sum_of(softmax[pair / ROWS].weight[pair % ROWS]);
            for (int64_t i = 0; i < width; i++) to[i] *= share;
        }
    }
}

/* out = x w^T + bias for one row of x: w [outputs, inputs], bias may be NULL. Every thread streams one run of rows of w,
   four at a time: that keeps enough reads in flight, and this product is nothing but reading w. */
static inline __attribute__((always_inline)) void few_outputs(const float *x, const float *w, const float *bias, float *out,
                                                              int64_t inputs, int count) {
    Lanes sums[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + LANES <= inputs; i += LANES) {
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
void ridgeline_block_linear(const float *x, const char *w, const float *bias, float *out, int64_t tokens, int64_t inputs,
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
