/* Linear layers in bf16. A decode step reads every weight once and computes little with it, so the memory bandwidth
 * limits it: packed weights are stored in the order in which the kernels read them. Of a weight that is not packed, each
 * thread packs the panel that it needs next.
 *
 * A packed weight: [columns / PANEL, depth / 32, 2, 16 pairs of elements, 16 columns, 2], padded with zeros. */
#include "linear.h"
#if HAS_DPBF16
#if defined(__linux__)
#include <sys/mman.h>
#endif

HFP_EXPORT int64_t hfp_packed_bytes(int64_t columns, int64_t depth) {
    return round_up(columns, PANEL) * round_up(depth, 32) * 2;
}

/* Bytes of workspace, aligned to 64, for hfp_linear: a panel for each thread, and rows for linear_amx. */
HFP_EXPORT int64_t hfp_linear_workspace(int64_t rows, int64_t depth, int64_t threads) {
    return (PANEL * threads + (depth % 32 ? round_up(rows, 16) : 16)) * round_up(depth, 32) * 2;
}

/* Request large pages for `bytes` at `at` (page-aligned, not yet written), so that streaming needs fewer address
 * translations. */
HFP_EXPORT void hfp_prefer_large_pages(void *at, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    madvise(at, (size_t)bytes, MADV_HUGEPAGE);
#else
    (void)at, (void)bytes;
#endif
}

/* Transposes 16 x 16 pairs of elements. */
INLINE void transpose_pairs(__m512i *rows) {
    __m512i a[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            rows[i + 2 * half] = _mm512_unpacklo_epi64(a[i + half], a[i + half + 2]);
            rows[i + 2 * half + 1] = _mm512_unpackhi_epi64(a[i + half], a[i + half + 2]);
        }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        rows[i + 4] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
        rows[i + 12] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd);
    }
}

/* Packs 16 columns of one step. weight: their first element; `columns` and `left` of them exist, the others are zero. */
INLINE void pack_tile(const uint16_t *weight, int64_t depth, int64_t columns, int64_t left, uint16_t *to) {
    const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1;
    __m512i rows[16];
#pragma GCC unroll 16
    for (int c = 0; c < 16; c++)
        rows[c] = c < columns ? _mm512_maskz_loadu_epi16(mask, weight + c * depth) : _mm512_setzero_si512();
    transpose_pairs(rows);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * 32, rows[i]);
}

/* Packs a panel of a weight [columns, depth], and prefetches the next one to L2. */
void linear_pack_panel(const uint16_t *weight, int64_t columns, int64_t depth, int64_t panel, uint16_t *to) {
    const uint16_t *from = weight + panel * PANEL * depth;
    const int64_t own = columns - panel * PANEL;
    const char *next = (const char *)(from + PANEL * depth);
    for (int64_t k = 0; k < depth; k += 32, to += 1024) {
        for (int i = 0; i < 32; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
        const int64_t left = depth - k;
        if (left >= 32 && own >= PANEL) {
            pack_tile(from + k, depth, 16, 32, to);
            pack_tile(from + 16 * depth + k, depth, 16, 32, to + 512);
        } else {
            pack_tile(from + k, depth, own, left, to);
            pack_tile(from + 16 * depth + k, depth, own - 16, left, to + 512);
        }
    }
}

/* weight: [columns, depth], contiguous */
HFP_EXPORT void hfp_pack_linear(const uint16_t *weight, int64_t columns, int64_t depth, uint16_t *to, int64_t threads) {
    const int64_t size = round_up(depth, 32) * PANEL, panels = round_up(columns, PANEL) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < panels; panel++)
        linear_pack_panel(weight, columns, depth, panel, to + panel * size);
}

/* out = x x weight + bias, rounded to bf16 once. The sums of a row do not depend on the other rows, on the threads or
 * on whether the weight is packed. */
HFP_EXPORT void hfp_linear(const Linear *call) {
    if (!call->rows) return;
#if HAS_AMX
    if (amx_allowed()) {
        linear_amx(call);
        return;
    }
#endif
    linear_dot(call);
}
#endif
