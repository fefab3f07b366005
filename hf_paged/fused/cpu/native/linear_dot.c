/* Linear layers in bf16 with the dot products of AVX-512, for CPUs without a matrix unit. */
#include "common.h"
#if HAS_DPBF16
#include "linear.h"

#define ROWS 12     /* rows whose sums with a panel fit into the vector registers */

/* A panel that is used once is prefetched just in time: for up to NEAR_ROWS rows, which compute less than the memory
 * delivers, to L1 and all lines of a step at once, else to L2. More rows prefetch beside each pair, because the loads of
 * their products would wait for so many lines, and more than FAR_ROWS to L1 again. (Zen 4 reads 1.4 to 1.6 times as fast
 * that way, if what is read is loaded to a register first, and if a single row is computed twice.) */
#define NEAR_ROWS 4
#define FAR_ROWS 18
#define NEAR 4096 /* bytes ahead of the products */
#define FAR 8192
#define KEEP(x) __asm__("" : "+v"(x)) /* in a register: the compiler would make it an operand in memory */

/* Sums are computed in parts of this depth, which are added in order. oneDNN does the same (as of torch 2.13, for more
 * than one row), so torch's own linear layers give the same bits there. */
INLINE int64_t depth_of_part(int64_t depth) { return depth > 1024 ? 1024 : 512; }

/* Two consecutive elements of a row, of which the second one is zero beyond the row's end. */
INLINE __m512i pair_at(const uint16_t *x, int64_t left) {
    uint32_t pair = 0;
    memcpy(&pair, x, left > 1 ? 4 : 2);
    return _mm512_set1_epi32((int)pair);
}

/* 16 pairs of elements of a panel, of `size` bytes each: bf16 or int8. */
INLINE __m512bh pairs_at(const char *panel, const int size) {
    if (size == 2) return (__m512bh)_mm512_load_si512(panel);
    return (__m512bh)int8_as_bf16(_mm256_load_si256((const __m256i *)(const void *)panel));
}

typedef struct {
    const char *next; /* address */
    int64_t lines;    /* cache lines for each step */
    int far;          /* of a share: to L2 only */
} Prefetch;

/* Prefetches the lines of a step, or its share beside one of 16 pairs. */
INLINE void prefetch_step(Prefetch *p) {
    for (int64_t i = 0; i < p->lines; i++, p->next += 64) _mm_prefetch(p->next, _MM_HINT_T0);
}
INLINE void prefetch_share(Prefetch *p, int64_t pair) {
    for (int64_t i = pair; i < p->lines; i += 16, p->next += 64)
        if (p->far)
            _mm_prefetch(p->next, _MM_HINT_T1);
        else
            _mm_prefetch(p->next, _MM_HINT_T0);
}

/* Adds the products of `pairs` pairs of elements, of at most one step, to the sums of n rows, which are `row` elements
 * apart. `left`: elements of each row from x on. copy: where the panel is written in bf16, or NULL. */
INLINE void add_products(__m512 (*sums)[2], const uint16_t *x, int64_t row, int64_t left, const char *panel,
                         int64_t pairs, char *copy, Prefetch *prefetch, const int n, const int size) {
#pragma GCC unroll 2
    for (int64_t i = 0; i < pairs; i++, panel += 32 * size) {
        __m512bh low = pairs_at(panel, size), high = pairs_at(panel + 512 * size, size);
        KEEP(low);
        KEEP(high);
        if (n > NEAR_ROWS) prefetch_share(prefetch, i);
        if (copy) {
            _mm512_store_si512(copy + i * 64, (__m512i)low);
            _mm512_store_si512(copy + i * 64 + 1024, (__m512i)high);
        }
#pragma GCC unroll 12
        for (int r = 0; r < n; r++) {
            const __m512bh pair = (__m512bh)pair_at(x + r * row + 2 * i, left - 2 * i);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], pair, low);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], pair, high);
        }
    }
}

/* x: n rows, `row` elements apart. out: their sums with a panel, [n, PANEL] */
INLINE void sum_rows_with(const uint16_t *x, int64_t row, int64_t depth, const char *panel, char *copy, float *out,
                          Prefetch *prefetch, const int n, const int size) {
    const int64_t part = depth_of_part(depth);
    for (int64_t begin = 0; begin < depth; begin += part) {
        const int64_t end = begin + part < depth ? begin + part : depth;
        __m512 sums[ROWS][2];
#pragma GCC unroll 12
        for (int r = 0; r < n; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
        int64_t k = begin;
        for (; k + 32 <= end; k += 32, panel += 1024 * size) {
            if (n <= NEAR_ROWS) prefetch_step(prefetch);
            add_products(sums, x + k, row, 32, panel, 16, copy, prefetch, n, size);
            if (copy) copy += 2048;
        }
        if (k < end) add_products(sums, x + k, row, end - k, panel, (end - k + 1) / 2, copy, prefetch, n, size);
#pragma GCC unroll 12
        for (int r = 0; r < n; r++) {
            float *at = out + r * PANEL;
            if (begin) {
                sums[r][0] = _mm512_add_ps(_mm512_load_ps(at), sums[r][0]);
                sums[r][1] = _mm512_add_ps(_mm512_load_ps(at + 16), sums[r][1]);
            }
            _mm512_store_ps(at, sums[r][0]);
            _mm512_store_ps(at + 16, sums[r][1]);
        }
    }
}

#define CASE(n) \
    case n: sum_rows_with(x, row, depth, panel, copy, out, prefetch, n, size); break;

INLINE void sums_of_rows(const uint16_t *x, int64_t rows, int64_t depth, const char *panel, char *copy, float *out,
                         Prefetch *prefetch, const int size) {
    const int64_t row = rows > 1 ? depth : 0;
    switch (rows) {
        case 1:
        CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
}

static void sums_with_bf16(const uint16_t *x, int64_t rows, int64_t depth, const char *panel, float *out,
                           Prefetch *prefetch) {
    sums_of_rows(x, rows, depth, panel, NULL, out, prefetch, 2);
}

static void sums_with_int8(const uint16_t *x, int64_t rows, int64_t depth, const char *panel, float *out,
                           Prefetch *prefetch) {
    sums_of_rows(x, rows, depth, panel, NULL, out, prefetch, 1);
}

static void sums_and_copy(const uint16_t *x, int64_t rows, int64_t depth, const char *panel, char *copy, float *out,
                          Prefetch *prefetch) {
    sums_of_rows(x, rows, depth, panel, copy, out, prefetch, 1);
}

static void dot_panels(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Linear l = *(const Linear *)arguments;
    const int64_t size = round_up(l.depth, 32) * PANEL, blocks = (l.rows + ROWS - 1) / ROWS;
    /* With more than one block of rows, each use of a packed panel prefetches a part of the next one. (If the weight is
     * not packed, packing prefetches it.) */
    const int is_int8 = l.packed && l.scales;
    const int64_t step = is_int8 ? 16 : 32; /* cache lines */
    const int64_t lines = is_int8 || linear_in_place(&l) ? (step - 1 + blocks) / blocks : 0;
    const int64_t ahead = blocks > 1 ? size * step / 16 : l.rows > NEAR_ROWS ? FAR : NEAR;
    float sums[ROWS * PANEL] __attribute__((aligned(64)));
    uint16_t *buffer = linear_buffer(&l, thread);
    for (int64_t p = first; p < last; p++) {
        const char *panel = (const char *)l.weight + p * size;
        if (!is_int8) panel = (const char *)linear_panel(&l, p, buffer);
        Prefetch prefetch = {panel + ahead, lines, l.rows <= FAR_ROWS};
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t row = l.rows * b / blocks, rows = l.rows * (b + 1) / blocks - row;
            const uint16_t *x = l.x + row * l.depth;
            /* Packed int8 is converted in registers, beside the products; for further blocks also in the buffer. */
            if (!is_int8)
                sums_with_bf16(x, rows, l.depth, panel, sums, &prefetch);
            else if (blocks == 1)
                sums_with_int8(x, rows, l.depth, panel, sums, &prefetch);
            else if (!b)
                sums_and_copy(x, rows, l.depth, panel, (char *)buffer, sums, &prefetch);
            else
                sums_with_bf16(x, rows, l.depth, (const char *)buffer, sums, &prefetch);
            linear_store(&l, row, rows, p, sums);
        }
    }
}

void linear_dot(const Linear *call) {
    in_parallel(dot_panels, call, round_up(call->columns, PANEL) / PANEL, call->threads, IN_SHARES);
}
#endif
