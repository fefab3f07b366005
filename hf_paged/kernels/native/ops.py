"""The native CPU implementation of the operations in `kernels.ops`.

The kernels are C code that reads K/V through block tables. One computes sequences with few new tokens, another those
with many; the choice depends only on the lengths of the sequence. Knows tensors; `native.build` knows compilers.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged.kernels import buffers
from hf_paged.kernels.arguments import Attention, LayerKV, NewKV, Result, signature_of
from hf_paged.kernels.buffers import as_plain
from hf_paged.kernels.metadata import REPEATABLE, AttentionMetadata
from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native.structs import STORED, Bounds, Call, Prompts, Span, Step, Store, WriteStrides

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Sequences with at least this many query rows (new tokens x query heads) per KV head are computed by prefill.inc.c,
# others by attention.inc.c. Near this number both are equally fast, in fp32 and bf16, after short and long prefixes.
_PROMPT_ROWS = 64
# Limits of prefill.inc.c: elements of a head, query heads per KV head.
_PROMPT_MAX_DIM, _PROMPT_MAX_GROUP = 512, 64
# Limits of a work item: queries that read a chunk together, and their rows per KV head.
_MAX_ITEM_QUERIES = 16
_MAX_ITEM_ROWS = 64

_NO_NEW_KV = (0, 0, 0, 0, WriteStrides())
_NO_STORE = Store()
_local = threading.local()


def is_available() -> bool:
    """Return True if this process has the kernels. The first call on a machine compiles them and waits."""
    return native_build.library() is not None


def status() -> str:
    """One readable line: which native CPU kernels this process has, or why it has none."""
    return native_build.status()


def supports(dtype: torch.dtype) -> bool:
    """Return True if attention and greedy sampling support this dtype on this machine."""
    return dtype in (torch.float32, torch.bfloat16) or (dtype == torch.float16 and bool(c_library().hfp_has_f16()))


def c_library() -> ctypes.CDLL:
    found = native_build.library()
    if found is None:
        raise RuntimeError(f"impl='native': {native_build.status()}; `hf-paged build` compiles them")
    return found


class _Sizes(NamedTuple):
    """The sizes on which a partition depends. bounds: 0 = none. group: query heads per KV head. head_dim:
    the larger one of K's and V's. num_blocks: of the cache. num_rows: of the query."""

    block_size: int
    bounds: tuple[int, ...]
    group: int
    head_dim: int
    num_blocks: int
    num_rows: int


class _Partition:
    """The work items of one step for one mask: made once, used by all layers of the group.

    handle: the address of the partition. prompts: the sequences for `hfp_prefill`, or None.
    """

    __slots__ = ("_few", "_long", "_memory", "_step", "_workspace_bytes", "handle", "prompts")

    def __init__(self, metadata: AttentionMetadata, sizes: _Sizes) -> None:
        """Raises ValueError if an index of the step is out of bounds."""
        library = c_library()
        group = sizes.group
        long = _long_sequences(metadata, sizes)
        every = np.arange(metadata.num_seqs, dtype=np.int32)
        self._few: np.ndarray
        self._long: np.ndarray
        self._few, self._long = (every, every[:0]) if long is None else (every[~long], every[long])
        tables, *lists = map(as_plain, (metadata.block_tables, metadata.seq_lens, metadata.query_start_loc))
        lens, starts = (tensor.data_ptr() for tensor in lists)
        reach = 0 if metadata.reach is None else as_plain(metadata.reach).data_ptr()
        seqs = self._long.ctypes.data, len(self._long)
        self.prompts = Prompts(lens, starts, *seqs, reach) if len(self._long) else None
        step = self._step = Step(
            tables.data_ptr(),
            lens,
            starts,
            self._few.ctypes.data,
            tables.stride(0),
            len(self._few),
            sizes.block_size,
            Bounds(*sizes.bounds),
            max(1, min(_MAX_ITEM_QUERIES, _MAX_ITEM_ROWS // group)),
            True,  # blocks that several sequences hold are read once for all of them
            reach,
        )
        # Once for each step and mask: the kernels follow these indices without a look.
        fault = library.hfp_check(
            ctypes.byref(step), metadata.num_seqs, tables.shape[1], sizes.num_blocks, sizes.num_rows
        )
        if fault:
            what = ("the query rows", "the length", "a block id")[fault % 4 - 1]
            raise ValueError(f"{what} of sequence {fault // 4} is out of bounds")
        # The memory of a tensor is freed without running Python: a finalizer would swallow Ctrl-C.
        self._memory = buffers.empty((library.hfp_partition_bytes(ctypes.byref(step)),), torch.uint8)
        self.handle = self._memory.data_ptr()
        library.hfp_partition(self.handle, ctypes.byref(step))
        self._workspace_bytes: dict[tuple[int, ...], int] = {}

    @property
    def step_address(self) -> int:
        """Return the address of the struct from which `hfp_partition` makes the partition."""
        return ctypes.addressof(self._step)

    def follow(self) -> bool:
        """Prepare the next decode step, whose lengths are in the same memory; False if there is no room for it."""
        library, step = c_library(), ctypes.byref(self._step)
        if library.hfp_partition_bytes(step) > self._memory.numel():
            return False
        library.hfp_partition(self.handle, step)
        self._workspace_bytes.clear()
        return True

    def workspace_bytes(self, *shape: int) -> int:
        """Bytes of workspace for a call. shape: num_heads, num_kv_heads, head_dim, v_head_dim, threads."""
        num_bytes = self._workspace_bytes.get(shape)
        if num_bytes is None:
            num_bytes = c_library().hfp_workspace_bytes(self.handle, *shape)
            if self.prompts is not None:
                num_bytes = max(num_bytes, c_library().hfp_prefill_bytes(*shape[2:]))
            self._workspace_bytes[shape] = num_bytes
        return num_bytes

    def counts(self) -> tuple[int, int, int, int]:
        """Work items, queries in them, queries with several chunks, partial results."""
        counts = (ctypes.c_int64 * 4)()
        c_library().hfp_partition_counts(self.handle, counts)
        return tuple(counts)


def _long_sequences(metadata: AttentionMetadata, sizes: _Sizes) -> np.ndarray | None:
    """bool [num_seqs]: which sequences the kernel for many new tokens computes; None: none of them.

    One new token is a decode step, for any number of heads. The two kernels sum in different orders.
    """
    if (
        metadata.max_query_len == 1
        or metadata.one_order
        or sizes.group > _PROMPT_MAX_GROUP
        or sizes.head_dim > _PROMPT_MAX_DIM
    ):
        return None
    query_lens = np.diff(metadata.query_start_loc.numpy())
    return (query_lens * sizes.group >= _PROMPT_ROWS) & (query_lens > 1)


def has_few_tokens(metadata: AttentionMetadata, group: int) -> bool:
    """Return True if the kernel for few new tokens computes all sequences of a step. group: query heads per KV head."""
    return metadata.one_order or is_few(metadata.max_query_len, group)


def is_few(count: int, group: int) -> bool:
    """The same of one sequence with `count` new tokens."""
    return count == 1 or count * group < _PROMPT_ROWS


def workspace(num_bytes: int) -> int:
    """The address of `num_bytes` bytes, aligned to 64, that are valid until this thread's next call."""
    buffer: torch.Tensor | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.numel() < num_bytes:
        # Half more than asked for, so that steps that grow do not allocate each time.
        buffer = _local.buffer = buffers.empty((num_bytes + num_bytes // 2,), torch.uint8)
    return buffer.data_ptr()


def release_workspace() -> None:
    """Free this thread's workspace, which is as large as the largest call has needed."""
    _local.buffer = None


def paged_attention(
    query: torch.Tensor,
    kv: LayerKV,
    metadata: AttentionMetadata,
    options: Attention,
    new: NewKV | None = None,
    out: torch.Tensor | None = None,
) -> Result:
    """See `ops.paged_attention`."""
    given, query = query, as_plain(query)
    kv = kv._replace(key=as_plain(kv.key), value=as_plain(kv.value))
    dtype = query.dtype
    if not query.is_cpu:
        raise ValueError(f"impl='native' needs tensors on a CPU; query is on {query.device}")
    if dtype not in DTYPES or any(cache.dtype not in (dtype, *STORED) for cache in kv.elements):
        raise ValueError(
            f"impl='native' needs a query of fp32, bf16 or fp16, and caches of the same dtype or of eight bits; these "
            f"are {dtype}, {kv.key.dtype} and {kv.value.dtype}"
        )
    if out is None:
        out = buffers.empty((*query.shape[:2], kv.value.shape[3]), dtype)
    lse = buffers.empty(query.shape[:2], torch.float32).fill_(-torch.inf) if options.return_lse else None
    if query.stride(2) != 1:
        query = query.contiguous()
    target = out if out.stride(2) == 1 else buffers.empty(out.shape, dtype)
    options = options._replace(sinks=_in_fp32(options.sinks), alibi_slopes=_in_fp32(options.alibi_slopes))
    call, partition, num_bytes = attention_call(query, kv, metadata, target, options, new, lse)
    call.scale, call.softcap, call.workspace = options.scale, options.softcap or 0.0, workspace(num_bytes)
    library, address = c_library(), ctypes.byref(call)
    # This call writes the step's K/V too, which prompts read, so it comes first.
    failed = library.hfp_attention(address, DTYPES[dtype])
    if partition.prompts is not None:
        failed |= library.hfp_prefill(address, DTYPES[dtype], ctypes.byref(partition.prompts))
    if failed:
        raise ValueError(f"impl='native': this CPU cannot convert {dtype}; use impl='torch'")
    if target is not out:
        out.copy_(target)
    if lse is not None:
        return out, lse
    # Other layers give the kernel addresses of their tensors, so nothing may have been copied here.
    if new is not None and partition.prompts is None and options.has_numbers_only:
        written = call.held[:2]  # type: ignore[index]
        if target is out and query is given and written[0] is new.key and written[1] is new.value:
            metadata.scratch[REPEATABLE] = Repeatable(call, signature_of(query, kv, new, options), query, partition)
    return out


def _in_fp32(values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else as_plain(values.to(torch.float32)).contiguous()


class Repeatable:
    """The attention of a decode step, prepared by its first layer. The other layers have tensors of the same layout at
    other addresses, so that nothing has to be checked or derived again: that takes several times as long as the kernel.
    """

    __slots__ = ("_call", "_dtype", "_partition", "_shape", "_signature")

    def __init__(self, call: Call, signature: tuple[object, ...], query: torch.Tensor, partition: _Partition) -> None:
        self._call, self._signature, self._partition = call, signature, partition
        self._dtype = query.dtype
        self._shape = (*query.shape[:2], call.v_head_dim)

    def follow(self) -> bool:
        """Become the attention of the next decode step (see `DecodeArrays`); False if it must be prepared again."""
        return self._partition.follow()

    def run(self, query: torch.Tensor, kv: LayerKV, new: NewKV | None, options: Attention) -> torch.Tensor | None:
        """The attention over these tensors; None if their signature is another (see `signature_of`)."""
        if new is None or signature_of(query, kv, new, options) != self._signature:
            return None
        out = buffers.empty(self._shape, self._dtype)
        call = self._call
        call.query, call.out = query.data_ptr(), out.data_ptr()
        call.key, call.value = kv.key.data_ptr(), kv.value.data_ptr()
        call.key_store.scales, call.value_store.scales = map(_address, kv.scales)
        call.new_key, call.new_value = new.key.data_ptr(), new.value.data_ptr()
        shape = call.num_heads, call.num_kv_heads, call.head_dim, call.v_head_dim, call.threads
        call.workspace = workspace(self._partition.workspace_bytes(*shape))
        c_library().hfp_attention(ctypes.byref(call), DTYPES[self._dtype])
        return out


def attention_call(
    query: torch.Tensor,
    kv: LayerKV,
    metadata: AttentionMetadata,
    out: torch.Tensor,
    options: Attention,
    new: NewKV | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[Call, _Partition, int]:
    """The arguments of an attention for the kernels; the partition of the step; and the bytes of workspace for it.

    The arguments are as for `ops.paged_attention`, but the last dimension of every tensor is contiguous, and sinks and
    alibi_slopes are fp32. The caller sets the scale, the softcap and the address of the workspace.
    """
    key_cache, value_cache, scales = kv
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, v_head_dim = value_cache.shape
    bounds, threads = tuple(each or 0 for each in options.bounds), torch.get_num_threads()
    group, dim = num_heads // num_kv_heads, max(head_dim, v_head_dim)
    sizes = _Sizes(block_size, bounds, group, dim, num_blocks, num_tokens)
    partition: _Partition | None = metadata.scratch.get(("native", sizes))
    if partition is None:
        # Layers of these sizes share it: making it takes longer than the attention of a small batch.
        partition = metadata.scratch[("native", sizes)] = _Partition(metadata, sizes)
    new_kv: tuple[Any, ...] = _NO_NEW_KV
    key = value = slots = None
    if new is not None:
        key, value = _as_in(key_cache, new.key, query.dtype), _as_in(value_cache, new.value, query.dtype)
        slots = as_plain(metadata.slot_mapping).contiguous()
        strides = _write_strides(NewKV(key, value), kv)
        new_kv = (key.data_ptr(), value.data_ptr(), slots.data_ptr(), num_tokens, strides)
    call = Call(
        query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), out.data_ptr(),
        _address(lse), _address(options.sinks), _address(options.alibi_slopes),
        metadata.block_tables.data_ptr(), partition.handle, 0,
        *query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], *out.stride()[:2],
        metadata.block_tables.stride(0), num_heads, num_kv_heads, head_dim, v_head_dim, block_size, Bounds(*bounds),
        threads, *new_kv, _store(key_cache, scales.key), _store(value_cache, scales.value),
    )  # fmt: skip
    call.held = key, value, slots
    return call, partition, partition.workspace_bytes(num_heads, num_kv_heads, head_dim, v_head_dim, threads)


def write_kv(new: NewKV, kv: LayerKV, slot_mapping: torch.Tensor) -> None:
    """See `ops.write_kv`."""
    if not kv.key.is_cpu:
        raise ValueError(f"impl='native' needs tensors on a CPU; key_cache is on {kv.key.device}")
    kv = kv._replace(key=as_plain(kv.key), value=as_plain(kv.value))
    given = new.key.dtype if new.key.dtype in DTYPES else torch.float32  # read by what makes eight bits of it
    new = NewKV(_as_in(kv.key, new.key, given), _as_in(kv.value, new.value, given))
    slots = as_plain(slot_mapping).contiguous()
    c_library().hfp_write_kv(
        new.key.data_ptr(), new.value.data_ptr(), kv.key.data_ptr(), kv.value.data_ptr(), slots.data_ptr(),
        *new.key.shape[:2], kv.key.shape[1], ctypes.byref(_write_strides(new, kv)),
        ctypes.byref(_store(kv.key, kv.scales.key)), ctypes.byref(_store(kv.value, kv.scales.value)),
        DTYPES[given], torch.get_num_threads(),
    )  # fmt: skip


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _store(cache: torch.Tensor, scales: torch.Tensor | None) -> Store:
    if scales is None:
        return _NO_STORE
    return Store(STORED[cache.dtype], scales.data_ptr(), *scales.stride())


def _as_in(cache: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in the dtype of the cache, or in `dtype` if the cache is in eight bits, with a contiguous last dimension."""
    x = as_plain(x)
    wanted = dtype if cache.dtype in STORED else cache.dtype
    if x.dtype != wanted:
        x = x.to(wanted)
    return x if x.stride(2) == 1 else x.contiguous()


def _write_strides(new: NewKV, kv: LayerKV) -> WriteStrides:
    (key, value), (key_cache, value_cache, _) = new, kv
    k, v, kc, vc = key.stride(), value.stride(), key_cache.stride(), value_cache.stride()
    a, b = key_cache.element_size(), value_cache.element_size()
    c, d = key.element_size(), value.element_size()  # of new K/V, larger if the cache is in eight bits
    return WriteStrides(
        k[0] * c, k[1] * c, key.shape[2] * c, v[0] * d, v[1] * d, value.shape[2] * d,
        kc[0] * a, kc[1] * a, kc[2] * a, vc[0] * b, vc[1] * b, vc[2] * b,
    )  # fmt: skip


def copy_blocks(caches: list[torch.Tensor], copies: torch.Tensor, into: list[torch.Tensor]) -> None:
    """See `ops.copy_blocks`."""
    if not copies.is_cpu:
        raise ValueError(f"impl='native' needs tensors on a CPU; copies is on {copies.device}")
    spans: list[Span] = []
    for source, target in zip(map(as_plain, caches), map(as_plain, into)):
        size = source.element_size()
        source_block, target_block = source.stride(0) * size, target.stride(0) * size
        first, run = _runs(source, target)
        for from_, to in first:
            addresses = source.data_ptr() + from_ * size, target.data_ptr() + to * size
            spans.append(Span(addresses[0], source_block, addresses[1], target_block, run * size))
    copies = as_plain(copies).contiguous()
    c_library().hfp_copy_blocks(
        (Span * len(spans))(*spans), len(spans), copies.data_ptr(), copies.shape[0], torch.get_num_threads()
    )


def _runs(source: torch.Tensor, target: torch.Tensor) -> tuple[list[tuple[int, int]], int]:
    """The runs of a block that are contiguous in both tensors, usually one: their offsets in each, and their length, in
    elements."""
    run, dim = 1, source.ndim - 1
    while dim > 0 and (source.shape[dim] == 1 or source.stride(dim) == target.stride(dim) == run):
        run *= source.shape[dim]
        dim -= 1
    first = [(0, 0)]
    for d in range(1, dim + 1):
        steps = source.stride(d), target.stride(d)
        first = [(a + i * steps[0], b + i * steps[1]) for a, b in first for i in range(source.shape[d])]
    return first, run
