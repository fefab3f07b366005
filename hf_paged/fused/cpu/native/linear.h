/* Shared by the two implementations of linear layers: panels of a packed weight, and rounding of the sums. */
#ifndef HFP_LINEAR_H
#define HFP_LINEAR_H
#include "layers.h"
#if HAS_DPBF16

#define PANEL 32 /* columns of a weight that are stored together: two vectors, or two tiles, wide */

/* Lays out a panel in bf16 in the buffer, and prefetches the next one to L2. */
void linear_to_buffer(const Linear *l, int64_t panel, uint16_t *buffer);
void linear_amx(const Linear *call); /* rows > 0 */
void linear_dot(const Linear *call); /* rows > 0 */

#define ROUGH_ROWS 12 /* whose sums with a panel fit into the vector registers */
void linear_rough(const Linear *call); /* up to ROUGH_ROWS rows > 0, of a depth that is a multiple of 32 */

/* A thread's buffer for a panel. */
INLINE uint16_t *linear_buffer(const Linear *l, int64_t thread) {
    return (uint16_t *)(void *)l->workspace + thread * round_up(l->depth, 32) * PANEL;
}

/* 32 elements; the conversion is exact. */
INLINE __m512i int8_as_bf16(__m256i x) {
    const __m512i low = _mm512_cvtepi8_epi32(_mm256_castsi256_si128(x));
    const __m512i high = _mm512_cvtepi8_epi32(_mm256_extracti128_si256(x, 1));
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
}

/* Whether the weight's panels are read where they are, not from a buffer. */
INLINE int linear_in_place(const Linear *l) { return l->packed && !l->scales; }

/* A packed panel in bf16, in the weight itself or in the buffer. */
INLINE const uint16_t *linear_panel(const Linear *l, int64_t panel, uint16_t *buffer) {
    if (linear_in_place(l)) return l->weight + panel * round_up(l->depth, 32) * PANEL;
    linear_to_buffer(l, panel, buffer);
    return buffer;
}

/* Of up to 32 columns, those of 16 at a time. */
typedef struct {
    vf part[2];
} Columns;

INLINE Columns linear_bias(const uint16_t *bias, __mmask32 mask) {
    const __m512i both = _mm512_maskz_loadu_epi16(mask, bias);
    return (Columns){{(vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(both)), 16),
                      (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), 16)}};
}

INLINE void linear_round(uint16_t *to, __mmask32 mask, vf low, vf high) {
    _mm512_mask_storeu_epi16(to, mask, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}

/* Store `rows` rows of sums with a panel in the output, from `row` on: times the scales, plus the bias. */
INLINE void linear_store(const Linear *l, int64_t row, int64_t rows, int64_t panel, const float *sums) {
    const int64_t first = panel * PANEL, columns = l->columns - first;
    const __mmask32 mask = columns >= PANEL ? ~0u : (1u << columns) - 1;
    const Columns none = {{{0}}}, bias = l->bias ? linear_bias(l->bias + first, mask) : none;
    uint16_t *to = l->out + row * l->columns + first;
    const int64_t to_row = l->columns;
    if (!l->scales) {
        for (int64_t r = 0; r < rows; r++, sums += PANEL, to += to_row)
            linear_round(to, mask, load_f32(sums) + bias.part[0], load_f32(sums + 16) + bias.part[1]);
        return;
    }
    Columns scales = none;
    for (int i = 0; i < 2; i++)
        scales.part[i] = (vf)_mm512_maskz_loadu_ps((__mmask16)(mask >> (16 * i)), l->scales + first + 16 * i);
    const int rounds = l->rounds, has_bias = l->bias != NULL;
    for (int64_t r = 0; r < rows; r++, sums += PANEL, to += to_row) {
        Columns x = {{load_f32(sums), load_f32(sums + 16)}};
        for (int i = 0; i < 2; i++) {
            if (rounds) x.part[i] = round_bf16(x.part[i]);
            x.part[i] *= scales.part[i];
            if (has_bias) x.part[i] = round_bf16(x.part[i]);
            x.part[i] += bias.part[i];
        }
        linear_round(to, mask, x.part[0], x.part[1]);
    }
}

#endif
#endif
