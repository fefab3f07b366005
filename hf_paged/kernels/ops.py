"""The three operations of the paper's section 5.1: block write, block read with attention, and block copy. Each call is
checked and dispatched to an implementation; torch.compile sees the first two as custom operators.

Layouts (all sizes in elements): see `arguments`; head_dim and v_head_dim may differ.
Implementations: "reference" (any device), "torch" (any device; needs no compiler), "native" (CPU; C code compiled once
per machine), "triton" (GPU, or a CPU under TRITON_INTERPRET=1). `impl=None` selects the best one for the device. An
explicit `impl` never falls back: it runs or raises.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import cast

import torch

from hf_paged.kernels import validation
from hf_paged.kernels.arguments import Attention, LayerKV, NewKV, Result
from hf_paged.kernels.bounds import Bounds
from hf_paged.kernels.metadata import REPEATABLE, AttentionMetadata, announced
from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.quantised import Scales

_MODULES = {
    "reference": "hf_paged.kernels.reference",
    "torch": "hf_paged.kernels.gather",
    "native": "hf_paged.kernels.native.ops",
    "triton": "hf_paged.kernels.triton.ops",
}
_default_impl: dict[str, str] = {}  # overrides `default_impl` by type of device, for tests


def default_impl(device: torch.device | str) -> str:
    """The implementation that `impl=None` selects on `device`, the same for the whole process.

    On a CPU it is "native" if this process has the native kernels, which it decides once (see `native.build`).
    """
    kind = device.type if isinstance(device, torch.device) else torch.device(device).type
    name = _default_impl.get(kind)
    if name is not None:
        return name
    if kind == "cpu":
        return "torch" if native_build.library() is None else "native"
    return "triton" if kind in ("cuda", "hip") else "torch"


def _module(impl: str | None, like: torch.Tensor) -> ModuleType:
    """The module of `impl`, or the default one for tensors with the device and dtype of `like`."""
    name = impl
    if name is None:
        name = default_impl(like.device)
        # On a CPU without instructions for fp16, only fp16 goes to torch.
        if name == "native" and not _load("native").supports(like.dtype):
            name = "torch"
    return _load(name)


@functools.cache
def _load(name: str) -> ModuleType:
    try:
        path = _MODULES[name]
    except KeyError:
        raise ValueError(f"impl={name!r}: use one of {', '.join(map(repr, _MODULES))}, or None") from None
    return importlib.import_module(path)


def release_workspaces() -> None:
    """Free the workspaces that native calls of this thread have left, which are as large as the largest one."""
    if (native := sys.modules.get(_MODULES["native"])) is not None:
        native.release_workspace()


def write_kv(
    new: NewKV, kv: LayerKV, slot_mapping: torch.Tensor, *, in_bounds: bool = False, impl: str | None = None
) -> None:
    """Write each token's K and V into its slot (fused reshape and block write, SOSP'23 section 5.1).

    new: any strides, but a contiguous last dimension; K and V are converted to the dtypes of the caches, which are
    changed in place, with the scales of those in int8 or e4m3. slot_mapping int64 [num_tokens]: block_id * block_size
    + offset; tokens with slot -1 are skipped.

    in_bounds: the caller has derived the slots from its own block tables, so they are not checked. On a GPU, checking
    makes the host wait. Raises ValueError for arguments that do not fit each other, and for slots outside the cache.
    """
    if torch.compiler.is_compiling() and impl is None:
        torch.ops.hf_paged.write_kv(*new, kv.key, kv.value, slot_mapping, in_bounds, *kv.scales)
        return
    validation.check_caches(kv)
    validation.check_slot_mapping(slot_mapping, kv.key.device)
    validation.check_new_kv(new, kv, slot_mapping)
    if not in_bounds:
        validation.check_slots(slot_mapping, kv.key)
    _module(impl, new.key).write_kv(new, kv, slot_mapping)


def copy_blocks(
    caches: list[torch.Tensor],
    copies: torch.Tensor,
    *,
    into: list[torch.Tensor] | None = None,
    in_bounds: bool = False,
    impl: str | None = None,
) -> None:
    """Copy whole blocks of every cache tensor: all copies of a step and all layers in one launch (SOSP'23 section 5.1).

    caches: tensors [num_blocks, ...] of any shapes and dtypes on one device. copies int64 [n, 2]: pairs (src, dst) of
    block ids; no destination appears twice. into: the destination tensors, one per cache, with blocks of the same shape
    and dtype, any number of blocks, and memory of their own on the same device. None: the caches themselves; then no
    block may be both a source and a destination. in_bounds: as for `write_kv`.

    Raises ValueError for arguments that do not fit each other, and for block ids outside a tensor.
    """
    validation.check_copies(caches, copies, into, in_bounds=in_bounds)
    if caches and copies.shape[0]:
        _module(impl, caches[0]).copy_blocks(caches, copies, caches if into is None else into)


def paged_attention(
    query: torch.Tensor,
    kv: LayerKV,
    metadata: AttentionMetadata,
    options: Attention,
    new: NewKV | None = None,
    *,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> Result:
    """Causal attention of a ragged batch of queries over K/V that is read through block tables (SOSP'23 section 4.1).

    query [num_tokens, num_heads, head_dim] of the caches' dtype, or any if they are in eight bits and have scales: the
    products of a key are multiplied by its scale, the weight of a value by the value's. num_heads is a multiple of
    num_kv_heads (GQA: query head h reads KV head h // (num_heads // num_kv_heads)). For a query at position p and a key
    at position j:

    - the key is visible if j <= p (`metadata.reach`: a later position), and `options.bounds` do not hide it;
    - score = scale * (q . k), then softcap * tanh(score / softcap), then + slope * (j - p), then
      + distance_bias[head, p - j];
    - sinks add one logit per head to the softmax, without a value.

    Options that are None do not apply; sinks and alibi_slopes (the slopes) are floating-point [num_heads].
    distance_bias is floating-point [num_heads, at least max_seq_len]; "reference" and "torch" implement it, and with it
    `impl=None` selects "torch".

    new: the K/V of the step's tokens, as for `write_kv`, which is written first. On a CPU this is faster than a
    separate call. If it is None, the K/V must be in the cache already. Slots that no query sees never affect the
    result, even if they hold NaN.

    Returns [num_tokens, num_heads, v_head_dim], which is `out` if that is given; with `return_lse` also the natural
    logarithm of the sum of exp(score), sinks included, fp32 [num_tokens, num_heads]. Rows of padding are undefined.
    Raises ValueError for arguments that do not fit each other, and if `impl` does not support them.
    """
    if torch.compiler.is_compiling() and impl is None and options.distance_bias is None:
        return _compiled_attention(query, kv, metadata, options, new, out)
    # The first layer's call has been checked and prepared. Layers of the same layout only change its addresses.
    if REPEATABLE in metadata.scratch and out is None and impl is None and options.has_numbers_only:
        again: torch.Tensor | None = metadata.scratch[REPEATABLE].run(query, kv, new, options)
        if again is not None:
            return again
    # In this order: the step's values are read only once shapes and dtypes are known to be right.
    validation.check_attention(query, kv, metadata, options)
    validation.check_out(out, query, kv.value.shape[3])
    validation.check_step(metadata, query.shape[0], kv.key, options)
    # Only `None` leaves the choice to us; an explicit implementation never falls back.
    if options.distance_bias is not None:
        if impl in ("native", "triton"):
            raise ValueError(f"impl={impl!r} does not implement distance_bias; use 'torch' or 'reference'")
        impl = impl or "torch"
    module = _module(impl, query)
    if new is not None:
        validation.check_new_kv(new, kv, metadata.slot_mapping)
        validation.check_step_slots(metadata, kv.key)
    return cast(Result, module.paged_attention(query, kv, metadata, options, new, out))


def _compiled_attention(
    query: torch.Tensor,
    kv: LayerKV,
    metadata: AttentionMetadata,
    options: Attention,
    new: NewKV | None,
    out: torch.Tensor | None,
) -> Result:
    """`paged_attention` as nodes of a graph of torch.compile. They check their arguments when they run."""
    if new is not None:
        slots, in_bounds = metadata.slot_mapping, metadata.in_bounds
        torch.ops.hf_paged.write_kv(new.key, new.value, kv.key, kv.value, slots, in_bounds, *kv.scales)
    result, lse = torch.ops.hf_paged.paged_attention(
        query, kv.key, kv.value, metadata.block_tables, metadata.seq_lens, metadata.query_start_loc,
        metadata.slot_mapping, metadata.max_query_len, metadata.max_seq_len, options.scale, *options.bounds,
        *options[2:5], options.return_lse, metadata.in_bounds, *kv.scales, metadata.reach,
    )  # fmt: skip
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if options.return_lse else result


# -- torch.library: what compiled models call, as operators that torch.compile does not look into ------------------

_lib = torch.library.Library("hf_paged", "DEF")
_lib.define(
    "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
    "bool in_bounds=False, Tensor(c!)? key_scales=None, Tensor(d!)? value_scales=None) -> ()"
)
_lib.define(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
    "Tensor query_start_loc, Tensor slot_mapping, int max_query_len, int max_seq_len, float scale, "
    "int? sliding_window, int? chunk_size, float? softcap, Tensor? sinks, Tensor? alibi_slopes, bool return_lse, "
    "bool in_bounds=False, Tensor? key_scales=None, Tensor? value_scales=None, Tensor? reach=None) -> (Tensor, Tensor)"
)


def _write_kv_op(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    in_bounds: bool = False,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    kv = LayerKV(key_cache, value_cache, Scales(key_scales, value_scales))
    write_kv(NewKV(key, value), kv, slots, in_bounds=in_bounds)


def _paged_attention_op(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    slot_mapping: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None,
    chunk_size: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    return_lse: bool,
    in_bounds: bool = False,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    reach: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    # The step's own record has what earlier layers derived; a fresh one would have nothing.
    tensors = block_tables, seq_lens, query_start_loc, slot_mapping
    metadata = announced(*tensors) or AttentionMetadata(
        *tensors, max_query_len=max_query_len, max_seq_len=max_seq_len, reach=reach, in_bounds=in_bounds
    )
    kv = LayerKV(key_cache, value_cache, Scales(key_scales, value_scales))
    options = Attention(scale, Bounds(sliding_window, chunk_size), softcap, sinks, alibi_slopes, return_lse=return_lse)
    result = paged_attention(query, kv, metadata, options)
    # An operator must return a tensor for each result, even if nobody asked for the log-sum-exp.
    if isinstance(result, tuple):
        return result
    return result, query.new_empty(0, dtype=torch.float32)


def _paged_attention_fake(query, key_cache, value_cache, *args):  # type: ignore[no-untyped-def]
    out = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    shape = query.shape[:2] if args[12] else (0,)  # return_lse
    return out, query.new_empty(shape, dtype=torch.float32)


for _key in ("CPU", "CUDA"):
    _lib.impl("write_kv", _write_kv_op, _key)
    _lib.impl("paged_attention", _paged_attention_op, _key)
_lib.impl("write_kv", lambda *args: None, "Meta")
_lib.impl("paged_attention", _paged_attention_fake, "Meta")
