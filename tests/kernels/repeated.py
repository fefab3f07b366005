"""What Triton's launcher gets from the attention of several layers: `python repeated.py` compares the launches that are
prepared by a step's first layer with those that are chosen for each layer.

Runs in a process of its own without TRITON_INTERPRET. A driver that does nothing takes the place of CUDA's.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import host_step

from hf_paged.fused.experts import Assignment, Gate, GateKind, Projection
from hf_paged.fused.gpu.kernels import experts, gate, norm, rotary
from hf_paged.fused.gpu.kernels import router as router_kernel
from hf_paged.fused.router import Router, RouterKind
from hf_paged.fused.rows import Norm, NormKind, RotaryKind
from hf_paged.kernels.metadata import REPEATABLE
from hf_paged.kernels.triton.launch import Launch, RowLaunches
from hf_paged.kernels.triton.sampling import greedy
from tests.kernels.cases import Case, attention_of, make_batch

CASES = {
    "lean": (((1, 1000), (1, 70)), {"shares": False}, {}), "shared": (((1, 1000), (1, 1070)), {"shares": True}, {}),
    "whole": (((1, 20), (1, 70)), {}, {}), "mixed": (((1, 1000), (40, 70)), {}, {}),
    "window": (((1, 1000), (1, 1000)), {}, {"sliding_window": 400, "softcap": 20.0}),
}  # fmt: skip


def compared(name: str) -> dict[str, Any]:
    """Three layers as they come and without what the first prepared: equal arguments, launches through binders."""
    lens, known, options = CASES[name]
    batch = make_batch(Case(lens, heads=(4, 2), head_dim=64, dtype=torch.bfloat16, **options))
    metadata = replace(batch.metadata, scratch={}, in_bounds=True, **known)
    launched: list[list[Any]] = []
    bound: list[int] = []
    run = Launch.run

    def recorded(self: host_step.Compiled, *args: Any) -> None:
        # The grid; after the stream, the kernel, its metadata and hooks: the kernel's arguments.
        launched.append([x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args[:3] + args[9:]])

    def counted(self: Launch, device: torch.device) -> Any:
        bound[-1] += 1
        return run(self, device)

    def attention(tensors: list[torch.Tensor]) -> list[list[Any]]:
        launched.clear()
        bound.append(0)
        query, *caches, key, value = tensors
        out = attention_of(query, *caches, metadata, key=key, value=value, **batch.options)
        return [["out" if x == out.data_ptr() else x for x in args] for args in launched]

    equal = []
    with mock.patch.object(host_step.Compiled, "run", recorded), mock.patch.object(Launch, "run", counted):
        for layer in range(3):
            # The queries of the last layer are not aligned to 16 bytes.
            memory = torch.empty(batch.query.numel() + 4, dtype=torch.bfloat16)[4 if layer == 2 else 0 :]
            query = memory[: batch.query.numel()].view(batch.query.shape)
            new = [torch.empty(len(query), 2, 64, dtype=torch.bfloat16) for _ in "kv"]
            tensors = [query, batch.key_cache.clone(), batch.value_cache.clone(), *new]
            as_it_comes = attention(tensors)
            prepared = metadata.scratch.pop(REPEATABLE)
            equal.append(as_it_comes[-len(launched) :] == attention(tensors) or layer == 0)
            metadata.scratch[REPEATABLE] = prepared
    return {"name": name, "equal": equal, "bound": bound[::2], "each": bound[1]}


def greedy_launches() -> dict[str, Any]:
    """Greedy tokens of two steps, of unaligned rows and of more. args: whether the launcher gets logits and results."""
    bound: list[int] = []
    launched: list[tuple[Any, ...]] = []
    run = Launch.run

    def counted(self: Launch, device: torch.device) -> Any:
        bound[-1] += 1
        return run(self, device)

    args = []
    memory = torch.empty(8, 40_000, dtype=torch.bfloat16)
    with (
        mock.patch.object(host_step.Compiled, "run", lambda self, *args: launched.append(args)),
        mock.patch.object(Launch, "run", counted),
    ):
        for logits in (memory[:4], memory[2:6], memory.view(-1)[4:160_004].view(4, -1), memory):
            bound.append(0)
            launched.clear()
            results = greedy(logits)
            pieces, best = launched
            args.append(any(x is logits for x in pieces) and all(any(x is each for x in best) for each in results))
    return {"name": "greedy", "bound": bound, "args": args}


def empty(*shape: int, aligned: bool = True, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    memory = torch.empty(math.prod(shape) + 4, dtype=dtype)
    return memory[0 if aligned else 4 :][: math.prod(shape)].view(shape)


def calls_of_norm() -> Iterator[Callable[[], Any]]:
    """Each differs from those before it in one thing; the second of two equal ones repeats the first one's launch."""
    weight, other, kind = empty(64), empty(64), NormKind(rounds_first=True)
    usual = Norm(weight, None, 1e-6, kind)
    for each in (
        usual, usual, Norm(other, None, 1e-6, kind), Norm(other, None, 1e-5, kind),
        Norm(weight, None, 1e-6, NormKind()), Norm(weight, other, 1e-6, kind), Norm(None, None, 1e-6, kind),
        Norm(empty(64, dtype=torch.float32), None, 1e-6, kind),
    ):  # fmt: skip
        yield partial(norm.add_norm, empty(8, 64), after=each)
    wide = empty(8, 128)
    for rows in (
        empty(9, 64), empty(1, 64), wide[:1, :64], wide[:, :64], empty(8, 64, aligned=False), empty(8, 32), wide,
    ):  # fmt: skip
        after = usual._replace(weight=weight[: rows.shape[1]] if rows.shape[1] < 64 else empty(rows.shape[1]))
        yield partial(norm.add_norm, rows, after=after)
        yield partial(norm.add_norm, rows, empty(*rows.shape), after=after)
    for options in (
        {"scale": 0.5}, {"scale": 0.25}, {"before": usual}, {"before": usual, "after": usual}, {"bias": other},
    ):  # fmt: skip
        yield partial(norm.add_norm, empty(8, 64), empty(8, 64), **options)


def calls_of_gate() -> Iterator[Callable[[], Any]]:
    both = empty(8, 128)
    for activation in ("silu", "silu", "gelu"):
        yield partial(gate.gated, empty(8, 64), empty(8, 64), activation)
    for rows in (both[:, :64], both[:1, :64], empty(3, 64), empty(8, 64, aligned=False), empty(8, 32), empty(8, 2048)):
        yield partial(gate.gated, rows, empty(*rows.shape), "silu")
        yield partial(gate.gated, empty(*rows.shape), rows, "silu")
        yield partial(gate.gated, rows, None, "silu")


def calls_of_rotary() -> Iterator[Callable[[], Any]]:
    usual: dict[str, Any] = {
        "tokens": 8, "heads": (4, 2), "dim": 32, "v_dim": 32, "blocks": 5, "block_size": 16, "angles": 32,
        "kind": RotaryKind(), "norms": (None, None), "packed": False, "writes": True, "aligned": True,
        "is_last": False, "factor": None, "is_complex": False,
    }  # fmt: skip
    of_heads = Norm(empty(32), None, 1e-6, NormKind())
    for changed in (
        {}, {}, {"tokens": 9}, {"tokens": 1}, {"packed": True}, {"packed": True, "tokens": 1}, {"heads": (8, 2)},
        {"heads": (4, 1)}, {"dim": 64}, {"v_dim": 64}, {"blocks": 9}, {"block_size": 32}, {"angles": 16}, {"angles": 0},
        {"kind": RotaryKind(is_interleaved=True)}, {"norms": (of_heads, of_heads)}, {"norms": (None, of_heads)},
        {"norms": (of_heads, of_heads._replace(eps=1e-5))},
        {"norms": (of_heads._replace(eps=1e-5), of_heads)}, {"writes": False}, {"writes": False, "tokens": 1},
        {"aligned": False}, {"writes": False, "packed": True},
        {"norms": (of_heads, of_heads), "is_last": True}, {"factor": torch.float32}, {"factor": torch.bfloat16},
        {"norms": (of_heads._replace(bias=empty(32)), of_heads)}, {"kind": RotaryKind(turns_back=True)},
        {"is_complex": True}, {"is_complex": True, "tokens": 1}, {"is_complex": True, "tokens": 9},
    ):  # fmt: skip
        yield _rotation(**usual | changed)


def _rotation(
    tokens: int, heads: tuple[int, int], dim: int, v_dim: int, blocks: int, block_size: int, angles: int,
    kind: RotaryKind, norms: Any, packed: bool, writes: bool, aligned: bool, is_last: bool,
    factor: torch.dtype | None, is_complex: bool,
) -> Callable[[], Any]:  # fmt: skip
    sizes = [heads[0] * dim, heads[1] * dim, heads[1] * v_dim]
    projected = empty(tokens, sum(sizes)).split(sizes, -1) if packed else [empty(tokens, n) for n in sizes]
    query, key, value = (x.unflatten(-1, (-1, d)) for x, d in zip(projected, (dim, dim, v_dim)))
    slots = empty(tokens, dtype=torch.int64)
    into = (empty(blocks, block_size, heads[1], dim), empty(blocks, block_size, heads[1], v_dim), slots)
    cos = empty(tokens, angles, aligned=aligned)
    given = empty(tokens, angles, dtype=torch.complex64) if is_complex else (cos, empty(tokens, angles))
    return partial(
        rotary.rotate, query, key, angles=given if angles else None, kind=kind, norms=norms, norm_is_last=is_last,
        factor=None if factor is None else empty(tokens, dtype=factor),
        value=value if writes else None, into=into if writes else None,
    )  # fmt: skip


def calls_of_experts() -> Iterator[Callable[[], Any]]:
    """Their pairs, products, and sums."""

    def index(num_tokens: int, top_k: int = 2) -> torch.Tensor:
        return empty(num_tokens, top_k, dtype=torch.int64)

    for tensor, num_experts in (
        (index(8), 4), (index(8), 4), (index(8), 8), (index(9), 4), (index(8).int(), 4), (index(8, 4), 4),
        (index(4, 4), 4),
    ):  # fmt: skip
        yield partial(experts.assign, tensor, num_experts)
    gate, pairs, starts = Gate(GateKind()), empty(16, dtype=torch.int32), empty(5, dtype=torch.int32)
    weight, usual = empty(4, 64, 64), Assignment(pairs, starts)
    for rows, assignment, weights, options in (
        (empty(8, 64), usual, (weight, None, False), {}),
        (empty(8, 64), usual, (empty(4, 64, 64), None, False), {}),
        (empty(4, 64), Assignment(pairs[:8], starts), (weight, None, False), {}),
        (empty(16, 64), usual, (weight, None, False), {}),
        (empty(8, 64), usual, (weight, None, True), {}),
        (empty(8, 64), usual, (weight, empty(4, 64), False), {}),
        (empty(8, 64), usual, (weight, None, False), {"size": "large"}),
        (empty(8, 64), usual, (weight, None, False), {"gate": gate}),
        (empty(8, 64), usual, (weight, None, False), {"gate": gate._replace(limit=2.0)}),
        (empty(8, 64), usual, (weight, None, False), {"gate": Gate(GateKind(is_interleaved=True))}),
        (empty(8, 64), usual, (empty(3, 64, 64), None, False), {}),
        (empty(8, 64), usual, (empty(4, 32, 64), None, False), {}),
        (empty(8, 32), usual, (empty(4, 64, 32), None, False), {}),
        (empty(8, 64, aligned=False), usual, (weight, None, False), {}),
    ):
        yield partial(experts.product, rows, assignment, Projection(*weights), **options)
    for num_tokens, top_k, size in ((8, 2, 64), (7, 2, 64), (1, 2, 64), (4, 4, 64), (8, 2, 32)):
        yield partial(experts.combine, empty(num_tokens * top_k, size), empty(num_tokens, top_k))
    yield partial(experts.combine, empty(16, 64), empty(8, 2, dtype=torch.float32))


def calls_of_router() -> Iterator[Callable[[], Any]]:
    usual, bias = Router(RouterKind(), 2), empty(8, dtype=torch.float32)
    for logits, tensor, router, dtype in (
        (empty(8, 8), None, usual, torch.float32), (empty(5, 8), None, usual, torch.float32),
        (empty(8, 8), bias, usual, torch.float32), (empty(8, 8), bias.half(), usual, torch.float32),
        (empty(8, 8), None, usual._replace(top_k=3), torch.float32), (empty(8, 16), None, usual, torch.float32),
        (empty(8, 8), None, usual._replace(scale=2.0), torch.float32), (empty(8, 8), None, usual, torch.bfloat16),
        (empty(8, 8), None, Router(RouterKind("sigmoid"), 2), torch.float32), (empty(1, 8), None, usual, torch.float32),
    ):  # fmt: skip
        yield partial(router_kernel.route, logits, tensor, router, dtype)


def kept_launches(module: Any, calls: Iterable[Callable[[], Any]]) -> dict[str, Any]:
    """Calls as they come, and without what earlier ones left. unequal: those with other arguments or another kernel."""
    launched: list[tuple[Any, ...]] = []
    found: dict[str, Any] = {"name": module.__name__.split(".")[-1], "unequal": [], "again": []}
    bound: list[int] = []
    run = Launch.run

    def recorded(self: host_step.Compiled, *args: Any) -> None:
        launched.append((id(self), *args[:3], *args[9:]))

    def named(args: tuple[Any, ...], results: Any) -> list[Any]:
        outs = [results] if isinstance(results, torch.Tensor) else results
        places = {x.data_ptr(): index for index, x in enumerate(outs) if x is not None}
        return [places.get(x.data_ptr(), x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in args]

    def counted(self: Launch, device: torch.device) -> Any:
        bound.append(1)
        return run(self, device)

    with mock.patch.object(host_step.Compiled, "run", recorded), mock.patch.object(Launch, "run", counted):
        for index, call in enumerate(calls):
            bound.clear()
            results = call()
            if not bound:
                found["again"].append(index)
            with mock.patch.object(module, "_launches", RowLaunches()):
                fresh = call()
            if named(launched[-2], results) != named(launched[-1], fresh):
                found["unequal"].append(index)
    return found


if __name__ == "__main__":
    with ExitStack() as stack:
        for patch in host_step.launches():
            stack.enter_context(patch)
        for name in CASES:
            print(json.dumps(compared(name)))
        print(json.dumps(greedy_launches()))
        for module, calls in (
            (norm, calls_of_norm()), (gate, calls_of_gate()), (rotary, calls_of_rotary()),
            (experts, calls_of_experts()), (router_kernel, calls_of_router()),
        ):  # fmt: skip
            print(json.dumps(kept_launches(module, calls)))
