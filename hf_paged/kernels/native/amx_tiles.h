/* Queries, values and probabilities of attention in the layouts in which tiles are loaded (attention_amx.c). A block of
 * query rows is `width` rows wide: 4, 8 or 16. */
#ifndef HFP_AMX_TILES_H
#define HFP_AMX_TILES_H
#include "transpose.h"
#include "vectors.h"
#if HAS_AMX

#define STEP 32 /* keys in a tile of probabilities; bf16 elements in a row of a tile */

/* Packs `rows` query rows, at most `width`, as tiles: [dim / STEP, 16 pairs of elements, width, 2]; missing rows are
 * zero. */
INLINE void amx_pack_queries(const uint16_t *const *from, int64_t rows, uint16_t *to, int64_t dim, const int width) {
    for (int64_t d = 0; d < dim; d += STEP, to += 16 * width * 2) {
        if (width == 16) {
            __m512i x[16];
#pragma GCC unroll 16
            for (int r = 0; r < 16; r++)
                x[r] = r < rows ? _mm512_loadu_si512(from[r] + d) : _mm512_setzero_si512();
            transpose_16(x, to, 64);
        } else {
            __m512i x[2][4], y[4]; /* lane l of x[f][i]: pair 4 * l + i of rows 4 * f to 4 * f + 3 */
#pragma GCC unroll 2
            for (int four = 0; four < width / 4; four++) {
                __m512i *z = x[four];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++)
                    z[i] = 4 * four + i < rows ? _mm512_loadu_si512(from[4 * four + i] + d) : _mm512_setzero_si512();
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    y[i] = _mm512_unpacklo_epi32(z[2 * i], z[2 * i + 1]);
                    y[2 + i] = _mm512_unpackhi_epi32(z[2 * i], z[2 * i + 1]);
                }
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    z[2 * i] = _mm512_unpacklo_epi64(y[2 * i], y[2 * i + 1]);
                    z[2 * i + 1] = _mm512_unpackhi_epi64(y[2 * i], y[2 * i + 1]);
                }
            }
            if (width == 4) {
                transpose_lanes(x[0], (char *)to, 64);
            } else {
#pragma GCC unroll 2
                for (int i = 0; i < 4; i += 2) {
                    const __m512i lanes[4] = {x[0][i], x[1][i], x[0][i + 1], x[1][i + 1]};
                    transpose_lanes(lanes, (char *)to + i * 32, 128);
                }
            }
        }
    }
}

/* Packs STEP elements of the values of STEP keys: [2 halves, 16 pairs of keys, 16 elements, 2]. Interleaving stays
 * within 128-bit lanes, so the first half has elements {0-3, 8-11, 16-19, 24-27}; amx_outputs restores the order. */
INLINE void amx_pack_values(const uint16_t *v, const int64_t *at, uint16_t *to) {
#pragma GCC unroll 4
    for (int i = 0; i < 16; i++) {
        __m512i a = _mm512_loadu_si512(v + at[2 * i]), b = _mm512_loadu_si512(v + at[2 * i + 1]);
        _mm512_store_si512(to + i * 32, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to + 512 + i * 32, _mm512_unpackhi_epi16(a, b));
    }
}

/* Two vectors truncated to bf16, as pairs; the remainders stay in *a and *b. */
INLINE __m512i amx_pair(vf *a, vf *b) {
    const vi mask = (vi){0} + (int32_t)0xffff0000;
    vi high_a = (vi)*a & mask, high_b = (vi)*b & mask;
    *a -= (vf)high_a;
    *b -= (vf)high_b;
    return (__m512i)((vi)((vu)high_a >> 16) | high_b);
}

/* The same, rounded to the nearest number in bf16, not truncated. */
INLINE __m512i amx_rounded_pair(vf *a, vf *b) {
    const vu high_a = ((vu)*a + 0x8000) & 0xffff0000, high_b = ((vu)*b + 0x8000) & 0xffff0000;
    *a -= (vf)high_a;
    *b -= (vf)high_b;
    return (__m512i)(high_a >> 16 | high_b);
}

/* Packs the fp32 probabilities of STEP keys, [STEP, width], as two tiles of bf16, [2 parts, width, STEP], whose sum is
 * as precise as 16 significant bits. `to` may be `p`: everything is read before anything is written. */
INLINE void amx_pack_probabilities(const float *p, uint16_t *to, const int width) {
    __m512i high[16], low[16];
    if (width == 16) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            vf a = load_f32(p + 2 * i * 16), b = load_f32(p + (2 * i + 1) * 16);
            high[i] = amx_pair(&a, &b);
            low[i] = amx_rounded_pair(&a, &b);
        }
        transpose_16(high, to, 64);
        transpose_16(low, to + 16 * STEP, 64);
    } else if (width == 8) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) { /* lanes: 2 pairs of keys, 8 rows */
            __m512 x = (__m512)load_f32(p + i * 32), y = (__m512)load_f32(p + i * 32 + 16);
            vf a = (vf)_mm512_shuffle_f32x4(x, y, 0x44), b = (vf)_mm512_shuffle_f32x4(x, y, 0xee);
            high[i] = amx_pair(&a, &b);
            low[i] = amx_rounded_pair(&a, &b);
        }
        transpose_16_by_8(high, to, 64);
        transpose_16_by_8(low, to + 8 * STEP, 64);
    } else {
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) { /* lanes: 4 pairs of keys, 4 rows */
            __m512 x = (__m512)load_f32(p + i * 32), y = (__m512)load_f32(p + i * 32 + 16);
            vf a = (vf)_mm512_shuffle_f32x4(x, y, 0x88), b = (vf)_mm512_shuffle_f32x4(x, y, 0xdd);
            high[i] = _mm512_permutexvar_epi32(order, amx_pair(&a, &b)); /* 4 rows, 4 pairs of keys */
            low[i] = _mm512_permutexvar_epi32(order, amx_rounded_pair(&a, &b));
        }
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            transpose_lanes(part ? low : high, (char *)(to + part * 4 * STEP), STEP * 2);
        }
    }
}
#endif
#endif
