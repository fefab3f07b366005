"""BlockAllocator: the three states of a block, the order of reuse, and errors that name the block."""

from __future__ import annotations

import pytest

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.errors import OutOfBlocks

pytestmark = pytest.mark.smoke


def test_running_out_changes_nothing() -> None:
    allocator = BlockAllocator(1)
    allocator.allocate()
    with pytest.raises(OutOfBlocks, match=r"1 block\(s\) needed, 0 available") as error:
        allocator.allocate()
    assert (error.value.needed, error.value.available) == (1, 0)
    assert isinstance(error.value, MemoryError)
    assert (allocator.num_used, allocator.num_free) == (1, 0)
    allocator.check_integrity()


def test_cached_blocks_are_used_last_and_evicted_least_recently_used_first() -> None:
    evicted: list[int] = []
    allocator = BlockAllocator(4, on_evict=evicted.append)
    blocks = [allocator.allocate() for _ in range(4)]
    allocator.free(blocks[2], keep=True)
    allocator.free(blocks[0], keep=True)
    allocator.free(blocks[1])
    assert (allocator.num_used, allocator.num_cached, allocator.num_free, allocator.num_available) == (1, 2, 1, 3)
    assert [allocator.allocate() for _ in range(3)] == [1, 2, 0]
    assert evicted == [2, 0]
    allocator.check_integrity()


def test_a_cached_block_comes_back_and_is_then_the_most_recent() -> None:
    allocator = BlockAllocator(2)
    for block_id in (allocator.allocate(), allocator.allocate()):
        allocator.free(block_id, keep=True)
    allocator.share(0)
    assert (allocator.is_cached(0), allocator.ref_count(0)) == (False, 1)
    allocator.free(0, keep=True)
    assert [allocator.allocate(), allocator.allocate()] == [1, 0]


def test_new_blocks_are_used_after_the_free_ones() -> None:
    allocator = BlockAllocator(2)
    allocator.allocate()
    allocator.grow(4)
    assert allocator.num_blocks == 4
    assert [allocator.allocate() for _ in range(3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="num_blocks=3: cannot shrink from 4"):
        allocator.grow(3)


def test_beyond_the_touch_limit_cached_blocks_are_evicted_before_fresh_ones_are_touched() -> None:
    allocator = BlockAllocator(6, touch_limit=3)
    for _ in range(2):
        allocator.free(allocator.allocate(), keep=True)
    assert (allocator.num_touched, allocator.num_cached, allocator.num_free) == (2, 2, 4)
    assert allocator.allocate() == 2, "below the limit a cached prefix stays"
    assert [allocator.allocate() for _ in range(5)] == [0, 1, 3, 4, 5]
    assert (allocator.num_touched, allocator.num_used) == (6, 6)
    allocator.check_integrity()


@pytest.mark.parametrize("block_id", [-1, 2, 99])
def test_a_block_that_does_not_exist(block_id: int) -> None:
    allocator = BlockAllocator(2)
    for verb in (allocator.share, allocator.free, allocator.ref_count):
        with pytest.raises(ValueError, match=f"block {block_id} does not exist: there are 2"):
            verb(block_id)


def test_wrong_use_names_the_block() -> None:
    allocator = BlockAllocator(2)
    with pytest.raises(ValueError, match="block 1 is free and cannot be shared"):
        allocator.share(1)
    with pytest.raises(ValueError, match="block 1 is not in use"):
        allocator.free(1)
    allocator.free(allocator.allocate(), keep=True)
    with pytest.raises(ValueError, match="block 0 is not in use"):
        allocator.free(0)
    allocator.drop_cached(0)
    with pytest.raises(ValueError, match="block 0 is not cached"):
        allocator.drop_cached(0)
    with pytest.raises(ValueError, match="num_blocks=-1"):
        BlockAllocator(-1)


def test_withheld_blocks_stay_free_and_cached_ones_are_evicted_for_them() -> None:
    evicted: list[int] = []
    allocator = BlockAllocator(6, evicted.append)
    used = [allocator.allocate() for _ in range(4)]
    for block_id in used[:2]:
        allocator.free(block_id, keep=True)
    allocator.withhold(3)
    assert evicted == used[:1] and allocator.num_available == 1
    assert allocator.allocate() == used[1] and evicted == used[:2]  # the cached one: the free ones are withheld
    with pytest.raises(OutOfBlocks):
        allocator.allocate()
    with pytest.raises(OutOfBlocks):
        allocator.withhold(4)
    assert allocator.num_withheld == 3
    allocator.check_integrity()
    allocator.withhold(0)
    assert allocator.num_available == 3


def test_memory_of_withheld_blocks_is_given_back_once() -> None:
    allocator = BlockAllocator(6)
    for block_id in [allocator.allocate() for _ in range(5)]:
        allocator.free(block_id)
    allocator.withhold(4)
    given = allocator.untouch()
    assert len(given) == 3 and allocator.num_touched == 2 and allocator.num_free == 6
    assert allocator.first_unused == 5
    assert allocator.untouch() == []
    allocator.check_integrity()
    allocator.withhold(0)
    again = [allocator.allocate() for _ in range(6)]
    assert set(given) < set(again) == set(range(6)) and allocator.num_touched == 6
    for block_id in again:
        allocator.free(block_id)
    allocator.withhold(1)
    assert len(allocator.untouch()) == 1


def test_a_restart_forgets_what_was_touched() -> None:
    allocator = BlockAllocator(4)
    kept, freed = allocator.allocate(), allocator.allocate()
    allocator.free(freed)
    with pytest.raises(ValueError, match=r"1 block.* used and 0 cached"):
        allocator.restart(2)
    allocator.free(kept, keep=True)
    with pytest.raises(ValueError, match=r"0 block.* used and 1 cached"):
        allocator.restart(2)
    allocator.drop_cached(kept)
    allocator.restart(3)
    assert (allocator.num_blocks, allocator.num_free, allocator.num_touched) == (3, 3, 0)
    assert [allocator.allocate() for _ in range(3)] == [0, 1, 2]
    allocator.check_integrity()


def test_check_integrity_sees_damage() -> None:
    allocator = BlockAllocator(3)
    allocator.allocate()
    allocator.check_integrity()
    allocator.ref_counts[0] = 0
    with pytest.raises(AssertionError, match="block 0"):
        allocator.check_integrity()
    allocator.ref_counts[0] = 1
    allocator._free.append(1)
    with pytest.raises(AssertionError, match="twice"):
        allocator.check_integrity()
