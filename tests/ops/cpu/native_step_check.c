/* The native kernels of a step beside its products, of one level, against plain loops in double, as a program of its own: it runs
   where there is no Python, that is for every vector width and under an emulator. Says nothing and returns 0, or names what is
   wrong. */

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#include "pool.c"
#ifdef LIBRARY                                           /* has what takes long to compile: here are its declarations */
#include LIBRARY
#else
#include "step/decode_attention.c"
#include "step/prefill_attention.c"
#endif
#include "step/rows.c"
#include "step/rotary_write.c"
#include "step/draw.c"

#include "native_check.h"

static void check_rows(void) {
    enum { TOKENS = 3, WIDTH = 83 };
    float *x = noises(TOKENS * 2 * WIDTH), *residual = noises(TOKENS * WIDTH), *weight = noises(WIDTH);
    float out[TOKENS * WIDTH], sum[TOKENS * WIDTH];
    KERNEL(rms_norm)(x, residual, weight, out, sum, TOKENS, 1, WIDTH, WIDTH, 0, 1e-5f, 1.0f);
    for (int t = 0; t < TOKENS; t++) {
        double squares = 0.0;
        for (int i = 0; i < WIDTH; i++) squares += pow(x[t * WIDTH + i] + residual[t * WIDTH + i], 2);
        for (int i = 0; i < WIDTH; i++) {
            double value = (double)x[t * WIDTH + i] + residual[t * WIDTH + i];
            near("rms_norm", t * WIDTH + i, out[t * WIDTH + i], value / sqrt(squares / WIDTH + 1e-5) * (weight[i] + 1.0), 1e-6);
            near("rms_norm's sum", t * WIDTH + i, sum[t * WIDTH + i], value, 1e-6);
        }
    }
    for (int kind = 0; kind < 3; kind++) {
        KERNEL(gated_activation)(x, out, TOKENS, WIDTH, 2 * WIDTH, kind);
        for (int i = 0; i < TOKENS * WIDTH; i++) {
            double g = x[i / WIDTH * 2 * WIDTH + i % WIDTH], up = x[i / WIDTH * 2 * WIDTH + WIDTH + i % WIDTH];
            double act = kind == 2 ? g / 2 * (1 + erf(g / sqrt(2.0))) : kind ? g / 2 * (1 + tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))) : g / (1 + exp(-g));
            near("gated_activation", i, out[i], act * up, 1e-6);
        }
    }
    for (int i = 0; i < WIDTH; i++) {                    /* from tiny scores to far beyond the cap */
        float score = x[i] * powf(10.0f, (float)(i % 7) - 4.0f);
        near("capped", i, capped((Lanes){0} + score, 30.0f)[0], 30.0 * tanh(score / 30.0), 1e-6);
        near("small capped", i, capped((Lanes){0} + score * 1e-4f, 30.0f)[0] * 1e4f, 30e4 * tanh(score * 1e-4f / 30.0), 1e-6);
    }
    free(x), free(residual), free(weight);
}

/* Every float16 there is becomes the float that it is, and comes back; floats are rounded to the nearest, ties to even. */
static void check_halves(void) {
    for (int bits = 0; bits < 0x10000; bits += LANES) {
        uint16_t in[LANES], out[LANES];
        for (int i = 0; i < LANES; i++) in[i] = (uint16_t)(bits + i);
        Lanes x = widened(in);
        narrow(out, x);
        for (int i = 0; i < LANES; i++) {
            int exponent = in[i] >> 10 & 31, fraction = in[i] & 1023;
            double size = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
            if (exponent == 31) {
                if (fraction ? x[i] == x[i] || wide(in[i]) == wide(in[i]) : !isinf(x[i]) || !isinf(wide(in[i])))
                    failures++, printf("half %x is %g\n", in[i], x[i]);
                continue;
            }
            near("widened", bits + i, x[i], in[i] >> 15 ? -size : size, 0.0);
            near("wide", bits + i, wide(in[i]), in[i] >> 15 ? -size : size, 0.0);
            if (out[i] != in[i] || narrowed(x[i]) != in[i]) failures++, printf("half %x came back as %x\n", in[i], out[i]);
        }
    }
    static const float given[8] = {1.00048828125f, 1.00146484375f, 65519.9f, 65520.0f, 1e-8f, 2.98023224e-8f, 2.99e-8f, -1e9f};
    static const uint16_t expected[8] = {0x3c00, 0x3c02, 0x7bff, 0x7c00, 0, 0, 1, 0xfc00};
    uint16_t found[8];
    narrow_all(found, given, 8);
    for (int i = 0; i < 8; i++)
        if (found[i] != expected[i] || narrowed(given[i]) != expected[i])
            failures++, printf("%g narrowed to %x, expected %x\n", given[i], found[i], expected[i]);
}

static void check_vocabulary(void) {
    enum { ROWS_ = 5, WIDTH = 203 };
    float *x = noises(ROWS_ * WIDTH), *capped_x = malloc(ROWS_ * WIDTH * sizeof(float)), out[3 * WIDTH];
    int64_t tokens[ROWS_], rows[ROWS_] = {4, 0, 2, 1, 3}, last[ROWS_], ids[3] = {4, 0, 2};
    uint8_t failed[ROWS_];
    x[1 * WIDTH + 7] = NAN, x[2 * WIDTH + 202] = INFINITY, x[3 * WIDTH + 200] = x[3 * WIDTH + 11] = 50.0f, x[202] = 60.0f;
    KERNEL(greedy)(x, tokens, failed, rows, last, ROWS_, WIDTH, WIDTH);
    for (int r = 0; r < ROWS_; r++) {
        int64_t best = 0, broken = r == 1 || r == 2;
        for (int i = 1; !broken && i < WIDTH; i++) if (x[r * WIDTH + i] > x[r * WIDTH + best]) best = i;
        if (tokens[r] != best || failed[r] != broken || last[rows[r]] != best) failures++, printf("greedy row %d\n", r);
    }
    memcpy(capped_x, x, ROWS_ * WIDTH * sizeof(float));
    KERNEL(soft_cap)(capped_x + 3 * WIDTH, 2, WIDTH, 3.0f);
    for (int i = 3 * WIDTH; i < ROWS_ * WIDTH; i++) near("soft_cap", i, capped_x[i], 3.0 * tanh(x[i] / 3.0), 1e-6);
    KERNEL(embedding)(ids, x, out, 3, WIDTH, 2.0f);
    for (int i = 0; i < WIDTH; i++) near("embedding", i, out[i], 2.0 * x[4 * WIDTH + i], 0.0);
    free(x), free(capped_x);
}

/* Rows without a filter, with top_k, with top_p and with both, against a race among ids that are taken one by one. */
static void check_draw(void) {
    enum { ROWS_ = 8, WIDTH = 203 };
    float *logits = noises(ROWS_ * WIDTH), temperature[ROWS_], floors[ROWS_];
    int64_t place[ROWS_], best[ROWS_], top_k[ROWS_], index[ROWS_], tokens[ROWS_];
    double top_p[ROWS_], typical_p[ROWS_];
    uint64_t seed[ROWS_];
    for (int r = 0; r < ROWS_; r++) {
        place[r] = ROWS_ - 1 - r, best[r] = 0, index[r] = r, seed[r] = 77 + r, temperature[r] = 0.8f, floors[r] = -__FLT_MAX__;
        top_k[r] = r & 1 ? 17 : 0, top_p[r] = r & 2 ? 0.7 : 1.0, typical_p[r] = 1.0;
        const float *x = logits + place[r] * WIDTH;
        for (int i = 1; i < WIDTH; i++) if (x[i] > x[best[r]]) best[r] = i;
    }
    KERNEL(draw)(logits, place, best, temperature, floors, top_k, top_p, typical_p, seed, index, tokens, ROWS_, WIDTH, WIDTH);
    for (int r = 0; r < ROWS_; r++) {
        const float *x = logits + place[r] * WIDTH;
        double total = 0.0, sum = 0.0, winning = 0.0;
        int taken[WIDTH] = {0}, order[WIDTH], count = 0, winner = -1, most = top_k[r] ? (int)top_k[r] : WIDTH;
        for (; count < most; count++) {
            int next = -1;
            for (int i = 0; i < WIDTH; i++) if (!taken[i] && (next < 0 || x[i] > x[next])) next = i;
            taken[next] = 1, order[count] = next;
            total += exp((x[next] - x[best[r]]) / temperature[r]);
        }
        for (int i = 0; i < count && sum < top_p[r] * total; i++) {
            float scaled = (x[order[i]] - x[best[r]]) / temperature[r];
            uint32_t words[BLOCK];
            philox((uint64_t)(order[i] / BLOCK * BLOCK / 4), (uint32_t)index[r], seed[r], words);
            double score = exp(scaled) / -log1p(-((double)words[order[i] % BLOCK] + 0.5) * 0x1p-32);
            sum += exp(scaled);
            if (score > winning) winning = score, winner = order[i];
        }
        if (tokens[r] != winner) failures++, printf("draw row %d: %ld, expected %d\n", r, (long)tokens[r], winner);
    }
    free(logits);
}

/* Norm, rotation and write of one token to slot 5, in a cache of floats and in one of halves. */
static void check_rotary_write(int64_t width, int64_t pairs, int norm) {
    enum { HEADS = 3, KV = 2, SLOTS = 7 };
    float *qkv = noises((HEADS + 2 * KV) * width), *table = noises(4 * 2 * pairs), *weight = noises(width);
    float q[HEADS * width], k[SLOTS * KV * width], v[SLOTS * KV * width];
    uint16_t half_k[SLOTS * KV * width], half_v[SLOTS * KV * width];
    int64_t position = 3, slot = 5;
    for (int half = 0; half < 2; half++)
        KERNEL(rotary_write)(qkv, &position, &slot, table, half ? (void *)half_k : k, half ? (void *)half_v : v, q,
                             norm ? weight : 0, norm ? weight : 0, half, 1, HEADS, KV, width, pairs, 0, 1e-6f, 1.0f);
    for (int64_t head = 0; head < HEADS + KV; head++) {
        const float *in = qkv + head * width, *cosine = table + 3 * 2 * pairs;
        double squares = 0.0, turned[width];
        for (int64_t i = 0; i < width; i++) squares += (double)in[i] * in[i];
        for (int64_t i = 0; i < width; i++) turned[i] = norm ? in[i] / sqrt(squares / width + 1e-6) * (weight[i] + 1.0) : in[i];
        for (int64_t i = 0; i < pairs; i++) {
            double first = turned[i], second = turned[i + pairs];
            turned[i] = first * cosine[i] - second * cosine[pairs + i];
            turned[i + pairs] = second * cosine[i] + first * cosine[pairs + i];
        }
        for (int64_t i = 0; i < width; i++) {
            int64_t place = (slot * KV + head - HEADS) * width + i;
            near("rotary_write", head * width + i, head < HEADS ? q[head * width + i] : k[place], turned[i], 2e-6);
            if (head >= HEADS) near("half rotary_write", head * width + i, wide(half_k[place]), turned[i], 0x1.1p-11);
        }
    }
    for (int64_t i = 0; i < KV * width; i++) {
        near("v", i, v[slot * KV * width + i], qkv[(HEADS + KV) * width + i], 0.0);
        near("half v", i, wide(half_v[slot * KV * width + i]), qkv[(HEADS + KV) * width + i], 0x1p-11);
    }
    free(qkv), free(table), free(weight);
}

/* `queries` queries at the end of `length` positions, through both kernels where there is one query. NaN is in every hidden
   slot, and in block 0. */
static void check_attention(int64_t queries, int64_t length, int64_t kv_heads, int64_t group, int64_t width, int64_t window,
                            float softcap, int half) {
    int64_t block_size = 4, blocks = (length + block_size - 1) / block_size, heads = kv_heads * group;
    int64_t slot = kv_heads * width, slots = (blocks + 1) * block_size, oldest = length - queries - window + 1;
    int32_t table[blocks], query_start[2] = {0, (int32_t)queries}, kv_len = (int32_t)length;
    for (int64_t b = 0; b < blocks; b++) table[b] = (int32_t)(blocks - b);
    float *q = noises(queries * heads * width), *k = noises(slots * slot), *v = noises(slots * slot);
    for (int64_t position = -block_size; position < blocks * block_size; position++) {
        int64_t place = position < 0 ? -position - 1 : table[position / block_size] * block_size + position % block_size;
        if (position < 0 || position >= length || (window > 0 && position < oldest))
            for (int64_t i = 0; i < slot; i++) k[place * slot + i] = v[place * slot + i] = NAN;
    }
    uint16_t *half_k = malloc(slots * slot * 2), *half_v = malloc(slots * slot * 2);
    if (half) {                                          /* what the kernels read is what the loops below read */
        narrow_all(half_k, k, slots * slot), narrow_all(half_v, v, slots * slot);
        for (int64_t i = 0; i < slots * slot; i++) k[i] = wide(half_k[i]), v[i] = wide(half_v[i]);
    }
    const void *keys = half ? (void *)half_k : k, *values = half ? (void *)half_v : v;
    int64_t splits = (length + SPLIT - 1) / SPLIT + 1;
    int32_t line = 1;                                    /* the row's line of the table is the second */
    int32_t lines[2 * blocks];
    for (int64_t b = 0; b < blocks; b++) lines[b] = 0, lines[blocks + b] = table[b];
    float *out = noises(queries * heads * width), *alone = noises(heads * width);
    float *partial = noises(splits * heads * (width + 2)), scale = 1.0f / sqrtf((float)width);
    KERNEL(prefill_attention)(q, keys, values, table, 0, query_start, &kv_len, out, half, 1, kv_heads, group, width, block_size,
                              blocks, heads * width, window, scale, softcap);
    if (queries == 1)
        KERNEL(decode_attention)(q, keys, values, lines, &line, &kv_len, alone, partial, half, 1, kv_heads, group, width,
                                 block_size, blocks, heads * width, splits, window, scale, softcap);
    for (int64_t row = 0; row < queries * heads; row++) {
        int64_t head = row % heads / group, last = length - queries + row / heads;
        int64_t first = window > 0 && last + 1 > window ? last + 1 - window : 0;
        double total = 0.0, sums[width];
        for (int64_t i = 0; i < width; i++) sums[i] = 0.0;
        for (int64_t position = first; position <= last; position++) {
            int64_t place = (table[position / block_size] * block_size + position % block_size) * slot + head * width;
            double score = 0.0;
            for (int64_t i = 0; i < width; i++) score += (double)q[row * width + i] * k[place + i];
            score *= scale;
            double weight = exp(softcap > 0.0f ? softcap * tanh(score / softcap) : score);
            total += weight;
            for (int64_t i = 0; i < width; i++) sums[i] += weight * v[place + i];
        }
        for (int64_t i = 0; i < width; i++) {
            near("prefill_attention", row * width + i, out[row * width + i], sums[i] / total, 2e-6);
            if (queries == 1) near("decode_attention", row * width + i, alone[row * width + i], sums[i] / total, 2e-6);
        }
    }
    free(q), free(k), free(v), free(out), free(alone), free(partial), free(half_k), free(half_v);
}

int main(void) {
    check_rows();
    check_halves();
    check_vocabulary();
    check_draw();
    for (int norm = 0; norm < 2; norm++) {
        check_rotary_write(64, 32, norm);
        check_rotary_write(10, 3, norm);
        check_rotary_write(77, 16, norm);
    }
    for (int64_t window = 0; window <= 70; window += 35)
        for (int kind = 0; kind < 4; kind++) {
            float cap = kind & 1 ? 2.0f : 0.0f;
            check_attention(1, 1, 1, 1, 16, window, cap, kind / 2);
            check_attention(1, 600, 2, 3, 64, window, cap, kind / 2);
            check_attention(37, 37, 1, 3, 64, window, cap, kind / 2);
            check_attention(70, 201, 2, 2, 80, window, cap, kind / 2);
            check_attention(150, 150, 1, 1, 96, window, cap, kind / 2);
            check_attention(3, 130, 1, 8, 256, window, cap, kind / 2);
            check_attention(1, 70, 2, 2, 64, window, cap, kind / 2);     /* heads that share a key: up to four at once */
            check_attention(1, 70, 1, 4, 128, window, cap, kind / 2);
            check_attention(1, 70, 2, 5, 96, window, cap, kind / 2);
            check_attention(1, 70, 1, 8, 80, window, cap, kind / 2);
        }
    return failures > 0;
}
