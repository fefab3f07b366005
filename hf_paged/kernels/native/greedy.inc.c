/* Greedy sampling: the most likely token of each row of logits and its log-probability, in two passes over the row.
 * Included by the unit of each dtype; see attention.inc.c for the macros. */

static void TYPED(greedy_row)(const ELEMENT *x, int64_t vocab, int64_t *token, float *logprob) {
    vf tops = splat(-INFINITY), sums[4] = {{0}};
    vi at = {0}, lanes = {0};
    for (int i = 0; i < W; i++) lanes[i] = i;
    int64_t i = 0;
    for (; i + W <= vocab; i += W) {
        const vf v = LOAD(x + i);
        const vi larger = v > tops;
        tops = choose(larger, v, tops);
        at = (at & ~larger) | ((lanes + (int32_t)i) & larger);
    }
    float top = tops[0];
    int64_t best = at[0];
    for (int j = 1; j < W; j++) /* the first of equal logits */
        if (tops[j] > top || (tops[j] == top && at[j] < best)) top = tops[j], best = at[j];
    float tail[W];
    for (int j = 0; j < W; j++) {
        tail[j] = -INFINITY;
        if (i + j < vocab) {
            float v[W];
            ELEMENT e[W] = {x[i + j]};
            store_f32(v, LOAD(e));
            tail[j] = v[0];
            if (v[0] > top) top = v[0], best = i + j;
        }
    }
    /* exp(-inf) adds nothing. NaN in the row, or no finite maximum, makes the sum NaN. */
    int64_t k = 0;
    for (; k + 4 * W <= vocab; k += 4 * W)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sums[j] += exp_negative(LOAD(x + k + j * W) - top);
    for (; k + W <= vocab; k += W) sums[0] += exp_negative(LOAD(x + k) - top);
    sums[1] += exp_negative(load_f32(tail) - top);
    *token = best;
    *logprob = -logf(sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])));
}

typedef struct {
    const ELEMENT *logits;
    int64_t row, vocab;
    int64_t *tokens;
    float *logprobs;
} TYPED(Logits);

static void TYPED(greedy_rows)(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const TYPED(Logits) l = *(const TYPED(Logits) *)arguments;
    (void)thread;
    for (int64_t r = first; r < last; r++)
        TYPED(greedy_row)(l.logits + r * l.row, l.vocab, l.tokens + r, l.logprobs + r);
}

void TYPED(greedy)(const ELEMENT *x, int64_t row, int64_t rows, int64_t vocab, int64_t *tokens, float *logprobs,
                   int64_t threads) {
    in_parallel(TYPED(greedy_rows), &(TYPED(Logits)){x, row, vocab, tokens, logprobs}, rows, threads, IN_SHARES);
}
