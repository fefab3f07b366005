"""The native kernels: every instruction set that this machine runs, sharing, threads. test_build.py tests the build."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.kernels import ops
from hf_paged.kernels.arguments import LayerKV
from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native import ops as native_ops
from hf_paged.kernels.native import sampling as native_sampling
from hf_paged.kernels.native.toolchain import find_toolchain
from tests.implementations import NATIVE, compute_by
from tests.kernels.cases import Case, attention_options, check, make_batch

pytestmark = NATIVE

MIXED = ((1, 1), (1, 300), (5, 18), (70, 70), (1, 129), (0, 0), (33, 97))


# The name of each target, and the CPU flag that it requires.
TARGETS = {
    "x86-64": (b"128-bit vectors", "sse2"),
    "haswell": (b"AVX2", "avx2"),
    "skylake-avx512": (b"AVX-512", "avx512vl"),
}


def _machine_runs(target: str) -> bool:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return platform.machine() == "x86_64" and TARGETS[target][1] in flags.split()


# Each compiles the kernels. They have other widths of vectors, or differ in single instructions.
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_other_instruction_sets(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not _machine_runs(target):
        pytest.skip(f"this machine does not run {target} code")
    toolchain = replace(find_toolchain(), target=(f"-march={target}", "-O0"))  # quick to compile
    library = native_build.load(native_build.compile_library(toolchain, tmp_path))
    assert library.hfp_target() == TARGETS[target][0]
    monkeypatch.setattr(native_build, "library", lambda: library)
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if library.hfp_has_f16() else [])
    for dtype in dtypes:
        for case in (
            Case(MIXED, heads=(9, 3), head_dim=64, dtype=dtype),
            Case(MIXED, heads=(5, 1), head_dim=20, v_head_dim=12, block_size=6, dtype=dtype),
            Case(MIXED, heads=(4, 2), dtype=dtype, sliding_window=40, softcap=5.0, sinks=True, alibi=True),
        ):
            check(make_batch(case), "native")
        logits = torch.randn(3, 1003).to(dtype)
        tokens, logprobs = native_sampling.greedy(logits)
        assert tokens.tolist() == logits.float().argmax(-1).tolist()
        torch.testing.assert_close(logprobs, torch.log_softmax(logits.float(), -1).max(-1)[0], atol=1e-5, rtol=1e-5)
        rows, weight = torch.randn(9, 1030).to(dtype), torch.randn(27, 1030).to(dtype)
        layer = fused_ops.LinearWeight(weight, None, *weight.shape, is_packed=False)
        exact, bound = rows.double() @ weight.double().T, rows.double().abs() @ weight.double().abs().T
        error = (fused_ops.linear(layer, rows).double() - exact).abs()
        assert (error <= exact.abs() * torch.finfo(dtype).eps + bound * 2**-20).all()
        assert fused_ops.linear(layer, rows[4:5]).equal(fused_ops.linear(layer, rows)[4:5])
    if not library.hfp_has_f16():
        assert not native_ops.supports(torch.float16)
        with pytest.raises(ValueError, match="float16"):
            make_batch(Case(MIXED, dtype=torch.float16)).run("native")


@pytest.mark.parametrize(
    "case",
    [
        Case(MIXED, heads=(9, 3), head_dim=64),
        Case(MIXED, heads=(4, 4), head_dim=96, block_size=48, sinks=True),
        Case(MIXED, heads=(8, 2), head_dim=128, block_size=17, softcap=3.0),
        Case(MIXED, heads=(8, 1), head_dim=64, block_size=1, sliding_window=50),
        Case(MIXED, heads=(8, 1), head_dim=64, sliding_window=50, alibi=True),
        Case(MIXED, heads=(6, 2), head_dim=128, v_head_dim=64, chunk_size=100),
        Case(MIXED, heads=(20, 1), head_dim=64, v_head_dim=96, strided=True),
        Case(
            ((2, 150), (7, 40), (16, 200), (12, 140)), heads=(8, 2), head_dim=64, block_size=32, alibi=True, sinks=True
        ),
        Case(tuple((1, n) for n in (1, 15, 16, 17, 31, 32, 33, 127, 128, 129)), heads=(5, 1), head_dim=32),
        Case(MIXED, heads=(4, 2), head_dim=64, v_head_dim=48),
    ],
    ids=["group-3", "group-1", "group-4", "block-1", "group-8", "k-128-v-64", "group-20", "tokens", "ends", "v-48"],
)
def test_shapes_of_matrix_tiles(case: Case) -> None:
    """Head sizes that matrix units support, and one that they do not, with every feature of a call."""
    batch = make_batch(replace(case, dtype=torch.bfloat16))
    check(batch, "native")
    together = batch.run("native")
    for seq, (query_len, _) in enumerate(case.lens):
        if query_len:
            assert torch.equal(batch.only([seq]).run("native"), together[batch.rows(seq)])


@pytest.mark.smoke
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", [
    Case(tuple((1, 400 + i) for i in range(40)), heads=(9, 3), head_dim=64, shared=18),
    Case(((3, 390), (1, 500), (2, 385), (1, 384)), heads=(8, 2), shared=24),
    Case(((1, 390), (1, 500), (1, 385)), heads=(8, 2), shared=24, sliding_window=200),
    Case(((1, 390), (1, 500), (1, 385)), heads=(4, 1), shared=3, block_size=96),
    Case(((1, 390), (1, 500), (1, 385)), heads=(6, 6), head_dim=128, shared=24, alibi=True, softcap=8.0),
    Case(((1, 390), (1, 500), (1, 385)), heads=(8, 2), head_dim=96, v_head_dim=64, shared=24, sliding_window=300),
    Case(tuple((1, 400 + i) for i in range(9)), heads=(7, 1), head_dim=64, shared=20, block_size=17),
], ids=["samples", "verify", "window", "large-blocks", "group-1", "group-4", "group-7"])  # fmt: skip
def test_sharing_changes_no_bit(case: Case, dtype: torch.dtype) -> None:
    batch = make_batch(replace(case, dtype=dtype))
    check(batch, "native")
    table = batch.metadata.block_tables
    own = table.clamp(min=0).flatten().long()  # the same K/V, in blocks that no other sequence holds
    apart = LayerKV(batch.key_cache[own], batch.value_cache[own])
    own_table = torch.arange(len(own), dtype=torch.int32).view(table.shape).where(table >= 0, -1)
    results, plans = [], []
    for kv, tables in ((LayerKV(batch.key_cache, batch.value_cache), table), (apart, own_table)):
        metadata = replace(batch.metadata, block_tables=tables, scratch={})
        results.append(native_ops.paged_attention(batch.query, kv, metadata, attention_options(**batch.options)))
        plans += [plan.counts() for plan in metadata.scratch.values() if isinstance(plan, native_ops._Partition)]
    assert torch.equal(*results)
    shared, private = plans
    assert shared[0] < private[0], "nothing was shared"
    assert shared[1:] == private[1:]


def test_equal_ids_in_other_places_are_not_shared() -> None:
    """Two sequences with the same block at different positions, which no engine makes: each reads its own keys."""
    batch = make_batch(Case(((1, 256), (1, 256)), heads=(2, 1)))
    table = batch.metadata.block_tables.clone()
    table[1, :8], table[1, 8:16] = table[0, 8:16], table[0, :8].clone()
    batch.metadata = replace(batch.metadata, block_tables=table)
    check(batch, "native")


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("window", [None, 130])
def test_threads_and_neighbours_change_no_bit(threads: int, window: int | None, dtype: torch.dtype) -> None:
    lens = ((1, 700), (1, 5), (6, 300), (20, 20), (90, 90), (300, 900))
    batch = make_batch(Case(lens, heads=(6, 2), dtype=dtype, sliding_window=window))
    expected = batch.run("native")
    for seq in range(len(lens)):
        assert torch.equal(batch.only([seq]).run("native"), expected[batch.rows(seq)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(batch.run("native"), expected)
    finally:
        torch.set_num_threads(before)


def test_other_dtypes_are_refused_by_name_and_served_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(Case(MIXED))
    expected = batch.run("reference")
    double = replace(
        batch, query=batch.query.double(), key_cache=batch.key_cache.double(), value_cache=batch.value_cache.double()
    )
    with pytest.raises(ValueError, match="float64"):
        double.run("native")
    compute_by(monkeypatch, "native")
    torch.testing.assert_close(double.run(None).float(), expected, atol=1e-5, rtol=1e-5)


def test_without_kernels_the_torch_path_serves_and_native_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "library", lambda: None)
    monkeypatch.setattr(ops, "_default_impl", {})
    assert ops.default_impl("cpu") == "torch"
    batch = make_batch(Case(MIXED))
    torch.testing.assert_close(batch.run(None), batch.run("reference"), atol=2e-5, rtol=2e-5)
    with pytest.raises(RuntimeError, match="impl='native'"):
        batch.run("native")
