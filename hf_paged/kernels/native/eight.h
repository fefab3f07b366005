/* Elements of eight bits: int8, and floats with 4 bits of exponent and 3 of mantissa (e4m3, without infinities). All
 * their values are exact in fp32, bf16 and fp16. */
#ifndef HFP_EIGHT_H
#define HFP_EIGHT_H
#include "kernels.h"
#include "vectors.h"

typedef int8_t vb __attribute__((vector_size(W)));
typedef uint8_t vub __attribute__((vector_size(W)));

INLINE vf load_int8(const void *p) {
#if W == 16
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif W == 8
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    vb b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, vf);
#endif
}

/* No number is below the least normal one of fp32, which a thread's setting may round to 0. */
INLINE vf load_e4m3(const void *p) {
#if W == 16
    const vi b = (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif W == 8
    const vi b = (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vub bytes;
    memcpy(&bytes, p, sizeof bytes);
    const vi b = __builtin_convertvector(bytes, vi);
#endif
    const vi magnitude = (b & 0x7f) << 20;
    const vf normal = (vf)(magnitude + (120 << 23)), small = (vf)(magnitude + (121 << 23)) - 0.015625f;
    return (vf)((vi)choose(magnitude < (1 << 23), small, normal) | (b & 0x80) << 24);
}

/* The largest number, which the largest magnitude of a head becomes. */
INLINE float largest_eight(const int64_t kind) { return kind == INT8 ? 127.0f : 448.0f; }

/* function(..., kind) with the kind as a constant, for each of which the compiler makes code. */
#define BY_KIND(kind, function, ...)                                                                                   \
    switch (kind) {                                                                                                    \
    case INT8: function(__VA_ARGS__, INT8); break;                                                                     \
    case E4M3: function(__VA_ARGS__, E4M3); break;                                                                     \
    default: __builtin_trap();                                                                                         \
    }

INLINE vf load_eight(const void *p, const int64_t kind) { return kind == INT8 ? load_int8(p) : load_e4m3(p); }

/* The first n < W elements at p, followed by zeros. Reads no other elements. */
INLINE vf load_part_eight(const void *p, int64_t n, const int64_t kind) {
    char whole[W] = {0};
    memcpy(whole, p, (size_t)n);
    return load_eight(whole, kind);
}

/* Store the first n <= W lanes, which are in the range of the elements, rounded to nearest even. */
INLINE void store_eight(void *p, vf x, int64_t n, const int64_t kind) {
    vi y;
    if (kind == INT8) {
        const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
        y = (vi)(x + magic) - (vi)magic;
    } else {
        const vi bits = (vi)x & 0x7fffffff;
        const vf step = splat(16384.0f); /* 2^14: adding it rounds to a multiple of 2^-9 */
        const vi small = (vi)((vf)bits + step) - (vi)step;
        const vi normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
        y = (vi)choose((vf)bits < 0.015625f, (vf)small, (vf)normal) | (((vi)x >> 24) & 0x80);
    }
#if W == 16
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)y);
#else
    const vb bytes = __builtin_convertvector(y, vb);
#endif
    if (n == W)
        memcpy(p, &bytes, sizeof bytes);
    else
        memcpy(p, &bytes, (size_t)n);
}

/* store_exact_*: store W lanes, which the type represents exactly. */
INLINE void store_exact_f32(float *p, vf x) { store_f32(p, x); }

INLINE void store_exact_bf16(uint16_t *p, vf x) {
#if HAS_DPBF16
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#elif W == 16
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)((vu)x >> 16)));
#else
    const vh h = __builtin_convertvector((vu)x >> 16, vh);
    memcpy(p, &h, sizeof h);
#endif
}

#if HAS_F16
INLINE void store_exact_f16(uint16_t *p, vf x) { store_part_f16(p, x, W); }
#endif
#endif
