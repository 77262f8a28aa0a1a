/* Between the QKV projection and attention: norm of q and k, rotation, and the write into the KV cache, in one pass. */

#include "kv_halves.h"
#include "norm.h"
#include "../pool.h"

typedef struct {
    const float *qkv;
    const int64_t *positions, *slots;
    const float *table;              /* [positions, 2, turned / 2]: cosines and sines */
    void *k_cache, *v_cache;         /* [slots, kv_heads, width] */
    float *q;
    const float *q_norm, *k_norm;
    int64_t half, heads, kv_heads, width, pairs, stride;
    float eps, offset;
} Write;

/* One head, normalised where there is a norm and rotated; beyond the pairs it stays as it is. */
static void turn(const Write *job, const float *in, const float *norm, const float *cosine, const float *sine,
                 float *restrict to) {
    const int64_t pairs = job->pairs, width = job->width;
    if (norm) {
        float scale = inverse_rms(in, width, job->eps);
        for (int64_t i = 0; i < width; i++) to[i] = in[i] * scale * (norm[i] + job->offset);
    } else
        memcpy(to, in, width * sizeof(float));
    for (int64_t i = 0; i < pairs; i++) {
        float first = to[i], second = to[i + pairs];
        to[i] = first * cosine[i] - second * sine[i];
        to[i + pairs] = second * cosine[i] + first * sine[i];
    }
}

static void write_task(void *with, int64_t token) {
    const Write *job = with;
    const int64_t width = job->width, all = job->kv_heads * width, slot = job->slots[token] * all;
    const float *from = job->qkv + token * job->stride;
    const float *cosine = job->table + job->positions[token] * 2 * job->pairs, *sine = cosine + job->pairs;
    for (int64_t head = 0; head < job->heads; head++)
        turn(job, from + head * width, job->q_norm, cosine, sine, job->q + (token * job->heads + head) * width);
    const float *k = from + job->heads * width, *v = k + all;
    float turned[width];
    for (int64_t head = 0; head < job->kv_heads; head++) {
        turn(job, k + head * width, job->k_norm, cosine, sine, turned);
        if (job->half) narrow_all((uint16_t *)job->k_cache + slot + head * width, turned, width);
        else memcpy((float *)job->k_cache + slot + head * width, turned, width * sizeof(float));
    }
    if (job->half) narrow_all((uint16_t *)job->v_cache + slot, v, all);
    else memcpy((float *)job->v_cache + slot, v, all * sizeof(float));
}

/* qkv [tokens, (heads + 2 kv_heads) width] -> q [tokens, heads, width]; K and V go to their slots. half: the cache is float16. */
void KERNEL(rotary_write)(const float *qkv, const int64_t *positions, const int64_t *slots, const float *table, void *k_cache,
                          void *v_cache, float *q, const float *q_norm, const float *k_norm, int64_t half, int64_t tokens,
                          int64_t heads, int64_t kv_heads, int64_t width, int64_t pairs, int64_t stride, float eps,
                          float offset) {
    Write job = {qkv, positions, slots, table, k_cache, v_cache, q, q_norm, k_norm, half, heads, kv_heads, width, pairs, stride,
                 eps, offset};
    run_tasks(tokens, tokens * (heads + 2 * kv_heads) * width > ENOUGH, write_task, &job);
}
