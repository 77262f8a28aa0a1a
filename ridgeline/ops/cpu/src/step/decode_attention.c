/* Attention of one query per row over the paged KV cache. */

#include "kv.h"
#include "../pool.h"

#define SPLIT 64                     /* positions of the KV cache that one task attends to */
#define TILE 32                      /* positions whose scores are kept at a time */
#define TOGETHER 4                      /* heads whose values are added up at a time … */
#if defined(__AVX512F__) || defined(__aarch64__)
#define REGISTERS 4                    /* … and registers of each: 4 x 4 sums, of 32 registers */
#else
#define REGISTERS 2
#endif
/* With four lanes and 32 registers a key is multiplied by four heads once it was read (4 x 4 sums), and float16 is widened there,
   without a copy. Elsewhere it is widened once for all heads, and multiplied by one after the other. */
#if defined(__aarch64__)
#define BLOCKED 4
#else
#define BLOCKED 1
#endif

/* What a task leaves: per head the weighted sum of values, the sum of the weights, and the largest score, which the sums are
   relative to. */
typedef struct {
    float *value, *weight, *largest;
} Part;

typedef struct {
    Cache cache;
    const float *q;
    const int32_t *table, *table_rows, *kv_len;
    float *out, *partial;
    int64_t rows, group, table_stride, q_stride, room, splits, window;
} Decode;

/* Scores of one tile: `heads` heads, of which a key that was read serves all; [heads][TILE]. A sum is added up in the order of the
   numbers, whichever heads are beside it. */
static inline __attribute__((always_inline)) void tile_scores(const float *query, const void **keys, int64_t width, int heads,
                                                              int half, float (*scores)[TILE]) {
    #pragma GCC unroll 8
    for (int at = 0; at < TILE; at += LANES) {
        Lanes dots[BLOCKED][LANES];
        #pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) {
            const Lanes key = numbers_at(keys[at + j], 0, half);
            #pragma GCC unroll 4
            for (int h = 0; h < heads; h++) dots[h][j] = *(const Lanes *)(query + h * width) * key;
        }
        for (int64_t i = LANES; i < width; i += LANES)
            #pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) {
                const Lanes key = numbers_at(keys[at + j], i, half);
                #pragma GCC unroll 4
                for (int h = 0; h < heads; h++) dots[h][j] += *(const Lanes *)(query + h * width + i) * key;
            }
        #pragma GCC unroll 4
        for (int h = 0; h < heads; h++) *(Lanes *)(scores[h] + at) = sums_of(dots[h]);
    }
}

static inline __attribute__((always_inline)) void all_scores(const float *query, const void **keys, int64_t width, int heads,
                                                             int half, float (*scores)[TILE]) {
    int h = 0;
#if BLOCKED == 4
    if (heads == 4) tile_scores(query, keys, width, 4, half, scores), h = 4;
    else if (heads == 3) tile_scores(query, keys, width, 3, half, scores), h = 3;
    else if (heads == 2) tile_scores(query, keys, width, 2, half, scores), h = 2;
#endif
    for (; h < heads; h++) tile_scores(query + h * width, keys, width, 1, half, scores + h);
}

/* Scores of a tile become the weights of one head; returns what its older sums are worth now. */
static inline __attribute__((always_inline)) float head_weights(const Cache *cache, int64_t count, float *weight, float *largest,
                                                                float *weights) {
    Lanes scores[TILE / LANES], top = (Lanes){0} + *largest, total = {0};
    #pragma GCC unroll 8
    for (int at = 0; at < TILE / LANES; at++) {
        scores[at] = ((const Lanes *)weights)[at] * cache->scale;
        if (cache->softcap > 0.0f) scores[at] = capped(scores[at], cache->softcap);
        if (count < TILE) scores[at] = CHOOSE(NUMBER + at * LANES < (int32_t)count, scores[at], (Lanes){0} - INFINITY);
        top = larger(scores[at], top);
    }
    float highest = largest_of(top), shrink = *largest == -INFINITY ? 0.0f : softmax_weight(*largest - highest);
    #pragma GCC unroll 8
    for (int at = 0; at < TILE / LANES; at++) {
        scores[at] = softmax_weights(scores[at] - highest);
        if (count < TILE) scores[at] = CHOOSE(NUMBER + at * LANES < (int32_t)count, scores[at], (Lanes){0});
        total += scores[at];
        ((Lanes *)weights)[at] = scores[at];
    }
    *weight = *weight * shrink + sum_of(total);
    *largest = highest;
    return shrink;
}

/* sums = sums * shrink + weights x values, for `heads` heads and `columns` registers of them: enough sums that none waits for
   itself. Both are constants where this is inlined. */
static inline __attribute__((always_inline)) void add_head_values(
    float *sums, int64_t width, const float (*weights)[TILE], const float *shrink, const void **values, int64_t count,
    int64_t at, int heads, int columns, int half) {
    Lanes kept[TOGETHER][REGISTERS];
    #pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
        #pragma GCC unroll 4
        for (int c = 0; c < columns; c++) kept[h][c] = ((const Lanes *)(sums + h * width + at))[c] * shrink[h];
    for (int64_t j = 0; j < count; j++) {
        Lanes value[REGISTERS];
        #pragma GCC unroll 4
        for (int c = 0; c < columns; c++) value[c] = numbers_at(values[j], at + c * LANES, half);
        #pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
            #pragma GCC unroll 4
            for (int c = 0; c < columns; c++) kept[h][c] += weights[h][j] * value[c];
    }
    #pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
        #pragma GCC unroll 4
        for (int c = 0; c < columns; c++) ((Lanes *)(sums + h * width + at))[c] = kept[h][c];
}

static inline __attribute__((always_inline)) void add_all_values(
    float *sums, int64_t width, const float (*weights)[TILE], const float *shrink, const void **values, int64_t count,
    int heads, int half) {
    int64_t at = 0;
    for (; at + REGISTERS * LANES <= width; at += REGISTERS * LANES)
        add_head_values(sums, width, weights, shrink, values, count, at, heads, REGISTERS, half);
    for (; at < width; at += LANES) add_head_values(sums, width, weights, shrink, values, count, at, heads, 1, half);
}

/* Positions first..end of one row, for all heads: q [heads, width]. A tile of positions serves every head before the next one is
   read: that is the order in which the cache lies in memory. `width` is a constant where this is inlined, so that the inner sums
   stay in registers. half: float16 is multiplied by where it lies. */
static inline __attribute__((always_inline)) void attend(
    const Cache *cache, const float *q, const int32_t *table, int64_t first, int64_t end, int64_t width, int64_t group,
    int half, Part part) {
    float wide_keys[TILE * MAX_HEAD] __attribute__((aligned(64))), wide_values[TILE * MAX_HEAD] __attribute__((aligned(64)));
    float weights[TOGETHER][TILE] __attribute__((aligned(64))), shrink[TOGETHER];
    const void *keys[TILE], *values[TILE];
    const int64_t all = cache->kv_heads * group;
    for (int64_t h = 0; h < all; h++) {
        part.weight[h] = 0.0f;
        part.largest[h] = -INFINITY;
    }
    memset(part.value, 0, all * width * sizeof(float));
    for (int64_t start = first; start < end; start += TILE) {
        int64_t count = end - start < TILE ? end - start : TILE, slots[TILE];
        find_slots(cache, table, start, count, slots);
        for (int64_t kv_head = 0; kv_head < cache->kv_heads; kv_head++) {
            if (half) {
                place_heads(cache->k, 1, kv_head, width, slots, count, keys);
                place_heads(cache->v, 1, kv_head, width, slots, count, values);
            } else {
                find_heads(cache->k, cache->half, kv_head, width, slots, count, wide_keys, keys);
                find_heads(cache->v, cache->half, kv_head, width, slots, count, wide_values, values);
            }
            for (int64_t j = count; j < TILE; j++) keys[j] = keys[0];    /* something to read, which is hidden later */
            for (int64_t at = kv_head * group; at < (kv_head + 1) * group; at += TOGETHER) {
                int64_t heads = (kv_head + 1) * group - at < TOGETHER ? (kv_head + 1) * group - at : TOGETHER;
                all_scores(q + at * width, keys, width, (int)heads, half, weights);
                for (int64_t h = 0; h < heads; h++)
                    shrink[h] = head_weights(cache, count, part.weight + at + h, part.largest + at + h, weights[h]);
                float *sums = part.value + at * width;
                if (heads == 4) add_all_values(sums, width, weights, shrink, values, count, 4, half);
                else if (heads == 3) add_all_values(sums, width, weights, shrink, values, count, 3, half);
                else if (heads == 2) add_all_values(sums, width, weights, shrink, values, count, 2, half);
                else add_all_values(sums, width, weights, shrink, values, count, 1, half);
            }
        }
    }
}

static void attend_any(const Cache *cache, const float *q, const int32_t *table, int64_t first, int64_t end, int64_t group,
                       Part part) {
#if BLOCKED > 1
    #define ATTEND(W) (cache->half ? attend(cache, q, table, first, end, W, group, 1, part) \
                                   : attend(cache, q, table, first, end, W, group, 0, part))
#else
    #define ATTEND(W) attend(cache, q, table, first, end, W, group, 0, part)
#endif
    if (cache->width == 64) ATTEND(64);
    else if (cache->width == 96) ATTEND(96);
    else if (cache->width == 128) ATTEND(128);
    else ATTEND(cache->width);
    #undef ATTEND
}

/* Of one row's positions, those that its query sees. */
static inline int64_t first_seen(const Decode *job, int64_t row) {
    int64_t length = job->kv_len[row];
    return oldest_seen(length - 1, job->window);
}

static inline Part part_of(const Decode *job, int64_t row, int64_t split) {
    int64_t heads = job->cache.kv_heads * job->group;
    float *at = job->partial + (row * job->room + split) * heads * (job->cache.width + 2);
    return (Part){at, at + heads * job->cache.width, at + heads * (job->cache.width + 1)};
}

static void attend_task(void *with, int64_t task) {
    const Decode *job = with;
    int64_t split = task % job->splits, row = task / job->splits;
    int64_t begin = split * SPLIT, end = begin + SPLIT, first = first_seen(job, row);
    if (begin < first) begin = first;
    if (end > job->kv_len[row]) end = job->kv_len[row];
    if (begin >= end) return;
    int64_t line = job->table_rows ? job->table_rows[row] : row;
    attend_any(&job->cache, job->q + row * job->q_stride, job->table + line * job->table_stride, begin, end, job->group,
               part_of(job, row, split));
}

/* The parts of one row and of the heads of one KV head, in order. A row without keys gives zeros. */
static void merge_task(void *with, int64_t task) {
    const Decode *job = with;
    int64_t row = task / job->cache.kv_heads, width = job->cache.width, heads = job->cache.kv_heads * job->group;
    int64_t low = first_seen(job, row) / SPLIT, high = (job->kv_len[row] + SPLIT - 1) / SPLIT;
    int64_t first = task % job->cache.kv_heads * job->group;
    for (int64_t head = first; head < first + job->group; head++) {
        float *to = job->out + (row * heads + head) * width, top = -INFINITY, total = 0.0f;
        for (int64_t split = low; split < high; split++) {
            float largest = part_of(job, row, split).largest[head];
            top = largest > top ? largest : top;
        }
        memset(to, 0, width * sizeof(float));
        for (int64_t split = low; split < high; split++) {
            Part part = part_of(job, row, split);
            float share = softmax_weight(part.largest[head] - top);
            total += share * part.weight[head];
            for (int64_t i = 0; i < width; i++) to[i] += share * part.value[head * width + i];
        }
        if (low < high)
            for (int64_t i = 0; i < width; i++) to[i] /= total;
    }
}

/* q [rows, heads, width] -> out, same shape, contiguous. Positions are cut at multiples of SPLIT, so that one long row feeds
   every thread. partial has room for rows * room * heads * (width + 2) floats, and no row has more than room * SPLIT
   positions. table_rows: each row's line in the block table; null: its own number. */
void KERNEL(decode_attention)(const float *q, const void *k_cache, const void *v_cache, const int32_t *table,
                              const int32_t *table_rows, const int32_t *kv_len, float *out, float *partial, int64_t half,
                              int64_t rows, int64_t kv_heads, int64_t group, int64_t width, int64_t block_size,
                              int64_t table_stride, int64_t q_stride, int64_t room, int64_t window, float scale,
                              float softcap) {
    Decode job = {{k_cache, v_cache, half, kv_heads, width, block_size, scale, softcap}, q, table, table_rows, kv_len, out,
                  partial, rows, group, table_stride, q_stride, room, 0, window};
    int64_t longest = 0, seen = 0;
    for (int64_t row = 0; row < rows; row++) {
        if (kv_len[row] > longest) longest = kv_len[row];
        seen += kv_len[row] - first_seen(&job, row);
    }
    job.splits = (longest + SPLIT - 1) / SPLIT;
    run_tasks(rows * job.splits, seen * kv_heads * group * width > 4 * ENOUGH, attend_task, &job);
    run_tasks(rows * kv_heads, rows * job.splits * kv_heads * group * width > 8 * ENOUGH, merge_task, &job);
}
