"""What the Triton kernels assume of memory: who sees which store. In triton's interpreter."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged.kernels.arguments import Attention, LayerKV
from hf_paged.kernels.triton import launch as triton_launch
from hf_paged.kernels.triton import ops as triton_ops
from hf_paged.kernels.triton import partition as triton_partition
from hf_paged.kernels.triton import split as triton_split
from hf_paged.kernels.triton.launch import Target
from tests.kernels.cases import Case, make_batch

pytestmark = pytest.mark.skipif(
    not triton_launch.INTERPRET or torch.cuda.is_available(), reason="needs triton's interpreter on a CPU"
)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "MAX_WHOLE_TILES", 0)
    monkeypatch.setattr(triton_partition, "MIN_TILES", 1)


def errors(monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], set[bytes]]:
    """The errors, and the different results, of a decode step whose programs combine its parts in several orders."""
    from tests.kernels.weak_memory import WeakMemory

    batch = make_batch(Case(((1, 300), (1, 190)), heads=(2, 1), head_dim=16))
    expected, found, results = batch.run("reference"), [], set()
    out = torch.empty_like(expected)
    partition, step = triton_ops.attention_launches(
        batch.query, LayerKV(batch.key_cache, batch.value_cache), replace(batch.metadata, shares=False),
        Attention(batch.options["scale"]), out, None, Target("cuda", 90, 3),
    )  # fmt: skip
    memory = WeakMemory(monkeypatch)
    partition.run(out.device)
    for seed in range(4):  # layers with one partition: the counters must be 0 again
        memory.seed(seed)
        step.run(out.device)
        found.append((out - expected).abs().nan_to_num(9.0).max().item())
        results.add(out.numpy().tobytes())
        out.fill_(torch.nan)
        assert not step.args["arrivals"].any()
    return found, results


@pytest.mark.usefixtures("split")
def test_parts_are_combined_when_all_of_them_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found, results = errors(monkeypatch)
    assert max(found) < 1e-5 and len(results) == 1


@pytest.mark.usefixtures("split")
def test_a_count_without_release_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = Path(triton_split.__file__).read_text()
    assert source.count('sem="acq_rel"') == 1
    path = tmp_path / "relaxed_split.py"
    path.write_text(source.replace('sem="acq_rel"', 'sem="relaxed"'))
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(triton_ops, "split_kernel", module.split_kernel)
    assert max(errors(monkeypatch)[0]) > 0.01


def test_new_memory_is_poisoned_in_these_tests() -> None:
    empty = [torch.empty(3), torch.empty_like(torch.ones(3)), torch.ones(3).new_empty(3)]
    assert all(each.isnan().all() for each in empty) and torch.empty(2, dtype=torch.int32).tolist() == [77, 77]
