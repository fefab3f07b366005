"""The native CPU implementation: C kernels that read the blocks where they lie.

One kernel is for sequences with few new tokens, another for those with many. Which of them computes a sequence depends
only on the lengths of that sequence. This module knows tensors; `native.build` knows compilers.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native.structs import Call, Step
from hf_paged.locks import usable_after_fork

WRITES_NEW_KV = True  # whether paged_attention takes the step's K/V too, and writes it
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# A sequence with at least this many new query rows a KV head goes to the matrix products of prefill.inc.c, others to
# attention.inc.c. About where their speeds cross, in fp32 and in bf16, after long prefixes and short ones.
_PROMPT_ROWS = 64
# What prefill.inc.c has buffers for: elements of a head, query heads a KV head.
_PROMPT_MAX_DIM, _PROMPT_MAX_GROUP = 512, 64
# Queries (of one sequence, or of several that share blocks) that read a chunk together, and their rows a KV head.
_MAX_ITEM_QUERIES = 16
_MAX_ITEM_ROWS = 64

_Strides = ctypes.c_int64 * 12
_NO_NEW_KV = (0, 0, 0, 0, _Strides())
_local = threading.local()
_drawing = usable_after_fork(threading.Lock())


def is_available() -> bool:
    """Whether this process has the kernels. The first question of a machine compiles them, and waits."""
    return native_build.library() is not None


def status() -> str:
    """One line for people: which CPU kernels this process has, or why it has none."""
    return native_build.status()


def supports(dtype: torch.dtype) -> bool:
    """Whether attention and writes have code for the dtype on this machine (block copies have, for any)."""
    return dtype in (torch.float32, torch.bfloat16) or (dtype == torch.float16 and bool(_library().hfp_has_f16()))


def _library() -> ctypes.CDLL:
    library = native_build.library()
    if library is None:
        raise RuntimeError(f"impl='native': {native_build.status()}; `hf-paged build` compiles them")
    return library


class _Plan:
    """The work items of one step for one window: made once, used by all layers of the group."""

    __slots__ = ("_memory", "handle", "prompts", "workspace")

    def __init__(
        self,
        metadata: AttentionMetadata,
        shape: tuple[int, ...],
        share: bool,
    ) -> None:
        """shape: block size, window, attention chunk (0 = none), query heads a KV head, elements of a head, blocks of
        the cache, rows of the query. Raises ValueError where an index of the step is out of bounds."""
        library = _library()
        block_size, window, chunk_size, group, dim = shape[:5]
        query_lens = np.diff(metadata.query_start_loc.numpy())
        long = query_lens * group >= _PROMPT_ROWS
        # A single new token is a decode step, however many heads it has.
        long &= (query_lens > 1) & (group <= _PROMPT_MAX_GROUP and dim <= _PROMPT_MAX_DIM)
        mine = np.ascontiguousarray((~long).nonzero()[0], dtype=np.int32)
        self.prompts = np.ascontiguousarray(long.nonzero()[0], dtype=np.int32) if long.any() else None
        tables = metadata.block_tables
        step = Step(
            tables.data_ptr(),
            metadata.seq_lens.data_ptr(),
            metadata.query_start_loc.data_ptr(),
            mine.ctypes.data,
            tables.stride(0),
            len(mine),
            block_size,
            window,
            chunk_size,
            max(1, min(_MAX_ITEM_QUERIES, _MAX_ITEM_ROWS // group)),
            share,
        )
        num_blocks, num_rows = shape[5:]
        fault = library.hfp_check(ctypes.byref(step), len(query_lens), tables.shape[1], num_blocks, num_rows)
        if fault:
            what = ("the query rows", "the length", "a block id")[fault % 4 - 1]
            raise ValueError(f"{what} of sequence {fault // 4} is out of bounds")
        # A tensor's memory, which is freed without running Python: Ctrl-C in a finalizer would be lost.
        self._memory = torch.empty(library.hfp_plan_bytes(ctypes.byref(step)), dtype=torch.uint8)
        self.handle = self._memory.data_ptr()
        library.hfp_plan(self.handle, ctypes.byref(step))
        self.workspace: dict[tuple[int, ...], int] = {}  # bytes by shape

    def counts(self) -> tuple[int, int, int, int]:
        """Work items, queries in them, queries with several chunks, partial results."""
        counts = (ctypes.c_int64 * 4)()
        _library().hfp_plan_counts(self.handle, counts)
        return tuple(counts)


def workspace(num_bytes: int) -> int:
    """Address of memory, aligned to 64 bytes, that the next call of this thread may overwrite."""
    buffer: torch.Tensor | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.numel() < num_bytes:
        buffer = _local.buffer = torch.empty(num_bytes + num_bytes // 2, dtype=torch.uint8)
    return buffer.data_ptr()


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    share: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `ops.paged_attention`. `share`: read blocks that several sequences hold once for all of them."""
    dtype = query.dtype
    if not (dtype == key_cache.dtype == value_cache.dtype) or dtype not in _DTYPES:
        raise ValueError(
            f"impl='native' needs query and caches of one dtype, fp32, bf16 or fp16; these are {dtype}, "
            f"{key_cache.dtype} and {value_cache.dtype}"
        )
    if out is None:
        out = torch.empty((*query.shape[:2], value_cache.shape[3]), dtype=dtype)
    lse = torch.full(query.shape[:2], -torch.inf) if return_lse else None
    if query.stride(2) != 1:
        query = query.contiguous()
    target = out if out.stride(2) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    if sinks is not None:
        sinks = sinks.to(torch.float32).contiguous()
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.to(torch.float32).contiguous()
    call, plan, num_bytes = attention_call(
        query, key_cache, value_cache, metadata, target, key=key, value=value, sliding_window=sliding_window,
        chunk_size=chunk_size, sinks=sinks, alibi_slopes=alibi_slopes, lse=lse, share=share,
    )  # fmt: skip
    call.workspace = workspace(num_bytes)
    library, address = _library(), ctypes.byref(call)
    failed = library.hfp_attention(address, _DTYPES[dtype], scale, softcap or 0.0)
    if plan.prompts is not None:
        failed |= library.hfp_prefill(
            address, _DTYPES[dtype], scale, softcap or 0.0, metadata.seq_lens.data_ptr(),
            metadata.query_start_loc.data_ptr(), plan.prompts.ctypes.data, len(plan.prompts),
        )  # fmt: skip
    if failed:
        raise ValueError(f"impl='native': this machine has no conversion for {dtype}; use impl='torch'")
    if target is not out:
        out.copy_(target)
    if lse is not None:
        return out, lse
    return out


def attention_call(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    out: torch.Tensor,
    *,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    share: bool = True,
) -> tuple[Call, _Plan, int]:
    """What the kernels want to know of an attention, the step's plan for it, and how many bytes of workspace it takes,
    whose address the caller puts in. All as for `ops.paged_attention`; last dimensions contiguous, floats fp32."""
    library = _library()
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, v_head_dim = value_cache.shape
    window, chunk = sliding_window or 0, chunk_size or 0
    group = num_heads // num_kv_heads
    plan_shape = (block_size, window, chunk, group, max(head_dim, v_head_dim), num_blocks, num_tokens)
    plan_key = ("native", plan_shape, share)
    plan: _Plan | None = metadata.scratch.get(plan_key)
    if plan is None:
        plan = metadata.scratch[plan_key] = _Plan(metadata, plan_shape, share)
    new_kv: tuple[Any, ...] = _NO_NEW_KV
    slots = None
    if key is not None and value is not None:
        key, value, slots = _as_in(key_cache, key), _as_in(value_cache, value), metadata.slot_mapping.contiguous()
        strides = _write_strides(key, value, key_cache, value_cache)
        new_kv = (key.data_ptr(), value.data_ptr(), slots.data_ptr(), num_tokens, strides)
    threads = torch.get_num_threads()
    shape = (num_heads, num_kv_heads, head_dim, v_head_dim, threads)
    num_bytes = plan.workspace.get(shape)
    if num_bytes is None:
        num_bytes = library.hfp_workspace_bytes(plan.handle, *shape)
        if plan.prompts is not None:
            num_bytes = max(num_bytes, library.hfp_prefill_bytes(head_dim, v_head_dim, threads))
        plan.workspace[shape] = num_bytes
    k_strides, v_strides = key_cache.stride(), value_cache.stride()
    call = Call(
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        metadata.block_tables.data_ptr(),
        plan.handle,
        0,
        query.stride(0),
        query.stride(1),
        *k_strides[:3],
        *v_strides[:3],
        out.stride(0),
        out.stride(1),
        metadata.block_tables.stride(0),
        num_heads,
        num_kv_heads,
        head_dim,
        v_head_dim,
        block_size,
        window,
        chunk,
        threads,
        *new_kv,
    )
    call.held = key, value, slots
    return call, plan, num_bytes


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `ops.write_kv`."""
    key, value, slots = _as_in(key_cache, key), _as_in(value_cache, value), slot_mapping.contiguous()
    _library().hfp_write_kv(
        key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), slots.data_ptr(),
        *key.shape[:2], key_cache.shape[1], _write_strides(key, value, key_cache, value_cache),
        torch.get_num_threads(),
    )  # fmt: skip


def _as_in(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x in the dtype of the cache, its last dimension contiguous."""
    if x.dtype != cache.dtype:
        x = x.to(cache.dtype)
    return x if x.stride(2) == 1 else x.contiguous()


def _write_strides(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> ctypes.Array[ctypes.c_int64]:
    """See `hfp_write_kv`."""
    k, v, kc, vc = key.stride(), value.stride(), key_cache.stride(), value_cache.stride()
    a, b = key_cache.element_size(), value_cache.element_size()
    return _Strides(
        k[0] * a, k[1] * a, key.shape[2] * a, v[0] * b, v[1] * b, value.shape[2] * b,
        kc[0] * a, kc[1] * a, kc[2] * a, vc[0] * b, vc[1] * b, vc[2] * b,
    )  # fmt: skip


def copy_blocks(caches: list[torch.Tensor], copies: torch.Tensor, into: list[torch.Tensor]) -> None:
    """See `ops.copy_blocks`."""
    table: list[int] = []
    for source, target in zip(caches, into):
        size = source.element_size()
        blocks = source.stride(0) * size, target.stride(0) * size
        first, run = _runs(source, target)
        for from_, to in first:
            table += (source.data_ptr() + from_ * size, blocks[0], target.data_ptr() + to * size, blocks[1], run * size)
    copies = copies.contiguous()
    _library().hfp_copy_blocks(
        (ctypes.c_int64 * len(table))(*table),
        len(table) // 5,
        copies.data_ptr(),
        copies.shape[0],
        torch.get_num_threads(),
    )


def _runs(source: torch.Tensor, target: torch.Tensor) -> tuple[list[tuple[int, int]], int]:
    """The parts of a block that lie in one piece in both tensors: where they begin in each, and how long they are; in
    elements. One, as a rule."""
    run, dim = 1, source.ndim - 1
    while dim > 0 and (source.shape[dim] == 1 or source.stride(dim) == target.stride(dim) == run):
        run *= source.shape[dim]
        dim -= 1
    first = [(0, 0)]
    for d in range(1, dim + 1):
        steps = source.stride(d), target.stride(d)
        first = [(a + i * steps[0], b + i * steps[1]) for a, b in first for i in range(source.shape[d])]
    return first, run


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [num_rows, vocab] of a supported dtype, last dimension contiguous -> the first of the largest int64
    [num_rows], its log-probability fp32 [num_rows], NaN where the logits are. Two passes over each row, no copies.
    """
    rows, vocab = logits.shape
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    _library().hfp_greedy(
        logits.data_ptr(), _DTYPES[logits.dtype], logits.stride(0), rows, vocab, tokens.data_ptr(),
        logprobs.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return tokens, logprobs


def draw(probs: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """probs fp32 [num_rows, vocab], last dimension contiguous, a generator for each row -> tokens int64 [num_rows].

    They are what `torch.multinomial` draws from one row after the other, and the generators are moved on as by it.
    Draws are atomic among each other. A thread that draws from one of the generators with torch's own functions
    meanwhile may get the same numbers.
    """
    rows, vocab = probs.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    with _drawing:
        states = {generator: generator.get_state() for generator in generators}
        addresses = (ctypes.c_void_p * rows)(*(states[generator].data_ptr() for generator in generators))
        _library().hfp_draw(
            probs.data_ptr(), probs.stride(0), rows, vocab, addresses, len(states) == rows, tokens.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        for generator, state in states.items():
            generator.set_state(state)
    return tokens


def draw_top_p(
    scores: torch.Tensor, top_ps: Sequence[float], generators: Sequence[torch.Generator]
) -> tuple[torch.Tensor, dict[int, torch.Generator]]:
    """scores fp32 [num_rows, vocab], last dimension contiguous, top_p and a generator for each row -> tokens int64
    [num_rows], drawn from what transformers' TopPLogitsWarper keeps (at least one token).

    Also returns the rows whose token is arbitrary, because it depends on how torch orders equal scores and rounds: each
    with a generator that is what the row's own was before it. As for the rest, see `draw`.
    """
    rows, vocab = scores.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    removed = torch.tensor([1 - top_p for top_p in top_ps], dtype=torch.float32)
    threads = torch.get_num_threads()
    weights = torch.empty(threads, vocab)
    with _drawing:
        states = {generator: generator.get_state() for generator in generators}
        addresses = (ctypes.c_void_p * rows)(*(states[generator].data_ptr() for generator in generators))
        before = torch.empty(rows, _library().hfp_generator_bytes(), dtype=torch.uint8)
        _library().hfp_draw_top_p(
            scores.data_ptr(), scores.stride(0), rows, vocab, removed.data_ptr(), weights.data_ptr(), addresses,
            before.data_ptr(), len(states) == rows, tokens.data_ptr(), threads,
        )  # fmt: skip
        for generator, state in states.items():
            generator.set_state(state)
    undecided = {}
    for row in (tokens < 0).nonzero().flatten().tolist():
        state = states[generators[row]].clone()
        state[: before.shape[1]] = before[row]
        undecided[row] = torch.Generator()
        undecided[row].set_state(state)
    return tokens, undecided


@functools.cache
def draws_like_torch() -> bool:
    """Whether `draw` gives torch's tokens and leaves its generators as it does: both are torch internals."""
    probs = torch.softmax(torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)), dim=-1)
    mine, theirs = (torch.Generator().manual_seed(1) for _ in range(2))
    for generator in (mine, theirs):
        torch.rand(5, generator=generator)  # an odd number of words
    tokens = draw(probs, [mine] * len(probs))
    expected = [torch.multinomial(row, 1, generator=theirs).item() for row in probs]
    return tokens.tolist() == expected and mine.get_state().equal(theirs.get_state())
