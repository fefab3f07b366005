"""Decode steps in which the first decoder layer computes those behind it too, in one native call.

The model still calls layer after layer, and may do between them what it likes. If in the last step each layer was given
the result of the one before it as it was, the first one computes them all; when its turn comes, each of the others
gives its result if it is given what was expected, and otherwise computes as if nothing had been. Nobody can tell: the
results in between are there, and K/V that was written in vain is written again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from hf_paged.cache.packed_cache import LayerHandle, PackedCache

if TYPE_CHECKING:
    from hf_paged.fused.cpu.decoder import Layer

MOST_AHEAD = 256
"""Tokens of a step up to which layers are computed ahead: all results are kept, and calls matter less."""


@dataclass(slots=True)
class Walk:
    """The model's way from layer to layer in the packed step in progress."""

    last: Layer | None = None
    result: Any = None  # of the last one
    version: int = 0  # of that result, or of all that was computed ahead: it is one tensor
    angles: tuple[torch.Tensor, ...] = ()  # that the last one was given
    # Of layers computed ahead: the one before, its result, the own result.
    ahead: dict[Layer, tuple[Layer, torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, cache: PackedCache) -> Walk:
        """Lives as long as the step's metadata."""
        scratch = cache.step[0].scratch
        walk: Walk | None = scratch.get("native walk")
        if walk is None:
            walk = scratch["native walk"] = cls()
        return walk

    def take(self, layer: Layer, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The layer's result if it was computed ahead, from just this."""
        ahead = self.ahead.get(layer)
        if ahead is None:
            return None
        previous, expected, result = ahead
        if self._passes_on(expected, hidden_states, kwargs) and layer.mask is kwargs.get("attention_mask"):
            return result
        self.ahead.clear()
        self.last, self.result = previous, expected
        return None

    def enter(self, layer: Layer, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Before a layer is computed: remember what it follows."""
        layer.watch_mask(kwargs.get("attention_mask"))
        if self.last is not None:
            follows = self._passes_on(self.result, hidden_states, kwargs) and layer.layer_idx > self.last.layer_idx
            self.last.next = layer if follows else None
        self.angles = kwargs["position_embeddings"]

    def leave(self, layer: Layer, result: Any) -> None:
        """After it was computed alone."""
        self.last, self.result = layer, result
        counts = isinstance(result, torch.Tensor) and not result.is_inference()
        self.version = result._version if counts else 0

    def line(self, first: Layer, cache: PackedCache) -> list[Layer]:
        """A layer and those that came after it the last time, as far as one native call can compute them."""
        line = [first]
        if cache.step[0].num_tokens > MOST_AHEAD or any(metadata.max_query_len > 1 for metadata in cache.step):
            return line
        layer = first.next
        while layer is not None and layer.can_join(first):
            line.append(layer)
            layer = layer.next
        return line

    def run(self, line: list[Layer], cache: PackedCache, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the first of these layers and the others ahead."""
        groups = [cache.group_of(layer.layer_idx) for layer in line]
        pools = [group.pool for group in cache.memory.groups]
        caches = [pools[group][layer.layer_idx] for group, layer in zip(groups, line, strict=True)]
        step = [cache.step[group] for group in groups]
        results = line[0].stack(line).run(hidden_states, *self.angles, caches, step)
        # One for all: their K/V has been written and read.
        cache.handles.append(LayerHandle(line[0].layer_idx, pools[groups[0]], step[0], (None, None), reads=1))
        outputs = results.unbind()
        self.ahead = dict(zip(line[1:], zip(line, outputs, outputs[1:])))
        self.last, self.result, self.version = line[-1], outputs[-1], results._version
        return outputs[0]

    def _passes_on(self, result: Any, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether a layer is given the result of the one before it as it was, and the same angles."""
        if hidden_states is not result or not (result.is_inference() or result._version == self.version):
            return False
        angles = kwargs.get("position_embeddings", ())
        return angles is self.angles or (len(angles) == len(self.angles) and all(map(is_, angles, self.angles)))
