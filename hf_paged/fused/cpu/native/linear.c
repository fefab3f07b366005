/* Linear layers in bf16, of weights in bf16 or int8. A decode step reads every weight once and computes little with it, so the memory bandwidth
 * limits it: packed weights are stored in the order in which the kernels read them. Of a weight that is not packed, each
 * thread packs the panel that it needs next.
 *
 * A packed weight: [columns / PANEL, depth / 32, 2, 16 pairs of elements, 16 columns, 2], padded with zeros. Its elements
 * are the weight's; int8 is converted to bf16, which is exact, where it is used. */
#include "common.h"
#if HAS_DPBF16
#include "linear.h"

/* size: bytes of an element */
HFP_EXPORT int64_t hfp_packed_bytes(int64_t columns, int64_t depth, int64_t size) {
    return round_up(columns, PANEL) * round_up(depth, 32) * size;
}

/* Bytes of workspace, aligned to 64, for hfp_linear: a panel for each thread, and rows for linear_amx. */
HFP_EXPORT int64_t hfp_linear_workspace(int64_t rows, int64_t depth, int64_t threads) {
    const int64_t of_groups = hfp_groups_workspace(rows, depth);
    const int64_t bytes = (PANEL * threads + (depth % 32 ? round_up(rows, 16) : 16)) * round_up(depth, 32) * 2;
    return bytes > of_groups ? bytes : of_groups;
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

/* What is packed: bf16, int8, or int8 that is converted to bf16. */
enum { BF16, INT8_KEPT, INT8_AS_BF16 };
#define SIZE_FROM(kind) ((kind) == BF16 ? 2 : 1)
#define SIZE_TO(kind) ((kind) == INT8_KEPT ? 1 : 2)

/* Packs 16 columns of one step. weight: their first element; `columns` and `left` of them exist, the others are zero. */
INLINE void pack_tile(const char *weight, int64_t depth, int64_t columns, int64_t left, char *to, const int kind) {
    const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1;
    __m512i rows[16];
#pragma GCC unroll 16
    for (int c = 0; c < 16; c++) {
        const char *from = weight + c * depth * SIZE_FROM(kind);
        if (c >= columns)
            rows[c] = _mm512_setzero_si512();
        else if (kind == BF16)
            rows[c] = _mm512_maskz_loadu_epi16(mask, from);
        else
            rows[c] = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, from));
    }
    transpose_pairs(rows);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        char *at = to + i * 32 * SIZE_TO(kind);
        if (kind == INT8_KEPT)
            _mm256_store_si256((__m256i *)(void *)at, _mm512_cvtepi16_epi8(rows[i]));
        else
            _mm512_store_si512(at, kind == BF16 ? rows[i] : int8_as_bf16(_mm512_cvtepi16_epi8(rows[i])));
    }
}

/* Packs a panel of a weight [columns, depth], and prefetches the next one to L2. */
INLINE void pack_panel(const char *weight, int64_t columns, int64_t depth, int64_t panel, char *to, const int kind) {
    const int64_t from_size = SIZE_FROM(kind), to_size = SIZE_TO(kind), own = columns - panel * PANEL;
    const char *from = weight + panel * PANEL * depth * from_size, *next = from + PANEL * depth * from_size;
    for (int64_t k = 0; k < depth; k += 32, to += 1024 * to_size) {
        for (int i = 0; i < 16 * from_size; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
        const char *low = from + k * from_size, *high = low + 16 * depth * from_size;
        const int64_t left = depth - k;
        if (left >= 32 && own >= PANEL) {
            pack_tile(low, depth, 16, 32, to, kind);
            pack_tile(high, depth, 16, 32, to + 512 * to_size, kind);
        } else {
            pack_tile(low, depth, own, left, to, kind);
            pack_tile(high, depth, own - 16, left, to + 512 * to_size, kind);
        }
    }
}

/* Converts a packed panel of int8 to bf16, and prefetches the next one to L2. */
static void convert_panel(const char *panel, int64_t depth, char *to) {
    const int64_t size = round_up(depth, 32) * PANEL;
    for (int64_t i = 0; i < size; i += 64) {
        _mm_prefetch(panel + size + i, _MM_HINT_T1);
        _mm512_store_si512(to + 2 * i, int8_as_bf16(_mm256_load_si256((const __m256i *)(const void *)(panel + i))));
        _mm512_store_si512(to + 2 * i + 64,
                           int8_as_bf16(_mm256_load_si256((const __m256i *)(const void *)(panel + i + 32))));
    }
}

void linear_to_buffer(const Linear *l, int64_t panel, uint16_t *buffer) {
    const char *weight = (const char *)l->weight;
    char *to = (char *)buffer;
    if (!l->scales)
        pack_panel(weight, l->columns, l->depth, panel, to, BF16);
    else if (l->packed)
        convert_panel(weight + panel * round_up(l->depth, 32) * PANEL, l->depth, to);
    else
        pack_panel(weight, l->columns, l->depth, panel, to, INT8_AS_BF16);
}

typedef struct {
    const char *weight;
    int64_t columns, depth, size;
    char *to;
} Packing;

static void pack_panels(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Packing p = *(const Packing *)arguments;
    const int64_t bytes = round_up(p.depth, 32) * PANEL * p.size;
    (void)thread;
    for (int64_t panel = first; panel < last; panel++)
        if (p.size == 2)
            pack_panel(p.weight, p.columns, p.depth, panel, p.to + panel * bytes, BF16);
        else
            pack_panel(p.weight, p.columns, p.depth, panel, p.to + panel * bytes, INT8_KEPT);
}

/* weight: [columns, depth], contiguous; size: bytes of its elements, 2 for bf16, 1 for int8 */
HFP_EXPORT void hfp_pack_linear(const char *weight, int64_t columns, int64_t depth, int64_t size, char *to,
                                int64_t threads) {
    const Packing packing = {weight, columns, depth, size, to};
    in_parallel(pack_panels, &packing, round_up(columns, PANEL) / PANEL, threads, IN_SHARES);
}

/* out = x x weight + bias, rounded to bf16 once. The sums of a row do not depend on the other rows, on the threads or
 * on whether the weight is packed, unless it is PACKED_ROUGH. */
HFP_EXPORT void hfp_linear(const Linear *call) {
    if (!call->rows) return;
    if (call->packed >= PACKED_GROUPS) {
        hfp_linear_groups(call, 1, 1);
        return;
    }
    if (call->packed == PACKED_ROUGH && call->scales && call->rows <= ROUGH_ROWS && call->depth % 32 == 0) {
        linear_rough(call);
        return;
    }
#if HAS_AMX
    if (amx_allowed()) {
        linear_amx(call);
        return;
    }
#endif
    linear_dot(call);
}
#endif
