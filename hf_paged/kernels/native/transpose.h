/* Transposes of small matrices of 32-bit words. */
#ifndef HFP_TRANSPOSE_H
#define HFP_TRANSPOSE_H
#include "vectors.h"

#if W == 16
/* Row i of the result is the i-th 128-bit lane of x[0] to x[3]. */
INLINE void transpose_lanes(const __m512i *x, char *out, int64_t stride) {
    __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x88), b = _mm512_shuffle_i32x4(x[0], x[1], 0xdd);
    __m512i c = _mm512_shuffle_i32x4(x[2], x[3], 0x88), d = _mm512_shuffle_i32x4(x[2], x[3], 0xdd);
    _mm512_store_si512(out, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_store_si512(out + stride, _mm512_shuffle_i32x4(b, d, 0x88));
    _mm512_store_si512(out + 2 * stride, _mm512_shuffle_i32x4(a, c, 0xdd));
    _mm512_store_si512(out + 3 * stride, _mm512_shuffle_i32x4(b, d, 0xdd));
}

/* Transpose 16 x 16 words. The stride is in bytes; the rows of the result are aligned to 64 bytes. */
INLINE void transpose_16(const __m512i *x, void *out, int64_t stride) {
    __m512i a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) /* b[4 * i + j]: columns j, 4 + j, 8 + j, 12 + j of rows 4 * i to 4 * i + 3 */
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            b[4 * i + 2 * j] = _mm512_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
            b[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
        }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512i lanes[4] = {b[j], b[4 + j], b[8 + j], b[12 + j]};
        transpose_lanes(lanes, (char *)out + j * stride, 4 * stride);
    }
}

/* Transpose 16 rows of 8 words, of which a vector has two, to 8 rows of 16. */
INLINE void transpose_16_by_8(const __m512i *x, void *out, int64_t stride) {
    const __m512i pairs = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    __m512i a[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i front = _mm512_permutexvar_epi32(pairs, x[2 * i]);
        const __m512i back = _mm512_permutexvar_epi32(pairs, x[2 * i + 1]);
        a[i] = _mm512_unpacklo_epi64(front, back); /* columns 0, 2, 4, 6 of rows 4 * i to 4 * i + 3 */
        a[4 + i] = _mm512_unpackhi_epi64(front, back);
    }
    transpose_lanes(a, (char *)out, 2 * stride);
    transpose_lanes(a + 4, (char *)out + stride, 2 * stride);
}
#endif

/* to[i][j] = from[j][i], 16 x 16 words. Strides are in words; all rows are aligned to 64 bytes. */
static inline void transpose_words(uint32_t *to, int64_t to_stride, const uint32_t *from, int64_t from_stride) {
#if W == 16
    __m512i rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) rows[i] = _mm512_load_si512(from + i * from_stride);
    transpose_16(rows, to, to_stride * 4);
#else
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) to[i * to_stride + j] = from[j * from_stride + i];
#endif
}
#endif
