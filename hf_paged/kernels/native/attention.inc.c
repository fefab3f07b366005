/* Paged attention for one dtype: DTYPE (suffix), ELEMENT, LOAD (W elements as fp32), DOT_BF16 (queries stay
 * bf16 and are multiplied by the bf16 dot product of the machine), COMMON_DIMS (head sizes 64 and 128 get code of their
 * own), IS_BF16. Included by paged.c; knows Call and Plan only. */

#if DOT_BF16
#define Q_ELEMENT uint16_t
#define Q_STEP (2 * W)
#else
#define Q_ELEMENT float
#define Q_STEP W
#endif

/* The first n < W elements at p, zeros behind them; reads nothing else. */
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

/* Scores of one query with W keys: lane j = q . k[offsets[j]]. q is padded with zeros to a multiple of 2 * W.
 * The rows at `ahead` are prefetched meanwhile, a few at a time: all at once would fill the miss buffers and stall.
 * `fixed`: dim is a constant, a multiple of Q_STEP. */
INLINE vf TYPED(scores)(const Q_ELEMENT *q, const ELEMENT *k, const int64_t *offsets, const int64_t *ahead,
                        const int64_t dim, const int fixed) {
    vf sums[W];
    if (fixed) {
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) {
            const ELEMENT *row = k + offsets[j];
            if (ahead)
                for (int64_t l = 0; l < dim; l += LINE) __builtin_prefetch(k + ahead[j] + l);
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
            for (int64_t l = 0; l < dim; l += LINE) __builtin_prefetch(k + ahead[j] + l);
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

/* acc[r] = acc[r] * factor[r] + sum over keys of p[r] * v, for `rows` rows and `width` vectors from element d on. */
INLINE void TYPED(add_values)(float **acc, const float *factors, const float *p, const ELEMENT *v,
                              const int64_t *offsets, const int64_t *ahead, int first, int last, int64_t d,
                              int64_t part, const int rows, const int width) {
    vf sum[4][SLICE];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < width; i++) sum[r][i] = load_f32(acc[r] + d + i * W) * factors[r];
    for (int j = first; j < last; j++) {
        const ELEMENT *row = v + offsets[j] + d;
        if (ahead)
            for (int64_t l = 0; l < width * W; l += LINE) __builtin_prefetch(v + ahead[j] + d + l);
        vf x[SLICE];
#pragma GCC unroll 4
        for (int i = 0; i < width; i++) x[i] = part ? TYPED(load_part)(row, part) : LOAD(row + i * W);
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

INLINE void TYPED(add_rows)(float **acc, const float *factors, const float *p, const ELEMENT *v,
                            const int64_t *offsets, const int64_t *ahead, int first, int last, const int64_t dim,
                            const int rows) {
    int64_t d = 0;
    for (; d + SLICE * W <= dim; d += SLICE * W)
        TYPED(add_values)(acc, factors, p, v, offsets, ahead, first, last, d, 0, rows, SLICE);
    for (; d + W <= dim; d += W) TYPED(add_values)(acc, factors, p, v, offsets, ahead, first, last, d, 0, rows, 1);
    if (d < dim) TYPED(add_values)(acc, factors, p, v, offsets, ahead, first, last, d, dim - d, rows, 1);
}

typedef struct {
    Q_ELEMENT *q;   /* [num_kv_heads, rows, padded head_dim] */
    float *sums;    /* [num_kv_heads, rows, W] */
    float *scores;  /* [rows, TILE] */
    float *factors; /* [rows] */
    float **acc;    /* [rows] of the current KV head */
    float **slots;  /* [count]: maxima, sums, outputs of each query */
    float *own;     /* slots of the queries that have no other chunk */
    int64_t *low, *high; /* [count]: the keys each query sees */
} TYPED(Buffers);

INLINE void *TYPED(take)(char **at, int64_t bytes) {
    void *p = *at;
    *at += round_up(bytes, 64);
    return p;
}

/* Normalise and write one query's heads [first, last) from `count` partial results, `stride` floats apart. The maxima
 * are replaced by the weights of their partial results. */
static void TYPED(finish)(const Call *call, int32_t row, float *partials, int64_t stride, int64_t count, int64_t first,
                          int64_t last) {
    const int64_t heads = call->num_heads, dim = call->v_head_dim, pad = padded_dim(dim);
    for (int64_t h = first; h < last; h++) {
        float top = call->sinks ? call->sinks[h] : -INFINITY;
        for (int64_t c = 0; c < count; c++) top = partials[c * stride + h] > top ? partials[c * stride + h] : top;
        float total = call->sinks ? expf(call->sinks[h] - top) : 0.0f;
        for (int64_t c = 0; c < count; c++) {
            float *part = partials + c * stride;
            part[h] = part[h] == -INFINITY ? 0.0f : expf(part[h] - top);
            total += part[h] * part[heads + h];
        }
        const float scale = 1.0f / total;
        const float *acc = partials + round_up(2 * heads, 16) + h * pad;
        ELEMENT *out = (ELEMENT *)call->out + row * call->o_token + h * call->o_head;
        for (int64_t d = 0; d < dim; d += W) {
            vf sum = {0};
            for (int64_t c = 0; c < count; c++) sum += load_f32(acc + c * stride + d) * partials[c * stride + h];
            sum *= scale;
            TYPED(store_part)(out + d, sum, dim - d < W ? dim - d : W);
        }
        if (call->lse) call->lse[row * heads + h] = top + logf(total);
    }
}

/* Where the keys and values of positions [low, high) of `size` positions from `tile` on lie. Positions among these that
 * nobody sees take the place of one that somebody sees: they count for nothing, but they are read. */
INLINE void TYPED(locate)(const Call *call, const int32_t *table, int64_t tile, int64_t size, int64_t low,
                          int64_t high, int64_t *k_at, int64_t *v_at) {
    const int64_t from = tile > low ? tile : low, to = tile + size < high ? tile + size : high;
    int64_t block = from / call->block_size, inside = from % call->block_size;
    for (int64_t j = from; j < to;) {
        int64_t run = call->block_size - inside < to - j ? call->block_size - inside : to - j;
        int64_t k = table[block] * call->k_block + inside * call->k_token;
        int64_t v = table[block] * call->v_block + inside * call->v_token;
        for (int64_t i = 0; i < run; i++) {
            k_at[j - tile + i] = k + i * call->k_token;
            v_at[j - tile + i] = v + i * call->v_token;
        }
        j += run;
        inside = 0;
        block++;
    }
    for (int64_t j = 0; j < from - tile; j++) k_at[j] = k_at[from - tile], v_at[j] = v_at[from - tile];
    for (int64_t j = to - tile; j < size; j++) k_at[j] = k_at[from - tile], v_at[j] = v_at[from - tile];
}

/* The keys of an item that at least one of its queries sees. */
INLINE void TYPED(range)(const Call *call, const Item *item, int64_t *low, int64_t *high) {
    const Token *tokens = call->plan->tokens + item->first;
    const int64_t start = (int64_t)item->chunk * CHUNK, end = start + CHUNK;
    *low = end;
    *high = start;
    for (int64_t t = 0; t < item->count; t++) {
        int64_t lo = first_key(tokens[t].pos, call->window, call->chunk_size), hi = tokens[t].pos + 1;
        lo = lo > start ? lo : start;
        hi = hi < end ? hi : end;
        *low = lo < *low ? lo : *low;
        *high = hi > *high ? hi : *high;
    }
}

/* `next`: the item that this thread is likely to do next (prefetched), or NULL. */
INLINE void TYPED(run_item)(const Call *call, const Item *item, const Item *next, TYPED(Buffers) b, float scale,
                            float softcap, const int64_t dim, const int64_t v_dim, const int fixed) {
    const Plan *plan = call->plan;
    const Token *tokens = plan->tokens + item->first;
    const int64_t count = item->count, kv_heads = call->num_kv_heads, heads = call->num_heads;
    const int64_t group = heads / kv_heads, rows = count * group;
    const int64_t q_pad = padded_dim(dim), v_pad = padded_dim(v_dim), header = round_up(2 * heads, 16);
    const int64_t slot_size = round_up(slot_floats(heads, v_dim) * 4, 64) / 4;
    const int32_t *table = call->tables + item->seq * call->table_stride;
    const ELEMENT *keys = (const ELEMENT *)call->key, *values = (const ELEMENT *)call->value;

    int64_t low, high, next_low = 0, next_high = 0;
    TYPED(range)(call, item, &low, &high);
    if (next) TYPED(range)(call, next, &next_low, &next_high);
    for (int64_t t = 0; t < count; t++) {
        b.low[t] = first_key(tokens[t].pos, call->window, call->chunk_size);
        b.high[t] = tokens[t].pos + 1;
        float *slot = tokens[t].slot < 0 ? b.own + t * slot_size
                                         : (float *)call->workspace + tokens[t].slot * slot_size;
        b.slots[t] = slot;
        for (int64_t h = 0; h < heads; h++) slot[h] = -INFINITY;
        memset(slot + header, 0, sizeof(float) * (size_t)(heads * v_pad));
        const ELEMENT *query = (const ELEMENT *)call->query + tokens[t].row * call->q_token;
        for (int64_t h = 0; h < heads; h++) {
            Q_ELEMENT *to = b.q + ((h / group) * rows + t * group + h % group) * q_pad;
            const ELEMENT *from = query + h * call->q_head;
#if DOT_BF16
            memcpy(to, from, (size_t)dim * 2);
            memset(to + dim, 0, (size_t)(q_pad - dim) * 2);
#else
            int64_t d = 0;
            for (; d + W <= dim; d += W) store_f32(to + d, LOAD(from + d));
            if (d < dim) store_f32(to + d, TYPED(load_part)(from + d, dim - d));
#endif
        }
    }
    memset(b.sums, 0, sizeof(float) * (size_t)(heads * count * W));

    int64_t k_offsets[2][TILE], v_offsets[2][TILE];
    vi lanes = {0};
    for (int i = 0; i < W; i++) lanes[i] = i;
    int64_t start = low / TILE * TILE;
    TYPED(locate)(call, table, start, TILE, low, high, k_offsets[0], v_offsets[0]);
    int side = 0;
    for (int64_t tile = start; tile < high; tile += TILE, side ^= 1) {
        const int64_t *k_at = k_offsets[side], *v_at = v_offsets[side];
        const int64_t *k_next = k_offsets[side ^ 1], *v_next = v_offsets[side ^ 1];
        if (tile + TILE < high)
            TYPED(locate)(call, table, tile + TILE, TILE, low, high, k_offsets[side ^ 1], v_offsets[side ^ 1]);
        else if (next)
            TYPED(locate)(call, call->tables + next->seq * call->table_stride, next_low / TILE * TILE, TILE,
                          next_low, next_high, k_offsets[side ^ 1], v_offsets[side ^ 1]);
        else
            k_next = k_at, v_next = v_at;
        const int first = tile < low ? (int)(low - tile) : 0, last = high - tile < TILE ? (int)(high - tile) : TILE;
        const int vectors = (last + W - 1) / W;

        for (int64_t h = 0; h < kv_heads; h++) {
            const ELEMENT *k = keys + h * call->k_head, *v = values + h * call->v_head;
            const Q_ELEMENT *q = b.q + h * rows * q_pad;
            for (int x = 0; x < vectors; x++) {
                store_f32(b.scores + x * W, TYPED(scores)(q, k, k_at + x * W, k_next + x * W, dim, fixed) * scale);
                for (int64_t r = 1; r < rows; r++) {
                    vf s = TYPED(scores)(q + r * q_pad, k, k_at + x * W, NULL, dim, fixed);
                    store_f32(b.scores + r * TILE + x * W, s * scale);
                }
            }
            for (int64_t t = 0; t < count; t++) {
                const int64_t lo = b.low[t] - tile, hi = b.high[t] - tile;
                for (int64_t g = 0; g < group; g++) {
                    const int64_t r = t * group + g, head = h * group + g;
                    float *s = b.scores + r * TILE, *slot = b.slots[t];
                    b.acc[r] = slot + header + head * v_pad;
                    vf top = splat(-INFINITY);
                    for (int x = 0; x < vectors; x++) {
                        vf y = load_f32(s + x * W);
                        if (softcap > 0) y = softcap * tanh_v(y / softcap);
                        if (call->slopes) {
                            vi distance = lanes + (int32_t)(tile + x * W - tokens[t].pos);
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
                    float before = slot[head], after = max_lanes(top);
                    if (!(after > before)) after = before;
                    float *sums = b.sums + (h * rows + r) * W;
                    if (after == -INFINITY) { /* sees nothing of the chunk so far */
                        for (int x = 0; x < vectors; x++) store_f32(s + x * W, (vf){0});
                        b.factors[r] = 1;
                        continue;
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
                    b.factors[r] = factor;
                }
            }
            const int64_t *ahead = v_next;
            for (int64_t r = 0; r < rows; r += 4, ahead = NULL) {
                float **acc = b.acc + r, *factors = b.factors + r, *p = b.scores + r * TILE;
                if (rows - r >= 4)
                    TYPED(add_rows)(acc, factors, p, v, v_at, ahead, first, last, v_dim, 4);
                else if (rows - r == 3)
                    TYPED(add_rows)(acc, factors, p, v, v_at, ahead, first, last, v_dim, 3);
                else if (rows - r == 2)
                    TYPED(add_rows)(acc, factors, p, v, v_at, ahead, first, last, v_dim, 2);
                else
                    TYPED(add_rows)(acc, factors, p, v, v_at, ahead, first, last, v_dim, 1);
            }
        }
    }
    for (int64_t t = 0; t < count; t++) {
        for (int64_t h = 0; h < heads; h++) {
            int64_t r = (h / group) * rows + t * group + h % group;
            b.slots[t][heads + h] = sum_lanes(load_f32(b.sums + r * W));
        }
        if (tokens[t].slot < 0) TYPED(finish)(call, tokens[t].row, b.slots[t], 0, 1, 0, heads);
    }
}

/* Combine the partial results of the queries that have several chunks: the threads' share of it. */
static void TYPED(merge)(const Call *call) {
    const Plan *plan = call->plan;
    const int64_t kv_heads = call->num_kv_heads, group = call->num_heads / kv_heads;
    const int64_t slot_bytes = round_up(slot_floats(call->num_heads, call->v_head_dim) * 4, 64);
#pragma omp for collapse(2) schedule(static)
    for (int64_t i = 0; i < plan->num_merges; i++)
        for (int64_t h = 0; h < kv_heads; h++) {
            const Merge *merge = plan->merges + i;
            TYPED(finish)(call, merge->row, (float *)(call->workspace + merge->slot * slot_bytes), slot_bytes / 4,
                          merge->count, h * group, (h + 1) * group);
        }
}

static void TYPED(attention)(const Call *call, float scale, float softcap) {
    const Plan *plan = call->plan;
    const int64_t heads = call->num_heads, kv_heads = call->num_kv_heads;
    const int64_t dim = call->head_dim, v_dim = call->v_head_dim;
    const int64_t slot_bytes = round_up(slot_floats(heads, v_dim) * 4, 64);
    const int64_t own_bytes = thread_bytes(plan->max_count, heads, kv_heads, dim, v_dim);
    const int64_t count = plan->max_count, rows = count * (heads / kv_heads);
#pragma omp parallel num_threads(call->threads) if (call->threads > 1)
    {
        char *at = call->workspace + plan->num_slots * slot_bytes + omp_get_thread_num() * own_bytes;
        TYPED(Buffers) b;
        b.q = TYPED(take)(&at, count * heads * padded_dim(dim) * (int64_t)sizeof(Q_ELEMENT));
        b.sums = TYPED(take)(&at, count * heads * W * 4);
        b.scores = TYPED(take)(&at, rows * TILE * 4);
        b.factors = TYPED(take)(&at, rows * 4);
        b.acc = TYPED(take)(&at, rows * 8);
        b.slots = TYPED(take)(&at, count * 8);
        b.low = TYPED(take)(&at, count * 8);
        b.high = TYPED(take)(&at, count * 8);
        b.own = TYPED(take)(&at, count * slot_bytes);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < plan->num_items; i++) {
            const Item *item = plan->items + i;
            const Item *next = i + call->threads < plan->num_items ? item + call->threads : NULL;
            if (COMMON_DIMS && dim == 64 && v_dim == 64)
                TYPED(run_item)(call, item, next, b, scale, softcap, 64, 64, 1);
            else if (COMMON_DIMS && dim == 128 && v_dim == 128)
                TYPED(run_item)(call, item, next, b, scale, softcap, 128, 128, 1);
            else
                TYPED(run_item)(call, item, next, b, scale, softcap, dim, v_dim, 0);
        }
        TYPED(merge)(call);
    }
}

#define AMX 0
#define PREFILL_TYPE DTYPE
#include "prefill.inc.c"
#if IS_BF16 && HAS_AMX
#define AMX 1
#define PREFILL_TYPE amx
#include "prefill.inc.c"
#endif

#include "sampling.inc.c"

#undef Q_ELEMENT
#undef Q_STEP
#undef SLICE
#undef LINE
#undef MULTIPLY_ADD
#undef DTYPE
#undef ELEMENT
#undef LOAD
#undef DOT_BF16
#undef COMMON_DIMS
#undef IS_BF16
