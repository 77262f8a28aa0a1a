/* What the programs that check the native kernels share: noise, and how a wrong number is told. */

static int failures;
static uint64_t state = 1;

static float noise(void) {                               /* about normal: four uniform numbers */
    float sum = 0.0f;
    for (int i = 0; i < 4; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(state >> 40) / (float)(1 << 24) - 0.5f;
    }
    return sum * 1.7f;
}

static float *noises(int64_t count) {
    float *made = malloc(count * sizeof(float));
    for (int64_t i = 0; i < count; i++) made[i] = noise();
    return made;
}

static void near(const char *what, int64_t place, float got, double expected, double tolerance) {
    if (fabs(got - expected) <= tolerance * (1.0 + fabs(expected))) return;
    if (failures++ < 8) printf("%s, element %ld: %.9g, expected %.9g\n", what, (long)place, got, expected);
}
