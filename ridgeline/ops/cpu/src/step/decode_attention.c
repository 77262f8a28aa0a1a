/* Attention of one query per row over the paged KV cache. */

#include "kv.h"

#define SPLIT 512                    /* positions of the KV cache that one task of a decode attends to */
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
void KERNEL(decode_attention)(const float *q, const float *k_cache, const float *v_cache, const int32_t *table,
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
