/* Decode steps of a model that drafts (fused/cpu/draft.py), in bf16, without Python between them: each takes the most
 * likely tokens of the one before. A wrong token costs time, never a result, so the head is read in four bits: they find
 * one token in each of CLASSES classes, and the exact weights choose among these. */
#include "common.h"
#if HAS_DPBF16
#include "kernels.h"
#include "layers.h"

#define CLASSES 64
#define ROWS 8 /* whose sums fit into the vector registers */

/* coarse: [vocab / 16, depth / 8, 16 columns, 4 bytes], vocab rounded up; a byte has the elements k (low bits) and k + 4,
 * plus 8. An element times the scale of its column is the weight, nearly. */
typedef struct {
    const uint8_t *coarse;
    const float *scales;   /* [vocab, rounded up to 16] */
    const uint16_t *exact; /* [vocab, depth] */
    const uint16_t *norm;  /* of the last hidden states, [depth] */
    double eps;
    int64_t vocab, depth;
} Head;

typedef struct {
    Head head;
    LayerIn *ins;
    Call *calls;
    const LayerOut *outs;
    int64_t layers;
    const Step *step; /* which `seq_lens` belongs to */
    Partition *partition;
    int32_t *seq_lens;         /* [rows] */
    int64_t *positions;        /* [rows], of the last tokens */
    const int64_t *slots;      /* [steps, rows] */
    const uint16_t *embedding; /* [vocab, depth] */
    const uint16_t *cos, *sin; /* [positions, head_dim] */
    const uint16_t *hidden;    /* [rows, depth]: what the last layer has returned for the tokens before the first ones;
                                * NULL: the first ones are given */
    uint16_t *x;               /* [rows, depth], read by the first layer */
    uint16_t *angles;          /* [2, rows, head_dim], read by all layers */
    int64_t rows, head_dim, steps;
    char *workspace; /* hfp_draft_workspace() bytes, aligned to 64 */
    int64_t threads;
    int64_t *tokens;  /* [steps + 1, rows] */
    float *logprobs;  /* [steps + 1, rows] */
    double least;     /* a draft ends before a token of a lower log-probability; -inf: none are needed */
} Draft;

void hfp_partition(void *memory, const Step *step);
void hfp_decode_layers(const LayerIn *ins, const Call *calls, const LayerOut *outs, int64_t count);

HFP_EXPORT int64_t hfp_draft_workspace(int64_t rows, int64_t depth, int64_t vocab) {
    return rows * (3 * depth + 8) + ROWS * 4 * round_up(vocab, 16) + 4096;
}

/* The scores of `rows` rows x int8 [rows, depth] with 16 columns. */
INLINE void score_panel(const uint8_t *w, const int8_t *x, int64_t depth, const int32_t *sums, const float *factors,
                        const float *scales, float *out, int64_t stride, const int rows) {
    const __m512i low_bits = _mm512_set1_epi8(15);
    __m512i sum[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sum[r][0] = _mm512_set1_epi32(-8 * sums[r]), sum[r][1] = _mm512_setzero_si512();
    for (int64_t k = 0; k < depth; k += 8, w += 64) {
        _mm_prefetch(w + 24576, _MM_HINT_T1); /* to L2, which can wait for more lines than L1 */
        _mm_prefetch(w + 2048, _MM_HINT_T0);
        const __m512i both = _mm512_load_si512(w), low = _mm512_and_si512(both, low_bits);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_bits);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const int32_t *fours = (const int32_t *)(const void *)(x + r * depth + k);
            sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], low, _mm512_set1_epi32(fours[0]));
            sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], high, _mm512_set1_epi32(fours[1]));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const __m512 all = _mm512_cvtepi32_ps(_mm512_add_epi32(sum[r][0], sum[r][1]));
        store_f32(out + r * stride, (vf)all * load_f32(scales) * splat(factors[r]));
    }
}

#define CASE(n) \
    case n: score_panel(w, x, h->depth, sums, factors, h->scales + 16 * p, out + 16 * p, stride, n); break;

typedef struct {
    const Head *head;
    const int8_t *x;
    const int32_t *sums;
    const float *factors;
    float *out;
    int64_t stride, rows;
} Scored;

static void score_panels(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Scored s = *(const Scored *)arguments;
    const Head *h = s.head;
    const int8_t *x = s.x;
    const int32_t *sums = s.sums;
    const float *factors = s.factors;
    float *out = s.out;
    const int64_t stride = s.stride;
    (void)thread;
    for (int64_t p = first; p < last; p++) {
        const uint8_t *w = h->coarse + p * h->depth * 8;
        switch (s.rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
    }
}

static void score_rows(const Head *h, const int8_t *x, const int32_t *sums, const float *factors, float *out,
                       int64_t stride, int64_t rows, int64_t threads) {
    const Scored scored = {h, x, sums, factors, out, stride, rows};
    in_parallel(score_panels, &scored, round_up(h->vocab, 16) / 16, threads, IN_SHARES);
}

/* x as int8 times the factor that is returned; *sum: of its elements. */
static float round_row(const uint16_t *x, int64_t depth, int8_t *to, int32_t *sum) {
    vf most = {0};
    for (int64_t i = 0; i < depth; i += 16) most = (vf)_mm512_max_ps((__m512)most, _mm512_abs_ps((__m512)load_bf16(x + i)));
    const float largest = max_lanes(most), factor = largest > 0 ? largest / 127 : 1;
    __m512i total = _mm512_setzero_si512();
    for (int64_t i = 0; i < depth; i += 16) {
        const __m512i all = _mm512_cvtps_epi32((__m512)(load_bf16(x + i) * splat(1 / factor)));
        total = _mm512_add_epi32(total, all);
        _mm_storeu_si128((__m128i *)(void *)(to + i), _mm512_cvtsepi32_epi8(all));
    }
    *sum = _mm512_reduce_add_epi32(total);
    return factor;
}

static float exact_score(const Head *h, const uint16_t *x, int64_t column) {
    const uint16_t *w = h->exact + column * h->depth;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < h->depth; i += 32)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x + i), (__m512bh)_mm512_loadu_si512(w + i));
    return _mm512_reduce_add_ps(sum);
}

/* The token of the largest score, and its log-probability, nearly; 0 if that is not `wanted`. scores: [vocab, rounded
 * up], of which the last ones become -inf. */
static int64_t choose_token(const Head *h, const uint16_t *x, float *scores, float *logprob, int wanted) {
    const int64_t columns = round_up(h->vocab, 16);
    for (int64_t i = h->vocab; i < columns; i++) scores[i] = -INFINITY;
    vf tops[CLASSES / 16];
    vi at[CLASSES / 16];
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int j = 0; j < CLASSES / 16; j++) tops[j] = splat(-INFINITY), at[j] = (vi){0};
    for (int64_t i = 0; i < columns; i += CLASSES)
        for (int j = 0; j < CLASSES / 16 && i + 16 * j < columns; j++) {
            const vf v = load_f32(scores + i + 16 * j);
            const vi larger = v > tops[j];
            tops[j] = choose(larger, v, tops[j]);
            at[j] = (at[j] & ~larger) | ((lanes + (int32_t)(i + 16 * j)) & larger);
        }
    float top = -INFINITY;
    int64_t best = 0;
    for (int j = 0; j < CLASSES; j++) {
        const int64_t column = at[j / 16][j % 16];
        const float score = exact_score(h, x, column);
        if (score > top) top = score, best = column;
    }
    *logprob = 0;
    if (!wanted) return best;
    vf sum = {0};
    for (int64_t i = 0; i < columns; i += 16) {
        vf power;
        const vf below = (vf)_mm512_min_ps((__m512)(load_f32(scores + i) - splat(top)), _mm512_set1_ps(80));
        const vf y = exp_parts((vf)_mm512_max_ps((__m512)below, _mm512_set1_ps(-100)), &power);
        sum += (vf)_mm512_scalef_ps((__m512)y, (__m512)power);
    }
    *logprob = -logf(sum_lanes(sum));
    return best;
}

/* The next tokens after these hidden states [rows, depth]. */
static void next_tokens(const Draft *d, const uint16_t *hidden, int64_t *tokens, float *logprobs) {
    const Head *h = &d->head;
    const int64_t depth = h->depth, columns = round_up(h->vocab, 16);
    char *at = d->workspace;
    uint16_t *normed = take(&at, d->rows * depth * 2);
    int8_t *x = take(&at, d->rows * depth);
    int32_t *sums = take(&at, d->rows * 4);
    float *factors = take(&at, d->rows * 4), *scores = take(&at, ROWS * columns * 4);
    hfp_rms_norm(hidden, h->norm, normed, d->rows, depth, h->eps, d->threads);
    for (int64_t r = 0; r < d->rows; r++) factors[r] = round_row(normed + r * depth, depth, x + r * depth, sums + r);
    for (int64_t r = 0; r < d->rows; r += ROWS) {
        const int64_t rows = d->rows - r < ROWS ? d->rows - r : ROWS;
        score_rows(h, x + r * depth, sums + r, factors + r, scores, columns, rows, d->threads);
        for (int64_t i = 0; i < rows; i++)
            tokens[r + i] = choose_token(h, normed + (r + i) * depth, scores + i * columns, logprobs + r + i,
                                         d->least > -INFINITY);
    }
}

/* Returns how many rows of tokens there are: `steps` + 1, or less if all drafts end before. */
HFP_EXPORT int64_t hfp_draft(const Draft *d) {
    const int64_t rows = d->rows, depth = d->head.depth, dim = d->head_dim;
    if (d->hidden) next_tokens(d, d->hidden, d->tokens, d->logprobs);
    int64_t *tokens = d->tokens;
    float *logprobs = d->logprobs;
    for (int64_t s = 0; s < d->steps; s++) {
        int64_t going = 0;
        for (int64_t r = 0; r < rows; r++) {
            if (!(logprobs[r] >= (float)d->least)) logprobs[r] = -INFINITY;
            if (s && logprobs[r - rows] == -INFINITY) logprobs[r] = -INFINITY;
            going += logprobs[r] != -INFINITY;
        }
        if (!going) return s + 1;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t position = ++d->positions[r];
            d->seq_lens[r]++;
            memcpy(d->x + r * depth, d->embedding + tokens[r] * depth, (size_t)depth * 2);
            memcpy(d->angles + r * dim, d->cos + position * dim, (size_t)dim * 2);
            memcpy(d->angles + (rows + r) * dim, d->sin + position * dim, (size_t)dim * 2);
        }
        for (int64_t i = 0; i < d->layers; i++) d->calls[i].slots = d->slots + s * rows;
        hfp_partition(d->partition, d->step);
        hfp_decode_layers(d->ins, d->calls, d->outs, d->layers);
        tokens += rows;
        logprobs += rows;
        next_tokens(d, d->outs[d->layers - 1].out, tokens, logprobs);
    }
    return d->steps + 1;
}
#endif
