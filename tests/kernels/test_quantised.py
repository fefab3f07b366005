"""K/V in eight bits: all kernels against attention over the dequantised pool, with NaN in every unowned slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.quantised import DTYPES, NO_SCALES, Scales, Storage, dequantised, quantised
from tests.implementations import NATIVE
from tests.kernels.cases import Batch, Case, attention_of, exact, make_batch, stored, unwritten, write_new

STORED = [("int8", "int8"), ("fp8", "fp8"), ("int8", None), (None, "fp8"), ("fp8", "int8")]
DECODE, MIXED = (
    ((1, 1), (1, 17), (1, 16), (1, 300), (1, 131)),
    ((1, 40), (5, 18), (70, 70), (33, 97), (90, 400), (2, 2)),
)
SMALL = ((1, 17), (3, 20), (20, 37))  # for the interpreter
CASES: list[Any] = [
    Case(DECODE, heads=(9, 3), head_dim=64), Case(DECODE, heads=(4, 4), head_dim=128, block_size=8),
    Case(DECODE, heads=(5, 1), head_dim=40, v_head_dim=24, block_size=1), Case(MIXED, heads=(8, 2), head_dim=64),
    Case(MIXED, heads=(6, 2), head_dim=48, v_head_dim=72, block_size=32),
    Case(DECODE, sliding_window=20, softcap=5.0, sinks=True), Case(MIXED, chunk_size=24, alibi=True),
    Case(MIXED, sliding_window=33, sinks=True), Case(((1, 50), (1, 51), (1, 64), (1, 200)), shared=3),
]  # fmt: skip
INTERPRETED: list[Any] = [
    Case(SMALL, heads=(4, 2), head_dim=64),
    Case(SMALL, heads=(3, 1), head_dim=40, v_head_dim=24, block_size=8, sliding_window=9, softcap=5.0, sinks=True),
    Case(((1, 50), (1, 51)), shared=3, alibi=True),
    Case(((1, 300), (1, 5)), heads=(2, 1)),
]


def check(case: Case, names: tuple[str | None, str | None], impl: str) -> None:
    batch = stored(make_batch(case), names)
    expected, expected_lse = exact(batch).run("reference", return_lse=True)
    actual, lse = batch.run(impl, return_lse=True)
    tolerance = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 1.6e-2}[case.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse.double(), atol=tolerance, rtol=tolerance)
    check_written_first(make_batch(case), names, impl)


def check_written_first(plain: Batch, names: tuple[str | None, str | None], impl: str) -> None:
    """The step's own K/V is read back as it was written, not as it was given."""
    batch = stored(plain, names)
    whole = [x.clone() for x in (batch.key_cache.view(torch.uint8), batch.value_cache.view(torch.uint8))]
    wanted = [None if each is None else each.clone() for each in batch.options["scales"]]
    expected = batch.run(impl)
    _, new_kv = unwritten(plain)
    slots = batch.metadata.slot_mapping
    for cache, scales in zip((batch.key_cache, batch.value_cache), batch.options["scales"]):
        cache.flatten(0, 1).view(torch.uint8)[slots] = 1
        if scales is not None:
            scales.flatten(0, 1)[slots] = torch.nan
    torch.testing.assert_close(batch.run(impl, **new_kv), expected, atol=0, rtol=0)
    is_rounded_alike = (
        impl != "triton" or "fp8" not in names
    )  # the interpreter rounds to floats of eight bits otherwise
    if is_rounded_alike:
        assert torch.equal(batch.key_cache.view(torch.uint8), whole[0])
        assert torch.equal(batch.value_cache.view(torch.uint8), whole[1])
    for scales, own in zip(batch.options["scales"], wanted):
        if own is not None:
            torch.testing.assert_close(scales, own, atol=0, rtol=1e-6 if impl == "triton" else 0, equal_nan=True)


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("impl", ["native", "torch", "reference"])
def test_attention_over_the_dequantised_pool(impl: str, number: int) -> None:
    for case in CASES[number :: 5 if impl != "reference" else len(CASES)]:
        check(case, STORED[(number + CASES.index(case)) % 5], impl)


@NATIVE
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("names", STORED[:3], ids=str)
@pytest.mark.parametrize("case", CASES[:5], ids=range(5))
def test_half_precision(case: Case, names: tuple[str | None, str | None], dtype: torch.dtype) -> None:
    check(replace(case, dtype=dtype), names, "native")


FEW = ((1, 1), (1, 300), (2, 131), (3, 200), (5, 5))
SHORT: list[Any] = [
    Case(FEW, heads=(9, 3), head_dim=64),
    Case(FEW, heads=(8, 1), head_dim=128, block_size=8, sliding_window=50, softcap=5.0),
    Case((*FEW[:4], (3, 5)), heads=(20, 1), head_dim=64, v_head_dim=128, block_size=1, alibi=True),
    Case(FEW, heads=(4, 2), head_dim=192, v_head_dim=64, block_size=32, sinks=True),
    Case(FEW, heads=(14, 2), head_dim=64, alibi=True, sinks=True),
    Case(FEW, heads=(5, 1), head_dim=128, v_head_dim=64, block_size=17, sliding_window=140),
]


@NATIVE
@pytest.mark.parametrize("case", SHORT, ids=range(len(SHORT)))
def test_int8_in_few_tokens(case: Case) -> None:
    """Nearly exact before the result is rounded, alone as together with others."""
    case = replace(case, dtype=torch.bfloat16)
    check(case, ("int8", "int8"), "native")
    batch = stored(make_batch(case), ("int8", "int8"))
    expected, expected_lse = exact(batch).run("reference", return_lse=True)
    actual, lse = batch.run("native", return_lse=True)
    assert (actual.double() - expected).norm() <= 2**-9 * expected.norm()
    torch.testing.assert_close(lse.double(), expected_lse.double(), atol=2e-5, rtol=2e-6)
    for seq in range(len(case.lens)):
        assert torch.equal(batch.only([seq]).run("native"), actual[batch.rows(seq)])


LONG = ((80, 80), (90, 400), (81, 97))
PROMPTS: list[Any] = [
    Case(LONG, heads=(9, 3), head_dim=64),
    Case(LONG, heads=(8, 1), head_dim=128, block_size=8, sliding_window=50, softcap=5.0),
    Case(LONG, heads=(5, 1), head_dim=40, v_head_dim=72, block_size=17, alibi=True, sinks=True),
]


@NATIVE
@pytest.mark.covering(1)
@pytest.mark.parametrize("names", STORED, ids=str)
@pytest.mark.parametrize("case", PROMPTS, ids=range(len(PROMPTS)))
def test_eight_bits_in_prompts(case: Case, names: tuple[str | None, str | None]) -> None:
    """In bf16, weights are rounded to bf16 at most; scores are nearly exact. A sequence has the same bits alone."""
    case = replace(case, dtype=torch.bfloat16)
    check(case, names, "native")
    batch = stored(make_batch(case), names)
    expected, expected_lse = exact(batch).run("reference", return_lse=True)
    actual, lse = batch.run("native", return_lse=True)
    assert (actual.double() - expected).norm() <= 1.25 * 2**-9 * expected.norm()
    torch.testing.assert_close(lse.double(), expected_lse.double(), atol=2e-5, rtol=2e-6)
    batch.options["scales"] = Scales(*(None if each is None else each.clone() for each in batch.options["scales"]))
    # Kernels without AMX multiply a weight of 0 by a value, which may be NaN.
    for factor in (1e6, torch.nan) if "AMX" in native_build.status() else (1e6,):
        for scales in batch.options["scales"]:
            if scales is not None:
                scales.flatten(0, 1)[batch.metadata.slot_mapping[79]] *= factor  # the last token of the first prompt
        assert torch.equal(batch.run("native")[:79], actual[:79])
    for seq in range(len(case.lens)):
        assert torch.equal(batch.only([seq]).run("native")[:79], actual[batch.rows(seq)][:79])


def alone(batch: Batch, token: int) -> Batch:
    """A new token of the first sequence, as if those behind it had not come yet."""
    metadata = batch.metadata
    length = metadata.max_seq_len - metadata.max_query_len + token + 1
    own = AttentionMetadata(
        block_tables=metadata.block_tables[:1], seq_lens=torch.tensor([length], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32), slot_mapping=metadata.slot_mapping[token : token + 1],
        max_query_len=1, max_seq_len=length,
    )  # fmt: skip
    return Batch(batch.query[token : token + 1], batch.key_cache, batch.value_cache, own, batch.options)


@NATIVE
@pytest.mark.covering(1)
@pytest.mark.parametrize("heads", [(8, 2), (8, 8)], ids=str)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_what_a_query_does_not_see_changes_no_bit(name: str, heads: tuple[int, int]) -> None:
    """Later tokens of its prompt, and keys before its window that another sequence sees."""
    case = Case(((5, 105),), heads=heads, head_dim=128, dtype=torch.bfloat16)
    batch = stored(make_batch(case), (name, name))
    batch.options["scales"].value.flatten(0, 1)[batch.metadata.slot_mapping[-1]] *= 1e6
    together = batch.run("native")
    for token in range(4):
        assert torch.equal(alone(batch, token).run("native"), together[token : token + 1])
    case = replace(case, lens=((1, 330), (1, 400)), shared=20, sliding_window=150)
    batch = stored(make_batch(case), (name, name))
    batch.options["scales"].value[batch.metadata.block_tables[0, 12]] *= 1e6
    assert torch.equal(batch.only([1]).run("native"), batch.run("native")[1:])


@pytest.mark.parametrize(("number", "names"), [(0, 1), (1, 3), (2, 0), (3, 2)])
def test_triton(number: int, names: int) -> None:
    plain = make_batch(INTERPRETED[number])
    batch = stored(plain, STORED[names])
    torch.testing.assert_close(batch.run("triton").double(), exact(batch).run("reference"), atol=2e-6, rtol=2e-6)
    if "fp8" not in STORED[names]:
        check_written_first(plain, STORED[names], "triton")


def _round_trip(rows: torch.Tensor, dtype: torch.dtype, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    cache = torch.zeros(1, len(rows), *rows.shape[1:], dtype=dtype)
    scales = Scales(*(torch.zeros(cache.shape[:3]) for _ in range(2)))
    write_new(rows, rows, cache, cache.clone(), torch.arange(len(rows)), scales=scales, impl=impl)
    assert scales.key is not None
    return cache[0], scales.key[0]


@pytest.mark.parametrize("impl", ["native", "torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_rounding(dtype: torch.dtype, impl: str) -> None:
    """Every number that the dtype has reads back as itself; halves go to even; zeros, tiny and huge rows are kept."""
    numbers = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).float()
    numbers = torch.where(numbers.isnan(), 0.0, numbers) if dtype.is_floating_point else numbers.clamp(min=-127)
    rows = torch.stack([numbers, numbers * 2.0**-100, numbers * 2.0**90, numbers * 0, torch.randn(256)])[:, None]
    if dtype == torch.int8:  # the largest one is 127, so that the scale is 1
        rows[4, 0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    got, scales = _round_trip(rows, dtype, impl)
    values = dequantised(got, scales, torch.float32)
    torch.testing.assert_close(values[:4], rows[:4], atol=0, rtol=2e-7)
    expected, expected_scales = quantised(rows, dtype)
    if impl != "triton" or dtype == torch.int8:
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    torch.testing.assert_close(scales, expected_scales, atol=0, rtol=1e-7)
    assert quantised(rows[..., :0], dtype)[1].shape == (5, 1)  # no elements


@pytest.mark.parametrize("impl", ["native", "torch", "triton", "reference"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reads_back_as_nan(bad: float, impl: str) -> None:
    rows = torch.randn(2, 1, 33)
    rows[1, 0, 5] = bad
    got, scales = _round_trip(rows, torch.int8, impl)
    values = dequantised(got, scales, torch.float32)
    assert values[0].isfinite().all() and not values[1].isfinite().any()


def test_a_storage_is_exact_if_both_are() -> None:
    stored = [Storage(), Storage(torch.int8), Storage(None, torch.int8)]
    assert [each.is_exact for each in stored] == [True, False, False]


def test_scales_are_checked() -> None:
    batch = stored(make_batch(Case(DECODE)), ("int8", "int8"))
    scales = batch.options.pop("scales")
    for wrong in (NO_SCALES, Scales(scales.key[:, :, :1], scales.value), Scales(scales.key.double(), scales.value)):
        with pytest.raises(ValueError, match="scales"):
            batch.run("native", scales=wrong)
    plain = make_batch(Case(DECODE))
    with pytest.raises(ValueError, match=r"key_cache of torch\.float32 with scales"):
        plain.run("native", scales=scales)


def test_torch_compile_reads_and_writes_scales() -> None:
    plain = make_batch(Case(DECODE))
    batch = stored(plain, ("int8", "fp8"))
    _, new_kv = unwritten(plain)
    m, options = batch.metadata, batch.options
    expected = batch.run("native", **new_kv)
    before = [each.clone() for each in options["scales"]]
    for each in options["scales"]:
        each.flatten(0, 1)[m.slot_mapping] = torch.nan

    @torch.compile(fullgraph=True, backend="eager")
    def attend(query: torch.Tensor) -> torch.Tensor:
        result = attention_of(query, batch.key_cache, batch.value_cache, m, **options, **new_kv)
        assert isinstance(result, torch.Tensor)
        return result

    torch.testing.assert_close(attend(batch.query), expected, atol=0, rtol=0)
    for each, own in zip(options["scales"], before):
        assert torch.equal(each.nan_to_num(nan=7.0), own.nan_to_num(nan=7.0))
