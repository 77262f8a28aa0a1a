/* The paged KV cache as the attention kernels see it. */

#ifndef RIDGELINE_KV_H
#define RIDGELINE_KV_H

#include "../lanes.h"

#define MAX_HEAD 256                 /* floats of a head; always a multiple of 16 */

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

#endif
