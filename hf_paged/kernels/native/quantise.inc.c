/* Rounds a head of K or V to eight bits. Included by the unit of each dtype after attention.inc.c. */
#include "eight.h"

/* `dim` elements -> the same in eight bits, and the scale that multiplies them. An element that is not finite makes the
 * scale NaN. */
INLINE void TYPED(round_head)(const ELEMENT *from, int64_t dim, uint8_t *to, float *scale, const int64_t kind) {
    vf largest = {0}, bad = {0};
    for (int64_t d = 0; d < dim; d += W) {
        const vf x = dim - d < W ? TYPED(load_part)(from + d, dim - d) : LOAD(from + d);
        largest = vmax((vf)((vi)x & 0x7fffffff), largest);
        bad += x * 0.0f;
    }
    const float step = max_lanes(largest) / largest_eight(kind);
    const float factor = step < 1.17549435e-38f ? 1.17549435e-38f : step;
    for (int64_t d = 0; d < dim; d += W) {
        const int64_t n = dim - d < W ? dim - d : W;
        const vf x = n < W ? TYPED(load_part)(from + d, n) : LOAD(from + d);
        store_eight(to + d, x / factor, n, kind);
    }
    *scale = factor + sum_lanes(bad);
}

/* bytes: of the head. */
void TYPED(quantise)(const void *from, int64_t bytes, void *to, float *scale, int64_t kind) {
    BY_KIND(kind, TYPED(round_head), from, bytes / (int64_t)sizeof(ELEMENT), to, scale)
}
