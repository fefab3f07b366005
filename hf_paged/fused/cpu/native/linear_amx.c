/* Linear layers in bf16 on the matrix unit. */
#include "common.h"
#if HAS_AMX
#include "linear.h"

/* Each line that is not in the L1 cache occupies one of the core's few fill buffers on its way: for long if it comes
 * from memory, prefetches included, but tiles that are loaded from L2 wait for one too. So reading weights overlaps
 * with the products only as far as tiles are in the L1 cache, or as the hardware's own prefetcher, which needs no such
 * buffers, fills L2: every fourth line is prefetched far ahead to start it there. */
#define STREAM 8192 /* bytes that are prefetched to L2 ahead of the tiles of a panel that is used once */
#define FAR 16384   /* bytes ahead of these prefetches, where every fourth line starts the hardware's prefetcher */
#define FAR_PASSES 3 /* with more passes over a panel, the products take longer than reading */

/* Sixteen rows of x: the first one's address, and the stride in bytes. */
typedef struct {
    const uint16_t *at;
    int64_t bytes;
} RowTile;

/* Prefetches `fours` times four cache lines to L2 from `line` on, and if `far` some that will follow; returns the end. */
INLINE const char *prefetch_lines(const char *line, int64_t fours, int far) {
    for (int64_t i = 0; i < fours; i++, line += 256) {
        if (far) _mm_prefetch(line + FAR, _MM_HINT_T1);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm_prefetch(line + 64 * j, _MM_HINT_T1);
    }
    return line;
}

/* Tiles 0 to 3: sums of 32 rows (16 if not `two`) with a panel. Each step prefetches `fours` times four cache lines
 * from `*next` on to L2: if `streams`, as many as it uses itself. The rows, and a panel that streams, are loaded
 * with the hint that they are not used again soon, so that a panel which is used again stays in the L1 cache. */
INLINE void linear_sums(RowTile top, RowTile bottom, const uint16_t *panel, int64_t steps, const char **next,
                        int64_t fours, int far, const int streams, const int two) {
    const char *line = *next;
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < steps; k++, panel += 1024) {
        if (streams) {
            line = prefetch_lines(line, 8, 1);
            _tile_stream_loadd(6, panel, 64);
            _tile_stream_loadd(7, panel + 512, 64);
        } else {
            line = prefetch_lines(line, fours, far);
            _tile_loadd(6, panel, 64);
            _tile_loadd(7, panel + 512, 64);
        }
        _tile_stream_loadd(4, top.at + k * 32, top.bytes);
        if (two) _tile_stream_loadd(5, bottom.at + k * 32, bottom.bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    *next = line;
}

typedef struct {
    const Linear *linear;
    int64_t in_place;     /* rows of x that are read where they are; the others are in `copy`, padded with zeros */
    const uint16_t *copy;
    AmxConfig config;
} AmxPanels;

static void amx_panels(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const AmxPanels *all = arguments;
    const Linear l = *all->linear;
    const uint16_t *copy = all->copy;
    const int64_t in_place = all->in_place, steps = round_up(l.depth, 32) / 32;
    const int64_t passes = (round_up(l.rows, 16) / 16 + 1) / 2;
    /* With few rows, a panel is used once and prefetched just in time. With many rows, each use of a panel prefetches a
     * part of the next one to L2. (If the weight is not packed, packing prefetches it.) */
    const int streams = linear_in_place(&l) && passes == 1;
    const int64_t fours = linear_in_place(&l) ? (7 + passes) / passes : 0;
    const int far = passes <= FAR_PASSES;
    float sums[32 * PANEL] __attribute__((aligned(64)));
    uint16_t *buffer = linear_buffer(&l, thread);
    _tile_loadconfig(&all->config);
    for (int64_t panel = first; panel < last; panel++) {
        const uint16_t *weight = linear_panel(&l, panel, buffer);
        COMPILER_FENCE();
        const char *next = (const char *)weight + (passes > 1 ? steps * 2048 : STREAM);
        const char *end = (const char *)weight + 2 * steps * 2048; /* of the next panel */
        for (int64_t row = 0; row < l.rows; row += 32) {
            const int64_t left = l.rows - row;
            RowTile tile[2];
            for (int i = 0; i < 2; i++)
                tile[i] = row + 16 * i < in_place
                              ? (RowTile){l.x + (row + 16 * i) * l.depth, l.depth * 2}
                              : (RowTile){copy + (row + 16 * i - in_place) * steps * 32, steps * 64};
            const int64_t ahead = next < end ? fours : 0;
            if (!streams && left > 16)
                linear_sums(tile[0], tile[1], weight, steps, &next, ahead, far, 0, 1);
            else if (!streams)
                linear_sums(tile[0], tile[0], weight, steps, &next, ahead, far, 0, 0);
            else if (left > 16)
                linear_sums(tile[0], tile[1], weight, steps, &next, ahead, far, 1, 1);
            else
                linear_sums(tile[0], tile[0], weight, steps, &next, ahead, far, 1, 0);
            _tile_stored(0, sums, PANEL * 4);
            _tile_stored(1, sums + 16, PANEL * 4);
            if (left > 16) {
                _tile_stored(2, sums + 16 * PANEL, PANEL * 4);
                _tile_stored(3, sums + 16 * PANEL + 16, PANEL * 4);
            }
            COMPILER_FENCE();
            linear_store(&l, row, left < 32 ? left : 32, panel, sums);
        }
    }
    _tile_release();
}

/* Every sum is in the order of the depth, for any number of rows and threads. */
void linear_amx(const Linear *call) {
    const Linear l = *call;
    const int64_t steps = round_up(l.depth, 32) / 32, tiles = round_up(l.rows, 16) / 16;
    /* Full tiles of rows are read in place, and so is a single partial tile (with two tiles that was slower). Other
     * partial tiles are read from a copy, as are all rows if the depth is not a multiple of 32. */
    const int64_t in_place = l.depth % 32 ? 0 : tiles > 1 ? l.rows / 16 * 16 : l.rows;
    const int64_t copied = in_place < l.rows ? tiles * 16 - in_place : 0;
    AmxConfig config = amx_config_16;
    if (tiles == 1 && !copied) config.rows[0] = config.rows[1] = config.rows[4] = (uint8_t)l.rows;
    uint16_t *copy = (uint16_t *)(void *)l.workspace + l.threads * steps * 1024;
    for (int64_t r = 0; r < copied; r++) {
        const int64_t depth = in_place + r < l.rows ? l.depth : 0;
        memcpy(copy + r * steps * 32, l.x + (in_place + r) * l.depth, (size_t)depth * 2);
        memset(copy + r * steps * 32 + depth, 0, (size_t)(steps * 32 - depth) * 2);
    }
    COMPILER_FENCE();
    const AmxPanels all = {call, in_place, copy, config};
    in_parallel(amx_panels, &all, round_up(l.columns, PANEL) / PANEL, l.threads, IN_SHARES);
}
#endif
