/* Runs a recorded list of kernel calls: a step of the model without Python between its kernels (ops/cpu/recording.py). */

#include <stdint.h>

#define WORDS 24
#define FLOATS 4

typedef struct {
    void *function;
    int64_t words[WORDS];            /* pointers and integers, in the order of the parameters */
    float floats[FLOATS];
} Call;

/* Every kernel takes pointers and 64-bit integers, and after them floats. On x86_64 and aarch64 Linux the two kinds are passed
   apart from each other, in registers and then in order on the stack, which the caller clears: a function may be given more
   of each than it takes. */
typedef void (*Any)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    float, float, float, float);

void ridgeline_run_program(const Call *calls, int64_t count) {
    for (const Call *call = calls; call < calls + count; call++) {
        const int64_t *w = call->words;
        const float *f = call->floats;
        ((Any)call->function)(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14],
                              w[15], w[16], w[17], w[18], w[19], w[20], w[21], w[22], w[23], f[0], f[1], f[2], f[3]);
    }
}
