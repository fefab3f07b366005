/* The most that a core can do in fp32: multiply and add, in registers only. `layers.py` compiles it for the instruction set of
 * the kernels that it measures. */
#include <stdint.h>

#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX2__)
#define W 8
#else
#define W 4
#endif
#define SUMS 12 /* more than a core computes at once, and all in registers */

typedef float vf __attribute__((vector_size(4 * W)));

/* Returns the number of operations. */
__attribute__((visibility("default"))) int64_t fma_limit(int64_t count) {
    vf sums[SUMS], factor = (vf){0} + 0.5f, term = (vf){0} + 1e-3f;
#pragma GCC unroll 12
    for (int i = 0; i < SUMS; i++) sums[i] = term * (float)i;
    for (int64_t k = 0; k < count; k++) {
#pragma GCC unroll 12
        for (int i = 0; i < SUMS; i++) {
            sums[i] = sums[i] * factor + term;
#if defined(__x86_64__)
            __asm__ volatile("" : "+v"(sums[i])); /* else the compiler would add up several rounds in advance */
#elif defined(__aarch64__)
            __asm__ volatile("" : "+w"(sums[i]));
#endif
        }
    }
    return 2 * W * SUMS * count;
}
