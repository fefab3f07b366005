/* The matrix unit (AMX): permission to use it, its configuration, and a product of matrices. */
#ifndef HFP_AMX_H
#define HFP_AMX_H
#include "common.h"

#if !HAS_AMX
static inline int amx_allowed(void) { return 0; }
#else
#include <immintrin.h>
#ifdef HF_PAGED_EMULATE_AMX
#include "amx_emulated.h"
#define AMX_NAME "emulated AMX"
static inline int amx_allowed(void) { return 1; }
#else
#include <sys/syscall.h>
#include <unistd.h>
#define AMX_NAME "AMX"

/* Whether this process may use the matrix unit; on Linux a process must request it. */
static inline int amx_allowed(void) {
    static int answer; /* 0: not asked */
    int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (!known) {
        known = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0 ? 1 : -1;
        __atomic_store_n(&answer, known, __ATOMIC_RELAXED);
    }
    return known > 0;
}
#endif

/* gcc does not know that a tile load reads memory. Put this between writing data and loading it as tiles. */
#define COMPILER_FENCE() __asm__ volatile("" ::: "memory")

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t columns[16]; /* bytes */
    uint8_t rows[16];
} AmxConfig;
static const AmxConfig amx_config_16 = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* out[32][32] = a[32][depth] x b[depth][32], added to out if `add`. b is in pairs of bf16 from two of its rows; depth
 * is a multiple of 32. a and b must have been written before a COMPILER_FENCE. */
INLINE void amx_multiply(float *out, int64_t out_stride, const uint16_t *a, int64_t a_stride, const uint32_t *b,
                         int64_t b_stride, int64_t depth, int add) {
    float *below = out + 16 * out_stride;
    if (add) {
        _tile_loadd(0, out, out_stride * 4);
        _tile_loadd(1, out + 16, out_stride * 4);
        _tile_loadd(2, below, out_stride * 4);
        _tile_loadd(3, below + 16, out_stride * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += 32) {
        _tile_loadd(4, a + k, a_stride * 2);
        _tile_loadd(5, a + 16 * a_stride + k, a_stride * 2);
        _tile_loadd(6, b + k / 2 * b_stride, b_stride * 4);
        _tile_loadd(7, b + k / 2 * b_stride + 16, b_stride * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, out_stride * 4);
    _tile_stored(1, out + 16, out_stride * 4);
    _tile_stored(2, below, out_stride * 4);
    _tile_stored(3, below + 16, out_stride * 4);
}

/* to[i] = the pair (a[i], b[i]), for 16 pairs of bf16 */
INLINE void interleave(uint32_t *to, const uint16_t *a, const uint16_t *b) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)a));
    __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)b));
    _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
#endif
#endif
