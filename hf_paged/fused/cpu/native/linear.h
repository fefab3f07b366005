/* Shared by the two implementations of linear layers: panels of a packed weight, and rounding of the sums. */
#ifndef HFP_LINEAR_H
#define HFP_LINEAR_H
#include "layers.h"
#if HAS_DPBF16

#define PANEL 32 /* columns of a weight that are stored together: two vectors, or two tiles, wide */

void linear_pack_panel(const uint16_t *weight, int64_t columns, int64_t depth, int64_t panel, uint16_t *to);
void linear_amx(const Linear *call); /* rows > 0 */
void linear_dot(const Linear *call); /* rows > 0 */

/* This thread's buffer for a panel. */
INLINE uint16_t *linear_buffer(const Linear *l) {
    return (uint16_t *)(void *)l->workspace + omp_get_thread_num() * round_up(l->depth, 32) * PANEL;
}

/* A packed panel, in the weight itself or in the buffer. */
INLINE const uint16_t *linear_panel(const Linear *l, int64_t panel, uint16_t *buffer) {
    if (l->packed) return l->weight + panel * round_up(l->depth, 32) * PANEL;
    linear_pack_panel(l->weight, l->columns, l->depth, panel, buffer);
    return buffer;
}

/* Round `rows` rows of sums to bf16 and store them at `to`; the panel has `columns` columns of each row. */
INLINE void linear_store(uint16_t *to, int64_t to_row, const float *sums, int64_t rows, int64_t columns,
                         const uint16_t *bias) {
    const __mmask32 mask = columns >= PANEL ? ~0u : (1u << columns) - 1;
    __m512 low = _mm512_setzero_ps(), high = low;
    if (bias) {
        const __m512i both = _mm512_maskz_loadu_epi16(mask, bias);
        low = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(both)), 16);
        high = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), 16);
    }
    for (int64_t r = 0; r < rows; r++, sums += PANEL, to += to_row) {
        const __m512 a = _mm512_add_ps(_mm512_load_ps(sums), low), b = _mm512_add_ps(_mm512_load_ps(sums + 16), high);
        _mm512_mask_storeu_epi16(to, mask, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
}

#endif
#endif
