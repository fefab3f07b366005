/* Linear layers of a model that drafts: packed weights in int8 times rows rounded to int16, summed in int32 by SPAN
 * elements, and then in fp32. Converting the weights to bf16 would take longer than reading them. A row has one unit,
 * so that small elements beside a large one lose bits. Drafts are verified, so that wrong ones only cost time. */
#include "common.h"
#if HAS_DPBF16
#include "linear.h"

#define FAR 16384 /* bytes ahead of the products that are prefetched to L2, which can wait for more lines than L1 */
#define NEAR 2048 /* to L1 */
#define SPAN 512  /* as many products of int8 and int16 fit into int32: 512 * 2^7 * (2^15 - 1) < 2^31 */

typedef struct {
    const Linear *linear;
    const int16_t *x;   /* [rows, depth], in units */
    const float *units; /* [rows] */
} Rough;

/* Rounds x to multiples of a unit, which is returned; NaN, if x is not finite. */
static float round_to_int16(const uint16_t *x, int64_t depth, int16_t *to) {
    vf magnitudes = {0}, odd = {0};
    for (int64_t i = 0; i < depth; i += 16) {
        const vf some = load_bf16(x + i);
        magnitudes = (vf)_mm512_max_ps((__m512)magnitudes, _mm512_abs_ps((__m512)some));
        odd += some * splat(0);
    }
    const float largest = max_lanes(magnitudes), unit = largest > 1e-30f ? largest / INT16_MAX : 1;
    for (int64_t i = 0; i < depth; i += 16) {
        const __m512i all = _mm512_cvtps_epi32((__m512)(load_bf16(x + i) * splat(1 / unit)));
        _mm256_storeu_si256((__m256i *)(void *)(to + i), _mm512_cvtsepi32_epi16(all));
    }
    return unit + sum_lanes(odd);
}

INLINE __m512i wide_pairs(const char *from) {
    return _mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i *)(const void *)from));
}

/* Adds the products of at most SPAN elements to sums [n, PANEL]. Few rows have several sums of each element, because
 * each product waits for the one before. */
INLINE void rough_span(const char *panel, const int16_t *x, int64_t depth, int64_t count, float *sums, const int n) {
    const int parts = n > 4 ? 1 : 2;
    __m512i own[ROUGH_ROWS][2][2];
#pragma GCC unroll 12
    for (int r = 0; r < n; r++)
        for (int h = 0; h < 2; h++) own[r][h][0] = own[r][h][1] = _mm512_setzero_si512();
    for (int64_t k = 0; k < count; k += 32, panel += 1024, x += 32) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            _mm_prefetch(panel + FAR + 64 * i, _MM_HINT_T1);
            _mm_prefetch(panel + NEAR + 64 * i, _MM_HINT_T0);
            const __m512i low = wide_pairs(panel + 32 * i), high = wide_pairs(panel + 512 + 32 * i);
#pragma GCC unroll 12
            for (int r = 0; r < n; r++) {
                const __m512i pair = _mm512_set1_epi32(*(const int32_t *)(const void *)(x + r * depth + 2 * i));
                own[r][0][i % parts] = _mm512_dpwssd_epi32(own[r][0][i % parts], pair, low);
                own[r][1][i % parts] = _mm512_dpwssd_epi32(own[r][1][i % parts], pair, high);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < n; r++)
        for (int h = 0; h < 2; h++) {
            __m512i sum = own[r][h][0];
            if (parts > 1) sum = _mm512_add_epi32(sum, own[r][h][1]);
            float *to = sums + r * PANEL + 16 * h;
            store_f32(to, load_f32(to) + (vf)_mm512_cvtepi32_ps(sum));
        }
}

/* sums: of n rows with a panel, [n, PANEL]. */
INLINE void rough_sums(const char *panel, const int16_t *x, const float *units, int64_t depth, float *sums,
                       const int n) {
    memset(sums, 0, sizeof(float) * (size_t)(n * PANEL));
    for (int64_t k = 0; k < depth; k += SPAN)
        rough_span(panel + k * PANEL, x + k, depth, depth - k < SPAN ? depth - k : SPAN, sums, n);
    for (int r = 0; r < n; r++)
        for (int h = 0; h < PANEL; h += 16)
            store_f32(sums + r * PANEL + h, load_f32(sums + r * PANEL + h) * splat(units[r]));
}

/* A function for each number of rows: the compiler's time grows with the square of a function's size. */
#define ROWS(n)                                                                                                        \
    NOINLINE void rough_sums_##n(const char *panel, const int16_t *x, const float *units, int64_t depth, float *sums) { \
        rough_sums(panel, x, units, depth, sums, n);                                                                   \
    }
ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)

#define CASE(n) \
    case n: rough_sums_##n(weight, r.x, r.units, depth, sums); break;

static void rough_panels(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Rough r = *(const Rough *)arguments;
    const Linear l = *r.linear;
    const int64_t depth = l.depth;
    float sums[ROUGH_ROWS * PANEL] __attribute__((aligned(64)));
    (void)thread;
    for (int64_t p = first; p < last; p++) {
        const char *weight = (const char *)l.weight + p * depth * PANEL;
        switch (l.rows) {
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
        }
        linear_store(&l, 0, l.rows, p, sums);
    }
}

void linear_rough(const Linear *l) {
    float units[ROUGH_ROWS];
    int16_t *x = (int16_t *)(void *)l->workspace;
    for (int64_t r = 0; r < l->rows; r++) units[r] = round_to_int16(l->x + r * l->depth, l->depth, x + r * l->depth);
    in_parallel(rough_panels, &(Rough){l, x, units}, round_up(l->columns, PANEL) / PANEL, l->threads, IN_SHARES);
}
#endif
