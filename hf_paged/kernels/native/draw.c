/* Samples one token per row of probabilities with the algorithm of torch.multinomial on a CPU: for each token with
 * probability p draw an exponential variate e = -log1p(-u), and take the token with the largest p / e. The uniform
 * variates u are those of torch's generator, a Mersenne Twister: 53 bits of two words, for every token of the row.
 * Because e >= u, the logarithm is computed only if p / u exceeds the largest p / e so far. */

#include "common.h"

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

static void twister_take(twister *t, uint32_t *out, int count) {
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

/* probs [rows, vocab], rows `stride` elements apart -> tokens [rows]. states: the state of each row's generator, which
 * is advanced. are_distinct: no two rows have the same generator. */
HFP_EXPORT void hfp_draw(const float *probs, int64_t stride, int64_t rows, int64_t vocab,
                         generator_state *const *states, int are_distinct, int64_t *tokens, int64_t threads) {
    (void)threads, (void)are_distinct;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1 && are_distinct)
    for (int64_t r = 0; r < rows; r++) {
        generator_state *state = states[r];
        twister t = {.next = state->left == 1 ? TWISTER_WORDS : (int)state->next};
        for (int i = 0; i < TWISTER_WORDS; i++) t.words[i] = (uint32_t)state->words[i];
        tokens[r] = draw_row(probs + r * stride, vocab, &t);
        for (int i = 0; i < TWISTER_WORDS; i++) state->words[i] = t.words[i];
        state->next = (uint64_t)t.next;
        state->left = TWISTER_WORDS + 1 - t.next;
    }
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
