/* Attention of many new tokens of a sequence, as matrix products. Included by the unit of each dtype after the same
 * macros as for attention.inc.c, with PREFILL_TYPE as the suffix; AMX is 0, and everything is converted to fp32.
 * Included once more for bf16 with AMX 1: then the products run on the matrix unit, with bf16 inputs and fp32 sums.
 *
 * The work is divided by KV head and by new tokens. A unit of work is up to MAX_TILES tiles of ROWS query rows (new
 * tokens x query heads of the group). A chunk of keys is packed once for all tiles of a unit. The softmax state and
 * outputs of a tile stay in L2. */
#include "amx.h"
#include "eight.h"
#include "kernels.h"
#include "prefill.h"
#include "transpose.h"
#include "vectors.h"

#define PREFILL(name) NAME_1(name, PREFILL_TYPE)
#if AMX
#define WORD_ELEMENTS 2 /* elements in one 32-bit word of a packed key */
#define PACKED uint16_t /* type of queries and probabilities */
#else
#define WORD_ELEMENTS 1
#define PACKED float
#endif

typedef struct {
    PACKED *queries;  /* [tiles, ROWS, head_dim padded] */
    float *outputs;   /* [tiles, ROWS, v_head_dim padded], not normalised */
    float *tops;      /* [tiles, ROWS]: running maxima of the scores */
    float *sums;      /* [tiles, ROWS, W]: running sums of the weights, for each lane */
    uint32_t *keys;   /* [words of a padded head, KEYS]: transposed, so that a vector has one word of many keys */
    uint32_t *values; /* AMX: [KEYS / 2, v_head_dim padded] pairs of bf16; else fp32 [KEYS, v_head_dim padded] */
    float *key_scales, *value_scales; /* AMX: [KEYS], of those in eight bits */
    float *scores;    /* [ROWS, KEYS] */
    PACKED *weights;  /* [ROWS, KEYS]; without AMX, the same memory as scores */
} PREFILL(Prefill);

static PREFILL(Prefill) PREFILL(prefill_buffers)(char *at, int64_t dim, int64_t v_dim) {
    const int64_t pad = round_up(dim, 32), v_pad = round_up(v_dim, 32), rows = num_tiles(v_pad) * ROWS;
    PREFILL(Prefill) b;
    b.queries = take(&at, rows * pad * (int64_t)sizeof(PACKED));
    b.outputs = take(&at, rows * v_pad * 4);
    b.tops = take(&at, rows * 4);
    b.sums = take(&at, rows * W * 4);
    b.keys = take(&at, pad * KEYS * 4);
    b.values = take(&at, KEYS * v_pad * 4);
    b.scores = take(&at, ROWS * KEYS * 4);
    b.key_scales = AMX ? take(&at, KEYS * 4) : NULL;
    b.value_scales = AMX ? take(&at, KEYS * 4) : NULL;
    b.weights = AMX ? take(&at, ROWS * KEYS * (int64_t)sizeof(PACKED)) : (PACKED *)(void *)b.scores;
    return b;
}

/* Convert `dim` elements to PACKED, and append zeros up to `pad`. */
INLINE void PREFILL(pack_row)(PACKED *to, const ELEMENT *from, int64_t dim, int64_t pad) {
#if AMX
    memcpy(to, from, (size_t)dim * 2);
    memset(to + dim, 0, (size_t)(pad - dim) * 2);
#else
    int64_t d = 0;
    for (; d + W <= dim; d += W) store_f32(to + d, LOAD(from + d));
    if (d < dim) store_f32(to + d, TYPED(load_part)(from + d, dim - d)), d += W;
    for (; d < pad; d += W) store_f32(to + d, (vf){0});
#endif
}

INLINE void PREFILL(store_packed)(PACKED *to, vf x) {
#if AMX
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    store_f32(to, x);
#endif
}

/* Pack the head at one position of K or V. base: of the head in block 0. Strides are in elements of what is stored.
 * AMX: numbers in eight bits are exact in bf16 without their scale, which becomes scales[place]. */
INLINE void PREFILL(pack_stored)(PACKED *to, float *scales, int64_t place, const char *base, const Store *store,
                                 int64_t h, int64_t block, int64_t inside, int64_t block_stride, int64_t slot_stride,
                                 int64_t dim, int64_t pad) {
    const int64_t at = block * block_stride + inside * slot_stride;
    if (store->kind) {
        float scale = store->scales[block * store->block + inside * store->slot + h * store->head];
        if (AMX) scales[place] = scale, scale = 1;
        int64_t d = 0;
        for (; d + W <= dim; d += W) PREFILL(store_packed)(to + d, load_eight(base + at + d, store->kind) * scale);
        if (d < dim)
            PREFILL(store_packed)(to + d, load_part_eight(base + at + d, dim - d, store->kind) * scale), d += W;
        for (; d < pad; d += W) PREFILL(store_packed)(to + d, (vf){0});
        return;
    }
    PREFILL(pack_row)(to, (const ELEMENT *)base + at, dim, pad);
}

INLINE const char *PREFILL(base_of)(const char *tensor, const Store *store, int64_t elements) {
    return tensor + elements * (store->kind ? 1 : (int64_t)sizeof(ELEMENT));
}

/* Pack the keys and values of `count` positions from `start` on. The first `skip` of them, which no query sees, and
 * those up to the next multiple of 32 become zeros. */
static void PREFILL(pack_chunk)(const Call *call, PREFILL(Prefill) b, const int32_t *table, int64_t head, int64_t start,
                                int64_t skip, int64_t count) {
    const int64_t dim = call->head_dim, v_dim = call->v_head_dim, pad = round_up(dim, 32), v_pad = round_up(v_dim, 32);
    const int64_t words = pad / WORD_ELEMENTS;
    const Store *key_store = &call->key_store, *value_store = &call->value_store;
    const char *key = PREFILL(base_of)(call->key, key_store, head * call->k_head);
    const char *value = PREFILL(base_of)(call->value, value_store, head * call->v_head);
    uint32_t row[16][MAX_DIM / WORD_ELEMENTS] __attribute__((aligned(64)));
    PACKED lines[2][MAX_DIM] __attribute__((aligned(64)));
    for (int64_t j = 0; j < round_up(count, 32); j += 16) {
        for (int64_t i = 0; i < 16; i++) {
            const int64_t pos = start + j + i;
            if (j + i >= skip && j + i < count)
                PREFILL(pack_stored)((PACKED *)(void *)row[i], b.key_scales, j + i, key, key_store, head,
                                     table[pos / call->block_size], pos % call->block_size, call->k_block,
                                     call->k_token, dim, pad);
            else
                memset(row[i], 0, (size_t)words * 4);
        }
        for (int64_t w = 0; w < words; w += 16)
            transpose_words(b.keys + w * KEYS + j, KEYS, row[0] + w, MAX_DIM / WORD_ELEMENTS);
    }
    for (int64_t j = 0; j < round_up(count, 32); j += WORD_ELEMENTS) {
        for (int64_t i = 0; i < WORD_ELEMENTS; i++) {
            const int64_t pos = start + j + i;
            PACKED *to = AMX ? lines[i] : (PACKED *)(void *)(b.values + j * v_pad);
            if (j + i >= skip && j + i < count)
                PREFILL(pack_stored)(to, b.value_scales, j + i, value, value_store, head,
                                     table[pos / call->block_size], pos % call->block_size, call->v_block,
                                     call->v_token, v_dim, v_pad);
            else
                memset(to, 0, (size_t)v_pad * sizeof(PACKED));
        }
#if AMX
        for (int64_t d = 0; d < v_pad; d += 16) interleave(b.values + j / 2 * v_pad + d, lines[0] + d, lines[1] + d);
#endif
    }
}

#if !AMX
/* out[BLOCK_ROWS][2 * W] = a[BLOCK_ROWS][depth] x b[depth][2 * W], added to out if `add`. */
static void multiply_rows(float *out, int64_t out_stride, const float *a, int64_t a_stride, const float *b,
                          int64_t b_stride, int64_t depth, int add) {
    vf sums[BLOCK_ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK_ROWS; i++) {
        sums[i][0] = add ? load_f32(out + i * out_stride) : (vf){0};
        sums[i][1] = add ? load_f32(out + i * out_stride + W) : (vf){0};
    }
    for (int64_t k = 0; k < depth; k++) {
        const vf left = load_f32(b + k * b_stride), right = load_f32(b + k * b_stride + W);
#pragma GCC unroll 8
        for (int i = 0; i < BLOCK_ROWS; i++) {
            const vf x = splat(a[i * a_stride + k]);
            sums[i][0] += x * left;
            sums[i][1] += x * right;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK_ROWS; i++) {
        store_f32(out + i * out_stride, sums[i][0]);
        store_f32(out + i * out_stride + W, sums[i][1]);
    }
}
#endif

/* out[ROWS][columns] = a[ROWS][depth] x b[depth][columns], added to out if `add`. columns, depth: multiples of 32. */
static void PREFILL(multiply)(float *out, int64_t out_stride, const PACKED *a, int64_t a_stride, const uint32_t *b,
                              int64_t b_stride, int64_t columns, int64_t depth, int add) {
#if AMX
    COMPILER_FENCE();
    for (int64_t j = 0; j < columns; j += 32)
        for (int64_t r = 0; r < ROWS; r += 32)
            amx_multiply(out + r * out_stride + j, out_stride, a + r * a_stride, a_stride, b + j, b_stride, depth, add);
#else
    for (int64_t j = 0; j < columns; j += 2 * W)
        for (int64_t r = 0; r < ROWS; r += BLOCK_ROWS)
            multiply_rows(out + r * out_stride + j, out_stride, a + r * a_stride, a_stride,
                          (const float *)(const void *)b + j, b_stride, depth, add);
#endif
}

/* Store W weights of a row, times the scales of the values if these are in eight bits. A scale may be NaN where the
 * row does not see the value. */
INLINE void PREFILL(store_weights)(PACKED *to, vf p, const float *value_scales) {
    if (value_scales) p = choose(p == 0, p, p * load_f32(value_scales));
    PREFILL(store_packed)(to, p);
}

/* Compute the weights of a row from its scores, and update its maximum, sums and output. The row sees keys [low, high)
 * of the chunk at position `start`; `count` weights are written. key_scales, value_scales: of the chunk's positions, or
 * NULL. */
INLINE void PREFILL(weigh_row)(const Call *call, const float *scores, const float *key_scales, const float *value_scales,
                             PACKED *weights, float *top, float *sums, float *output, int64_t v_pad, int64_t head,
                             int64_t pos, int64_t start, int64_t low, int64_t high, int64_t count, float scale,
                             float softcap) {
    vf y[KEYS / W], maxima = splat(-INFINITY), sum = load_f32(sums);
    vi lanes = {0};
    for (int i = 0; i < W; i++) lanes[i] = i;
    /* Vectors with visible keys. */
    const int64_t first = low > 0 ? low / W : 0, last = high > 0 ? (high + W - 1) / W : 0;
#pragma GCC unroll 4
    for (int64_t x = first; x < last; x++) {
        vf s = load_f32(scores + x * W) * scale;
        if (key_scales) s *= load_f32(key_scales + x * W);
        if (softcap > 0) s = softcap * tanh_v(s / softcap);
        if (call->slopes)
            s += call->slopes[head] * __builtin_convertvector(lanes + (int32_t)(start + x * W - pos), vf);
        if (low > x * W || high < (x + 1) * W) {
            vi place = lanes + (int32_t)(x * W);
            s = choose((place >= (int32_t)low) & (place < (int32_t)high), s, splat(-INFINITY));
        }
        y[x] = s;
        maxima = vmax(s, maxima);
    }
    float before = *top, after = max_lanes(maxima);
    if (!(after > before)) after = before;
    if (after == -INFINITY) { /* no visible key so far */
        memset(weights, 0, (size_t)count * sizeof(PACKED));
        return;
    }
    if (after != before) {
        const float factor = exp_negative(splat(before - after))[0];
        sum *= factor;
        for (int64_t d = 0; d < v_pad; d += W) store_f32(output + d, load_f32(output + d) * factor);
        *top = after;
    }
    for (int64_t x = 0; x < first; x++) PREFILL(store_packed)(weights + x * W, (vf){0});
    for (int64_t x = last; x < count / W; x++) PREFILL(store_packed)(weights + x * W, (vf){0});
    int64_t x = first;
    for (; x + 4 <= last; x += 4) { /* four independent chains hide latencies */
        vf p[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) p[i] = exp_negative(y[x + i] - after);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            PREFILL(store_weights)(weights + (x + i) * W, p[i], value_scales ? value_scales + (x + i) * W : NULL);
        sum += (p[0] + p[1]) + (p[2] + p[3]);
    }
    for (; x < last; x++) {
        vf p = exp_negative(y[x] - after);
        PREFILL(store_weights)(weights + x * W, p, value_scales ? value_scales + x * W : NULL);
        sum += p;
    }
    store_f32(sums, sum);
}

typedef struct {
    const int32_t *table;
    int64_t row, context;  /* query row and position of the first new token of the sequence */
    int64_t head;          /* KV head */
    int64_t first, last;   /* new tokens [first, last) of the sequence */
    const int32_t *reach;  /* by query row, as in Step */
} PREFILL(Unit);

/* The position behind the last one that a token from `from` to `to` of the unit's sequence sees. */
INLINE int64_t PREFILL(end_of)(PREFILL(Unit) u, int64_t from, int64_t to) {
    if (!u.reach) return u.context + to;
    int64_t end = 0;
    for (int64_t t = from; t < to; t++) end = u.reach[u.row + t] >= end ? u.reach[u.row + t] + 1 : end;
    return end;
}

/* Clear the state of a unit's tiles, and pack its queries. */
static void PREFILL(begin_unit)(const Call *call, PREFILL(Unit) u, PREFILL(Prefill) b, int64_t tiles) {
    const int64_t dim = call->head_dim, pad = round_up(dim, 32), v_pad = round_up(call->v_head_dim, 32);
    const int64_t group = call->num_heads / call->num_kv_heads, per_tile = ROWS / group;
    memset(b.outputs, 0, sizeof(float) * (size_t)(tiles * ROWS * v_pad));
    memset(b.sums, 0, sizeof(float) * (size_t)(tiles * ROWS * W));
    memset(b.queries, 0, sizeof(PACKED) * (size_t)(tiles * ROWS * pad));
    for (int64_t r = 0; r < tiles * ROWS; r++) b.tops[r] = -INFINITY;
    for (int64_t t = u.first; t < u.last; t++) {
        const int64_t tile = (t - u.first) / per_tile, row = tile * ROWS + (t - u.first) % per_tile * group;
        const ELEMENT *query = (const ELEMENT *)call->query + (u.row + t) * call->q_token;
        for (int64_t g = 0; g < group; g++)
            PREFILL(pack_row)(b.queries + (row + g) * pad, query + (u.head * group + g) * call->q_head, dim, pad);
    }
}

/* Attend from one tile of queries to the packed chunk of `count` keys at position `start`. */
static void PREFILL(add_chunk)(const Call *call, PREFILL(Unit) u, PREFILL(Prefill) b, int64_t tile, int64_t start,
                               int64_t count, float scale, float softcap) {
    const int64_t pad = round_up(call->head_dim, 32), v_pad = round_up(call->v_head_dim, 32);
    const int64_t group = call->num_heads / call->num_kv_heads, per_tile = ROWS / group;
    const int64_t from = u.first + tile * per_tile, to = from + per_tile < u.last ? from + per_tile : u.last;
    /* Keys below `end` are visible to some of the tile's tokens. */
    int64_t end = PREFILL(end_of)(u, from, to) - start;
    if (end > count) end = count;
    if (end <= 0 || first_key(u.context + from, call->bounds) >= start + count) return;
    const int64_t columns = round_up(end, 32);
    PREFILL(multiply)(b.scores, KEYS, b.queries + tile * ROWS * pad, pad, b.keys, KEYS, columns, pad, 0);
    for (int64_t r = 0; r < ROWS; r++) {
        const int64_t t = from + r / group, pos = u.context + t, at = tile * ROWS + r;
        if (r / group >= per_tile || t >= to) {
            memset(b.weights + r * KEYS, 0, sizeof(PACKED) * (size_t)columns);
            continue;
        }
        const int64_t seen = first_key(pos, call->bounds) - start;
        const int64_t own_end = end_key(u.reach, u.row + t, pos) - start;
        PREFILL(weigh_row)(call, b.scores + r * KEYS, AMX && call->key_store.kind ? b.key_scales : NULL,
                           AMX && call->value_store.kind ? b.value_scales : NULL, b.weights + r * KEYS, b.tops + at,
                           b.sums + at * W, b.outputs + at * v_pad, v_pad, u.head * group + r % group, pos, start,
                           seen > 0 ? seen : 0, own_end < end ? own_end : end, columns, scale, softcap);
    }
    PREFILL(multiply)(b.outputs + tile * ROWS * v_pad, v_pad, b.weights, KEYS, b.values, v_pad, v_pad, columns, 1);
}

/* Normalise and write the outputs of a unit. */
static void PREFILL(end_unit)(const Call *call, PREFILL(Unit) u, PREFILL(Prefill) b) {
    const int64_t v_dim = call->v_head_dim, v_pad = round_up(v_dim, 32);
    const int64_t group = call->num_heads / call->num_kv_heads, per_tile = ROWS / group;
    for (int64_t t = u.first; t < u.last; t++)
        for (int64_t g = 0; g < group; g++) {
            const int64_t at = (t - u.first) / per_tile * ROWS + (t - u.first) % per_tile * group + g;
            const int64_t head = u.head * group + g;
            float top = b.tops[at], factor = 1, total = sum_lanes(load_f32(b.sums + at * W));
            if (call->sinks) {
                const float new_top = call->sinks[head] > top ? call->sinks[head] : top;
                factor = expf(top - new_top);
                total = total * factor + expf(call->sinks[head] - new_top);
                top = new_top;
            }
            factor /= total;
            ELEMENT *out = (ELEMENT *)call->out + (u.row + t) * call->o_token + head * call->o_head;
            for (int64_t d = 0; d < v_dim; d += W)
                TYPED(store_part)(out + d, load_f32(b.outputs + at * v_pad + d) * factor,
                                  v_dim - d < W ? v_dim - d : W);
            if (call->lse) call->lse[(u.row + t) * call->num_heads + head] = top + logf(total);
        }
}

static void PREFILL(prefill_unit)(const Call *call, PREFILL(Unit) u, PREFILL(Prefill) b, float scale, float softcap) {
    const int64_t per_tile = ROWS / (call->num_heads / call->num_kv_heads);
    const int64_t tiles = (u.last - u.first + per_tile - 1) / per_tile;
    PREFILL(begin_unit)(call, u, b, tiles);
    const int64_t low = first_key(u.context + u.first, call->bounds), high = PREFILL(end_of)(u, u.first, u.last);
    /* Chunks start at the same positions in every unit, so that sums do not depend on how the work was divided. */
    for (int64_t start = low / KEYS * KEYS; start < high; start += KEYS) {
        const int64_t count = high - start < KEYS ? high - start : KEYS;
        PREFILL(pack_chunk)(call, b, u.table, u.head, start, low > start ? low - start : 0, count);
        for (int64_t tile = 0; tile < tiles; tile++)
            PREFILL(add_chunk)(call, u, b, tile, start, count, scale, softcap);
    }
    PREFILL(end_unit)(call, u, b);
}

/* Unit i of all units of `tokens` new tokens. The last tokens of a sequence come first, because they see the most
 * keys. */
static PREFILL(Unit) PREFILL(unit_of)(const Call *call, const Prompts *p, int64_t i, int64_t units, int64_t tokens) {
    const int64_t kv_heads = call->num_kv_heads;
    int64_t unit = units - 1 - i / kv_heads, n = 0;
    for (;; n++) {
        const int64_t own = (p->starts[p->seqs[n] + 1] - p->starts[p->seqs[n]] + tokens - 1) / tokens;
        if (unit < own) break;
        unit -= own;
    }
    const int64_t seq = p->seqs[n], count = p->starts[seq + 1] - p->starts[seq];
    return (PREFILL(Unit)){call->tables + seq * call->table_stride,
                           p->starts[seq],
                           p->seq_lens[seq] - count,
                           i % kv_heads,
                           unit * tokens,
                           (unit + 1) * tokens < count ? (unit + 1) * tokens : count,
                           p->reach};
}

typedef struct {
    const Call *call;
    const Prompts *prompts;
    int64_t units, tokens; /* tokens: of a full unit */
    float scale, softcap;
} PREFILL(Units);

static void PREFILL(prefill_units)(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const PREFILL(Units) all = *(const PREFILL(Units) *)arguments;
    const Call *call = all.call;
    const int64_t bytes = prefill_bytes(call->head_dim, call->v_head_dim);
    PREFILL(Prefill) b =
        PREFILL(prefill_buffers)(call->workspace + thread * bytes, call->head_dim, call->v_head_dim);
#if AMX
    _tile_loadconfig(&amx_config_16);
#endif
    for (int64_t i = first; i < last; i++)
        PREFILL(prefill_unit)(call, PREFILL(unit_of)(call, all.prompts, i, all.units, all.tokens), b, all.scale,
                              all.softcap);
#if AMX
    _tile_release();
#endif
}

void PREFILL(prefill)(const Call *call, const Prompts *p, float scale, float softcap) {
    const int64_t kv_heads = call->num_kv_heads, per_tile = ROWS / (call->num_heads / kv_heads);
    int64_t tiles = 0, max_tiles = num_tiles(round_up(call->v_head_dim, 32)), units = 0;
    for (int64_t n = 0; n < p->num_seqs; n++)
        tiles += (p->starts[p->seqs[n] + 1] - p->starts[p->seqs[n]] + per_tile - 1) / per_tile;
    /* Make smaller units if that is necessary to give every thread about three. */
    if (call->threads > 1 && tiles * kv_heads / (3 * call->threads) < max_tiles)
        max_tiles = tiles * kv_heads / (3 * call->threads) > 1 ? tiles * kv_heads / (3 * call->threads) : 1;
    const int64_t tokens = max_tiles * per_tile; /* of a full unit */
    for (int64_t n = 0; n < p->num_seqs; n++)
        units += (p->starts[p->seqs[n] + 1] - p->starts[p->seqs[n]] + tokens - 1) / tokens;
    const PREFILL(Units) all = {call, p, units, tokens, scale, softcap};
    in_parallel(PREFILL(prefill_units), &all, units * kv_heads, call->threads, ONE_BY_ONE);
}
