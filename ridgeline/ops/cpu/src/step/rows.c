/* The float32 kernels that work row by row: RMS norm, gated activation, soft cap, rows of an embedding, the best token. */

#include "norm.h"
#include "../pool.h"

typedef struct {
    const float *x, *residual, *weight;
    float *out, *sum;
    int64_t heads, width, token_stride, head_stride;
    float eps, offset;
} Norm;

static void norm_task(void *with, int64_t token) {
    const Norm *job = with;
    const int64_t width = job->width;
    for (int64_t head = 0; head < job->heads; head++) {
        const float *in = job->x + token * job->token_stride + head * job->head_stride;
        int64_t row = token * job->heads + head;
        float *to = job->out + row * width;
        if (job->residual) {
            const float *add = job->residual + row * width;
            float *keep = job->sum + row * width;
            for (int64_t i = 0; i < width; i++) keep[i] = in[i] + add[i];
            in = keep;
        }
        float scale = inverse_rms(in, width, job->eps);
        for (int64_t i = 0; i < width; i++) to[i] = in[i] * scale * (job->weight[i] + job->offset);
    }
}

/* out = x / rms(x) * (weight + offset), of x + residual where there is one (kept in `sum`).
   x is [tokens, heads, width] with any token and head stride; the others are contiguous. */
void KERNEL(rms_norm)(const float *x, const float *residual, const float *weight, float *out, float *sum, int64_t tokens,
                      int64_t heads, int64_t width, int64_t token_stride, int64_t head_stride, float eps, float offset) {
    Norm job = {x, residual, weight, out, sum, heads, width, token_stride, head_stride, eps, offset};
    run_tasks(tokens, tokens * heads * width > ENOUGH, norm_task, &job);
}

/* (1 + tanh(y)) / 2 = 1 / (1 + e^-2y): both activations are g / (1 + e^-z). */
#define GELU(g) (1.5957691216057308f * ((g) + 0.044715f * (g) * (g) * (g)))

typedef struct {
    const float *x;
    float *out;
    int64_t width, stride, kind;
} Gate;

static void gate_task(void *with, int64_t token) {
    const Gate *job = with;
    const float *gate = job->x + token * job->stride, *up = gate + job->width;
    float *to = job->out + token * job->width;
    int64_t i = 0;
    for (; job->kind < 2 && i + LANES <= job->width; i += LANES) {
        Lanes g = *(const Lanes *)(gate + i), z = g;
        if (job->kind == 1) z = GELU(g);
        Lanes e = exponentials(CHOOSE(z < 0.0f, z, -z));                 /* e^-|z|: never overflows */
        *(Lanes *)(to + i) = CHOOSE(z < 0.0f, g * e, g) / (1.0f + e) * *(const Lanes *)(up + i);
    }
    for (; i < job->width; i++) {
        float g = gate[i];
        if (job->kind == 2) {
            to[i] = 0.5f * g * (1.0f + erff(g * 0.70710678118654752f)) * up[i];
            continue;
        }
        float z = job->kind == 0 ? g : GELU(g), e = exponential(z < 0.0f ? z : -z);
        to[i] = (z < 0.0f ? g * e : g) / (1.0f + e) * up[i];
    }
}

/* out = act(gate) * up, x = [gate, up] in each row. kind: 0 silu, 1 gelu by tanh, 2 gelu. */
void KERNEL(gated_activation)(const float *x, float *out, int64_t tokens, int64_t width, int64_t stride, int64_t kind) {
    Gate job = {x, out, width, stride, kind};
    run_tasks(tokens, tokens * width > ENOUGH, gate_task, &job);
}

typedef struct {
    float *x;
    int64_t width;
    float cap;
} Cap;

static void cap_task(void *with, int64_t row) {
    const Cap *job = with;
    float *x = job->x + row * job->width, rest[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= job->width; i += LANES) *(Lanes *)(x + i) = capped(*(const Lanes *)(x + i), job->cap);
    memcpy(rest, x + i, (job->width - i) * sizeof(float));
    *(Lanes *)rest = capped(*(const Lanes *)rest, job->cap);
    memcpy(x + i, rest, (job->width - i) * sizeof(float));
}

/* x = cap * tanh(x / cap), in place on [rows, width]. */
void KERNEL(soft_cap)(float *x, int64_t rows, int64_t width, float cap) {
    Cap job = {x, width, cap};
    run_tasks(rows, rows * width > ENOUGH, cap_task, &job);
}

/* out [tokens, width] = scale * the rows of `weight` that `ids` name. */
void KERNEL(embedding)(const int64_t *ids, const float *weight, float *out, int64_t tokens, int64_t width, float scale) {
    for (int64_t token = 0; token < tokens; token++) {
        const float *from = weight + ids[token] * width;
        for (int64_t i = 0; i < width; i++) out[token * width + i] = from[i] * scale;
    }
}

typedef struct {
    const float *logits;
    int64_t *tokens, *last_token;
    uint8_t *failed;
    const int64_t *rows;
    int64_t width, stride;
} Best;

static void best_task(void *with, int64_t row) {
    const Best *job = with;
    const float *x = job->logits + row * job->stride;
    Lanes top[4] = {(Lanes){0} - INFINITY, (Lanes){0} - INFINITY, (Lanes){0} - INFINITY, (Lanes){0} - INFINITY};
    Places broken = {0};
    int64_t i = 0, token = 0;
    for (; i + 4 * LANES <= job->width; i += 4 * LANES)
        for (int part = 0; part < 4; part++) {
            Lanes each = *(const Lanes *)(x + i + part * LANES);
            broken |= each != each;
            top[part] = larger(each, top[part]);
        }
    float best = largest_of(larger(larger(top[0], top[1]), larger(top[2], top[3])));
    int32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= broken[lane];
    for (; i < job->width; i++) {
        any |= x[i] != x[i];
        if (x[i] > best) best = x[i];
    }
    int failed = any || !(best > -INFINITY && best < INFINITY);
    if (!failed) while (x[token] != best) token++;
    job->tokens[row] = token;
    job->failed[row] = (uint8_t)failed;
    if (job->rows) job->last_token[job->rows[row]] = token;
}

/* The first of the largest of each row of logits, and whether the row has a NaN or an infinity there: then the token is 0.
   With `rows`, tokens also go to last_token[rows]. */
void KERNEL(greedy)(const float *logits, int64_t *tokens, uint8_t *failed, const int64_t *rows, int64_t *last_token,
                    int64_t count, int64_t width, int64_t stride) {
    Best job = {logits, tokens, last_token, failed, rows, width, stride};
    run_tasks(count, count * width > 4 * ENOUGH, best_task, &job);
}
