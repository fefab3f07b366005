/* The two parts of a decoder layer, before and after its attention, and whole layers, of one dtype. All depths are
 * multiples of 32. The caller compares them with the model's own layers once (fused/cpu/decoder.py). */
#include "kernels.h"

#define SIZE ((int64_t)sizeof(ELEMENT))

INLINE void apply(const Weight *w, const ELEMENT *x, int64_t rows, int64_t depth, ELEMENT *out, char *workspace,
                  int64_t threads) {
    NAME(hfp_linear)(&(Linear){x, rows, w->columns, depth, w->weight, w->bias, w->packed, out, workspace, threads,
                               w->scales, w->rounds});
}

HFP_EXPORT int64_t NAME(hfp_layer_in_workspace)(int64_t rows, int64_t depth, int64_t threads) {
    return round_up(rows * depth * SIZE, 64) + NAME(hfp_linear_workspace)(rows, depth, threads);
}

/* The part before attention: norm, projections, norms of heads, rotation. */
HFP_EXPORT void NAME(hfp_layer_in)(const LayerIn *l) {
    const int64_t rows = l->rows, depth = l->depth, dim = l->head_dim, threads = l->threads;
    const int64_t heads = l->query.columns / dim, kv_heads = l->key.columns / dim;
    ELEMENT *normed = (ELEMENT *)(void *)l->workspace;
    char *rest = l->workspace + round_up(rows * depth * SIZE, 64);
    NAME(hfp_rms_norm)(l->x, l->norm, normed, rows, depth, l->norm_eps, threads);
    apply(&l->query, normed, rows, depth, l->new_query, rest, threads);
    apply(&l->key, normed, rows, depth, l->new_key, rest, threads);
    apply(&l->value, normed, rows, depth, l->new_value, rest, threads);
    if (l->query_norm)
        NAME(hfp_rms_norm)(l->new_query, l->query_norm, l->new_query, rows * heads, dim, l->query_eps, threads);
    if (l->key_norm) NAME(hfp_rms_norm)(l->new_key, l->key_norm, l->new_key, rows * kv_heads, dim, l->key_eps, threads);
    NAME(hfp_rotate)(&(Rotate){{l->new_query, heads * dim, dim, heads, l->new_query},
                         {l->new_key, kv_heads * dim, dim, kv_heads, l->new_key},
                         l->cos, l->sin, rows, dim, threads});
}

HFP_EXPORT int64_t NAME(hfp_layer_out_workspace)(int64_t rows, int64_t x_depth, int64_t depth, int64_t inner,
                                            int64_t threads) {
    const int64_t max_depth = x_depth > depth ? x_depth : depth;
    return 2 * round_up(rows * depth * SIZE, 64) + 2 * round_up(rows * inner * SIZE, 64) +
           NAME(hfp_linear_workspace)(rows, max_depth > inner ? max_depth : inner, threads);
}

typedef struct {
    ELEMENT *to;
    const ELEMENT *x;
} Added;

static void add_vectors(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Added a = *(const Added *)arguments;
    (void)thread;
    for (int64_t i = 16 * first; i < 16 * last; i += 16) add_vector(a.to + i, a.x + i);
}

/* to[i] += x[i] */
static void add_rows(ELEMENT *to, const ELEMENT *x, int64_t n, int64_t threads) {
    in_parallel(add_vectors, &(Added){to, x}, n / 16, n >= FORK_ELEMENTS ? threads : 1, IN_SHARES);
}

typedef struct {
    ELEMENT *gate;
    const ELEMENT *up;
    const char *next, *last; /* bytes to prefetch to L2 */
} Gated;

static void gate_vectors(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Gated g = *(const Gated *)arguments;
    (void)thread;
    for (int64_t i = 16 * first; i < 16 * last; i += 16) {
        if (g.next + i * 8 < g.last) {
            __builtin_prefetch(g.next + i * 8, 0, 2);
            __builtin_prefetch(g.next + i * 8 + 64, 0, 2);
        }
        gate_vector(g.gate + i, g.gate + i, g.up + i);
    }
}

/* The part after attention: output projection, residual, norm, gated MLP, residual. */
HFP_EXPORT void NAME(hfp_layer_out)(const LayerOut *l) {
    const int64_t rows = l->rows, depth = l->depth, inner = l->gate.columns, size = rows * inner, threads = l->threads;
    ELEMENT *middle = (ELEMENT *)(void *)l->workspace, *normed = middle + round_up(rows * depth * SIZE, 64) / SIZE;
    ELEMENT *gate = normed + round_up(rows * depth * SIZE, 64) / SIZE, *up = gate + round_up(size * SIZE, 64) / SIZE;
    char *rest = (char *)up + round_up(size * SIZE, 64);
    apply(&l->output, l->x, rows, l->x_depth, middle, rest, threads);
    add_rows(middle, l->residual, rows * depth, threads);
    NAME(hfp_rms_norm)(middle, l->norm, normed, rows, depth, l->norm_eps, threads);
    apply(&l->gate, normed, rows, depth, gate, rest, threads);
    apply(&l->up, normed, rows, depth, up, rest, threads);
    /* The memory bus would be idle here, so prefetch the first weights of the next linear layer to L2. */
    const int64_t whole = depth * inner * (l->down.scales ? 1 : SIZE), bytes = whole < AHEAD ? whole : AHEAD;
    const char *next = (const char *)l->down.weight;
    const Gated gated = {gate, up, next, next + bytes};
    in_parallel(gate_vectors, &gated, size / 16, size >= FORK_ELEMENTS ? threads : 1, IN_SHARES);
    apply(&l->down, gate, rows, inner, l->out, rest, threads);
    add_rows(l->out, middle, rows * depth, threads);
}

/* `count` decoder layers of a decode step. The LayerIn, Call and LayerOut of a layer refer to the same
 * buffers, and the input of a layer is the previous layer's result. */
HFP_EXPORT void NAME(hfp_decode_layers)(const LayerIn *ins, const Call *calls, const LayerOut *outs, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        NAME(hfp_layer_in)(&ins[i]);
        hfp_attention(&calls[i], DTYPE_NUMBER);
        NAME(hfp_layer_out)(&outs[i]);
    }
}
