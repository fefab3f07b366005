"""PrefixCache: which prefixes are found, and which are evicted first."""

from __future__ import annotations

import pytest

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.block_manager import NULL_BLOCK, BlockManager
from hf_paged.cache.layers import FULL, Kind, LayerGroup, Window
from hf_paged.cache.prefix_cache import PrefixCache, root_digest

pytestmark = pytest.mark.smoke

ROOT = root_digest("model")


class Cached:
    """A manager with a prefix cache; sequences are computed immediately."""

    def __init__(self, num_blocks: int = 16, *kinds: Kind) -> None:
        groups = [LayerGroup(kind) for kind in kinds or (FULL,)]
        self.manager = BlockManager(BlockAllocator(num_blocks), 4, groups=groups)
        self.cache = PrefixCache(self.manager)

    def compute(self, seq_id: str, tokens: list[int], root: bytes = ROOT) -> int:
        """Returns the number of tokens that were found."""
        prefix = self.cache.match(tokens, root)
        self.manager.adopt(seq_id, prefix.tables, prefix.num_blocks)
        found = self.manager.num_tokens(seq_id)
        self.manager.append(seq_id, len(tokens) - found)
        digests: list[bytes] = []
        self.cache.extend_digests(digests, tokens, root, len(tokens) // self.manager.block_size)
        for index, digest in enumerate(digests):
            self.cache.register(self.manager.block_tables(seq_id), index, digest)
        self.manager.drop_unseen(seq_id)
        self.cache.check_integrity()
        return found

    def match(self, tokens: list[int], digests: list[bytes] | None = None) -> list[int]:
        """The blocks of the first group that are found."""
        return self.cache.match(tokens, ROOT, digests).tables[0]


def test_only_full_blocks_are_found_and_one_token_is_left_to_compute() -> None:
    cached = Cached()
    assert cached.compute("a", list(range(10))) == 0
    assert len(cached.cache) == 2
    for length, found in [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 8), (12, 8)]:
        assert len(cached.match(list(range(length)))) * 4 == found
    assert cached.match([0, 1, 2, 3, 9, 9, 9, 9, 9]) == [0]
    assert cached.match([9, 1, 2, 3, 4, 5, 6, 7, 8]) == []
    assert cached.match([]) == []
    digests: list[bytes] = []  # known from before
    assert len(cached.match(list(range(9)), digests)) == len(digests) == 2
    assert len(cached.match(list(range(8)), digests)) == 1
    assert cached.cache.match(list(range(9)), ROOT, limit=7).num_blocks == 1


@pytest.mark.parametrize(
    "other", [root_digest("other"), root_digest("model", "adapter"), root_digest("model", None, "salt")]
)
def test_other_models_adapters_and_salts_share_nothing(other: bytes) -> None:
    cached = Cached()
    cached.compute("a", list(range(9)))
    assert cached.compute("b", list(range(9)), other) == 0
    assert cached.compute("c", list(range(9))) == 8


def test_roots_are_not_concatenations() -> None:
    roots = [root_digest("m", "a", "b"), root_digest("m", "ab"), root_digest("m", "a,b"), root_digest("m", None, "ab")]
    assert len(set(roots)) == len(roots)


def test_large_token_ids_are_told_apart() -> None:
    cached = Cached()
    cached.compute("a", [2**31 + 5] * 4)
    assert cached.match([5] * 5) == []


def test_freed_blocks_are_found_until_they_are_needed() -> None:
    cached = Cached(num_blocks=4)
    cached.compute("a", list(range(8)))
    cached.manager.free("a")
    assert cached.manager.allocator.num_cached == 2
    assert cached.compute("b", list(range(9))) == 8
    cached.manager.free("b")
    cached.compute("c", [7] * 12)  # takes the free blocks and evicts the tail of the prefix
    assert cached.match(list(range(9))) == [0]
    cached.manager.append("c", 4)
    assert cached.match(list(range(9))) == []


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_block_that_is_written_again_is_not_found_any_more(is_shared: bool) -> None:
    """Unless other tables have it, with which it stays."""
    cached = Cached()
    cached.compute("a", list(range(8)))
    if is_shared:
        cached.manager.fork("a", "b")
    cached.manager.crop("a", 6)
    assert cached.match(list(range(9))) == [0, 1]
    assert cached.manager.append("a", 1) == ([(1, 2)] if is_shared else [])
    assert cached.match(list(range(9))) == ([0, 1] if is_shared else [0])
    cached.cache.check_integrity()


def test_pinned_blocks_stay() -> None:
    cached = Cached(num_blocks=4)
    prefix = list(range(9))
    assert cached.cache.pin(prefix, ROOT) == 0
    assert cached.cache.pins == []
    cached.compute("a", prefix)
    assert cached.cache.pin(prefix, ROOT) == 8
    assert cached.cache.pin(prefix, ROOT) == 8
    cached.manager.free("a")
    assert cached.manager.allocator.num_used == 2
    cached.compute("b", [5] * 8)
    cached.manager.free("b")
    cached.compute("c", [6] * 8)
    assert len(cached.match(prefix)) == 2
    assert cached.cache.unpin(prefix, ROOT)
    assert not cached.cache.unpin(prefix, ROOT)
    assert not cached.cache.unpin([1], ROOT)
    cached.manager.append("c", 8)
    assert cached.match(prefix) == []


def test_what_cannot_be_cached_is_refused() -> None:
    cached = Cached()
    with pytest.raises(ValueError, match="another prefix cache"):
        PrefixCache(cached.manager)


def test_a_window_needs_its_last_blocks_only() -> None:
    cached = Cached(16, FULL, Window(6))
    cached.compute("a", list(range(20)))  # drops what position 20 does not see: blocks 0 to 2 of the window
    prefix = cached.cache.match(list(range(21)), ROOT)
    assert prefix.num_blocks == 5
    assert prefix.tables[1][:3] == [NULL_BLOCK] * 3 and NULL_BLOCK not in prefix.tables[1][3:]
    assert prefix.num_held == 5 + 2 and prefix.num_idle == 0
    # A shorter prefix is found too: the blocks that left the window are cached.
    assert cached.cache.match([*range(12), 9, 9, 9], ROOT).tables[1][:1] == [NULL_BLOCK]
    assert cached.compute("b", [*range(12), 9, 9, 9]) == 12
    cached = Cached(10, FULL, Window(6))
    cached.compute("a", list(range(20)))
    cached.manager.append("b", 4)  # evicts the first two blocks of the window
    assert cached.cache.match(list(range(13)), ROOT).num_blocks == 0


def test_blocks_that_are_useless_without_an_evicted_one_are_free() -> None:
    cached = Cached(8, Window(4), Window(4))
    cached.compute("a", list(range(16)))
    assert cached.manager.allocator.num_cached == 2 * 3
    cached.manager.append("b", 4)  # takes two cached blocks of one digest, not two of two digests
    assert cached.manager.allocator.num_cached == 2 * 2 and cached.cache.num_evictions == 2
    assert cached.cache.match(list(range(5)), ROOT).num_blocks == 0
    assert cached.cache.match(list(range(9)), ROOT).num_blocks == 2
    cached.cache.check_integrity()
