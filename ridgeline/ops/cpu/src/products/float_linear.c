/* Products with float32 weights: one row of activations streams them. */

#include "../lanes.h"

/* out = x w^T + bias for one row of x: w [outputs, inputs], bias may be NULL. Every thread streams one run of rows of w,
   four at a time: that keeps enough reads in flight, and this product is nothing but reading w. */
static inline __attribute__((always_inline)) void few_outputs(const float *x, const float *w, const float *bias, float *out,
                                                              int64_t inputs, int count) {
    Lanes sums[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + LANES <= inputs; i += LANES) {
        Lanes part = *(const Lanes *)(x + i);
        for (int o = 0; o < count; o++) sums[o] += part * *(const Lanes *)(w + o * inputs + i);
    }
    for (int o = 0; o < count; o++) {
        float total = sum_of(sums[o]);
        for (int64_t j = i; j < inputs; j++) total += x[j] * w[o * inputs + j];
        out[o] = bias ? total + bias[o] : total;
    }
}

void KERNEL(linear_row)(const float *x, const float *w, const float *bias, float *out, int64_t inputs, int64_t outputs) {
    int64_t groups = outputs / 4;
    #pragma omp parallel for schedule(static) if (inputs * outputs > 4 * ENOUGH)
    for (int64_t group = 0; group < groups; group++)
        few_outputs(x, w + group * 4 * inputs, bias ? bias + group * 4 : bias, out + group * 4, inputs, 4);
    for (int64_t o = groups * 4; o < outputs; o++)
        few_outputs(x, w + o * inputs, bias ? bias + o : bias, out + o, inputs, 1);
}
