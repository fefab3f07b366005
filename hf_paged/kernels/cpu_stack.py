"""Decoder layers one after the other in one native call, their attention included: a decode step of a small model is
mostly calling. A step's addresses are filled in for all layers at once.

Knows tensors, not modules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hf_paged.kernels import cpu_native, native_build
from hf_paged.kernels.cpu_layers import LayerIn, LayerInCall, LayerOut, LayerOutCall
from hf_paged.kernels.cpu_native import CALL_KEY, CALL_VALUE, CALL_WORKSPACE
from hf_paged.kernels.metadata import AttentionMetadata


class StackAttention(NamedTuple):
    """A layer's attention in one step; as for `ops.paged_attention`."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata
    scale: float
    softcap: float | None
    sliding_window: int | None
    chunk_size: int | None


class Stack:
    """Decoder layers of the same sizes (`layer_sizes`), each of which takes what the one before it gives."""

    def __init__(self, layers: Sequence[tuple[LayerIn, LayerOut]]) -> None:
        """layers: what comes before attention, and what comes after it."""
        assert len({layer_sizes(*layer) for layer in layers}) == 1, "layers of different sizes"
        befores, afters = zip(*layers, strict=True)
        before, after = self._first = layers[0]
        self._alive = list(layers)  # their tensors, of which only addresses are kept below
        self._ins = _words(len(layers), LayerInCall)
        self._ins[:, 2:4] = before.query.depth, before.head_dim
        self._ins[:, 4:16] = [layer.words for layer in befores]
        self._in_eps = np.array([tuple(layer.eps) for layer in befores])
        self._outs = _words(len(layers), LayerOutCall)
        self._outs[:, 3:5] = after.output.depth, after.output.columns
        self._outs[:, 5:18] = [layer.words for layer in afters]
        self._out_eps = np.array([layer.norm.eps for layer in afters])

    def run(
        self, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attentions: Sequence[StackAttention]
    ) -> torch.Tensor:
        """rows bf16 [1, tokens, depth], cos and sin bf16 [1, tokens, head_dim], all contiguous -> what each layer
        gives, bf16 [layers, 1, tokens, depth]. The tokens, one of each sequence, are written into the blocks.
        """
        library = native_build.library()
        assert library is not None
        before, after = self._first
        count, tokens, dim = len(self._ins), rows.shape[1], before.head_dim
        query = rows.new_empty((tokens, before.query.columns // dim, dim))
        key = rows.new_empty((tokens, before.key.columns // dim, dim))
        value, attended = torch.empty_like(key), torch.empty_like(query)
        with torch.inference_mode(False):  # so that it counts its changes, which the caller wants to know of
            results = torch.empty((count, *rows.shape), dtype=rows.dtype)

        calls = _words(count, cpu_native.Call)
        num_bytes = max(
            library.hfp_layer_in_workspace(tokens, before.query.depth),
            library.hfp_layer_out_workspace(tokens, after.output.depth, after.output.columns, after.gate.columns),
        )
        alike: dict[tuple[int, int | None, int | None], list[int]] = {}
        for index, attention in enumerate(attentions):
            alike.setdefault((id(attention.metadata), *attention[5:]), []).append(index)
        for members in alike.values():
            key_cache, value_cache, metadata, _, _, window, chunk = attentions[members[0]]
            call, _, needed = cpu_native.attention_call(
                query, key_cache, value_cache, metadata, attended, key=key, value=value, sliding_window=window,
                chunk_size=chunk,
            )  # fmt: skip
            calls[members] = call
            num_bytes = max(num_bytes, needed)
        workspace, threads = cpu_native.workspace(num_bytes), torch.get_num_threads()
        calls[:, CALL_KEY] = [attention.key_cache.data_ptr() for attention in attentions]
        calls[:, CALL_VALUE] = [attention.value_cache.data_ptr() for attention in attentions]
        calls[:, CALL_WORKSPACE] = workspace
        scales = np.array([(attention.scale, attention.softcap or 0.0) for attention in attentions])

        ends = results.data_ptr() + np.arange(count) * rows.nbytes
        starts = np.concatenate(([rows.data_ptr()], ends[:-1]))
        ins, outs = self._ins.copy(), self._outs.copy()  # other threads may be running them too
        ins[:, 0], ins[:, 1] = starts, tokens
        ins[:, 16:] = (
            cos.data_ptr(), sin.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(), workspace, threads
        )  # fmt: skip
        outs[:, 0], outs[:, 1], outs[:, 2] = attended.data_ptr(), starts, tokens
        outs[:, 18], outs[:, 19:] = ends, (workspace, threads)
        library.hfp_decode_layers(
            ins.ctypes.data, self._in_eps.ctypes.data, calls.ctypes.data, scales.ctypes.data, outs.ctypes.data,
            self._out_eps.ctypes.data, count,
        )  # fmt: skip
        return results


def layer_sizes(before: LayerIn, after: LayerOut) -> tuple[int, ...]:
    """What must be the same for the layers of a Stack."""
    linears = before.query, before.key, before.value, after.output, after.gate, after.up, after.down
    return before.head_dim, *(size for linear in linears for size in (linear.columns, linear.depth))


def _words(count: int, call: type[ctypes.Array[ctypes.c_int64]]) -> np.ndarray:
    return np.zeros((count, call._length_), dtype=np.int64)
