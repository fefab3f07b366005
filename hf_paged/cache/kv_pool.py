"""KVPool: the K/V tensors of every layer of one group, cut into blocks (SOSP'23 section 4.1).

Knows block ids and tensors; never sequences. A layer's tensors are allocated on its first write, with the shape of what
it writes. K and V may therefore differ in head size, and layers may differ in every size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hf_paged.kernels import ops
from hf_paged.kernels.metadata import to_device


@torch.inference_mode(False)  # a tensor made in inference mode could not be written by a later call outside it
def _empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


class LayerKV(NamedTuple):
    """One layer's blocks: key [num_blocks, block_size, num_kv_heads, head_dim], value [..., v_head_dim]."""

    key: torch.Tensor
    value: torch.Tensor


class KVPool:
    """K/V memory for `num_blocks` blocks of `block_size` tokens.

    Invariant: every layer's tensors have exactly `num_blocks` blocks. Blocks that no sequence owns hold arbitrary bits,
    possibly NaN; readers must not depend on them.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: dict[int, LayerKV] = {}  # those that have been written; read-only for callers

    def __contains__(self, layer_idx: int) -> bool:
        return layer_idx in self.layers

    def __getitem__(self, layer_idx: int) -> LayerKV:
        return self.layers[layer_idx]

    def layer_for(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> LayerKV:
        """The tensors of a layer, allocated on its first write.

        Sizes, dtype and device are taken from key [..., num_kv_heads, head_dim] and
        value [..., num_kv_heads, v_head_dim].
        """
        layer = self.layers.get(layer_idx)
        if layer is None:
            layer = self.layers[layer_idx] = LayerKV(
                *(_empty((self.num_blocks, self.block_size, *t.shape[-2:]), t) for t in (key, value))
            )
        return layer

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers that have written so far."""
        if self.num_blocks == 0:
            return 0
        return sum(t.nbytes for layer in self.layers.values() for t in layer) // self.num_blocks

    @property
    def bytes_per_block_by_device(self) -> dict[torch.device, int]:
        """The same, split by the devices of the layers."""
        if self.num_blocks == 0:
            return {}
        return {device: sum(t[0].nbytes for t in tensors) for device, tensors in self.by_device().items()}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for layer in self.layers.values() for t in layer)

    @property
    def layout(self) -> tuple[object, ...]:
        """Address, shape and dtype of every layer's tensors."""
        return tuple(
            (index, t.data_ptr(), tuple(t.shape), t.dtype) for index, layer in self.layers.items() for t in layer
        )

    def resize(self, num_blocks: int) -> None:
        """Reallocate every layer to `num_blocks` blocks, keeping the contents of those that remain."""
        keep = min(num_blocks, self.num_blocks)
        for layer_idx, layer in self.layers.items():
            grown = []
            for old in layer:
                new = _empty((num_blocks, *old.shape[1:]), old)
                new[:keep] = old[:keep]
                grown.append(new)
            self.layers[layer_idx] = LayerKV(*grown)
        self.num_blocks = num_blocks

    def release(self) -> None:
        """Drop all tensors; the next write allocates new ones."""
        self.layers.clear()

    def by_device(self) -> dict[torch.device, list[torch.Tensor]]:
        """Every layer's tensors, K before V, in the order of the layers' first writes."""
        tensors: dict[torch.device, list[torch.Tensor]] = {}
        for layer in self.layers.values():
            for tensor in layer:
                tensors.setdefault(tensor.device, []).append(tensor)
        return tensors

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Perform all copy-on-writes of a step for all layers in one launch. `copies`: (src, dst) block ids."""
        if copies:
            pairs = np.array(copies, dtype=np.int64)
            for device, tensors in self.by_device().items():
                ops.copy_blocks(tensors, to_device(pairs, device), in_bounds=True)
