"""The operations of decoder layers other than attention, each as one native call: norms, rotations, linear layers and
the halves of a decoder layer, in fp32, bf16 and (where the CPU converts it) fp16. On a CPU with AVX-512 and BF16,
linear layers in bf16 have packed weights, and the experts of mixtures are one call too.
`norms` and `decoder` check that they give torch's bits.

Knows tensors, not modules.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hf_paged.fused.cpu import structs
from hf_paged.kernels import buffers
from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native.ops import workspace

# `Form.activations` in the order of native/layers.h.
_ACTIVATIONS = 32, 16, 8
_ENDINGS = {torch.bfloat16: "", torch.float32: "_f32", torch.float16: "_f16"}
"""Endings of the names of entry points."""


def is_available(dtype: torch.dtype) -> bool:
    """Return True if this process has these kernels for this dtype. `native.build.status` names its library."""
    library = native_build.library()
    return library is not None and dtype in _ENDINGS and (dtype != torch.float16 or bool(library.hfp_has_f16()))


def packs() -> bool:
    """Return True if linear layers in bf16 have packed weights, and mixtures have kernels. Otherwise a linear layer
    reads its weight in place, which is as fast as a packed copy."""
    library = native_build.library()
    return library is not None and bool(library.hfp_packs())


def _library() -> ctypes.CDLL:
    library = native_build.library()
    assert library is not None, "ask is_available() first"
    return library


def entry(name: str, dtype: torch.dtype) -> Any:
    """The library's function of this name for a dtype."""
    return getattr(_library(), f"hfp_{name}{_ENDINGS[dtype]}")


class WeightArena:
    """Contiguous memory for packed copies of weights, so that large pages can hold them. `parts`: one per weight, of
    `memory`."""

    def __init__(self, shapes: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16) -> None:
        """shapes: [columns, depth] of each weight. dtype: of all of them, bf16 or int8."""
        sizes = [int(_library().hfp_packed_bytes(*shape, dtype.itemsize)) for shape in shapes]
        # Large pages, because a step reads all weights once, and address translation would cost time.
        self.memory = buffers.in_large_pages(sum(sizes))
        self.parts = list(self.memory.split(sizes))


class Int8Scales(NamedTuple):
    """Factors of the sums with an int8 weight: fp32 [columns].

    dtype: of the rows and the results. rounds: whether the sums are rounded to it before they are multiplied; they are
    in any case before the bias is added.
    """

    scales: torch.Tensor
    dtype: torch.dtype
    rounds: bool


class InGroups(NamedTuple):
    """A weight's form in codes (`groups.Form`). dtype: of the rows and the results."""

    bits: int
    size: int
    kind: int
    activations: int
    table: tuple[float, ...]
    dtype: torch.dtype


class LinearWeight(NamedTuple):
    """A linear layer's weight, contiguous [columns, depth], or packed: in a part of a WeightArena (bf16, int8), or, for
    rows in fp32, contiguous [columns, depth] in bf16. Its bias [columns] of the rows' dtype, or None. int8, groups: of
    a weight in int8, or of one in codes, else None."""

    memory: torch.Tensor
    bias: torch.Tensor | None
    columns: int
    depth: int
    is_packed: bool
    int8: Int8Scales | None = None
    groups: InGroups | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the rows."""
        if self.groups is not None:
            return self.groups.dtype
        if self.int8 is not None:
            return self.int8.dtype
        if not self.is_packed:
            return self.memory.dtype
        return torch.float32 if self.memory.dtype == torch.bfloat16 else torch.bfloat16

    def struct(self) -> structs.Weight:
        address = self.memory.data_ptr()
        return structs.Weight(address, _address(self.bias), self.columns, self.packed, *self.scaling())

    @property
    def packed(self) -> int:
        """Return the field of this name in the C structs."""
        of = self.groups
        if of is None:
            return self.is_packed
        return 4096 * _ACTIVATIONS.index(of.activations) + 16 * of.size + of.bits + of.kind

    def scaling(self) -> tuple[int, bool]:
        """The address of the scales or of the codes' table, 0 if there are none, and whether sums are rounded first."""
        if self.groups is not None and self.groups.table:
            return _table(self.groups.table).data_ptr(), False
        return (0, False) if self.int8 is None else (self.int8.scales.data_ptr(), self.int8.rounds)


_tables: dict[tuple[float, ...], torch.Tensor] = {}
"""The tables of all codes, which are few: kernels have their addresses."""


def _table(values: tuple[float, ...]) -> torch.Tensor:
    if (known := _tables.get(values)) is not None:
        return known
    # The one that another thread has just made stays: `functools.cache` would let go of it.
    return _tables.setdefault(values, torch.tensor(values, dtype=torch.float32, device=buffers.HOST))


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Norm(NamedTuple):
    """An RMS norm: weight [n]."""

    weight: torch.Tensor
    eps: float


def pack(weight: torch.Tensor, part: torch.Tensor) -> None:
    """Lay out weight bf16 or int8 [columns, depth] in `part` of a WeightArena."""
    weight = weight.detach().contiguous()
    size, threads = weight.element_size(), torch.get_num_threads()
    _library().hfp_pack_linear(weight.data_ptr(), *weight.shape, size, part.data_ptr(), threads)


def linear(layer: LinearWeight, rows: torch.Tensor) -> torch.Tensor:
    """rows [..., depth] -> [..., columns], of `layer.dtype`. Sums are in fp32, in an order that depends on the
    depth alone, so that a row's result does not depend on other rows; but for many rows in fp32, with a weight in codes
    or on a CPU with AMX, out of `in_one_order`. Raises ValueError if the rows have another depth or dtype.
    """
    memory, bias, columns, depth = layer[:4]
    if rows.shape[-1] != depth or rows.dtype != layer.dtype or not rows.is_cpu:
        raise ValueError(
            f"rows {tuple(rows.shape)} of {rows.dtype} on {rows.device} for a weight of {layer.dtype} of depth {depth}"
        )
    rows = rows.contiguous()
    shape = rows.shape[:-1]
    count = rows.numel() // depth
    out = buffers.empty((*shape, columns), rows.dtype)
    threads = torch.get_num_threads()
    call = structs.Linear(
        rows.data_ptr(), count, columns, depth, memory.data_ptr(), _address(bias), layer.packed, out.data_ptr(),
        workspace(entry("linear_workspace", rows.dtype)(count, depth, threads)), threads, *layer.scaling(),
    )  # fmt: skip
    entry("linear", rows.dtype)(ctypes.byref(call))
    return out


def in_one_order(value: bool) -> bool:
    """Set if this thread's linear layers sum in an order that depends on the depth alone. Returns the previous value:
    False at first, and always if this process has no native kernels."""
    library = native_build.library()
    return library is not None and bool(library.hfp_in_one_order(value))


def rms_norm(norm: Norm, rows: torch.Tensor) -> torch.Tensor:
    """weight * (rows / sqrt(mean(rows^2) + eps)), rounded to the dtype before the product with the weight.

    rows [..., n] and weight [n] of one dtype; n is a multiple of 16.
    """
    rows = rows.contiguous()
    out = buffers.empty(rows.shape, rows.dtype)
    size = rows.shape[-1]
    entry("rms_norm", rows.dtype)(
        rows.data_ptr(), norm.weight.data_ptr(), out.data_ptr(), rows.numel() // size, size, norm.eps,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding: query, key [1, (kv_)heads, tokens, dim] with a contiguous last dimension; cos, sin
    [1, tokens, dim], contiguous; all of one dtype; dim is a multiple of 32. The results have the
    memory layout [tokens, heads, dim]."""
    _, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    new_query, new_key = (buffers.empty((1, tokens, n, dim), query.dtype) for n in (heads, kv_heads))
    call = structs.Rotate(
        structs.Rotated(query.data_ptr(), query.stride(2), query.stride(1), heads, new_query.data_ptr()),
        structs.Rotated(key.data_ptr(), key.stride(2), key.stride(1), kv_heads, new_key.data_ptr()),
        cos.data_ptr(), sin.data_ptr(), tokens, dim, torch.get_num_threads(),
    )  # fmt: skip
    entry("rotate", query.dtype)(ctypes.byref(call))
    return new_query.transpose(1, 2), new_key.transpose(1, 2)


class ExpertWeights(NamedTuple):
    """The weights of a mixture's experts, which are gated MLPs with SiLU.

    gate_up bf16 [experts, 2 * inner, depth], gates first; down bf16 [experts, depth, inner]; contiguous; or the memory
    of WeightArenas in which each expert is packed.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    num_experts: int
    depth: int
    inner: int
    is_packed: bool = False

    @classmethod
    def of(cls, gate_up: torch.Tensor, down: torch.Tensor) -> ExpertWeights:
        """The weights themselves. depth and inner must be multiples of 16."""
        return cls(gate_up, down, *down.shape)

    def packed(self) -> ExpertWeights:
        """A copy."""
        return ExpertWeights(_packed_experts(self.gate_up), _packed_experts(self.down), *self[2:5], True)


def _packed_experts(weights: torch.Tensor) -> torch.Tensor:
    arena = WeightArena([(weights.shape[1], weights.shape[2])] * weights.shape[0])
    for weight, part in zip(weights, arena.parts, strict=True):
        pack(weight, part)
    return arena.memory


def experts(
    layer: ExpertWeights, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor | None:
    """The results of each token's experts, times their weights, added up: bf16 [tokens, depth].

    rows bf16 [tokens, depth]; index int64 and weights bf16 or fp32 [tokens, top_k]; all contiguous. None if an expert
    does not exist. Rounded where transformers rounds.
    """
    gate_up, down, count, depth, inner, is_packed = layer
    tokens, pairs = rows.shape[0], index.numel()
    out, threads, library = buffers.empty(rows.shape, rows.dtype), torch.get_num_threads(), _library()
    # fp32 holds bf16 exactly, so that one kernel serves both.
    wide = weights.float()
    places = buffers.empty((pairs + count + 1,), torch.int64)
    gathered, both, results = (buffers.empty((pairs, size), rows.dtype) for size in (depth, 2 * inner, depth))
    call = structs.Experts(
        rows.data_ptr(), index.data_ptr(), wide.data_ptr(), tokens, index.shape[1], depth, inner, count,
        weights.dtype == torch.bfloat16, gate_up.data_ptr(), down.data_ptr(), is_packed, out.data_ptr(),
        places.data_ptr(), gathered.data_ptr(), both.data_ptr(), results.data_ptr(),
        workspace(library.hfp_linear_workspace(pairs, max(depth, inner), threads)), threads,
    )  # fmt: skip
    return out if library.hfp_experts(ctypes.byref(call)) else None


@dataclass(frozen=True, slots=True)
class LayerIn:
    """The part of a decoder layer before its attention. `call`: the struct fields that are equal for every call."""

    norm: Norm
    query: LinearWeight
    key: LinearWeight
    value: LinearWeight
    query_norm: Norm | None
    key_norm: Norm | None
    head_dim: int
    call: structs.LayerIn = field(init=False)

    def __post_init__(self) -> None:
        norms = self.norm, self.query_norm, self.key_norm
        addresses = (0 if norm is None else norm.weight.data_ptr() for norm in norms)
        linears = (linear.struct() for linear in (self.query, self.key, self.value))
        call = structs.LayerIn(0, 0, self.query.depth, self.head_dim, *addresses, *linears)
        call.norm_eps, call.query_eps, call.key_eps = (0.0 if norm is None else norm.eps for norm in norms)
        object.__setattr__(self, "call", call)


def layer_in(
    layer: LayerIn, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm, projections, norms of heads, rotation: rows [1, tokens, depth], cos, sin [1, tokens, head_dim], of the
    weights' dtype, all contiguous -> query, key, value [1, (kv_)heads, tokens, head_dim] with memory layout [tokens,
    heads, head_dim]. depth and head_dim are multiples of 32.
    """
    tokens, dim = rows.shape[1], layer.head_dim
    linears = layer.query, layer.key, layer.value
    query, key, value = (buffers.empty((1, tokens, each.columns // dim, dim), rows.dtype) for each in linears)
    # A copy of the record, because several threads may compute with the layer.
    call = structs.LayerIn.from_buffer_copy(layer.call)
    call.x, call.rows, call.cos, call.sin = rows.data_ptr(), tokens, cos.data_ptr(), sin.data_ptr()
    call.new_query, call.new_key, call.new_value = query.data_ptr(), key.data_ptr(), value.data_ptr()
    call.threads = torch.get_num_threads()
    call.workspace = workspace(entry("layer_in_workspace", rows.dtype)(tokens, call.depth, call.threads))
    entry("layer_in", rows.dtype)(ctypes.byref(call))
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class LayerOut:
    """The part of a decoder layer after its attention. `call`: the struct fields that are equal for every call."""

    output: LinearWeight
    norm: Norm
    gate: LinearWeight
    up: LinearWeight
    down: LinearWeight
    call: structs.LayerOut = field(init=False)

    def __post_init__(self) -> None:
        linears = (linear.struct() for linear in (self.output, self.gate, self.up, self.down))
        sizes = self.output.depth, self.output.columns
        call = structs.LayerOut(0, 0, 0, *sizes, self.norm.weight.data_ptr(), *linears)
        call.norm_eps = self.norm.eps
        object.__setattr__(self, "call", call)


def layer_out(layer: LayerOut, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Output projection, residual, norm, down(silu(gate) * up), residual: attended [1, tokens, x_depth], residual
    [1, tokens, depth], of the weights' dtype, both contiguous -> [1, tokens, depth]. All depths are multiples of 32.
    """
    tokens, out, dtype = residual.shape[1], buffers.empty(residual.shape, residual.dtype), residual.dtype
    # A copy of the record, because several threads may compute with the layer.
    call = structs.LayerOut.from_buffer_copy(layer.call)
    call.x, call.residual, call.rows, call.out = attended.data_ptr(), residual.data_ptr(), tokens, out.data_ptr()
    call.threads = torch.get_num_threads()
    num_bytes = entry("layer_out_workspace", dtype)(tokens, call.x_depth, call.depth, layer.gate.columns, call.threads)
    call.workspace = workspace(num_bytes)
    entry("layer_out", dtype)(ctypes.byref(call))
    return out
