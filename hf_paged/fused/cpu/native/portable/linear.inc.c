/* Linear layers of one dtype, of weights of this dtype, bf16 (in fp32) or int8, computed with the weight where it is,
 * [columns, depth]. The lanes of a sum run along the depth, so few rows read the weight as a few streams, and many rows
 * need no packed copy of it, only of themselves. Sums are fp32.
 *
 * A weight of 16 or 8 bits is widened in registers for few rows, and in a buffer for many. The order of a sum depends on
 * the depth alone: lanes, parts of PART elements, then the bias. */
#include "eight.h"

/* Elements of the depth that are added up in registers: those of a tile of many rows stay in an L1 cache of 32 KB. */
#define PART 768
INLINE int64_t part_of(int64_t depth, int64_t begin) { return depth - begin < PART ? depth - begin : PART; }

/* Few rows read as many columns as streams, each RUN columns long, and prefetch what is STREAM bytes ahead, to L2 or L1.
 * (Zen 4 reads faster with the far prefetch, but not in vectors of half a line.) With few registers, how many rows are few
 * depends on the bytes of an element: narrow ones are widened in registers only there. */
#define FEW(size) (W == 16 ? 6 : (size) == 4 ? 3 : 4)
#define RUN 24
#define STREAM (W == 16 ? 1024 : 512)
#define NEAR (W == 16 ? 2 : 3)
#define STREAMS(rows) ((rows) == 1 ? 8 : W == 16 ? ((rows) < 4 ? 8 : 24 / (rows)) : (rows) == 2 ? 4 : 3)

/* Many rows: a tile has up to TALL of them and WIDTH columns, of which ABREAST have their sums in registers together: 8
 * sums, of 4 rows with 2 columns, would wait for each other. A part of BLOCK columns stays in the L2 cache for all rows,
 * beside the next part, which the tiles prefetch as AHEAD_STREAMS streams. (Nothing prefetches the first block, for which
 * AVX-512 would wait relatively longer.) Of a weight that is widened for two groups of rows, UNIT columns at a time stay in
 * the L1 cache, by which AVX2 gains nothing. */
#define TALL 6
#define WIDTH(rows) (W < 16 && (rows) <= 4 ? 3 : 4)
#define ABREAST(rows) (W == 16 ? 4 : (rows) <= 4 ? 3 : 2)
#define BLOCK (W == 16 ? 32 : 48)
#define UNIT (W == 16 ? 4 : BLOCK)
#define AHEAD_STREAMS 2

/* More rows are computed in turns of so many, or a few less: their copy is read from a cache for every block. */
#define ROWS_TOGETHER 192

/* Elements of a weight as it is read: of the dtype, or bf16, or int8, or fp32 in the buffer. */
enum { OWN, WIDE, HALVES, BYTES };
#define HAS_HALVES (sizeof(ELEMENT) == 4) /* else they are the dtype's own */
#define SIZE_OF(kind) ((kind) == WIDE ? 4 : (kind) == HALVES ? 2 : (kind) == BYTES ? 1 : (int64_t)sizeof(ELEMENT))

typedef float quad __attribute__((vector_size(16)));

/* Lanes 4 * i to 4 * i + 3. */
INLINE quad quad_of(vf x, int i) {
#if W == 16
    if (i == 1) return (quad)_mm512_extractf32x4_ps((__m512)x, 1);
    if (i == 2) return (quad)_mm512_extractf32x4_ps((__m512)x, 2);
    if (i == 3) return (quad)_mm512_extractf32x4_ps((__m512)x, 3);
    return (quad)_mm512_castps512_ps128((__m512)x);
#elif W == 8
    return (quad)(i ? _mm256_extractf128_ps((__m256)x, 1) : _mm256_castps256_ps128((__m256)x));
#else
    return (quad){x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
#endif
}

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
INLINE void widen_kind(const char *from, int64_t n, float *to, const int kind) {
    int64_t k = 0;
    for (; k + W <= n; k += W) store_f32(to + k, load_kind(from + k * SIZE_OF(kind), kind));
    if (k < n) store_f32(to + k, load_part_kind(from + k * SIZE_OF(kind), n - k, kind));
}
static void widen(const void *from, int64_t n, float *to, int kind) {
    if (kind == BYTES) widen_kind(from, n, to, BYTES);
    if (kind == HALVES) widen_kind(from, n, to, HALVES);
    if (kind == OWN) widen_kind(from, n, to, OWN);
}

/* What many rows prefetch: a line of each stream whenever so many bytes are due. A core can wait for few lines at a time,
 * 16 for example, and loads from the L2 cache wait for them too, so the lines are spread evenly over all products of a
 * block. Streams that are far apart make the hardware read ahead in more pages. */
typedef struct {
    const char *next, *end; /* in a column of the first stream */
    int64_t bytes, column;  /* of a column; from column to column */
    int64_t apart;          /* bytes from stream to stream */
    int64_t due, of_step;   /* bytes, times the groups of rows; what W elements of the depth add to them */
    int64_t of_lines;       /* how many of these are due when a line of each stream is prefetched */
} Ahead;

INLINE void prefetch_ahead(Ahead *a) {
    if ((a->due += a->of_step) < a->of_lines) return;
#pragma GCC unroll 2
    for (int i = 0; i < AHEAD_STREAMS; i++) __builtin_prefetch(a->next + i * a->apart, 0, 2);
    a->next += 64, a->due -= a->of_lines;
    if (a->next >= a->end) a->next = a->end - a->bytes + a->column, a->end += a->column;
}

typedef struct {
    const float *x; /* few rows, x_row elements apart, or many: W elements of each row of a group, then the next W */
    int64_t x_row;
    const char *w; /* columns, w_row elements apart */
    int64_t w_row, depth;
    int64_t sums_row, sums_column; /* strides of the sums */
    /* What few rows prefetch: the same part of other columns; bytes between them, and of W elements. */
    const char *next;
    int64_t next_column, next_step;
    Ahead *ahead; /* of many rows */
} Tile;

INLINE const char *weight_at(const Tile *t, int c, int64_t k, const int kind) {
    return t->w + (c * t->w_row + k) * SIZE_OF(kind);
}

/* The sums of rows x columns; with `add` they are added to. abreast: columns whose sums are in registers together.
 * is_stream: of few rows. */
INLINE void tile(const Tile *t, float *sums, int add, const int rows, const int columns, const int abreast,
                 const int is_stream, const int kind) {
    /* Whether a row's sums are a part of a vector, and stand together in memory. */
    const int in_quads = columns == 4 && !is_stream;
    vf all[32];
    Ahead ahead;
    if (!is_stream) ahead = *t->ahead;
    for (int first = 0; first < columns; first += abreast) {
        vf own[24], w[8];
#pragma GCC unroll 24
        for (int i = 0; i < rows * abreast; i++) own[i] = (vf){0};
        const char *next = t->next;
        const float *at = t->x;
        int64_t k = 0;
        for (; k + W <= t->depth; k += W, at += is_stream ? W : rows * W) {
            if (!is_stream) prefetch_ahead(&ahead);
#pragma GCC unroll 8
            for (int c = 0; c < abreast; c++) {
                w[c] = load_kind(weight_at(t, first + c, k, kind), kind);
                if (rows > 1) KEEP(w[c]);
                if (is_stream) __builtin_prefetch(next + c * t->next_column, 0, NEAR);
            }
            if (is_stream) next += t->next_step;
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                vf x = load_f32(at + r * (is_stream ? t->x_row : W));
                KEEP(x);
#pragma GCC unroll 8
                for (int c = 0; c < abreast; c++) own[r * abreast + c] = multiply_add(x, w[c], own[r * abreast + c]);
            }
        }
        if (k < t->depth) {
#pragma GCC unroll 8
            for (int c = 0; c < abreast; c++) w[c] = load_part_kind(weight_at(t, first + c, k, kind), t->depth - k, kind);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const vf x = is_stream ? load_wide_part(at + r * t->x_row, t->depth - k) : load_f32(at + r * W);
#pragma GCC unroll 8
                for (int c = 0; c < abreast; c++) own[r * abreast + c] = multiply_add(x, w[c], own[r * abreast + c]);
            }
        }
#pragma GCC unroll 24
        for (int i = 0; i < rows * abreast; i++) all[i / abreast * columns + first + i % abreast] = own[i];
    }
    if (!is_stream) *t->ahead = ahead;
#pragma GCC unroll 32
    for (int i = rows * columns; i < (rows * columns + W - 1) / W * W; i++) all[i] = (vf){0};
#pragma GCC unroll 8
    for (int i = 0; i < rows * columns; i += W) {
        const vf total = sum_rows(all + i);
#pragma GCC unroll 4
        for (int j = 0; j < W && in_quads; j += 4) {
            float *at = sums + (i + j) / 4 * t->sums_row;
            quad sum = quad_of(total, j / 4), old;
            if (i + j >= rows * 4) break;
            if (add) memcpy(&old, at, sizeof old), sum += old;
            memcpy(at, &sum, sizeof sum);
        }
#pragma GCC unroll 16
        for (int j = 0; j < W && !in_quads; j++) {
            float *at = sums + (i + j) / columns * t->sums_row + (i + j) % columns * t->sums_column;
            if (i + j < rows * columns) *at = add ? *at + total[j] : total[j];
        }
    }
}

/* The sums of `count` columns if there are few rows. A tile takes its columns from as many streams, each of which
 * goes on through the memory from tile to tile. t: all rows, the whole depth. */
INLINE void stream_tiles(Tile t, float *sums, int64_t count, const int rows, const int columns, const int kind) {
    const float *x = t.x;
    const char *w = t.w;
    const int64_t depth = t.depth, row = t.w_row, of_tiles = count / columns;
    t.next_step = W * SIZE_OF(kind);
    for (int64_t c = 0; c < count;) {
        const int is_whole = c < of_tiles;
        t.w_row = is_whole ? row * of_tiles : row, t.sums_column = is_whole ? of_tiles : 1;
        t.next_column = t.w_row * SIZE_OF(kind);
        for (int64_t begin = 0; begin < depth; begin += PART) {
            t.x = x + begin, t.w = w + (c * row + begin) * SIZE_OF(kind), t.next = t.w + STREAM;
            t.depth = part_of(depth, begin);
            if (is_whole)
                tile(&t, sums + c, begin > 0, rows, columns, columns, 1, kind);
            else
                tile(&t, sums + c, begin > 0, rows, 1, 1, 1, kind);
        }
        c = c + 1 == of_tiles ? of_tiles * columns : c + 1;
    }
}

#define CASE(n) \
    case n: \
        if (n <= FEW(SIZE_OF(kind))) stream_tiles(*t, sums, count, n, STREAMS(n), kind); \
        break;

INLINE void stream_rows(const Tile *t, float *sums, int64_t count, int64_t rows, const int kind) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if W == 16
        CASE(5) CASE(6)
#endif
    }
}
#undef CASE

/* A function for each kind: the compiler's time grows with the square of a function's size. */
NOINLINE void stream_bytes(const Tile *t, float *sums, int64_t count, int64_t rows) {
    stream_rows(t, sums, count, rows, BYTES);
}
NOINLINE void stream_halves(const Tile *t, float *sums, int64_t count, int64_t rows) {
    if (HAS_HALVES) stream_rows(t, sums, count, rows, HALVES);
}
NOINLINE void stream_own(const Tile *t, float *sums, int64_t count, int64_t rows) {
    stream_rows(t, sums, count, rows, OWN);
}

static void stream(const Tile *t, float *sums, int64_t count, int64_t rows, int kind) {
    if (kind == BYTES) stream_bytes(t, sums, count, rows);
    if (kind == HALVES) stream_halves(t, sums, count, rows);
    if (kind == OWN) stream_own(t, sums, count, rows);
}

/* Columns of a block. */
static int64_t block_of(int64_t rows, int64_t size) { return rows <= FEW(size) ? RUN * STREAMS(rows) : BLOCK; }

/* The sums of a group of many rows with `count` columns. */
INLINE void tiles(Tile t, float *sums, int add, int64_t count, const int rows) {
    int64_t c = 0;
    for (; c + WIDTH(rows) <= count; c += WIDTH(rows), t.w += WIDTH(rows) * t.w_row * 4)
        tile(&t, sums + c, add, rows, WIDTH(rows), ABREAST(rows), 0, WIDE);
    for (; c < count; c++, t.w += t.w_row * 4) tile(&t, sums + c, add, rows, 1, 1, 0, WIDE);
}

#define CASE(n) \
    case n: tiles(*t, sums, add, count, n); break;

static void tiles_of(const Tile *t, float *sums, int add, int64_t count, int64_t rows) {
    switch (rows) {
        CASE(3) CASE(4) CASE(5) CASE(6)
    }
}

/* The groups of many rows, and the first row of a group. */
INLINE int64_t groups_of(int64_t rows) { return (rows + TALL - 1) / TALL; }
INLINE int64_t group_row(int64_t rows, int64_t group) { return rows * group / groups_of(rows); }

/* Where the rows' elements from `begin` on are in their copy: [parts of PART, groups, steps of W, rows of a group, W]. */
INLINE int64_t copied_at(int64_t rows, int64_t depth, int64_t row, int64_t begin) {
    return rows * begin + row * round_up(part_of(depth, begin), W);
}

/* The sums of many rows with `count` columns of a block. t: the rows, the columns, the whole depth; next: the next block.
 * buffer: of this thread. */
static void many_rows(Tile t, float *sums, int64_t rows, int64_t count, int kind, float *buffer) {
    const float *x = t.x;
    const char *w = t.w;
    const int64_t depth = t.depth, size = SIZE_OF(kind), groups = groups_of(rows), row_bytes = t.next_column;
    /* Columns that are widened together: for two groups so few that they stay in the L1 cache. */
    const int64_t step = size < 4 && groups <= 2 ? UNIT : count;
    Ahead ahead = {0};
    t.ahead = &ahead;
    for (int64_t begin = 0; begin < depth; begin += PART) {
        t.depth = part_of(depth, begin);
        const int is_last = begin + PART >= depth;
        ahead.next = is_last ? t.next : w + (begin + PART) * size;
        ahead.bytes = part_of(depth, is_last ? 0 : begin + PART) * size, ahead.end = ahead.next + ahead.bytes;
        ahead.column = row_bytes, ahead.apart = count / AHEAD_STREAMS * row_bytes;
        ahead.due = 0, ahead.of_lines = AHEAD_STREAMS * 64 * groups * t.depth * size / ahead.bytes;
        for (int64_t c = 0; c < count; c += step) {
            const int64_t columns = count - c < step ? count - c : step, at = c * row_bytes + begin * size;
            t.w = w + at;
            if (size < 4) {
                for (int64_t i = 0; i < columns; i++) widen(w + at + i * row_bytes, t.depth, buffer + i * PART, kind);
                t.w = (const char *)buffer, t.w_row = PART;
            }
            for (int64_t g = 0; g < groups; g++) {
                const int64_t row = group_row(rows, g), n = group_row(rows, g + 1) - row;
                ahead.of_step = ABREAST(n) * W * size;
                t.x = x + copied_at(rows, depth, row, begin);
                tiles_of(&t, sums + c + row * t.sums_row, begin > 0, columns, n);
            }
        }
    }
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
    const int64_t of_streams = block_of(rows, 1), most = of_streams > BLOCK ? of_streams : BLOCK;
    return round_up(rows * most + W, 16) + BLOCK * PART;
}

/* Bytes of workspace, aligned to 64, for hfp_linear: the rows in fp32, and what each thread needs. */
HFP_EXPORT int64_t NAME(hfp_linear_workspace)(int64_t rows, int64_t depth, int64_t threads) {
    const int64_t together = rows < ROWS_TOGETHER ? rows : ROWS_TOGETHER, of_groups = hfp_groups_workspace(rows, depth);
    int64_t bytes = (together * round_up(depth, 16) + threads * thread_floats(together)) * 4;
    if (of_groups > bytes) bytes = of_groups;
#ifdef LINEAR_PARTS
    const int64_t of_parts = rows < FEWEST_ROWS ? 0 : parts_workspace(rows, depth, threads);
    if (of_parts > bytes) return of_parts;
#endif
    return bytes;
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
    const int kind = all.kind, is_direct = sizeof(ELEMENT) == 4 && !l.scales && !l.bias; /* no sum is changed after it */
    const int64_t block = all.block, size = SIZE_OF(kind);
    float *sums = all.of_threads + thread * thread_floats(l.rows);
    for (int64_t b = first; b < last; b++) {
        const int64_t column = b * block, count = l.columns - column < block ? l.columns - column : block;
        const char *w = (const char *)l.weight + column * l.depth * size;
        float *to = is_direct ? (float *)(void *)l.out + column : sums;
        Tile t = {all.x, all.x_row, w, l.depth, l.depth, is_direct ? l.columns : block, 1, w + block * l.depth * size,
                  l.depth * size, W * size, 0};
        if (l.rows > FEW(size))
            many_rows(t, to, l.rows, count, kind, sums + round_up(l.rows * block + W, 16));
        else
            stream(&t, to, count, l.rows, kind);
        for (int64_t r = 0; r < l.rows && !is_direct; r++)
            for (int64_t c = 0; c < count; c += W)
                store_sums(&l, load_f32(sums + r * block + c), r, column + c, count - c < W ? count - c : W);
    }
}

typedef struct {
    const Linear *linear;
    float *copy;
} Copying;

static void widen_rows(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Copying w = *(const Copying *)arguments;
    const int64_t depth = w.linear->depth, row = round_up(depth, 16);
    (void)thread;
    for (int64_t r = first; r < last; r++) widen(w.linear->x + r * depth, depth, w.copy + r * row, OWN);
}

/* Copies groups of rows as many_rows reads them: in one stream, so that rows that are a power of two apart do not compete
 * for the same lines of a cache. */
static void copy_groups(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Copying w = *(const Copying *)arguments;
    const int64_t rows = w.linear->rows, depth = w.linear->depth;
    (void)thread;
    for (int64_t g = first; g < last; g++) {
        const int64_t row = group_row(rows, g), end = group_row(rows, g + 1);
        for (int64_t k = 0; k < depth; k += W) {
            const ELEMENT *from = w.linear->x + row * depth + k;
            float *to = w.copy + copied_at(rows, depth, row, k / PART * PART) + k % PART * (end - row);
            for (int64_t r = row; r < end; r++, from += depth, to += W)
                store_f32(to, depth - k >= W ? LOAD(from) : load_part(from, depth - k));
        }
    }
}

/* Sums whose lanes run along the depth, of a number of rows that are computed together. */
static void lanes_of(const Linear *call, int kind) {
    const Linear l = *call;
    const int64_t size = SIZE_OF(kind), share = (l.columns + l.threads - 1) / l.threads;
    const int is_many = l.rows > FEW(size), copies = is_many || sizeof(ELEMENT) < 4;
    int64_t block = block_of(l.rows, size);
    if (is_many && share < 4 * block) block /= 2; /* threads have even shares of smaller blocks */
    if (!is_many && round_up(share, 8) < block) block = round_up(share, 8); /* so that no thread is without one */
    float *copy = (float *)(void *)l.workspace, *of_threads = copy + (copies ? l.rows * round_up(l.depth, 16) : 0);
    if (copies)
        in_parallel(is_many ? copy_groups : widen_rows, &(Copying){call, copy}, is_many ? groups_of(l.rows) : l.rows,
                    l.rows * l.depth >= FORK_ELEMENTS ? l.threads : 1, IN_SHARES);
    const Blocks all = {call, kind, block, copies ? round_up(l.depth, 16) : l.depth,
                        copies ? copy : (const float *)(const void *)l.x, of_threads};
    in_parallel(linear_blocks, &all, (l.columns + block - 1) / block, l.threads, IN_SHARES);
}

static void linear_in_lanes(const Linear *call, int kind) {
    const int64_t count = (call->rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = call->rows * i / count;
        Linear l = *call;
        l.x += row * l.depth, l.out += row * l.columns, l.rows = call->rows * (i + 1) / count - row;
        lanes_of(&l, kind);
    }
}

/* out = x x weight + bias, rounded to the dtype once. The sums of a row do not depend on the threads. They depend on the
 * number of rows only where many have an order of their own (LINEAR_PARTS). */
HFP_EXPORT void NAME(hfp_linear)(const Linear *l) {
    const int kind = l->scales ? BYTES : HAS_HALVES && l->packed ? HALVES : OWN;
    if (!l->rows) return;
    if (l->packed >= PACKED_GROUPS) {
        hfp_linear_groups(l, DTYPE_NUMBER, IN_ONE_ORDER);
        return;
    }
#ifdef LINEAR_PARTS
    if (l->rows >= FEWEST_ROWS && l->columns >= FEWEST_COLUMNS && !in_one_order && amx_allowed()) {
        linear_parts(l, kind);
        return;
    }
#endif
    linear_in_lanes(l, kind);
}
