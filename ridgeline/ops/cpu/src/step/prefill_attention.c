/* Attention of many queries per row over the paged KV cache. */

#include "kv.h"
#include "../pool.h"

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
static void transpose_keys(const Cache *cache, int64_t kv_head, const int64_t *slots, int64_t low, int64_t high, float *to) {
    const int64_t first = kv_head * cache->width;
    for (int64_t j = 0; j < KEYS; j += LANES) {
        if (j + LANES <= low || j >= high) continue;
        float *column = to + j / PANEL * PANEL * cache->width + j % PANEL;
        for (int64_t i = 0; i < cache->width; i += LANES) {
            Lanes square[LANES];
            for (int64_t lane = 0; lane < LANES; lane++) {
                int64_t key = j + lane;                  /* hidden slots may hold anything: not read */
                if (key < low || key >= high) square[lane] = (Lanes){0};
                else if (cache->half) square[lane] = widened((const uint16_t *)cache->k + slots[key] + first + i);
                else square[lane] = *(const Lanes *)((const float *)cache->k + slots[key] + first + i);
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
        int32_t last = (int32_t)(block->position[r] - tile), first = (int32_t)(oldest_seen(block->position[r], window) - tile);
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
        shrink[r] = softmax_weight(softmax->largest[r] - reference);
        softmax->largest[r] = highest;
        Lanes total = softmax->weight[r] * shrink[r];
        for (int c = 0; c < KEYS / LANES; c++) {
            Lanes weights = softmax_weights(row[c] - reference);         /* what is hidden is -inf, and weighs nothing */
            row[c] = weights;
            total += weights;
        }
        softmax->weight[r] = total;
    }
}

/* out = out * shrink + weights x values for `columns` registers of a head from `values` on; keys low..high of the tile. */
static inline __attribute__((always_inline)) void add_values(
    const QueryBlock *block, const float *weights, const float *shrink, const void **values,
    int64_t low, int64_t high, int64_t at, int columns) {
    Lanes sums[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < columns; c++) sums[r][c] = ((const Lanes *)(block->out[r] + at))[c] * shrink[r];
    for (int64_t j = low; j < high; j++) {
        const Lanes *value = (const Lanes *)((const float *)values[j] + at);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < columns; c++) sums[r][c] += weights[r * KEYS + j] * value[c];
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < columns; c++) ((Lanes *)(block->out[r] + at))[c] = sums[r][c];
}

/* One block's share of one tile. keys are the tile's panels. */
static void attend_tile(const Cache *cache, const QueryBlock *block, Softmax *softmax, const float *keys,
                        const void **values, int64_t tile, int64_t window) {
    int64_t oldest = block->position[0], newest = block->position[ROWS - 1];
    int64_t seen = oldest_seen(oldest, window), low = seen > tile ? seen - tile : 0;
    int64_t high = newest + 1 - tile < KEYS ? newest + 1 - tile : KEYS;
    if (low >= high) return;
    float scores[ROWS * KEYS] __attribute__((aligned(64))), shrink[ROWS];
    for (int64_t j = low / PANEL * PANEL; j < high; j += PANEL)
        panel_scores(block, keys + j * cache->width, cache->width, scores + j);
    if (oldest + 1 - tile >= KEYS && oldest_seen(newest, window) <= tile)
        tile_weights(cache, block, softmax, tile, window, 0, scores, shrink);
    else
        tile_weights(cache, block, softmax, tile, window, 1, scores, shrink);
    int64_t at = 0;
    for (; at + PANEL <= cache->width; at += PANEL)
        add_values(block, scores, shrink, values, low, high, at, COLUMNS);
    for (; at < cache->width; at += LANES) add_values(block, scores, shrink, values, low, high, at, 1);
}

typedef struct {
    Cache cache;
    const float *q;
    const int32_t *table, *table_rows, *query_start, *kv_len;
    float *out;
    int64_t rows, group, table_stride, q_stride, most, pieces, window;
} Prefill;

static void prefill_task(void *with, int64_t task) {
    const Prefill *job = with;
    const Cache *cache = &job->cache;
    const int64_t group = job->group, width = cache->width, heads = cache->kv_heads * group, window = job->window;
    int64_t row = task / cache->kv_heads % job->rows, kv_head = task % cache->kv_heads, query = job->query_start[row];
    /* The last piece of a row sees most: it begins first. */
    int64_t queries = job->query_start[row + 1] - query;
    int64_t begin = (job->pieces - 1 - task / cache->kv_heads / job->rows) * job->most;
    if (begin >= queries) return;
    if (!job->kv_len[row]) {                             /* padding */
        if (!begin && !kv_head) memset(job->out + query * heads * width, 0, queries * heads * width * sizeof(float));
        return;
    }
    int64_t count = (queries - begin < job->most ? queries - begin : job->most) * group;
    int64_t blocks = (count + ROWS - 1) / ROWS, start = job->kv_len[row] - queries + begin;
    int64_t end = start + (count - 1) / group + 1, first = oldest_seen(start, window);
    const int32_t *table = job->table + (job->table_rows ? job->table_rows[row] : row) * job->table_stride;
    float spare[MAX_HEAD] __attribute__((aligned(64))), keys[KEYS * MAX_HEAD] __attribute__((aligned(64)));
    float wide_values[KEYS * MAX_HEAD] __attribute__((aligned(64)));
    const void *values[KEYS];
    QueryBlock block[blocks];
    Softmax softmax[blocks];
    memset(spare, 0, sizeof spare);
    for (int64_t pair = 0; pair < blocks * ROWS; pair++) {
        QueryBlock *to = &block[pair / ROWS];
        int64_t real = pair < count ? pair : count - 1;          /* the last one again, to fill the block */
        int64_t token = query + begin + real / group, head = kv_head * group + real % group;
        to->query[pair % ROWS] = job->q + token * job->q_stride + head * width;
        to->position[pair % ROWS] = start + real / group;
        to->out[pair % ROWS] = pair < count ? job->out + (token * heads + head) * width : spare;
        memset(to->out[pair % ROWS], 0, width * sizeof(float));
        softmax[pair / ROWS].largest[pair % ROWS] = -INFINITY;
        softmax[pair / ROWS].weight[pair % ROWS] = (Lanes){0};
    }
    for (int64_t tile = first / KEYS * KEYS; tile < end; tile += KEYS) {
        int64_t low = first > tile ? first - tile : 0, high = end - tile < KEYS ? end - tile : KEYS, slots[KEYS];
        find_slots(cache, table, tile + low, high - low, slots + low);
        transpose_keys(cache, kv_head, slots, low, high, keys);
        find_heads(cache->v, cache->half, kv_head, width, slots + low, high - low, wide_values, values + low);
        for (int64_t b = 0; b < blocks; b++)
            attend_tile(cache, &block[b], &softmax[b], keys, values, tile, window);
    }
    for (int64_t pair = 0; pair < count; pair++) {
        float *to = block[pair / ROWS].out[pair % ROWS];
        float share = 1.0f / sum_of(softmax[pair / ROWS].weight[pair % ROWS]);
        for (int64_t i = 0; i < width; i++) to[i] *= share;
    }
}

/* q [queries, heads, width] of rows with any number of queries each -> out, same shape, contiguous. Row r has the queries
   query_start[r]..query_start[r + 1], the last of them at position kv_len[r] - 1. table_rows: each row's line in the block
   table; null: its own number. */
void KERNEL(prefill_attention)(const float *q, const void *k_cache, const void *v_cache, const int32_t *table,
                               const int32_t *table_rows, const int32_t *query_start, const int32_t *kv_len, float *out,
                               int64_t half, int64_t rows, int64_t kv_heads, int64_t group, int64_t width, int64_t block_size,
                               int64_t table_stride, int64_t q_stride, int64_t window, float scale, float softcap) {
    int64_t longest = 0, most = group < QUERY_ROWS ? QUERY_ROWS / group : 1;
    for (int64_t row = 0; row < rows; row++)
        if (query_start[row + 1] - query_start[row] > longest) longest = query_start[row + 1] - query_start[row];
    Prefill job = {{k_cache, v_cache, half, kv_heads, width, block_size, scale, softcap}, q, table, table_rows, query_start,
                   kv_len, out, rows, group, table_stride, q_stride, most, (longest + most - 1) / most, window};
    run_tasks(job.pieces * rows * kv_heads, longest * kv_heads * group * width > ENOUGH, prefill_task, &job);
}
