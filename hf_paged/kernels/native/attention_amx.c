/* Paged attention of few new tokens in bf16 on the matrix unit.
 *
 * A work item has one chunk of keys, so all its scores are computed before the softmax, and no accumulator is
 * rescaled. Scores are stored as [key][row]: tiles of keys can then be loaded directly from the blocks, and the query
 * rows are the lanes of the softmax. A block of rows is 4, 8 or 16 wide, so a vector of scores has 4, 2 or 1 keys. Each
 * probability is the sum of two bf16 numbers, because one would be too coarse. The order of every sum depends only on
 * positions, so all widths give the same bits.
 *
 * int8 keys and values are multiplied as such (amx_int8.h): their products are sums of integers, whose order does not
 * matter. Their scales multiply scores and probabilities. */
#include "common.h"
#if HAS_AMX
#include "amx.h"
#include "amx_int8.h"
#include "amx_tiles.h"
#include "keys.h"
#define DTYPE bf16
#define ELEMENT uint16_t
#include "finish.inc.c"

typedef struct {
    void *q;             /* bf16 [num_kv_heads, row blocks, head_dim / STEP, 16 pairs of elements, width, 2], or int8 */
    void *k;             /* [CHUNK, head_dim]: copies of keys that are not evenly spaced in their blocks */
    void *v;             /* bf16 [CHUNK / STEP, 2 halves, 16 pairs of keys, 16 elements, 2]: STEP elements of each value;
                          * or int8, all elements: [v_head_dim / STEP_8, CHUNK / STEP_8], see amx_pack_values_8 */
    float *scores;       /* [row blocks, CHUNK, width]; then bf16 [row blocks, CHUNK / STEP, 2 parts, width, STEP], or
                          * bytes: see amx_pack_probabilities_8 */
    float *out;          /* [2 parts, width, 2 halves, 16]: STEP elements of each output */
    int32_t *pos;        /* [row blocks, 16]: the query's position, relative to the chunk */
    int32_t *low, *high; /* [row blocks, 16]: the keys [low, high) that it sees, likewise */
    float **slots;       /* [count]: the partial result of each query */
    float *own;          /* slots for the queries without other chunks */
    /* With int8: */
    float *units;        /* [num_kv_heads + 1, row blocks, 16]: of the query row of each lane; of its probabilities */
    float *scales[2];    /* [CHUNK + 16]: of the keys and values of a KV head */
    int32_t *sums;       /* [12, 16, 16]: products as they are stored */
} AmxBuffers;

/* The keys and values of an item. */
typedef struct {
    const Item *item;
    int first, last; /* positions [first, last), relative to the chunk */
    int64_t k[CHUNK], v[CHUNK]; /* their offsets in the caches */
    int64_t scales[2][CHUNK];   /* those of their scales, with int8 */
} AmxRows;

static int64_t amx_blocks(int64_t rows) { return (rows + 15) / 16; }

static AmxBuffers amx_divide(char **at, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim, int64_t v_dim) {
    const int64_t blocks = amx_blocks(count * (heads / kv_heads));
    AmxBuffers b;
    b.q = take(at, kv_heads * blocks * dim * 16 * 3);
    b.k = take(at, CHUNK * dim * 2);
    b.v = take(at, CHUNK * (v_dim > 2 * STEP ? v_dim : 2 * STEP));
    b.scores = take(at, blocks * CHUNK * 16 * 4);
    b.out = take(at, 2 * 16 * STEP * 4);
    b.pos = take(at, blocks * 16 * 4);
    b.low = take(at, blocks * 16 * 4);
    b.high = take(at, blocks * 16 * 4);
    b.slots = take(at, count * 8);
    b.own = take(at, count * slot_bytes(heads, v_dim));
    b.units = take(at, (kv_heads + 1) * blocks * 16 * 4);
    for (int i = 0; i < 2; i++) b.scales[i] = take(at, (CHUNK + 16) * 4);
    b.sums = take(at, 12 * 256 * 4);
    return b;
}

/* Tiles 0 and 1 have scores, 2 queries, 3 and 7 keys or values, 4 and 5 outputs, 6 probabilities. With 16 rows, tile 2
 * has the second parts of the probabilities, and 0 and 1 their outputs; with fewer rows, these are further rows of tiles
 * 6, 4, 5. */
static const AmxConfig amx_config_4 = {1, 0, {0}, {16, 16, 16, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 8, 8, 8, 16}};
static const AmxConfig amx_config_8 = {1, 0, {0}, {32, 32, 32, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* The offset from which to load a tile of the 16 keys from position j on, and its stride in bytes. Returns -1 if the
 * keys are not evenly spaced and must be copied. Slots behind the last visible key may be loaded, because products do
 * not mix the keys of a tile, and their scores are masked. */
INLINE int64_t amx_tile(const Call *call, const AmxRows *rows, int j, int64_t *stride) {
    const int64_t size = call->key_store.kind ? 1 : 2;
    *stride = call->k_token * size;
    if (call->block_size % 16 == 0) {
        const int some = j < rows->first ? rows->first : j;
        if (some < j + 16 && some < rows->last) return rows->k[some] - (some - j) * call->k_token;
        *stride = 0;
        return rows->k[j];
    }
    int64_t other = 0;
    for (int i = 1; i < 16; i++) other |= rows->k[j + i] - rows->k[j] - i * call->k_token;
    if (!other) return rows->k[j];
    *stride = call->head_dim * size;
    return -1;
}

/* What to prefetch next: heads [first, last) of the K/V rows from `row` on. */
typedef struct {
    const AmxRows *rows;
    int64_t first, last;
    int row, share, credit; /* share: heads that each call adds to `credit`, which pays for prefetching rows */
} AmxAhead;

/* Prefetch a few rows to L2. Many calls with few rows each, because more at once would fill the miss buffers and
 * stall; to L2, because the K/V of an item is too large for L1. Not inlined: that doubled the time to compile. */
__attribute__((noinline)) static void amx_prefetch(const Call *call, AmxAhead *a, int64_t dim, int64_t v_dim) {
    const int64_t heads = a->last - a->first, size = call->key_store.kind ? 1 : 2;
    for (a->credit += a->share; a->credit >= heads && a->row < a->rows->last; a->credit -= heads, a->row++) {
        const char *k = call->key + a->rows->k[a->row] * size, *v = call->value + a->rows->v[a->row] * size;
        for (int64_t h = a->first; h < a->last; h++)
            for (int64_t d = 0; d < dim * size; d += 64) __builtin_prefetch(k + h * call->k_head * size + d, 0, 2);
        for (int64_t h = a->first; h < a->last; h++)
            for (int64_t d = 0; d < v_dim * size; d += 64) __builtin_prefetch(v + h * call->v_head * size + d, 0, 2);
    }
}

typedef struct {
    float scale, softcap;
    int plain, alibi;
    vf slopes; /* a lane is a query row; with 4 or 8 rows, it is also one of 4 or 2 keys */
    vi place, pos, low, high; /* place: the key of each lane, relative to the first */
    const float *scales[2];   /* of the chunk's keys and values; NULL: they have none */
    vf largest;               /* product of a probability and a scale, of each lane */
} AmxMask;

/* The scale of each lane's key in a vector of scores, whose first key is at `scales`. Reads 16 of them. */
INLINE vf amx_scale(const float *scales, const AmxMask *m) {
    return (vf)_mm512_permutexvar_ps((__m512i)m->place, _mm512_loadu_ps(scales));
}

/* Scale and mask the scores of STEP keys from position j of the chunk on. top[4]: the running maxima, four per lane. */
INLINE void amx_mask(float *scores, int j, const AmxMask *m, const int width, vf *top) {
    const int keys = 16 / width;
    for (int i = 0; i < STEP; i += 4 * keys)
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) {
            float *at = scores + (i + u * keys) * width;
            vf y = load_f32(at) * m->scale;
            if (m->scales[0]) y *= amx_scale(m->scales[0] + j + i + u * keys, m);
            if (!m->plain) {
                vi key = m->place + (j + i + u * keys);
                if (m->softcap > 0) y = m->softcap * tanh_v(y / m->softcap);
                if (m->alibi) y += m->slopes * __builtin_convertvector(key - m->pos, vf);
                y = choose((key >= m->low) & (key < m->high), y, splat(-INFINITY));
            }
            store_f32(at, y);
            top[u] = vmax(y, top[u]);
        }
}

INLINE vf amx_top(const vf *tops, const int width) {
    vf top = vmax(vmax(tops[0], tops[1]), vmax(tops[2], tops[3]));
    if (width < 16) top = vmax((vf)_mm512_shuffle_f32x4((__m512)top, (__m512)top, 0x4e), top);
    if (width == 4) top = vmax((vf)_mm512_shuffle_f32x4((__m512)top, (__m512)top, 0xb1), top);
    return top;
}

/* Replace the scores of STEP keys from position x of the chunk on by their probabilities, as two tiles of bf16, or in
 * fp32 times the scales of the values, whose largest are in m->largest. sums[4]: of the probabilities, by key modulo 4;
 * a vector of several keys has their sums in the first of them. */
INLINE void amx_probabilities(float *scores, int x, vf top, AmxMask *m, const int width, vf *sums, const Call *call,
                              AmxAhead *ahead, const int64_t dim, const int64_t v_dim) {
    for (int j = 0; j < STEP; j += 4) {
        if (j % (128 / width) == 0) amx_prefetch(call, ahead, dim, v_dim);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i += 16 / width) {
            vf p = exp_negative(load_f32(scores + (j + i) * width) - top);
            sums[i] += p;
            if (m->scales[1]) {
                p = amx_scaled(p, amx_scale(m->scales[1] + x + j + i, m));
                m->largest = amx_larger(p, m->largest);
            }
            store_f32(scores + (j + i) * width, p);
        }
    }
    if (!m->scales[1]) amx_pack_probabilities(scores, (uint16_t *)scores, width);
}

INLINE vf amx_sum(const vf *sums, const int width) {
    if (width == 16) return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    __m512 s = (__m512)sums[0], t = (__m512)sums[2];
    if (width == 8)
        return (vf)((s + _mm512_shuffle_f32x4(s, s, 0xee)) + (t + _mm512_shuffle_f32x4(t, t, 0xee)));
    return (vf)((s + _mm512_shuffle_f32x4(s, s, 0x55)) +
                (_mm512_shuffle_f32x4(s, s, 0xaa) + _mm512_shuffle_f32x4(s, s, 0xff)));
}

static void amx_locate(const Call *call, const Item *item, AmxRows *rows) {
    int64_t low, high;
    const int64_t start = (int64_t)item->chunk * CHUNK;
    keys_of_item(call, item, &low, &high);
    rows->item = item;
    rows->first = (int)(low - start);
    rows->last = (int)(high - start);
    const int32_t *table = call->tables + item->seq * call->table_stride;
    const Store *stores[2] = {&call->key_store, &call->value_store};
    locate(call, table, start, CHUNK, low, high, rows->k, rows->v);
    for (int i = 0; i < 2 && stores[i]->kind; i++)
        locate_in(call, table, start, CHUNK, low, high, stores[i]->block, stores[i]->slot, rows->scales[i]);
}

/* An item while it is computed. */
typedef struct {
    const Call *call;
    const AmxRows *at, *next; /* next: what this thread is likely to compute next, else the item itself */
    const Token *tokens;      /* [count] */
    int64_t count, group, heads, kv_heads, rows, blocks; /* rows of a KV head; blocks of 16 rows */
    int64_t start, header;    /* position of the chunk; floats before the outputs in a slot */
    int first, last;          /* steps of STEP keys: [first, last) */
    AmxBuffers b;
    int64_t tiles[CHUNK / 16], strides[CHUNK / 16]; /* of the keys; see amx_tile */
} AmxWork;

#if HAS_AMX_INT8
/* Pack the queries for int8 keys. */
INLINE void amx_pack_8(const AmxWork *w, const int64_t dim, const int width) {
    memset(w->b.units, 0, (size_t)(w->kv_heads * w->blocks * 64)); /* missing rows: no subnormal numbers, which are slow */
    for (int64_t h = 0; h < w->kv_heads; h++)
        for (int64_t r = 0; r < w->rows; r += 4) {
            const int64_t block = h * w->blocks + r / 16;
            const uint16_t *from[4];
            for (int64_t i = r; i < r + 4; i++)
                from[i - r] = i >= w->rows ? NULL
                                           : (const uint16_t *)w->call->query +
                                                 w->tokens[i / w->group].row * w->call->q_token +
                                                 (h * w->group + i % w->group) * w->call->q_head;
            float *units = w->b.units + block * 16 + r % 16;
            amx_pack_queries_8(from, (int8_t *)w->b.q + block * dim * 16 * amx_tiles_8(width), units, r % 16, dim, width);
            for (int i = width; i < 16; i += width) memcpy(units + i, units, 16);
        }
}
#endif

/* Set the range of keys and the slot of each query, pack the queries, and find the offsets of the tiles of keys. */
INLINE void amx_begin(AmxWork *w, AmxMask *mask, const int64_t dim, const int64_t v_dim, const int width,
                      const int is_int8) {
    const Call *call = w->call;
    const int64_t group = w->group, rows = w->rows, slot_size = slot_bytes(w->heads, v_dim) / 4;
    for (int64_t t = 0; t < w->count; t++) {
        const Token token = w->tokens[t];
        int64_t low = first_key(token.pos, call->bounds) - w->start;
        int64_t high = token.end - w->start;
        mask->plain &= low <= w->first * STEP && high >= w->last * STEP;
        for (int64_t r = t * group; r < (t + 1) * group; r++)
            for (int64_t i = r; i < (width < 16 ? 16 : r + 1); i += width) {
                w->b.pos[i] = (int32_t)(token.pos - w->start);
                w->b.low[i] = (int32_t)low;
                w->b.high[i] = (int32_t)high;
            }
        w->b.slots[t] = token.slot < 0 ? w->b.own + t * slot_size : (float *)call->workspace + token.slot * slot_size;
    }
#if HAS_AMX_INT8
    if (is_int8) amx_pack_8(w, dim, width);
    const int some = w->kv_heads < 16 ? (int)(16 / w->kv_heads) : 1; /* tokens with scales in a cache line */
    for (int j = w->next->first; is_int8 && j < w->next->last; j += some) {
        PREFETCH(call->key_store.scales + w->next->scales[0][j]);
        PREFETCH(call->value_store.scales + w->next->scales[1][j]);
    }
#endif
    for (int64_t h = 0; h < w->kv_heads && !is_int8; h++)
        for (int64_t r = 0; r < rows; r += 16) {
            const uint16_t *from[16];
            const int64_t n = rows - r < 16 ? rows - r : 16;
            for (int64_t i = 0; i < n; i++)
                from[i] = (const uint16_t *)call->query + w->tokens[(r + i) / group].row * call->q_token +
                          (h * group + (r + i) % group) * call->q_head;
            amx_pack_queries(from, n, (uint16_t *)w->b.q + (h * w->blocks + r / 16) * dim * width, dim, width);
        }
    for (int x = 2 * w->first; x < 2 * w->last; x++) w->tiles[x] = amx_tile(call, w->at, x * 16, &w->strides[x]);
}

/* What to prefetch while heads [h, h + together) are computed: the following heads of these keys, or the first heads
 * of the next item. */
INLINE AmxAhead amx_look_ahead(const AmxWork *w, int64_t h, int64_t together, const int64_t v_dim, const int width,
                               const int is_int8) {
    const int64_t first = h + together < w->kv_heads ? h + together : 0;
    const int64_t last = first + together < w->kv_heads ? first + together : w->kv_heads;
    AmxAhead ahead = {first ? w->at : w->next, first, last, 0, 0, 0};
    ahead.row = first || w->next != w->at ? ahead.rows->first : ahead.rows->last;
    const int64_t left = (ahead.rows->last - ahead.row) * (last - first);
    /* Calls for each head and step of keys: in the softmax, and with bf16 in the scores and for the values. */
    const int64_t calls = w->blocks * (1 + width / 4) + (is_int8 ? 0 : w->blocks + v_dim / STEP);
    const int64_t heads = together < w->kv_heads - h ? together : w->kv_heads - h;
    const int64_t all = calls * heads * (w->last - w->first);
    ahead.share = (int)((left + all - 1) / all);
    return ahead;
}

/* The scores of the item's keys with one block of rows. k_at: the address of each 16 keys. */
INLINE void amx_scores(const AmxWork *w, AmxAhead *ahead, const char *const *k_at, const uint16_t *q, float *scores,
                       const int64_t dim, const int64_t v_dim, const int width) {
    COMPILER_FENCE();
    for (int x = w->first; x < w->last; x++) {
        amx_prefetch(w->call, ahead, dim, v_dim);
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t d = 0; d < dim; d += STEP) {
            _tile_loadd(2, q + d * width, width * 4);
            _tile_loadd(3, k_at[2 * x] + d * 2, w->strides[2 * x]);
            _tile_dpbf16ps(0, 3, 2);
            _tile_loadd(7, k_at[2 * x + 1] + d * 2, w->strides[2 * x + 1]);
            _tile_dpbf16ps(1, 7, 2);
        }
        _tile_stored(0, scores + x * STEP * width, width * 4);
        _tile_stored(1, scores + (x * STEP + 16) * width, width * 4);
    }
}

/* Replace the scores of the block of rows from row r of KV head h on by probabilities, and store the maxima and sums
 * in the slots. */
INLINE void amx_softmax(const AmxWork *w, AmxAhead *ahead, AmxMask *mask, int64_t h, int64_t r, float *scores,
                        const int64_t dim, const int64_t v_dim, const int width) {
    const Call *call = w->call;
    const vf none = splat(-INFINITY);
    if (!mask->plain) {
        memcpy(&mask->pos, w->b.pos + r, 64);
        memcpy(&mask->low, w->b.low + r, 64);
        memcpy(&mask->high, w->b.high + r, 64);
    }
    if (call->slopes)
        for (int i = 0; i < 16; i++) mask->slopes[i] = call->slopes[h * w->group + (r + i % width) % w->group];
    vf tops[4] = {none, none, none, none}, sums[4] = {{0}, {0}, {0}, {0}};
    for (int x = w->first; x < w->last; x++) {
        amx_prefetch(call, ahead, dim, v_dim);
        amx_mask(scores + x * STEP * width, x * STEP, mask, width, tops);
    }
    vf top = amx_top(tops, width), base = choose(top == none, splat(0), top); /* none: no visible key */
    for (int x = w->first; x < w->last; x++)
        amx_probabilities(scores + x * STEP * width, x * STEP, base, mask, width, sums, call, ahead, dim, v_dim);
    vf sum = amx_sum(sums, width);
    for (int64_t i = r; i < w->rows && i < r + 16; i++) {
        float *slot = w->b.slots[i / w->group] + h * w->group + i % w->group;
        slot[0] = top[i - r];
        slot[w->heads] = sum[i - r];
    }
}

/* Elements [d, d + STEP) of the outputs of the block of rows from row r of KV head h on. */
INLINE void amx_outputs(const AmxWork *w, int64_t h, int64_t r, int64_t d, const int64_t v_dim, const int width) {
    _tile_zero(4);
    _tile_zero(5);
    if (width == 16) {
        _tile_zero(0);
        _tile_zero(1);
    }
    for (int x = w->first; x < w->last; x++) {
        const uint16_t *p = (const uint16_t *)(w->b.scores + r * CHUNK + x * STEP * width);
        const uint16_t *v = (const uint16_t *)w->b.v + x * STEP * STEP;
        _tile_loadd(6, p, 64);
        _tile_loadd(3, v, 64);
        _tile_dpbf16ps(4, 6, 3);
        _tile_loadd(7, v + 512, 64);
        _tile_dpbf16ps(5, 6, 7);
        if (width == 16) {
            _tile_loadd(2, p + 16 * STEP, 64);
            _tile_dpbf16ps(0, 2, 3);
            _tile_dpbf16ps(1, 2, 7);
        }
    }
    _tile_stored(4, w->b.out, STEP * 4);
    _tile_stored(5, w->b.out + 16, STEP * 4);
    if (width == 16) {
        _tile_stored(0, w->b.out + 16 * STEP, STEP * 4);
        _tile_stored(1, w->b.out + 16 * STEP + 16, STEP * 4);
    }
    const __m512i front = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i back = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int64_t i = r; i < w->rows && i < r + 16; i++) {
        const float *part = w->b.out + (i - r) * STEP, *part_2 = part + width * STEP;
        float *to = w->b.slots[i / w->group] + w->header + (h * w->group + i % w->group) * v_dim + d;
        __m512i x = (__m512i)(load_f32(part) + load_f32(part_2));
        __m512i y = (__m512i)(load_f32(part + 16) + load_f32(part_2 + 16));
        _mm512_storeu_si512(to, _mm512_permutex2var_epi64(x, front, y));
        _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi64(x, back, y));
    }
}

/* The address of each 16 keys of a KV head, whose elements have `size` bytes. Keys that are not evenly spaced are
 * copied. */
INLINE void amx_keys(const AmxWork *w, int64_t h, const char **k_at, const int64_t dim, const int64_t size) {
    const char *k = w->call->key + h * w->call->k_head * size;
    for (int x = 2 * w->first; x < 2 * w->last; x++) {
        k_at[x] = k + w->tiles[x] * size;
        if (w->tiles[x] >= 0) continue;
        char *to = (char *)w->b.k + x * 16 * dim * size;
        k_at[x] = to;
        for (int j = 0; j < 16; j++) memcpy(to + j * dim * size, k + w->at->k[x * 16 + j] * size, (size_t)(dim * size));
    }
}

/* Compute one KV head of an item. */
INLINE void amx_head(const AmxWork *w, AmxAhead *ahead, AmxMask *mask, int64_t h, const int64_t dim,
                     const int64_t v_dim, const int width) {
    const uint16_t *v = (const uint16_t *)w->call->value + h * w->call->v_head;
    const char *k_at[CHUNK / 16];
    amx_keys(w, h, k_at, dim, 2);
    for (int64_t r = 0; r < w->rows; r += 16) {
        const uint16_t *q = (const uint16_t *)w->b.q + (h * w->blocks + r / 16) * dim * width;
        float *scores = w->b.scores + r * CHUNK;
        amx_scores(w, ahead, k_at, q, scores, dim, v_dim, width);
        amx_softmax(w, ahead, mask, h, r, scores, dim, v_dim, width);
    }
    for (int64_t d = 0; d < v_dim; d += STEP) {
        for (int x = w->first; x < w->last; x++) {
            amx_prefetch(w->call, ahead, dim, v_dim);
            amx_pack_values(v + d, w->at->v + x * STEP, (uint16_t *)w->b.v + x * STEP * STEP);
        }
        COMPILER_FENCE();
        for (int64_t r = 0; r < w->rows; r += 16) amx_outputs(w, h, r, d, v_dim, width);
    }
}

#if HAS_AMX_INT8
/* amx_scores for int8 keys: the sums of 64, 32 or 16 keys at a time. */
INLINE void amx_scores_8(const AmxWork *w, const char *const *k_at, const int8_t *q, vf units, float *scores,
                         const int64_t dim, const int width) {
    COMPILER_FENCE();
    const int tiles = width == 4 ? 4 : width == 8 ? 2 : 1; /* of keys */
    for (int x = 2 * w->first; x < 2 * w->last; x += tiles) {
        const int64_t *strides = w->strides + x;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        if (width < 16) _tile_zero(3);
        for (int64_t d = 0; d < dim; d += STEP_8) {
            if (width == 4) {
                _tile_loadd(7, q + d * 16, 64);
                _tile_loadd(4, k_at[x] + d, strides[0]);
                _tile_dpbssd(0, 4, 7);
                _tile_loadd(5, k_at[x + 1] + d, strides[1]);
                _tile_dpbssd(1, 5, 7);
                _tile_loadd(6, k_at[x + 2] + d, strides[2]);
                _tile_dpbssd(2, 6, 7);
                _tile_loadd(4, k_at[x + 3] + d, strides[3]);
                _tile_dpbssd(3, 4, 7);
            } else if (width == 8) {
                _tile_loadd(4, k_at[x] + d, strides[0]);
                _tile_loadd(6, q + d * 32, 64);
                _tile_dpbssd(0, 4, 6);
                _tile_loadd(7, q + d * 32 + 1024, 64);
                _tile_dpbssd(1, 4, 7);
                _tile_loadd(5, k_at[x + 1] + d, strides[1]);
                _tile_dpbssd(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
            } else {
                _tile_loadd(7, k_at[x] + d, strides[0]);
                _tile_loadd(4, q + d * 16 * DIGITS, 64);
                _tile_dpbssd(0, 7, 4);
                _tile_loadd(5, q + d * 16 * DIGITS + 1024, 64);
                _tile_dpbssd(1, 7, 5);
                _tile_loadd(6, q + d * 16 * DIGITS + 2048, 64);
                _tile_dpbssd(2, 7, 6);
            }
        }
        _tile_stored(0, w->b.sums, 64);
        _tile_stored(1, w->b.sums + 256, 64);
        _tile_stored(2, w->b.sums + 512, 64);
        if (width < 16) _tile_stored(3, w->b.sums + 768, 64);
        COMPILER_FENCE();
        for (int i = 0; i < tiles; i++)
            amx_join_scores(w->b.sums + i * 256 * amx_tiles_8(width), scores + (x + i) * 16 * width, units, width);
    }
}

/* Elements [d, d + STEP_8) of the outputs of the block of rows from row r of KV head h on. units: of the rows'
 * probabilities. */
INLINE void amx_outputs_8(const AmxWork *w, int64_t h, int64_t r, int64_t d, const float *units, const int64_t v_dim,
                          const int width) {
    const char *p = (const char *)(w->b.scores + r * CHUNK), *v = (const char *)w->b.v + d * CHUNK;
    if (width == 4) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int x = w->first / 2; x < w->last / 2; x++) {
            _tile_loadd(7, p + x * 1024, 64);
            _tile_loadd(4, v + x * 4096, 64);
            _tile_dpbusd(0, 7, 4);
            _tile_loadd(5, v + x * 4096 + 1024, 64);
            _tile_dpbusd(1, 7, 5);
            _tile_loadd(6, v + x * 4096 + 2048, 64);
            _tile_dpbusd(2, 7, 6);
            _tile_loadd(4, v + x * 4096 + 3072, 64);
            _tile_dpbusd(3, 7, 4);
        }
        _tile_stored(0, w->b.sums, 64);
        _tile_stored(1, w->b.sums + 256, 64);
        _tile_stored(2, w->b.sums + 512, 64);
        _tile_stored(3, w->b.sums + 768, 64);
    } else if (width == 8) {
        for (int t = 0; t < 4; t += 2) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int x = w->first / 2; x < w->last / 2; x++) {
                _tile_loadd(4, v + x * 4096 + t * 1024, 64);
                _tile_loadd(6, p + x * 2048, 64);
                _tile_dpbusd(0, 6, 4);
                _tile_loadd(7, p + x * 2048 + 1024, 64);
                _tile_dpbusd(1, 7, 4);
                _tile_loadd(5, v + x * 4096 + t * 1024 + 1024, 64);
                _tile_dpbusd(2, 6, 5);
                _tile_dpbusd(3, 7, 5);
            }
            _tile_stored(0, w->b.sums + t * 512, 64);
            _tile_stored(1, w->b.sums + t * 512 + 256, 64);
            _tile_stored(2, w->b.sums + t * 512 + 512, 64);
            _tile_stored(3, w->b.sums + t * 512 + 768, 64);
        }
    } else {
        for (int t = 0; t < 4; t++) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            for (int x = w->first / 2; x < w->last / 2; x++) {
                _tile_loadd(7, v + x * 4096 + t * 1024, 64);
                _tile_loadd(4, p + x * 4096, 64);
                _tile_dpbusd(0, 4, 7);
                _tile_loadd(5, p + x * 4096 + 1024, 64);
                _tile_dpbusd(1, 5, 7);
                _tile_loadd(6, p + x * 4096 + 2048, 64);
                _tile_dpbusd(2, 6, 7);
            }
            _tile_stored(0, w->b.sums + t * 768, 64);
            _tile_stored(1, w->b.sums + t * 768 + 256, 64);
            _tile_stored(2, w->b.sums + t * 768 + 512, 64);
        }
    }
    COMPILER_FENCE();
    const int part = 256 * amx_tiles_8(width), next = width * 16; /* integers to the next part, to the next digit */
    for (int64_t i = r; i < w->rows && i < r + 16; i++) {
        float *to = w->b.slots[i / w->group] + w->header + (h * w->group + i % w->group) * v_dim + d;
        __m512i lanes[4];
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++) {
            const int32_t *sums = w->b.sums + t * part + (i - r) * 16;
            lanes[t] = (__m512i)(amx_number(amx_integers(sums), amx_integers(sums + next), amx_integers(sums + 2 * next)) *
                                 units[i]);
        }
        transpose_lanes(lanes, (char *)to, 64);
    }
}

/* amx_head for int8 keys and values. */
INLINE void amx_head_8(const AmxWork *w, AmxAhead *ahead, AmxMask *mask, int64_t h, const int64_t dim, const int64_t v_dim,
                       const int width) {
    const Call *call = w->call;
    const char *v = call->value + h * call->v_head, *k_at[CHUNK / 16];
    const int first = w->first * STEP, count = (w->last - w->first) * STEP;
    float *const units = w->b.units + w->kv_heads * w->blocks * 16; /* of the probabilities of each row */
    amx_keys(w, h, k_at, dim, 1);
    take_scales(w->b.scales[0] + first, &call->key_store, h, w->at->scales[0] + first, count);
    take_scales(w->b.scales[1] + first, &call->value_store, h, w->at->scales[1] + first, count);
    for (int64_t d = 0; d < v_dim; d += STEP_8) /* early, because tiles are not loaded before they are in the cache */
        for (int x = w->first; x < w->last; x += 2)
            amx_pack_values_8(v + d, w->at->v + x * STEP, (char *)w->b.v + d * CHUNK + x * STEP * STEP_8);
    for (int64_t r = 0; r < w->rows; r += 16) {
        const int64_t block = h * w->blocks + r / 16;
        float *scores = w->b.scores + r * CHUNK;
        amx_scores_8(w, k_at, (const int8_t *)w->b.q + block * dim * 16 * amx_tiles_8(width),
                     load_f32(w->b.units + block * 16), scores, dim, width);
        mask->largest = splat(LEAST);
        amx_softmax(w, ahead, mask, h, r, scores, dim, v_dim, width);
        const vf largest = amx_largest(mask->largest, width);
        store_f32(units + r, largest / LARGEST_UNSIGNED);
        for (int x = w->first; x < w->last; x += 2)
            amx_pack_probabilities_8(scores + x * STEP * width, LARGEST_UNSIGNED / largest, width);
    }
    COMPILER_FENCE();
    for (int64_t d = 0; d < v_dim; d += STEP_8)
        for (int64_t r = 0; r < w->rows; r += 16) amx_outputs_8(w, h, r, d, units, v_dim, width);
}
#endif

/* Compute an item. next: see AmxWork; its K/V is prefetched. */
INLINE void amx_item(const Call *call, const AmxRows *at, const AmxRows *next, AmxBuffers b, float scale,
                     float softcap, const int64_t dim, const int64_t v_dim, const int width, const int is_int8) {
    const Item *item = at->item;
    const int64_t kv_heads = call->num_kv_heads, heads = call->num_heads, group = heads / kv_heads;
    const int64_t rows = item->count * group;
    AmxWork w = {call, at, next, call->partition->tokens + item->first, item->count, group, heads, kv_heads, rows,
                 amx_blocks(rows), (int64_t)item->chunk * CHUNK, round_up(2 * heads, 16), at->first / STEP,
                 (at->last + STEP - 1) / STEP, b, {0}, {0}};
    if (is_int8) w.first &= ~1, w.last = (w.last + 1) & ~1; /* steps of STEP_8 keys */
    AmxMask mask = {scale, softcap, softcap <= 0 && !call->slopes, call->slopes != NULL};
    for (int i = 0; i < 2; i++) mask.scales[i] = is_int8 ? b.scales[i] : NULL;
    for (int i = 0; i < 16; i++) mask.place[i] = i / width;
    /* Heads are prefetched together, so that several cache lines of a row are read in one run. */
    const int64_t most = (is_int8 ? 512 : 256) / dim, together = most < 1 ? 1 : most < kv_heads ? most : kv_heads;
    AmxAhead ahead = {0};
    amx_begin(&w, &mask, dim, v_dim, width, is_int8);
    for (int64_t h = 0; h < kv_heads; h++) {
        if (h % together == 0) ahead = amx_look_ahead(&w, h, together, v_dim, width, is_int8);
#if HAS_AMX_INT8
        if (is_int8) {
            amx_head_8(&w, &ahead, &mask, h, dim, v_dim, width);
            continue;
        }
#endif
        amx_head(&w, &ahead, &mask, h, dim, v_dim, width);
    }
    for (int64_t t = 0; t < w.count; t++)
        if (w.tokens[t].slot < 0) finish_bf16(call, w.tokens[t].row, b.slots[t], 0, 1, 0, heads);
}

/* Compute an item with code compiled for its head sizes, if they are common ones. */
INLINE void amx_run_of(const Call *call, const AmxRows *now, const AmxRows *next, AmxBuffers b, float scale,
                       float softcap, const int width, const int is_int8) {
    const int64_t dim = call->head_dim, v_dim = call->v_head_dim;
    if (dim == 64 && v_dim == 64)
        amx_item(call, now, next, b, scale, softcap, 64, 64, width, is_int8);
    else if (dim == 128 && v_dim == 128)
        amx_item(call, now, next, b, scale, softcap, 128, 128, width, is_int8);
    else
        amx_item(call, now, next, b, scale, softcap, dim, v_dim, width, is_int8);
}

/* amx_run_of with code compiled for the kind of K/V. */
INLINE void amx_run(const Call *call, const AmxRows *now, const AmxRows *next, AmxBuffers b, float scale, float softcap,
                    const int width, int is_int8) {
    if (is_int8)
        amx_run_of(call, now, next, b, scale, softcap, width, 1);
    else
        amx_run_of(call, now, next, b, scale, softcap, width, 0);
}

/* Whether this code computes a call. With one query head per KV head, tiles are mostly empty, and decoding is faster
 * without them. */
int amx_takes(const Call *call) {
    if (call->num_heads == call->num_kv_heads) return 0;
#if HAS_AMX_INT8
    if (stores(call, INT8)) return call->head_dim % STEP_8 == 0 && call->v_head_dim % STEP_8 == 0;
#endif
    return stores(call, EXACT) && call->head_dim % STEP == 0 && call->v_head_dim % STEP == 0;
}

typedef struct {
    const Call *call;
    char *parts; /* the workspaces of the threads */
    int64_t own_bytes;
    float scale, softcap;
} AmxItems;

static void amx_items(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const AmxItems all = *(const AmxItems *)arguments;
    const Call *call = all.call;
    const Partition *partition = call->partition;
    const int64_t heads = call->num_heads, kv_heads = call->num_kv_heads, group = heads / kv_heads;
    char *at = all.parts + thread * all.own_bytes;
    AmxBuffers b = amx_divide(&at, partition->max_count, heads, kv_heads, call->head_dim, call->v_head_dim);
    AmxRows rows[2];
    int side = 0, configured = 0;
    rows[0].item = rows[1].item = NULL;
    /* The item that this thread probably computes next. */
    const int64_t ahead = last - first > 1 ? 1 : call->threads;
    for (int64_t i = first; i < last; i++) {
        const Item *item = partition->items + i;
        if (rows[side].item != item) amx_locate(call, item, &rows[side]);
        if (i + ahead < partition->num_items) amx_locate(call, item + ahead, &rows[side ^ 1]);
        const AmxRows *now = &rows[side], *next = i + ahead < partition->num_items ? &rows[side ^ 1] : now;
        const int64_t query_rows = item->count * group;
        const int width = query_rows <= 4 ? 4 : query_rows <= 8 ? 8 : 16;
        const int is_int8 = HAS_AMX_INT8 && call->key_store.kind == INT8, config = is_int8 ? 16 : width;
        if (config != configured)
            _tile_loadconfig(config == 4 ? &amx_config_4 : config == 8 ? &amx_config_8 : &amx_config_16);
        configured = config;
        if (width == 4)
            amx_run(call, now, next, b, all.scale, all.softcap, 4, is_int8);
        else if (width == 8)
            amx_run(call, now, next, b, all.scale, all.softcap, 8, is_int8);
        else
            amx_run(call, now, next, b, all.scale, all.softcap, 16, is_int8);
        side ^= 1;
    }
    _tile_release(); /* other libraries use tiles in these threads with their own configurations */
}

void attention_amx(const Call *call, float scale, float softcap) {
    const Partition *partition = call->partition;
    const int64_t heads = call->num_heads;
    const int64_t own_bytes =
        thread_bytes(partition->max_count, heads, call->num_kv_heads, call->head_dim, call->v_head_dim);
    char *parts = call->workspace + partition->num_slots * slot_bytes(heads, call->v_head_dim);
    const AmxItems all = {call, parts, own_bytes, scale, softcap};
    in_parallel(amx_items, &all, partition->num_items, call->threads, ONE_BY_ONE);
    merge_bf16(call);
}
#endif
