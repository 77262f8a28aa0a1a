/* The native products of one level against plain loops in double, as a program of its own: it runs where there is no Python, that is
   for every vector width and under an emulator. Says nothing and returns 0, or names what is wrong. */

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#include "pool.c"
#ifdef LIBRARY                                           /* has what takes long to compile: here are its declarations */
#include LIBRARY
#else
#include "products/product.c"
#endif
#include "products/float_linear.c"
#include "products/gather.c"
#include "products/relay.c"

#include "native_check.h"

/* Activations as integer kernels see them. */
static double rounded(const float *x, int64_t inputs, int64_t k) {
    float largest = 0.0f;
    for (int64_t i = k / 16 * 16; i < k / 16 * 16 + 16 && i < inputs; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    union { float number; uint32_t bits; } last = {largest / 127.0f};
    last.bits &= ~3u;                                      /* so that its product with 1.5 * 2^23 is exact */
    float scale = last.number, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    return nearbyint((double)x[k] * inverse) * scale;
}

/* Kinds that are filled from codes and scales. */
static int has_codes(int64_t kind) { return kind >= INT4 && kind < F16; }

/* Two parts of a linear, random bytes as blocks, against the numbers that they stand for. */
static void check_packed(int kind, int64_t inputs, int64_t span) {
    enum { OUTPUTS = 21, MOST_TOKENS = 29 };               /* more rows than are multiplied at a time */
    Segment parts[2] = {{0, kind, OUTPUTS, inputs, span}, {0, Q8_0, 5, inputs, 1}};
    int64_t widths[2], numbers[OUTPUTS + 5];
    for (int part = 0; part < 2; part++) {
        Segment *to = &parts[part];
        to->data = aligned_alloc(64, ridgeline_matrix_bytes(to));
        memset(to->data, 0, ridgeline_matrix_bytes(to));
        int64_t each = FORMATS[to->kind].span == 8 ? 256 : 32, blocks = (inputs + each - 1) / each;
        widths[part] = has_codes(to->kind) ? inputs : blocks * BLOCK_BYTES[to->kind];
        uint8_t *from = malloc(to->rows * widths[part]);
        for (int64_t i = 0; i < to->rows * widths[part]; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            from[i] = (uint8_t)(state >> 33) & (has_codes(to->kind) && FORMATS[to->kind].bits == 4 ? 15 : 255);
        }
        static const uint16_t HALF_NUMBERS[3] = {0x1E66, 0x9C66, 0x0301};     /* small numbers, one negative, one subnormal */
        for (int64_t row = 0; row < to->rows; row++)
            for (int64_t b = 0; b < blocks && to->kind < INT4; b++) {
                uint8_t *block = from + row * widths[part] + b * BLOCK_BYTES[to->kind];
                memcpy(block + (to->kind == Q6_K ? 208 : 0), &HALF_NUMBERS[(row + b) % 3], 2);
                if (to->kind != Q6_K && to->kind != Q8_0) memcpy(block + 2, &HALF_NUMBERS[(row + b + 1) % 3], 2);
            }
        if (to->kind >= F16) {                           /* numbers near 1 */
            for (int64_t i = 0; i < to->rows * widths[part]; i += to->kind == F32 ? 4 : 2) {
                float made = noise();
                if (to->kind == F32) memcpy(from + i, &made, 4);
                else memcpy(from + i, to->kind == F16 ? (uint8_t *)&(uint16_t){(uint16_t)(0x3000 | (from[i] & 255))} : (uint8_t *)&made + 2, 2);
            }
        }
        if (has_codes(to->kind)) {
            int64_t spans = ((inputs + 31) / 32 + span - 1) / span;
            float *scale = noises(to->rows * spans), *offset = noises(to->rows * spans);
            ridgeline_relay_codes(to, from, scale, offset);
            free(scale), free(offset);
        } else ridgeline_relay_blocks(to, from, 0, to->rows, widths[part]);
        free(from);
    }
    int64_t outputs = OUTPUTS + 5;
    float *x = noises(MOST_TOKENS * inputs), *bias = noises(outputs), out[MOST_TOKENS * (OUTPUTS + 5)];
    float *w = malloc(outputs * inputs * sizeof(float));
    for (int64_t o = 0; o < outputs; o++) numbers[o] = o;
    ridgeline_matrix_rows(parts, numbers, w, outputs, 1.0f);
    for (int integers = 0; integers < 2; integers++)
        for (int64_t tokens = 1; tokens <= MOST_TOKENS; tokens += 14) {
            KERNEL(packed_linear)(parts, 2, x, bias, out, tokens, inputs, outputs, inputs, integers);
            for (int64_t i = 0; i < tokens * outputs; i++) {
                const float *row = x + i / outputs * inputs, *weights = w + i % outputs * inputs;
                int exact = !integers || (i % outputs < OUTPUTS && kind >= E4M3);
                double sum = bias[i % outputs], size = 1.0;      /* what cancels has its rounding errors, too */
                for (int64_t k = 0; k < inputs; k++) {
                    double term = (exact ? row[k] : rounded(row, inputs, k)) * weights[k];
                    sum += term, size += fabs(term);
                }
                char name[64];
                snprintf(name, sizeof name, "packed_linear kind %d, integers %d", kind, integers);
                near(name, i, out[i], sum, 1e-6 * size);
            }
        }
    static const float BROKEN[3] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {                        /* one number of the last row: that row shows it, the others do not */
        x[2 * inputs + inputs / 2] = BROKEN[i];
        KERNEL(packed_linear)(parts, 2, x, bias, out, 3, inputs, outputs, inputs, 1);
        for (int64_t o = 0; o < 3 * outputs; o++)
            if (isfinite(out[o]) == (o >= 2 * outputs)) near("a number that is not finite", o, out[o], 0.0, -1.0);
    }
    free(x), free(bias), free(w), free(parts[0].data), free(parts[1].data);
}

static void check_products(void) {
    enum { INPUTS = 157, OUTPUTS = 11 };
    for (int kind = 0; kind < KINDS; kind++)
        if (has_codes(kind)) check_packed(kind, 157, 1), check_packed(kind, 256, 4);
        else check_packed(kind, FORMATS[kind].span == 8 ? 512 : 160, FORMATS[kind].span);
    /* More inputs than one register of outputs is multiplied by at a time: a scale of each K type, of blocks, of 3 tiles. */
    check_packed(Q4_K, 1280, 8), check_packed(Q6_K, 1280, 8), check_packed(Q4_1, 1120, 1), check_packed(INT8, 1100, 3);
    float *x = noises(INPUTS), *bias = noises(OUTPUTS), *w = noises(OUTPUTS * INPUTS), out[OUTPUTS];
    KERNEL(linear_row)(x, w, bias, out, INPUTS, OUTPUTS);
    for (int o = 0; o < OUTPUTS; o++) {
        double sum = bias[o], size = 1.0;
        for (int j = 0; j < INPUTS; j++) {
            double term = (double)x[j] * w[o * INPUTS + j];
            sum += term, size += fabs(term);
        }
        near("linear_row", o, out[o], sum, 2e-7 * size);
    }
    free(x), free(bias), free(w);
}

int main(void) {
    check_products();
    return failures > 0;
}
