/* Norms and rotary position embeddings in bf16. Calling them takes longer than computing them, so each is one call, not
 * several. They round where transformers' code rounds and sum the squares in torch's order, so that the results are
 * bit-identical; the caller compares them once (fused/cpu/norms.py). */
#include "common.h"
#if HAS_DPBF16
#include "layers.h"

INLINE float square(uint16_t x) {
    const uint32_t word = (uint32_t)x << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value * value;
}

/* Adds the squares of 32 elements, lane by lane. */
INLINE void add_squares(vf *sums, const uint16_t *x) {
    const vf a = load_bf16(x), b = load_bf16(x + 16);
    sums[0] += a * a;
    sums[1] += b * b;
}

/* The sum of the squares of n elements in the order in which torch sums a row of fp32: four interleaved vectors of 8
 * lanes in four levels of partial sums, then the vectors, then the remaining elements, then the lanes. */
static float sum_of_squares(const uint16_t *x, int64_t n) {
    const int64_t vectors = n / 8, size = vectors / 4;
    int64_t power = 0, i = 0;
    while ((int64_t)1 << power < size) power++;
    power = power / 4 > 4 ? power / 4 : 4;
    const int64_t step = (int64_t)1 << power;
    vf sums[4][2] = {{{0}}};
    float lanes[32], total = 0;
    while (i + step <= size) {
        for (int64_t j = 0; j < step; j++, i++) add_squares(sums[0], x + 32 * i);
        for (int level = 1; level < 4; level++) {
            for (int h = 0; h < 2; h++) {
                sums[level][h] += sums[level - 1][h];
                sums[level - 1][h] = (vf){0};
            }
            if (i & ((step - 1) << (level * power))) break;
        }
    }
    for (; i < size; i++) add_squares(sums[0], x + 32 * i);
    for (int h = 0; h < 2; h++) store_f32(lanes + 16 * h, sums[0][h] + sums[1][h] + sums[2][h] + sums[3][h]);
    for (int64_t k = size * 32; k < vectors * 8; k++) lanes[k % 8] += square(x[k]);
    for (int k = 8; k < 32; k++) lanes[k % 8] += lanes[k];
    for (int64_t k = vectors * 8; k < n; k++) total += square(x[k]);
    for (int k = 0; k < 8; k++) total += lanes[k];
    return total;
}

INLINE void norm_row(const uint16_t *from, const uint16_t *weight, uint16_t *to, int64_t n, double eps) {
    const vf factor = splat(1.0f / sqrtf(sum_of_squares(from, n) / (float)n + (float)eps));
    for (int64_t i = 0; i < n; i += 16)
        store_bf16(to + i, load_bf16(weight + i) * round_bf16(load_bf16(from + i) * factor));
}

INLINE void rotate_heads(const Rotated *r, int64_t token, const uint16_t *cos, const uint16_t *sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t h = 0; h < r->heads; h++) {
        const uint16_t *x = r->x + token * r->token + h * r->head;
        uint16_t *out = r->out + (token * r->heads + h) * dim;
        for (int64_t d = 0; d < half; d += 16) {
            const vf a = load_bf16(x + d), b = load_bf16(x + half + d);
            store_bf16(out + d, round_bf16(a * load_bf16(cos + d)) - round_bf16(b * load_bf16(sin + d)));
            store_bf16(out + half + d,
                       round_bf16(b * load_bf16(cos + half + d)) + round_bf16(a * load_bf16(sin + half + d)));
        }
    }
}

#include "row_loops.inc.c"
#endif
