"""Consecutive decoder layers, attention included, in one native call.

In a decode step of a small model, calls take longer than what they compute. The arguments are arrays of records, one
per layer, so that a step's addresses are filled in for all layers at once.

Knows tensors, not modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged.fused.cpu import structs
from hf_paged.fused.cpu.ops import LayerIn, LayerOut, entry
from hf_paged.kernels import buffers
from hf_paged.kernels.arguments import Attention, LayerKV, NewKV
from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.native import ops as native_ops
from hf_paged.kernels.native.structs import Call

# One record per layer, of the structs that the kernels take.
_LAYER_IN, _CALL, _LAYER_OUT = np.dtype(structs.LayerIn), np.dtype(Call), np.dtype(structs.LayerOut)
_ROUGH = 2
"""`Weight.packed` of a packed weight whose products may be rough."""


class StackLayer(NamedTuple):
    """A decoder layer: the part before its attention, the options of its attention, and the part after it."""

    before: LayerIn
    attention: Attention
    after: LayerOut


class StackCall(NamedTuple):
    """The arguments of a native call for all layers: a record for each, and the result of each, [layers, 1, tokens,
    depth]. partitions: of the step, one for each kind of attention. held: what the records have addresses of."""

    ins: np.ndarray
    calls: np.ndarray
    outs: np.ndarray
    results: torch.Tensor
    partitions: list[Any]
    held: tuple[Any, ...]

    @property
    def addresses(self) -> tuple[int, int, int]:
        return self.ins.ctypes.data, self.calls.ctypes.data, self.outs.ctypes.data

    def run(self) -> torch.Tensor:
        """The result of each layer. Writes the K/V of the tokens into the blocks."""
        entry("decode_layers", self.results.dtype)(*self.addresses, len(self.ins))
        return self.results


class Stack:
    """Decoder layers of equal sizes (`layer_sizes`), each of which takes the result of the previous one."""

    def __init__(self, layers: Sequence[StackLayer], *, rough: bool = False) -> None:
        """rough: rows may be rounded to int16 for products with packed weights in int8, where that is faster."""
        assert len({layer_sizes(layer.before, layer.after) for layer in layers}) == 1, "layers of different sizes"
        # Kept, because only addresses of their tensors are used below.
        self._layers = list(layers)
        # The fields that are equal in every step; `call` fills in the others in a copy.
        self._ins = np.concatenate([np.frombuffer(layer.before.call, _LAYER_IN) for layer in layers])  # type: ignore[call-overload]
        self._outs = np.concatenate([np.frombuffer(layer.after.call, _LAYER_OUT) for layer in layers])  # type: ignore[call-overload]
        if rough:
            parts = [self._ins[part]["packed"] for part in ("query", "key", "value")]
            parts += [self._outs[part]["packed"] for part in ("output", "gate", "up", "down")]
            for packed in parts:
                packed[packed == 1] = _ROUGH
        self._scales = [layer.attention.scale for layer in layers]
        self._softcaps = [layer.attention.softcap or 0.0 for layer in layers]
        self._bounds = [layer.attention.bounds for layer in layers]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def first(self) -> StackLayer:
        return self._layers[0]

    def is_of(self, layers: Sequence[StackLayer]) -> bool:
        """Return True if the stack was made from these same objects."""
        return len(layers) == len(self._layers) and all(map(is_, layers, self._layers))

    def call(
        self,
        rows: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        caches: Sequence[LayerKV],
        step: Sequence[AttentionMetadata],
    ) -> StackCall:
        """The call of all layers for these rows, valid until this thread's next call of native kernels.

        rows [1, tokens, depth], few tokens of each sequence; cos and sin [1, tokens, head_dim]; all contiguous. caches:
        the blocks of each layer. step: the metadata of each layer.
        """
        before, _, after = self._layers[0]
        count, tokens, dim = len(self._layers), rows.shape[1], before.head_dim
        linears = before.query, before.query, before.key, before.value
        query, attended, key, value = (buffers.empty((tokens, e.columns // dim, dim), rows.dtype) for e in linears)
        # So that the results have a version counter, which the caller reads.
        with torch.inference_mode(False):
            results = buffers.empty((count, *rows.shape), rows.dtype)

        calls, threads = np.zeros(count, _CALL), torch.get_num_threads()
        # The calls of all layers follow one another, so they share one workspace.
        num_bytes = max(
            entry("layer_in_workspace", rows.dtype)(tokens, before.query.depth, threads),
            entry("layer_out_workspace", rows.dtype)(
                tokens, after.output.depth, after.output.columns, after.gate.columns, threads
            ),
        )
        partitions: list[Any] = []
        # Layers with the same step and bounds have the same partition, which is made once.
        alike: dict[tuple[Any, ...], list[int]] = {}
        for index, kind in enumerate(zip(map(id, step), self._bounds, strict=True)):
            alike.setdefault(kind, []).append(index)
        for (_, bounds), members in alike.items():
            blocks = caches[members[0]]
            options, new = Attention(1.0, bounds), NewKV(key, value)
            call, partition, needed = native_ops.attention_call(query, blocks, step[members[0]], attended, options, new)
            partitions.append(partition)
            calls[members] = np.frombuffer(call, _CALL)  # type: ignore[call-overload]
            num_bytes = max(num_bytes, needed)
        # Asked for once the largest need is known, because asking for more may move it.
        workspace = native_ops.workspace(num_bytes)
        calls["key"] = [blocks.key.data_ptr() for blocks in caches]
        calls["value"] = [blocks.value.data_ptr() for blocks in caches]
        for name, scales in zip(("key_store", "value_store"), zip(*(blocks.scales for blocks in caches))):
            calls[name]["scales"] = [0 if own is None else own.data_ptr() for own in scales]
        calls["workspace"] = workspace
        calls["scale"], calls["softcap"] = self._scales, self._softcaps

        ends = results.data_ptr() + np.arange(count) * rows.nbytes
        # The result of a layer is where the next one reads.
        starts = np.concatenate(([rows.data_ptr()], ends[:-1]))
        # Copies, because other threads may be running this stack too.
        ins, outs = self._ins.copy(), self._outs.copy()
        ins["x"], outs["residual"], outs["out"] = starts, starts, ends
        ins["cos"], ins["sin"] = cos.data_ptr(), sin.data_ptr()
        ins["new_query"], ins["new_key"], ins["new_value"] = query.data_ptr(), key.data_ptr(), value.data_ptr()
        outs["x"] = attended.data_ptr()
        for records in (ins, outs):
            records["rows"], records["workspace"], records["threads"] = tokens, workspace, threads
        held = rows, cos, sin, caches, step, query, attended, key, value
        return StackCall(ins, calls, outs, results, partitions, held)


def layer_sizes(before: LayerIn, after: LayerOut) -> tuple[int, ...]:
    """The sizes that must be equal for all layers of a Stack."""
    linears = before.query, before.key, before.value, after.output, after.gate, after.up, after.down
    return before.head_dim, *(size for linear in linears for size in (linear.columns, linear.depth))
