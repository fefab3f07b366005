"""PagedMemory: groups of layers change together, or not at all; and the rows that a cache takes over from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.cache.cache_rows import CacheRows
from hf_paged.cache.memory import PagedMemory
from hf_paged.errors import OutOfBlocks

WINDOWS: Any = ((frozenset({0}), None), (frozenset({1}), 5))


def test_every_group_grows() -> None:
    memory = PagedMemory(4, windows=WINDOWS, growable=True)
    memory.append([("a", 40), ("b", 30)])
    assert [manager.num_tokens("a") for manager in memory.managers] == [40, 40]
    memory.append([("a", 1)])
    memory.check_integrity()


def test_a_group_that_is_full_stops_all() -> None:
    memory = PagedMemory(4, 3, windows=WINDOWS)
    memory.managers[1].append("other", 8)
    with pytest.raises(OutOfBlocks):
        memory.append([("a", 8)])
    assert "a" not in memory.managers[0] and memory.managers[0].allocator.num_free == 3
    memory.append([("a", 4)])


def test_a_step_frees_what_has_left_a_window() -> None:
    memory = PagedMemory(4, 16, windows=WINDOWS)
    memory.append([("a", 20), ("b", 3)])
    memory.step_done(["a", "b"])
    assert [manager.allocator.num_used for manager in memory.managers] == [5 + 1, 1 + 1]
    memory.check_integrity()


def test_rows_that_were_taken_keep_their_padding_and_their_ids() -> None:
    memory = PagedMemory(4, 16)
    memory.append([(1, 6), (2, 4)])
    rows = CacheRows(memory)
    rows.take([1, 2], [0, 2])
    rows.fork(1)
    assert rows.padding == [0, 2, 2] and len(set(rows.seq_ids)) == 3
    rows.check_integrity()
    rows.free(0)
    assert rows.padding == [2, 2]
    rows.crop(1)  # within the padding
    rows.check_integrity()
    key = torch.arange(2 * 3, dtype=torch.float32).view(2, 1, 3, 1) + 1
    assert rows.write(0, 1, key, -key) == 4
    found = [part.squeeze(1, 3).tolist() for part in rows.dense(0, 0, 4)]
    assert found == [[[0, 0, 2, 3], [0, 0, 5, 6]], [[0, 0, -2, -3], [0, 0, -5, -6]]]
