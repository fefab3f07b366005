"""What Triton's launcher gets from the attention of several layers: `python repeated.py` compares the launches that are
prepared by a step's first layer with those that are chosen for each layer.

Runs in a process of its own without TRITON_INTERPRET. A driver that does nothing takes the place of CUDA's.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import host_step

from hf_paged.kernels import ops
from hf_paged.kernels.metadata import REPEATABLE
from hf_paged.kernels.triton.launch import Launch
from hf_paged.kernels.triton.sampling import greedy
from tests.kernels.cases import Case, make_batch

CASES = {
    "lean": (((1, 1000), (1, 70)), {"shares": False}, {}),
    "shared": (((1, 1000), (1, 1070)), {"shares": True}, {}),
    "whole": (((1, 20), (1, 70)), {}, {}),
    "mixed": (((1, 1000), (40, 70)), {}, {}),
    "window": (((1, 1000), (1, 1000)), {}, {"sliding_window": 400, "softcap": 20.0}),
}


def compared(name: str) -> dict[str, Any]:
    """Three layers, each as it comes and then without what the first one has prepared.

    equal: whether the launcher gets the same arguments. bound: how many launches go through Triton's binder.
    """
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
        out = ops.paged_attention(query, *caches, metadata, key=key, value=value, **batch.options)
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
    """Greedy tokens of two steps, of rows that are not aligned to 16 bytes, and of more rows.

    args: whether the launcher gets the logits and the results of each call.
    """
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


if __name__ == "__main__":
    with ExitStack() as stack:
        for patch in host_step.launches():
            stack.enter_context(patch)
        for name in CASES:
            print(json.dumps(compared(name)))
        print(json.dumps(greedy_launches()))
