"""BlockManager: what single operations return and refuse. test_state_machine.py combines them."""

from __future__ import annotations

import numpy as np
import pytest

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.block_manager import NULL_BLOCK, BlockCopy, BlockManager
from hf_paged.cache.layers import FULL, Chunk, Kind, LayerGroup, Window, kind_of
from hf_paged.errors import OutOfBlocks

pytestmark = pytest.mark.smoke


def manager_of(num_blocks: int, block_size: int = 4, *, window: int | None = None) -> BlockManager:
    groups = (LayerGroup(FULL if window is None else Window(window)),)
    return BlockManager(BlockAllocator(num_blocks), block_size, groups=groups)


def table(manager: BlockManager, seq_id: object) -> list[int]:
    return list(manager.block_table(seq_id))


def test_fork_takes_no_memory_and_shares_all() -> None:
    manager = manager_of(8)
    manager.append("a", 6)
    manager.fork("a", "b")
    assert table(manager, "b") == table(manager, "a") == [0, 1]
    assert manager.allocator.num_used == 2
    assert (manager.num_shared_blocks, manager.num_logical_blocks, manager.num_filled_slots) == (2, 4, 6)
    manager.fork("a", "c")
    manager.crop("c", 5)
    assert manager.num_filled_slots == 6
    manager.free("c")
    manager.append("b", 4)  # copies its last block and takes another one: the paper's Figure 8
    assert table(manager, "a") == [0, 1]
    assert (manager.num_shared_blocks, manager.num_logical_blocks, manager.num_filled_slots) == (1, 5, 6 + 6)


def test_every_sharer_but_the_last_copies_the_block() -> None:
    manager = manager_of(8)
    manager.append(0, 6)
    for child in (1, 2, 3):
        manager.fork(0, child)
    appends = [(seq_id, 1) for seq_id in range(4)]
    assert manager.num_blocks_to_append_all(appends) == 3
    copies = [manager.append(*append) for append in appends]
    assert copies == [[BlockCopy(1, 2)], [BlockCopy(1, 3)], [BlockCopy(1, 4)], []]
    assert table(manager, 3) == [0, 1]
    assert manager.num_copies == 3


def test_blocks_to_append_all_counts_new_sequences_and_several_sharers() -> None:
    manager = manager_of(20)
    manager.append("a", 6)
    manager.fork("a", "b")
    manager.fork("a", "c")
    appends = [("a", 3), ("b", 1), ("new", 5)]  # a: copy + 1; b: copy (c stays with the old block); new: 2
    assert manager.num_blocks_to_append_all(appends) == 5
    before = manager.allocator.num_free
    for append in appends:
        manager.append(*append)
    assert before - manager.allocator.num_free == 5
    assert table(manager, "c") == [0, 1]
    manager = BlockManager(BlockAllocator(5), 4, groups=[LayerGroup(), LayerGroup()])
    assert manager.append_if_room([("a", 1), ("b", 1), ("c", 1)]) is None and not len(manager)


def test_out_of_blocks_names_the_counts_and_changes_nothing() -> None:
    manager = manager_of(3)
    manager.append("a", 6)
    manager.fork("a", "b")
    with pytest.raises(OutOfBlocks, match=r"2 block\(s\) needed, 1 available"):
        manager.append("a", 3)
    with pytest.raises(OutOfBlocks, match=r"2 block\(s\) needed, 1 available"):
        manager.append("c", 5)
    assert "c" not in manager and len(manager) == 2
    assert (manager.num_tokens("a"), table(manager, "a"), manager.num_copies) == (6, [0, 1], 0)
    manager.check_integrity()


def test_a_window_keeps_a_bounded_number_of_blocks() -> None:
    manager = manager_of(100, window=6)
    alive = []
    for _ in range(60):
        manager.append("a", 1)
        alive.append(manager.allocator.num_used)
        manager.drop_unseen("a")
    assert max(alive) == 3  # ceil(6 / 4) + 1
    assert table(manager, "a")[:13] == [NULL_BLOCK] * 13
    assert manager.num_blocks_of(["a"]) == manager.num_logical_blocks == manager.allocator.num_used
    with pytest.raises(ValueError, match="num_tokens=10: blocks that it needs were freed"):
        manager.crop("a", 10)
    manager.free("a")
    assert manager.allocator.num_free == 100


def test_sharing_survives_a_swap_and_each_block_moves_once() -> None:
    device, host = manager_of(8), manager_of(3)
    device.append("a", 6)
    device.fork("a", "b")
    device.append("b", 1)
    assert sorted(device.move_to(host, ["a", "b"])) == [(0, 0), (1, 1), (2, 2)]
    assert device.allocator.num_free == 8
    assert (table(host, "a"), table(host, "b")) == ([0, 1], [0, 2])
    assert host.num_shared_blocks == 1
    host.move_to(device, ["b", "a"])
    assert device.num_shared_blocks == 1
    assert device.num_tokens("b") == 7
    for manager in (device, host):
        manager.check_integrity()


def test_a_swap_that_does_not_fit_moves_nothing() -> None:
    device, host = manager_of(8), manager_of(1)
    device.append("a", 4)
    device.append("b", 4)
    with pytest.raises(OutOfBlocks, match=r"2 block\(s\) needed, 1 available"):
        device.move_to(host, ["a", "b"])
    assert (len(device), len(host), host.allocator.num_free) == (2, 0, 1)
    host.append("a", 1)
    with pytest.raises(ValueError, match="'a' exists already"):
        device.move_to(host, ["a"])
    with pytest.raises(ValueError, match="block_size 4 and 2"):
        device.move_to(manager_of(8, 2), ["a"])


def test_adopt_shares_written_blocks_only() -> None:
    manager = manager_of(4)
    manager.append("a", 8)
    manager.adopt("b", [[0, 1]], 2)
    assert (manager.num_tokens("b"), manager.allocator.ref_count(1)) == (8, 2)
    with pytest.raises(ValueError, match="block 3 is free"):
        manager.adopt("c", [[0, 3]], 2)
    with pytest.raises(ValueError, match="twice"):
        manager.adopt("c", [[0, 0]], 2)
    with pytest.raises(ValueError, match="'b' exists already"):
        manager.adopt("b", [[0]], 1)
    assert "c" not in manager
    manager.check_integrity()


def test_wrong_values_are_named() -> None:
    with pytest.raises(ValueError, match="block_size=0"):
        manager_of(4, 0)
    with pytest.raises(ValueError, match="window=0"):
        manager_of(4, window=0)
    with pytest.raises(ValueError, match="num_tokens=-1"):
        manager_of(4).append("a", -1)
    with pytest.raises(KeyError):
        manager_of(4).fork("nobody", "a")


def test_check_integrity_sees_damage() -> None:
    manager = manager_of(4)
    manager.append("a", 8)
    manager.append("b", 1)
    manager.check_integrity()
    manager._tables["b"].blocks[0][0] = 1
    with pytest.raises(AssertionError, match="block 1: ref_count 1, but 2 tables hold it"):
        manager.check_integrity()
    manager._tables["a"].num_tokens = 3
    with pytest.raises(AssertionError, match="wrong length"):
        manager.check_integrity()


def test_a_block_of_the_prefix_cache_is_forgotten_before_it_is_written_again() -> None:
    forgotten: list[int] = []
    cached: set[int] = set()
    manager = BlockManager(BlockAllocator(8, forgotten.append), 4, cached_blocks=cached)
    for append in (manager.append, lambda *new: manager.append_all([new])):
        manager.append("a", 8)
        last = table(manager, "a")[-1]
        cached.add(last)
        manager.crop("a", 6)
        append("a", 1)
        assert forgotten == [last] and manager.num_tokens("a") == 7
        cached.clear()
        forgotten.clear()
        manager.free("a")


@pytest.mark.parametrize("kind", [FULL, Window(1), Window(5), Chunk(1), Chunk(4)], ids=str)
def test_kinds_and_kernels_have_the_same_bounds(kind: Kind) -> None:
    assert kind_of(kind.bounds) == kind
    positions = np.arange(20)
    first = kind.bounds.first(positions, np.maximum)
    assert first.tolist() == [kind.first_visible(position) for position in range(20)]
    assert first.tolist() == [kind.bounds.first(position) for position in range(20)]
    hidden = kind.bounds.hidden(positions[:, None], positions[None, :])
    seen = positions[None, :] >= first[:, None]
    assert not hidden if hidden is None else (hidden == ~seen).all()
    assert all(position + 1 - kind.bounds.first(position) <= (kind.bounds.most or 20) for position in range(20))
