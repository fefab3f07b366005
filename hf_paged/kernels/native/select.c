/* Finds the k-th largest score of a row without sorting it: the k largest lie in the k runs with the largest maxima. */

#include "threads.h"
#include "vectors.h"

#define RUN 64

/* The k-th largest of x, 1 <= k <= count, none of which is NaN. Reorders them (Hoare's quickselect). */
static float kth_of(float *x, int64_t count, int64_t k) {
    int64_t low = 0, high = count - 1, place = k - 1; /* in descending order */
    while (low < high) {
        const float a = x[low], b = x[low + (high - low) / 2], c = x[high];
        const float pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
        int64_t i = low - 1, j = high + 1;
        for (;;) {
            while (x[++i] > pivot) {}
            while (x[--j] < pivot) {}
            if (i >= j) break;
            const float swapped = x[i];
            x[i] = x[j], x[j] = swapped;
        }
        if (place <= j)
            high = j;
        else
            low = j + 1;
    }
    return x[place];
}

/* maxima: of each run of the row; the last one may be shorter. Returns 0 if a score is NaN. */
static int run_maxima(const float *x, int64_t vocab, float *maxima) {
    vi is_nan = {0};
    int any = 0;
    for (int64_t start = 0; start < vocab; start += RUN) {
        const int64_t end = start + RUN < vocab ? start + RUN : vocab;
        vf most = splat(-INFINITY);
        int64_t i = start;
        for (; i + W <= end; i += W) {
            const vf score = load_f32(x + i);
            is_nan |= score != score;
            most = vmax(score, most);
        }
        float top = max_lanes(most);
        for (; i < end; i++) any |= x[i] != x[i], top = x[i] > top ? x[i] : top;
        maxima[start / RUN] = top;
    }
    for (int lane = 0; lane < W; lane++) any |= is_nan[lane];
    return !any;
}

static float kth_largest(const float *x, int64_t vocab, int64_t k, float *scratch) {
    const int64_t runs = (vocab + RUN - 1) / RUN;
    float *maxima = scratch, *chosen = scratch + runs;
    if (!run_maxima(x, vocab, maxima)) return NAN;
    float least = -INFINITY; /* no score below this is among the k largest */
    if (k <= runs) {
        memcpy(chosen, maxima, sizeof(float) * (size_t)runs);
        least = kth_of(chosen, runs, k);
    }
    int64_t count = 0;
    for (int64_t run = 0; run < runs; run++) {
        const int64_t end = (run + 1) * RUN < vocab ? (run + 1) * RUN : vocab;
        for (int64_t i = run * RUN; maxima[run] >= least && i < end; i++) {
            chosen[count] = x[i];
            count += x[i] >= least;
        }
    }
    return kth_of(chosen, count, k);
}

HFP_EXPORT int64_t hfp_keep_largest_scratch(int64_t vocab) { return vocab + 1 + (vocab + RUN - 1) / RUN; }

typedef struct {
    float *scores;
    int64_t stride, vocab;
    const int64_t *counts;
    float *scratch;
    int64_t *bad; /* rows with NaN */
} Scores;

static void keep_largest(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Scores s = *(const Scores *)arguments;
    for (int64_t r = first; r < last; r++) {
        float *x = s.scores + r * s.stride;
        const float kth = kth_largest(x, s.vocab, s.counts[r], s.scratch + thread * hfp_keep_largest_scratch(s.vocab));
        if (kth != kth) {
            __atomic_fetch_add(s.bad, 1, __ATOMIC_RELAXED);
            continue;
        }
        for (int64_t i = 0; i < s.vocab; i++) x[i] = x[i] < kth ? -INFINITY : x[i];
    }
}

/* In each row of scores [rows, vocab], rows `stride` elements apart, all scores below the counts[row]-th largest become
 * -inf; 1 <= counts[row] <= vocab. Returns the number of rows with NaN, which stay as they are. scratch: fp32 [threads,
 * hfp_keep_largest_scratch]. */
HFP_EXPORT int64_t hfp_keep_largest(float *scores, int64_t stride, int64_t rows, int64_t vocab, const int64_t *counts,
                                    float *scratch, int64_t threads) {
    int64_t bad = 0;
    const Scores all = {scores, stride, vocab, counts, scratch, &bad};
    in_parallel(keep_largest, &all, rows, threads, IN_SHARES);
    return bad;
}
