/* The sizes of the buffers of prefill.inc.c. */
#ifndef HFP_PREFILL_H
#define HFP_PREFILL_H
#include "common.h"

#define ROWS 64      /* query rows of a tile */
#define KEYS 256     /* keys of a chunk: packed together, with one update of the running maxima */
#define MAX_TILES 16 /* of a unit of work */
#define MAX_DIM 512  /* elements of a head */
#define BLOCK_ROWS (W == 16 ? 8 : 4) /* rows of a product whose sums, with 2 * W columns, fit into registers */

/* Maximum tiles of a unit: their outputs take at most 256 KiB. */
static inline int64_t num_tiles(int64_t v_pad) {
    int64_t tiles = 65536 / (ROWS * v_pad);
    return tiles > MAX_TILES ? MAX_TILES : tiles;
}

/* Bytes of the buffers of one thread in fp32; with AMX they are not larger. */
static inline int64_t prefill_bytes(int64_t dim, int64_t v_dim) {
    const int64_t pad = round_up(dim, 32), v_pad = round_up(v_dim, 32), rows = num_tiles(v_pad) * ROWS;
    return rows * (pad + v_pad + 1 + W) * 4 + KEYS * (pad + v_pad + 2 * ROWS) * 4 + 16 * 64;
}
#endif
