/* Vectors of W fp32 lanes: loads and stores of fp32, bf16 and fp16, reductions, exp and tanh. */
#ifndef HFP_VECTORS_H
#define HFP_VECTORS_H
#include "common.h"
#if defined(__x86_64__)
#include <immintrin.h> /* not in common.h: it takes longer to read than a unit without vectors takes to compile */
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf choose(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
INLINE vf vmax(vf a, vf b) { /* b if either is NaN */
#if W == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE vf load_f32(const void *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store_f32(float *p, vf x) { memcpy(p, &x, sizeof x); }

INLINE vf load_bf16(const void *p) {
#if W == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif W == 8
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}

#if HAS_F16
INLINE vf load_f16(const void *p) {
#if W == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif W == 8
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__F16C__)
    return (vf)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)p));
#else
    const __fp16 *h = (const __fp16 *)p;
    return (vf){(float)h[0], (float)h[1], (float)h[2], (float)h[3]};
#endif
}
#endif

INLINE float max_lanes(vf x) {
#if W == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float m = x[0];
    for (int i = 1; i < W; i++) m = x[i] > m ? x[i] : m;
    return m;
#endif
}

INLINE float sum_lanes(vf x) {
    float s = 0;
    for (int i = 0; i < W; i++) s += x[i];
    return s;
}

/* Lane j of the result is the sum of the lanes of a[j]. */
INLINE vf sum_rows(const vf *a) {
#if W == 16
    __m512 t[8], u[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512 x = (__m512)a[2 * i], y = (__m512)a[2 * i + 1];
        t[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(t[2 * i]), y = _mm512_castps_pd(t[2 * i + 1]);
        u[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    __m512 v = _mm512_add_ps(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
    __m512 w = _mm512_add_ps(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
    return (vf)_mm512_add_ps(_mm512_shuffle_f32x4(v, w, 0x88), _mm512_shuffle_f32x4(v, w, 0xdd));
#elif W == 8
    __m256 t[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) t[i] = _mm256_hadd_ps((__m256)a[2 * i], (__m256)a[2 * i + 1]);
    __m256 u = _mm256_hadd_ps(t[0], t[1]), v = _mm256_hadd_ps(t[2], t[3]);
    return (vf)_mm256_add_ps(_mm256_permute2f128_ps(u, v, 0x20), _mm256_permute2f128_ps(u, v, 0x31));
#else
    vf r;
#pragma GCC unroll 4
    for (int j = 0; j < W; j++) r[j] = (a[j][0] + a[j][1]) + (a[j][2] + a[j][3]);
    return r;
#endif
}

/* exp(x) = result * 2^(*power), with a relative error below 2e-7. NaN gives NaN. */
INLINE vf exp_parts(vf x, vf *power) {
#if W == 16
    vf n = (vf)_mm512_roundscale_ps((__m512)(x * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vf n = (x * 1.44269504f + magic) - magic;
#endif
    vf f = x - n * 0.693359375f;
    f = f + n * 2.12194440e-4f;
    vf y = splat(1.9875691500e-4f);
    y = y * f + 1.3981999507e-3f;
    y = y * f + 8.3334519073e-3f;
    y = y * f + 4.1665795894e-2f;
    y = y * f + 1.6666665459e-1f;
    y = y * f + 5.0000001201e-1f;
    *power = n;
    return (y * f) * f + f + 1.0f;
}

/* exp(x) for x <= 0; 0 for x < -87, including -inf. */
INLINE vf exp_negative(vf x) {
    vf n, y = exp_parts(x, &n);
#if W == 16
    const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(kept, (__m512)y, (__m512)n);
#else
    vi under = x < -87.0f;
    vi e = __builtin_convertvector(choose(under, splat(0), n), vi);
    y = y * (vf)((e + 127) << 23);
    return (vf)((vi)y & ~under);
#endif
}

INLINE vf tanh_v(vf x) {
    vi sign = (vi)x & (int32_t)0x80000000;
    vf a = (vf)((vi)x ^ sign), s = x * x;
    vf big = 1.0f - 2.0f / (1.0f / exp_negative(-2.0f * a) + 1.0f);
    big = choose(a > 40.0f, splat(1.0f), big);
    vf small = splat(0.021869488f);
    small = small * s - 0.053968254f;
    small = small * s + 0.133333333f;
    small = small * s - 0.333333333f;
    small = small * s * a + a;
    vf y = choose(a < 0.25f, small, big);
    return (vf)((vi)y | sign);
}

/* store_part_*: store the first n <= W lanes, rounded to nearest even. */
INLINE void store_part_f32(float *p, vf x, int64_t n) {
    if (n == W)
        store_f32(p, x);
    else
        for (int64_t i = 0; i < n; i++) p[i] = x[i];
}

INLINE void store_part_bf16(uint16_t *p, vf x, int64_t n) {
    vu u = (vu)x, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    rounded = (vu)choose(x == x, (vf)rounded, (vf)((vu){0} + 0x7fc0));
#if W == 16
    __m256i h = _mm512_cvtepi32_epi16((__m512i)rounded);
#else
    vh h = __builtin_convertvector(rounded, vh);
#endif
    if (n == W)
        memcpy(p, &h, sizeof h);
    else
        memcpy(p, &h, (size_t)n * 2);
}

#if HAS_F16
INLINE void store_part_f16(uint16_t *p, vf x, int64_t n) {
    uint16_t h[W];
#if W == 16
    _mm256_storeu_si256((__m256i *)h, _mm512_cvtps_ph((__m512)x, 0));
#elif W == 8
    _mm_storeu_si128((__m128i *)h, _mm256_cvtps_ph((__m256)x, 0));
#elif defined(__F16C__)
    _mm_storel_epi64((__m128i *)h, _mm_cvtps_ph((__m128)x, 0));
#else
    for (int i = 0; i < W; i++) {
        __fp16 f = (__fp16)x[i];
        memcpy(h + i, &f, 2);
    }
#endif
    memcpy(p, h, (size_t)n * 2);
}
#endif
#endif
