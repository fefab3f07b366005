/* Linear layers in bf16 with packed weights. A decode step reads every weight once and computes little with it, so the
 * memory bandwidth limits it: packed weights are stored in the order in which the kernels read them.
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

/* Bytes of workspace, aligned to 64, for hfp_linear. */
HFP_EXPORT int64_t hfp_linear_workspace(int64_t rows, int64_t depth) {
    return (depth % 32 ? round_up(rows, 16) : 16) * round_up(depth, 32) * 2;
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

/* weight: [columns, depth], contiguous */
HFP_EXPORT void hfp_pack_linear(const uint16_t *weight, int64_t columns, int64_t depth, uint16_t *to, int64_t threads) {
    const int64_t steps = round_up(depth, 32) / 32;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < round_up(columns, PANEL) / PANEL; panel++)
        for (int64_t step = 0; step < steps; step++)
            for (int64_t c = 0; c < PANEL; c++) {
                uint16_t *tile = to + ((panel * steps + step) * 2 + c / 16) * 512 + c % 16 * 2;
                const int64_t column = panel * PANEL + c;
                for (int64_t i = 0; i < 32; i++) {
                    const int64_t k = step * 32 + i;
                    tile[i / 2 * 32 + i % 2] = column < columns && k < depth ? weight[column * depth + k] : 0;
                }
            }
}

/* out = x x weight + bias, rounded to bf16 once. The sums of a row do not depend on the other rows or on the threads. */
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
