"""Both CPU implementations of paged attention against the fp64 reference, with NaN in every unowned slot."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged.kernels import gather, ops
from tests.kernels.cases import Case, attention_of, check, make_batch, unwritten, write_new


@pytest.fixture(params=["torch", "native"])
def impl(request: pytest.FixtureRequest) -> str:
    return request.param


DECODE = ((1, 1), (1, 17), (1, 16), (1, 300), (1, 131))
MIXED = ((1, 40), (5, 18), (70, 70), (33, 97), (300, 300), (90, 400), (2, 2), (1, 129))
EMPTY = ((1, 20), (0, 0), (3, 9), (0, 0), (1, 1), (0, 0))

SHAPES = [
    Case(DECODE, heads=(9, 3), head_dim=64), Case(DECODE, heads=(8, 2), head_dim=128),
    Case(DECODE, heads=(5, 1), head_dim=40), Case(DECODE, heads=(28, 4), head_dim=24),
    Case(DECODE, heads=(16, 1), head_dim=256), Case(DECODE, heads=(2, 2), head_dim=512),
    Case(DECODE, heads=(64, 1), head_dim=80), Case(DECODE, heads=(6, 2), head_dim=48, v_head_dim=32),
    Case(DECODE, heads=(6, 2), head_dim=16, v_head_dim=72), Case(DECODE, block_size=1), Case(DECODE, block_size=8),
    Case(DECODE, block_size=48), Case(DECODE, block_size=528), Case(DECODE, consecutive=True),
    Case(MIXED, heads=(9, 3), head_dim=64), Case(MIXED, heads=(4, 4), consecutive=True),
    Case(MIXED, heads=(8, 2), head_dim=48, v_head_dim=32, block_size=32),
    Case(((80, 80), (80, 80), (80, 80), (1, 7)), heads=(6, 2), head_dim=24, v_head_dim=40),
    Case(((700, 700), (130, 900), (3, 30)), heads=(9, 3), head_dim=64),
    Case(((260, 600),), heads=(2, 2), head_dim=512, block_size=17),
    Case(((70, 300), (5, 5)), heads=(64, 1), head_dim=80, v_head_dim=96, block_size=1),
    Case(((40, 290),), heads=(65, 1), head_dim=16), Case(((40, 290),), heads=(2, 2), head_dim=528, v_head_dim=512),
    Case(EMPTY), Case(((7, 7), (12, 60)), strided=True), Case(((1, 50), (1, 51), (1, 64), (1, 200)), shared=3),
    Case(((4, 150), (1, 151), (2, 164), (1, 300)), shared=9, heads=(8, 2)),
]  # fmt: skip
FEATURES: list[dict[str, Any]] = [
    {"sliding_window": 1}, {"sliding_window": 20}, {"sliding_window": 64}, {"chunk_size": 24}, {"softcap": 2.0},
    {"sinks": True}, {"alibi": True}, {"sliding_window": 33, "softcap": 5.0, "sinks": True},
    {"chunk_size": 64, "alibi": True, "sinks": True}, {"sliding_window": 270, "sinks": True}, {"ahead": 24},
    {"ahead": 70, "sliding_window": 20, "softcap": 5.0, "sinks": True}, {"ahead": 300, "alibi": True},
]  # fmt: skip


def _name(case: object) -> str:
    if isinstance(case, Case):
        plain = Case(case.lens)
        parts = [f"{k}={getattr(case, k)}" for k in case.__dataclass_fields__ if getattr(case, k) != getattr(plain, k)]
        return ",".join([f"{len(case.lens)}x{max(q for q, _ in case.lens)}", *parts]).replace(" ", "")
    return str(case)


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=map(_name, SHAPES))
def test_shapes(number: int, impl: str) -> None:
    dtype = (torch.float32, torch.float16, torch.bfloat16)[(number + (impl == "native")) % 3]
    check(make_batch(replace(SHAPES[number], dtype=dtype)), impl)


@pytest.mark.parametrize("number", range(len(FEATURES)), ids=map(str, FEATURES))
def test_features(number: int, impl: str) -> None:
    for lens, dtype in ((DECODE, torch.bfloat16), (MIXED, torch.float32), (EMPTY, torch.bfloat16)):
        if lens is not EMPTY or number % 4 == 0:
            check(make_batch(Case(lens, heads=(6, 2), dtype=dtype, **FEATURES[number])), impl)


@pytest.mark.covering(1)
@pytest.mark.parametrize("lens", [DECODE, MIXED, EMPTY], ids=["decode", "mixed", "empty"])
@pytest.mark.parametrize("features", [{}, {"alibi": True, "sinks": True}, {"sliding_window": 20}], ids=str)
def test_a_bias_by_distance(features: dict, lens: tuple) -> None:
    check(make_batch(Case(lens, heads=(6, 2), distance_bias=True, **features)), "torch")


def test_a_bias_by_distance_is_computed_by_torch() -> None:
    batch = make_batch(Case(MIXED, distance_bias=True))
    assert torch.equal(batch.run(None), batch.run("torch"))  # type: ignore[arg-type]
    for other in ("native", "triton"):
        with pytest.raises(ValueError, match="does not implement distance_bias"):
            batch.run(other)
    for shape in ((4, 1), (3, 999)):
        batch.options["distance_bias"] = torch.zeros(shape)
        with pytest.raises(ValueError, match="a number for each query head and distance"):
            batch.run("torch")


@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_keys_beside_values(lens: tuple, impl: str) -> None:
    """In one tensor, so that neither is contiguous."""
    batch = make_batch(Case(lens, heads=(6, 2)))
    both = torch.stack([batch.key_cache, batch.value_cache], 1)
    check(replace(batch, key_cache=both[:, 0], value_cache=both[:, 1]), impl)


def test_what_is_gathered_at_a_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(Case(((1, 60),) * 8, heads=(6, 2), sinks=True))
    expected, sizes, attend = batch.run("torch"), [], gather._attend_bucket
    monkeypatch.setattr(gather, "_WORKSPACE_BYTES", 2**16)
    monkeypatch.setattr(gather, "_attend_bucket", lambda bucket, *args: sizes.append(bucket) or attend(bucket, *args))
    torch.testing.assert_close(batch.run("torch"), expected)
    assert len(sizes) > 1


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


@functools.cache
def _equal_heads_give_equal_bits(dtype: torch.dtype, threads: int) -> bool:
    """Whether torch's attention rounds equally in all threads, which MKL on AMD CPUs does with MKL_CBWR only."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for length in (17, 131, 300):
            query, key, value = (torch.randn(1, 1, n, 64, dtype=dtype).repeat(1, 8, 1, 1) for n in (1, length, length))
            heads = torch.nn.functional.scaled_dot_product_attention(query, key, value)
            if not torch.equal(heads, heads[:, :1].expand_as(heads)):
                return False
        return True
    finally:
        torch.set_num_threads(before)


@pytest.mark.smoke_cases("native")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", NEIGHBOURS, ids=_name)
@pytest.mark.covering(2)
def test_neighbours_do_not_matter(case: Case, dtype: torch.dtype, threads: int, impl: str) -> None:
    if impl == "torch" and not _equal_heads_give_equal_bits(dtype, threads):
        pytest.skip("torch's own attention gives equal inputs different bits on this CPU with so many threads")
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


@pytest.mark.slow
@pytest.mark.skipif("MKL_CBWR" in os.environ, reason="runs with MKL_CBWR already")
def test_neighbours_do_not_matter_where_mkl_rounds_alike() -> None:
    if _equal_heads_give_equal_bits(torch.float32, 2):
        pytest.skip("torch's attention rounds alike as it is; the cases above ran")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    argv += ["--every-case", "-k", "matter and torch and fp32"]
    environment = os.environ | {"MKL_CBWR": "COMPATIBLE"}
    done = subprocess.run(argv, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "14 passed" in done.stdout


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [*((x, x) for x in (torch.float32, torch.float16, torch.bfloat16)), (torch.float32, torch.bfloat16)],
    ids=["fp32", "fp16", "bf16", "fp32 in bf16"],
)
def test_write_kv(dtype: torch.dtype, kept: torch.dtype, impl: str) -> None:
    """K as a model passes it, [1, heads, tokens, dim] transposed, and V as a part of a larger tensor."""
    key = torch.randn(1, 5, 42, 24).to(dtype)[0].transpose(0, 1)
    value = torch.randn(42, 3, 5, 24).to(dtype)[:, 2, :, :10]
    slots = torch.randperm(8 * 7)[:42]
    slots[[3, 17, 41]] = -1
    caches = [[torch.full((8, 7, 5, d), torch.nan, dtype=kept) for d in (24, 10)] for _ in range(2)]
    write_new(key, value, *caches[0], slots, impl=impl)
    write_new(key, value, *caches[1], slots, impl="reference")
    for actual, expected in zip(*caches):
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=0, atol=0)


def test_copy_blocks(impl: str) -> None:
    shapes = [(32, 16, 2, 8), (32, 4), (32, 16, 1, 40)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    caches = [torch.randn(*s).to(d) for s in shapes for d in dtypes]
    caches.append(torch.randn(16, 32, 8).transpose(0, 1))
    ids = torch.randperm(32)
    copies = torch.stack([ids[:4].repeat_interleave(2), ids[4:12]], dim=1)
    expected = [cache.clone() for cache in caches]
    ops.copy_blocks(expected, copies, impl="reference")
    ops.copy_blocks(caches, copies, impl=impl)
    for actual, wanted in zip(caches, expected):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("whole", [True, False])
def test_copy_blocks_into_other_tensors(impl: str, whole: bool) -> None:
    """Into tensors that are interleaved block by block, and back into others. `whole`: blocks are contiguous."""
    shapes, dtypes = [(16, 2, 8), (4,), (16, 1, 40)], [torch.float32, torch.bfloat16, torch.uint8]
    caches = [torch.randint(0, 99, (32, *s)).to(d) for s, d in zip(shapes, dtypes)]
    if not whole:
        caches[0] = caches[0].transpose(1, 2).contiguous().transpose(1, 2)
    sizes = [cache[0].nbytes for cache in caches]
    beside = torch.zeros(9, sum(sizes), dtype=torch.uint8)
    parts = [p.view(cache.dtype).unflatten(1, cache.shape[1:]) for p, cache in zip(beside.split(sizes, 1), caches)]
    there, back = torch.randperm(32)[:6], torch.randperm(32)[:6]
    ops.copy_blocks(caches, torch.stack([there, torch.arange(2, 8)], 1), into=parts, impl=impl)
    for part, cache in zip(parts, caches):
        assert torch.equal(part[2:8], cache[there])
        assert not part[:2].any() and not part[8:].any()
    others = [torch.zeros_like(cache) for cache in caches]
    ops.copy_blocks(parts, torch.stack([torch.arange(2, 8), back], 1), into=others, impl=impl)
    for other, cache in zip(others, caches):
        expected = torch.zeros_like(cache)
        expected[back] = cache[there]
        assert torch.equal(other, expected)


def test_offsets_beyond_two_to_the_31(impl: str) -> None:
    """Block ids whose element offsets exceed 32 bits. The memory is reserved, but only three blocks are touched."""
    blocks = (1 << 31) // (16 * 64) + 4
    key_cache, value_cache = (torch.empty(blocks, 16, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    small = make_batch(Case(((1, 40),), heads=(4, 1), head_dim=64, dtype=torch.bfloat16))
    metadata = small.metadata
    far = torch.tensor([blocks - 1, 3, blocks - 3])
    near = metadata.block_tables[0, :3].long()
    slots = (far[:, None] * 16 + torch.arange(16)).flatten()[:40]
    key, value = (c[near].flatten(0, 1)[:40] for c in (small.key_cache, small.value_cache))
    write_new(key, value, key_cache, value_cache, slots, impl=impl)
    expected = small.run(impl)
    table = far[None].int()
    moved = replace(small, key_cache=key_cache, value_cache=value_cache, metadata=replace(metadata, block_tables=table))
    assert torch.equal(moved.run(impl), expected)
    ops.copy_blocks([key_cache], torch.tensor([[blocks - 1, blocks - 2]]), impl=impl)
    assert torch.equal(key_cache[blocks - 2], key_cache[blocks - 1])


def test_the_plan_is_made_once_a_step(impl: str) -> None:
    """All layers of a step share the plan: the second call adds nothing to the scratch."""
    batch = make_batch(Case(MIXED))
    kwargs = {"impl": impl, **batch.options}
    first = attention_of(batch.query, batch.key_cache, batch.value_cache, batch.metadata, **kwargs)
    keys = set(batch.metadata.scratch)
    second = attention_of(batch.query, batch.key_cache, batch.value_cache, batch.metadata, **kwargs)
    assert keys == set(batch.metadata.scratch) and keys
    assert torch.equal(first, second)


def test_what_a_neighbour_wrote_behind_us_in_a_shared_block_is_never_read(impl: str) -> None:
    """Two sequences in the same blocks: the values after the end of the shorter one may be anything."""
    batch = make_batch(Case(((1, 400), (1, 140)), heads=(4, 2), shared=25))
    batch.metadata.block_tables[1] = batch.metadata.block_tables[0]
    expected = batch.only([1]).run("reference")
    block = int(batch.metadata.block_tables[0, 9])
    batch.value_cache[block, 6] = torch.inf  # position 150
    batch.key_cache[block, 6] = torch.nan
    torch.testing.assert_close(batch.run(impl)[1:], expected, atol=2e-5, rtol=2e-5)


def test_new_kv_of_another_dtype(impl: str) -> None:
    """Attention uses the K/V as written, in the dtype of the blocks."""
    batch = make_batch(Case(MIXED, dtype=torch.bfloat16))
    before, new_kv = unwritten(batch)
    got = before.run(impl, **{name: x.double() for name, x in new_kv.items()})
    torch.testing.assert_close(got, batch.run(impl), atol=1.6e-2, rtol=1.6e-2)
