"""The Triton kernel for greedy tokens against torch, and the random numbers of rows without a seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged.kernels import ops, sampling
from hf_paged.kernels.triton import launch as triton_launch
from hf_paged.kernels.triton import sampling as triton_sampling

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
interpreted = pytest.mark.skipif(
    not GPU and not triton_launch.INTERPRET, reason="triton was imported before TRITON_INTERPRET was set"
)
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several pieces are short."""
    monkeypatch.setattr(triton_sampling, "PIECE", 64)


def expected(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.double().log_softmax(-1)
    tokens = logits.float().argmax(-1)
    return tokens, scores.gather(1, tokens[:, None]).squeeze(1).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 700])
@interpreted
@pytest.mark.usefixtures("pieces")
def test_greedy(vocab: int, dtype: torch.dtype) -> None:
    wide = torch.randn(5, vocab + 3, generator=torch.Generator().manual_seed(vocab)).mul(4).to(DEVICE, dtype)
    logits = wide[:, :vocab]  # rows further apart than they are long
    tokens, logprobs = triton_sampling.greedy(logits)
    best, wanted = expected(logits)
    assert torch.equal(logits.gather(1, tokens[:, None]), logits.gather(1, best[:, None]))
    assert torch.equal(tokens, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))  # the first of equal ones
    torch.testing.assert_close(logprobs, wanted, atol=2e-6, rtol=2e-6)


@interpreted
@pytest.mark.usefixtures("pieces")
def test_scores_that_are_not_finite() -> None:
    """Pieces without a finite score do no harm; NaN, and rows without a distribution, are NaN as in torch."""
    logits = torch.full((6, 200), -INF, device=DEVICE)
    logits[0, 70] = -3.0
    logits[1, [5, 190]] = 1.0
    logits[2, 100:] = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[2, 199] = NAN
    logits[3, :] = NAN
    logits[5, 10], logits[5, 20] = INF, 2.0
    tokens, logprobs = triton_sampling.greedy(logits)
    own, theirs = logprobs, sampling.greedy(logits.cpu(), torch.Tensor.clone)[1].to(DEVICE)
    assert own.isnan().tolist() == theirs.isnan().tolist() == [False, False, True, True, True, True]
    torch.testing.assert_close(own[:2], theirs[:2])
    assert tokens[:2].tolist() == [70, 5] and ((tokens >= 0) & (tokens < 200)).all()


@interpreted
@pytest.mark.usefixtures("pieces")
def test_log_probabilities_of_sampled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops._default_impl, DEVICE, "triton")
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits[1, 7], logits[2, 50] = -INF, NAN
    tokens = torch.tensor([3, 7, 1], device=DEVICE)

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("an fp32 copy of the logits")

    own = sampling.raw_logprobs(logits, tokens, refuse)
    torch.testing.assert_close(own, sampling.logprobs_of(logits, tokens), equal_nan=True)
    assert own.isnan().tolist() == [False, False, True] and own[1] == -INF
    assert sampling.greedy(logits, refuse)[0][0] == logits[0].argmax()


def test_one_pass_over_the_logits() -> None:
    """Two launches; the first one alone reads the logits, each score once."""
    logits = torch.empty(256, 128_256, dtype=torch.bfloat16, device="meta")
    scratch = [torch.empty(0, device="meta")] * 3
    first, second = triton_sampling.greedy_launches(logits, scratch[0], scratch[0], scratch)
    assert first.grid == (256, 16) and 15 * first.args["PIECE"] < 128_256 <= 16 * first.args["PIECE"]
    assert second.grid == (256,) and "logits" not in second.args


# -- random numbers --------------------------------------------------------------------------------------------------


class Draws(TorchDispatchMode):
    """Counts the calls that draw random numbers."""

    count = 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten.exponential_
        return func(*args, **(kwargs or {}))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seeds", [[None] * 6, [None, 3, None, None, 4, None], [1, 2, 3]])
def test_rows_without_a_seed_are_drawn_at_once(seeds: list[int | None]) -> None:
    """Rows with a seed get the numbers that they would get alone."""
    probs = torch.empty(len(seeds), 50)
    torch.manual_seed(0)
    with Draws() as draws:
        numbers = sampling.exponentials(probs, [None if s is None else seeded(s) for s in seeds], at_once=True)
    assert draws.count == sum(s is not None for s in seeds) + (None in seeds)
    for row, seed in zip(numbers, seeds):
        if seed is not None:
            assert torch.equal(row, torch.empty(50).exponential_(1, generator=seeded(seed)))
    assert len({tuple(row.tolist()) for row in numbers}) == len(seeds) and (numbers > 0).all()


def test_a_cpu_draws_row_by_row_as_ever() -> None:
    torch.manual_seed(0)
    rows = [torch.empty(50).exponential_(1) for _ in range(3)]
    torch.manual_seed(0)
    assert torch.equal(sampling.exponentials(torch.empty(3, 50), [None] * 3, at_once=False), torch.stack(rows))
