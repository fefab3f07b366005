"""The Triton kernels against the reference: at small sizes in the interpreter on a CPU, or on a GPU if there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from hf_paged.cache.memory import PagedMemory
from hf_paged.fused.gpu.kernels.rotary import rotate
from hf_paged.fused.rows import RotaryKind
from hf_paged.kernels import ops, reference
from hf_paged.kernels.arguments import Attention, LayerKV, NewKV
from hf_paged.kernels.metadata import announce
from hf_paged.kernels.triton import launch as triton_launch
from hf_paged.kernels.triton import ops as triton_ops
from hf_paged.kernels.triton import partition as triton_partition
from hf_paged.kernels.triton import tuning as triton_tuning
from tests.implementations import compute_by
from tests.kernels.cases import Batch, Case, attention_of, check, make_batch, unwritten, write_new
from tests.kernels.on_triton import DEVICE, GPU, INTERPRETED
from tests.noted import note_calls

pytestmark = INTERPRETED

DECODE = ((1, 1), (1, 16), (0, 0), (1, 17), (1, 70))
VERIFY = ((3, 3), (2, 70), (0, 0))
PREFILL = ((17, 17), (20, 70))
MIXED = ((1, 40), (20, 36), (0, 0), (3, 70))

SHAPES: list[dict[str, Any]] = [
    {"heads": (2, 2), "head_dim": 16}, {"heads": (7, 1), "head_dim": 24},
    {"heads": (5, 1), "head_dim": 80, "block_size": 8}, {"heads": (3, 1), "head_dim": 64, "block_size": 48},
    {"heads": (4, 2), "head_dim": 16, "v_head_dim": 40, "block_size": 1},
    {"heads": (4, 1), "head_dim": 40, "v_head_dim": 16, "block_size": 128},
    {"heads": (2, 1), "head_dim": 32, "block_size": 528}, {"heads": (18, 1), "head_dim": 16, "block_size": 32},
]  # fmt: skip
FEATURES: list[dict[str, Any]] = [
    {"sliding_window": 1}, {"sliding_window": 20}, {"sliding_window": 70, "softcap": 5.0, "sinks": True},
    {"chunk_size": 24}, {"chunk_size": 64, "alibi": True, "sinks": True}, {"softcap": 2.0, "alibi": True},
    {"sinks": True}, {"ahead": 24}, {"ahead": 70, "sliding_window": 20, "softcap": 5.0, "sinks": True},
    {"ahead": 40, "alibi": True},
]  # fmt: skip


def name(options: dict[str, object]) -> str:
    return ",".join(f"{k}={v}" for k, v in options.items()).replace(" ", "")


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decode step is planned and split, even a short one; tiles of 16 and 32 rows, as in half precision."""
    tiles = triton_tuning.small_tile
    monkeypatch.setattr(
        triton_tuning, "small_tile", lambda *args: replace(tile := tiles(*args), many=max(tile.many, 32))
    )
    monkeypatch.setattr(triton_ops, "MAX_WHOLE_TILES", 0)
    monkeypatch.setattr(triton_partition, "MIN_TILES", 1)
    monkeypatch.setattr(triton_partition, "MIN_SHARED_KEYS", 32)


@pytest.mark.quick_cases("head_dim=24", "window=70", "alibi=True,sinks", "ahead=24")
@pytest.mark.covering(1)
@pytest.mark.parametrize("lens", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("options", SHAPES + FEATURES, ids=name)
def test_whole(lens: tuple[tuple[int, int], ...], options: dict[str, object]) -> None:
    check(make_batch(Case(lens, **{"heads": (2, 1), "head_dim": 16} | options), DEVICE), "triton")


SPLIT = [(DECODE, SHAPES[2]), (DECODE, FEATURES[4]), (DECODE, FEATURES[5])]
SPLIT += [(VERIFY, SHAPES[1]), (MIXED, FEATURES[2]), (MIXED, FEATURES[3])]


@pytest.mark.quick_cases("options1", "options3", "options4")
@pytest.mark.parametrize(("lens", "options"), SPLIT)
@pytest.mark.usefixtures("split")
def test_split(lens: tuple[tuple[int, int], ...], options: dict[str, object]) -> None:
    check(make_batch(Case(lens, **{"heads": (2, 1), "head_dim": 16} | options), DEVICE), "triton")


@pytest.mark.quick_cases("[mixed")
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lens", [DECODE, ((40, 90),), MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.usefixtures("split")
def test_half_precision(lens: tuple[tuple[int, int], ...], dtype: torch.dtype) -> None:
    check(make_batch(Case(lens, heads=(2, 1), dtype=dtype), DEVICE), "triton")


@pytest.mark.parametrize("length", [1, 17, 65, 129])
@pytest.mark.usefixtures("split")
def test_lengths_around_the_edges_of_blocks_and_tiles(length: int) -> None:
    check(make_batch(Case(((1, length), (min(2, length), length)), heads=(2, 2), head_dim=16), DEVICE), "triton")


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale(scale: float) -> None:
    batch = make_batch(Case(DECODE), DEVICE)
    batch.options["scale"] = scale
    check(batch, "triton")


@pytest.mark.slow
def test_strided_query_and_out() -> None:
    batch = make_batch(Case(MIXED, strided=True, heads=(4, 2)), DEVICE)
    check(batch, "triton")
    expected = batch.run("reference")
    out = torch.full((expected.shape[0], 4, 2, expected.shape[2]), torch.nan, device=DEVICE)[:, :, 1]
    assert batch.run("triton", out=out) is out
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_strided_caches() -> None:
    """K and V interleaved in one tensor, heads before slots."""
    batch = make_batch(Case(DECODE), DEVICE)
    both = torch.stack([batch.key_cache, batch.value_cache], 1).transpose(2, 3).contiguous().transpose(2, 3)
    check(replace(batch, key_cache=both[:, 0], value_cache=both[:, 1]), "triton")
    check(replace(batch, key_cache=both[:, 0]), "triton")


def test_last_dimension_must_be_contiguous() -> None:
    batch = make_batch(Case(DECODE), DEVICE)
    with pytest.raises(ValueError, match="key_cache has strides"):
        replace(batch, key_cache=batch.key_cache.transpose(1, 3).contiguous().transpose(1, 3)).run("triton")


def test_head_size_past_the_tiles() -> None:
    with pytest.raises(ValueError, match=r"head sizes 576 and 512.*impl='torch'"):
        make_batch(Case(((1, 3),), heads=(1, 1), head_dim=576, v_head_dim=512), DEVICE).run("triton")


def test_nothing_to_do() -> None:
    batch = make_batch(Case(((0, 0), (0, 0)), heads=(2, 1)), DEVICE)
    assert batch.run("triton").shape == (0, 2, 32)


def planned(batch: Batch) -> triton_partition.Partition:
    """Run with poisoned scratch memory, compare with the reference, and return the partition."""
    batch.metadata.scratch.clear()
    arguments = batch.query, batch.key_cache, batch.value_cache, batch.metadata
    attention_of(*arguments, impl="triton", **batch.options)
    ((partition, partial_out, partial_lse),) = batch.metadata.scratch.values()
    partial_out.fill_(torch.nan)
    partial_lse.fill_(torch.nan)
    again = attention_of(*arguments, impl="triton", **batch.options)
    torch.testing.assert_close(again, batch.run("reference"), atol=2e-5, rtol=2e-5)
    return partition


def units_of(partition: triton_partition.Partition) -> list[tuple[int, int, int, int]]:
    """(first sequence, tokens, first tile, tiles) of the units that have work."""
    return [tuple(unit) for unit in partition.units.view(-1, 4).tolist() if unit[3] > 0]


@pytest.mark.usefixtures("split")
def test_layers_of_a_compiled_model_share_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile's graphs call operators that get the step's tensors one by one."""
    compute_by(monkeypatch, "triton", DEVICE)
    batch = make_batch(Case(((1, 200), (1, 70)), heads=(2, 2), head_dim=16), DEVICE)
    kernels: list[object] = []
    run = triton_launch.Launch.run
    monkeypatch.setattr(
        triton_launch.Launch, "run", lambda self, device: (kernels.append(self.kernel), run(self, device))[1]
    )
    m = batch.metadata

    def layer() -> torch.Tensor:
        result: torch.Tensor = torch.ops.hf_paged.paged_attention(
            batch.query, batch.key_cache, batch.value_cache, m.block_tables, m.seq_lens, m.query_start_loc,
            m.slot_mapping, m.max_query_len, m.max_seq_len, batch.options["scale"], None, None, None, None, None, False,
        )[0]  # fmt: skip
        return result

    announce([m])
    results = [layer(), layer()]
    announce(())
    assert kernels.count(triton_partition.partition_kernel) == 1 and kernels.count(triton_ops.split_kernel) == 2
    results.append(layer())
    assert kernels.count(triton_partition.partition_kernel) == 2
    for result in results:
        torch.testing.assert_close(result, batch.run("reference"), atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("split")
def test_plan_leaves_out_what_the_window_hides() -> None:
    batch = make_batch(Case(((1, 1000), (2, 300)), heads=(2, 2), head_dim=16, sliding_window=100), DEVICE)
    assert units_of(planned(batch)) == [(0, 1, 14, 2), (1, 2, 3, 2)]


@pytest.mark.quick_cases("sinks=True")
@pytest.mark.parametrize("options", [{}, {"sinks": True, "softcap": 3.0, "alibi": True}, {"block_size": 48}], ids=name)
@pytest.mark.usefixtures("split")
def test_common_prefix_is_read_once(options: dict[str, object]) -> None:
    """Four sequences with 192 common keys, and between them one that cannot share because it has two new tokens."""
    shared = 192 // int(options.get("block_size", 16))
    lens = ((1, 250), (1, 200), (1, 321), (2, 300), (1, 193))
    partition = planned(make_batch(Case(lens, head_dim=16, shared=shared, **options), DEVICE))
    assert partition.share
    assert units_of(partition) == [(0, 4, 0, 3), (0, 1, 3, 1), (1, 1, 3, 1), (2, 1, 3, 3), (3, 2, 0, 5), (4, 1, 3, 1)]
    assert partition.order.tolist() == [0, 1, 2, 4, 3] and partition.ranks.tolist() == [0, 1, 2, 0, 3]


@pytest.mark.slow
@pytest.mark.usefixtures("split")
def test_more_sequences_share_than_fit_a_small_tile() -> None:
    """They share a tile of 32 rows, or several."""
    count, group = 6, 7
    lens = tuple((1, 100 + i) for i in range(count))
    partition = planned(make_batch(Case(lens, heads=(group, 1), head_dim=16, shared=6), DEVICE))
    assert units_of(partition)[0] == (0, count, 0, 1)
    assert int(partition.tile_starts[1]) == -(-count * group // 32)  # row tiles, of one tile of keys each


@pytest.mark.usefixtures("split")
def test_members_of_two_groups_take_turns() -> None:
    """Sequences of two prompts with a common start: one group each."""
    batch = make_batch(Case(((1, 180),) * 6 + ((1, 20),), heads=(2, 1), head_dim=16, shared=2), DEVICE)
    tables = batch.metadata.block_tables
    tables[2, :10], tables[4, :10], tables[3, :10], tables[5, :10] = *[tables[0, :10]] * 2, *[tables[1, :10]] * 2
    partition = planned(batch)
    assert units_of(partition)[:2] == [(0, 3, 0, 2), (3, 3, 0, 2)] and partition.order.tolist() == [0, 2, 4, 1, 3, 5, 6]


# -- one new token of each sequence and no common prefix -------------------------------------------------------------


@pytest.mark.quick_cases("options1")
@pytest.mark.parametrize("options", [{"sinks": True}, {"sliding_window": 100, "v_head_dim": 24}])
@pytest.mark.usefixtures("split")
def test_decode_without_a_common_prefix_is_one_launch_a_layer(options: dict[str, object]) -> None:
    """The last program with a part of a sequence combines all parts; whole ones need no reduction."""
    lens = ((1, 300), (1, 70), (0, 0))
    batch = make_batch(Case(lens, **{"heads": (4, 2), "head_dim": 16} | options), DEVICE)
    batch.metadata = replace(batch.metadata, shares=False)
    partition = planned(batch)
    assert (
        not partition.share and not partition.arrivals.any() and len(partition.arrivals) == 3 * batch.key_cache.shape[2]
    )
    launches, out = launches_of(batch)
    assert [launch.kernel for launch in launches] == [triton_partition.partition_kernel, triton_ops.split_kernel]
    assert launches[1].args["PARTS"] > 0 and torch.equal(out, launches_of(batch)[1])
    metadata = batch.metadata
    kept = len(metadata.scratch)
    layers = [triton_ops.attention_launches(
        batch.query, LayerKV(batch.key_cache, batch.value_cache), metadata, Attention(0.1), out, None,
        triton_launch.target_of(out.device),
    ) for _ in range(2)]  # fmt: skip
    assert [len(layer) for layer in layers] == ([2, 1] if "sliding_window" in options else [1, 1]) and kept == 1


@pytest.mark.slow
@pytest.mark.usefixtures("split")
def test_many_parts_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "PROGRAMS_PER_CORE", 12)
    monkeypatch.setattr(triton_ops, "COMBINED", 128)  # elements, so that a few parts are combined at once
    batch = make_batch(Case(((1, 1800), (1, 30)), heads=(4, 1), head_dim=16), DEVICE)
    batch.metadata = replace(batch.metadata, shares=False)
    planned(batch)


def test_amd_reduces_in_a_launch_of_its_own() -> None:
    batch = make_batch(Case(((1, 1000),), heads=(4, 1), head_dim=16, dtype=torch.bfloat16), DEVICE)
    launches = triton_ops.attention_launches(
        batch.query, LayerKV(batch.key_cache, batch.value_cache), batch.metadata, Attention(0.1), batch.query, None,
        triton_launch.Target("hip", "gfx942", 304),
    )  # fmt: skip
    assert [launch.kernel for launch in launches][1:] == [triton_ops.split_kernel, triton_ops.reduce_kernel]


def launches_of(batch: Batch, **bounds: int) -> tuple[list[triton_launch.Launch], torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        launches = note_calls(patch, triton_launch.Launch, "run", lambda launch, device: launch)
        metadata = replace(batch.metadata, scratch={}, **bounds)
        out = attention_of(batch.query, batch.key_cache, batch.value_cache, metadata, impl="triton", **batch.options)
    return launches, out


@pytest.mark.parametrize("lens, longest, count", [
    (((20, 40), (1, 100), (1, 7)), 1, 3),  # a program for each sequence, because none has two tokens
    (((1, 60), (33, 33), (16, 70), (0, 0), (1, 9)), 16, 18),
])  # fmt: skip
@pytest.mark.usefixtures("split")
def test_the_reduction_covers_only_short_queries(lens: tuple[tuple[int, int], ...], longest: int, count: int) -> None:
    """Host bounds size the launch: not sixteen programs for each sequence because a neighbour has a prompt."""
    batch = make_batch(Case(lens, head_dim=16), DEVICE)
    bounds = {"max_short_query_len": longest, "num_short_tokens": sum(n for n, _ in lens if n <= 16)}
    launches, out = launches_of(batch, **bounds)
    grids = [launch.grid for launch in launches if launch.kernel is triton_ops.reduce_kernel]
    assert grids == [(count, 4)]
    torch.testing.assert_close(out, batch.run("reference"), atol=2e-5, rtol=2e-5)


def test_prompts_alone_need_no_split_kernel() -> None:
    batch = make_batch(Case(((40, 90), (17, 17), (0, 0))), DEVICE)
    launches, out = launches_of(batch, max_short_query_len=0)
    assert [launch.kernel for launch in launches] == [triton_ops.whole_kernel]
    torch.testing.assert_close(out, batch.run("reference"), atol=2e-5, rtol=2e-5)


# -- recorded launches, as in a CUDA graph ---------------------------------------------------------------------------

STEPS = [
    ((1, 1),), ((1, 300), (1, 3), (1, 64), (1, 65), (1, 17)), ((1, 2),) * 8, tuple((1, 90 + 30 * i) for i in range(6)),
]  # fmt: skip


@pytest.mark.quick_cases("options0")
@pytest.mark.parametrize(
    "longest, options",
    [(64, {}), (512, {"shares": False}), (512, {"sliding_window": 20}), (512, {"block_size": 48, "heads": (2, 2)})],
)
def test_launches_of_one_step_compute_any_other(longest: int, options: dict[str, object], monkeypatch: Any) -> None:
    """Launches decided on the host for eight padding sequences are valid for others: grids, kernels, plans, tables."""
    monkeypatch.setattr(triton_partition, "MIN_SHARED_KEYS", 32)
    options = {"head_dim": 16, "heads": (2, 1), **options}
    shares = options.pop("shares", True)
    size, example = 8, make_batch(Case(((1, 1),), **options), DEVICE)
    block_size = example.key_cache.shape[1]
    query, new_key, new_value = (
        torch.zeros(size, *t.shape[-2:], device=DEVICE) for t in (example.query, example.key_cache, example.value_cache)
    )
    key_cache, value_cache = (
        torch.full((300, *t.shape[1:]), torch.nan, device=DEVICE) for t in (example.key_cache, example.value_cache)
    )
    static = triton_ops.AttentionMetadata(
        block_tables=torch.zeros(size, 512, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.ones(size, dtype=torch.int32, device=DEVICE),
        query_start_loc=torch.arange(size + 1, dtype=torch.int32, device=DEVICE),
        slot_mapping=torch.full((size,), -1, device=DEVICE), max_query_len=1, max_seq_len=longest, shares=shares,
    )  # fmt: skip
    run = triton_launch.Launch.run
    launches = note_calls(monkeypatch, triton_launch.Launch, "run", lambda launch, device: launch)
    out = [
        attention_of(
            query, key_cache, value_cache, static, key=new_key, value=new_value, impl="triton", **example.options
        )
        for _ in range(2)  # layers
    ]
    kept = list(launches)
    static.scratch.clear()

    for lens in STEPS:
        lens = tuple((1, min(length, longest)) for _, length in lens)
        batch = make_batch(Case(lens, shared=48 // block_size, **options), DEVICE)
        before, new_kv = unwritten(batch)
        count = len(lens)
        query[:count], new_key[:count], new_value[:count] = batch.query, new_kv["key"], new_kv["value"]
        query[count:], new_key[count:], new_value[count:] = 3.0, torch.nan, torch.nan
        for cache, filled in ((key_cache, before.key_cache), (value_cache, before.value_cache)):
            cache.fill_(torch.nan)
            cache[: len(filled)] = filled
        static.block_tables[:count, : batch.metadata.block_tables.shape[1]] = batch.metadata.block_tables
        static.block_tables[count:, 0] = batch.metadata.slot_mapping[0] // block_size
        static.seq_lens[:count], static.seq_lens[count:] = batch.metadata.seq_lens, 1
        static.slot_mapping[:count], static.slot_mapping[count:] = batch.metadata.slot_mapping, -1
        for launch in kept:
            for scratch in ("partial_out", "partial_lse"):
                if launch.kernel is triton_ops.split_kernel:
                    launch.args[scratch].fill_(torch.nan)
        for launch in kept:
            run(launch, torch.device(DEVICE))
        expected = batch.run("reference")
        for layer in out:
            torch.testing.assert_close(layer[:count], expected, atol=2e-5, rtol=2e-5)
            assert layer.isfinite().all()  # padding rows too, because other operations may read all rows
        for cache, whole in ((key_cache, batch.key_cache), (value_cache, batch.value_cache)):
            assert torch.equal(cache[: len(whole)].nan_to_num(nan=7.0), whole.nan_to_num(nan=7.0))
            assert cache[len(whole) :].isnan().all()
    kernels = {launch.kernel for launch in kept}
    assert (triton_ops.split_kernel in kernels) == (longest == 512 and options.get("sliding_window") != 20)


@pytest.mark.covering(1)
@pytest.mark.parametrize("heads, head_dim, v_head_dim, block_size, num_tokens", [
    (2, 64, 64, 16, 5), (3, 80, 48, 48, 9), (1, 24, 16, 1, 600), (33, 80, 80, 16, 2),
])  # fmt: skip
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_write_kv(heads: int, head_dim: int, v_head_dim: int, block_size: int, num_tokens: int, dtypes: Any) -> None:
    """Strided K and V (halves of one tensor), permuted slots, padding, a cache of another dtype."""
    num_blocks = -(-num_tokens // block_size) + 2
    both = torch.randn(heads, num_tokens, head_dim + v_head_dim, dtype=dtypes[0], device=DEVICE).transpose(0, 1)
    key, value = both.split([head_dim, v_head_dim], -1)
    slots = torch.randperm(num_blocks * block_size, device=DEVICE)[:num_tokens]
    slots[1] = -1
    caches = [
        torch.randn(num_blocks, block_size, heads, d, device=DEVICE).to(dtypes[1]) for d in (head_dim, v_head_dim)
    ]
    expected = [cache.clone() for cache in caches]
    reference.write_kv(NewKV(key, value), LayerKV(*expected), slots)
    write_new(key, value, *caches, slots, impl="triton")
    for actual, wanted in zip(caches, expected):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.int8, torch.bfloat16)], ids=str)
def test_copy_blocks(dtypes: tuple[torch.dtype, ...]) -> None:
    """Caches of different dtypes and sizes, one inside a larger tensor; sizes that are not multiples of a word."""
    caches = [torch.randint(-99, 99, (7, 16, 2, 5), device=DEVICE).to(dtype) for dtype in dtypes]
    caches.append(torch.randint(-99, 99, (7, 2, 3001), device=DEVICE).to(dtypes[0])[:, 1])
    for group in (caches, caches[1:2]):
        expected = [cache.clone() for cache in group]
        copies = torch.tensor([[0, 3], [1, 5], [1, 4]], device=DEVICE)
        reference.copy_blocks(expected, copies, expected)
        ops.copy_blocks(group, copies, impl="triton")
        for actual, wanted in zip(group, expected):
            assert torch.equal(actual, wanted)


@pytest.mark.parametrize("gap", [0, 3])
def test_copy_blocks_into_other_tensors(gap: int) -> None:
    """Into tensors that are interleaved block by block, `gap` bytes apart, and back into others."""
    caches = [torch.randint(-99, 99, (7, 16, 2, n), device=DEVICE).to(torch.int8) for n in (64, 5, 48)]
    beside = torch.zeros(5, 16 * 2 * 117 + 3 * gap, dtype=torch.int8, device=DEVICE)
    parts, start = [], 0
    for cache in caches:
        parts.append(beside[:, start : start + cache[0].numel()].unflatten(1, cache.shape[1:]))
        start += cache[0].numel() + gap
    expected = [torch.zeros_like(part) for part in parts]
    out, back = torch.tensor([[6, 0], [1, 3], [2, 1]], device=DEVICE), torch.tensor([[0, 5], [1, 4]], device=DEVICE)
    reference.copy_blocks(caches, out, expected)
    ops.copy_blocks(caches, out, into=parts, impl="triton")
    others = [torch.zeros_like(cache) for cache in caches]
    ops.copy_blocks(parts, back, into=others, impl="triton")
    for part, wanted, other, cache in zip(parts, expected, others, caches):
        assert torch.equal(part, wanted)
        assert torch.equal(other[5], cache[6]) and torch.equal(other[4], cache[2]) and not other[:4].any()
    assert int((beside != 0).sum()) == sum(int((part != 0).sum()) for part in parts)


def test_copy_blocks_needs_contiguous_blocks() -> None:
    cache = torch.zeros(4, 8, 2, 16, device=DEVICE).transpose(1, 2)
    copies = torch.tensor([[0, 1]], device=DEVICE)
    for caches, into in (([cache], None), ([cache.contiguous()], [cache])):
        with pytest.raises(ValueError, match="each block contiguous"):
            ops.copy_blocks(caches, copies, into=into, impl="triton")


def test_offsets_past_two_to_the_31() -> None:
    """Blocks whose element offsets need 64 bits; the memory between them is never touched."""
    num_blocks, stride = 6, 2**29 + 64
    pool = torch.empty(num_blocks * stride, dtype=torch.float16, device=DEVICE)
    key_cache = pool.as_strided((num_blocks, 4, 1, 16), (stride, 32, 16, 1))
    value_cache = pool.as_strided((num_blocks, 4, 1, 16), (stride, 32, 16, 1), storage_offset=16)
    batch = make_batch(Case(((1, 6), (3, 7)), heads=(1, 1), head_dim=16, block_size=4, dtype=torch.float16), DEVICE)
    batch.metadata.block_tables[:, :2] = torch.tensor([[5, 0], [1, 4]])
    key, value = (torch.randn(13, 1, 16, device=DEVICE).half() for _ in range(2))
    slots = torch.tensor([20, 21, 22, 23, 0, 1, 4, 5, 6, 7, 16, 17, 18], device=DEVICE)
    write_new(key[:-1], value[:-1], key_cache, value_cache, slots[:-1], impl="triton")
    rotate(key[-1:], key[-1:], angles=None, kind=RotaryKind(), value=value[-1:],
           into=(key_cache, value_cache, slots[-1:]))  # fmt: skip
    assert (
        torch.equal(key_cache[5], key[:4])
        and torch.equal(key_cache[4, :3], key[10:])
        and torch.equal(value_cache[4, :3], value[10:])
    )
    check(replace(batch, key_cache=key_cache, value_cache=value_cache), "triton")
    blocks = pool.as_strided((num_blocks, 128), (stride, 1))
    ops.copy_blocks([blocks], torch.tensor([[5, 3], [4, 2]], device=DEVICE), impl="triton")
    assert torch.equal(key_cache[3], key_cache[5]) and torch.equal(value_cache[2], value_cache[4])


def _row_by_row(self: object, a: Any, b: Any, d: Any, *args: object) -> Any:
    rows = [np.matmul(row, b.data, dtype=d.data.dtype) for row in a.data]
    return interpreter.TensorHandle(np.stack(rows) + d.data, d.dtype.scalar)


@pytest.mark.quick_cases("bfloat16")
@pytest.mark.parametrize(("dtype", "options"), [(torch.bfloat16, {}), (torch.float32, {"sliding_window": 21})], ids=str)
def test_one_order(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, options: dict[str, int]) -> None:
    """The bits of a token alone, in steps, in chunks and beside others. The interpreter gets an exact product."""
    if not GPU:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _row_by_row)
    torch.manual_seed(0)
    lengths, heads, kv_heads, dim, size = (70, 5, 41), 4, 2, 32, 16
    query = [torch.randn(n, heads, dim, device=DEVICE).to(dtype) for n in lengths]
    key, value = ([torch.randn(n, kv_heads, dim, device=DEVICE).to(dtype) for n in lengths] for _ in range(2))

    def computed(pieces: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Of each (sequence, first token, end), in one step over what precedes it."""
        memory = PagedMemory(size, growable=True)
        numbers = [number for number, _, _ in pieces]
        for number, _, end in pieces:
            memory.append([(number, end)])
            slots = memory.manager.slots(number, 0, end)
            layer = memory.pool.layer_for(0, key[number], value[number])
            layer.key.view(-1, kv_heads, dim)[slots] = key[number][:end]
            layer.value.view(-1, kv_heads, dim)[slots] = value[number][:end]
        (metadata,), _ = memory.step_metadata(numbers, [end - start for _, start, end in pieces], query[0].device)
        rows = torch.cat([query[number][start:end] for number, start, end in pieces])
        layer, metadata = memory.pool[0], replace(metadata, one_order=True)
        out = attention_of(rows, layer.key, layer.value, metadata, scale=dim**-0.5, impl="triton", **options)
        return list(out.split([end - start for _, start, end in pieces]))

    whole = [computed([(number, 0, n)])[0] for number, n in enumerate(lengths)]
    for number, together in enumerate(computed([(number, 0, n) for number, n in enumerate(lengths)])):
        assert together.equal(whole[number])
    last, middle, part = computed([(0, 69, 70), (1, 2, 5), (2, 7, 30)])
    assert last.equal(whole[0][69:]) and middle.equal(whole[1][2:5]) and part.equal(whole[2][7:30])
    assert computed([(0, 63, 64), (2, 40, 41)])[0].equal(whole[0][63:64])
