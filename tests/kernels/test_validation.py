"""Malformed arguments of the operations raise ValueError; they never end the process."""

from __future__ import annotations

from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from hf_paged.kernels.native import build as native_build
from tests.kernels import malformed
from tests.kernels.cases import Case, attention_of, make_batch, write_new
from tests.kernels.on_triton import GPU, INTERPRETED


def run_malformed(impls: list[str], calls: Path) -> None:
    """In a fork, which a call may end. calls: the file for their names."""

    def run() -> None:
        with calls.open("w") as out, redirect_stdout(out):
            malformed.main(impls)

    child = get_context("fork").Process(target=run)
    child.start()
    child.join()
    lines = calls.read_text().splitlines() or ["nothing"]
    assert child.exitcode == 0, f"ended with {child.exitcode} at: {lines[-1]}"
    assert len(lines) > 100 * len(impls)


def test_malformed_arguments_raise(tmp_path: Path) -> None:
    impls = ["reference", "torch"]
    run_malformed([*impls, *["native"] * native_build.has_compiler(), "torch.ops"], tmp_path / "calls")


@pytest.mark.slow
@INTERPRETED
@pytest.mark.skipif(GPU, reason="the tensors are on the CPU")
def test_malformed_arguments_raise_in_triton(tmp_path: Path) -> None:
    run_malformed(["triton"], tmp_path / "calls")


@pytest.mark.parametrize("impl", ["reference", "torch", "native"])
def test_what_no_query_sees_may_be_anything(impl: str) -> None:
    """Entries of blocks that left the window, and entries after the last block, need not be valid block ids."""
    batch = make_batch(Case(((1, 200), (3, 160)), sliding_window=40))
    batch.metadata.block_tables[:, :6] = -7
    batch.metadata.block_tables[:, -1] = 10**6
    assert batch.run(impl).isfinite().all()


@pytest.mark.parametrize("impl", ["native"])
def test_writes_in_any_layout(impl: str) -> None:
    """An explicit implementation never falls back: it converts dtypes and handles strides itself."""
    slots = torch.tensor([5, -1, 17, 30])
    key = torch.randn(4, 3, 16, dtype=torch.float64)
    caches = [torch.zeros(4, 3, 8, 16).transpose(1, 2) for _ in range(2)]
    expected = [torch.zeros(4, 8, 3, 16) for _ in range(2)]
    write_new(key, key, *caches, slots, impl=impl)
    write_new(key, key, *expected, slots, impl="reference")
    assert all(map(torch.equal, caches, expected))


@pytest.mark.parametrize("name", ["max_short_query_len", "num_short_tokens"])
def test_the_bounds_of_short_queries_are_checked(name: str) -> None:
    batch = make_batch(Case(((40, 90), (3, 60))))
    for bound, is_valid in ((2, False), (3, True), (16, True)):
        metadata = replace(batch.metadata, **{name: bound})
        with nullcontext() if is_valid else pytest.raises(ValueError, match=f"{name}=2"):
            attention_of(batch.query, batch.key_cache, batch.value_cache, metadata, impl="torch", **batch.options)
