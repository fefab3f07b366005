"""Compare paged kernels with memory bandwidth and with other kernels, all measured in one run.

    python benchmarks/kernels.py                                   # the GPU if there is one, else the CPU
    python benchmarks/kernels.py --device cpu --threads 1 2 --json benchmarks/results/kernels-cpu.json

The bandwidth limit is measured in the same run, as a sum over the bytes that a decode step has to read. On a GPU, calls
are replayed from a CUDA graph with a cold L2. On a CPU, the contenders of a case take turns, so that other load slows
all of them. Figures are medians of at least 50 calls. Other libraries (FlashInfer, flash-attn, vLLM's Triton kernel)
are measured if they can be imported. On a shared CPU, `--clock cpu` measures the CPU time of the process instead of
wall-clock time; with several threads that is the sum over the threads.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_paged.cache.kv_pool import KVPool
from hf_paged.cache.swap import HostPool
from hf_paged.kernels import ops
from hf_paged.kernels.arguments import Attention, LayerKV, NewKV
from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native import ops as native_ops

Call = Callable[[], Any]
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """lens: (query_len, seq_len) of each sequence. shared: number of leading tokens that all sequences share."""

    name: str
    lens: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    head_dim: int
    shared: int = 0

    @property
    def kv_elements(self) -> int:
        """Elements of K and V that the step has to read; shared blocks are counted once."""
        tokens = self.shared + sum(seq_len - self.shared for _, seq_len in self.lens)
        return 2 * tokens * self.heads[1] * self.head_dim

    @property
    def flops(self) -> int:
        """Floating-point operations of causal attention: a product and a sum each for scores and values."""
        pairs = sum(q * (s - q) + q * (q + 1) // 2 for q, s in self.lens)
        return 4 * pairs * self.heads[0] * self.head_dim

    @property
    def is_decode(self) -> bool:
        return all(q == 1 for q, _ in self.lens)


CPU_SHAPES = [
    Shape("decode 1x512", ((1, 512),), (9, 3), 64),
    Shape("decode 26x256", ((1, 256),) * 26, (9, 3), 64),
    Shape("decode 26 ragged, 16..512", tuple((1, 16 + 20 * i) for i in range(26)), (9, 3), 64),
    Shape("decode 8x2048", ((1, 2048),) * 8, (32, 8), 128),
    Shape("decode 64 samples of 512+64", ((1, 576),) * 64, (9, 3), 64, shared=512),
    Shape("prefill 1x256", ((256, 256),), (9, 3), 64),
    Shape("prefill 1x2048", ((2048, 2048),), (9, 3), 64),
    Shape("prefill 1x1024", ((1024, 1024),), (32, 8), 128),
    Shape("chunk 256 after 1024", ((256, 1280),), (9, 3), 64),
]
GPU_SHAPES = [
    *(Shape(f"decode 1x{s}", ((1, s),), (32, 8), 128) for s in (1024, 4096, 16384, 32768)),
    *(
        Shape(f"decode {n}x{s}", ((1, s),) * n, (32, 8), 128)
        for n, s in ((8, 4096), (8, 16384), (8, 32768), (128, 2048))
    ),
    Shape("decode 64x4096", ((1, 4096),) * 64, (32, 4), 128),
    Shape("decode ragged 1x128k + 255x1k", ((1, 131072), *((1, 1024),) * 255), (32, 8), 128),
    Shape("decode uniform, as many tokens", ((1, 1532),) * 256, (32, 8), 128),
    Shape("decode 4 samples of 32k+256", ((1, 33024),) * 4, (32, 8), 128, shared=32768),
    Shape("decode 16 samples of 32k+256", ((1, 33024),) * 16, (32, 8), 128, shared=32768),
    *(Shape(f"prefill 1x{s}", ((s, s),), (32, 8), 128) for s in (2048, 8192, 16384)),
    Shape("chunk 2048 after 14336", ((2048, 16384),), (32, 8), 128),
]


@dataclass
class Batch:
    """The tensors of one shape: a pool with permuted blocks, and the same K/V dense, padded [batch, heads, S, dim]."""

    shape: Shape
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata
    slots: torch.Tensor
    mask: torch.Tensor | None = None
    dense: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = field(default=None)  # type: ignore[assignment]
    new: NewKV | None = None

    @property
    def kv(self) -> LayerKV:
        return LayerKV(self.key_cache, self.value_cache)

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)


def make_batch(shape: Shape, dtype: torch.dtype, device: str) -> Batch:
    torch.manual_seed(0)
    shared = shape.shared // BLOCK_SIZE
    needed = [-(-seq_len // BLOCK_SIZE) for _, seq_len in shape.lens]
    total = shared + sum(n - shared for n in needed)
    ids = torch.randperm(total, dtype=torch.int32)
    table = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    at = shared
    for row, n in zip(table, needed):
        row[:shared] = ids[:shared]
        row[shared:n] = ids[at : at + n - shared]
        at += n - shared
    num_heads, num_kv_heads = shape.heads
    query_lens = torch.tensor([0] + [q for q, _ in shape.lens])
    seq_lens = torch.tensor([s for _, s in shape.lens])
    longest, most = int(seq_lens.max()), int(query_lens.max())
    caches = [torch.randn(total, BLOCK_SIZE, num_kv_heads, shape.head_dim, device=device).to(dtype) for _ in range(2)]
    query = torch.randn(int(query_lens.sum()), num_heads, shape.head_dim, device=device).to(dtype)
    position = torch.arange(longest).clamp(max=seq_lens[:, None] - 1)
    slots = table.long().gather(1, position // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE
    metadata = AttentionMetadata(
        block_tables=table.to(device),
        seq_lens=seq_lens.int().to(device),
        query_start_loc=query_lens.cumsum(0).int().to(device),
        slot_mapping=torch.cat([row[s - q : s] for row, (q, s) in zip(slots, shape.lens)]).to(device),
        max_query_len=most,
        max_seq_len=longest,
    )
    batch = Batch(shape, query, *caches, metadata, slots.to(device))
    if not shape.is_decode:  # what works on blocks also writes the step's K/V there
        batch.new = NewKV(*(cache.flatten(0, 1)[metadata.slot_mapping] for cache in caches))
    if len(set(shape.lens)) > 1 or (most > 1 and most != longest):
        q_pos = (seq_lens[:, None] - most + torch.arange(most))[:, :, None]
        visible = torch.arange(longest)[None, None] <= q_pos
        batch.mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)[:, None].to(device)
    if len({q for q, _ in shape.lens}) == 1 and len(shape.lens) * longest * num_kv_heads < 1 << 25:
        dense_query = query.view(len(needed), most, num_heads, -1).transpose(1, 2)
        dense = [c.flatten(0, 1)[batch.slots].transpose(1, 2).contiguous() for c in caches]
        batch.dense = (dense_query, *dense)  # type: ignore[assignment]
    return batch


# -- contenders -------------------------------------------------------------------------------------------------------


def contenders(batch: Batch, device: str, *, with_flex: bool) -> dict[str, Call]:
    """Everything that can compute this step on this machine, by name. with_flex: flex attention too, which is compiled
    for each shape."""
    calls: dict[str, Call] = {}
    impls = ["triton"] if device == "cuda" else (["native"] if native_ops.is_available() else []) + ["torch"]
    for impl in impls:
        calls[f"hf_paged {impl}"] = lambda impl=impl: ops.paged_attention(
            batch.query, batch.kv, batch.metadata, Attention(batch.scale), batch.new, impl=impl
        )
    if device == "cuda" and batch.shape.is_decode:  # a step's first layer makes the plan that its other layers use
        calls["hf_paged triton, first layer"] = lambda: ops.paged_attention(
            batch.query, batch.kv, replace(batch.metadata, scratch={}), Attention(batch.scale), impl="triton"
        )
    if batch.dense is not None:
        calls["SDPA, contiguous K/V"] = lambda: _sdpa(batch, *batch.dense)
        gathered = [
            torch.empty_like(c.flatten(0, 1)[batch.slots.flatten()]) for c in (batch.key_cache, batch.value_cache)
        ]

        def gather_and_sdpa(sdpa: Callable[..., torch.Tensor] = _sdpa) -> torch.Tensor:
            for cache, new in zip((batch.key_cache, batch.value_cache), batch.new or ()):
                cache.flatten(0, 1).index_copy_(0, batch.metadata.slot_mapping, new)
            for cache, target in zip((batch.key_cache, batch.value_cache), gathered):
                torch.index_select(cache.flatten(0, 1), 0, batch.slots.flatten(), out=target)
            k, v = (x.unflatten(0, batch.slots.shape).transpose(1, 2) for x in gathered)
            return sdpa(batch, batch.dense[0], k, v)

        calls["gather + SDPA"] = gather_and_sdpa
        if batch.shape.is_decode:
            calls["gather + masked SDPA"] = partial(gather_and_sdpa, _masked_sdpa)
        if with_flex and device == "cuda" and batch.mask is None:
            calls["flex attention, contiguous K/V"] = _flex(batch)
    if device == "cuda":
        for name, module, make in (
            ("FlashInfer", "flashinfer", _flashinfer),
            ("flash-attn", "flash_attn", _flash_attn),
            ("vLLM Triton", "vllm", _vllm_triton),
        ):
            if importlib.util.find_spec(module) is not None:
                calls[name] = make(batch)
    return calls


def _sdpa(batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """SDPA with its result in a model's layout: [num_tokens, num_heads, head_dim]."""
    attend = torch.nn.functional.scaled_dot_product_attention
    group = q.shape[1] // k.shape[1]
    if batch.shape.is_decode:  # the group's query heads as rows of one problem: SDPA's fastest form of GQA decode
        q = q.unflatten(1, (k.shape[1], group)).squeeze(3)
        return attend(q, k, v, attn_mask=batch.mask, scale=batch.scale).flatten(1, 2)
    causal = batch.mask is None
    out = attend(q, k, v, attn_mask=batch.mask, is_causal=causal, scale=batch.scale, enable_gqa=group > 1)
    return out.transpose(1, 2).flatten(0, 1)


def _masked_sdpa(batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """SDPA as a model calls it: with all query heads and a mask."""
    mask = q.new_zeros(len(q), 1, 1, k.shape[2]) if batch.mask is None else batch.mask
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(q, k, v, attn_mask=mask, scale=batch.scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


def _flex(batch: Batch) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = batch.dense
    compiled = torch.compile(flex_attention, dynamic=False)
    causal = None
    if not batch.shape.is_decode:
        causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device=q.device.type)
    return lambda: compiled(q, k, v, block_mask=causal, scale=batch.scale, enable_gqa=True)


def _flashinfer(batch: Batch) -> Call:
    import flashinfer

    m, shape = batch.metadata, batch.shape
    counts = (m.seq_lens + BLOCK_SIZE - 1) // BLOCK_SIZE
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    width = torch.arange(m.block_tables.shape[1], device=counts.device)
    indices = m.block_tables[width[None] < counts[:, None]]
    last = (m.seq_lens - 1) % BLOCK_SIZE + 1
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=counts.device)
    caches = (batch.key_cache, batch.value_cache)
    dtype = batch.query.dtype
    if shape.is_decode:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, *shape.heads, shape.head_dim, BLOCK_SIZE, q_data_type=dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            m.query_start_loc, indptr, indices, last, *shape.heads, shape.head_dim, BLOCK_SIZE, causal=True,
            q_data_type=dtype,
        )  # fmt: skip
    return lambda: wrapper.run(batch.query, caches)


def _flash_attn(batch: Batch) -> Call:
    """flash-attn on contiguous, packed K/V, because its paged path requires blocks of 256 tokens."""
    from flash_attn import flash_attn_varlen_func

    m = batch.metadata
    slots = torch.cat([row[:s] for row, (_, s) in zip(batch.slots, batch.shape.lens)])
    k, v = (c.flatten(0, 1)[slots] for c in (batch.key_cache, batch.value_cache))
    starts = torch.nn.functional.pad(m.seq_lens.cumsum(0), (1, 0)).int()
    return lambda: flash_attn_varlen_func(
        batch.query, k, v, m.query_start_loc, starts, m.max_query_len, m.max_seq_len, softmax_scale=batch.scale,
        causal=True,
    )  # fmt: skip


def _vllm_triton(batch: Batch) -> Call:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    m, out = batch.metadata, torch.empty_like(batch.query)
    heads, segments = batch.query.shape[1], 16
    device = batch.query.device
    rows = min(batch.query.shape[0], 4096)
    partial = torch.empty(rows, heads, segments, batch.shape.head_dim, dtype=torch.float32, device=device)
    sums = [torch.empty(rows, heads, segments, dtype=torch.float32, device=device) for _ in range(2)]
    return lambda: unified_attention(
        q=batch.query, k=batch.key_cache, v=batch.value_cache, out=out, cu_seqlens_q=m.query_start_loc,
        max_seqlen_q=m.max_query_len, seqused_k=m.seq_lens, max_seqlen_k=m.max_seq_len, softmax_scale=batch.scale,
        causal=True, window_size=(-1, -1), block_table=m.block_tables, softcap=0.0, q_descale=None, k_descale=None,
        v_descale=None, seq_threshold_3D=128 // batch.shape.heads[1], num_par_softmax_segments=segments,
        softmax_segm_output=partial, softmax_segm_max=sums[0], softmax_segm_expsum=sums[1],
    )  # fmt: skip


# -- timing -----------------------------------------------------------------------------------------------------------


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = time.perf_counter


def time_cpu(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Median seconds of each call. The calls take turns in both orders, so that each finds the caches of each other."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(3):
        for call in calls.values():
            call()
    for turn in range(repeats):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            start = clock()
            calls[name]()
            times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def time_gpu(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Median seconds of a CUDA graph's replay. Other data fills the L2 cache before each; it is read, not written, so
    that the replay does not wait for lines to be written back."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    others = torch.zeros(l2, dtype=torch.int32, device="cuda")  # four times the cache
    medians = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, stop in events:
            others.sum()
            start.record()
            graph.replay()
            stop.record()
        torch.cuda.synchronize()
        medians[name] = statistics.median(start.elapsed_time(stop) * 1e-3 for start, stop in events)
        del graph
    return medians


# -- cases ------------------------------------------------------------------------------------------------------------


def attention_rows(
    shape: Shape, dtype: torch.dtype, device: str, repeats: int, *, with_flex: bool
) -> list[dict[str, Any]]:
    batch = make_batch(shape, dtype, device)
    calls = contenders(batch, device, with_flex=with_flex)
    num_bytes = shape.kv_elements * batch.query.element_size()
    # A sequential read of the same number of bytes: the lower bound of a decode step.
    calls["read K/V once (sum)"] = lambda: (batch.key_cache.sum(), batch.value_cache.sum())
    impl = "torch" if device == "cpu" else "triton"
    expected = ops.paged_attention(batch.query, batch.kv, batch.metadata, Attention(batch.scale), impl=impl)
    failed: dict[str, str] = {}
    differs: dict[str, float] = {}  # largest difference, of contenders whose results are not close to ours
    for name, call in list(calls.items()):
        try:
            got = call()
        except (RuntimeError, ValueError, TypeError, AssertionError, ImportError) as error:
            if name.startswith("hf_paged"):
                raise
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}" if str(error) else repr(error)
            del calls[name]
            continue
        is_checked = name.startswith("hf_paged") or "SDPA" in name
        if is_checked and not torch.allclose(got.float(), expected.float(), atol=2e-2, rtol=2e-2):
            differs[name] = float((got.float() - expected.float()).abs().max())
    timed = time_cpu(calls, repeats) if device == "cpu" else time_gpu(calls, repeats)
    ceiling = timed["read K/V once (sum)"]
    rows = []
    for name, seconds in timed.items():
        row: dict[str, Any] = {"case": shape.name, "heads": f"{shape.heads[0]}:{shape.heads[1]} d{shape.head_dim}"}
        row |= {"dtype": str(dtype).removeprefix("torch."), "kernel": name, "us": round(seconds * 1e6, 1)}
        if shape.is_decode:
            row |= {"GB/s": round(num_bytes / seconds / 1e9, 1), "time / read": round(seconds / ceiling, 2)}
        elif not name.startswith("read"):
            row["TFLOP/s"] = round(shape.flops / seconds / 1e12, 3)
        best = timed.get("SDPA, contiguous K/V")
        if best is not None and name.startswith("hf_paged"):
            row["time / SDPA"] = round(seconds / best, 2)
        if name in differs:
            row["differs"] = differs[name]
        rows.append(row)
    return rows + [{"case": shape.name, "kernel": name, "failed": why} for name, why in failed.items()]


def memory_rows(dtype: torch.dtype, device: str, repeats: int) -> list[dict[str, Any]]:
    """write_kv and copy_blocks, compared with a plain copy of as many bytes."""
    impls = ["triton"] if device == "cuda" else (["native"] if native_ops.is_available() else []) + ["torch"]
    layers, blocks, heads, dim = 8, 512, 8, 128
    rows = []
    caches = [torch.randn(blocks, BLOCK_SIZE, heads, dim, device=device).to(dtype) for _ in range(2 * layers)]
    copies = torch.randperm(blocks)[:32].view(-1, 2).to(device)
    plain = torch.randn(2 * layers * len(copies), BLOCK_SIZE, heads, dim, device=device).to(dtype)
    cases: list[tuple[str, int, dict[str, Call]]] = []
    for tokens in (64, 4096):
        key, value = (torch.randn(tokens, heads, dim, device=device).to(dtype) for _ in range(2))
        slots = torch.randperm(blocks * BLOCK_SIZE)[:tokens].to(device)
        both, target = torch.cat([key, value]), torch.empty(2 * tokens, heads, dim, dtype=dtype, device=device)
        kv = LayerKV(*caches[:2])
        calls: dict[str, Call] = {
            f"hf_paged {i}": partial(ops.write_kv, NewKV(key, value), kv, slots, impl=i) for i in impls
        }
        calls["copy of as many bytes"] = lambda t=target, b=both: t.copy_(b)
        cases.append((f"write_kv, {tokens} tokens", 2 * both.nbytes, calls))
    target = torch.empty_like(plain)
    calls = {f"hf_paged {i}": lambda i=i: ops.copy_blocks(caches, copies, impl=i) for i in impls}
    calls["copy of as many bytes"] = lambda: target.copy_(plain)
    cases.append((f"copy_blocks, {len(copies)} blocks x {layers} layers", 2 * plain.nbytes, calls))
    for name, num_bytes, calls in cases:
        timed = time_cpu(calls, repeats) if device == "cpu" else time_gpu(calls, repeats)
        for kernel, seconds in timed.items():
            row: dict[str, Any] = {"case": name, "heads": f"{heads} d{dim}", "dtype": str(dtype).removeprefix("torch.")}
            rows.append(
                row | {"kernel": kernel, "us": round(seconds * 1e6, 1), "GB/s": round(num_bytes / seconds / 1e9, 1)}
            )
    return rows


def swap_rows(dtype: torch.dtype, device: str, repeats: int) -> list[dict[str, Any]]:
    """Blocks swapped out and in, compared with plain copies of as many bytes to the host and back; wall-clock time."""
    layers, blocks, heads, dim, moved = 16, 512, 8, 128, 256
    pool = KVPool(blocks, BLOCK_SIZE)
    like = torch.empty(1, heads, dim, dtype=dtype, device=device)
    for layer in range(layers):
        for tensor in pool.layer_for(layer, like, like).tensors:
            tensor.normal_()
    host_pool, ids = HostPool(pool, moved), torch.randperm(blocks)[:moved].tolist()
    plain = torch.empty(moved * pool.bytes_per_block, dtype=torch.uint8, device=device)
    host = torch.empty(plain.shape, dtype=torch.uint8, pin_memory=device == "cuda")

    def swap() -> None:
        host_pool.swap_out(list(zip(ids, range(moved))))
        host_pool.swap_in(list(zip(range(moved), ids)))

    def copy() -> None:
        host.copy_(plain, non_blocking=True)
        plain.copy_(host, non_blocking=True)

    def to_the_end(call: Call) -> Call:
        return (lambda: (call(), torch.cuda.synchronize())) if device == "cuda" else call

    timed = time_cpu({"hf_paged": to_the_end(swap), "copies of as many bytes": to_the_end(copy)}, repeats)
    case = {"case": f"swap out and in, {moved} blocks x {layers} layers", "heads": f"{heads} d{dim}"}
    case["dtype"] = str(dtype).removeprefix("torch.")
    return [
        case | {"kernel": name, "us": round(seconds * 1e6, 1), "GB/s": round(2 * plain.nbytes / seconds / 1e9, 1)}
        for name, seconds in timed.items()
    ]


def environment(device: str) -> dict[str, Any]:
    versions = {}
    for name in ("torch", "triton", "flashinfer-python", "flash-attn", "vllm"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device == "cuda":
        hardware = torch.cuda.get_device_name()
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        hardware = f"{models[0] if models else platform.processor()}, {len(models)} cores seen"
    return {
        "device": hardware,
        "versions": versions,
        "native": native_build.status() if device == "cpu" else None,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()], help="CPU threads")
    parser.add_argument(
        "--dtype", nargs="+", choices=["float32", "bfloat16", "float16"], help="default: CPU fp32, bf16"
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="CPU only")
    parser.add_argument("--without-flex", action="store_true", help="GPU only: leave out flex attention")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    global clock
    clock = CLOCKS[args.clock]
    device = args.device
    record = environment(device)
    print(json.dumps(record, indent=1))
    names = args.dtype or (["float32", "bfloat16"] if device == "cpu" else ["bfloat16"])
    shapes = [s for s in (CPU_SHAPES if device == "cpu" else GPU_SHAPES) if args.only in s.name]
    rows = []
    for threads in args.threads if device == "cpu" else [0]:
        if threads:
            torch.set_num_threads(threads)
        for dtype in (getattr(torch, name) for name in names):
            cases: list[Callable[[], list[dict[str, Any]]]] = [
                lambda s=shape, d=dtype: attention_rows(s, d, device, args.repeats, with_flex=not args.without_flex)
                for shape in shapes
            ]
            if not args.only or "write" in args.only or "copy" in args.only:
                cases.append(lambda d=dtype: memory_rows(d, device, args.repeats))
            if not args.only or "swap" in args.only:
                cases.append(lambda d=dtype: swap_rows(d, device, args.repeats))
            if not cases:
                raise SystemExit(f"no case has a name with {args.only!r}")
            for case in cases:
                for row in case():
                    if threads:
                        row["threads"] = threads
                    rows.append(row)
                    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")
    differing = [f"{row['kernel']}: {row['case']}, by {row['differs']:.3g}" for row in rows if "differs" in row]
    if differing:
        raise SystemExit("results differ from the expected ones: " + "; ".join(differing))


if __name__ == "__main__":
    main()
