/* Rows in 8 bits times codes in groups (groups.c), where a CPU multiplies bytes: AVX-512 VNNI, or, with codes of 4 bits,
 * AVX2 and AVX-512. The codes are the unsigned factors, so that nothing must be corrected.
 *
 * A tile of rows is laid out as it is read: [groups, quads of a group, rows of the tile, 4], each quad as the codes that a
 * mask leaves of a line; beside it [groups, 2, rows of the tile], the units and the sums of the elements. */
#include "groups.h"

#if W == 16 && defined(__AVX512VNNI__)
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif
#if W >= 8

/* Rows whose sums with a panel, in 32 bits and in fp32, fit into the registers (without VNNI, those in 16 bits and in
 * fp32; with AVX2, those in 16 bits). */
#define TALL (HAS_VNNI ? 12 : W == 16 ? 8 : 6)
/* So many rows in 8 bits take no more memory than those that groups.c rounds together. */
#define TOGETHER 192
#define LINES 4 /* of 64 bytes, whose products with 4 bits of a code fit into 16 bits: 16 * 15 * 127 < 2^15 */

INLINE int64_t tiles_of(const Groups *g) { return (g->rows + TALL - 1) / TALL; }
INLINE int64_t row_of_tile(const Groups *g, int64_t tile) { return g->rows * tile / tiles_of(g); }

/* The codes at bits `at` of each byte. */
INLINE vi codes_at(vi line, int at, const int bits) {
    typedef uint16_t halves __attribute__((vector_size(W * 4)));
    return bits == 8 ? line : (vi)((halves)line >> (uint16_t)at) & 0x0f0f0f0f;
}

/* Adds the products of four neighbouring elements of the depth: in 32 bits, or else those of two in 16 bits. */
INLINE vi add_quads(vi sum, vi codes, const int8_t *x) {
    int32_t quad;
    memcpy(&quad, x, sizeof quad);
#if HAS_VNNI
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(quad));
#elif W == 16
    return (vi)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(quad)));
#else
    sum = (vi)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(quad)));
    KEEP(sum); /* else the compiler adds several products later, for which there are no registers */
    return sum;
#endif
}

/* Sums of 32 bits of those of two in 16 bits. */
INLINE vi widened(vi sum) {
#if HAS_VNNI
    return sum;
#elif W == 16
    return (vi)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
#else
    return (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#endif
}

/* sums: [n, COLUMNS], of a tile of n rows with a panel. reads_ahead: whether the panel comes from the memory. */
INLINE void tile_sums(const Groups *g, const char *panel, const int8_t *x, const float *factors, float *sums,
                      int reads_ahead, const int n, const int bits, const int64_t group) {
    const int64_t blocks = group * bits / (32 * LINES);
    const char *head = panel;
    vf totals[TALL][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < n; r++)
        for (int v = 0; v < VECTORS; v++) totals[r][v] = (vf){0};
    for (int64_t i = 0; i < g->groups; i++, factors += 2 * n) {
        const int64_t at = g->nested ? i & (g->nested - 1) : 0;
        if (!at) {
            head = panel;
            panel += g->nested ? HEAD + NESTED : HEAD;
            for (int64_t k = 0; k < NESTED && g->nested && reads_ahead; k += 64)
                __builtin_prefetch(panel - k + FAR, 0, 3);
        }
        for (int64_t k = 0; k <= blocks * LINES && reads_ahead; k++) __builtin_prefetch(panel + FAR + 64 * k, 0, 3);
        vi own[TALL][VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < n; r++)
            for (int v = 0; v < VECTORS; v++) own[r][v] = (vi){0};
        for (int64_t b = 0; b < blocks; b++) {
            vi some[TALL][VECTORS];
#pragma GCC unroll 12
            for (int r = 0; r < n; r++)
                for (int v = 0; v < VECTORS; v++) some[r][v] = HAS_VNNI ? own[r][v] : (vi){0};
#pragma GCC unroll 4
            for (int k = 0; k < LINES; k++, panel += 64) {
                vi line[VECTORS];
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) memcpy(line + v, panel + v * 4 * W, sizeof *line);
#pragma GCC unroll 2
                for (int j = 0; j < 8 / bits; j++, x += 4 * n) {
                    vi codes[VECTORS];
#pragma GCC unroll 2
                    for (int v = 0; v < VECTORS; v++) codes[v] = codes_at(line[v], j * bits, bits);
#pragma GCC unroll 12
                    for (int r = 0; r < n; r++)
#pragma GCC unroll 2
                        for (int v = 0; v < VECTORS; v++) some[r][v] = add_quads(some[r][v], codes[v], x + 4 * r);
                }
            }
#pragma GCC unroll 12
            for (int r = 0; r < n; r++)
                for (int v = 0; v < VECTORS; v++)
                    own[r][v] = HAS_VNNI ? some[r][v] : own[r][v] + widened(some[r][v]);
        }
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            vf least;
            const vf scale = scale_and_least(g, head, at, v, &least);
#pragma GCC unroll 12
            for (int r = 0; r < n; r++) {
                const vf value = as_floats(own[r][v]) * splat(factors[r]);
                totals[r][v] = multiply_add(value, scale, multiply_add(least, splat(factors[n + r]), totals[r][v]));
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < n; r++)
        for (int v = 0; v < VECTORS; v++) store_f32(sums + r * COLUMNS + v * W, totals[r][v]);
}

/* The compiler unrolls the loops over groups of 32. */
#define CASE(n) \
    case n: \
        if (n <= TALL && g->group == 32) tile_sums(g, panel, x, factors, sums, reads_ahead, n <= TALL ? n : 1, bits, 32); \
        if (n <= TALL && g->group != 32) tile_sums(g, panel, x, factors, sums, reads_ahead, n <= TALL ? n : 1, bits, g->group); \
        break;

/* A function for each number of bits: the compiler's time grows with the square of a function's size. */
#define TILES(bits_) \
    NOINLINE void tile_##bits_(const Groups *g, const char *panel, int64_t row, int64_t rows, float *sums) { \
        enum { bits = bits_ }; \
        const int8_t *x = (const int8_t *)g->x + row * g->groups * g->group; \
        const float *factors = g->factors + row * g->groups * 2; \
        const int reads_ahead = !row; \
        switch (rows) { \
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) \
        } \
    }
TILES(4)
#if HAS_VNNI
TILES(8)
#else
#define tile_8 tile_4 /* which is not called */
#endif

static void byte_panels(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Groups *g = arguments;
    const int64_t bytes = panel_bytes(g), tiles = tiles_of(g);
    float sums[TOGETHER * COLUMNS] __attribute__((aligned(64)));
    (void)thread;
    for (int64_t p = first; p < last; p++) {
        const char *panel = (const char *)g->linear->weight + p * bytes;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = row_of_tile(g, t);
            (g->bits == 4 ? tile_4 : tile_8)(g, panel, row, row_of_tile(g, t + 1) - row, sums + row * COLUMNS);
        }
        store_panel(g, sums, p);
    }
}

/* Rounds 16 elements of 32 bits to integers, and each to a byte. */
INLINE __m128i to_bytes(const float *x, float inverse) {
#if W == 16
    return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_loadu_ps(x) * inverse));
#else
    const __m256i low = _mm256_cvtps_epi32(_mm256_loadu_ps(x) * inverse);
    const __m256i high = _mm256_cvtps_epi32(_mm256_loadu_ps(x + 8) * inverse);
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    return _mm_packs_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
#endif
}

/* The largest magnitude of `group` elements; NaN or infinite if one of them is. */
INLINE float largest_of(const float *x, int64_t group) {
#if W == 16
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < group; i += W) most = _mm512_max_epi32(most, (__m512i)((vi)load_f32(x + i) & 0x7fffffff));
    const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
#else
    __m256i half = _mm256_setzero_si256();
    for (int64_t i = 0; i < group; i += W) half = _mm256_max_epi32(half, (__m256i)((vi)load_f32(x + i) & 0x7fffffff));
#endif
    __m128i all = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    all = _mm_max_epi32(all, _mm_shuffle_epi32(all, 0x4e));
    all = _mm_max_epi32(all, _mm_shuffle_epi32(all, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(all));
}

/* Rounds a group. x: its elements in fp32. to, factors: in a tile of n rows. */
INLINE void round_bytes(const float *x, int64_t group, int64_t bits, int8_t *to, float *factors, int64_t n) {
    const float largest = largest_of(x, group), inverse = byte_inverse(largest);
    const __m128i order = bits == 4 ? _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)
                                    : _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    __m128i sums = _mm_setzero_si128();
    for (int64_t i = 0; i < group; i += 16) {
        const __m128i bytes = to_bytes(x + i, inverse);
        sums = _mm_add_epi64(sums, _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128()));
        int32_t quads[4];
        _mm_storeu_si128((__m128i *)(void *)quads, _mm_shuffle_epi8(bytes, order));
        for (int j = 0; j < 4; j++) memcpy(to + (i + 4 * j) * n, quads + j, 4);
    }
    const int64_t sum = _mm_cvtsi128_si64(sums) + _mm_extract_epi64(sums, 1) - 128 * group;
    factors[0] = byte_unit(largest);
    factors[n] = factors[0] * (float)sum;
}

/* A group in fp32 of which `left` elements exist. */
static void widen_group(const char *from, int64_t left, int64_t group, int dtype, float *to) {
    const int64_t size = dtype == F32 ? 4 : 2;
    for (int64_t j = 0; j < group; j += W) {
        if (dtype == F32) store_f32(to + j, load_of(from + j * size, left - j, F32));
        if (dtype == BF16) store_f32(to + j, load_of(from + j * size, left - j, BF16));
        if (dtype == F16) store_f32(to + j, load_of(from + j * size, left - j, F16));
    }
}

static void byte_rows(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Groups g = *(const Groups *)arguments;
    const int64_t depth = g.linear->depth, size = g.dtype == F32 ? 4 : 2, tiles = tiles_of(&g);
    (void)thread;
    for (int64_t r = first; r < last; r++) {
        const int64_t tile = ((r + 1) * tiles - 1) / g.rows, row = row_of_tile(&g, tile), n = row_of_tile(&g, tile + 1) - row;
        const char *from = (const char *)g.linear->x + (g.row + r) * depth * size;
        int8_t *to = (int8_t *)g.x + row * g.groups * g.group + 4 * (r - row);
        float *factors = g.factors + 2 * row * g.groups + r - row, wide[LONGEST];
        for (int64_t left = depth; left > 0; left -= g.group, from += g.group * size, to += g.group * n, factors += 2 * n) {
            const int is_plain = g.dtype == F32 && left >= g.group;
            if (!is_plain) widen_group(from, left, g.group, g.dtype, wide);
            round_bytes(is_plain ? (const float *)(const void *)from : wide, g.group, g.bits, to, factors, n);
        }
    }
}
#endif

/* Groups of 16 codes of 4 bits are less than LINES. */
int hfp_has_bytes(int64_t bits, int64_t group) { return group * bits >= 128 && (HAS_VNNI || (W >= 8 && bits == 4)); }

void hfp_linear_bytes(Groups g) {
#if W >= 8
    const Linear *l = g.linear;
    const int64_t turns = (l->rows + TOGETHER - 1) / TOGETHER;
    for (int64_t i = 0; i < turns; i++) {
        g.row = l->rows * i / turns, g.rows = l->rows * (i + 1) / turns - g.row;
        g.x = (int16_t *)(void *)l->workspace;
        g.factors = (float *)(void *)(l->workspace + g.rows * g.groups * g.group);
        in_parallel(byte_rows, &g, g.rows, g.rows * l->depth >= FORK_ELEMENTS ? l->threads : 1, IN_SHARES);
        in_parallel(byte_panels, &g, (l->columns + COLUMNS - 1) / COLUMNS, l->threads, IN_SHARES);
    }
#endif
}
