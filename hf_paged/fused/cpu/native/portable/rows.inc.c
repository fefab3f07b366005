/* Norms, rotary position embeddings and gates of one dtype, on any CPU. Calling torch's operations takes longer than
 * computing them, so each is one call, not several. They sum in torch's order and round where torch rounds, so that the
 * results are bit-identical; the caller compares them once (fused/cpu/norms.py, fused/cpu/decoder.py). */

/* Adds the squares of 32 elements, lane by lane. */
static inline void add_squares(v8 *sums, const ELEMENT *x) {
    for (int k = 0; k < 4; k++) {
        const v8 a = LOAD_8(x + 8 * k);
        sums[k] += a * a;
    }
}

/* The sum of the squares of n elements, a multiple of 16, in the order in which torch sums a row of fp32: four
 * interleaved vectors of 8 lanes in four levels of partial sums, then the vectors, then the lanes. */
static float sum_of_squares(const ELEMENT *x, int64_t n) {
    const int64_t vectors = n / 8, size = vectors / 4;
    int64_t power = 0, i = 0;
    while ((int64_t)1 << power < size) power++;
    power = power / 4 > 4 ? power / 4 : 4;
    const int64_t step = (int64_t)1 << power;
    v8 sums[4][4] = {{{0}}};
    float total = 0;
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
        const v8 a = LOAD_8(x + 8 * k);
        all += a * a;
    }
    for (int k = 1; k < 4; k++) all += sums[0][k];
    for (int k = 0; k < 8; k++) total += all[k];
    return total;
}

static void norm_row(const ELEMENT *from, const ELEMENT *weight, ELEMENT *to, int64_t n, double eps) {
    const float factor = 1.0f / sqrtf(sum_of_squares(from, n) / (float)n + (float)eps);
    for (int64_t i = 0; i < n; i += 8) STORE_8(to + i, LOAD_8(weight + i) * ROUND_8(LOAD_8(from + i) * factor));
}

static void rotate_heads(const Rotated *r, int64_t token, const ELEMENT *cos, const ELEMENT *sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t h = 0; h < r->heads; h++) {
        const ELEMENT *x = r->x + token * r->token + h * r->head;
        ELEMENT *out = r->out + (token * r->heads + h) * dim;
        for (int64_t d = 0; d < half; d += 8) {
            const v8 a = LOAD_8(x + d), b = LOAD_8(x + half + d);
            STORE_8(out + d, ROUND_8(a * LOAD_8(cos + d)) - ROUND_8(b * LOAD_8(sin + d)));
            STORE_8(out + half + d, ROUND_8(b * LOAD_8(cos + half + d)) + ROUND_8(a * LOAD_8(sin + half + d)));
        }
    }
}

#include "row_loops.inc.c"

/* to[i] += x[i], for 16 elements */
INLINE void add_vector(ELEMENT *to, const ELEMENT *x) {
    for (int i = 0; i < 16; i += 8) STORE_8(to + i, LOAD_8(to + i) + LOAD_8(x + i));
}

/* to[i] = gate[i] / (1 + exp(-gate[i])) * up[i], for 16 elements */
INLINE void gate_vector(ELEMENT *to, const ELEMENT *gate, const ELEMENT *up) {
    for (int i = 0; i < 16; i += 8) {
        const v8 x = LOAD_8(gate + i);
        STORE_8(to + i, ROUND_8(x / (1.0f + exp_8(-x))) * LOAD_8(up + i));
    }
}
