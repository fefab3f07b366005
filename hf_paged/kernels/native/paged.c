/* The three paged operations on a CPU: plain C, no torch. Owns vectors, the plan of a step and the entry points; the
 * kernel itself is in attention.inc.c, compiled once a dtype; bf16 on matrix units is in attention_amx.inc.c. Arrays
 * and shapes are checked by the caller.
 *
 * Keys are cut into chunks of CHUNK positions, at the same positions in every sequence. A work item is one chunk of one
 * sequence (or of several that hold the same blocks there) with all heads; the chunks of a query are combined in order.
 * So a query's result depends on its own keys alone: not on the batch, the threads, or who shares its blocks.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#endif

#define CHUNK 128
#define TILE 32           /* keys whose scores are computed before the softmax state is updated; divides CHUNK */
#define MAX_ITEM_ROWS 64  /* query rows of a KV head in one item: what the scores of a tile may take in L1 */

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define W 16
#elif defined(__AVX2__) && defined(__FMA__)
#define W 8
#else
#define W 4
#endif
#if W == 16 && defined(__AVX512BF16__)
#define HAS_DPBF16 1
#else
#define HAS_DPBF16 0
#endif
#if HAS_DPBF16 && defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define HAS_AMX 1
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_AMX 0
#endif
#if defined(__F16C__) || defined(__aarch64__)
#define HAS_F16 1
#else
#define HAS_F16 0
#endif

#define INLINE static inline __attribute__((always_inline))
typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf choose(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
INLINE vf vmax(vf a, vf b) { /* b where either is NaN */
#if W == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE vf load_f32(const void *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store_f32(float *p, vf x) { memcpy(p, &x, sizeof x); }

INLINE vf load_bf16(const void *p) {
#if W == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif W == 8
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}

#if HAS_F16
INLINE vf load_f16(const void *p) {
#if W == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif W == 8
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__F16C__)
    return (vf)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)p));
#else
    const __fp16 *h = (const __fp16 *)p;
    return (vf){(float)h[0], (float)h[1], (float)h[2], (float)h[3]};
#endif
}
#endif

INLINE float max_lanes(vf x) {
#if W == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float m = x[0];
    for (int i = 1; i < W; i++) m = x[i] > m ? x[i] : m;
    return m;
#endif
}

INLINE float sum_lanes(vf x) {
    float s = 0;
    for (int i = 0; i < W; i++) s += x[i];
    return s;
}

/* Lane j of the result: the sum over the lanes of a[j]. */
INLINE vf sum_rows(const vf *a) {
#if W == 16
    __m512 t[8], u[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512 x = (__m512)a[2 * i], y = (__m512)a[2 * i + 1];
        t[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(t[2 * i]), y = _mm512_castps_pd(t[2 * i + 1]);
        u[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    __m512 v = _mm512_add_ps(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
    __m512 w = _mm512_add_ps(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
    return (vf)_mm512_add_ps(_mm512_shuffle_f32x4(v, w, 0x88), _mm512_shuffle_f32x4(v, w, 0xdd));
#elif W == 8
    __m256 t[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) t[i] = _mm256_hadd_ps((__m256)a[2 * i], (__m256)a[2 * i + 1]);
    __m256 u = _mm256_hadd_ps(t[0], t[1]), v = _mm256_hadd_ps(t[2], t[3]);
    return (vf)_mm256_add_ps(_mm256_permute2f128_ps(u, v, 0x20), _mm256_permute2f128_ps(u, v, 0x31));
#else
    vf r;
#pragma GCC unroll 4
    for (int j = 0; j < W; j++) r[j] = (a[j][0] + a[j][1]) + (a[j][2] + a[j][3]);
    return r;
#endif
}

/* exp(x) = result * 2^(*power), relative error below 2e-7; NaN for NaN. */
INLINE vf exp_parts(vf x, vf *power) {
#if W == 16
    vf n = (vf)_mm512_roundscale_ps((__m512)(x * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vf n = (x * 1.44269504f + magic) - magic;
#endif
    vf f = x - n * 0.693359375f;
    f = f + n * 2.12194440e-4f;
    vf y = splat(1.9875691500e-4f);
    y = y * f + 1.3981999507e-3f;
    y = y * f + 8.3334519073e-3f;
    y = y * f + 4.1665795894e-2f;
    y = y * f + 1.6666665459e-1f;
    y = y * f + 5.0000001201e-1f;
    *power = n;
    return (y * f) * f + f + 1.0f;
}

/* exp(x) for x <= 0: 0 below -87, -inf included. */
INLINE vf exp_negative(vf x) {
    vf n, y = exp_parts(x, &n);
#if W == 16
    const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(kept, (__m512)y, (__m512)n);
#else
    vi under = x < -87.0f;
    vi e = __builtin_convertvector(choose(under, splat(0), n), vi);
    y = y * (vf)((e + 127) << 23);
    return (vf)((vi)y & ~under);
#endif
}

INLINE vf tanh_v(vf x) {
    vi sign = (vi)x & (int32_t)0x80000000;
    vf a = (vf)((vi)x ^ sign), s = x * x;
    vf big = 1.0f - 2.0f / (1.0f / exp_negative(-2.0f * a) + 1.0f);
    big = choose(a > 40.0f, splat(1.0f), big);
    vf small = splat(0.021869488f);
    small = small * s - 0.053968254f;
    small = small * s + 0.133333333f;
    small = small * s - 0.333333333f;
    small = small * s * a + a;
    vf y = choose(a < 0.25f, small, big);
    return (vf)((vi)y | sign);
}

/* Store the first n <= W lanes, rounded to the nearest even. */
INLINE void store_part_f32(float *p, vf x, int64_t n) {
    if (n == W)
        store_f32(p, x);
    else
        for (int64_t i = 0; i < n; i++) p[i] = x[i];
}

INLINE void store_part_bf16(uint16_t *p, vf x, int64_t n) {
    vu u = (vu)x, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    rounded = (vu)choose(x == x, (vf)rounded, (vf)((vu){0} + 0x7fc0));
#if W == 16
    __m256i h = _mm512_cvtepi32_epi16((__m512i)rounded);
#else
    vh h = __builtin_convertvector(rounded, vh);
#endif
    if (n == W)
        memcpy(p, &h, sizeof h);
    else
        memcpy(p, &h, (size_t)n * 2);
}

#if HAS_F16
INLINE void store_part_f16(uint16_t *p, vf x, int64_t n) {
    uint16_t h[W];
#if W == 16
    _mm256_storeu_si256((__m256i *)h, _mm512_cvtps_ph((__m512)x, 0));
#elif W == 8
    _mm_storeu_si128((__m128i *)h, _mm256_cvtps_ph((__m256)x, 0));
#elif defined(__F16C__)
    _mm_storel_epi64((__m128i *)h, _mm_cvtps_ph((__m128)x, 0));
#else
    for (int i = 0; i < W; i++) {
        __fp16 f = (__fp16)x[i];
        memcpy(h + i, &f, 2);
    }
#endif
    memcpy(p, h, (size_t)n * 2);
}
#endif

/* -- the plan of a step ------------------------------------------------------------------------------------------- */

typedef struct {
    int32_t first, count; /* its queries: tokens[first : first + count] */
    int32_t chunk, seq;   /* which keys, and whose block table leads to them */
} Item;

typedef struct {
    int32_t row, pos; /* row of the query tensor, position in its sequence */
    int32_t slot;     /* where this chunk's partial result goes; -1: it is the only one, write the output */
} Token;

typedef struct {
    int32_t row, slot, count; /* the partial results of one query */
} Merge;

typedef struct {
    Item *items;
    Token *tokens;
    Merge *merges;
    int64_t num_items, num_tokens, num_merges, num_slots, max_count;
} Plan;

typedef struct {
    int32_t chunk, seq, next; /* next: the next member that shares this chunk; the first member is its own group */
    int32_t last;
} Member;

static int64_t first_key(int64_t pos, int64_t window, int64_t chunk_size) {
    int64_t low = window > 0 && pos - window + 1 > 0 ? pos - window + 1 : 0;
    if (chunk_size > 0 && pos / chunk_size * chunk_size > low) low = pos / chunk_size * chunk_size;
    return low;
}

/* How much a plan can hold, and so how long its arrays are. */
typedef struct {
    int64_t members, pairs, queries, rows, table;
} Extent;

static Extent extent_of(const int32_t *seq_lens, const int32_t *starts, const int32_t *seqs, int64_t num_seqs,
                        int64_t window, int64_t chunk_size) {
    Extent extent = {0, 0, 0, 0, 16};
    for (int64_t n = 0; n < num_seqs; n++) {
        int64_t i = seqs[n], q = starts[i + 1] - starts[i], len = seq_lens[i];
        if (q <= 0) continue;
        int64_t low = first_key(len - q, window, chunk_size) / CHUNK, high = (len - 1) / CHUNK;
        extent.members += high - low + 1;
        extent.pairs += q * (high - low + 1);
        extent.queries += q;
        if (starts[i + 1] > extent.rows) extent.rows = starts[i + 1];
    }
    while (extent.table < 2 * extent.members) extent.table *= 2;
    return extent;
}

static int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

/* The next part of the memory at *at; the number of bytes so far, when that began at 0. */
static void *take(uintptr_t *at, int64_t count, size_t size) {
    uintptr_t part = *at;
    *at += (uintptr_t)round_up(count * (int64_t)size, 16);
    return (void *)part;
}

/* Parts of the memory that a plan is made in: what it keeps, then what only making it needs. */
typedef struct {
    Plan *plan;
    Item *items;
    Token *tokens;
    Merge *merges;
    Member *members;
    int32_t *hashed, *slots;
} Parts;

static Parts divide(uintptr_t *at, Extent extent) {
    Parts parts;
    parts.plan = take(at, 1, sizeof(Plan));
    parts.items = take(at, extent.pairs, sizeof(Item));
    parts.tokens = take(at, extent.pairs, sizeof(Token));
    parts.merges = take(at, extent.queries, sizeof(Merge));
    parts.members = take(at, extent.members, sizeof(Member));
    parts.hashed = take(at, extent.table, sizeof(int32_t));
    parts.slots = take(at, extent.rows, sizeof(int32_t));
    return parts;
}

/* Bytes of memory, aligned to 16, that hfp_plan needs; window, chunk_size: 0 = none; seqs: which sequences. */
int64_t hfp_plan_bytes(const int32_t *seq_lens, const int32_t *starts, const int32_t *seqs, int64_t num_seqs,
                       int64_t window, int64_t chunk_size) {
    uintptr_t end = 0;
    divide(&end, extent_of(seq_lens, starts, seqs, num_seqs, window, chunk_size));
    return (int64_t)end;
}

/* Makes the plan at `memory`, which is the caller's. max_count: queries in an item, at most. */
void hfp_plan(void *memory, const int32_t *tables, int64_t table_stride, const int32_t *seq_lens,
              const int32_t *starts, const int32_t *seqs, int64_t num_seqs, int64_t block_size, int64_t window,
              int64_t chunk_size, int64_t max_count, int64_t share) {
    Extent extent = extent_of(seq_lens, starts, seqs, num_seqs, window, chunk_size);
    uintptr_t at = (uintptr_t)memory;
    Parts parts = divide(&at, extent);
    Plan *plan = parts.plan;
    Member *members = parts.members;
    int32_t *hashed = parts.hashed, *slots = parts.slots;
    *plan = (Plan){parts.items, parts.tokens, parts.merges, 0, 0, 0, 0, 0};
    int64_t num_members = extent.members, table_size = extent.table;
    memset(hashed, 0xff, sizeof(int32_t) * (size_t)table_size);
    int64_t m = 0;
    for (int64_t n = 0; n < num_seqs; n++) {
        int64_t i = seqs[n], q = starts[i + 1] - starts[i], len = seq_lens[i];
        if (q <= 0) continue;
        int64_t context = len - q;
        for (int64_t c = first_key(context, window, chunk_size) / CHUNK; c <= (len - 1) / CHUNK; c++) {
            members[m] = (Member){(int32_t)c, (int32_t)i, -1, (int32_t)m};
            /* Only chunks that all queries of the sequence see to the end are shared: what lies behind a query's
             * position in a shared block is not its own. */
            if (share && context + 1 >= (c + 1) * CHUNK) {
                const int32_t *ids = tables + i * table_stride;
                int64_t low = c * CHUNK / block_size, high = ((c + 1) * CHUNK - 1) / block_size;
                uint64_t hash = 1469598103934665603ull ^ (uint64_t)c;
                for (int64_t b = low; b <= high; b++) hash = (hash ^ (uint32_t)ids[b]) * 1099511628211ull;
                hash ^= hash >> 29;
                for (uint64_t at = hash & (uint64_t)(table_size - 1);; at = (at + 1) & (uint64_t)(table_size - 1)) {
                    if (hashed[at] < 0) {
                        hashed[at] = (int32_t)m;
                        break;
                    }
                    Member *head = &members[hashed[at]];
                    if (head->chunk == c && memcmp(tables + head->seq * table_stride + low, ids + low,
                                                   sizeof(int32_t) * (size_t)(high - low + 1)) == 0) {
                        members[head->last].next = (int32_t)m;
                        head->last = (int32_t)m;
                        members[m].last = -1;
                        break;
                    }
                }
            }
            m++;
        }
        for (int64_t t = 0; t < q; t++) {
            int64_t count = (context + t) / CHUNK - first_key(context + t, window, chunk_size) / CHUNK + 1;
            if (count > 1) {
                Merge merge = {starts[i] + (int32_t)t, (int32_t)plan->num_slots, (int32_t)count};
                plan->merges[plan->num_merges++] = merge;
                plan->num_slots += count;
            }
        }
    }
    /* Where each query's partial results begin, by query row. */
    for (int64_t k = 0; k < plan->num_merges; k++) slots[plan->merges[k].row] = plan->merges[k].slot;
    for (int64_t head = 0; head < num_members; head++) {
        if (members[head].last < 0) continue;
        Item item = {(int32_t)plan->num_tokens, 0, members[head].chunk, members[head].seq};
        int64_t c = item.chunk;
        for (int32_t k = (int32_t)head; k >= 0; k = members[k].next) {
            int64_t i = members[k].seq, q = starts[i + 1] - starts[i], context = seq_lens[i] - q;
            for (int64_t t = 0; t < q; t++) {
                int64_t pos = context + t, low = first_key(pos, window, chunk_size) / CHUNK, high = pos / CHUNK;
                if (c < low || c > high) continue;
                if (item.count == max_count) {
                    plan->items[plan->num_items++] = item;
                    item.first = (int32_t)plan->num_tokens;
                    item.count = 0;
                }
                int32_t row = starts[i] + (int32_t)t;
                plan->tokens[plan->num_tokens++] =
                    (Token){row, (int32_t)pos, low == high ? -1 : slots[row] + (int32_t)(c - low)};
                item.count++;
            }
        }
        if (item.count) plan->items[plan->num_items++] = item;
    }
    for (int64_t k = 0; k < plan->num_items; k++)
        if (plan->items[k].count > plan->max_count) plan->max_count = plan->items[k].count;
}

void hfp_plan_counts(const Plan *plan, int64_t *counts) {
    counts[0] = plan->num_items;
    counts[1] = plan->num_tokens;
    counts[2] = plan->num_merges;
    counts[3] = plan->num_slots;
}

/* -- block write ---------------------------------------------------------------------------------------------------- */

/* Strides and sizes in bytes: k_token, k_head of `key`; kc_slot of the cache (heads of a slot are contiguous there). */
void hfp_write_kv(const char *key, const char *value, char *key_cache, char *value_cache, const int64_t *slots,
                  int64_t num_tokens, int64_t num_kv_heads, const int64_t *strides, int64_t threads) {
    int64_t k_token = strides[0], k_head = strides[1], k_row = strides[2], v_token = strides[3], v_head = strides[4],
            v_row = strides[5];
    int64_t bytes = num_tokens * num_kv_heads * (k_row + v_row);
    (void)threads;
#pragma omp parallel for num_threads(threads) if (threads > 1 && bytes > 1 << 16)
    for (int64_t t = 0; t < num_tokens; t++) {
        if (slots[t] < 0) continue;
        char *k = key_cache + slots[t] * num_kv_heads * k_row, *v = value_cache + slots[t] * num_kv_heads * v_row;
        for (int64_t h = 0; h < num_kv_heads; h++) {
            memcpy(k + h * k_row, key + t * k_token + h * k_head, (size_t)k_row);
            memcpy(v + h * v_row, value + t * v_token + h * v_head, (size_t)v_row);
        }
    }
}

/* -- attention ---------------------------------------------------------------------------------------------------- */

/* Filled by the caller as 64-bit integers, in this order; strides in elements, sizes 0 = absent. */
typedef struct {
    const char *query, *key, *value;
    char *out;
    float *lse;                 /* [num_tokens, num_heads] or NULL */
    const float *sinks, *slopes; /* [num_heads] or NULL */
    const int32_t *tables;
    const Plan *plan;
    char *workspace;
    int64_t q_token, q_head, k_block, k_token, k_head, v_block, v_token, v_head, o_token, o_head;
    int64_t table_stride, num_heads, num_kv_heads, head_dim, v_head_dim, block_size, window, chunk_size, threads;
    const char *new_key, *new_value; /* K/V of the step's tokens, to be written first; NULL: they are in the cache */
    const int64_t *slots;
    int64_t num_tokens, strides[6]; /* as hfp_write_kv takes them */
} Call;

static int64_t padded_dim(int64_t dim) { return round_up(dim, 2 * W); }
/* floats of one partial result: maxima, sums, unnormalised outputs */
static int64_t slot_floats(int64_t num_heads, int64_t v_head_dim) {
    return round_up(2 * num_heads, 16) + num_heads * padded_dim(v_head_dim);
}
static int64_t thread_bytes(int64_t count, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                            int64_t v_head_dim) {
    int64_t rows = count * (num_heads / num_kv_heads);
    int64_t floats = count * num_heads * padded_dim(head_dim) /* queries */
                     + count * slot_floats(num_heads, v_head_dim)
                     + count * num_heads * W   /* sums, lane by lane */
                     + rows * (TILE + 4)       /* scores, factors, pointers to accumulators */
                     + count * 8
#if HAS_AMX
                     + round_up(rows, 16) * (num_kv_heads * head_dim / 2 + 3) /* queries as tiles, what they see */
                     + round_up(rows, 16) * CHUNK                             /* scores */
                     + CHUNK * (head_dim + 32) / 2 + 1024                     /* keys, values, outputs as tiles */
#endif
        ;
    return round_up(floats * 4, 64) + 4096;
}

int64_t hfp_workspace_bytes(const Plan *plan, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                            int64_t v_head_dim, int64_t threads) {
    return plan->num_slots * round_up(slot_floats(num_heads, v_head_dim) * 4, 64) +
           threads * thread_bytes(plan->max_count, num_heads, num_kv_heads, head_dim, v_head_dim) + 64;
}

/* -- prompts: matrix products --------------------------------------------------------------------------------------- */

#define ROWS 64     /* query rows of a tile */
#define KEYS 256    /* keys that are packed at a time, and seen by a row between two looks at its maximum */
#define MAX_TILES 16 /* of a unit of work */
#define MAX_DIM 512  /* of a head */
#define BLOCK_ROWS (W == 16 ? 8 : 4) /* rows of a product whose sums fit the registers, with 2 * W columns */

/* Tiles of a unit: their outputs take 256 KiB at most. */
static int64_t num_tiles(int64_t v_pad) {
    int64_t tiles = 65536 / (ROWS * v_pad);
    return tiles > MAX_TILES ? MAX_TILES : tiles;
}

/* Bytes that a thread needs: the buffers of prefill.inc.c in fp32; with AMX they take no more. */
static int64_t prefill_bytes(int64_t dim, int64_t v_dim) {
    const int64_t pad = round_up(dim, 32), v_pad = round_up(v_dim, 32), rows = num_tiles(v_pad) * ROWS;
    return rows * (pad + v_pad + 1 + W) * 4 + KEYS * (pad + v_pad + 2 * ROWS) * 4 + 16 * 64;
}

#if W == 16
/* Row i of the result: the i-th 128 bits of each of the four. */
INLINE void transpose_lanes(const __m512i *x, char *out, int64_t stride) {
    __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x88), b = _mm512_shuffle_i32x4(x[0], x[1], 0xdd);
    __m512i c = _mm512_shuffle_i32x4(x[2], x[3], 0x88), d = _mm512_shuffle_i32x4(x[2], x[3], 0xdd);
    _mm512_store_si512(out, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_store_si512(out + stride, _mm512_shuffle_i32x4(b, d, 0x88));
    _mm512_store_si512(out + 2 * stride, _mm512_shuffle_i32x4(a, c, 0xdd));
    _mm512_store_si512(out + 3 * stride, _mm512_shuffle_i32x4(b, d, 0xdd));
}

/* 16 x 16 words; the stride is in bytes, all rows of the result are aligned. */
INLINE void transpose_16(const __m512i *x, void *out, int64_t stride) {
    __m512i a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) /* b[4 * i + j]: columns j, 4 + j, 8 + j, 12 + j of rows 4 * i ... */
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            b[4 * i + 2 * j] = _mm512_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
            b[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
        }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512i lanes[4] = {b[j], b[4 + j], b[8 + j], b[12 + j]};
        transpose_lanes(lanes, (char *)out + j * stride, 4 * stride);
    }
}
#endif

/* to[i][j] = from[j][i], 16 x 16 words; strides in words, all rows aligned. */
static void transpose_words(uint32_t *to, int64_t to_stride, const uint32_t *from, int64_t from_stride) {
#if W == 16
    __m512i rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) rows[i] = _mm512_load_si512(from + i * from_stride);
    transpose_16(rows, to, to_stride * 4);
#else
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) to[i * to_stride + j] = from[j * from_stride + i];
#endif
}

/* out[BLOCK_ROWS][2 * W] (+)= a[BLOCK_ROWS][depth] x b[depth][2 * W] */
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

#if HAS_AMX
/* gcc does not know that a tile load reads memory: what it is to read is written before this. */
#define COMPILER_FENCE() __asm__ volatile("" ::: "memory")

/* Whether the system lets this process use the matrix unit: on Linux a process asks for it. */
static int amx_allowed(void) {
    static int answer; /* 0: not asked */
    int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (!known) {
        known = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0 ? 1 : -1;
        __atomic_store_n(&answer, known, __ATOMIC_RELAXED);
    }
    return known > 0;
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t columns[16]; /* bytes */
    uint8_t rows[16];
} AmxConfig;
static const AmxConfig amx_config_16 = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* out[32][32] (+)= a[32][depth] x b[depth][32]: b in pairs of bf16 from two of its rows, depth a multiple of 32. What
 * is read must have been written before a COMPILER_FENCE. */
INLINE void amx_multiply(float *out, int64_t out_stride, const uint16_t *a, int64_t a_stride, const uint32_t *b,
                         int64_t b_stride, int64_t depth, int add) {
    float *below = out + 16 * out_stride;
    if (add) {
        _tile_loadd(0, out, out_stride * 4);
        _tile_loadd(1, out + 16, out_stride * 4);
        _tile_loadd(2, below, out_stride * 4);
        _tile_loadd(3, below + 16, out_stride * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += 32) {
        _tile_loadd(4, a + k, a_stride * 2);
        _tile_loadd(5, a + 16 * a_stride + k, a_stride * 2);
        _tile_loadd(6, b + k / 2 * b_stride, b_stride * 4);
        _tile_loadd(7, b + k / 2 * b_stride + 16, b_stride * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, out_stride * 4);
    _tile_stored(1, out + 16, out_stride * 4);
    _tile_stored(2, below, out_stride * 4);
    _tile_stored(3, below + 16, out_stride * 4);
}

/* to[i] = a[i], b[i]: 16 pairs of bf16 */
INLINE void interleave(uint32_t *to, const uint16_t *a, const uint16_t *b) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)a));
    __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)b));
    _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
#else
static int amx_allowed(void) { return 0; }
#endif

#define NAME_2(a, b) a##_##b
#define NAME_1(a, b) NAME_2(a, b)
#define TYPED(name) NAME_1(name, DTYPE)

#define DTYPE f32
#define IS_BF16 0
#define ELEMENT float
#define LOAD load_f32
#define DOT_BF16 0
#define COMMON_DIMS 1
#include "attention.inc.c"

#define DTYPE bf16
#define IS_BF16 1
#define ELEMENT uint16_t
#define LOAD load_bf16
#define DOT_BF16 HAS_DPBF16
#define COMMON_DIMS 1
#include "attention.inc.c"

#if HAS_AMX
#include "attention_amx.inc.c"
#include "layers.inc.c"
#endif

#if HAS_F16
#define DTYPE f16
#define IS_BF16 0
#define ELEMENT uint16_t
#define LOAD load_f16
#define DOT_BF16 0
#define COMMON_DIMS 0 /* rare on CPUs: not worth the compile time */
#include "attention.inc.c"
#endif

/* dtype: 0 fp32, 1 bf16, 2 fp16. Returns 0, or -1 where this machine has no code for the dtype. */
int hfp_attention(const Call *call, int dtype, double scale, double softcap) {
    if (call->new_key)
        hfp_write_kv(call->new_key, call->new_value, (char *)call->key, (char *)call->value, call->slots,
                     call->num_tokens, call->num_kv_heads, call->strides, call->threads);
    if (!call->plan->num_items) return 0; /* nothing but prompts */
    if (dtype == 0) return attention_f32(call, (float)scale, (float)softcap), 0;
#if HAS_AMX
    if (dtype == 1 && amx_has_shape(call) && amx_allowed())
        return attention_amx(call, (float)scale, (float)softcap), 0;
#endif
    if (dtype == 1) return attention_bf16(call, (float)scale, (float)softcap), 0;
#if HAS_F16
    if (dtype == 2) return attention_f16(call, (float)scale, (float)softcap), 0;
#endif
    return -1;
}

/* Bytes of workspace that hfp_prefill needs. */
int64_t hfp_prefill_bytes(int64_t head_dim, int64_t v_head_dim, int64_t threads) {
    return threads * prefill_bytes(head_dim, v_head_dim) + 64;
}

/* The sequences `seqs`, whose new tokens are many. seq_lens, starts: of all sequences. New K/V must have been written.
 * Heads of MAX_DIM elements and groups of ROWS query heads, at most. Returns as hfp_attention does. */
int hfp_prefill(const Call *call, int dtype, double scale, double softcap, const int32_t *seq_lens,
                const int32_t *starts, const int32_t *seqs, int64_t num_seqs) {
#if HAS_AMX
    if (dtype == 1 && amx_allowed())
        return prefill_amx(call, seq_lens, starts, seqs, num_seqs, (float)scale, (float)softcap), 0;
#endif
    if (dtype == 0) return prefill_f32(call, seq_lens, starts, seqs, num_seqs, (float)scale, (float)softcap), 0;
    if (dtype == 1) return prefill_bf16(call, seq_lens, starts, seqs, num_seqs, (float)scale, (float)softcap), 0;
#if HAS_F16
    if (dtype == 2) return prefill_f16(call, seq_lens, starts, seqs, num_seqs, (float)scale, (float)softcap), 0;
#endif
    return -1;
}

#if HAS_AMX
/* `count` decoder layers of a decode step, in bf16: each one's LayerIn, Call and LayerOut name the same buffers, and it
 * takes what the one before it gives. eps: three for each LayerIn, one for each LayerOut; scales: scale and softcap. */
void hfp_decode_layers(const LayerIn *ins, const double *in_eps, const Call *calls, const double *scales,
                       const LayerOut *outs, const double *out_eps, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        hfp_layer_in(&ins[i], in_eps + 3 * i);
        hfp_attention(&calls[i], 1, scales[2 * i], scales[2 * i + 1]);
        hfp_layer_out(&outs[i], out_eps[i]);
    }
}
#endif

/* Of logits [rows, vocab], `row` elements from row to row: the (first) largest, and its log-probability, NaN where there
 * is NaN. Returns as hfp_attention does. */
int hfp_greedy(const void *logits, int dtype, int64_t row, int64_t rows, int64_t vocab, int64_t *tokens,
               float *logprobs, int64_t threads) {
    if (dtype == 0) return greedy_f32(logits, row, rows, vocab, tokens, logprobs, threads), 0;
    if (dtype == 1) return greedy_bf16(logits, row, rows, vocab, tokens, logprobs, threads), 0;
#if HAS_F16
    if (dtype == 2) return greedy_f16(logits, row, rows, vocab, tokens, logprobs, threads), 0;
#endif
    return -1;
}

int hfp_has_f16(void) { return HAS_F16; }

/* Whether there is what layers.inc.c exports. */
int hfp_has_layers(void) { return amx_allowed(); }

const char *hfp_target(void) {
    if (amx_allowed()) return "AVX-512 with BF16 and AMX";
#if HAS_DPBF16
    return "AVX-512 with BF16";
#elif W == 16
    return "AVX-512";
#elif W == 8
    return "AVX2";
#else
    return "128-bit vectors";
#endif
}

int hfp_openmp(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

/* -- drawing tokens -------------------------------------------------------------------------------------------------- */

#include "draw.inc.c"

/* -- block copy ----------------------------------------------------------------------------------------------------- */

/* caches: num_caches times (address and bytes from one block to the next of the source, the same of the target, bytes of
   a block). copies: num_copies pairs of (src, dst). */
void hfp_copy_blocks(const int64_t *caches, int64_t num_caches, const int64_t *copies, int64_t num_copies,
                     int64_t threads) {
    (void)threads;
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1 && num_caches * num_copies > 8)
    for (int64_t c = 0; c < num_caches; c++)
        for (int64_t i = 0; i < num_copies; i++) {
            const int64_t *cache = caches + 5 * c;
            const char *source = (const char *)(intptr_t)cache[0] + copies[2 * i] * cache[1];
            char *target = (char *)(intptr_t)cache[2] + copies[2 * i + 1] * cache[3];
            memcpy(target, source, (size_t)cache[4]);
        }
}
