"""Both CPU implementations of paged attention against the fp64 reference, with NaN in every slot nobody owns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Case, check, make_batch

IMPLS = ["torch", "native"]

DECODE = ((1, 1), (1, 17), (1, 16), (1, 300), (1, 131))
MIXED = ((1, 40), (5, 18), (70, 70), (33, 97), (300, 300), (90, 400), (2, 2), (1, 129))
EMPTY = ((1, 20), (0, 0), (3, 9), (0, 0), (1, 1), (0, 0))

SHAPES = [
    Case(DECODE, heads=(9, 3), head_dim=64),
    Case(DECODE, heads=(8, 2), head_dim=128),
    Case(DECODE, heads=(5, 1), head_dim=40),
    Case(DECODE, heads=(28, 4), head_dim=24),
    Case(DECODE, heads=(16, 1), head_dim=256),
    Case(DECODE, heads=(2, 2), head_dim=512),
    Case(DECODE, heads=(64, 1), head_dim=80),
    Case(DECODE, heads=(6, 2), head_dim=48, v_head_dim=32),
    Case(DECODE, heads=(6, 2), head_dim=16, v_head_dim=72),
    Case(DECODE, block_size=1),
    Case(DECODE, block_size=8),
    Case(DECODE, block_size=48),
    Case(DECODE, block_size=528),
    Case(DECODE, consecutive=True),
    Case(MIXED, heads=(9, 3), head_dim=64),
    Case(MIXED, heads=(4, 4), consecutive=True),
    Case(MIXED, heads=(8, 2), head_dim=48, v_head_dim=32, block_size=32),
    Case(((80, 80), (80, 80), (80, 80), (1, 7)), heads=(6, 2), head_dim=24, v_head_dim=40),
    Case(EMPTY),
    Case(((7, 7), (12, 60)), strided=True),
    Case(((1, 50), (1, 51), (1, 64), (1, 200)), shared=3),
    Case(((4, 150), (1, 151), (2, 164), (1, 300)), shared=9, heads=(8, 2)),
]
FEATURES = [
    {"sliding_window": 1},
    {"sliding_window": 20},
    {"sliding_window": 64},
    {"chunk_size": 24},
    {"softcap": 2.0},
    {"sinks": True},
    {"alibi": True},
    {"sliding_window": 33, "softcap": 5.0, "sinks": True},
    {"chunk_size": 64, "alibi": True, "sinks": True},
]


def _name(case: object) -> str:
    if isinstance(case, Case):
        plain = Case(case.lens)
        parts = [f"{k}={getattr(case, k)}" for k in case.__dataclass_fields__ if getattr(case, k) != getattr(plain, k)]
        return ",".join([f"{len(case.lens)}x{max(q for q, _ in case.lens)}", *parts]).replace(" ", "")
    return str(case)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("case", SHAPES, ids=_name)
def test_shapes(case: Case, dtype: torch.dtype, impl: str) -> None:
    check(make_batch(replace(case, dtype=dtype)), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lens", [DECODE, MIXED, EMPTY], ids=["decode", "mixed", "empty"])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_features(features: dict, lens: tuple, dtype: torch.dtype, impl: str) -> None:
    check(make_batch(Case(lens, heads=(6, 2), dtype=dtype, **features)), impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_out_is_used(impl: str) -> None:
    batch = make_batch(Case(MIXED))
    out = torch.full((batch.query.shape[0], 2, *batch.query.shape[1:]), 7.0)[:, 1]
    result = batch.run(impl, out=out)
    assert result.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, batch.run("reference"), atol=2e-5, rtol=2e-5)


NEIGHBOURS = [
    Case(DECODE, heads=(9, 3), head_dim=64),
    Case(MIXED, heads=(8, 2), head_dim=24),
    Case(MIXED, heads=(7, 1), head_dim=40, block_size=8, sliding_window=50),
    Case((*DECODE, (1, 2100), (1, 2000), (16, 2047)), heads=(8, 2), head_dim=64),
    Case(((4, 150), (1, 151), (2, 164), (1, 300)), shared=9, heads=(8, 2), softcap=3.0, sinks=True),
    Case(((300, 300), (90, 90), (300, 300), (90, 90), (90, 90), (300, 300)), heads=(8, 2), head_dim=64),
    Case(((1, 330), (1, 331), (1, 332), (1, 300), (1, 700)), shared=17, heads=(4, 1)),
]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", NEIGHBOURS, ids=_name)
def test_neighbours_do_not_matter(case: Case, dtype: torch.dtype, threads: int, impl: str) -> None:
    """Bit for bit: a sequence alone gives what it gives in company."""
    batch = make_batch(replace(case, dtype=dtype))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together, lse = batch.run(impl, return_lse=True)
        for seq in range(len(case.lens)):
            alone, lse_alone = batch.only([seq]).run(impl, return_lse=True)
            assert torch.equal(alone, together[batch.rows(seq)])
            assert torch.equal(lse_alone, lse[batch.rows(seq)])
        flipped = batch.only(list(reversed(range(len(case.lens))))).run(impl)
        first = batch.rows(0)
        assert torch.equal(flipped[flipped.shape[0] - (first.stop - first.start) :], together[first])
    finally:
        torch.set_num_threads(before)
