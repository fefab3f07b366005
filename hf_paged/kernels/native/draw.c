/* Samples one token per row of probabilities with the algorithm of torch.multinomial on a CPU: for each token with
 * probability p draw an exponential variate e = -log1p(-u), and take the token with the largest p / e. The uniform
 * variates u are those of torch's generator, a Mersenne Twister: 53 bits of two words, for every token of the row.
 * Because e >= u, the logarithm is computed only if p / u exceeds the largest p / e so far.
 * Also draws from the tokens that top-p keeps, without sorting them. */

#include "threads.h"
#include "vectors.h"

/* gcc vectorises these loops only at this level. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O3")
#endif

#define TWISTER_WORDS 624
#define DRAWN_AT_ONCE 512

/* The first fields of the state that torch.Generator.get_state() returns. left: words before the next refill, plus
 * one. */
typedef struct {
    uint64_t seed;
    int32_t left, seeded;
    uint64_t next, words[TWISTER_WORDS];
} generator_state;

typedef struct {
    uint32_t words[TWISTER_WORDS];
    int next; /* index of the next word; TWISTER_WORDS: all are used */
} twister;

static inline uint32_t twist(uint32_t a, uint32_t b) {
    return (((a & 0x80000000u) | (b & 0x7fffffffu)) >> 1) ^ (-(b & 1u) & 0x9908b0dfu);
}

static void twister_refill(uint32_t *w) {
    int i = 0;
    for (; i < 227; i++) w[i] = w[i + 397] ^ twist(w[i], w[i + 1]);
    for (; i < 623; i++) w[i] = w[i - 227] ^ twist(w[i], w[i + 1]);
    w[623] = w[396] ^ twist(w[623], w[0]);
}

static void twister_take(twister *restrict t, uint32_t *restrict out, int count) {
    while (count > 0) {
        if (t->next == TWISTER_WORDS) {
            twister_refill(t->words);
            t->next = 0;
        }
        const int n = count < TWISTER_WORDS - t->next ? count : TWISTER_WORDS - t->next;
        for (int i = 0; i < n; i++) {
            uint32_t y = t->words[t->next + i];
            y ^= y >> 11;
            y ^= (y << 7) & 0x9d2c5680u;
            y ^= (y << 15) & 0xefc60000u;
            out[i] = y ^ (y >> 18);
        }
        t->next += n;
        out += n;
        count -= n;
    }
}

static int64_t draw_row(const float *p, int64_t vocab, twister *t) {
    uint32_t words[2 * DRAWN_AT_ONCE];
    int64_t token = 0;
    float best = 0;
    for (int64_t start = 0; start < vocab; start += DRAWN_AT_ONCE) {
        const int n = vocab - start < DRAWN_AT_ONCE ? (int)(vocab - start) : DRAWN_AT_ONCE;
        twister_take(t, words, 2 * n);
        /* The p that a token with e = u needs, for u cut to its first 21 bits; the factor covers rounding errors. */
        const float needed = best * (0x1p-21f * 0.999999f);
        int any = 0;
        for (int i = 0; i < n; i++) {
            const float u = (float)(int32_t)(words[2 * i] & 0x1fffffu);
            any |= (p[start + i] > 0) & (p[start + i] >= needed * u);
        }
        for (int i = 0; any && i < n; i++) {
            const float u = (float)(int32_t)(words[2 * i] & 0x1fffffu), value = p[start + i];
            if (!(value > 0 && value >= best * (0x1p-21f * 0.999999f) * u)) continue;
            const uint64_t bits = ((uint64_t)words[2 * i] << 32 | words[2 * i + 1]) & ((1ull << 53) - 1);
            const float ratio = value / (float)-log1p(-((double)bits * 0x1p-53));
            if (ratio > best) best = ratio, token = start + i;
        }
    }
    return token;
}

static twister twister_of(const generator_state *state) {
    twister t = {.next = state->left == 1 ? TWISTER_WORDS : (int)state->next};
    for (int i = 0; i < TWISTER_WORDS; i++) t.words[i] = (uint32_t)state->words[i];
    return t;
}

static void move_on(generator_state *state, const twister *t) {
    for (int i = 0; i < TWISTER_WORDS; i++) state->words[i] = t->words[i];
    state->next = (uint64_t)t->next;
    state->left = TWISTER_WORDS + 1 - t->next;
}

typedef struct {
    const float *probs;
    int64_t stride, vocab;
    generator_state *const *states;
    int64_t *tokens;
} draws;

static void draw_rows(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const draws d = *(const draws *)arguments;
    (void)thread;
    for (int64_t r = first; r < last; r++) {
        twister t = twister_of(d.states[r]);
        d.tokens[r] = draw_row(d.probs + r * d.stride, d.vocab, &t);
        move_on(d.states[r], &t);
    }
}

/* probs [rows, vocab], rows `stride` elements apart -> tokens [rows]. states: the state of each row's generator, which
 * is advanced. are_distinct: no two rows have the same generator. */
HFP_EXPORT void hfp_draw(const float *probs, int64_t stride, int64_t rows, int64_t vocab,
                         generator_state *const *states, int are_distinct, int64_t *tokens, int64_t threads) {
    const draws all = {probs, stride, vocab, states, tokens};
    in_parallel(draw_rows, &all, rows, are_distinct ? threads : 1, IN_SHARES);
}

/* -- top-p ---------------------------------------------------------------------------------------------------------
 *
 * transformers sorts a row, adds up the softmax of it from below, and removes the tokens up to which the sum is at most
 * 1 - top_p. Here, two scores are found without sorting: tokens below the one are removed whatever the order of equal
 * scores and the rounding of torch's sums, tokens from the other on are kept. If the token drawn among all that may be
 * kept is surely kept, it is the token that transformers draws. If not, the row is left undecided. */

#define CUTS 8              /* scores that are tried in one pass */
#define MAX_PASSES 8        /* each takes two loads a token */
#define FEW 1e-3            /* probability of the tokens in doubt at which the search ends */
#define CLOSE 0.99998f      /* of two quotients in this ratio or closer, either may be the larger one for torch */
#define ADDED_AT_ONCE 2048  /* weights that are added in fp32 */

/* Distances from the largest score down to the cuts of the first pass. */
static const float first_cuts[CUTS] = {16, 8, 4, 2, 1, 0.5f, 0.25f, 0};
/* Distances of the later passes' cuts from the expected bound, as fractions of high - low. */
static const float later_cuts[CUTS] = {-0.25f, -0.07f, -0.015f, -0.002f, 0.002f, 0.015f, 0.07f, 0.25f};

typedef struct {
    float possible, sure; /* scores: no token below the first is kept, all from the second on are */
} nucleus;

static float largest(const float *x, int64_t count) {
    vf most = splat(-INFINITY);
    int64_t i = 0;
    for (; i + W <= count; i += W) most = vmax(load_f32(x + i), most);
    float top = max_lanes(most);
    for (; i < count; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* w = exp(x - top). Returns the sum; NaN if a score is NaN. */
static double weigh(const float *x, float *w, int64_t count, float top) {
    double total = 0;
    for (int64_t start = 0; start < count; start += ADDED_AT_ONCE) {
        const int64_t end = start + ADDED_AT_ONCE < count ? start + ADDED_AT_ONCE : count;
        vf sum = {0};
        int64_t i = start;
        for (; i + W <= end; i += W) {
            const vf e = exp_negative(load_f32(x + i) - top);
            store_f32(w + i, e);
            sum += e;
        }
        total += sum_lanes(sum);
        for (; i < end; i++) total += w[i] = x[i] - top < -87.0f ? 0 : expf(x[i] - top);
    }
    return total;
}

/* sums[c]: weight of the tokens with scores below cuts[c]. */
static void weights_below(const float *x, const float *w, int64_t count, const float *cuts, double *sums) {
    for (int c = 0; c < CUTS; c++) sums[c] = 0;
    for (int64_t start = 0; start < count; start += ADDED_AT_ONCE) {
        const int64_t end = start + ADDED_AT_ONCE < count ? start + ADDED_AT_ONCE : count;
        vf part[CUTS] = {{0}};
        int64_t i = start;
        for (; i + W <= end; i += W) {
            const vf score = load_f32(x + i), weight = load_f32(w + i);
#pragma GCC unroll 8
            for (int c = 0; c < CUTS; c++) part[c] += (vf)((vi)weight & (score < cuts[c]));
        }
        for (int c = 0; c < CUTS; c++) sums[c] += sum_lanes(part[c]);
        for (; i < end; i++)
            for (int c = 0; c < CUTS; c++) sums[c] += x[i] < cuts[c] ? w[i] : 0;
    }
}

/* removed: 1 - top_p. Fills w with the weights. Returns 0 if the row has no distribution or nothing is sure. */
static int find_nucleus(const float *x, float *w, int64_t vocab, float removed, nucleus *found) {
    const float top = largest(x, vocab);
    if (!(fabsf(top) < INFINITY)) return 0;
    const double total = weigh(x, w, vocab, top);
    if (!(total < INFINITY)) return 0;
    /* torch adds a row's weights in fp32, in four lanes at least; the rest is for the rounding of all else. */
    const double slack = 1e-4 + (double)vocab * 0x1p-26;
    const double least = removed * (1 - slack) * total, most = removed * (1 + slack) * total;
    float low = top - 100, high = top;
    double below_low = 0, below_high = INFINITY;
    for (int pass = 0; pass < MAX_PASSES && below_high - below_low > FEW * total; pass++) {
        float cuts[CUTS];
        double sums[CUTS];
        const float width = high - low;
        if (pass == 0)
            for (int c = 0; c < CUTS; c++) cuts[c] = top - first_cuts[c];
        else { /* where the bound is if the sum grows exponentially, and more and more coarsely around it */
            const double least_sum = below_low > 1e-9 * total ? below_low : 1e-9 * total;
            const float guess = low + width * (float)(log(removed * total / least_sum) / log(below_high / least_sum));
            for (int c = 0; c < CUTS; c++) cuts[c] = fminf(high, fmaxf(low, guess + width * later_cuts[c]));
        }
        weights_below(x, w, vocab, cuts, sums);
        for (int c = CUTS - 1; c >= 0; c--) /* the token itself is in the sum that must be larger */
            if (sums[c] + expf(cuts[c] - top) * (1 - 1e-5) > most) high = cuts[c], below_high = sums[c];
        for (int c = 0; c < CUTS; c++)
            if (sums[c] <= least && cuts[c] <= high) low = cuts[c], below_low = sums[c];
        if (high - low >= width || below_high == INFINITY) break;
    }
    *found = (nucleus){low, high};
    return below_high < INFINITY;
}

/* Like draw_row, among the tokens that may be kept; -1 if another one may win in torch's arithmetic. */
static int64_t draw_kept(const float *x, const float *w, int64_t vocab, nucleus kept, twister *t) {
    uint32_t words[2 * DRAWN_AT_ONCE];
    int64_t token = -1;
    float best = 0;
    int is_close = 0;
    for (int64_t start = 0; start < vocab; start += DRAWN_AT_ONCE) {
        const int n = vocab - start < DRAWN_AT_ONCE ? (int)(vocab - start) : DRAWN_AT_ONCE;
        twister_take(t, words, 2 * n);
        const float needed = best * (0x1p-21f * 0.9999f);
        int any = 0;
        for (int i = 0; i < n; i++) {
            const float u = (float)(int32_t)(words[2 * i] & 0x1fffffu);
            any |= (x[start + i] >= kept.possible) & (w[start + i] >= needed * u);
        }
        for (int i = 0; any && i < n; i++) {
            const float u = (float)(int32_t)(words[2 * i] & 0x1fffffu), weight = w[start + i];
            if (!(x[start + i] >= kept.possible && weight >= best * (0x1p-21f * 0.9999f) * u)) continue;
            const uint64_t bits = ((uint64_t)words[2 * i] << 32 | words[2 * i + 1]) & ((1ull << 53) - 1);
            const float ratio = weight / (float)-log1p(-((double)bits * 0x1p-53));
            if (ratio > best) {
                is_close = best >= ratio * CLOSE;
                best = ratio, token = start + i;
            } else if (ratio >= best * CLOSE)
                is_close = 1;
        }
    }
    return token < 0 || is_close || !(x[token] >= kept.sure) ? -1 : token;
}

HFP_EXPORT int64_t hfp_generator_bytes(void) { return sizeof(generator_state); }

typedef struct {
    const float *scores;
    int64_t stride, vocab;
    const float *removed;
    float *weights;
    generator_state *const *states;
    generator_state *before;
    int64_t *tokens;
} top_p_draws;

static void draw_top_p(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const top_p_draws d = *(const top_p_draws *)arguments;
    float *w = d.weights + thread * d.vocab;
    for (int64_t r = first; r < last; r++) {
        const float *x = d.scores + r * d.stride;
        d.before[r] = *d.states[r];
        twister t = twister_of(d.states[r]);
        nucleus kept;
        if (!find_nucleus(x, w, d.vocab, d.removed[r], &kept)) kept = (nucleus){NAN, NAN}; /* has no token */
        d.tokens[r] = draw_kept(x, w, d.vocab, kept, &t);
        move_on(d.states[r], &t);
    }
}

/* removed: 1 - top_p of each row. weights: [threads, vocab], of fp32. before: the states as each row has found its own,
 * for the rows whose token is -1: undecided. */
HFP_EXPORT void hfp_draw_top_p(const float *scores, int64_t stride, int64_t rows, int64_t vocab, const float *removed,
                               float *weights, generator_state *const *states, generator_state *before,
                               int are_distinct, int64_t *tokens, int64_t threads) {
    const top_p_draws all = {scores, stride, vocab, removed, weights, states, before, tokens};
    in_parallel(draw_top_p, &all, rows, are_distinct ? threads : 1, IN_SHARES);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
