"""Our kernels, compiled for a chip that is not present and executed instruction by instruction, against torch.

    TRITON_INTERPRET=0 python tests/ptx/room.py CHIP GROUP... [--only CASE...]

prints a line of JSON for each case: what it executed, what went wrong, and how far the result is from the reference's.
Runs in a process of its own, because Triton decides when it is imported whether kernels are interpreted. A case is a
function that yields `Ran` records; groups keep processes short.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from offline import CHIPS

from hf_paged.fused import experts as expert_definitions
from hf_paged.fused import router as router_definitions
from hf_paged.fused.experts import SCALED_SILU, Assignment, Gate, GateKind, Projection
from hf_paged.fused.gpu.kernels.experts import assign_launch, combine_launch, product_launch, tile_of
from hf_paged.fused.gpu.kernels.gate import gate_launch
from hf_paged.fused.gpu.kernels.norm import NormedSum, add_norm_launch
from hf_paged.fused.gpu.kernels.rotary import rotate_launch
from hf_paged.fused.gpu.kernels.router import route_launch
from hf_paged.fused.router import Router, RouterKind
from hf_paged.fused.rows import ACTIVATIONS, NORM_KINDS, Norm, NormKind, RotaryKind, normalise
from hf_paged.fused.rows import rotate as rotate_by_torch
from hf_paged.kernels import ops
from hf_paged.kernels.arguments import LayerKV, NewKV
from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.quantised import Scales
from hf_paged.kernels.triton import nucleus
from hf_paged.kernels.triton.launch import Launch
from hf_paged.kernels.triton.ops import attention_launches
from hf_paged.kernels.triton.sampling import greedy_launches
from hf_paged.kernels.triton.write import copy_blocks_launch, write_kv_launch
from tests.kernels.cases import Case, attention_options, make_batch
from tests.ptx.launches import run
from tests.ptx.memory import Fault

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {FP32: 2e-5, FP16: 3e-3, BF16: 1.6e-2}
BITS = 0.0  # a bound: the same bits


@dataclass
class Ran:
    """kernels: instructions executed, by kernel. unequal: elements of the results whose bits differ from the
    reference's, of `elements`. apart: the largest difference, as a share of the bound; above 1 it is a failure. notes:
    what the ISA forbids and is no fault of the machine."""

    case: str
    chip: str
    kernels: dict[str, int]
    elements: int = 0
    unequal: int = 0
    apart: float = 0.0
    fault: str | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Runner:
    """Runs the launches of one case, and compares its results."""

    def __init__(self, name: str, chip: str) -> None:
        self.ran, self.chip = Ran(name, chip, {}), chip
        self.target = replace(CHIPS[chip][0], num_cores=3)

    def launch(self, launch: Launch, *blank: torch.Tensor, **options: Any) -> None:
        name = launch.kernel.fn.__name__
        machine = run(launch, self.chip, blank=blank, **options)
        self.ran.kernels[name] = self.ran.kernels.get(name, 0) + machine.executed
        self.ran.notes = sorted({*self.ran.notes, *machine.notes})

    def compare(self, actual: torch.Tensor, expected: torch.Tensor, bound: float = BITS) -> None:
        """bound: of the difference, absolute and relative; or BITS."""
        assert actual.shape == expected.shape and actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
        both_nan = actual.isnan() & expected.isnan() if actual.is_floating_point() else torch.zeros(())
        differs = (actual != expected) & ~both_nan.bool()
        self.ran.elements += actual.numel()
        self.ran.unequal += int(differs.sum())
        if not differs.any():
            return
        gaps = (actual.double() - expected.double()).abs()[differs]
        limits = bound * (1 + expected.double().abs()[differs])
        share = float((gaps / limits).max()) if bound else float("inf")
        self.ran.apart = max(self.ran.apart, float("inf") if share != share else share)


Check = Callable[[Runner], None]
GROUPS: dict[str, dict[str, Check]] = {}


def case(group: str, name: str, *arguments: Any, **options: Any) -> Callable[..., Any]:
    """Enter the function, with these arguments after the runner, as a case."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        assert name not in GROUPS.setdefault(group, {}), name
        GROUPS[group][name] = lambda runner: function(runner, *arguments, **options)
        return function

    return enter


DECODES = ((1, 300), (1, 90), (1, 17))
PROMPTS = ((70, 150), (3, 40), (1, 200))
FP8, INT8 = torch.float8_e4m3fn, torch.int8


@case("decode", "heads of 64, a part for each program", lens=DECODES, heads=(8, 2), head_dim=64)
@case("decode", "heads of 128", lens=DECODES, heads=(4, 1), head_dim=128)
@case("decode", "heads of 256", lens=((1, 150), (1, 17)), heads=(2, 1), head_dim=256)
@case("decode", "heads of 80, fp16", lens=DECODES, heads=(4, 2), head_dim=80, dtype=FP16)
@case("decode", "fp32", lens=((1, 150), (1, 17)), heads=(2, 1), head_dim=32, dtype=FP32)
@case("decode", "seven query heads a group, blocks of 48", lens=DECODES, heads=(7, 1), head_dim=64, block_size=48)
@case("decode", "short: one program a sequence", lens=((1, 100), (1, 17)), heads=(4, 2), head_dim=64)
@case("features", "window, sinks", lens=DECODES, heads=(4, 2), head_dim=64, sliding_window=100, sinks=True)
@case("features", "chunks", lens=DECODES, heads=(4, 2), head_dim=64, chunk_size=128)
@case("features", "soft cap", lens=DECODES, heads=(4, 2), head_dim=64, softcap=20.0)
@case("features", "ALiBi", lens=DECODES, heads=(4, 2), head_dim=64, alibi=True)
@case("features", "values of 32, keys of 64", lens=DECODES, heads=(4, 2), head_dim=64, v_head_dim=32)
@case("features", "int8", lens=DECODES, heads=(4, 2), head_dim=64, stored=INT8)
@case("features", "fp8", lens=DECODES, heads=(4, 2), head_dim=64, stored=FP8)
@case(
    "shared",
    "three sequences share 512 keys",
    lens=((1, 700), (1, 600), (1, 530)),
    heads=(8, 2),
    head_dim=64,
    shared=32,
)
@case("shared", "ten samples share 256 keys, 64 rows", lens=((1, 270),) * 10, heads=(4, 1), head_dim=64, shared=16)
@case("shared", "verified drafts", lens=((5, 300), (9, 270)), heads=(8, 2), head_dim=64)
@case("prefill", "heads of 64", lens=PROMPTS, heads=(4, 2), head_dim=64)
@case("prefill", "heads of 128, fp16", lens=((70, 150),), heads=(2, 1), head_dim=128, dtype=FP16)
@case("prefill", "heads of 256", lens=((40, 60),), heads=(2, 1), head_dim=256)
@case("prefill", "heads of 80", lens=((70, 90),), heads=(2, 1), head_dim=80)
@case("prefill", "fp32", lens=((40, 60),), heads=(2, 1), head_dim=32, dtype=FP32)
@case("spans", "window, sinks", lens=((90, 200),), heads=(4, 2), head_dim=64, sliding_window=50, sinks=True)
@case("spans", "soft cap, ALiBi", lens=((70, 150),), heads=(2, 1), head_dim=64, softcap=20.0, alibi=True)
@case("spans", "spans that attend both ways", lens=((70, 150),), heads=(2, 1), head_dim=64, ahead=32)
@case("spans", "values of 32, keys of 64", lens=((70, 90),), heads=(2, 1), head_dim=64, v_head_dim=32)
@case("spans", "int8", lens=((70, 90),), heads=(2, 1), head_dim=64, stored=INT8)
@case("spans", "fp8", lens=((70, 90),), heads=(2, 1), head_dim=64, stored=FP8)
def attention(runner: Runner, *, dtype: torch.dtype = BF16, stored: torch.dtype | None = None, **options: Any) -> None:
    if stored == FP8 and runner.chip == "sm80":
        return  # sm80 has no conversion of e4m3; `ops` refuses fp8 there
    batch = make_batch(Case(dtype=dtype, **options))
    query, kv = batch.query, LayerKV(batch.key_cache, batch.value_cache)
    if stored is not None:
        kv = quantised(kv, stored)
    metadata = replace(batch.metadata, shares="shared" in options)
    asked = attention_options(**batch.options)
    out = torch.empty(*query.shape[:2], kv.value.shape[-1], dtype=dtype)
    lse = torch.empty(query.shape[:2])
    launches = attention_launches(query, kv, metadata, asked, out, lse, runner.target)
    poisoned = [each for each in (*kv[:2], *kv.scales) if each is not None and each.dtype not in (INT8, FP8)]
    for launch in launches:
        runner.launch(launch, out, lse, poisoned=poisoned)
    expected, expected_lse = ops.paged_attention(
        query, kv, replace(metadata, scratch={}), asked._replace(return_lse=True), impl="reference"
    )
    runner.compare(out, expected, BOUNDS[dtype])
    runner.compare(lse, expected_lse, BOUNDS[dtype])


@case("order", "sequences alone and together, bf16", BF16)
@case("order", "sequences alone and together, fp32, window", FP32, sliding_window=21)
def one_order(runner: Runner, dtype: torch.dtype, **options: Any) -> None:
    """The new tokens of a sequence alone, and the last one as in a decode step, have the bits that they have beside
    others."""
    batch = make_batch(Case(lens=PROMPTS, heads=(4, 2), head_dim=32, dtype=dtype, **options))
    kv, asked = LayerKV(batch.key_cache, batch.value_cache), attention_options(**batch.options)

    def computed(query: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        out, lse = torch.empty_like(query), torch.empty(query.shape[:2])
        for launch in attention_launches(query, kv, metadata, asked, out, lse, runner.target):
            runner.launch(launch, out, lse)
        # Sums too, in fp32: bf16 hides their last bits.
        return torch.cat([out.flatten(1).float(), lse], 1)

    whole = replace(batch.metadata, one_order=True)
    together, starts = computed(batch.query, whole), whole.query_start_loc.tolist()
    for number, (first, stop) in enumerate(pairwise(starts)):
        for start in {first, stop - 1}:
            own = slice(number, number + 1)
            alone = replace(
                whole, block_tables=whole.block_tables[own], seq_lens=whole.seq_lens[own], scratch={},
                query_start_loc=torch.tensor([0, stop - start], dtype=torch.int32), max_query_len=stop - start,
                slot_mapping=whole.slot_mapping[start:stop], num_short_tokens=None,
            )  # fmt: skip
            runner.compare(computed(batch.query[start:stop], alone), together[start:stop])


def quantised(kv: LayerKV, dtype: torch.dtype) -> LayerKV:
    """The caches in eight bits, by the reference. Slots that nobody owns have NaN as their scales."""
    shape = kv.key.shape[:3]
    new = LayerKV(
        torch.zeros(kv.key.shape, dtype=dtype), torch.zeros(kv.value.shape, dtype=dtype),
        Scales(torch.full(shape, torch.nan), torch.full(shape, torch.nan)),
    )  # fmt: skip
    owned = (~kv.key.isnan().any(-1).any(-1)).flatten().nonzero()[:, 0]
    rows = NewKV(kv.key.flatten(0, 1)[owned], kv.value.flatten(0, 1)[owned])
    ops.write_kv(rows, new, owned, impl="reference")
    return new


@case("write", "bf16, strided", BF16, BF16)
@case("write", "fp32", FP32, FP32)
@case("write", "int8 of bf16", BF16, INT8)
@case("write", "fp8 of fp16", FP16, FP8)
def write(runner: Runner, dtype: torch.dtype, stored: torch.dtype) -> None:
    if stored == FP8 and runner.chip == "sm80":
        return
    new = NewKV(*(torch.randn(5, 3, 2, 96).to(dtype)[:, 1] for _ in "kv"))
    slots, scales = torch.tensor([3, 17, -1, 63, 0]), stored in (INT8, FP8)
    caches = []
    for _ in range(2):
        of = Scales(torch.zeros(4, 16, 2), torch.zeros(4, 16, 2)) if scales else Scales(None, None)
        caches.append(LayerKV(*(torch.zeros(4, 16, 2, 96).to(stored) for _ in "kv"), of))
    runner.launch(write_kv_launch(new, caches[0], slots))
    ops.write_kv(new, caches[1], slots, impl="reference")
    for name in ("key", "value"):
        actual, expected = (getattr(each, name) for each in caches)
        runner.compare(actual.view(torch.uint8), expected.view(torch.uint8))
        if scales:
            runner.compare(*(getattr(each.scales, name) for each in caches))


@case("write", "copies of blocks")
def copies(runner: Runner) -> None:
    caches = [torch.randn(6, 16, 2, dim).to(BF16) for dim in (64, 24)]
    expected = [cache.clone() for cache in caches]
    pairs = torch.tensor([[1, 4], [0, 5]])
    for cache in expected:
        cache[pairs[:, 1]] = cache[pairs[:, 0]]
    runner.launch(copy_blocks_launch(caches, pairs, caches), also=caches)
    for actual, wanted in zip(caches, expected):
        runner.compare(actual, wanted)


SIZE, ROWS = 1024, 1024  # 2^20 elements


def integers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of whose squares fp32 has every sum, so that its order does not matter."""
    return torch.randint(-8, 9, shape).to(dtype)


@case("rounding", "norms before and after the sum, bf16", BF16)
@case("rounding", "norms before and after the sum, fp16", FP16)
def norms_round(runner: Runner, dtype: torch.dtype) -> None:
    """A million elements have torch's bits."""
    rows, residual = integers(ROWS, SIZE, dtype=dtype), torch.randn(ROWS, SIZE).to(dtype)
    kind = NormKind(rounds_first=True)
    before, after = (Norm(torch.randn(SIZE).to(dtype), None, 1e-6, kind) for _ in range(2))
    results = NormedSum(torch.empty_like(rows), torch.empty_like(rows))
    runner.launch(add_norm_launch(rows, residual, results, before, None), results.total, together=64)
    runner.compare(results.total, residual + normalise(rows, before))
    runner.launch(add_norm_launch(rows, None, results, None, after), results.out, together=64)
    runner.compare(results.out, normalise(rows, after))


@case("rounding", "rotary positions, bf16", BF16)
@case("rounding", "rotary positions, fp16", FP16)
def rotary_rounds(runner: Runner, dtype: torch.dtype) -> None:
    """A million elements have torch's bits."""
    num, heads, dim = 128, 56, 128
    query, key = torch.randn(num, heads, dim).to(dtype), torch.randn(num, 8, dim).to(dtype)
    angles = torch.rand(num, dim // 2).repeat(1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    outs = torch.empty_like(query), torch.empty_like(key), None
    launch = rotate_launch(query, key, None, outs, None, (cos, sin), RotaryKind())
    for part in range(launch.grid[1]):  # of one part all programs take the same way
        runner.launch(launch, *(outs[:2] if part == 0 else ()), seed=None, together=64, only=(None, part))
    for actual, heads_before in zip(outs[:2], (query, key)):
        assert actual is not None
        runner.compare(actual, rotate_by_torch(heads_before, cos, sin, RotaryKind()))


@case("rounding", "gates, bf16", BF16)
@case("rounding", "gates, fp16", FP16)
def gates_round(runner: Runner, dtype: torch.dtype) -> None:
    """A million elements have torch's bits."""
    gate, up = torch.randn(ROWS, SIZE).to(dtype), torch.randn(ROWS, SIZE).to(dtype)
    out = torch.empty_like(gate)
    runner.launch(gate_launch(gate, up, out, "silu"), out, together=64)
    runner.compare(out, torch.nn.functional.silu(gate) * up)


@case("rows", "norms")
def norms(runner: Runner) -> None:
    for dtype in (BF16, FP16, FP32):
        for kind in NORM_KINDS:
            rows, residual = torch.randn(3, 200).to(dtype), torch.randn(3, 200).to(dtype)
            norm = Norm(torch.randn(200).to(dtype), torch.randn(200).to(dtype), 1e-5, kind)
            results = NormedSum(torch.empty_like(rows), torch.empty_like(rows))
            runner.launch(add_norm_launch(rows, residual, results, None, norm), *results)
            runner.compare(results.total, rows + residual)
            runner.compare(results.out, normalise(rows + residual, norm), BOUNDS[dtype])


@case("rows", "activations")
def activations(runner: Runner) -> None:
    for name, function in ACTIVATIONS.items():
        for dtype in (BF16, FP32):
            gate, up = torch.randn(2, 300).to(dtype) * 3, torch.randn(2, 300).to(dtype)
            out = torch.empty_like(gate)
            runner.launch(gate_launch(gate, up, out, name), out)
            runner.compare(out, function(gate) * up, BOUNDS[dtype])


@case("rows", "rotary positions of a part, norms of heads, write to slots")
def rotary(runner: Runner) -> None:
    _rotary(runner, BF16, 80, RotaryKind(), is_last=False)
    _rotary(runner, FP32, 40, RotaryKind(True, True, True, False), is_last=True)
    _rotary(runner, FP16, 80, RotaryKind(turns_back=True), is_last=False)


def _rotary(runner: Runner, dtype: torch.dtype, turned: int, kind: RotaryKind, *, is_last: bool) -> None:
    # Values of 24: the next powers of two of both sizes differ.
    query, key, value = (torch.randn(3, heads, dims).to(dtype) for heads, dims in ((4, 80), (2, 80), (2, 24)))
    size = turned // 2 if kind.doubles else turned
    cos, sin = torch.randn(3, size).to(dtype), torch.randn(3, size).to(dtype)
    norm = Norm(torch.randn(80).to(dtype), None, 1e-5, NormKind(rounds_first=True))
    slots, out = torch.tensor([5, -1, 40]), torch.empty_like(query)
    caches = [torch.zeros(4, 16, 2, dims, dtype=dtype) for dims in (80, 24)]
    launch = rotate_launch(query, key, value, (out, *caches), slots, (cos, sin), kind, (norm, norm), is_last)  # type: ignore[arg-type]
    runner.launch(launch, out)

    def both(heads: torch.Tensor) -> torch.Tensor:
        heads = heads if is_last else normalise(heads, norm)
        heads = rotate_by_torch(heads, cos, sin, kind)
        return normalise(heads, norm) if is_last else heads

    runner.compare(out, both(query), BOUNDS[dtype])
    expected = [torch.zeros_like(cache) for cache in caches]
    for cache, new in zip(expected, (both(key), value)):
        cache.flatten(0, 1)[slots[[0, 2]]] = new[[0, 2]]
    runner.compare(caches[0], expected[0], BOUNDS[dtype])
    runner.compare(caches[1], expected[1])


@case("experts", "small tiles", "small", 5, False)
@case("experts", "large tiles, transposed weights", "large", 40, True)
@case("experts", "wide tiles", "wide", 150, False)
def experts(runner: Runner, size: str, num_tokens: int, is_transposed: bool) -> None:
    num_experts, hidden, inner, top = 4, 128, 128, 2
    index = torch.stack([torch.randperm(num_experts)[:top] for _ in range(num_tokens)])
    pairs = Assignment(
        torch.empty(num_tokens * top, dtype=torch.int32), torch.empty(num_experts + 1, dtype=torch.int32)
    )
    runner.launch(assign_launch(index, num_experts, pairs), *pairs)
    assigned = expert_definitions.assign(index, num_experts)
    runner.compare(pairs.starts, assigned.starts)
    runner.compare(pairs.pairs, assigned.pairs)
    rows = torch.randn(num_tokens, hidden).to(BF16)
    weight = (torch.randn(num_experts, *((hidden, 2 * inner) if is_transposed else (2 * inner, hidden))) / 11).to(BF16)
    projection = Projection(weight, None, is_transposed)
    gate = Gate(GateKind())
    inside = torch.empty(num_tokens * top, inner, dtype=BF16)
    tile = tile_of(runner.target, 2, size)
    runner.launch(product_launch(rows, pairs, projection, inside, gate, tile), inside)
    expected = expert_definitions.product(rows, pairs, projection, gate=gate)
    runner.compare(inside, expected, BOUNDS[BF16])
    for dtype in (BF16, FP32):
        weights, out = torch.rand(num_tokens, top).to(dtype), torch.empty(num_tokens, inner, dtype=BF16)
        runner.launch(combine_launch(inside, weights, out), out)
        runner.compare(out, expert_definitions.combine(inside, weights))


@case("experts", "interleaved gates with limits and biases")
def interleaved(runner: Runner) -> None:
    num_tokens, num_experts, hidden, inner = 5, 3, 64, 48
    index = torch.randint(0, num_experts, (num_tokens, 1))
    pairs = expert_definitions.assign(index, num_experts)
    rows, bias = torch.randn(num_tokens, hidden).to(BF16), torch.randn(num_experts, 2 * inner).to(BF16)
    projection = Projection((torch.randn(num_experts, hidden, 2 * inner) / 8).to(BF16), bias, True)
    gate = Gate(GateKind(SCALED_SILU, True, True, True), 1.702, 7.0)
    out = torch.empty(num_tokens, inner, dtype=BF16)
    runner.launch(product_launch(rows, pairs, projection, out, gate, tile_of(runner.target, 2, "small")), out)
    runner.compare(out, expert_definitions.product(rows, pairs, projection, gate=gate), 2 * BOUNDS[BF16])


@case("experts", "routers")
def routers(runner: Runner) -> None:
    for router, num_experts, has_bias, dtype in (
        (Router(RouterKind("softmax", "sum"), 8), 128, False, BF16),
        (Router(RouterKind("sigmoid", "sum", False, 8, 4), 8, 1e-20, 2.5), 64, True, FP32),
        (Router(RouterKind("none", "softmax"), 4), 32, False, FP32),
    ):
        logits = torch.randn(4, num_experts).to(dtype)
        bias = torch.randn(num_experts).to(dtype) if has_bias else None
        weights = torch.empty(4, router.top_k, dtype=dtype)
        index = torch.empty(4, router.top_k, dtype=torch.int64)
        runner.launch(route_launch(logits, bias, router, weights, index), weights, index)
        expected_weights, expected = router_definitions.route(logits, bias, router, dtype)
        runner.compare(index, expected)
        runner.compare(weights, expected_weights, BOUNDS[dtype])


@case("samples", "greedy")
def greedy(runner: Runner) -> None:
    logits = torch.randn(4, 9000).to(BF16) * 3
    logits[1, 100], logits[2], logits[3] = torch.nan, -torch.inf, torch.nan
    best, logprobs = torch.empty(4, dtype=torch.int64), torch.empty(4)
    scratch = [torch.empty(8), torch.empty(8), torch.empty(8, dtype=torch.int32)]
    for launch in greedy_launches(logits, best, logprobs, scratch):
        runner.launch(launch, best, logprobs)
    expected = logits.float().log_softmax(-1)
    runner.compare(best[:1], logits.float().argmax(-1)[:1])
    runner.compare(logprobs[:1], expected.amax(-1)[:1], 1e-4)
    assert logprobs[1:].isnan().all()
    # A token beyond the vocabulary would be an index outside of the embedding in the next step.
    assert ((best >= 0) & (best < 9000)).all()


@case("samples", "top-p", 2, 700)
@case("samples", "top-p, a row of two whole pieces", 1, 2 * nucleus.PIECE)
def top_p(runner: Runner, num_rows: int, vocab: int) -> None:
    scores = torch.randn(num_rows, vocab) * 3
    probabilities = scores.double().softmax(-1)
    ordered, order = probabilities.sort(stable=True)
    removed = torch.tensor([0.1, 0.6])[:num_rows]
    expected = torch.ones_like(scores, dtype=torch.bool).scatter(
        1, order, ordered.cumsum(-1) > removed[:, None].double()
    )
    scratch = nucleus.scratch_of(*scores.shape, scores.device)
    for launch in nucleus.nucleus_launches(scores, removed, scratch):
        runner.launch(launch)
    runner.compare(scores > -1e30, expected)


def ran(chip: str, groups: list[str], only: Sequence[str] = ()) -> Iterator[Ran]:
    for name, check in ((name, check) for g in groups for name, check in GROUPS[g].items() if not only or name in only):
        torch.manual_seed(0)
        runner, start = Runner(name, chip), time.perf_counter()
        try:
            check(runner)
        except Fault as fault:
            runner.ran.fault = str(fault)
        runner.ran.seconds = round(time.perf_counter() - start, 1)
        yield runner.ran


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", choices=["sm80", "sm90"])
    parser.add_argument("groups", nargs="+", choices=GROUPS)
    parser.add_argument("--only", nargs="+", default=[], help="the cases of these names")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for each in ran(args.chip, args.groups, args.only):
        print(json.dumps(asdict(each)), flush=True)


if __name__ == "__main__":
    main()
