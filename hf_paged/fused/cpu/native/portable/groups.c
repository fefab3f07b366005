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
 * Or a group has scales and the codes of zero, as GPTQ and AWQ do: weight = (code - zero) * scale. Or codes are numbers
 * of a table's values (tables.inc.c).
 *
 * The rows are rounded to integers of 15 bits, in units of each group's own; in fp32, what is left of them once more,
 * so that nothing within 2^-28 of a group's largest element is lost. On request they are rounded to 15 bits only, or to 8,
 * which group_bytes.c multiplies where bytes are faster than the 16 bits here. The sums of a group are exact, and those of the
 * groups are added in order, in fp32: a row's bits do not depend on the other rows or on the threads. Code by code,
 * a product costs no conversion to floats, which would take longer than reading the weight.
 *
 * Many rows in fp32 are multiplied with the values of the codes, unless all rows must have one order. */
#include "groups.h"

#define ROWS (W == 16 ? 8 : 4) /* whose sums with a vector of columns fit into the registers: few rows */
#define TOGETHER 64    /* rows, so that they stay in the L2 cache: with more of them, products take longer than reading */
/* More rows share a chunk of a panel that is widened once, of LONG elements of the depth: beside those of a tile of rows,
 * it stays in an L1 cache of 32 KB. A tile's sums with ABREAST vectors of columns fit into the registers. (AVX-512 widens
 * beside the products of 8 rows, which costs less than storing what is widened.) */
#define IN_CHUNKS(rows) (W < 16 && (rows) > ROWS)
#define LONG 512
#define ABREAST (W == 8 ? 2 : 1)
#define TALL(parts) (W == 8 ? 6 / (parts) : ROWS)
/* Many rows in fp32 are multiplied with values in fp32, which is faster than two parts of each, VALUES_TOGETHER of them at
 * a time; a chunk has VALUES elements of the depth, which take as much of the cache. */
#define VALUES 256
#define VALUES_TALL (W == 16 ? 12 : W == 8 ? 6 : 3)
#define VALUES_TOGETHER 192

/* A chunk of a panel for many rows. */
typedef struct {
    vi codes[LONG / 2][VECTORS];             /* of two neighbouring elements of the depth, 16 bits each */
    vf heads[LONG / SHORTEST][2][VECTORS]; /* scales and least values */
} Chunk;

/* Groups of the chunk that begins with this group. */
INLINE int64_t groups_from(const Groups *g, int64_t first) {
    return g->groups - first < g->chunk ? g->groups - first : g->chunk;
}

/* The place of a row's group in x and factors. */
INLINE int64_t place_of(const Groups *g, int64_t row, int64_t group) {
    const int64_t first = group / g->chunk * g->chunk;
    return first * g->rows + row * groups_from(g, first) + group - first;
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
    sum += (vi)_mm256_madd_epi16((__m256i)codes, _mm256_set1_epi32(pair));
    KEEP(sum); /* else the compiler adds several products later, for which there are no registers */
    return sum;
#elif defined(__SSE2__)
    return sum + (vi)_mm_madd_epi16((__m128i)codes, _mm_set1_epi32(pair));
#else
    return sum + (codes & 0xffff) * (int32_t)x[0] + (codes >> 16) * (int32_t)x[1];
#endif
}

/* Codes j of both halves of a column's 32 bits. */
INLINE vi codes_at(vi line, int j, const int bits) {
    typedef uint16_t halves __attribute__((vector_size(W * 4)));
    const vi shifted = (vi)((halves)line >> (uint16_t)(bits * j));
    return W < 16 && j == 16 / bits - 1 ? shifted : shifted & (bits == 4 ? 0x000f000f : 0x00ff00ff);
}

/* sums: [n, COLUMNS], of n rows with a panel. */
INLINE void panel_rows(const Groups *g, const char *panel, int64_t row, float *sums, const int n, const int bits,
                       const int parts) {
    const int64_t x_row = g->groups * parts * g->group, factors_row = 2 * g->groups;
    const int64_t lines = g->group * bits / 32;
    /* Vectors of columns that share a row's elements in registers; and whether a product waits for the one before, so that
     * few rows need two sums of each. */
    const int abreast = W == 8 && n <= 2 ? 2 : 1, waits = W == 16 && n <= 2;
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
        for (int from = 0; from < VECTORS; from += abreast) {
            const char *codes = panel + from * 4 * W;
            vi own[ROWS][2][2], odd[ROWS][2][2];
#pragma GCC unroll 8
            for (int r = 0; r < n; r++)
#pragma GCC unroll 2
                for (int v = 0; v < abreast; v++)
                    own[r][v][0] = own[r][v][1] = odd[r][v][0] = odd[r][v][1] = (vi){0};
            for (int64_t k = 0; k < lines; k++, codes += 64) {
                vi line[2];
#pragma GCC unroll 2
                for (int v = 0; v < abreast; v++) memcpy(line + v, codes + v * 4 * W, sizeof *line);
#pragma GCC unroll 4
                for (int j = 0; j < 16 / bits; j++) {
                    const int16_t *at = x + k * (32 / bits) + 2 * j;
                    vi some[2];
#pragma GCC unroll 2
                    for (int v = 0; v < abreast; v++) some[v] = codes_at(line[v], j, bits);
#pragma GCC unroll 8
                    for (int r = 0; r < n; r++)
#pragma GCC unroll 2
                        for (int p = 0; p < parts; p++)
#pragma GCC unroll 2
                            for (int v = 0; v < abreast; v++) {
                                vi *sum = waits && j % 2 ? &odd[r][v][p] : &own[r][v][p];
                                *sum = add_pairs(*sum, at + r * x_row + p * g->group, some[v]);
                            }
                }
            }
#pragma GCC unroll 2
            for (int v = 0; v < abreast; v++) {
                vf least;
                const vf scale = scale_and_least(g, head, at, from + v, &least);
#pragma GCC unroll 8
                for (int r = 0; r < n; r++) {
                    const float *both = factors + r * factors_row;
                    vf value = as_floats(own[r][v][0] + odd[r][v][0]), *to = &totals[r][from + v];
                    if (parts > 1) value = multiply_add(as_floats(own[r][v][1] + odd[r][v][1]), splat(0x1p-14f), value);
                    *to = multiply_add(value * splat(both[0]), scale, multiply_add(least, splat(both[1]), *to));
                }
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

/* The codes of a group in a panel. head: the values in fp16 that belong to it. */
INLINE const char *group_at(const Groups *g, const char *panel, int64_t group, const char **head) {
    const int64_t bytes = 2 * g->group * g->bits, together = g->nested ? g->nested : 1;
    const int64_t of_head = g->nested ? HEAD + NESTED : HEAD;
    *head = panel + group / together * (of_head + together * bytes);
    return *head + of_head + group % together * bytes;
}

#if W < 16
INLINE void widen_chunk(const Groups *g, const char *panel, int64_t first, Chunk *to, const int bits) {
    vi(*codes)[VECTORS] = to->codes;
    for (int64_t i = 0; i < groups_from(g, first); i++) {
        const char *head, *lines = group_at(g, panel, first + i, &head);
        const int64_t at = g->nested ? i & (g->nested - 1) : 0;
        for (int v = 0; v < VECTORS; v++) to->heads[i][0][v] = scale_and_least(g, head, at, v, &to->heads[i][1][v]);
        for (int64_t k = 0; k < g->group * bits / 32; k++, lines += 64, codes += 16 / bits)
            for (int v = 0; v < VECTORS; v++) {
                vi line;
                memcpy(&line, lines + v * 4 * W, sizeof line);
#pragma GCC unroll 4
                for (int j = 0; j < 16 / bits; j++) codes[j][v] = codes_at(line, j, bits);
            }
    }
}

/* Adds the products of n rows with a chunk to sums [n, COLUMNS], with the operations and in the order of few rows. */
INLINE void tile_rows(const Groups *g, const Chunk *chunk, int64_t first, int64_t row, float *sums, const int n,
                      const int parts) {
    const int64_t count = groups_from(g, first), place = place_of(g, row, first), x_row = count * parts * g->group;
    for (int from = 0; from < VECTORS; from += ABREAST) {
        const int16_t *x = g->x + place * parts * g->group;
        const float *factors = g->factors + 2 * place;
        const vi(*codes)[VECTORS] = chunk->codes;
        vf totals[ROWS + 2][ABREAST];
#pragma GCC unroll 8
        for (int r = 0; r < n; r++)
#pragma GCC unroll 2
            for (int v = 0; v < ABREAST; v++) totals[r][v] = load_f32(sums + r * COLUMNS + (from + v) * W);
        for (int64_t i = 0; i < count; i++, x += parts * g->group, factors += 2) {
            vi own[ROWS + 2][ABREAST][2];
#pragma GCC unroll 8
            for (int r = 0; r < n; r++)
#pragma GCC unroll 2
                for (int v = 0; v < ABREAST; v++) own[r][v][0] = own[r][v][1] = (vi){0};
            for (int64_t k = 0; k < g->group; k += 2, codes++) {
                vi some[ABREAST];
#pragma GCC unroll 2
                for (int v = 0; v < ABREAST; v++) {
                    some[v] = (*codes)[from + v];
                    KEEP(some[v]);
                }
#pragma GCC unroll 8
                for (int r = 0; r < n; r++)
#pragma GCC unroll 2
                    for (int p = 0; p < parts; p++)
#pragma GCC unroll 2
                        for (int v = 0; v < ABREAST; v++)
                            own[r][v][p] = add_pairs(own[r][v][p], x + r * x_row + p * g->group + k, some[v]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < n; r++)
#pragma GCC unroll 2
                for (int v = 0; v < ABREAST; v++) {
                    const float *both = factors + 2 * r * count;
                    const vf scale = chunk->heads[i][0][from + v], least = chunk->heads[i][1][from + v];
                    vf value = as_floats(own[r][v][0]), *to = &totals[r][v];
                    if (parts > 1) value = multiply_add(as_floats(own[r][v][1]), splat(0x1p-14f), value);
                    *to = multiply_add(value * splat(both[0]), scale, multiply_add(least, splat(both[1]), *to));
                }
        }
#pragma GCC unroll 8
        for (int r = 0; r < n; r++)
#pragma GCC unroll 2
            for (int v = 0; v < ABREAST; v++) store_f32(sums + r * COLUMNS + (from + v) * W, totals[r][v]);
    }
}

#undef CASE
#define CASE(n) \
    case n: \
        if (n <= TALL(parts)) tile_rows(g, chunk, first, row, sums, n <= TALL(parts) ? n : 1, parts); \
        break;

#define TILES(parts_) \
    NOINLINE void tile_##parts_(const Groups *g, const Chunk *chunk, int64_t first, int64_t row, int64_t rows, \
                                float *sums) { \
        enum { parts = parts_ }; \
        switch (rows) { CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) } \
    }
TILES(1) TILES(2)

/* The sums [rows, COLUMNS] of many rows with a panel of so many bytes. */
static void chunk_sums(const Groups *g, const char *panel, int64_t bytes, float *sums) {
    const int64_t tall = TALL(g->parts), tiles = (g->rows + tall - 1) / tall;
    Chunk chunk;
    memset(sums, 0, (size_t)g->rows * COLUMNS * sizeof *sums);
    for (int64_t first = 0; first < g->groups; first += g->chunk) {
        if (g->bits == 4)
            widen_chunk(g, panel, first, &chunk, 4);
        else
            widen_chunk(g, panel, first, &chunk, 8);
        /* What the next chunk is widened from, evenly over the tiles; of the next panel, if this is the last chunk. */
        const char *next = panel + bytes * (first + g->chunk) / g->groups;
        const int64_t ahead = bytes * g->chunk / g->groups;
        for (int64_t t = 0; t < tiles; t++) {
            for (int64_t k = ahead * t / tiles; k < ahead * (t + 1) / tiles; k += 64) __builtin_prefetch(next + k, 0, 2);
            const int64_t row = g->rows * t / tiles, rows = g->rows * (t + 1) / tiles - row;
            (g->parts == 1 ? tile_1 : tile_2)(g, &chunk, first, row, rows, sums + row * COLUMNS);
        }
    }
}

#endif

/* Rounds to integers (below 2^22), which are returned as they are, and stored. */
INLINE vf rounded(vf x, int16_t *to) {
    typedef int16_t narrow __attribute__((vector_size(2 * W)));
    const vf moved = x + 12582912.0f; /* 1.5 * 2^23 */
    const narrow stored = __builtin_convertvector((vi)moved - 0x4b400000, narrow);
    memcpy(to, &stored, sizeof stored);
    return moved - 12582912.0f;
}

/* Rounds `group` elements, of which `left` exist. */
INLINE void round_group(const char *x, int64_t left, int64_t group, int16_t *to, float *factors, const int dtype,
                        int64_t parts, int is_coarse) {
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
    if (is_coarse) unit = byte_unit(largest), inverse = byte_inverse(largest);
    for (int64_t i = 0; i < group / W; i++) {
        const vf scaled = wide[i] * inverse;
        if (dtype == F32) {
            const vf first = rounded(choose(scaled > 32767.0f, splat(32767), scaled), to + i * W);
            sum += first;
            if (parts > 1) rest += rounded((scaled - first) * 0x1p14f, to + group + i * W);
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
        const int64_t place = place_of(&g, i / g.groups, i % g.groups);
        int16_t *to = g.x + place * g.parts * g.group;
        float *factors = g.factors + 2 * place;
        if (g.dtype == F32) round_group(x, depth - k, g.group, to, factors, F32, g.parts, g.is_coarse);
        if (g.dtype == BF16) round_group(x, depth - k, g.group, to, factors, BF16, g.parts, g.is_coarse);
        if (g.dtype == F16) round_group(x, depth - k, g.group, to, factors, F16, g.parts, g.is_coarse);
    }
}

static void group_panels(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Groups *g = arguments;
    const int64_t bytes = panel_bytes(g), blocks = IN_CHUNKS(g->rows) ? 0 : (g->rows + ROWS - 1) / ROWS;
    float sums[TOGETHER * COLUMNS] __attribute__((aligned(64)));
    (void)thread;
    for (int64_t p = first; p < last; p++) {
        const char *panel = (const char *)g->linear->weight + p * bytes;
#if W < 16
        if (g->rows > ROWS) chunk_sums(g, panel, bytes, sums);
#endif
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t row = g->rows * b / blocks, rows = g->rows * (b + 1) / blocks - row;
            panel_sums(g, panel, row, rows, sums + row * COLUMNS);
        }
        store_panel(g, sums, p);
    }
}

/* Bytes of workspace of hfp_linear for these weights. */
int64_t hfp_groups_workspace(int64_t rows, int64_t depth) {
    const int64_t longest = round_up(depth, LONGEST);
    return (rows < TOGETHER ? rows : TOGETHER) * (longest * 4 + longest / SHORTEST * 8);
}

/* Writes the values of a chunk: [elements, COLUMNS]. */
INLINE void widen_values(const Groups *g, const char *panel, int64_t first, float *to, const int bits) {
    for (int64_t i = 0; i < groups_from(g, first); i++) {
        const char *head, *lines = group_at(g, panel, first + i, &head);
        vf scale[VECTORS], least[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            scale[v] = scale_and_least(g, head, g->nested ? i & (g->nested - 1) : 0, v, &least[v]);
        for (int64_t k = 0; k < g->group * bits / 32; k++, lines += 64, to += 32 / bits * COLUMNS)
            for (int v = 0; v < VECTORS; v++) {
                vi line;
                memcpy(&line, lines + v * 4 * W, sizeof line);
#pragma GCC unroll 4
                for (int j = 0; j < 16 / bits; j++) {
                    const vi pair = codes_at(line, j, bits);
                    float *at = to + 2 * j * COLUMNS + v * W;
                    store_f32(at, multiply_add(as_floats(pair & 0xffff), scale[v], least[v]));
                    store_f32(at + COLUMNS, multiply_add(as_floats(pair >> 16), scale[v], least[v]));
                }
            }
    }
}

/* The products of n rows of x, [n, count], with the values of a chunk, which are added to out unless they are the first
 * ones of their sums. columns: those that exist. */
INLINE void tile_values(const float *x, int64_t count, const float *values, float *out, int64_t out_row, int64_t columns,
                        int is_first, const int n) {
    vf own[VALUES_TALL][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < n; r++)
        for (int v = 0; v < VECTORS; v++) own[r][v] = (vf){0};
    for (int64_t k = 0; k < count; k++, values += COLUMNS) {
        vf w[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            w[v] = load_f32(values + v * W);
            KEEP(w[v]);
        }
#pragma GCC unroll 12
        for (int r = 0; r < n; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) own[r][v] = multiply_add(splat(x[r * count + k]), w[v], own[r][v]);
    }
#pragma GCC unroll 12
    for (int r = 0; r < n; r++, out += out_row)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const int64_t left = columns - v * W, n_out = left < W ? left : W;
            if (n_out <= 0) break;
            const vf before = is_first ? (vf){0} : load_of((const char *)(out + v * W), n_out, F32);
            store_part_f32(out + v * W, own[r][v] + before, n_out);
        }
}

#undef CASE
#define CASE(n) \
    case n: tile_values(x, count, values, out, l->columns, l->columns - column, !first, n); break;

/* Columns of `out` for all rows, chunk by chunk, so that the rows of a chunk stay in the L2 cache. */
static void value_panels(const void *arguments, int64_t begin, int64_t end, int64_t thread) {
    const Groups *g = arguments;
    const Linear *l = g->linear;
    const int64_t bytes = panel_bytes(g), tiles = (g->rows + VALUES_TALL - 1) / VALUES_TALL;
    float values[VALUES * COLUMNS] __attribute__((aligned(64)));
    (void)thread;
    for (int64_t first = 0; first < g->groups; first += g->chunk)
        for (int64_t p = begin; p < end; p++) {
            const char *panel = (const char *)l->weight + p * bytes;
            if (g->bits == 4)
                widen_values(g, panel, first, values, 4);
            else
                widen_values(g, panel, first, values, 8);
            const int64_t k = first * g->group, left = l->depth - k, most = g->chunk * g->group, column = p * COLUMNS;
            const int64_t count = left < most ? left : most, ahead = bytes * g->chunk / g->groups;
            const char *next = panel + bytes + bytes * first / g->groups;
            for (int64_t t = 0; t < tiles; t++) {
                for (int64_t i = ahead * t / tiles; i < ahead * (t + 1) / tiles; i += 64) __builtin_prefetch(next + i, 0, 2);
                const int64_t row = g->rows * t / tiles;
                const float *x = (const float *)(const void *)g->x + k * g->rows + row * count;
                float *out = (float *)(void *)l->out + (g->row + row) * l->columns + column;
                switch (g->rows * (t + 1) / tiles - row) { /* of more than ROWS, tiles have no fewer */
#if W == 16
                    CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#elif W == 8
                    CASE(3) CASE(4) CASE(5) CASE(6)
#else
                    CASE(2) CASE(3)
#endif
                }
            }
            for (int64_t r = g->row; l->bias && first + g->chunk >= g->groups && r < g->row + g->rows; r++)
                for (int64_t c = column; c < column + COLUMNS && c < l->columns; c++)
                    ((float *)(void *)l->out)[r * l->columns + c] += ((const float *)(const void *)l->bias)[c];
        }
}

static void copy_chunks(const void *arguments, int64_t begin, int64_t end, int64_t thread) {
    const Groups *g = arguments;
    const int64_t depth = g->linear->depth, most = g->chunk * g->group;
    (void)thread;
    for (int64_t r = begin; r < end; r++)
        for (int64_t k = 0; k < depth; k += most) {
            const int64_t count = depth - k < most ? depth - k : most;
            const float *from = (const float *)(const void *)g->linear->x + (g->row + r) * depth + k;
            memcpy((float *)(void *)g->x + k * g->rows + r * count, from, (size_t)count * 4);
        }
}

/* Groups of a chunk: chunks are of about one length, and of whole nested groups. */
static int64_t groups_of_chunk(const Groups *g, int64_t longest) {
    const int64_t chunks = (g->groups * g->group + longest - 1) / longest;
    return round_up((g->groups + chunks - 1) / chunks, g->nested ? g->nested : 1);
}

/* Sums of values in fp32. The workspace is no larger than of a weight in fp32. */
static void linear_values(Groups g) {
    const Linear *l = g.linear;
    const int64_t turns = (l->rows + VALUES_TOGETHER - 1) / VALUES_TOGETHER;
    g.chunk = groups_of_chunk(&g, VALUES), g.x = (int16_t *)(void *)l->workspace;
    for (int64_t i = 0; i < turns; i++) {
        g.row = l->rows * i / turns, g.rows = l->rows * (i + 1) / turns - g.row;
        in_parallel(copy_chunks, &g, g.rows, g.rows * l->depth >= FORK_ELEMENTS ? l->threads : 1, IN_SHARES);
        in_parallel(value_panels, &g, (l->columns + COLUMNS - 1) / COLUMNS, l->threads, IN_SHARES);
    }
}

static Groups groups_of(const Linear *l, int dtype) {
    const int64_t group = l->packed % PACKED_SHORT / 16, heads = l->packed & 3;
    const int64_t nested = heads == NESTED_HEADS ? NESTED / group : 0;
    const int64_t groups = (l->depth + group - 1) / group, parts = dtype == F32 && l->packed < PACKED_SHORT ? 2 : 1;
    const int is_coarse = l->packed >= PACKED_COARSE;
    return (Groups){l, dtype, l->packed & 12, group, groups, parts, nested, heads, 0, 0, 0, 0, 0, is_coarse};
}

#include "tables.inc.c"

/* dtype: of the rows. */
void hfp_linear_groups(const void *linear, int dtype, int in_one_order) {
    const Linear *l = linear;
    if ((l->packed & 3) == TABLE) {
        linear_table(l, dtype);
        return;
    }
    Groups g = groups_of(l, dtype);
    if (g.is_coarse && hfp_has_bytes(g.bits, g.group)) {
        hfp_linear_bytes(g);
        return;
    }
    if (l->rows > ROWS && g.parts > 1 && !in_one_order) {
        linear_values(g);
        return;
    }
    for (; g.row < l->rows; g.row += TOGETHER) {
        g.rows = l->rows - g.row < TOGETHER ? l->rows - g.row : TOGETHER;
        g.chunk = IN_CHUNKS(g.rows) ? groups_of_chunk(&g, LONG) : g.groups;
        g.x = (int16_t *)(void *)l->workspace;
        g.factors = (float *)(void *)(l->workspace + g.rows * g.groups * g.group * g.parts * 2);
        in_parallel(round_rows, &g, g.rows * g.groups, g.rows * l->depth >= FORK_ELEMENTS ? l->threads : 1, IN_SHARES);
        in_parallel(group_panels, &g, (l->columns + COLUMNS - 1) / COLUMNS, l->threads, IN_SHARES);
    }
}
