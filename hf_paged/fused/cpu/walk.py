"""Steps with few tokens of each sequence: the first decoder layer also computes the following ones, in one native call.

The model still calls its layers one by one, and may run other code between them. If in the previous step each layer's
input was the unchanged result of the layer before it, the first layer computes all of them ahead. When the model calls
one of the others, that layer returns its precomputed result if its input is the expected one, and otherwise computes as
usual. The results are the same as without this: each layer returns the result for its actual input, and K/V that was
written for an expected but wrong input is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

from hf_paged.fused.cpu.stack import Stack, StackLayer
from hf_paged.integration.attention import LayerHandle
from hf_paged.kernels.native.ops import has_few_tokens
from hf_paged.model.packed_step import PackedCache

MAX_TOKENS_AHEAD = 256
"""Maximum tokens of a step in which layers are computed ahead. In larger steps the results of all layers take more
memory, and the calls matter less."""


@dataclass(slots=True, eq=False)
class Link:
    """A decoder layer as a walk sees it."""

    layer_idx: int
    in_force: bool = False  # the override is in place: the model calls the native layer
    sizes: tuple[int, ...] = ()  # `layer_sizes`; layers of equal sizes can be computed in one call
    native: StackLayer | None = None  # None until the options of the layer's attention are known
    mask: Any = None  # its mask in the last step
    next: Link | None = None  # the layer that got this one's unchanged result in the last step
    stack: Stack | None = None  # of this layer and the following ones, kept for the next step

    def stack_of(self, line: list[Link]) -> Stack:
        """The stack of the layers in `line`, the first of which is this one."""
        layers = [link.native for link in line if link.native is not None]
        if self.stack is None or not self.stack.is_of(layers):
            self.stack = Stack(layers)
        return self.stack


@dataclass(slots=True)
class Walk:
    """The sequence of layer calls in the packed step in progress."""

    last: Link | None = None
    result: Any = None  # of the last layer
    version: int = 0  # of that result; results computed ahead are one tensor and share a version
    angles: tuple[torch.Tensor, ...] = ()  # cos and sin that the last layer got
    # For each layer computed ahead: the previous layer, that layer's result, and its own result.
    ahead: dict[Link, tuple[Link, torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, cache: PackedCache) -> Walk:
        """The walk of the current step, which is stored in the step's metadata."""
        scratch = cache.step[0].scratch
        walk: Walk | None = scratch.get("native walk")
        if walk is None:
            walk = scratch["native walk"] = cls()
        return walk

    def take(self, link: Link, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The layer's result if it was computed ahead from exactly these inputs, else None."""
        ahead = self.ahead.get(link)
        if ahead is None:
            return None
        previous, expected, result = ahead
        if self._passes_on(expected, hidden_states, kwargs) and link.mask is kwargs.get("attention_mask"):
            return result
        # The model changed something between two layers, so those behind it were computed in vain.
        self.ahead.clear()
        self.last, self.result = previous, expected
        return None

    def begin_layer(self, link: Link, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Call before a layer is computed: records which layer it follows."""
        if self.last is not None:
            follows = self._passes_on(self.result, hidden_states, kwargs) and link.layer_idx > self.last.layer_idx
            self.last.next = link if follows else None
        self.angles = kwargs["position_embeddings"]

    def end_layer(self, link: Link, result: Any) -> None:
        """Call after a layer was computed alone: records its result."""
        self.last, self.result = link, result
        counts = isinstance(result, torch.Tensor) and not result.is_inference()
        self.version = result._version if counts else 0

    def line(self, first: Link, cache: PackedCache) -> list[Link]:
        """Return a layer and its followers in the last step, as far as one native call can compute them."""
        if cache.step[0].num_tokens > MAX_TOKENS_AHEAD or first.native is None:
            return [first]
        # Masks of such steps are compared layer by layer.
        if cache.step[0].reach is not None:
            return [first]
        linears = first.native.before
        group = linears.query.columns // linears.key.columns
        if not all(has_few_tokens(metadata, group) for metadata in cache.step):
            return [first]
        line: list[Link] = []
        layers = cache.memory.pool.layers  # those that have memory, since their first step
        link: Link | None = first
        while link is not None and link.in_force and link.native is not None and link.sizes == first.sizes:
            # A layer gets its memory in its first step.
            if link.layer_idx not in layers:
                break
            line.append(link)
            link = link.next
        return line or [first]

    def run(self, line: list[Link], cache: PackedCache, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the first of these layers, and the others ahead of their calls; returns the first one's result."""
        groups = [cache.group_of(link.layer_idx) for link in line]
        pool = cache.memory.pool
        caches = [pool[link.layer_idx] for link in line]
        step = [cache.step[group] for group in groups]
        results = line[0].stack_of(line).call(hidden_states, self.angles[0], self.angles[1], caches, step).run()
        # One for all: their K/V has been written and read.
        cache.handles.append(LayerHandle(line[0].layer_idx, pool, step[0], None, reads=1))
        outputs = results.unbind()
        self.ahead = dict(zip(line[1:], zip(line, outputs, outputs[1:])))
        self.last, self.result, self.version = line[-1], outputs[-1], results._version
        return outputs[0]

    def _passes_on(self, result: Any, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Return True if a layer gets the unchanged result of the previous layer and the same angles."""
        if hidden_states is not result or not (result.is_inference() or result._version == self.version):
            return False
        angles = kwargs.get("position_embeddings", ())
        return angles is self.angles or (len(angles) == len(self.angles) and all(map(is_, angles, self.angles)))
