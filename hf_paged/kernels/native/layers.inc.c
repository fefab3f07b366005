/* What decoder layers do with the rows of a step beside attention, in bf16: linear layers on AMX tiles, and the small
 * operations between them. Included by paged.c.
 *
 * A decode step reads every weight once and computes little with it, so a linear layer is as fast as its weights come:
 * they lie in the order in which tiles are loaded. The small operations take longer to call than to compute; each is one
 * call instead of several. Each rounds where transformers' own code rounds, and the sum of squares is taken in torch's
 * order, so that results are the same bit for bit; who calls compares them once (integration/native_layers.py). */

#define PANEL 32    /* columns of a weight that lie together: two tiles wide */
#define STREAM 2048 /* bytes that are prefetched ahead of the tiles */
#define AHEAD (256 << 10) /* bytes that may come to L2 before they are needed */
#define FORK_ELEMENTS (1 << 15) /* fewer are done before a second thread has begun */

/* -- linear layers ---------------------------------------------------------------------------------------------------
 * A packed weight: [columns / PANEL, depth / 32, 2, 16 pairs of elements, 16 columns, 2], zeros where there is none. */

typedef struct {
    const uint16_t *x; /* [rows, depth] */
    int64_t rows, columns, depth;
    const uint16_t *weight, *bias; /* bias: or NULL */
    uint16_t *out;                 /* [rows, columns] */
    char *workspace;               /* hfp_linear_workspace() bytes, aligned to 64 */
    int64_t threads;
} Linear;

int64_t hfp_packed_bytes(int64_t columns, int64_t depth) { return round_up(columns, PANEL) * round_up(depth, 32) * 2; }

int64_t hfp_linear_workspace(int64_t rows, int64_t depth) {
    return (depth % 32 ? round_up(rows, 16) : 16) * round_up(depth, 32) * 2;
}

/* A hint that `bytes` at `at` (a whole page of the system), not yet written, are better in large pages: streaming waits
 * for fewer translations. */
void hfp_prefer_large_pages(void *at, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    madvise(at, (size_t)bytes, MADV_HUGEPAGE);
#else
    (void)at, (void)bytes;
#endif
}

/* weight: [columns, depth], contiguous */
void hfp_pack_linear(const uint16_t *weight, int64_t columns, int64_t depth, uint16_t *to, int64_t threads) {
    const int64_t steps = round_up(depth, 32) / 32;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < round_up(columns, PANEL) / PANEL; panel++)
        for (int64_t step = 0; step < steps; step++)
            for (int64_t c = 0; c < PANEL; c++) {
                uint16_t *tile = to + ((panel * steps + step) * 2 + c / 16) * 512 + c % 16 * 2;
                const int64_t column = panel * PANEL + c;
                for (int64_t i = 0; i < 32; i++) {
                    const int64_t k = step * 32 + i;
                    tile[i / 2 * 32 + i % 2] = column < columns && k < depth ? weight[column * depth + k] : 0;
                }
            }
}

/* Sixteen rows of x: where they begin, and bytes from one to the next. */
typedef struct {
    const uint16_t *at;
    int64_t bytes;
} RowTile;

/* Tiles 0 to 3: sums of 32 rows (of 16 if not `two`) with a panel. From `*next` on, `lines` cache lines a step are
 * prefetched to L2; if `streams`, as many as the step takes itself, to L1. */
INLINE void linear_sums(RowTile top, RowTile bottom, const uint16_t *panel, int64_t steps, const char **next,
                        int64_t lines, const int streams, const int two) {
    const char *line = *next;
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < steps; k++, panel += 1024) {
        if (streams) {
#pragma GCC unroll 32
            for (int i = 0; i < 32; i++, line += 64) _mm_prefetch(line, _MM_HINT_T0);
        } else {
            for (int64_t i = 0; i < lines; i++, line += 64) _mm_prefetch(line, _MM_HINT_T1);
        }
        _tile_loadd(6, panel, 64);
        _tile_loadd(7, panel + 512, 64);
        _tile_loadd(4, top.at + k * 32, top.bytes);
        if (two) _tile_loadd(5, bottom.at + k * 32, bottom.bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    *next = line;
}

/* Rounds `rows` rows of sums to `to`, of whose rows the panel has `columns`. */
INLINE void linear_store(uint16_t *to, int64_t to_row, const float *sums, int64_t rows, int64_t columns,
                         const uint16_t *bias) {
    const __mmask32 mask = columns >= PANEL ? ~0u : (1u << columns) - 1;
    __m512 low = _mm512_setzero_ps(), high = low;
    if (bias) {
        const __m512i both = _mm512_maskz_loadu_epi16(mask, bias);
        low = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(both)), 16);
        high = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), 16);
    }
    for (int64_t r = 0; r < rows; r++, sums += PANEL, to += to_row) {
        const __m512 a = _mm512_add_ps(_mm512_load_ps(sums), low), b = _mm512_add_ps(_mm512_load_ps(sums + 16), high);
        _mm512_mask_storeu_epi16(to, mask, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
}

/* Every sum is taken in the order of the depth, whatever the rows and threads. */
void hfp_linear(const Linear *call) {
    const Linear l = *call;
    if (!l.rows) return;
    const int64_t steps = round_up(l.depth, 32) / 32, tiles = round_up(l.rows, 16) / 16;
    const int64_t panels = round_up(l.columns, PANEL) / PANEL;
    const int64_t passes = (tiles + 1) / 2;
    /* Tiles of rows are read where they lie, a single one with as many rows as there are (two were slower so). Otherwise
     * rows of a part of a tile come from a copy, and all rows where steps are not full. */
    const int64_t in_place = l.depth % 32 ? 0 : tiles > 1 ? l.rows / 16 * 16 : l.rows;
    const int64_t copied = in_place < l.rows ? tiles * 16 - in_place : 0;
    AmxConfig config = amx_config_16;
    if (tiles == 1 && !copied) config.rows[0] = config.rows[1] = config.rows[4] = (uint8_t)l.rows;
    uint16_t *copy = (uint16_t *)(void *)l.workspace;
    for (int64_t r = 0; r < copied; r++) {
        const int64_t depth = in_place + r < l.rows ? l.depth : 0;
        memcpy(copy + r * steps * 32, l.x + (in_place + r) * l.depth, (size_t)depth * 2);
        memset(copy + r * steps * 32 + depth, 0, (size_t)(steps * 32 - depth) * 2);
    }
    COMPILER_FENCE();
    /* Few rows: a panel is used once, and comes just in time. Many: while one is used again and again, a part of the next
     * one comes to L2 each time. */
    const int64_t lines = (31 + passes) / passes;
#pragma omp parallel num_threads(l.threads) if (l.threads > 1)
    {
        float sums[32 * PANEL] __attribute__((aligned(64)));
        _tile_loadconfig(&config);
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < panels; panel++) {
            const uint16_t *weight = l.weight + panel * steps * 1024;
            const char *next = (const char *)weight + (passes > 1 ? steps * 2048 : STREAM);
            for (int64_t row = 0; row < l.rows; row += 32) {
                const int64_t left = l.rows - row;
                RowTile tile[2];
                for (int i = 0; i < 2; i++)
                    tile[i] = row + 16 * i < in_place
                                  ? (RowTile){l.x + (row + 16 * i) * l.depth, l.depth * 2}
                                  : (RowTile){copy + (row + 16 * i - in_place) * steps * 32, steps * 64};
                if (passes > 1 && left > 16)
                    linear_sums(tile[0], tile[1], weight, steps, &next, lines, 0, 1);
                else if (passes > 1)
                    linear_sums(tile[0], tile[0], weight, steps, &next, lines, 0, 0);
                else if (left > 16)
                    linear_sums(tile[0], tile[1], weight, steps, &next, lines, 1, 1);
                else
                    linear_sums(tile[0], tile[0], weight, steps, &next, lines, 1, 0);
                _tile_stored(0, sums, PANEL * 4);
                _tile_stored(1, sums + 16, PANEL * 4);
                if (left > 16) {
                    _tile_stored(2, sums + 16 * PANEL, PANEL * 4);
                    _tile_stored(3, sums + 16 * PANEL + 16, PANEL * 4);
                }
                COMPILER_FENCE();
                linear_store(l.out + row * l.columns + panel * PANEL, l.columns, sums, left < 32 ? left : 32,
                             l.columns - panel * PANEL, l.bias ? l.bias + panel * PANEL : NULL);
            }
        }
        _tile_release();
    }
}

/* -- the operations between them ------------------------------------------------------------------------------------ */

/* Rounds to the nearest even, as torch does; subnormal numbers too, which the instructions for it flush. */
INLINE vf round_bf16(vf x) {
    const __m512i u = (__m512i)x, odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7fff));
    const __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
    return (vf)_mm512_mask_mov_epi32(_mm512_and_si512(sum, _mm512_set1_epi32((int)0xffff0000)), nan,
                                     _mm512_set1_epi32(0x7fc00000));
}
INLINE __m256i to_bf16(vf x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)round_bf16(x), 16)); }
INLINE void store_bf16(uint16_t *p, vf x) { _mm256_storeu_si256((__m256i *)p, to_bf16(x)); }

INLINE float square(uint16_t x) {
    const uint32_t word = (uint32_t)x << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value * value;
}

/* Adds the squares of 32 elements, lane by lane. */
INLINE void add_squares(vf *sums, const uint16_t *x) {
    const vf a = load_bf16(x), b = load_bf16(x + 16);
    sums[0] += a * a;
    sums[1] += b * b;
}

/* The sum of the squares of n elements, in the order in which torch sums a row of fp32: four vectors of 8 lanes side by
 * side, in four levels of partial sums, then the vectors, the elements behind them, and the lanes. */
static float sum_of_squares(const uint16_t *x, int64_t n) {
    const int64_t vectors = n / 8, size = vectors / 4;
    int64_t power = 0, i = 0;
    while ((int64_t)1 << power < size) power++;
    power = power / 4 > 4 ? power / 4 : 4;
    const int64_t step = (int64_t)1 << power;
    vf sums[4][2] = {{{0}}};
    float lanes[32], total = 0;
    while (i + step <= size) {
        for (int64_t j = 0; j < step; j++, i++) add_squares(sums[0], x + 32 * i);
        for (int level = 1; level < 4; level++) {
            for (int h = 0; h < 2; h++) {
                sums[level][h] += sums[level - 1][h];
                sums[level - 1][h] = (vf){0};
            }
            if (i & ((step - 1) << (level * power))) break;
        }
    }
    for (; i < size; i++) add_squares(sums[0], x + 32 * i);
    for (int h = 0; h < 2; h++) store_f32(lanes + 16 * h, sums[0][h] + sums[1][h] + sums[2][h] + sums[3][h]);
    for (int64_t k = size * 32; k < vectors * 8; k++) lanes[k % 8] += square(x[k]);
    for (int k = 8; k < 32; k++) lanes[k % 8] += lanes[k];
    for (int64_t k = vectors * 8; k < n; k++) total += square(x[k]);
    for (int k = 0; k < 8; k++) total += lanes[k];
    return total;
}

/* out = weight * round(x / sqrt(mean(x * x) + eps)), rows of n elements; n a multiple of 16. */
void hfp_rms_norm(const uint16_t *x, const uint16_t *weight, uint16_t *out, int64_t rows, int64_t n, double eps,
                  int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * n >= FORK_ELEMENTS)
    for (int64_t r = 0; r < rows; r++) {
        const uint16_t *from = x + r * n;
        uint16_t *to = out + r * n;
        const vf factor = splat(1.0f / sqrtf(sum_of_squares(from, n) / (float)n + (float)eps));
        for (int64_t i = 0; i < n; i += 16)
            store_bf16(to + i, load_bf16(weight + i) * round_bf16(load_bf16(from + i) * factor));
    }
}

/* gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i] */
INLINE void gate_vector(uint16_t *gate, const uint16_t *up) {
    const vf x = load_bf16(gate);
    /* Beyond these bounds the result is 0 or x. NaN stays: the second operand is taken then. */
    const __m512 bounded = _mm512_min_ps(_mm512_set1_ps(104), _mm512_max_ps(_mm512_set1_ps(-104), (__m512)-x));
    vf power;
    const vf y = exp_parts((vf)bounded, &power);
    const vf silu = round_bf16(x / (1.0f + (vf)_mm512_scalef_ps((__m512)y, (__m512)power)));
    store_bf16(gate, silu * load_bf16(up));
}

typedef struct {
    const uint16_t *x; /* [tokens, heads, dim] */
    int64_t token, head, heads;
    uint16_t *out; /* contiguous */
} Rotated;

typedef struct {
    Rotated query, key;
    const uint16_t *cos, *sin; /* [tokens, dim] */
    int64_t tokens, dim, threads;
} Rotate;

INLINE void rotate_heads(const Rotated *r, int64_t token, const uint16_t *cos, const uint16_t *sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t h = 0; h < r->heads; h++) {
        const uint16_t *x = r->x + token * r->token + h * r->head;
        uint16_t *out = r->out + (token * r->heads + h) * dim;
        for (int64_t d = 0; d < half; d += 16) {
            const vf a = load_bf16(x + d), b = load_bf16(x + half + d);
            store_bf16(out + d, round_bf16(a * load_bf16(cos + d)) - round_bf16(b * load_bf16(sin + d)));
            store_bf16(out + half + d, round_bf16(b * load_bf16(cos + half + d)) + round_bf16(a * load_bf16(sin + half + d)));
        }
    }
}

/* Rotary position embedding of queries and keys: the halves of a head rotate against each other. dim: a multiple of 32. */
void hfp_rotate(const Rotate *r) {
#pragma omp parallel for schedule(static) num_threads(r->threads) \
    if (r->threads > 1 && r->tokens * (r->query.heads + r->key.heads) * r->dim >= FORK_ELEMENTS)
    for (int64_t t = 0; t < r->tokens; t++) {
        rotate_heads(&r->query, t, r->cos + t * r->dim, r->sin + t * r->dim, r->dim);
        rotate_heads(&r->key, t, r->cos + t * r->dim, r->sin + t * r->dim, r->dim);
    }
}

/* -- the two parts of a decoder layer, around its attention; all depths are multiples of 32 -------------------------- */

typedef struct {
    const uint16_t *weight, *bias; /* packed; bias: or NULL */
    int64_t columns;
} Packed;

INLINE void apply(const Packed *p, const uint16_t *x, int64_t rows, int64_t depth, uint16_t *out, char *workspace,
                  int64_t threads) {
    hfp_linear(&(Linear){x, rows, p->columns, depth, p->weight, p->bias, out, workspace, threads});
}

typedef struct {
    const uint16_t *x; /* [rows, depth] */
    int64_t rows, depth, head_dim;
    const uint16_t *norm, *query_norm, *key_norm; /* weights; those of the heads, [head_dim]: or NULL */
    Packed query, key, value;
    const uint16_t *cos, *sin;                /* [rows, head_dim] */
    uint16_t *new_query, *new_key, *new_value; /* [rows, columns of each] */
    char *workspace;                          /* hfp_layer_in_workspace() bytes, aligned to 64 */
    int64_t threads;
} LayerIn;

int64_t hfp_layer_in_workspace(int64_t rows, int64_t depth) {
    return round_up(rows * depth * 2, 64) + hfp_linear_workspace(rows, depth);
}

/* What comes before attention: norm, projections, norms of heads, rotation. eps: of all three norms. */
void hfp_layer_in(const LayerIn *l, const double *eps) {
    const int64_t rows = l->rows, depth = l->depth, dim = l->head_dim, threads = l->threads;
    const int64_t heads = l->query.columns / dim, kv_heads = l->key.columns / dim;
    uint16_t *normed = (uint16_t *)(void *)l->workspace;
    char *rest = l->workspace + round_up(rows * depth * 2, 64);
    hfp_rms_norm(l->x, l->norm, normed, rows, depth, eps[0], threads);
    apply(&l->query, normed, rows, depth, l->new_query, rest, threads);
    apply(&l->key, normed, rows, depth, l->new_key, rest, threads);
    apply(&l->value, normed, rows, depth, l->new_value, rest, threads);
    if (l->query_norm) hfp_rms_norm(l->new_query, l->query_norm, l->new_query, rows * heads, dim, eps[1], threads);
    if (l->key_norm) hfp_rms_norm(l->new_key, l->key_norm, l->new_key, rows * kv_heads, dim, eps[2], threads);
    hfp_rotate(&(Rotate){{l->new_query, heads * dim, dim, heads, l->new_query},
                         {l->new_key, kv_heads * dim, dim, kv_heads, l->new_key},
                         l->cos, l->sin, rows, dim, threads});
}

typedef struct {
    const uint16_t *x, *residual; /* what attention gave [rows, x_depth]; what came into the layer [rows, depth] */
    int64_t rows, x_depth, depth;
    const uint16_t *norm;
    Packed output, gate, up, down;
    uint16_t *out;   /* [rows, depth] */
    char *workspace; /* hfp_layer_out_workspace() bytes, aligned to 64 */
    int64_t threads;
} LayerOut;

int64_t hfp_layer_out_workspace(int64_t rows, int64_t x_depth, int64_t depth, int64_t inner) {
    const int64_t most = x_depth > depth ? x_depth : depth;
    return 2 * round_up(rows * depth * 2, 64) + 2 * round_up(rows * inner * 2, 64) +
           hfp_linear_workspace(rows, most > inner ? most : inner);
}

/* to[i] += x[i] */
static void add_rows(uint16_t *to, const uint16_t *x, int64_t n, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n >= FORK_ELEMENTS)
    for (int64_t i = 0; i < n; i += 16) store_bf16(to + i, load_bf16(to + i) + load_bf16(x + i));
}

/* What comes after attention: output projection, residual, norm, gated MLP, residual. */
void hfp_layer_out(const LayerOut *l, double eps) {
    const int64_t rows = l->rows, depth = l->depth, inner = l->gate.columns, size = rows * inner, threads = l->threads;
    uint16_t *middle = (uint16_t *)(void *)l->workspace, *normed = middle + round_up(rows * depth * 2, 64) / 2;
    uint16_t *gate = normed + round_up(rows * depth * 2, 64) / 2, *up = gate + round_up(size * 2, 64) / 2;
    char *rest = (char *)up + round_up(size * 2, 64);
    apply(&l->output, l->x, rows, l->x_depth, middle, rest, threads);
    add_rows(middle, l->residual, rows * depth, threads);
    hfp_rms_norm(middle, l->norm, normed, rows, depth, eps, threads);
    apply(&l->gate, normed, rows, depth, gate, rest, threads);
    apply(&l->up, normed, rows, depth, up, rest, threads);
    /* Memory would be idle meanwhile: the first of what the next layer of weights needs comes to L2. */
    const char *next = (const char *)l->down.weight, *last = next + (depth * inner * 2 < AHEAD ? depth * inner * 2 : AHEAD);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && size >= FORK_ELEMENTS)
    for (int64_t i = 0; i < size; i += 16) {
        if (next + i * 8 < last) {
            _mm_prefetch(next + i * 8, _MM_HINT_T1);
            _mm_prefetch(next + i * 8 + 64, _MM_HINT_T1);
        }
        gate_vector(gate + i, up + i);
    }
    apply(&l->down, gate, rows, inner, l->out, rest, threads);
    add_rows(l->out, middle, rows * depth, threads);
}
