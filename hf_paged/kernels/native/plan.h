/* The plan of a step: which keys are read together, by which queries. Made once, used by all layers of a group. */
#ifndef HFP_PLAN_H
#define HFP_PLAN_H
#include "common.h"

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

/* A step as the caller describes it: 64-bit words in this order (kernels/native/structs.py). window, chunk_size: 0 =
 * none. Sequence i has the query rows starts[i] to starts[i + 1]. */
typedef struct {
    const int32_t *tables, *seq_lens, *starts;
    const int32_t *seqs; /* the sequences to plan: num_seqs numbers */
    int64_t table_stride, num_seqs, block_size, window, chunk_size;
    int64_t max_count; /* queries in an item, at most */
    int64_t share;     /* whether a chunk that several sequences hold is read once for all of them */
} Step;

/* The first position that a query at position `pos` sees. */
static inline int64_t first_key(int64_t pos, int64_t window, int64_t chunk_size) {
    int64_t low = window > 0 && pos - window + 1 > 0 ? pos - window + 1 : 0;
    if (chunk_size > 0 && pos / chunk_size * chunk_size > low) low = pos / chunk_size * chunk_size;
    return low;
}
#endif
