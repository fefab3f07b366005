"""Checks of the arguments of the operations in `ops`: a call that would read or write outside its tensors raises a
ValueError that names the argument.

Shapes, dtypes, devices and strides are checked in every call. The values of a step (block ids, lengths, slots) are
checked once per `AttentionMetadata`, unless hf_paged has derived them from its own block tables (`in_bounds`), because
on a GPU checking makes the host wait. The native implementation always checks the values when it makes its partition.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hf_paged.kernels.arguments import Attention, LayerKV, NewKV
from hf_paged.kernels.bounds import Bounds
from hf_paged.kernels.metadata import SHORT_QUERY, AttentionMetadata
from hf_paged.kernels.quantised import LARGEST

_POSITIVE = (*Bounds._fields, "softcap")


def check_attention(query: torch.Tensor, kv: LayerKV, metadata: AttentionMetadata, options: Attention) -> None:
    """Check that query, caches, metadata and options fit each other."""
    check_caches(kv)
    key_cache, value_cache, scales = kv
    if not value_cache.shape[3]:
        raise ValueError(f"value_cache {tuple(value_cache.shape)} holds no values to attend to")
    if (
        query.ndim != 3
        or not query.shape[1]
        or query.shape[2] != key_cache.shape[3]
        or query.shape[1] % key_cache.shape[2]
    ):
        raise ValueError(
            f"query {tuple(query.shape)} does not fit key_cache {tuple(key_cache.shape)}: [num_tokens, num_heads, "
            "head_dim] with equal head sizes and a multiple of the number of KV heads is needed"
        )
    # K/V in eight bits have a dtype of their own, so only exact ones must have the query's.
    exact = [cache.dtype for cache, own in ((key_cache, scales.key), (value_cache, scales.value)) if own is None]
    if any(dtype != query.dtype for dtype in exact) or not query.is_floating_point():
        raise ValueError(
            f"query and caches must have one floating-point dtype; these are {query.dtype}, {key_cache.dtype} and "
            f"{value_cache.dtype}"
        )
    if query.device != key_cache.device:
        raise ValueError(f"query is on {query.device}, key_cache on {key_cache.device}")
    for name, size in zip(_POSITIVE, (*options.bounds, options.softcap), strict=True):
        # `size <= 0` would let NaN pass.
        if size is not None and not size > 0:
            raise ValueError(f"{name}={size}: must be positive, or None")
    _check_heads("sinks", options.sinks, query)
    _check_heads("alibi_slopes", options.alibi_slopes, query)
    if options.distance_bias is not None:
        _check_distance_bias(options.distance_bias, query, metadata)
    # The layers of a step share its metadata, so one of them looks at it.
    if "layout" not in metadata.checked:
        _check_layout(metadata, key_cache.device)
        metadata.checked.add("layout")


def check_caches(kv: LayerKV) -> None:
    """Check the shapes, strides and devices of caches [num_blocks, block_size, num_kv_heads, (v_)head_dim], and their
    scales.

    v_head_dim may be 0, because some models store everything in the keys.
    """
    key_cache, value_cache, scales = kv
    shape, v_shape = key_cache.shape, value_cache.shape
    if len(shape) != 4 or len(v_shape) != 4 or shape[:3] != v_shape[:3] or 0 in shape[1:]:
        raise ValueError(
            f"key_cache {tuple(shape)} and value_cache {tuple(v_shape)}: [num_blocks, block_size, num_kv_heads, "
            "head_dim] with the same first three sizes, none of them 0 within a block, are needed"
        )
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise ValueError(
            f"key_cache has strides {key_cache.stride()}, value_cache {value_cache.stride()}: the last dimension must "
            "be contiguous"
        )
    if key_cache.device != value_cache.device:
        raise ValueError(f"key_cache is on {key_cache.device}, value_cache on {value_cache.device}")
    # A cache of eight bits, and no other, has scales.
    for name, own, cache in (("key", scales.key, key_cache), ("value", scales.value, value_cache)):
        if own is None and cache.dtype not in LARGEST:
            continue
        if own is None or cache.dtype not in LARGEST:
            raise ValueError(
                f"{name}_cache of {cache.dtype} {'without' if own is None else 'with'} scales: caches of "
                f"{', '.join(map(str, LARGEST))} have them, and no others"
            )
        if own.shape != cache.shape[:3] or own.dtype != torch.float32 or own.device != cache.device:
            raise ValueError(
                f"{name} scales {tuple(own.shape)} of {own.dtype} on {own.device}: fp32 {tuple(cache.shape[:3])} on "
                f"{cache.device} is needed"
            )


def _check_heads(name: str, values: torch.Tensor | None, query: torch.Tensor) -> None:
    """Check that `values` (sinks, alibi_slopes) has one floating-point number per query head, or is None."""
    if values is None:
        return
    if values.shape != query.shape[1:2] or not values.is_floating_point() or values.device != query.device:
        raise ValueError(
            f"{name} {tuple(values.shape)} of {values.dtype} on {values.device}: floating-point [{query.shape[1]}] on "
            f"{query.device} is needed, one for each query head"
        )


def _check_distance_bias(table: torch.Tensor, query: torch.Tensor, metadata: AttentionMetadata) -> None:
    """Check that the table has a floating-point number for each query head and distance of the step."""
    heads, needed = query.shape[1], metadata.max_seq_len
    fits = table.ndim == 2 and table.shape[0] == heads and table.shape[1] >= needed
    if not fits or not table.is_floating_point() or table.device != query.device:
        raise ValueError(
            f"distance_bias {tuple(table.shape)} of {table.dtype} on {table.device}: floating-point [{heads}, at least "
            f"{needed}] on {query.device} is needed, a number for each query head and distance"
        )


def check_out(out: torch.Tensor | None, query: torch.Tensor, v_head_dim: int) -> None:
    """Check that `out`, if given, has the shape, dtype and device of the result for `query`."""
    if out is None:
        return
    shape = *query.shape[:2], v_head_dim
    if tuple(out.shape) != shape or out.dtype != query.dtype or out.device != query.device:
        raise ValueError(
            f"out {tuple(out.shape)} of {out.dtype} on {out.device}: {shape} of {query.dtype} on {query.device} is "
            "needed"
        )


def check_new_kv(new: NewKV, kv: LayerKV, slot_mapping: torch.Tensor) -> None:
    """Check that a step's K/V fits the caches, and that there is a slot for each token."""
    (key, value), (key_cache, value_cache, _) = new, kv
    shape, v_shape = key.shape, value.shape
    fits = len(shape) == len(v_shape) == 3 and shape[:2] == v_shape[:2]
    if not fits or shape[1:] != key_cache.shape[2:] or v_shape[2] != value_cache.shape[3]:
        raise ValueError(
            f"key {tuple(shape)} and value {tuple(v_shape)} do not fit caches {tuple(key_cache.shape)} and "
            f"{tuple(value_cache.shape)}"
        )
    if slot_mapping.shape[0] != shape[0]:
        raise ValueError(f"slot_mapping has {slot_mapping.shape[0]} entries for {shape[0]} tokens")
    if not key.device == value.device == key_cache.device:
        raise ValueError(f"key is on {key.device}, value on {value.device}, the caches on {key_cache.device}")


def check_slot_mapping(slot_mapping: torch.Tensor, device: torch.device) -> None:
    if slot_mapping.ndim != 1 or slot_mapping.dtype != torch.int64 or slot_mapping.device != device:
        raise ValueError(
            f"slot_mapping {tuple(slot_mapping.shape)} of {slot_mapping.dtype} on {slot_mapping.device}: int64 "
            f"[num_tokens] on {device} is needed"
        )


def check_slots(slot_mapping: torch.Tensor, key_cache: torch.Tensor) -> None:
    """Check that every slot is in the cache, or -1."""
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    slots = _host(slot_mapping)
    low, high = (int(slots.min()), int(slots.max())) if slots.size else (-1, -1)
    if low < -1 or high >= num_slots:
        raise ValueError(
            f"slot_mapping has slot {low if low < -1 else high}; the cache has slots 0 to {num_slots - 1}, and -1 is "
            "padding"
        )


def check_step_slots(metadata: AttentionMetadata, key_cache: torch.Tensor) -> None:
    """Check the slots of a step, once for each size of cache."""
    key = ("slots", key_cache.shape[:2])
    if _must_check(metadata, key):
        check_slots(metadata.slot_mapping, key_cache)
        metadata.checked.add(key)


def check_step(metadata: AttentionMetadata, num_rows: int, key_cache: torch.Tensor, options: Attention) -> None:
    """Check that a step's lengths fit its block tables and the `num_rows` rows of the query, and that visible blocks
    are in the cache. Done once for each combination of these arguments."""
    num_blocks, block_size = key_cache.shape[:2]
    key = ("step", num_rows, num_blocks, block_size, options.bounds)
    if _must_check(metadata, key):
        lens, query_lens = _check_lengths(metadata, num_rows, block_size)
        _check_tables(metadata, lens, query_lens, key_cache, options)
        _check_reach(metadata, lens, query_lens)
        metadata.checked.add(key)


def _check_lengths(metadata: AttentionMetadata, num_rows: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Check the lengths against each other, the tables and the query. Returns the K/V lengths and query lengths."""
    # In int64, because differences of wrong int32 numbers could wrap and look right.
    lens, starts = (_host(x).astype(np.int64) for x in (metadata.seq_lens, metadata.query_start_loc))
    width = metadata.block_tables.shape[1]
    query_lens = np.diff(starts)
    if starts[0] < 0 or (query_lens < 0).any() or starts[-1] > num_rows:
        raise ValueError(f"query_start_loc must ascend from 0 or more to at most {num_rows}, the rows of the query")
    seq = _first(lens < query_lens)
    if seq is not None:
        raise ValueError(f"seq_lens[{seq}]={lens[seq]} is less than the {query_lens[seq]} new tokens of the sequence")
    # Nobody reads the length of a sequence without new tokens.
    computed = query_lens > 0
    seq = _first(computed & (lens > width * block_size))
    if seq is not None:
        raise ValueError(
            f"seq_lens[{seq}]={lens[seq]} is more than a table of {width} blocks of {block_size} tokens holds"
        )
    # Bounds size the grids of launches: one that is too small would leave tokens out.
    if query_lens.max(initial=0) > metadata.max_query_len or lens[computed].max(initial=0) > metadata.max_seq_len:
        raise ValueError(
            f"max_query_len={metadata.max_query_len} and max_seq_len={metadata.max_seq_len} are no upper bounds of the "
            f"lengths: {query_lens.max()} and {lens[computed].max()}"
        )
    longest_short = query_lens.max(initial=0, where=query_lens <= SHORT_QUERY)
    if longest_short > metadata.max_short_query_len:
        raise ValueError(
            f"max_short_query_len={metadata.max_short_query_len}, but a sequence has {longest_short} new tokens"
        )
    num_short = query_lens.sum(where=query_lens <= SHORT_QUERY)
    if metadata.num_short_tokens is not None and num_short > metadata.num_short_tokens:
        raise ValueError(
            f"num_short_tokens={metadata.num_short_tokens}, but the sequences with at most {SHORT_QUERY} new tokens "
            f"have {num_short}"
        )
    return lens, query_lens


def _check_tables(
    metadata: AttentionMetadata,
    lens: np.ndarray,
    query_lens: np.ndarray,
    key_cache: torch.Tensor,
    options: Attention,
) -> None:
    """Check that every block that a query sees is in the cache."""
    num_blocks, block_size = key_cache.shape[:2]
    tables, computed = _host(metadata.block_tables), query_lens > 0
    low = options.bounds.first(lens - query_lens, np.maximum)  # of the first query's keys
    column = np.arange(tables.shape[1])
    seen = (column >= (low // block_size)[:, None]) & (column < -(-np.where(computed, lens, 0) // block_size)[:, None])
    wrong = seen & ((tables < 0) | (tables >= num_blocks))
    if wrong.any():
        row, at = map(int, np.argwhere(wrong)[0])
        raise ValueError(
            f"block_tables[{row}, {at}]={tables[row, at]}: sequence {row} attends to this block, and the cache has "
            f"blocks 0 to {num_blocks - 1}"
        )


def _check_reach(metadata: AttentionMetadata, lens: np.ndarray, query_lens: np.ndarray) -> None:
    """Check that every token sees up to its own position at least, and to the last one of its sequence at most."""
    if metadata.reach is None:
        return
    reach, row = _host(metadata.reach), int(metadata.query_start_loc[0])
    for seq, (length, count) in enumerate(zip(lens.tolist(), query_lens.tolist())):
        own = reach[row : row + count]
        wrong = _first((own < np.arange(length - count, length)) | (own >= length))
        if wrong is not None:
            raise ValueError(
                f"reach[{row + wrong}]={own[wrong]}: this token of sequence {seq} is at position "
                f"{length - count + wrong} of {length}, and attends to keys up to itself at least"
            )
        row += count


def _must_check(metadata: AttentionMetadata, key: tuple[object, ...]) -> bool:
    """False for values that hf_paged derived itself, for those checked before, and while a CUDA graph is captured."""
    if metadata.in_bounds or key in metadata.checked:
        return False
    # A capture may not wait for the device, and its replays would not check again.
    return metadata.seq_lens.device.type == "cpu" or not torch.cuda.is_current_stream_capturing()


def _first(found: np.ndarray) -> int | None:
    return int(found.argmax()) if found.any() else None


def _host(x: torch.Tensor) -> np.ndarray:
    return x.numpy() if x.device.type == "cpu" else x.cpu().numpy()


def _check_layout(metadata: AttentionMetadata, device: torch.device) -> None:
    """Check the shapes, dtypes, strides and devices of a step's tensors."""
    tables, lens, starts = metadata.block_tables, metadata.seq_lens, metadata.query_start_loc
    num_seqs = lens.shape[0] if lens.ndim else 0
    expected = {
        "block_tables": (tables, tables.shape if tables.ndim == 2 and tables.shape[0] == num_seqs else None),
        "seq_lens": (lens, (num_seqs,)),
        "query_start_loc": (starts, (num_seqs + 1,)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor.dtype != torch.int32 or shape is None or tensor.shape != shape:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} of {tensor.dtype}: int32 is needed, block_tables [num_seqs, "
                "max_blocks], seq_lens [num_seqs], query_start_loc [num_seqs + 1]"
            )
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, the caches are on {device}")
        # The stride of a single element is arbitrary.
        if tensor.numel() > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; its last dimension must be contiguous")
    check_slot_mapping(metadata.slot_mapping, device)
    reach = metadata.reach
    if reach is not None and (
        reach.dtype != torch.int32
        or reach.shape != metadata.slot_mapping.shape
        or reach.device != device
        or not reach.is_contiguous()
    ):
        raise ValueError(
            f"reach {tuple(reach.shape)} of {reach.dtype} on {reach.device}: int32 [num_tokens] is needed, contiguous, "
            "on the device of the caches"
        )


def check_copies(
    caches: Sequence[torch.Tensor], copies: torch.Tensor, into: Sequence[torch.Tensor] | None, *, in_bounds: bool
) -> None:
    """Check that blocks have one shape and dtype in source and target, and, unless `in_bounds`, that all ids exist."""
    if copies.ndim != 2 or copies.shape[1] != 2 or copies.dtype != torch.int64:
        raise ValueError(f"copies {tuple(copies.shape)} of {copies.dtype}: int64 [n, 2] pairs of (src, dst) are needed")
    targets = caches if into is None else into
    if len(targets) != len(caches):
        raise ValueError(f"into has {len(targets)} tensors for {len(caches)} caches")
    for cache, target in zip(caches, targets):
        if cache.ndim == 0 or cache.shape[1:] != target.shape[1:] or cache.dtype != target.dtype or target.ndim == 0:
            raise ValueError(
                f"blocks of {tuple(cache.shape)}, {cache.dtype}, do not fit those of {tuple(target.shape)}, "
                f"{target.dtype}"
            )
        if not cache.device == target.device == copies.device:
            raise ValueError(f"caches on {cache.device} and {target.device}, copies on {copies.device}")
    if caches and copies.shape[0] and not in_bounds:
        _check_pairs(_host(copies), min(map(len, caches)), min(map(len, targets)), in_place=into is None)


def _check_pairs(pairs: np.ndarray, num_sources: int, num_targets: int, *, in_place: bool) -> None:
    for name, column, count in (("src", pairs[:, 0], num_sources), ("dst", pairs[:, 1], num_targets)):
        low, high = int(column.min()), int(column.max())
        if low < 0 or high >= count:
            raise ValueError(f"copies: {name}={low if low < 0 else high}; there are blocks 0 to {count - 1}")
    targets = set(pairs[:, 1].tolist())
    if len(targets) < len(pairs):
        raise ValueError("copies: a destination appears twice")
    if in_place and not targets.isdisjoint(pairs[:, 0].tolist()):
        raise ValueError("copies: a block is both a source and a destination")
