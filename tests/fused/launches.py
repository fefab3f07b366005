"""Counts the launches of a decode step on a CPU: `python launches.py [types]` prints a line for each native type and
enters it in `benchmarks/results/launches.json`; `--names` prints the launches of a layer instead.

now: in an engine, which places the weights of layers that read the same rows side by side; apart: in `generate`.

A launch is an operation of torch that is neither a view nor an allocation, or one of `fewer.OPERATIONS`; attention
counts as two (split and reduce) and a separate write of K and V as one. On a GPU a few operations take more launches
than one, such as `topk` and `sort`. DBRX loops over its experts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hf_paged.cache.memory import PagedMemory
from hf_paged.fused.gpu import model as fused_model
from hf_paged.fused.gpu.trace import ALLOCATIONS
from hf_paged.kernels import ops
from hf_paged.model.packed import PackedModel
from tests.fused import fewer

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "launches.json"
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm", "product"}


class Counter(TorchDispatchMode):
    """names: the launches so far. attentions: how many there were before each attention."""

    __module__ = "hf_paged.tests"  # as if it were ours: it must not change what is computed

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attentions: list[int] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if not func.is_view and name not in ALLOCATIONS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def layers(self) -> list[list[str]]:
        return [self.names[start:end] for start, end in zip(self.attentions, self.attentions[1:])]


def count(model: Any, *, fused: bool, packed: bool = False) -> list[list[str]]:
    """The launches between the attentions of a decode step of two sequences. packed: after `FusedParts.pack`."""
    memory, counter = PagedMemory(4, growable=True), Counter()
    attend = ops.paged_attention

    def attention(*args: Any, **kwargs: Any) -> Any:
        if args[4:5] not in ((), (None,)):
            counter.names.append("write_kv")
        counter.attentions.append(len(counter.names))
        counter.names += ["split", "reduce"]
        with _disable_current_modes():
            return attend(*args, **kwargs)

    def launch(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counter.names.append(function.__name__)
            with _disable_current_modes():
                return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        fewer.on_cpu(patch, by_torch=True)
        parts = fused_model.fused_parts(model) if fused else None
        if packed and parts is not None:
            parts.pack()
        step = PackedModel(model, memory, [] if parts is None else [parts])
        for length in (5, 1):
            memory.append([(0, length), (1, length)])
            metadata, positions = memory.step_metadata([0, 1], [length, length], model.device)
            ids = torch.arange(2 * length) + 7
            if length > 1:
                step.forward(ids, positions, metadata)
                continue
            patch.setattr(ops, "paged_attention", attention)
            for module, name in fewer.OPERATIONS:
                patch.setattr(module, name, launch(getattr(module, name)))
            with counter:
                step.forward(ids, positions, metadata)
    return counter.layers()


def mean(layers: list[list[str]]) -> float:
    return sum(map(len, layers)) / max(len(layers), 1)


def _numbers(model: Any) -> dict[str, Any]:
    eager, apart = (mean(count(model, fused=fused)) for fused in (False, True))
    now = count(model, fused=True, packed=True)
    with pytest.MonkeyPatch.context() as patch:
        fewer.on_cpu(patch, by_torch=True)
        found = fused_model.fused_parts(model)
    products = [[each for each in layer if each in PRODUCTS] for layer in now]
    numbers = {"eager": eager, "apart": apart, "now": mean(now), "products": mean(products)}
    parts = {} if found is None else dict(found.counts())
    return {**{key: round(value, 1) for key, value in numbers.items()}, "parts": parts}


def _enter(lines: dict[str, dict[str, Any]]) -> None:
    """Add the lines to the file, or replace those of these types."""
    table = json.loads(RESULTS.read_text()) | lines
    rows = [f" {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table)]
    RESULTS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def _main(args: list[str]) -> None:
    import warnings

    warnings.simplefilter("ignore")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils import logging

    import hf_paged
    from tests.architectures.tiny import tiny_model

    logging.set_verbosity_error()
    names = [arg for arg in args if arg != "--names"]
    for name in names or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            model = tiny_model(name)
            if not hf_paged.check(model).native:
                continue
        except Exception:  # a type that does not run here at all
            continue
        model = model.to(torch.bfloat16)
        if "--names" in args:
            print(name, *count(model, fused=True)[0])
            continue
        line = _numbers(model)
        print(name, json.dumps(line), flush=True)
        _enter({name: line})


if __name__ == "__main__":
    _main(sys.argv[1:])
