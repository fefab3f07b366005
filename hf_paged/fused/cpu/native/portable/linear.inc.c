/* Linear layers of one dtype, of weights of this dtype, bf16 (in fp32) or int8, computed with the weight where it is,
 * [columns, depth]. The lanes of a sum run along the depth, so few rows read the weight as a few streams, and many rows
 * need no packed copy. Sums are fp32.
 *
 * A weight of 16 or 8 bits is widened in registers for few rows, and in a buffer for many. The order of a sum depends on
 * the depth alone: lanes, parts of PART elements, then the bias. */
#include "eight.h"

#define PART 1024  /* elements of the depth that are added up in registers */
#define BLOCK 24   /* columns that are computed together: they stay in the L2 cache for all rows */
#define RUN 24     /* columns of each of the streams in which few rows read a weight */
#define TALL 4     /* rows of a tile of many rows */
#define MANY 8     /* with more rows, weights of fewer than 32 bits are widened in a buffer */

/* Few rows: up to FEW, whose sums with some columns fit into the registers. They read as many columns as streams, from
 * which STREAM bytes are prefetched ahead, to L2 or L1. (Zen 4 reads faster with the far prefetch, but not in vectors of
 * half a line.) */
#define FEW (W == 16 ? 6 : 4)
#define STREAM (W == 16 ? 1024 : 512)
#define NEAR (W == 16 ? 2 : 3)
#define STREAMS(rows) ((rows) == 1 ? 8 : W == 16 ? ((rows) < 4 ? 8 : 24 / (rows)) : (rows) == 2 ? 4 : 3)

/* Elements of a weight as it is read: of the dtype, or bf16, or int8, or fp32 in the buffer. */
enum { OWN, WIDE, HALVES, BYTES };
#define SIZE_OF(kind) ((kind) == WIDE ? 4 : (kind) == HALVES ? 2 : (kind) == BYTES ? 1 : (int64_t)sizeof(ELEMENT))

/* Keeps a vector in a register: the compiler would read it from memory for each use. */
#if defined(__x86_64__)
#define KEEP(x) __asm__("" : "+v"(x))
#elif defined(__aarch64__)
#define KEEP(x) __asm__("" : "+w"(x))
#else
#define KEEP(x) (void)0
#endif

INLINE vf load_part(const ELEMENT *p, int64_t n) {
    ELEMENT part[W] = {0};
    memcpy(part, p, (size_t)n * sizeof *p);
    return LOAD(part);
}

INLINE vf load_wide_part(const float *p, int64_t n) {
    float part[W] = {0};
    memcpy(part, p, (size_t)n * sizeof *p);
    return load_f32(part);
}

/* W elements at p, or the first n of them, followed by zeros. */
INLINE vf load_kind(const char *p, const int kind) {
    if (kind == OWN) return LOAD((const ELEMENT *)(const void *)p);
    return kind == WIDE ? load_f32(p) : kind == HALVES ? load_bf16(p) : load_int8(p);
}
INLINE vf load_part_kind(const char *p, int64_t n, const int kind) {
    char part[4 * W] = {0};
    memcpy(part, p, (size_t)(n * SIZE_OF(kind)));
    return load_kind(part, kind);
}

/* Widens n elements; `to` has room for a multiple of W. */
INLINE void widen(const void *elements, int64_t n, float *to, const int kind) {
    const char *from = elements;
    int64_t k = 0;
    for (; k + W <= n; k += W) store_f32(to + k, load_kind(from + k * SIZE_OF(kind), kind));
    if (k < n) store_f32(to + k, load_part_kind(from + k * SIZE_OF(kind), n - k, kind));
}

typedef struct {
    const float *x; /* rows, x_row elements apart */
    int64_t x_row;
    const char *w; /* columns, w_row elements apart */
    int64_t w_row, depth;
    int64_t ahead; /* bytes from what is read to what is prefetched, 0: nothing */
    int64_t sums_row, sums_column; /* strides of the sums */
} Tile;

INLINE const char *weight_at(const Tile *t, int c, int64_t k, const int kind) {
    return t->w + (c * t->w_row + k) * SIZE_OF(kind);
}

/* The sums of rows x columns; with `add` they are added to. */
INLINE void tile(const Tile *t, float *sums, const int add, const int rows, const int columns, const int kind) {
    vf all[16 > 2 * W ? 16 : 2 * W], w[8];
#pragma GCC unroll 32
    for (int i = 0; i < rows * columns; i++) all[i] = (vf){0};
    int64_t k = 0;
    for (; k + W <= t->depth; k += W) {
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) {
            w[c] = load_kind(weight_at(t, c, k, kind), kind);
            if (rows > 1) KEEP(w[c]);
            if (t->ahead) __builtin_prefetch(weight_at(t, c, k, kind) + t->ahead, 0, NEAR);
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vf x = load_f32(t->x + r * t->x_row + k);
            KEEP(x);
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++) all[r * columns + c] = multiply_add(x, w[c], all[r * columns + c]);
        }
    }
    if (k < t->depth) {
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) w[c] = load_part_kind(weight_at(t, c, k, kind), t->depth - k, kind);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const vf x = load_wide_part(t->x + r * t->x_row + k, t->depth - k);
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++) all[r * columns + c] = multiply_add(x, w[c], all[r * columns + c]);
        }
    }
#pragma GCC unroll 32
    for (int i = rows * columns; i < (rows * columns + W - 1) / W * W; i++) all[i] = (vf){0};
#pragma GCC unroll 4
    for (int i = 0; i < rows * columns; i += W) {
        const vf total = sum_rows(all + i);
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) {
            float *at = sums + (i + j) / columns * t->sums_row + (i + j) % columns * t->sums_column;
            if (i + j < rows * columns) *at = add ? *at + total[j] : total[j];
        }
    }
}

/* What is read after the tiles in progress: `columns` runs of `lines` cache lines. Each tile prefetches a share. */
typedef struct {
    const char *at;
    int64_t stride, columns, lines, line, share;
} Next;

INLINE void prefetch_share(Next *n) {
    for (int64_t i = 0; i < n->share && n->columns > 0; i++) {
        __builtin_prefetch(n->at + n->line * 64, 0, 2);
        if (++n->line == n->lines) n->line = 0, n->columns--, n->at += n->stride;
    }
}

/* The sums of `count` columns if there are few rows. A tile takes its columns from as many streams, each of which
 * goes on through the memory from tile to tile. t: all rows, the whole depth. */
INLINE void stream_tiles(Tile t, float *sums, int64_t count, const int rows, const int columns, const int kind) {
    const float *x = t.x;
    const char *w = t.w;
    const int64_t depth = t.depth, row = t.w_row, of_tiles = count / columns;
    t.ahead = STREAM;
    for (int64_t c = 0; c < count;) {
        const int is_whole = c < of_tiles;
        t.w_row = is_whole ? row * of_tiles : row, t.sums_column = is_whole ? of_tiles : 1;
        for (int64_t begin = 0; begin < depth; begin += PART) {
            t.x = x + begin, t.w = w + (c * row + begin) * SIZE_OF(kind), t.depth = depth - begin < PART ? depth - begin : PART;
            if (is_whole)
                tile(&t, sums + c, begin > 0, rows, columns, kind);
            else
                tile(&t, sums + c, begin > 0, rows, 1, kind);
        }
        c = c + 1 == of_tiles ? of_tiles * columns : c + 1;
    }
}

#define CASE(n) \
    case n: stream_tiles(*t, sums, count, n, STREAMS(n), kind); break;

INLINE void stream_rows(const Tile *t, float *sums, int64_t count, int64_t rows, const int kind) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if W == 16
        CASE(5) CASE(6)
#endif
    }
}

static void stream(const Tile *t, float *sums, int64_t count, int64_t rows, int kind) {
    if (kind == BYTES) stream_rows(t, sums, count, rows, BYTES);
    if (kind == HALVES) stream_rows(t, sums, count, rows, HALVES);
    if (kind == OWN) stream_rows(t, sums, count, rows, OWN);
}

/* Columns of a block. */
static int64_t block_of(int64_t rows) { return rows > FEW ? BLOCK : RUN * STREAMS(rows); }

/* The sums of up to TALL rows of many with `count` columns of a block. */
INLINE void tiles(Tile t, float *sums, int add, int64_t count, Next *next, const int rows, const int columns,
                  const int kind) {
    const int64_t column = t.w_row * SIZE_OF(kind);
    int64_t c = 0;
    for (; c + columns <= count; c += columns, t.w += columns * column) {
        prefetch_share(next);
        if (add)
            tile(&t, sums + c, 1, rows, columns, kind);
        else
            tile(&t, sums + c, 0, rows, columns, kind);
    }
    for (; c < count; c++, t.w += column) tile(&t, sums + c, add, rows, 1, kind);
}

/* Adds a part of the depth to the sums of many rows with `count` columns. t: all rows, this part; buffer: of the thread,
 * if the columns are to be widened. */
INLINE void add_part_of(Tile t, float *sums, int add, int64_t count, int64_t rows, float *buffer, Next *next,
                        const int kind) {
    const float *x = t.x;
    const int64_t groups = (rows + TALL - 1) / TALL;
    if (buffer) {
        for (int64_t c = 0; c < count; c++)
            widen(t.w + c * t.w_row * SIZE_OF(kind), t.depth, buffer + c * PART, kind);
        t.w = (const char *)buffer, t.w_row = PART;
    }
    for (int64_t g = 0; g < groups; g++) {
        const int64_t row = rows * g / groups, n = rows * (g + 1) / groups - row;
        float *at = sums + row * BLOCK;
        t.x = x + row * t.x_row;
        /* More than FEW rows: a group has three or four, or, of five rows, two and three. */
        if (buffer) {
            if (n == 2) tiles(t, at, add, count, next, 2, 4, WIDE);
            if (n == 3) tiles(t, at, add, count, next, 3, 3, WIDE);
            if (n == 4) tiles(t, at, add, count, next, 4, 3, WIDE);
        } else {
            if (n == 2) tiles(t, at, add, count, next, 2, 4, kind);
            if (n == 3) tiles(t, at, add, count, next, 3, 3, kind);
            if (n == 4) tiles(t, at, add, count, next, 4, 3, kind);
        }
    }
}

static void add_part(const Tile *t, float *sums, int add, int64_t count, int64_t rows, float *buffer, Next *next,
                     int kind) {
    if (kind == BYTES) add_part_of(*t, sums, add, count, rows, buffer, next, BYTES);
    if (kind == HALVES) add_part_of(*t, sums, add, count, rows, buffer, next, HALVES);
    if (kind == OWN) add_part_of(*t, sums, add, count, rows, buffer, next, OWN);
}

/* Stores n <= W sums of a row with columns from `column` on: times the scales, plus the bias. */
INLINE void store_sums(const Linear *l, vf total, int64_t row, int64_t column, int64_t n) {
    ELEMENT *out = l->out + row * l->columns + column;
    if (l->scales) {
        if (l->rounds) {
            STORE(out, total, n);
            total = load_part(out, n);
        }
        total *= load_wide_part(l->scales + column, n);
        if (l->bias) {
            STORE(out, total, n);
            total = load_part(out, n);
        }
    }
    if (l->bias) total += load_part(l->bias + column, n);
    STORE(out, total, n);
}

/* Floats of a thread's workspace: sums, and columns that are widened. */
static int64_t thread_floats(int64_t rows) {
    return round_up(rows * block_of(rows) + W, 16) + BLOCK * PART;
}

/* Bytes of workspace, aligned to 64, for hfp_linear: the rows in fp32, and what each thread needs. */
HFP_EXPORT int64_t NAME(hfp_linear_workspace)(int64_t rows, int64_t depth, int64_t threads) {
    return ((sizeof(ELEMENT) < 4 ? rows * round_up(depth, 16) : 0) + threads * thread_floats(rows)) * 4;
}

typedef struct {
    const Linear *linear;
    int kind;
    int64_t block, x_row;
    const float *x;
    float *of_threads; /* thread_floats for each */
} Blocks;

static void linear_blocks(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Blocks all = *(const Blocks *)arguments;
    const Linear l = *all.linear;
    const int widens = sizeof(ELEMENT) < 4, kind = all.kind;
    const int64_t block = all.block, x_row = all.x_row, size = SIZE_OF(kind);
    const float *x = all.x;
    float *sums = all.of_threads + thread * thread_floats(l.rows);
    float *buffer = (widens || kind != OWN) && l.rows > MANY ? sums + round_up(l.rows * block + W, 16) : NULL;
    for (int64_t b = first; b < last; b++) {
        const int64_t column = b * block, count = l.columns - column < block ? l.columns - column : block;
        const char *w = (const char *)l.weight + column * l.depth * size;
        Tile t = {x, x_row, w, l.depth, l.depth, 0, block, 1};
        if (l.rows <= FEW) stream(&t, sums, count, l.rows, kind);
        for (int64_t begin = 0; begin < l.depth && l.rows > FEW; begin += PART) {
            const int64_t end = begin + PART, after = end < l.depth ? end : 0, left = l.depth - after;
            Next next = {w + (end < l.depth ? end : BLOCK * l.depth) * size, l.depth * size,
                         end < l.depth ? count : l.columns - column - BLOCK,
                         ((left < PART ? left : PART) * size + 63) / 64, 0, 0};
            if (next.columns > BLOCK) next.columns = BLOCK;
            next.share = next.lines * 3 * TALL / l.rows + 1;
            t.x = x + begin, t.w = w + begin * size, t.depth = l.depth - begin < PART ? l.depth - begin : PART;
            add_part(&t, sums, begin > 0, count, l.rows, buffer, &next, kind);
        }
        for (int64_t r = 0; r < l.rows; r++)
            for (int64_t c = 0; c < count; c += W)
                store_sums(&l, load_f32(sums + r * block + c), r, column + c, count - c < W ? count - c : W);
    }
}

typedef struct {
    const Linear *linear;
    float *copy;
    int64_t x_row;
} Widened;

static void widen_rows(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Widened w = *(const Widened *)arguments;
    const int64_t depth = w.linear->depth;
    (void)thread;
    for (int64_t r = first; r < last; r++) widen(w.linear->x + r * depth, depth, w.copy + r * w.x_row, OWN);
}

/* out = x x weight + bias, rounded to the dtype once. The sums of a row do not depend on the other rows or on the
 * threads. */
HFP_EXPORT void NAME(hfp_linear)(const Linear *call) {
    const Linear l = *call;
    if (!l.rows) return;
    const int widens = sizeof(ELEMENT) < 4, kind = l.scales ? BYTES : !widens && l.packed ? HALVES : OWN;
    const int64_t x_row = widens ? round_up(l.depth, 16) : l.depth, share = (l.columns + l.threads - 1) / l.threads;
    int64_t block = block_of(l.rows);
    if (l.rows <= FEW && round_up(share, 8) < block) block = round_up(share, 8); /* so that no thread is without one */
    float *copy = (float *)(void *)l.workspace, *of_threads = copy + (widens ? l.rows * x_row : 0);
    const float *x = widens ? copy : (const float *)(const void *)l.x;
    if (widens)
        in_parallel(widen_rows, &(Widened){call, copy, x_row}, l.rows, l.rows * l.depth >= FORK_ELEMENTS ? l.threads : 1,
                    IN_SHARES);
    const Blocks all = {call, kind, block, x_row, x, of_threads};
    in_parallel(linear_blocks, &all, (l.columns + block - 1) / block, l.threads, IN_SHARES);
}
