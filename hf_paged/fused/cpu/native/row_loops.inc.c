/* Norms and rotary position embeddings for all rows, for any dtype: `norm_row` and `rotate_heads` compute one row, and
 * stand before this file is included. */

typedef struct {
    const ELEMENT *x, *weight;
    ELEMENT *out;
    int64_t n;
    double eps;
} Norms;

static void norm_rows(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Norms *c = arguments;
    (void)thread;
    for (int64_t r = first; r < last; r++) norm_row(c->x + r * c->n, c->weight, c->out + r * c->n, c->n, c->eps);
}

/* out = weight * round(x / sqrt(mean(x * x) + eps)), rows of n elements; n a multiple of 16. */
HFP_EXPORT void NAME(hfp_rms_norm)(const ELEMENT *x, const ELEMENT *weight, ELEMENT *out, int64_t rows, int64_t n,
                                   double eps, int64_t threads) {
    in_parallel(norm_rows, &(Norms){x, weight, out, n, eps}, rows, rows * n >= FORK_ELEMENTS ? threads : 1, IN_SHARES);
}

static void rotate_tokens(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Rotate *r = arguments;
    (void)thread;
    for (int64_t t = first; t < last; t++) {
        rotate_heads(&r->query, t, r->cos + t * r->dim, r->sin + t * r->dim, r->dim);
        rotate_heads(&r->key, t, r->cos + t * r->dim, r->sin + t * r->dim, r->dim);
    }
}

/* Rotary position embedding of queries and keys: the halves of a head rotate against each other. dim: a multiple of
 * 32. */
HFP_EXPORT void NAME(hfp_rotate)(const Rotate *r) {
    const int64_t elements = r->tokens * (r->query.heads + r->key.heads) * r->dim;
    in_parallel(rotate_tokens, r, r->tokens, elements >= FORK_ELEMENTS ? r->threads : 1, IN_SHARES);
}
