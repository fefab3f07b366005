/* Queries, scores, probabilities and values of attention over int8 keys and values on the matrix unit (attention_amx.c).
 *
 * Products of tiles are sums of integers, which are exact. So what is multiplied with int8 is split into three digits of
 * eight bits: numbers of 24 bits, whose unit is chosen for each row. As in amx_tiles.h, a block of query rows is `width`
 * rows wide: 4, 8 or 16. Its digits fill `amx_tiles_8` tiles, one column (or row) after the other: of digit 0, the most
 * significant one, in the order of the rows; of digit 1; of digit 2. */
#ifndef HFP_AMX_INT8_H
#define HFP_AMX_INT8_H
#include "transpose.h"
#include "vectors.h"
#if HAS_AMX

#define STEP_8 64 /* keys in a row of a tile of probabilities; elements in a row of a tile of keys */
#define DIGITS 3
#define LARGEST_SIGNED 8355700.0f    /* less than 127 * (2^16 + 2^8 + 1), also after rounding */
#define LARGEST_UNSIGNED 16777200.0f /* less than 2^24, also after rounding */
#define LEAST 1e-30f /* smaller rows have its unit, so that no reciprocal is infinite; below 1e-32 they lose digits */

/* Tiles of a block of rows. */
INLINE int amx_tiles_8(const int width) { return (width * DIGITS + 15) / 16; }

/* The larger ones of numbers that are not negative; NaN if either is NaN. */
INLINE vf amx_larger(vf x, vf y) { return (vf)_mm512_max_epu32((__m512i)x, (__m512i)y); }

/* The largest lane of each row. */
INLINE vf amx_largest(vf x, const int width) {
    if (width == 16) return x;
    x = amx_larger((vf)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4e), x);
    if (width == 8) return x;
    return amx_larger((vf)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0xb1), x);
}

/* Probabilities times the scales of their values. Those that are 0 stay 0: their keys may not be seen. */
INLINE vf amx_scaled(vf p, vf scales) {
    const __mmask16 seen = _mm512_cmp_ps_mask((__m512)p, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    return (vf)_mm512_maskz_mul_ps(seen, (__m512)p, (__m512)scales);
}

/* The largest magnitude of a query row, at least LEAST; NaN if the row is not finite. */
INLINE float amx_magnitude(const uint16_t *from, int64_t dim) {
    __m512i top = _mm512_setzero_si512();
    for (int64_t d = 0; d < dim; d += 32)
        top = _mm512_max_epu16(top, _mm512_and_si512(_mm512_loadu_si512(from + d), _mm512_set1_epi16(0x7fff)));
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(top), _mm512_extracti64x4_epi64(top, 1));
    const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)));
    const uint32_t bits = (uint32_t)(uint16_t)~_mm_extract_epi16(least, 0) << 16;
    float largest;
    memcpy(&largest, &bits, 4);
    return bits >= 0x7f800000 ? NAN : largest > LEAST ? largest : LEAST;
}

/* Packs four query rows, from the `row`-th of their block on, as [dim / STEP_8, tiles, 16 fours of elements, 16 columns,
 * 4]; columns behind the last digit's are not written. from: NULL for a row that is missing. Stores the units of the
 * rows; NaN for a row that is not finite. */
INLINE void amx_pack_queries_8(const uint16_t *const *from, int8_t *to, float *units, int64_t row, int64_t dim,
                               const int width) {
    float factors[4];
    for (int i = 0; i < 4; i++) {
        const float largest = from[i] ? amx_magnitude(from[i], dim) : LEAST;
        units[i] = largest / LARGEST_SIGNED;
        factors[i] = LARGEST_SIGNED / largest;
    }
    for (int64_t d = 0; d < dim; d += 16) {
        __m512i x[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            x[i] = from[i] ? _mm512_cvtps_epi32((__m512)(load_bf16(from[i] + d) * factors[i])) : _mm512_setzero_si512();
#pragma GCC unroll 3
        for (int digit = DIGITS - 1; digit >= 0; digit--) {
            __m128i b[4], y[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                b[i] = _mm512_cvtepi32_epi8(x[i]);
                x[i] = _mm512_srai_epi32(_mm512_sub_epi32(x[i], _mm512_cvtepi8_epi32(b[i])), 8);
            }
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                y[i] = _mm_unpacklo_epi32(b[2 * i], b[2 * i + 1]);
                y[2 + i] = _mm_unpackhi_epi32(b[2 * i], b[2 * i + 1]);
            }
            const int64_t column = width * digit + row, tile = d / STEP_8 * amx_tiles_8(width) + column / 16;
            int8_t *at = to + tile * 1024 + d % STEP_8 / 4 * 64 + column % 16 * 4;
            _mm_store_si128((__m128i *)at, _mm_unpacklo_epi64(y[0], y[1]));
            _mm_store_si128((__m128i *)(at + 64), _mm_unpackhi_epi64(y[0], y[1]));
            _mm_store_si128((__m128i *)(at + 128), _mm_unpacklo_epi64(y[2], y[3]));
            _mm_store_si128((__m128i *)(at + 192), _mm_unpackhi_epi64(y[2], y[3]));
        }
    }
}

/* The number with these digits. */
INLINE vf amx_number(vf a, vf b, vf c) { return (a * 65536.0f + b * 256.0f) + c; }

INLINE vf amx_integers(const int32_t *p) { return (vf)_mm512_cvtepi32_ps(_mm512_load_si512(p)); }

/* The scores of 16 keys, [16, width], of sums [tiles, 16 keys, 16 columns]. units: of the query row of each lane. */
INLINE void amx_join_scores(const int32_t *sums, float *scores, vf units, const int width) {
    for (int j = 0; j < 16; j += 16 / width) {
        vf a, b, c;
        if (width == 16) {
            a = amx_integers(sums + j * 16);
            b = amx_integers(sums + 256 + j * 16);
            c = amx_integers(sums + 512 + j * 16);
        } else if (width == 8) {
            const __m512 x = (__m512)amx_integers(sums + j * 16), y = (__m512)amx_integers(sums + j * 16 + 16);
            const __m512 z = (__m512)amx_integers(sums + 256 + j * 16);
            const __m512 w = (__m512)amx_integers(sums + 256 + j * 16 + 16);
            a = (vf)_mm512_shuffle_f32x4(x, y, 0x44);
            b = (vf)_mm512_shuffle_f32x4(x, y, 0xee);
            c = (vf)_mm512_shuffle_f32x4(z, w, 0x44);
        } else {
            const __m512 x = (__m512)amx_integers(sums + j * 16), y = (__m512)amx_integers(sums + j * 16 + 16);
            const __m512 z = (__m512)amx_integers(sums + j * 16 + 32), w = (__m512)amx_integers(sums + j * 16 + 48);
            const __m512 front = _mm512_shuffle_f32x4(x, y, 0x44), back = _mm512_shuffle_f32x4(z, w, 0x44);
            a = (vf)_mm512_shuffle_f32x4(front, back, 0x88);
            b = (vf)_mm512_shuffle_f32x4(front, back, 0xdd);
            c = (vf)_mm512_shuffle_f32x4(_mm512_shuffle_f32x4(x, y, 0xee), _mm512_shuffle_f32x4(z, w, 0xee), 0x88);
        }
        store_f32(scores + j * width, amx_number(a, b, c) * units);
    }
}

/* Replaces the probabilities of STEP_8 keys, fp32 [STEP_8, width], by the digits of their products with the factors:
 * bytes [tiles, 16, STEP_8]. Rows behind the last digit's are arbitrary. */
INLINE void amx_pack_probabilities_8(float *p, vf factors, const int width) {
    const __m512i digits = /* four numbers -> by digit and number */
        _mm512_broadcast_i32x4(_mm_setr_epi8(2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12, -1, -1, -1, -1));
    const __m512i rows = /* by key and row -> by row and key */
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    if (width == 4) {
        /* By key and row -> by digit and key and row -> by digit, row and key. */
        const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        __m512i x[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            x[i] = _mm512_shuffle_epi8(_mm512_cvtps_epi32((__m512)(load_f32(p + i * 16) * factors)), digits);
            x[i] = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(lanes, x[i]), rows);
        }
        transpose_16(x, p, 64);
        return;
    }
    if (width == 8) {
        /* By key, four rows, row and digit -> by digit -> by digit, four rows, key and row -> by row and key. */
        const __m512i front = _mm512_setr_epi32(0, 8, 16, 24, 4, 12, 20, 28, 1, 9, 17, 25, 5, 13, 21, 29);
        const __m512i back = _mm512_setr_epi32(2, 10, 18, 26, 6, 14, 22, 30, 2, 10, 18, 26, 6, 14, 22, 30);
        __m512i x[16], y[8];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const __m512i a = _mm512_cvtps_epi32((__m512)(load_f32(p + i * 32) * factors));
            const __m512i b = _mm512_cvtps_epi32((__m512)(load_f32(p + i * 32 + 16) * factors));
            const __m512i c = _mm512_shuffle_epi8(a, digits), d = _mm512_shuffle_epi8(b, digits);
            x[i] = _mm512_shuffle_epi8(_mm512_permutex2var_epi32(c, front, d), rows);
            const __m512i last = _mm512_shuffle_epi8(_mm512_permutex2var_epi32(c, back, d), rows);
            y[i / 2] = i % 2 ? _mm512_inserti64x4(y[i / 2], _mm512_castsi512_si256(last), 1) : last;
        }
        transpose_16(x, p, 64);
        transpose_16_by_8(y, p + 256, 64);
        return;
    }
    __m512i x[DIGITS][16];
    const __m512i low = _mm512_set1_epi32(255);
    for (int i = 0; i < 16; i++) {
        for (int digit = 0; digit < DIGITS; digit++) x[digit][i] = _mm512_setzero_si512();
        for (int j = 0; j < 4; j++) {
            __m512i y = _mm512_cvtps_epi32((__m512)(load_f32(p + (4 * i + j) * 16) * factors));
            for (int digit = DIGITS - 1; digit >= 0; digit--, y = _mm512_srli_epi32(y, 8))
                x[digit][i] = _mm512_or_si512(x[digit][i],
                                              _mm512_sllv_epi32(_mm512_and_si512(y, low), _mm512_set1_epi32(8 * j)));
        }
    }
    for (int digit = 0; digit < DIGITS; digit++) transpose_16(x[digit], p + digit * 256, 64);
}

/* Packs STEP_8 elements of the values of STEP_8 keys: [4 parts, 16 fours of keys, 16 elements, 4]. Interleaving stays
 * within 128-bit lanes, so part t has elements 16 * lane + 4 * t + i; amx_outputs_8 restores the order. */
INLINE void amx_pack_values_8(const char *v, const int64_t *at, char *to) {
#pragma GCC unroll 4
    for (int i = 0; i < 16; i++) {
        const __m512i a = _mm512_loadu_si512(v + at[4 * i]), b = _mm512_loadu_si512(v + at[4 * i + 1]);
        const __m512i c = _mm512_loadu_si512(v + at[4 * i + 2]), d = _mm512_loadu_si512(v + at[4 * i + 3]);
        const __m512i front = _mm512_unpacklo_epi8(a, b), front_2 = _mm512_unpacklo_epi8(c, d);
        const __m512i back = _mm512_unpackhi_epi8(a, b), back_2 = _mm512_unpackhi_epi8(c, d);
        _mm512_store_si512(to + i * 64, _mm512_unpacklo_epi16(front, front_2));
        _mm512_store_si512(to + 1024 + i * 64, _mm512_unpackhi_epi16(front, front_2));
        _mm512_store_si512(to + 2048 + i * 64, _mm512_unpacklo_epi16(back, back_2));
        _mm512_store_si512(to + 3072 + i * 64, _mm512_unpackhi_epi16(back, back_2));
    }
}
#endif
#endif
