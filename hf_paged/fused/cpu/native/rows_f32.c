/* Norms and rotary position embeddings in fp32, on any CPU. Calling torch's operations takes longer than computing
 * them, so each is one call, not several. They sum in torch's order and round where torch rounds, so that the results
 * are bit-identical; the caller compares them once (fused/cpu/norms.py). */
#include "common.h"

/* A product and a sum must not become one operation that rounds once. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#define FORK_ELEMENTS (1 << 15) /* with fewer elements, one thread is faster than starting a second one */

typedef float v8 __attribute__((vector_size(32)));

static inline v8 load_8(const float *p) {
    v8 x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* Adds the squares of 32 elements, lane by lane. */
static inline void add_squares(v8 *sums, const float *x) {
    for (int k = 0; k < 4; k++) {
        const v8 a = load_8(x + 8 * k), product = a * a;
        sums[k] += product;
    }
}

/* The sum of the squares of n elements in the order in which torch sums a row of fp32: four interleaved vectors of 8
 * lanes in four levels of partial sums, then the vectors, then the remaining elements, then the lanes. */
static float sum_of_squares(const float *x, int64_t n) {
    const int64_t vectors = n / 8, size = vectors / 4;
    int64_t power = 0, i = 0;
    while ((int64_t)1 << power < size) power++;
    power = power / 4 > 4 ? power / 4 : 4;
    const int64_t step = (int64_t)1 << power;
    v8 sums[4][4] = {{{0}}};
    float lanes[8], total = 0;
    while (i + step <= size) {
        for (int64_t j = 0; j < step; j++, i++) add_squares(sums[0], x + 32 * i);
        for (int level = 1; level < 4; level++) {
            for (int k = 0; k < 4; k++) {
                sums[level][k] += sums[level - 1][k];
                sums[level - 1][k] = (v8){0};
            }
            if (i & ((step - 1) << (level * power))) break;
        }
    }
    for (; i < size; i++) add_squares(sums[0], x + 32 * i);
    for (int level = 1; level < 4; level++)
        for (int k = 0; k < 4; k++) sums[0][k] += sums[level][k];
    v8 all = sums[0][0];
    for (int64_t k = size * 4; k < vectors; k++) {
        const v8 a = load_8(x + 8 * k), product = a * a;
        all += product;
    }
    for (int k = 1; k < 4; k++) all += sums[0][k];
    for (int64_t k = vectors * 8; k < n; k++) {
        const float product = x[k] * x[k];
        total += product;
    }
    memcpy(lanes, &all, sizeof lanes);
    for (int k = 0; k < 8; k++) total += lanes[k];
    return total;
}

/* out = weight * (x / sqrt(mean(x * x) + eps)), rows of n elements. */
HFP_EXPORT void hfp_rms_norm_f32(const float *x, const float *weight, float *out, int64_t rows, int64_t n, double eps,
                                 int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * n >= FORK_ELEMENTS)
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r * n;
        float *to = out + r * n;
        const float factor = 1.0f / sqrtf(sum_of_squares(from, n) / (float)n + (float)eps);
        for (int64_t i = 0; i < n; i++) to[i] = weight[i] * (from[i] * factor);
    }
}

/* As Rotated and Rotate in layers.h. */
typedef struct {
    const float *x; /* [tokens, heads, dim] */
    int64_t token, head, heads;
    float *out; /* contiguous */
} RotatedF32;

typedef struct {
    RotatedF32 query, key;
    const float *cos, *sin; /* [tokens, dim] */
    int64_t tokens, dim, threads;
} RotateF32;

static void rotate_heads(const RotatedF32 *r, int64_t token, const float *cos, const float *sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t h = 0; h < r->heads; h++) {
        const float *restrict a = r->x + token * r->token + h * r->head, *restrict b = a + half;
        float *restrict out = r->out + (token * r->heads + h) * dim;
        for (int64_t d = 0; d < half; d++) {
            const float p = a[d] * cos[d], q = b[d] * sin[d];
            const float s = b[d] * cos[half + d], t = a[d] * sin[half + d];
            out[d] = p - q;
            out[half + d] = s + t;
        }
    }
}

/* Rotary position embedding of queries and keys: the halves of a head rotate against each other. dim: even. */
HFP_EXPORT void hfp_rotate_f32(const RotateF32 *r) {
#pragma omp parallel for schedule(static) num_threads(r->threads) \
    if (r->threads > 1 && r->tokens * (r->query.heads + r->key.heads) * r->dim >= FORK_ELEMENTS)
    for (int64_t t = 0; t < r->tokens; t++) {
        rotate_heads(&r->query, t, r->cos + t * r->dim, r->sin + t * r->dim, r->dim);
        rotate_heads(&r->key, t, r->cos + t * r->dim, r->sin + t * r->dim, r->dim);
    }
}
