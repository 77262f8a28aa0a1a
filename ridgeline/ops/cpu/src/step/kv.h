/* The paged KV cache as attention reads it: pages of float32 or of float16. */

#ifndef RIDGELINE_KV_H
#define RIDGELINE_KV_H

#include "kv_halves.h"

#define MAX_HEAD 256                 /* floats of a head; always a multiple of 16 */

typedef struct {
    const void *k, *v;               /* [blocks, block_size, kv_heads, width] */
    int64_t half;                    /* 1: the elements are float16 */
    int64_t kv_heads, width, block_size;
    float scale, softcap;
} Cache;

/* The oldest position that a query sees: all with window 0, the last ones with a window, those of its chunk with a negative one. */
static inline int64_t oldest_seen(int64_t position, int64_t window) {
    if (window < 0) return position - position % -window;
    return window > 0 && position >= window ? position - window + 1 : 0;
}

/* e^x of a score less the largest one. Below e^-60 it is nothing beside the 1 that is always in the sum, and is left out: products
   of such weights would be subnormal numbers, which take a processor a hundred cycles each. NaN stays NaN. */
#define LEAST -60.0f

static inline float softmax_weight(float x) { return x < LEAST ? 0.0f : exponential(x); }

static inline __attribute__((always_inline)) Lanes softmax_weights(Lanes x) {
    return CHOOSE(x < LEAST, (Lanes){0}, exponentials(x));
}

/* Where each of a row's positions first..first + count lies in a cache: the start of its slot, all heads. */
static inline void find_slots(const Cache *cache, const int32_t *table, int64_t first, int64_t count, int64_t *slots) {
    int64_t block = first / cache->block_size, offset = first % cache->block_size;
    for (int64_t j = 0; j < count; j++) {
        slots[j] = ((int64_t)table[block] * cache->block_size + offset) * cache->kv_heads * cache->width;
        if (++offset == cache->block_size) offset = 0, block++;
    }
}

/* Where the heads of one KV head at `count` slots lie. */
static inline __attribute__((always_inline)) void place_heads(const void *pages, int64_t half, int64_t kv_head, int64_t width,
                                                              const int64_t *slots, int64_t count, const void **heads) {
    for (int64_t j = 0; j < count; j++)
        heads[j] = (const char *)pages + (slots[j] + kv_head * width) * (half ? sizeof(uint16_t) : sizeof(float));
}

/* The same as floats: where they lie, or widened into `room` [count, width]. */
static inline __attribute__((always_inline)) void find_heads(
    const void *pages, int64_t half, int64_t kv_head, int64_t width, const int64_t *slots, int64_t count, float *room,
    const void **heads) {
    place_heads(pages, half, kv_head, width, slots, count, heads);
    for (int64_t j = 0; half && j < count; j++) {
        float *to = room + j * width;
        for (int64_t i = 0; i < width; i += LANES) *(Lanes *)(to + i) = widened((const uint16_t *)heads[j] + i);
        heads[j] = to;
    }
}

/* Numbers i, i + 1, … of a head. */
static inline __attribute__((always_inline)) Lanes numbers_at(const void *head, int64_t i, int half) {
    return half ? widened((const uint16_t *)head + i) : *(const Lanes *)((const float *)head + i);
}

#endif
