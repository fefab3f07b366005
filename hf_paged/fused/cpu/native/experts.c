/* The experts of a mixture: gated MLPs with SiLU, of which each token goes through a few, chosen for it. All tokens of an
 * expert are computed together, so that its weights are read once. depth and inner are multiples of 16. */
#include "common.h"
#if HAS_DPBF16
#include "layers.h"

/* Sorts all pairs of a token and its expert by expert. starts: [experts + 1], where the pairs of each begin; places: the
 * place of each pair. Returns whether all experts exist. */
static int sort_pairs(const Experts *e, int64_t *starts, int64_t *places) {
    const int64_t pairs = e->tokens * e->top_k;
    memset(starts, 0, (size_t)(e->experts + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < pairs; i++) {
        if (e->index[i] < 0 || e->index[i] >= e->experts) return 0;
        starts[e->index[i] + 1]++;
    }
    for (int64_t i = 0; i < e->experts; i++) starts[i + 1] += starts[i];
    for (int64_t i = 0; i < pairs; i++) places[i] = starts[e->index[i]]++;
    for (int64_t i = e->experts; i > 0; i--) starts[i] = starts[i - 1];
    starts[0] = 0;
    return 1;
}

static void apply(const Experts *e, const uint16_t *weights, int64_t expert, const uint16_t *x, int64_t rows,
                  int64_t columns, int64_t depth, uint16_t *out) {
    const int64_t size = e->packed ? hfp_packed_bytes(columns, depth, 1) : columns * depth;
    hfp_linear(&(Linear){x, rows, columns, depth, weights + expert * size, NULL, e->packed, out, e->workspace,
                         e->threads});
}

/* The results of one expert for n rows. both: its workspace, [n, 2 * inner] */
static void expert_rows(const Experts *e, int64_t expert, const uint16_t *rows, int64_t n, uint16_t *both,
                        uint16_t *results) {
    const int64_t inner = e->inner;
    apply(e, e->gate_up, expert, rows, n, 2 * inner, e->depth, both);
    /* Row by row to the front of `both`: a row's result ends before the next row's gates begin. */
    for (int64_t r = 0; r < n; r++)
        for (int64_t i = 0; i < inner; i += 16) {
            const uint16_t *gate = both + r * 2 * inner + i;
            gate_vector(both + r * inner + i, gate, gate + inner);
        }
    apply(e, e->down, expert, both, n, e->depth, inner, results);
}

/* A row for each pair, expert by expert. */
static void gather_rows(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Experts *e = arguments;
    const int64_t depth = e->depth;
    (void)thread;
    for (int64_t i = first; i < last; i++)
        memcpy(e->rows + e->places[i] * depth, e->x + i / e->top_k * depth, (size_t)depth * 2);
}

static void add_results(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Experts *e = arguments;
    const int64_t depth = e->depth, top_k = e->top_k, *places = e->places;
    (void)thread;
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < depth; i += 16) {
            vf sum = {0};
            for (int64_t j = t * top_k; j < (t + 1) * top_k; j++) {
                const vf x = load_bf16(e->results + places[j] * depth + i) * e->weights[j];
                sum += e->rounds ? round_bf16(x) : x;
            }
            store_bf16(e->out + t * depth + i, sum);
        }
}

/* out = the sums of the results of each token's experts, times their weights. Returns 0, and computes nothing, if an
 * expert does not exist; else 1. The result of a token does not depend on other tokens. */
HFP_EXPORT int64_t hfp_experts(const Experts *e) {
    const int64_t depth = e->depth, pairs = e->tokens * e->top_k;
    int64_t *places = e->places, *starts = places + pairs;
    if (!sort_pairs(e, starts, places)) return 0;
    const int64_t threads = pairs * depth >= FORK_ELEMENTS ? e->threads : 1;
    in_parallel(gather_rows, e, pairs, threads, IN_SHARES);
    for (int64_t i = 0; i < e->experts; i++) {
        const int64_t start = starts[i], n = starts[i + 1] - start;
        if (n) expert_rows(e, i, e->rows + start * depth, n, e->both + start * 2 * e->inner, e->results + start * depth);
    }
    in_parallel(add_results, e, e->tokens, threads, IN_SHARES);
    return 1;
}
#endif
