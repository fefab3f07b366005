"""The Triton kernels on a GPU at real sizes: no waits for the device, no kernel is compiled twice, graphs replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.cases import Batch, Case, attention_of, check, exact, make_batch, stored, write_new
from tests.waiting import no_waits_for_a_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")]
BF16 = torch.bfloat16


@pytest.mark.parametrize("block_size", [16, 48, 128, 528])
@pytest.mark.parametrize(
    "heads, head_dim", [((32, 8), 128), ((28, 4), 128), ((8, 8), 64), ((64, 1), 80), ((4, 2), 256)]
)
@pytest.mark.parametrize(
    "lens",
    [((1, 1328), (5, 18), (129, 463)), ((1, 523), (1, 37), (1, 2011)), ((1000, 5000), (16, 3000)), ((1, 1),) * 533],
    ids=["mixed", "decode", "chunked", "rows"],
)
def test_real_sizes(lens: tuple[tuple[int, int], ...], heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    check(make_batch(Case(lens, heads=heads, head_dim=head_dim, block_size=block_size, dtype=BF16), "cuda"), "triton")


FEATURES: list[dict[str, object]] = [
    {"sliding_window": 1024, "sinks": True}, {"softcap": 50.0}, {"chunk_size": 512}, {"alibi": True},
    {"v_head_dim": 64}, {"ahead": 64}, {"dtype": torch.float16}, {"dtype": torch.float32},
]  # fmt: skip


@pytest.mark.parametrize("options", FEATURES, ids=str)
def test_features(options: dict[str, object]) -> None:
    lens = ((1, 4000), (700, 3000), (8, 1025))
    check(make_batch(Case(lens, **{"heads": (32, 8), "head_dim": 128, "dtype": BF16} | options), "cuda"), "triton")  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [("int8", "int8"), ("fp8", "fp8"), ("int8", None)], ids=str)
@pytest.mark.parametrize("lens", [((1, 4000), (1, 523), (1, 37)), ((700, 3000), (1, 900))], ids=["decode", "prefill"])
def test_eight_bits(lens: tuple[tuple[int, int], ...], names: tuple[str | None, str | None]) -> None:
    batch = stored(make_batch(Case(lens, heads=(32, 8), head_dim=128, dtype=BF16), "cuda"), names)
    expected = exact(batch).run("reference")
    torch.testing.assert_close(batch.run("triton").double(), expected, atol=1.6e-2, rtol=1.6e-2)


def test_shared_prefix_of_many_sequences() -> None:
    lens = tuple((1, 4100 + 17 * i) for i in range(32))
    check(make_batch(Case(lens, heads=(32, 8), head_dim=128, dtype=BF16, shared=256), "cuda"), "triton")


def step(batch: Batch, out: torch.Tensor) -> None:
    write_new(batch.key_cache[0, :1], batch.value_cache[0, :1], batch.key_cache, batch.value_cache,
                 torch.full((1,), -1, device="cuda"), in_bounds=True, impl="triton")  # fmt: skip
    attention_of(
        batch.query, batch.key_cache, batch.value_cache, replace(batch.metadata, scratch={}, in_bounds=True),
        out=out, impl="triton", **batch.options,
    )  # fmt: skip


def test_nothing_waits_for_the_host() -> None:
    batches = [make_batch(Case(lens, heads=(8, 2), dtype=BF16), "cuda") for lens in (((1, 900),) * 4, ((90, 900),))]
    outs = [torch.empty_like(batch.query) for batch in batches]
    for batch, out in zip(batches, outs):
        step(batch, out)
    with no_waits_for_a_device():
        for batch, out in zip(batches, outs):
            step(batch, out)


def test_a_captured_step_replays_with_other_lengths() -> None:
    batch = make_batch(Case(((1, 2000), (1, 3000), (1, 1500)), heads=(32, 8), head_dim=128, dtype=BF16), "cuda")
    out = torch.empty_like(batch.query)
    lengths = batch.metadata.seq_lens.clone()
    batch.metadata.seq_lens.fill_(1)
    step(batch, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(batch, out)
    batch.metadata.seq_lens.copy_(lengths)
    graph.replay()
    torch.testing.assert_close(out, batch.run("reference"), atol=1.6e-2, rtol=1.6e-2)
