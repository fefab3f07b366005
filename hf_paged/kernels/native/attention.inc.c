/* Paged attention of few new tokens. Included by the unit of each dtype, which defines DTYPE (the suffix), ELEMENT
 * (its C type), LOAD (loads W elements as fp32), STORE_EXACT (stores W values that it represents exactly), DOT_BF16 (whether queries stay in bf16 and are multiplied by the
 * CPU's bf16 dot product) and COMMON_DIMS (whether separate code is compiled for head sizes 64 and 128). */
#include "eight.h"
#include "keys.h"
#include "vectors.h"
#include "finish.inc.c"

#if DOT_BF16
#define Q_ELEMENT uint16_t
#define Q_STEP (2 * W)
#else
#define Q_ELEMENT float
#define Q_STEP W
#endif

/* The first n < W elements at p, followed by zeros. Reads no other elements. */
INLINE vf TYPED(load_part)(const ELEMENT *p, int64_t n) {
    ELEMENT whole[W] = {0};
    memcpy(whole, p, (size_t)n * sizeof(ELEMENT));
    return LOAD(whole);
}

#define LINE (64 / (int64_t)sizeof(ELEMENT))

#if DOT_BF16
#define MULTIPLY_ADD(sum, q, k) \
    ((vf)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)_mm512_loadu_si512(q), (__m512bh)_mm512_loadu_si512(k)))
#else
#define MULTIPLY_ADD(sum, q, k) ((sum) + load_f32(q) * LOAD(k))
#endif

/* The scores of one query with W keys: lane j = q . k[offsets[j]]. q is padded with zeros to a multiple of 2 * W.
 * Prefetches the rows at `ahead` along the way, because prefetching many at once would fill the miss buffers and
 * stall. fixed: dim is a compile-time constant and a multiple of Q_STEP. */
INLINE vf TYPED(scores)(const Q_ELEMENT *q, const ELEMENT *k, const int64_t *offsets, const int64_t *ahead,
                        const int64_t dim, const int fixed) {
    vf sums[W];
    if (fixed) {
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) {
            const ELEMENT *row = k + offsets[j];
            if (ahead)
                for (int64_t l = 0; l < dim; l += LINE) PREFETCH(k + ahead[j] + l);
            vf sum = {0};
#pragma GCC unroll 32
            for (int64_t d = 0; d < dim; d += Q_STEP) sum = MULTIPLY_ADD(sum, q + d, row + d);
            sums[j] = sum;
        }
        return sum_rows(sums);
    }
    for (int j = 0; j < W; j++) {
        const ELEMENT *row = k + offsets[j];
        if (ahead)
            for (int64_t l = 0; l < dim; l += LINE) PREFETCH(k + ahead[j] + l);
        int64_t d = 0;
        vf sum = {0};
        for (; d + Q_STEP <= dim; d += Q_STEP) sum = MULTIPLY_ADD(sum, q + d, row + d);
        if (d < dim) {
            ELEMENT part[Q_STEP] = {0};
            memcpy(part, row + d, (size_t)(dim - d) * sizeof(ELEMENT));
            sum = MULTIPLY_ADD(sum, q + d, part);
        }
        sums[j] = sum;
    }
    return sum_rows(sums);
}

#if W == 16
#define SLICE 4
#else
#define SLICE 2
#endif

/* acc[r] = acc[r] * factors[r] + the sum of p[r] * v over the keys, for `rows` rows and `width` vectors from element d
 * on. part: elements of the last, partial vector; 0 if it is full. kind: how the values are stored. */
INLINE void TYPED(add_values)(float **acc, const float *factors, const float *p, const char *v,
                              const int64_t *offsets, const int64_t *ahead, int first, int last, int64_t d,
                              int64_t part, const int rows, const int width, const int64_t kind) {
    const int64_t size = kind ? 1 : (int64_t)sizeof(ELEMENT);
    vf sum[4][SLICE];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < width; i++) sum[r][i] = load_f32(acc[r] + d + i * W) * factors[r];
    for (int j = first; j < last; j++) {
        const char *row = v + (offsets[j] + d) * size;
        if (ahead)
            for (int64_t l = 0; l < width * W * size; l += 64) PREFETCH(v + (ahead[j] + d) * size + l);
        vf x[SLICE];
#pragma GCC unroll 4
        for (int i = 0; i < width; i++) {
            const ELEMENT *exact = (const ELEMENT *)(const void *)row + i * W;
            if (kind)
                x[i] = part ? load_part_eight(row, part, kind) : load_eight(row + i * W, kind);
            else
                x[i] = part ? TYPED(load_part)(exact, part) : LOAD(exact);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int i = 0; i < width; i++) sum[r][i] += p[r * TILE + j] * x[i];
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < width; i++) store_f32(acc[r] + d + i * W, sum[r][i]);
}

INLINE void TYPED(add_rows)(float **acc, const float *factors, const float *p, const char *v,
                            const int64_t *offsets, const int64_t *ahead, int first, int last, const int64_t dim,
                            const int rows, const int64_t kind) {
    int64_t d = 0;
    for (; d + SLICE * W <= dim; d += SLICE * W)
        TYPED(add_values)(acc, factors, p, v, offsets, ahead, first, last, d, 0, rows, SLICE, kind);
    for (; d + W <= dim; d += W)
        TYPED(add_values)(acc, factors, p, v, offsets, ahead, first, last, d, 0, rows, 1, kind);
    if (d < dim) TYPED(add_values)(acc, factors, p, v, offsets, ahead, first, last, d, dim - d, rows, 1, kind);
}

/* The same for up to four rows. */
INLINE void TYPED(add_group)(float **acc, const float *factors, const float *p, const char *v,
                             const int64_t *offsets, const int64_t *ahead, int first, int last, const int64_t dim,
                             int64_t rows, const int64_t kind) {
    if (rows >= 4)
        TYPED(add_rows)(acc, factors, p, v, offsets, ahead, first, last, dim, 4, kind);
    else if (rows == 3)
        TYPED(add_rows)(acc, factors, p, v, offsets, ahead, first, last, dim, 3, kind);
    else if (rows == 2)
        TYPED(add_rows)(acc, factors, p, v, offsets, ahead, first, last, dim, 2, kind);
    else
        TYPED(add_rows)(acc, factors, p, v, offsets, ahead, first, last, dim, 1, kind);
}

typedef struct {
    Q_ELEMENT *q;   /* [num_kv_heads, rows, padded head_dim] */
    float *sums;    /* [num_kv_heads, rows, W] */
    float *scores;  /* [rows, TILE] */
    float *factors; /* [rows] */
    float **acc;    /* [rows] of the current KV head */
    float **slots;  /* [count]: the partial result of each query */
    float *own;     /* slots for the queries without other chunks */
    int64_t *low, *high; /* [count]: the positions [low, high) that each query sees */
    ELEMENT *tile;       /* [TILE, padded head]: keys or values of eight bits, without their scales */
    int64_t *tile_at;    /* [TILE]: the offsets of these rows */
    float *key_scales, *value_scales; /* [TILE] of the current KV head */
} TYPED(Buffers);

/* An item while it is computed. Passed by value, so that the compiler can keep its fields in registers. */
typedef struct {
    const Call *call;
    const Token *tokens;                 /* [count] */
    int64_t count, group, heads, rows;   /* queries; query heads per KV head; query heads; rows of a KV head */
    int64_t q_pad, v_pad, header;        /* padded sizes of a query, of an output; floats before a slot's outputs */
    float scale, softcap;
    TYPED(Buffers) b;
} TYPED(Work);

/* Clear the slots of the item's queries, and pack the queries by KV head. */
INLINE void TYPED(begin_item)(const TYPED(Work) w, const int64_t dim, const int64_t v_dim) {
    const Call *call = w.call;
    const int64_t slot_size = slot_bytes(w.heads, v_dim) / 4;
    for (int64_t t = 0; t < w.count; t++) {
        const Token token = w.tokens[t];
        w.b.low[t] = first_key(token.pos, call->bounds);
        w.b.high[t] = token.end;
        float *slot = token.slot < 0 ? w.b.own + t * slot_size : (float *)call->workspace + token.slot * slot_size;
        w.b.slots[t] = slot;
        for (int64_t h = 0; h < w.heads; h++) slot[h] = -INFINITY;
        memset(slot + w.header, 0, sizeof(float) * (size_t)(w.heads * w.v_pad));
        const ELEMENT *query = (const ELEMENT *)call->query + token.row * call->q_token;
        for (int64_t h = 0; h < w.heads; h++) {
            Q_ELEMENT *to = w.b.q + ((h / w.group) * w.rows + t * w.group + h % w.group) * w.q_pad;
            const ELEMENT *from = query + h * call->q_head;
#if DOT_BF16
            memcpy(to, from, (size_t)dim * 2);
            memset(to + dim, 0, (size_t)(w.q_pad - dim) * 2);
#else
            int64_t d = 0;
            for (; d + W <= dim; d += W) store_f32(to + d, LOAD(from + d));
            if (d < dim) store_f32(to + d, TYPED(load_part)(from + d, dim - d));
#endif
        }
    }
    memset(w.b.sums, 0, sizeof(float) * (size_t)(w.heads * w.count * W));
}

/* Unpack rows [first, last) of a tile, which are in eight bits at the offsets `at`, and prefetch those at `ahead`. */
INLINE void TYPED(unpack_rows)(const TYPED(Work) w, const char *rows, const int64_t *at, const int64_t *ahead,
                               int64_t first, int64_t last, const int64_t dim, const int64_t kind) {
    for (int64_t j = first; j < last; j++) {
        const char *row = rows + at[j];
        ELEMENT *to = w.b.tile + w.b.tile_at[j];
        for (int64_t l = 0; l < dim; l += 64) PREFETCH(rows + ahead[j] + l);
        int64_t d = 0;
#pragma GCC unroll 8
        for (; d + W <= dim; d += W) STORE_EXACT(to + d, load_eight(row + d, kind));
        if (d < dim) STORE_EXACT(to + d, load_part_eight(row + d, dim - d, kind));
    }
}

INLINE void TYPED(unpack_tile)(const TYPED(Work) w, const char *rows, const int64_t *at, const int64_t *ahead,
                               int64_t first, int64_t last, const int64_t dim, int64_t kind) {
    BY_KIND(kind, TYPED(unpack_rows), w, rows, at, ahead, first, last, dim)
}

/* The scores of a tile's keys with the rows of KV head h: [rows, TILE], of which `vectors` vectors per row are
 * computed. */
INLINE void TYPED(score_tile)(const TYPED(Work) w, int64_t h, const int64_t *at, const int64_t *ahead, int vectors,
                              const int64_t dim, const int fixed) {
    const ELEMENT *k = (const ELEMENT *)w.call->key + h * w.call->k_head;
    const Q_ELEMENT *q = w.b.q + h * w.rows * w.q_pad;
    const int64_t kind = w.call->key_store.kind;
    if (kind) {
        const char *rows = w.call->key + h * w.call->k_head;
        TYPED(unpack_tile)(w, rows, at, ahead, 0, vectors * W, dim, kind);
        k = w.b.tile, at = w.b.tile_at, ahead = NULL;
    }
    for (int x = 0; x < vectors; x++) {
        const int64_t *next = ahead ? ahead + x * W : NULL;
        const vf scale = kind ? load_f32(w.b.key_scales + x * W) * w.scale : splat(w.scale);
        store_f32(w.b.scores + x * W, TYPED(scores)(q, k, at + x * W, next, dim, fixed) * scale);
        for (int64_t r = 1; r < w.rows; r++) {
            vf s = TYPED(scores)(q + r * w.q_pad, k, at + x * W, NULL, dim, fixed);
            store_f32(w.b.scores + r * TILE + x * W, s * scale);
        }
    }
}

/* Apply softcap, ALiBi and the mask to a row of scores: query t, keys from position `tile` on. Returns the maximum of
 * each lane. */
INLINE vf TYPED(mask_row)(const TYPED(Work) w, float *s, int64_t head, int64_t t, int64_t tile, int vectors) {
    const Call *call = w.call;
    const int64_t lo = w.b.low[t] - tile, hi = w.b.high[t] - tile;
    vi lanes = {0};
    for (int i = 0; i < W; i++) lanes[i] = i;
    vf top = splat(-INFINITY);
    for (int x = 0; x < vectors; x++) {
        vf y = load_f32(s + x * W);
        if (w.softcap > 0) y = w.softcap * tanh_v(y / w.softcap);
        if (call->slopes) {
            vi distance = lanes + (int32_t)(tile + x * W - w.tokens[t].pos);
            y += call->slopes[head] * __builtin_convertvector(distance, vf);
        }
        if (lo > x * W || hi < (x + 1) * W) {
            vi place = lanes + x * W;
            int32_t from = (int32_t)(lo < 0 ? 0 : lo), to = (int32_t)(hi > TILE ? TILE : hi);
            vi seen = (place >= from) & (place < to);
            y = choose(seen, y, splat(-INFINITY));
        }
        store_f32(s + x * W, y);
        top = vmax(y, top);
    }
    return top;
}

/* Replace a row of scores by weights, and update the row's maximum and sums. Stores in factors[r] the factor for the
 * output so far. The row r is query t, head g of the group of KV head h. */
INLINE void TYPED(softmax_row)(const TYPED(Work) w, int64_t h, int64_t t, int64_t g, int64_t tile, int vectors) {
    const int64_t r = t * w.group + g, head = h * w.group + g;
    float *s = w.b.scores + r * TILE, *slot = w.b.slots[t], *sums = w.b.sums + (h * w.rows + r) * W;
    w.b.acc[r] = slot + w.header + head * w.v_pad;
    const vf top = TYPED(mask_row)(w, s, head, t, tile, vectors);
    float before = slot[head], after = max_lanes(top);
    if (!(after > before)) after = before;
    if (after == -INFINITY) { /* no visible key in the chunk so far */
        for (int x = 0; x < vectors; x++) store_f32(s + x * W, (vf){0});
        w.b.factors[r] = 1;
        return;
    }
    float factor = before == after ? 1.0f : exp_negative(splat(before - after))[0];
    vf sum = load_f32(sums) * factor;
    for (int x = 0; x < vectors; x++) {
        vf p = exp_negative(load_f32(s + x * W) - after);
        store_f32(s + x * W, p);
        sum += p;
    }
    store_f32(sums, sum);
    slot[head] = after;
    w.b.factors[r] = factor;
}

/* Add the weighted values of keys [first, last) of a tile to the outputs of KV head h, four rows at a time. */
INLINE void TYPED(add_tile)(const TYPED(Work) w, int64_t h, const int64_t *at, const int64_t *ahead, int first,
                            int last, const int64_t v_dim) {
    const int64_t kind = w.call->value_store.kind, size = kind ? 1 : (int64_t)sizeof(ELEMENT);
    const char *v = w.call->value + h * w.call->v_head * size;
    if (kind)
        for (int64_t r = 0; r < w.rows; r++)
            for (int64_t x = 0; x < TILE; x += W) {
                float *p = w.b.scores + r * TILE + x;
                store_f32(p, load_f32(p) * load_f32(w.b.value_scales + x));
            }
    /* Values of eight bits that are read once are not unpacked before. */
    if (kind && w.rows <= 4) {
        BY_KIND(kind, TYPED(add_group), w.b.acc, w.b.factors, w.b.scores, v, at, ahead, first, last, v_dim, w.rows)
        return;
    }
    if (kind) {
        TYPED(unpack_tile)(w, v, at, ahead, first, last, v_dim, kind);
        v = (const char *)w.b.tile, at = w.b.tile_at, ahead = NULL;
    }
    for (int64_t r = 0; r < w.rows; r += 4, ahead = NULL)
        TYPED(add_group)(w.b.acc + r, w.b.factors + r, w.b.scores + r * TILE, v, at, ahead, first, last, v_dim,
                         w.rows - r, EXACT);
}

/* Store the sums, and write the outputs of the queries without other chunks. */
INLINE void TYPED(end_item)(const TYPED(Work) w) {
    for (int64_t t = 0; t < w.count; t++) {
        for (int64_t h = 0; h < w.heads; h++) {
            int64_t r = (h / w.group) * w.rows + t * w.group + h % w.group;
            w.b.slots[t][w.heads + h] = sum_lanes(load_f32(w.b.sums + r * W));
        }
        if (w.tokens[t].slot < 0) TYPED(finish)(w.call, w.tokens[t].row, w.b.slots[t], 0, 1, 0, w.heads);
    }
}

/* Compute an item. next: the item that this thread is likely to compute next, which is prefetched, or NULL. */
INLINE void TYPED(run_item)(const Call *call, const Item *item, const Item *next, TYPED(Buffers) b, float scale,
                            float softcap, const int64_t dim, const int64_t v_dim, const int fixed) {
    const int64_t kv_heads = call->num_kv_heads, heads = call->num_heads, group = heads / kv_heads;
    const TYPED(Work) w = {call, call->partition->tokens + item->first, item->count, group, heads, item->count * group,
                           padded_dim(dim), padded_dim(v_dim), round_up(2 * heads, 16), scale, softcap, b};
    const int32_t *table = call->tables + item->seq * call->table_stride;
    int64_t low, high, next_low = 0, next_high = 0;
    keys_of_item(call, item, &low, &high);
    if (next) keys_of_item(call, next, &next_low, &next_high);
    TYPED(begin_item)(w, dim, v_dim);

    Places places[2]; /* of this tile and of the next one */
    const int64_t start = low / TILE * TILE;
    const Store *stores[2] = {&call->key_store, &call->value_store};
    find_places(call, table, start, low, high, &places[0]);
    int side = 0;
    for (int64_t tile = start; tile < high; tile += TILE, side ^= 1) {
        const Places *at = &places[side], *ahead = &places[side ^ 1];
        if (tile + TILE < high)
            find_places(call, table, tile + TILE, low, high, &places[side ^ 1]);
        else if (next)
            find_places(call, call->tables + next->seq * call->table_stride, next_low / TILE * TILE, next_low, next_high,
                        &places[side ^ 1]);
        else
            ahead = at;
        const int first = tile < low ? (int)(low - tile) : 0, last = high - tile < TILE ? (int)(high - tile) : TILE;
        const int vectors = (last + W - 1) / W;
        for (int64_t h = 0; h < kv_heads; h++) {
            if (stores[0]->kind) take_scales(b.key_scales, stores[0], h, at->scales[0], TILE);
            if (stores[1]->kind) take_scales(b.value_scales, stores[1], h, at->scales[1], TILE);
            if (last < TILE) { /* These keys prefetch less than the next tile may have. */
                const int64_t k_size = stores[0]->kind ? 1 : (int64_t)sizeof(ELEMENT);
                const int64_t v_size = stores[1]->kind ? 1 : (int64_t)sizeof(ELEMENT);
                prefetch_rows(call->key + h * call->k_head * k_size, ahead->k, vectors * W, dim, k_size);
                prefetch_rows(call->value + h * call->v_head * v_size, ahead->v, last, v_dim, v_size);
            }
            TYPED(score_tile)(w, h, at->k, ahead->k, vectors, dim, fixed);
            for (int64_t t = 0; t < w.count; t++)
                for (int64_t g = 0; g < group; g++) TYPED(softmax_row)(w, h, t, g, tile, vectors);
            TYPED(add_tile)(w, h, at->v, ahead->v, first, last, v_dim);
        }
    }
    TYPED(end_item)(w);
}

/* For each head size a function of its own: the compiler's time grows with the square of a function's size. */
#define RUN_ITEM(name, dim, v_dim, fixed)                                                                              \
    NOINLINE void name(const Call *call, const Item *item, const Item *next, const TYPED(Buffers) *b, float scale,     \
                       float softcap) {                                                                                \
        TYPED(run_item)(call, item, next, *b, scale, softcap, dim, v_dim, fixed);                                      \
    }
RUN_ITEM(TYPED(run_item_any), call->head_dim, call->v_head_dim, 0)
#if COMMON_DIMS
RUN_ITEM(TYPED(run_item_64), 64, 64, 1)
RUN_ITEM(TYPED(run_item_128), 128, 128, 1)
#endif

static TYPED(Buffers) TYPED(buffers)(char *at, const Call *call) {
    const int64_t count = call->partition->max_count, heads = call->num_heads, rows = count * (heads / call->num_kv_heads);
    TYPED(Buffers) b;
    b.q = take(&at, count * heads * padded_dim(call->head_dim) * (int64_t)sizeof(Q_ELEMENT));
    b.sums = take(&at, count * heads * W * 4);
    b.scores = take(&at, rows * TILE * 4);
    b.factors = take(&at, rows * 4);
    b.acc = take(&at, rows * 8);
    b.slots = take(&at, count * 8);
    b.low = take(&at, count * 8);
    b.high = take(&at, count * 8);
    b.own = take(&at, count * slot_bytes(heads, call->v_head_dim));
    const int64_t pad = padded_dim(call->head_dim > call->v_head_dim ? call->head_dim : call->v_head_dim);
    b.tile = take(&at, TILE * pad * (int64_t)sizeof(ELEMENT));
    b.tile_at = take(&at, TILE * 8);
    b.key_scales = take(&at, TILE * 4);
    b.value_scales = take(&at, TILE * 4);
    for (int64_t j = 0; j < TILE; j++) b.tile_at[j] = j * pad;
    return b;
}

typedef struct {
    const Call *call;
    char *parts; /* the workspaces of the threads */
    int64_t own_bytes;
    float scale, softcap;
} TYPED(Items);

static void TYPED(run_items)(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const TYPED(Items) all = *(const TYPED(Items) *)arguments;
    const Call *call = all.call;
    const Partition *partition = call->partition;
#if COMMON_DIMS
    const int64_t dim = call->head_dim, v_dim = call->v_head_dim;
#endif
    const TYPED(Buffers) b = TYPED(buffers)(all.parts + thread * all.own_bytes, call);
    /* The item that this thread probably computes next. */
    const int64_t ahead = last - first > 1 ? 1 : call->threads;
    for (int64_t i = first; i < last; i++) {
        const Item *item = partition->items + i;
        const Item *next = i + ahead < partition->num_items ? item + ahead : NULL;
#if COMMON_DIMS
        if (dim == 64 && v_dim == 64)
            TYPED(run_item_64)(call, item, next, &b, all.scale, all.softcap);
        else if (dim == 128 && v_dim == 128)
            TYPED(run_item_128)(call, item, next, &b, all.scale, all.softcap);
        else
#endif
            TYPED(run_item_any)(call, item, next, &b, all.scale, all.softcap);
    }
}

void TYPED(attention)(const Call *call, float scale, float softcap) {
    const Partition *partition = call->partition;
    const int64_t own_bytes = thread_bytes(partition->max_count, call->num_heads, call->num_kv_heads, call->head_dim,
                                           call->v_head_dim);
    char *parts = call->workspace + partition->num_slots * slot_bytes(call->num_heads, call->v_head_dim);
    const TYPED(Items) all = {call, parts, own_bytes, scale, softcap};
    in_parallel(TYPED(run_items), &all, partition->num_items, call->threads, ONE_BY_ONE);
    TYPED(merge)(call);
}
