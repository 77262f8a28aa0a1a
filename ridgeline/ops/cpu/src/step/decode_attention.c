/* Attention of one query per row over the paged KV cache. */

#include "kv.h"
#include "../pool.h"

#define SPLIT 256                    /* positions of the KV cache that one task attends to */
#define TILE 16                      /* positions whose scores are kept at a time */
#define CHUNK 8                      /* registers of a head's sums that are added up at a time */

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

/* Positions first..end of one row, for the heads of one KV head: `q` [group, width]. A tile of positions is read once for
   all of them. `width` is a constant where this is inlined, so that the inner sums stay in registers. */
static inline __attribute__((always_inline)) void attend(
    const Cache *cache, const float *q, const int32_t *table, int64_t kv_head, int64_t first, int64_t end, int64_t width,
    int64_t group, Part part) {
    float wide_keys[TILE * MAX_HEAD] __attribute__((aligned(64))), wide_values[TILE * MAX_HEAD] __attribute__((aligned(64)));
    const float *keys[TILE], *values[TILE];
    for (int64_t h = 0; h < group; h++) {
        part.weight[h] = 0.0f;
        part.largest[h] = -INFINITY;
    }
    memset(part.value, 0, group * width * sizeof(float));
    for (int64_t start = first; start < end; start += TILE) {
        int64_t count = end - start < TILE ? end - start : TILE, slots[TILE];
        find_slots(cache, table, start, count, slots);
        find_heads(cache->k, cache->half, kv_head, width, slots, count, wide_keys, keys);
        find_heads(cache->v, cache->half, kv_head, width, slots, count, wide_values, values);
        for (int64_t j = count; j < TILE; j++) keys[j] = keys[0];        /* something to read, which is hidden below */
        for (int64_t h = 0; h < group; h++) {
            const float *query = q + h * width;
            Lanes scores[TILE / LANES], top = (Lanes){0} + part.largest[h];
            for (int at = 0; at < TILE / LANES; at++) {
                Lanes dots[LANES];
                for (int j = 0; j < LANES; j++) {
                    const float *key = keys[at * LANES + j];
                    dots[j] = *(const Lanes *)query * *(const Lanes *)key;
                    for (int64_t i = LANES; i < width; i += LANES)
                        dots[j] += *(const Lanes *)(query + i) * *(const Lanes *)(key + i);
                }
                scores[at] = sums_of(dots) * cache->scale;
                if (cache->softcap > 0.0f) scores[at] = capped(scores[at], cache->softcap);
                scores[at] = CHOOSE(NUMBER + at * LANES < (int32_t)count, scores[at], (Lanes){0} - INFINITY);
                top = larger(scores[at], top);
            }
            float highest = largest_of(top);
            float shrink = part.largest[h] == -INFINITY ? 0.0f : exponential(part.largest[h] - highest);
            Lanes total = {0};
            for (int at = 0; at < TILE / LANES; at++) {
                Places seen = NUMBER + at * LANES < (int32_t)count;
                scores[at] = CHOOSE(seen, exponentials(scores[at] - highest), (Lanes){0});
                total += scores[at];
            }
            part.weight[h] = part.weight[h] * shrink + sum_of(total);
            part.largest[h] = highest;
            float weights[TILE] __attribute__((aligned(64)));
            for (int at = 0; at < TILE / LANES; at++) ((Lanes *)weights)[at] = scores[at];
            for (int64_t i = 0; i < width; i += CHUNK * LANES) {
                int64_t chunk = width - i < CHUNK * LANES ? (width - i) / LANES : CHUNK;
                Lanes sums[CHUNK], *kept = (Lanes *)(part.value + h * width + i);
                for (int64_t c = 0; c < chunk; c++) sums[c] = kept[c] * shrink;
                for (int64_t j = 0; j < count; j++)
                    for (int64_t c = 0; c < chunk; c++) sums[c] += weights[j] * ((const Lanes *)(values[j] + i))[c];
                for (int64_t c = 0; c < chunk; c++) kept[c] = sums[c];
            }
        }
    }
}

static void attend_any(const Cache *cache, const float *q, const int32_t *table, int64_t kv_head, int64_t first, int64_t end,
                       int64_t group, Part part) {
    #define ATTEND(W) attend(cache, q, table, kv_head, first, end, W, group, part)
    if (cache->width == 64) ATTEND(64);
    else if (cache->width == 96) ATTEND(96);
    else if (cache->width == 128) ATTEND(128);
    else ATTEND(cache->width);
    #undef ATTEND
}

/* Of one row's positions, those that its query sees. */
static inline int64_t first_seen(const Decode *job, int64_t row) {
    int64_t length = job->kv_len[row];
    return job->window > 0 && length > job->window ? length - job->window : 0;
}

static inline Part part_of(const Decode *job, int64_t row, int64_t split, int64_t kv_head) {
    int64_t size = job->group * (job->cache.width + 2);
    float *at = job->partial + ((row * job->room + split) * job->cache.kv_heads + kv_head) * size;
    return (Part){at, at + job->group * job->cache.width, at + job->group * (job->cache.width + 1)};
}

static void attend_task(void *with, int64_t task) {
    const Decode *job = with;
    int64_t kv_head = task % job->cache.kv_heads, split = task / job->cache.kv_heads % job->splits;
    int64_t row = task / job->cache.kv_heads / job->splits;
    int64_t begin = split * SPLIT, end = begin + SPLIT, first = first_seen(job, row);
    if (begin < first) begin = first;
    if (end > job->kv_len[row]) end = job->kv_len[row];
    if (begin >= end) return;
    int64_t line = job->table_rows ? job->table_rows[row] : row;
    attend_any(&job->cache, job->q + row * job->q_stride + kv_head * job->group * job->cache.width,
               job->table + line * job->table_stride, kv_head, begin, end, job->group, part_of(job, row, split, kv_head));
}

/* The parts of one row, in order. A row without keys gives zeros. */
static void merge_task(void *with, int64_t row) {
    const Decode *job = with;
    int64_t width = job->cache.width, heads = job->cache.kv_heads * job->group;
    int64_t low = first_seen(job, row) / SPLIT, high = (job->kv_len[row] + SPLIT - 1) / SPLIT;
    for (int64_t head = 0; head < heads; head++) {
        float *to = job->out + (row * heads + head) * width, top = -INFINITY, total = 0.0f;
        int64_t kv_head = head / job->group, h = head % job->group;
        for (int64_t split = low; split < high; split++) {
            float largest = part_of(job, row, split, kv_head).largest[h];
            top = largest > top ? largest : top;
        }
        memset(to, 0, width * sizeof(float));
        for (int64_t split = low; split < high; split++) {
            Part part = part_of(job, row, split, kv_head);
            float share = exponential(part.largest[h] - top);
            total += share * part.weight[h];
            for (int64_t i = 0; i < width; i++) to[i] += share * part.value[h * width + i];
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
    run_tasks(rows * job.splits * kv_heads, seen * kv_heads * group * width > 4 * ENOUGH, attend_task, &job);
    run_tasks(rows, rows * job.splits * kv_heads * group * width > 4 * ENOUGH, merge_task, &job);
}
