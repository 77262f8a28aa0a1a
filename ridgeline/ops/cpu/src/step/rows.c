/* The float32 kernels that work row by row: RMS norm, rotary embedding, gated activation, the write into the KV cache. */

#include "../lanes.h"

/* out = x / rms(x) * (weight + offset), of x + residual where there is one (kept in `sum`).
   x is [tokens, heads, width] with any token and head stride; the others are contiguous. */
void KERNEL(rms_norm)(const float *x, const float *residual, const float *weight, float *out, float *sum,
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
void KERNEL(rotary)(float *q, float *k, const int64_t *positions, const float *table, int64_t tokens, int64_t heads,
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
void KERNEL(gated_activation)(const float *x, float *out, int64_t tokens, int64_t width, int64_t stride, int64_t kind) {
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
void KERNEL(kv_write)(const float *k, const float *v, float *k_cache, float *v_cache, const int64_t *slots,
                        int64_t tokens, int64_t width, int64_t k_stride, int64_t v_stride) {
    #pragma omp parallel for schedule(static) if (tokens * width > 2 * ENOUGH)
    for (int64_t token = 0; token < tokens; token++) {
        memcpy(k_cache + slots[token] * width, k + token * k_stride, width * sizeof(float));
        memcpy(v_cache + slots[token] * width, v + token * v_stride, width * sizeof(float));
    }
}
