"""CUDA graphs without a device: a capture records every operation with its tensors, and a replay repeats them.

Like a CUDA graph, a replay runs no Python of the model, refers to tensors by their memory only, and writes every result
where the capture wrote it. The tapes do not cover streams, synchronisation and the launches of our kernels; the replay
of launches is tested in `tests/kernels/test_triton.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hf_paged.features.graphs import graph_inputs, graphs
from hf_paged.features.graphs.graph_inputs import StepCosts
from hf_paged.fused import overrides
from hf_paged.kernels import ops
from hf_paged.kernels.triton.launch import Launch
from hf_paged.model import state

_attention = ops.paged_attention
_tapes: list[Tape] = []  # captures in progress


class Tape(TorchDispatchMode):
    """Operations in their order, each with what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Callable[[], Any], Any]] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self.add(lambda: func(*args, **kwargs))

    def add(self, work: Callable[[], Any]) -> Any:
        result = work()
        self.entries.append((work, result))
        return result

    def replay(self) -> None:
        for work, result in self.entries:
            for old, new in zip(tree_leaves(result), tree_leaves(work()), strict=True):
                # A view, or what an operation in place returns, is there already.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapedGraphs:
    """Replaces `graphs.CudaGraphs`."""

    device_type = "cpu"
    captures = 0  # number of captures since `install`

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def warm_up(self, compute: Callable[[], None]) -> None:
        compute()

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        tape = Tape()
        _tapes.append(tape)
        try:
            with tape:
                compute()
        finally:
            _tapes.pop()
        TapedGraphs.captures += 1
        return tape.replay


def _taped_attention(*args: Any, **kwargs: Any) -> Any:
    """The CPU's kernels plan on the host, so they are recorded as one operation that plans again in every replay."""
    query, kv, metadata, *rest = args

    def work() -> Any:
        return _attention(query, kv, replace(metadata, scratch={}), *rest, **kwargs)

    with _disable_current_modes():
        return _tapes[-1].add(work) if _tapes else _attention(*args, **kwargs)


def as_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, recorded as one operation. It returns tensors, or a tuple of them."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return _tapes[-1].add(lambda: function(*args, **kwargs)) if _tapes else function(*args, **kwargs)

    return call


def record_launches(patch: pytest.MonkeyPatch) -> None:
    """From here on captures record the launches of our Triton kernels too, in triton's interpreter."""
    run = Launch.run

    def taped(self: Launch, device: torch.device) -> None:
        with _disable_current_modes():
            _tapes[-1].add(lambda: run(self, device)) if _tapes else run(self, device)

    patch.setattr(Launch, "run", taped)


def install(patch: pytest.MonkeyPatch, costs: StepCosts | None = None) -> None:
    """From here on engines capture decode steps on a CPU, and with `costs` also steps with prompts."""
    patch.setattr(graph_inputs, "COSTS", costs or StepCosts(launch_seconds=0))
    patch.setattr(graphs, "CudaGraphs", TapedGraphs)
    patch.setattr(ops, "paged_attention", _taped_attention)
    patch.setattr(TapedGraphs, "captures", 0)
    for native in ("native_layers", "native_experts", "layers_for_engine"):  # of a CPU: no operations of torch
        patch.setattr(overrides, native, lambda *_: None)
    # transformers asks, and leaves out what no graph can do.
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(_tapes))
    state.release()
