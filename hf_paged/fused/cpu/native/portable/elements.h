/* For the units of one dtype (f32.c, bf16.c, f16.c), which define before: ELEMENT; NAME, which makes an entry point's
 * name; DTYPE_NUMBER, as attention takes it. After it they define, for vectors of W lanes, LOAD and STORE, and for 8
 * lanes LOAD_8, STORE_8 and ROUND_8; those that store round to nearest even.
 *
 * These kernels run on any CPU. Operations that a CPU could fuse are fused only where multiply_add says so, so that the
 * bits of norms, rotations and gates are torch's. */
#ifndef HFP_ELEMENTS_H
#define HFP_ELEMENTS_H
#include "common.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
#include "layers.h"

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));

/* Keeps a vector in a register: the compiler would read it from memory for each use. */
#if defined(__x86_64__)
#define KEEP(x) __asm__("" : "+v"(x))
#elif defined(__aarch64__)
#define KEEP(x) __asm__("" : "+w"(x))
#else
#define KEEP(x) (void)0
#endif

/* a * b + c */
INLINE vf multiply_add(vf a, vf b, vf c) {
#if W == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif W == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
INLINE v8 multiply_add_8(v8 a, v8 b, v8 c) {
#if defined(__FMA__)
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < 8; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE v8 splat_8(float x) { return x - (v8){0}; }
INLINE v8 choose_8(i8 mask, v8 a, v8 b) { return (v8)(((i8)a & mask) | ((i8)b & ~mask)); }

INLINE v8 load_8_f32(const float *p) {
    v8 x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store_8_f32(float *p, v8 x) { memcpy(p, &x, sizeof x); }

/* exp(x) with the operations of Sleef's expf of one unit in the last place, which torch uses: range reduction with ln 2
 * in two parts, then a polynomial. 0 below -104, infinite above 100. */
INLINE v8 exp_8(v8 x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const v8 bounded = choose_8(x > 101.0f, splat_8(101.0f), choose_8(x < -105.0f, splat_8(-105.0f), x));
    const v8 n = (bounded * 1.44269504088896f + magic) - magic;
    v8 s = multiply_add_8(n, splat_8(-0.693145751953125f), bounded);
    s = multiply_add_8(n, splat_8(-1.428606765330187045e-06f), s);
    v8 u = splat_8(0.000198527617612853646278381f);
    u = multiply_add_8(u, s, splat_8(0.00139304355252534151077271f));
    u = multiply_add_8(u, s, splat_8(0.00833336077630519866943359f));
    u = multiply_add_8(u, s, splat_8(0.0416664853692054748535156f));
    u = multiply_add_8(u, s, splat_8(0.166666671633720397949219f));
    u = multiply_add_8(u, s, splat_8(0.5f));
    u = 1.0f + multiply_add_8(s * s, u, s);
    const i8 whole = __builtin_convertvector(choose_8(x == x, n, splat_8(0)), i8), half = whole >> 1;
    u = u * (v8)((half + 127) << 23) * (v8)((whole - half + 127) << 23);
    u = choose_8(x > 100.0f, splat_8(INFINITY), u);
    return (v8)((i8)u & ~(x < -104.0f));
}
#endif
