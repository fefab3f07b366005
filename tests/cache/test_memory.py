"""PagedMemory: groups of layers change together, or not at all; and the rows that a cache takes over from it."""

from __future__ import annotations

import math

import pytest
import torch

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.block_manager import NULL_BLOCK, BlockManager
from hf_paged.cache.cache_rows import CacheRows
from hf_paged.cache.layers import FULL, Chunk, Kind, LayerGroup, Layers, LayerSize, Layout, Window, layout_of
from hf_paged.cache.memory import PagedMemory
from hf_paged.errors import OutOfBlocks

CPU = torch.device("cpu")
LAYOUT = Layout((LayerGroup(FULL, frozenset({0})), LayerGroup(Window(5), frozenset({1}))))


def test_too_few_blocks_for_all_groups_change_nothing() -> None:
    memory = PagedMemory(4, 5, layout=LAYOUT)
    memory.append([("other", 4)])
    with pytest.raises(OutOfBlocks):
        memory.append([("a", 8)])
    assert "a" not in memory.manager and memory.manager.allocator.num_free == 3
    memory.append([("a", 4)])


def test_a_step_frees_what_has_left_a_window() -> None:
    memory = PagedMemory(4, 16, layout=LAYOUT)
    memory.append([("a", 20), ("b", 3)])
    memory.step_done(["a", "b"])
    assert memory.manager.allocator.num_used == (5 + 1) + (1 + 1)
    memory.check_integrity()


def _layers(full: int, windowed: int, window: int, sizes: tuple[int, int] = (8, 8)) -> Layers:
    of_full = [(index, FULL, LayerSize(sizes[0], sizes[0], CPU)) for index in range(full)]
    rest = range(full, full + windowed)
    return (*of_full, *((index, Window(window), LayerSize(sizes[1], sizes[1], CPU)) for index in rest))


@pytest.mark.parametrize(("layers", "groups", "size"), [
    (_layers(4, 0, 64), 1, 0), (_layers(0, 4, 64), 1, 0), (_layers(12, 12, 128), 2, 12 * 16),
    (_layers(2, 10, 64), 6, 2 * 16), (_layers(8, 40, 1024), 6, 8 * 16), (_layers(10, 52, 1024), 13, 5 * 16),
    (_layers(5, 25, 1024, (4, 8)), 10, 3 * 16),  # full layers of half the size: all of them in one group
    (_layers(2, 2, 64, (16, 8)), 2, 64),  # short windows may waste a half
])  # fmt: skip
def test_groups_fill_a_block_equally(layers: Layers, groups: int, size: int) -> None:
    layout = layout_of(layers, 16)
    assert (len(layout.groups), sum(size for _, size in layout.block_sizes)) == (groups, size)
    if layout.places:
        places = {layer: starts for layer, *starts in layout.places}
        assert sorted(layer for group in layout.groups for layer in group.layers or ()) == sorted(places)
        for group in layout.groups:
            filled: list[int] = []
            for layer in group.layers or ():
                for start in places[layer]:
                    filled += range(start, start + layers[layer][2].key)
            assert len(set(filled)) == len(filled) and max(filled) < size


def test_layers_of_other_groups_share_memory() -> None:
    layers = _layers(1, 2, 8, (16, 8))
    memory = PagedMemory(4, 6, layout=layout_of(layers, 4))
    for index, _, size in layers:
        new = torch.zeros(1, 1, size.key)
        memory.pool.layer_for(index, new, new)
    assert len(memory.groups) == 2 and memory.nbytes == 6 * 4 * 32 * 4
    memory.append([("a", 9)])
    for index, _, size in layers:
        kv, table = memory.pool[index], memory.manager.block_table("a", memory.group_index(index))
        for part, tensor in enumerate(kv.tensors):
            assert tensor.shape == (6, 4, 1, size.key)
            tensor[table.tolist()] = 10 * index + part
    memory.pool.resize(8)
    memory.pool.copy_blocks([(0, 7)])
    for index, _, _ in layers:
        table = memory.manager.block_table("a", memory.group_index(index)).tolist()
        assert [set(t[table].flatten().tolist()) for t in memory.pool[index].tensors] == [
            {10 * index},
            {10 * index + 1},
        ]


def test_rows_that_were_taken_keep_their_padding_and_their_ids() -> None:
    memory = PagedMemory(4, 16)
    memory.append([(1, 6), (2, 4)])
    rows = CacheRows(memory)
    rows.take([1, 2], [0, 2])
    rows.fork(1)
    assert rows.padding == [0, 2, 2] and len(set(rows.seq_ids)) == 3
    rows.check_integrity()
    rows.select([1, 2])
    assert rows.padding == [2, 2]
    rows.crop(1)  # within the padding
    rows.check_integrity()
    key = torch.arange(2 * 3, dtype=torch.float32).view(2, 1, 3, 1) + 1
    assert rows.write(0, 1, key, -key) == 4
    found = [part.squeeze(1, 3).tolist() for part in rows.dense(0, 0, 4)]
    assert found == [[[0, 0, 2, 3], [0, 0, 5, 6]], [[0, 0, -2, -3], [0, 0, -5, -6]]]


@pytest.mark.parametrize("kind", [FULL, *(make(size) for make in (Window, Chunk) for size in (1, 3, 4, 6, 9))], ids=str)
def test_peak_blocks(kind: Kind) -> None:
    """What a kind says that a sequence holds is what its table holds while it grows token by token."""
    manager = BlockManager(BlockAllocator(40), 4, groups=[LayerGroup(kind)])
    peak = 0
    for length in range(1, 60):
        manager.append("a", 1)
        peak = max(peak, sum(block != NULL_BLOCK for block in manager.block_table("a")))
        assert kind.peak_blocks(length, 4) == peak <= kind.most_blocks(-(-length // 4), 4)
        assert kind.unseen_from(length) == next((n for n in range(80) if kind.first_visible(n) >= length), math.inf)
        manager.drop_unseen("a")
