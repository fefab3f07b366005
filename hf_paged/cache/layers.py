"""Kinds of memory that layers have for their tokens, and groups of layers that share a block table. Standard library
only.

A *kind* of layer memory says which of a sequence's tokens a later token can still attend to. Layers of one kind share
block tables. A block is a fixed number of bytes, the same for all layers of the memory: it holds the K/V of some
tokens for one *group* of layers of one kind. Groups are made so that all of them fill a block about equally, because
then any free block serves any group, and no memory waits for tokens of another kind.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hf_paged.kernels.bounds import UNBOUNDED, Bounds

MAX_GROUPS = 16
"""Each group needs a block table in every step, which costs host time."""

MAX_WASTE = 0.03
"""Share of a request's memory that groups of unequal size may waste, if fewer groups are enough then."""

NOMINAL_LENGTH = 4096
"""Tokens of the request by which that share is computed."""


@dataclass(frozen=True, slots=True)
class Full:
    """K and V of all tokens."""

    bounds = UNBOUNDED
    """The kind as bounds of attention, for the kernels."""

    def __str__(self) -> str:
        return "full attention"

    def first_visible(self, num_tokens: int) -> int:
        """The first position that the token at position `num_tokens`, or a later one, attends to."""
        return 0

    def unseen_from(self, position: int) -> float:
        """The least `num_tokens` with which no such token attends to positions before `position`."""
        return math.inf

    def most_blocks(self, num_blocks: int, block_size: int) -> int:
        """Return how many of its `num_blocks` blocks a sequence may hold at a time, if computed in small chunks."""
        return num_blocks

    def peak_blocks(self, num_tokens: int, block_size: int) -> int:
        """The maximum number of blocks that a sequence holds at one time while it grows token by token."""
        return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class Window:
    """K and V of the last `window` tokens, the newest included (a sliding window)."""

    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window}: must be at least 1")

    def __str__(self) -> str:
        return f"a window of {self.window} tokens"

    @property
    def bounds(self) -> Bounds:
        return Bounds(sliding_window=self.window)

    def first_visible(self, num_tokens: int) -> int:
        return max(num_tokens - self.window + 1, 0)

    def unseen_from(self, position: int) -> float:
        return position + self.window - 1

    def most_blocks(self, num_blocks: int, block_size: int) -> int:
        return min(num_blocks, -(-self.window // block_size) + 1)

    def peak_blocks(self, num_tokens: int, block_size: int) -> int:
        size, window = block_size, self.window
        if num_tokens <= window:
            return -(-num_tokens // size)
        # The number depends on the place of the last token in its block, so `size` lengths show the most.
        lengths = range(max(window, num_tokens - size + 1), num_tokens + 1)
        return max(-(-window // size), *(-(-length // size) - (length - window) // size for length in lengths))


@dataclass(frozen=True, slots=True)
class Chunk:
    """K and V of the tokens of the same chunk: the sequence is divided into chunks of `size` tokens."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size}: must be at least 1")

    def __str__(self) -> str:
        return f"chunks of {self.size} tokens"

    @property
    def bounds(self) -> Bounds:
        return Bounds(chunk_size=self.size)

    def first_visible(self, num_tokens: int) -> int:
        return num_tokens // self.size * self.size

    def unseen_from(self, position: int) -> float:
        return -(-position // self.size) * self.size

    def most_blocks(self, num_blocks: int, block_size: int) -> int:
        return min(num_blocks, -(-(self.size - 1) // block_size) + 1)

    def peak_blocks(self, num_tokens: int, block_size: int) -> int:
        size, last = block_size, num_tokens // self.size
        # Chunks and blocks are in the same places to one another again after `size` chunks.
        ends = [(chunk + 1) * self.size for chunk in range(max(last - size, 0), last)] + [num_tokens]
        return max(-(-end // size) - (end - 1) // self.size * self.size // size for end in ends)


Kind = Full | Window | Chunk
FULL = Full()


def kind_of(bounds: Bounds) -> Kind:
    """Return the kind of memory of a layer that attends within these bounds; at most one bound applies."""
    if bounds.sliding_window is not None:
        return Window(bounds.sliding_window)
    return FULL if bounds.chunk_size is None else Chunk(bounds.chunk_size)


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Size of a layer's K/V of one token: elements of K and of V, and the device that they are on (opaque)."""

    key: int
    value: int
    device: Hashable = None

    @property
    def total(self) -> int:
        return self.key + self.value


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind that share a block table. `layers` None = every layer."""

    kind: Kind = FULL
    layers: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Division of a memory's blocks among layers.

    groups: of layers; none, if no layer has K/V. places: where a layer's K/V is in a block, as (layer, elements a token
    before K, before V). A layer without a place has memory of its own. block_sizes: elements of K and V of one
    token in a block, by device.
    """

    groups: tuple[LayerGroup, ...] = (LayerGroup(),)
    places: tuple[tuple[int, int, int], ...] = ()
    block_sizes: tuple[tuple[Hashable, int], ...] = ()


WHOLE = Layout()
"""All layers in one group, which keeps all tokens."""

NOTHING = Layout(())
"""No layer has K/V: a sequence takes no block, whatever its length."""

Layers = tuple[tuple[int, Kind, LayerSize], ...]


@lru_cache(maxsize=64)
def layout_of(layers: Layers, block_size: int) -> Layout:
    """The layout for layers of these numbers, kinds and sizes."""
    kinds = list(dict.fromkeys(kind for _, kind, _ in layers))
    if len(kinds) < 2:
        return WHOLE if kinds in ([], [FULL]) else Layout((LayerGroup(kinds[0]),))
    own = [[layer for layer in layers if layer[1] == kind] for kind in kinds]
    # Each number of groups of each kind gives a size of blocks, and with it the number of groups of the other kinds.
    sizes = {_largest(_dealt(each, count)) for each in own for count in range(1, len(each) + 1)}
    least = max(_largest(_dealt(each, len(each))) for each in own)
    made = [_made(own, size) for size in sizes if size >= least]
    allowed = [each for each in made if len(each.groups) <= MAX_GROUPS] or [
        min(made, key=lambda each: len(each.groups))
    ]
    wasted = {each: _waste(each, layers, block_size) for each in allowed}
    frugal = [each for each in allowed if wasted[each] <= MAX_WASTE]
    if frugal:
        return min(frugal, key=lambda each: (len(each.groups), wasted[each]))
    return min(allowed, key=lambda each: wasted[each])


def _dealt(layers: Sequence[tuple[int, Kind, LayerSize]], count: int) -> list[Layers]:
    """`count` groups of about equal size on every device."""
    # Sorted by size and dealt in turn, so that groups differ little.
    order = sorted(layers, key=lambda layer: (str(layer[2].device), layer[2].total, layer[0]))
    return [tuple(order[number::count]) for number in range(count)]


def _largest(groups: Sequence[Layers]) -> int:
    """Elements of a token in the largest of these groups."""
    return max(sum(size.total for _, _, size in group) for group in groups)


def _made(own: Sequence[Sequence[tuple[int, Kind, LayerSize]]], most: int) -> Layout:
    """The layout with groups of at most `most` elements a token. own: the layers of each kind."""
    groups: list[LayerGroup] = []
    places: list[tuple[int, int, int]] = []
    block_sizes: dict[Hashable, int] = {}
    for layers in own:
        counts = range(1, len(layers) + 1)
        dealt = next(dealt for count in counts if _largest(dealt := _dealt(layers, count)) <= most)
        for group in dealt:
            groups.append(LayerGroup(group[0][1], frozenset(index for index, _, _ in group)))
            filled: dict[Hashable, int] = {}
            for index, _, size in group:
                start = filled.get(size.device, 0)
                places.append((index, start, start + size.key))
                filled[size.device] = start + size.total
            for device, end in filled.items():
                block_sizes[device] = max(block_sizes.get(device, 0), end)
    return Layout(tuple(groups), tuple(sorted(places)), tuple(block_sizes.items()))


def _waste(made: Layout, layers: Layers, block_size: int) -> float:
    """The share of a long request's blocks that no layer fills."""

    def blocks(kind: Kind) -> int:
        return kind.most_blocks(-(-NOMINAL_LENGTH // block_size), block_size)

    taken = sum(blocks(group.kind) for group in made.groups) * sum(size for _, size in made.block_sizes)
    return 1 - sum(blocks(kind) * size.total for _, kind, size in layers) / taken


def peak_blocks(groups: Iterable[LayerGroup], num_tokens: int, block_size: int) -> int:
    """The maximum number of blocks of all groups that a sequence holds while it grows token by token."""
    return sum(group.kind.peak_blocks(num_tokens, block_size) for group in groups)


def longest_length(groups: Sequence[LayerGroup], num_blocks: int, block_size: int, most: int) -> int:
    """The longest sequence, of at most `most` tokens, that these blocks are enough for."""
    # More tokens never take fewer blocks at the peak.
    return bisect_right(range(1, most + 1), num_blocks, key=lambda length: peak_blocks(groups, length, block_size))
