/* Sizes of what prefill.inc.c works on. */
#ifndef HFP_PREFILL_H
#define HFP_PREFILL_H
#include "common.h"

#define ROWS 64     /* query rows of a tile */
#define KEYS 256    /* keys that are packed at a time, and seen by a row between two looks at its maximum */
#define MAX_TILES 16 /* of a unit of work */
#define MAX_DIM 512  /* of a head */
#define BLOCK_ROWS (W == 16 ? 8 : 4) /* rows of a product whose sums fit the registers, with 2 * W columns */

/* Tiles of a unit: their outputs take 256 KiB at most. */
static inline int64_t num_tiles(int64_t v_pad) {
    int64_t tiles = 65536 / (ROWS * v_pad);
    return tiles > MAX_TILES ? MAX_TILES : tiles;
}

/* Bytes that a thread needs: the buffers of prefill.inc.c in fp32; with AMX they are no larger. */
static inline int64_t prefill_bytes(int64_t dim, int64_t v_dim) {
    const int64_t pad = round_up(dim, 32), v_pad = round_up(v_dim, 32), rows = num_tiles(v_pad) * ROWS;
    return rows * (pad + v_pad + 1 + W) * 4 + KEYS * (pad + v_pad + 2 * ROWS) * 4 + 16 * 64;
}
#endif
