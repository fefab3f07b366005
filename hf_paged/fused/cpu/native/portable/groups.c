/* Linear layers whose weights are codes of 4 or 8 bits in groups of the depth, each with a scale and a least value:
 * weight = code * scale + least. For rows in fp32, bf16 and fp16.
 *
 * A weight: panels of 16 columns; a panel has for each group 16 scales and 16 least values in fp16, then lines of 64
 * bytes, 16 columns by 8 elements of the depth (of 4 bits) or 4 (of 8). The 32 bits of a column in a line: element
 * 2 * j + h is at bit 16 * h + bits * j. Columns and depth are padded with codes 0.
 *
 * Nested groups, 256 elements of the depth together, have factors of those values in int8, as GGUF's K formats do: of 8
 * groups, 16 for the scales and 16 for the least values of each; of 16 groups, 16 for the scales of each, of which the
 * least values are -32 times. They follow the values in fp16, before the lines of all these groups.
 *
 * Or a group has scales and the codes of zero, as GPTQ and AWQ do: weight = (code - zero) * scale.
 *
 * The rows are rounded to integers of 15 bits, in units of each group's own; in fp32, what is left of them once more,
 * so that nothing within 2^-28 of a group's largest element is lost. The sums of a group are exact, and those of the
 * groups are added in order, in fp32: a row's bits do not depend on the other rows or on the threads. Code by code,
 * a product costs no conversion to floats, which would take longer than reading the weight. */
#define ELEMENT uint16_t
#define NAME(name) name
#include "elements.h"
#include "eight.h"

#define COLUMNS 16
#define VECTORS (COLUMNS / W)
#define HEAD 64        /* bytes of the scales and least values of a group */
#define NESTED 256     /* elements of the depth in nested groups, and bytes of their factors */
#define SHORTEST 16    /* group */
#define LONGEST 128    /* group */
#define ROWS (W == 16 ? 8 : 4) /* whose sums with a vector of columns fit into the registers */
#define FAR 6144       /* bytes ahead of the products that are prefetched, from the memory */
#define TOGETHER 64    /* rows, so that they stay in the L2 cache: with more of them, products take longer than reading */

enum { F32, BF16, F16 };
enum { PLAIN, NESTED_HEADS, ZEROS }; /* heads */

typedef struct {
    const Linear *linear;
    int dtype;
    int64_t bits, group, groups, parts; /* parts: of the rows, 2 in fp32 */
    int64_t nested, heads;              /* nested: groups that are nested together, or 0 */
    int64_t row, rows;                  /* those that are computed together */
    int16_t *x;                         /* [rows, groups, parts, group] */
    float *factors;                     /* [rows, groups, 2]: a group's unit, and the sum of its elements */
} Groups;

INLINE vf load_half(const void *p) {
#if HAS_F16
    return load_f16(p);
#else
    vh h;
    memcpy(&h, p, sizeof h);
    const vu wide = __builtin_convertvector(h, vu);
    const vf size = (vf)((wide & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)size | (wide & 0x8000) << 16);
#endif
}

/* Adds the products of two neighbouring elements of the depth, 16 bits each. */
INLINE vi add_pairs(vi sum, const int16_t *x, vi codes) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
#if W == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(pair));
#elif W == 16
    return sum + (vi)_mm512_madd_epi16((__m512i)codes, _mm512_set1_epi32(pair));
#elif W == 8
    return sum + (vi)_mm256_madd_epi16((__m256i)codes, _mm256_set1_epi32(pair));
#elif defined(__SSE2__)
    return sum + (vi)_mm_madd_epi16((__m128i)codes, _mm_set1_epi32(pair));
#else
    return sum + (codes & 0xffff) * (int32_t)x[0] + (codes >> 16) * (int32_t)x[1];
#endif
}

/* Codes j of both halves of a column's 32 bits. */
INLINE vi codes_at(vi line, int j, const int bits) {
    typedef uint16_t halves __attribute__((vector_size(W * 4)));
    return (vi)((halves)line >> (uint16_t)(bits * j)) & (bits == 4 ? 0x000f000f : 0x00ff00ff);
}

INLINE vf as_floats(vi x) { return __builtin_convertvector(x, vf); }

/* The scale and the least value of a group for a vector of columns. head: of the group, or of those nested with it, of
 * which it is group number `at`. */
INLINE vf scale_and_least(const Groups *g, const char *head, int64_t at, int v, vf *least) {
    const vf scale = load_half(head + v * 2 * W);
    *least = load_half(head + HEAD / 2 + v * 2 * W);
    if (g->heads == ZEROS) *least *= -scale;
    if (g->heads != NESTED_HEADS) return scale;
    const char *factors = head + HEAD + at * (NESTED / g->nested) + v * W;
    const vf own = scale * load_int8(factors);
    *least = g->nested == NESTED / SHORTEST ? own * -32.0f : *least * load_int8(factors + COLUMNS);
    return own;
}

/* sums: [n, COLUMNS], of n rows with a panel. */
INLINE void panel_rows(const Groups *g, const char *panel, int64_t row, float *sums, const int n, const int bits,
                       const int parts) {
    const int64_t x_row = g->groups * parts * g->group, factors_row = 2 * g->groups;
    const int64_t lines = g->group * bits / 32;
    const int16_t *x = g->x + row * x_row;
    const float *factors = g->factors + row * factors_row;
    vf totals[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < n; r++)
        for (int v = 0; v < VECTORS; v++) totals[r][v] = (vf){0};
    const char *head = panel;
    for (int64_t i = 0; i < g->groups; i++, x += parts * g->group, factors += 2, panel += 64 * lines) {
        const int64_t at = g->nested ? i & (g->nested - 1) : 0;
        if (!at) {
            head = panel;
            panel += g->nested ? HEAD + NESTED : HEAD;
            for (int64_t k = 0; k < NESTED && g->nested && !row; k += 64) __builtin_prefetch(panel - k + FAR, 0, 3);
        }
        for (int64_t k = 0; k <= lines && !row; k++) __builtin_prefetch(panel + FAR + 64 * k, 0, 3);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const char *codes = panel + v * 4 * W;
            vi own[ROWS][2], odd[ROWS][2]; /* of few rows, two sums of each: a product waits for the one before */
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) own[r][0] = own[r][1] = odd[r][0] = odd[r][1] = (vi){0};
            for (int64_t k = 0; k < lines; k++, codes += 64) {
                vi line;
                memcpy(&line, codes, sizeof line);
#pragma GCC unroll 4
                for (int j = 0; j < 16 / bits; j++) {
                    const vi some = codes_at(line, j, bits);
                    const int16_t *at = x + k * (32 / bits) + 2 * j;
#pragma GCC unroll 8
                    for (int r = 0; r < n; r++)
                        for (int p = 0; p < parts; p++) {
                            vi *sum = n <= 2 && j % 2 ? &odd[r][p] : &own[r][p];
                            *sum = add_pairs(*sum, at + r * x_row + p * g->group, some);
                        }
                }
            }
            vf least;
            const vf scale = scale_and_least(g, head, at, v, &least);
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) {
                const float *both = factors + r * factors_row;
                vf value = as_floats(own[r][0] + odd[r][0]);
                if (parts > 1) value = multiply_add(as_floats(own[r][1] + odd[r][1]), splat(0x1p-14f), value);
                const vf total = multiply_add(least, splat(both[1]), totals[r][v]);
                totals[r][v] = multiply_add(value * splat(both[0]), scale, total);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < n; r++)
        for (int v = 0; v < VECTORS; v++) store_f32(sums + r * COLUMNS + v * W, totals[r][v]);
}

#define CASE(n) \
    case n: \
        if (n <= ROWS) panel_rows(g, panel, row, sums, n <= ROWS ? n : 1, bits, parts); \
        break;

/* A function for each kind: the compiler's time grows with the square of a function's size. */
#define KIND(bits_, parts_) \
    NOINLINE void panel_##bits_##_##parts_(const Groups *g, const char *panel, int64_t row, int64_t rows, float *sums) { \
        enum { bits = bits_, parts = parts_ }; \
        switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) } \
    }
KIND(4, 1) KIND(4, 2) KIND(8, 1) KIND(8, 2)

static void panel_sums(const Groups *g, const char *panel, int64_t row, int64_t rows, float *sums) {
    if (g->bits == 4)
        (g->parts == 1 ? panel_4_1 : panel_4_2)(g, panel, row, rows, sums);
    else
        (g->parts == 1 ? panel_8_1 : panel_8_2)(g, panel, row, rows, sums);
}

/* W elements, of which the first n exist. */
INLINE vf load_of(const char *p, int64_t n, const int dtype) {
    char part[4 * W] = {0};
    if (n < W) p = memcpy(part, p, (size_t)((n < 0 ? 0 : n) * (dtype == F32 ? 4 : 2)));
    return dtype == F32 ? load_f32(p) : dtype == BF16 ? load_bf16(p) : load_half(p);
}
INLINE void store_of(char *p, vf x, int64_t n, const int dtype) {
    if (dtype == F32) store_part_f32((float *)(void *)p, x, n);
    if (dtype == BF16) store_part_bf16((uint16_t *)(void *)p, x, n);
#if HAS_F16
    if (dtype == F16) store_part_f16((uint16_t *)(void *)p, x, n);
#endif
}

/* Rounds to integers (below 2^22), which are returned as they are, and stored. */
INLINE vf rounded(vf x, int16_t *to) {
    typedef int16_t narrow __attribute__((vector_size(2 * W)));
    const vf moved = x + 12582912.0f; /* 1.5 * 2^23 */
    const narrow stored = __builtin_convertvector((vi)moved - 0x4b400000, narrow);
    memcpy(to, &stored, sizeof stored);
    return moved - 12582912.0f;
}

/* Rounds `group` elements, of which `left` exist. */
INLINE void round_group(const char *x, int64_t left, int64_t group, int16_t *to, float *factors, const int dtype) {
    const int64_t size = dtype == F32 ? 4 : 2;
    vf wide[LONGEST / W], most = {0}, odd = {0}, sum = {0}, rest = {0};
    for (int64_t i = 0; i < group / W; i++) {
        wide[i] = load_of(x + i * W * size, left - i * W, dtype);
        most = vmax((vf)((vi)wide[i] & 0x7fffffff), most);
        odd += wide[i] * 0.0f;
    }
    const float largest = max_lanes(most);
    uint32_t exponent;
    memcpy(&exponent, &largest, 4);
    exponent = exponent >> 23 & 255;
    /* A power of two, so that multiplying by it is exact. What is below 2^-112 counts as zero. */
    const int is_zero = exponent < 15 || exponent == 255;
    const uint32_t bits = is_zero ? 0 : (exponent - 14) << 23, inverse_bits = is_zero ? 0 : (268 - exponent) << 23;
    float unit, inverse;
    memcpy(&unit, &bits, 4);
    memcpy(&inverse, &inverse_bits, 4);
    for (int64_t i = 0; i < group / W; i++) {
        const vf scaled = wide[i] * inverse;
        if (dtype == F32) {
            const vf first = rounded(choose(scaled > 32767.0f, splat(32767), scaled), to + i * W);
            sum += first;
            rest += rounded((scaled - first) * 0x1p14f, to + group + i * W);
        } else
            sum += rounded(scaled, to + i * W);
    }
    /* Sums of integers, in any order; NaN, if an element is not finite. */
    factors[0] = unit + sum_lanes(odd);
    factors[1] = factors[0] * sum_lanes(sum) + factors[0] * 0x1p-14f * sum_lanes(rest);
}

static void round_rows(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Groups g = *(const Groups *)arguments;
    const int64_t depth = g.linear->depth, size = g.dtype == F32 ? 4 : 2;
    (void)thread;
    for (int64_t i = first; i < last; i++) {
        const int64_t k = i % g.groups * g.group;
        const char *x = (const char *)g.linear->x + ((g.row + i / g.groups) * depth + k) * size;
        int16_t *to = g.x + i * g.parts * g.group;
        if (g.dtype == F32) round_group(x, depth - k, g.group, to, g.factors + 2 * i, F32);
        if (g.dtype == BF16) round_group(x, depth - k, g.group, to, g.factors + 2 * i, BF16);
        if (g.dtype == F16) round_group(x, depth - k, g.group, to, g.factors + 2 * i, F16);
    }
}

static void store_panel(const Groups *g, const float *sums, int64_t row, int64_t rows, int64_t panel) {
    const Linear *l = g->linear;
    const int64_t size = g->dtype == F32 ? 4 : 2;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < COLUMNS; c += W) {
            const int64_t column = panel * COLUMNS + c, left = l->columns - column, n = left < W ? left : W;
            if (n <= 0) break;
            vf total = load_f32(sums + r * COLUMNS + c);
            if (l->bias) total += load_of((const char *)l->bias + column * size, n, g->dtype);
            store_of((char *)l->out + ((g->row + row + r) * l->columns + column) * size, total, n, g->dtype);
        }
}

static void group_panels(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Groups *g = arguments;
    const int64_t heads = g->nested ? g->groups / g->nested * (HEAD + NESTED) : g->groups * HEAD;
    const int64_t bytes = heads + g->groups * 2 * g->group * g->bits, blocks = (g->rows + ROWS - 1) / ROWS;
    float sums[ROWS * COLUMNS] __attribute__((aligned(64)));
    (void)thread;
    for (int64_t p = first; p < last; p++)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t row = g->rows * b / blocks, rows = g->rows * (b + 1) / blocks - row;
            panel_sums(g, (const char *)g->linear->weight + p * bytes, row, rows, sums);
            store_panel(g, sums, row, rows, p);
        }
}

/* Bytes of workspace of hfp_linear for these weights. */
int64_t hfp_groups_workspace(int64_t rows, int64_t depth) {
    const int64_t longest = round_up(depth, LONGEST);
    return (rows < TOGETHER ? rows : TOGETHER) * (longest * 4 + longest / SHORTEST * 8);
}

/* dtype: of the rows. */
void hfp_linear_groups(const void *linear, int dtype) {
    const Linear *l = linear;
    const int64_t group = l->packed / 16, heads = l->packed & 3, nested = heads == NESTED_HEADS ? NESTED / group : 0;
    const int64_t groups = (l->depth + group - 1) / group, parts = dtype == F32 ? 2 : 1;
    Groups g = {l, dtype, l->packed & 12, group, groups, parts, nested, heads};
    for (; g.row < l->rows; g.row += TOGETHER) {
        g.rows = l->rows - g.row < TOGETHER ? l->rows - g.row : TOGETHER;
        g.x = (int16_t *)(void *)l->workspace;
        g.factors = (float *)(void *)(l->workspace + g.rows * groups * group * parts * 2);
        in_parallel(round_rows, &g, g.rows * groups, g.rows * l->depth >= FORK_ELEMENTS ? l->threads : 1, IN_SHARES);
        in_parallel(group_panels, &g, (l->columns + COLUMNS - 1) / COLUMNS, l->threads, IN_SHARES);
    }
}
