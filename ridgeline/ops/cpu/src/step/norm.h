/* The factor of an RMS norm. One order of additions for whole rows and for heads. */

#ifndef RIDGELINE_NORM_H
#define RIDGELINE_NORM_H

#include "../lanes.h"

static inline float inverse_rms(const float *in, int64_t width, float eps) {
    Lanes parts = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) parts += *(const Lanes *)(in + i) * *(const Lanes *)(in + i);
    float squares = sum_of(parts);
    for (; i < width; i++) squares += in[i] * in[i];
    return 1.0f / sqrtf(squares / (float)width + eps);
}

#endif
