/* Linear layers of many rows in fp32 on the matrix unit, which multiplies bf16 and adds in fp32. Included by f32.c after
 * linear.inc.c, whose weights it takes.
 *
 * A number in fp32 is the sum of three in bf16, its parts: the first 8 bits of its significand, the next 8 and the last
 * 8. Six products of parts are added; the other three are of the size of what rounding a sum to fp32 loses. Of a weight
 * in bf16 or int8 only the first part is not zero, and leaving out the others changes no bit. The matrix unit takes parts
 * below 2^-126 for zero, so numbers below about 2^-104 lose bits. A row with a sum that is not finite is computed again,
 * in lanes.
 *
 * A column of the weight is a row of a left tile, with the elements in the order of the memory; rows of x, transposed,
 * are the columns of a right tile. A pair has the elements k and k + 16 of a step. The order of a sum in parts depends on
 * the depth alone: products of parts, steps, blocks, then the bias. */
#include "amx_tiles.h" /* STEP: elements of the depth in a tile */

#define OF_TILE 512    /* elements of a tile */
#define BLOCK_STEPS 32 /* steps of a block, whose sums are in tiles */
#define PAIR 32        /* columns or rows of two tiles */
#define MOST_PAIRS 4   /* of columns, for which a block of the rows' parts stays in the L2 cache if there are more blocks */
#define PARTS_BYTES (1 << 20) /* of a block of the rows that are computed together */
#define MOST_OF_BLOCKS (PARTS_BYTES / (BLOCK_STEPS * STEP * 6) / PAIR * PAIR) /* of these rows, if there are several blocks */

#define PARTS(kind) ((kind) == OWN ? 3 : 1)

/* Bytes of a thread's sums and parts of columns. Sums of several pairs of columns are kept if there are several blocks. */
#define SUMS_BYTES (MOST_PAIRS * (MOST_OF_BLOCKS / PAIR) * 4096)
#define THREAD_BYTES (SUMS_BYTES + BLOCK_STEPS * 6 * OF_TILE * 2)

typedef struct {
    const Linear *linear;
    int kind;
    int64_t stride, steps;   /* bytes of a column; steps of the depth */
    int64_t row, rows;       /* rows [row, row + rows) of x, whose parts are in `parts` */
    const uint16_t *parts;   /* [pairs of tiles of rows, steps, 3 parts, 2 tiles, 16 pairs, 16 rows, 2] */
    char *odd;               /* by row of x: whether it has a sum that is not finite */
    int64_t pairs;           /* of tiles of columns in a panel, for which a block of parts of the rows is read once */
    char *of_threads;        /* THREAD_BYTES for each */
} PartsCall;

/* Lines that are prefetched to L2: runs of `bytes`, which start `stride` apart. */
typedef struct {
    const char *at, *end;
    int64_t bytes, stride;
    int64_t with_column, with_product; /* lines beside splitting a column, and beside a product */
} Runs;

INLINE void prefetch_runs(Runs *r, int64_t lines) {
    for (int64_t i = 0; i < lines; i++) __builtin_prefetch(r->at + 64 * i, 0, 2);
    r->at += 64 * lines;
    if (r->at >= r->end) r->at = r->end - r->bytes + r->stride, r->end += r->stride;
}

/* What is prefetched beside the products of a block of `count` steps with `row_pairs` pairs of rows: as many steps, from
 * `step` on, of a pair of columns. With two pairs of rows, half of it is prefetched while the first one is computed. */
static Runs runs_of(const PartsCall *c, int64_t column, int64_t step, int64_t count, int64_t row_pairs) {
    const Linear *l = c->linear;
    const int64_t size = SIZE_OF(c->kind), left = l->depth - step * STEP, there = l->columns - column;
    const int64_t of_column = STEP * size / 64; /* lines */
    const int64_t with_column = row_pairs == 1 ? of_column : row_pairs == 2 ? of_column / 2 : 0;
    if (there <= 0) return (Runs){0};
    Runs r = {(const char *)l->weight + column * c->stride + step * STEP * size, NULL,
              (left < count * STEP ? left : count * STEP) * size, c->stride, with_column, 0};
    if (r.bytes == r.stride) r.bytes = r.stride = (there < PAIR ? there : PAIR) * c->stride;
    r.end = r.at + r.bytes;
    const int64_t lines = PAIR * count * (of_column - with_column), times = 6 * count * (row_pairs > 1 ? row_pairs - 1 : 1);
    r.with_product = (lines + times - 1) / times;
    return r;
}

/* Splits a column's elements of a step. Its first part is the last in memory; to: of this part. */
INLINE void split_column(const char *from, uint16_t *to, const int kind) {
    vf a = load_kind(from, kind), b = load_kind(from + 16 * SIZE_OF(kind), kind);
#pragma GCC unroll 3
    for (int p = 0; p < PARTS(kind); p++) _mm512_store_si512(to - p * 2 * OF_TILE, amx_pair(&a, &b));
}

/* Splits a step of columns [from, to) of the pair of tiles at `column`. tiles: [parts, 2 tiles, 16 columns, STEP], in the
 * order in which they are used: the last part first. */
INLINE void split_columns(const PartsCall *c, int64_t column, int64_t step, int from, int to, uint16_t *tiles,
                          Runs *next, const int kind) {
    const Linear *l = c->linear;
    const int64_t left = l->depth - step * STEP, stride = c->stride;
    tiles += (PARTS(kind) - 1) * 2 * OF_TILE;
    const char *at = (const char *)l->weight + (column + from) * stride + step * STEP * SIZE_OF(kind);
    if (left >= STEP && column + to <= l->columns) {
        for (int i = from; i < to; i++, at += stride) {
            prefetch_runs(next, next->with_column);
            split_column(at, tiles + i * STEP, kind);
        }
        return;
    }
    for (int i = from; i < to; i++, at += stride) {
        char copy[STEP * 4] = {0};
        if (column + i < l->columns) memcpy(copy, at, (size_t)((left < STEP ? left : STEP) * SIZE_OF(kind)));
        split_column(copy, tiles + i * STEP, kind);
    }
}

/* The parts of the weight and of the rows whose products are added, in this order. */
static const int8_t products[6][2] = {{2, 0}, {1, 0}, {0, 0}, {0, 1}, {0, 2}, {1, 1}};

#define LEFT(tile, n) _tile_loadd(tile, weight + ((PARTS(kind) - 1 - p) * 2 + (n)) * OF_TILE, 64)
#define RIGHT(tile, r) _tile_loadd(tile, rows + (q * 2 + (r)) * OF_TILE, 64)

/* Adds product i of a step to tiles 0 to 3: the sums, [column, row], of two tiles of columns with two of rows. */
INLINE void multiply(const uint16_t *weight, const uint16_t *rows, const int i, const int kind) {
    const int p = products[i][0], q = products[i][1];
    const int new_left = i == 0 || p != products[i - 1][0] || PARTS(kind) == 1;
    const int new_right = i == 0 || q != products[i - 1][1] || PARTS(kind) == 1;
    if (new_left) {
        LEFT(4, 0);
        LEFT(5, 1);
    }
    if (new_right) {
        RIGHT(6, 0);
        RIGHT(7, 1);
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

/* The sums of a block with a pair of tiles of columns and one of rows. tiles: the parts of the columns, [steps, ...].
 * splits: they are not there yet; a step is split while the one before it is multiplied. */
INLINE void block_sums(const PartsCall *c, int64_t column, int64_t step, int64_t count, const uint16_t *rows, float *sums,
                       uint16_t *tiles, Runs *next, const int splits, const int kind) {
    const int64_t of_step = 2 * PARTS(kind) * OF_TILE;
    Runs runs = *next;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (splits) split_columns(c, column, step, 0, PAIR, tiles, &runs, kind);
    for (int64_t s = 0; s < count; s++, rows += 6 * OF_TILE, tiles += of_step) {
        COMPILER_FENCE();
#pragma GCC unroll 6
        for (int i = 0; i < 6; i++) {
            if (products[i][0] < PARTS(kind)) multiply(tiles, rows, i, kind);
            if (!splits)
                prefetch_runs(&runs, runs.with_product);
            else if (s + 1 < count)
                split_columns(c, column, step + s + 1, PAIR * i / 6, PAIR * (i + 1) / 6, tiles + of_step, &runs, kind);
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
    COMPILER_FENCE();
    *next = runs;
}

/* Stores the sums of a tile, [column, row]. */
static void store_tile(const PartsCall *c, const float *sums, int64_t row, int64_t column) {
    float out[256] __attribute__((aligned(64)));
    const Linear *l = c->linear;
    const int64_t columns = l->columns - column, rows = c->rows - row;
    if (columns <= 0 || rows <= 0) return;
    transpose_words((uint32_t *)(void *)out, 16, (const uint32_t *)(const void *)sums, 16);
    for (int64_t r = 0; r < 16 && r < rows; r++) {
        const __m512i infinite = _mm512_set1_epi32(0x7f800000), bits = _mm512_load_si512(out + 16 * r);
        if (_mm512_cmpeq_epi32_mask(_mm512_and_si512(bits, infinite), infinite)) c->odd[c->row + row + r] = 1;
    }
    if (columns >= 16 && !l->scales && !l->bias) {
        float *to = l->out + (c->row + row) * l->columns + column;
        for (int64_t r = 0; r < 16 && r < rows; r++) store_f32(to + r * l->columns, load_f32(out + 16 * r));
        return;
    }
    for (int64_t r = 0; r < 16 && r < rows; r++)
        store_sums(l, load_f32(out + 16 * r), c->row + row + r, column, columns < 16 ? columns : 16);
}

/* Panels [first, last) with all rows. */
INLINE void panels_of(const PartsCall *c, int64_t first, int64_t last, char *buffer, const int kind) {
    const int64_t steps = c->steps, row_pairs = (c->rows + PAIR - 1) / PAIR;
    float *all = (float *)(void *)buffer, part[1024] __attribute__((aligned(64))); /* all: [pairs, pairs of rows, 4, 16, 16] */
    uint16_t *tiles = (uint16_t *)(void *)(buffer + SUMS_BYTES);
    for (int64_t i = first * c->pairs; i < last * c->pairs; i += c->pairs) { /* i: pair of tiles of columns */
        const int64_t there = (c->linear->columns + PAIR - 1) / PAIR - i, pairs = there < c->pairs ? there : c->pairs;
        for (int64_t step = 0; step < steps; step += BLOCK_STEPS)
            for (int64_t p = 0; p < pairs; p++) {
                const int64_t column = (i + p) * PAIR, after = step + BLOCK_STEPS;
                const int64_t count = steps < after ? steps - step : BLOCK_STEPS;
                Runs next = p + 1 < pairs    ? runs_of(c, column + PAIR, step, count, row_pairs)
                            : after < steps  ? runs_of(c, i * PAIR, after, count, row_pairs)
                                             : runs_of(c, column + PAIR, 0, count, row_pairs);
                for (int64_t r = 0; r < row_pairs; r++) {
                    float *sums = all + (steps > BLOCK_STEPS ? p * row_pairs + r : 0) * 1024, *to = step ? part : sums;
                    const uint16_t *rows = c->parts + (r * steps + step) * 6 * OF_TILE;
                    if (r)
                        block_sums(c, column, step, count, rows, to, tiles, &next, 0, kind);
                    else
                        block_sums(c, column, step, count, rows, to, tiles, &next, 1, kind);
                    for (int j = 0; j < 1024 && step; j += 16) store_f32(sums + j, load_f32(sums + j) + load_f32(part + j));
                    for (int j = 0; j < 4 && after >= steps; j++)
                        store_tile(c, sums + 256 * j, r * PAIR + j % 2 * 16, column + j / 2 * 16);
                }
            }
    }
}

static void parts_panels(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const PartsCall *c = arguments;
    char *buffer = c->of_threads + thread * THREAD_BYTES;
    _tile_loadconfig(&amx_config_16);
    if (c->kind == OWN) panels_of(c, first, last, buffer, OWN);
    if (c->kind == HALVES) panels_of(c, first, last, buffer, HALVES);
    if (c->kind == BYTES) panels_of(c, first, last, buffer, BYTES);
    _tile_release();
}

typedef struct {
    const float *x;
    int64_t rows, depth, steps;
    uint16_t *parts;
} Splitting;

/* Splits steps of tiles of rows: [pairs of tiles of rows, steps, 2 tiles]. */
static void split_rows(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Splitting s = *(const Splitting *)arguments;
    (void)thread;
    for (int64_t i = first; i < last; i++) {
        const int64_t row = i / (2 * s.steps) * PAIR + i % 2 * 16, k = i / 2 % s.steps * STEP;
        const int64_t left = s.depth - k < STEP ? s.depth - k : STEP;
        __m512i parts[3][16];
        for (int r = 0; r < 16; r++) {
            float copy[STEP] = {0};
            const float *from = copy;
            if (row + r < s.rows && left == STEP)
                from = s.x + (row + r) * s.depth + k;
            else if (row + r < s.rows)
                memcpy(copy, s.x + (row + r) * s.depth + k, (size_t)left * 4);
            vf a = load_f32(from), b = load_f32(from + 16);
            /* Rounded, so that the products that are left out have both signs. The last part is exact, and keeps NaN. */
            parts[0][r] = amx_rounded_pair(&a, &b);
            parts[1][r] = amx_rounded_pair(&a, &b);
            parts[2][r] = amx_pair(&a, &b);
        }
        for (int p = 0; p < 3; p++) transpose_16(parts[p], s.parts + (i / 2 * 6 + p * 2 + i % 2) * OF_TILE, 64);
    }
}

/* The rows that are computed together, a multiple of PAIR. */
static int64_t rows_together(int64_t rows, int64_t depth) {
    const int64_t block = depth < BLOCK_STEPS * STEP ? round_up(depth, STEP) : BLOCK_STEPS * STEP;
    const int64_t most = PARTS_BYTES / (block * 6) / PAIR * PAIR, shares = (rows + most - 1) / most;
    return round_up((rows + shares - 1) / shares, PAIR);
}

/* Not less for a greater depth: several layers may share a workspace. */
static int64_t parts_workspace(int64_t rows, int64_t depth, int64_t threads) {
    const int64_t all = round_up(rows, PAIR), few = all < MOST_OF_BLOCKS ? all : MOST_OF_BLOCKS;
    const int64_t steps = round_up(depth, STEP) / STEP, first = steps < BLOCK_STEPS ? steps : BLOCK_STEPS;
    const int64_t of_block = all * first * STEP * 6, of_blocks = few * steps * STEP * 6;
    const int64_t one = of_block < PARTS_BYTES ? of_block : PARTS_BYTES;
    return round_up(rows, 64) + (one > of_blocks ? one : of_blocks) + threads * THREAD_BYTES;
}

static void linear_parts(const Linear *l, int kind) {
    const int64_t steps = round_up(l->depth, STEP) / STEP, together = rows_together(l->rows, l->depth);
    char *odd = l->workspace;
    uint16_t *parts = (uint16_t *)(void *)(l->workspace + round_up(l->rows, 64));
    const int64_t share = (l->columns + PAIR * l->threads - 1) / (PAIR * l->threads); /* pairs of columns of a thread */
    const int64_t pairs = steps <= BLOCK_STEPS ? 1 : share < MOST_PAIRS ? share : MOST_PAIRS;
    PartsCall c = {l, kind, l->depth * SIZE_OF(kind), steps, 0, 0, parts, odd, pairs,
                   (char *)parts + together * steps * STEP * 6};
    memset(odd, 0, (size_t)l->rows);
    for (; c.row < l->rows; c.row += together) {
        c.rows = l->rows - c.row < together ? l->rows - c.row : together;
        const Splitting s = {l->x + c.row * l->depth, c.rows, l->depth, steps, parts};
        in_parallel(split_rows, &s, round_up(c.rows, PAIR) / 16 * steps, l->threads, IN_SHARES);
        in_parallel(parts_panels, &c, (l->columns + c.pairs * PAIR - 1) / (c.pairs * PAIR), l->threads, IN_SHARES);
    }
    for (int64_t r = 0; r < l->rows; r++)
        if (odd[r]) {
            Linear one = *l;
            one.x += r * l->depth, one.out += r * l->columns, one.rows = 1;
            one.workspace += round_up(l->rows, 64);
            linear_in_lanes(&one, kind);
        }
}
