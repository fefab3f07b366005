"""The Triton kernel for greedy tokens against torch, and the random numbers of rows without a seed."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import TopPLogitsWarper

from hf_paged.kernels import sampling
from hf_paged.kernels.triton import nucleus
from hf_paged.kernels.triton import sampling as triton_sampling
from tests.implementations import compute_by
from tests.kernels.on_triton import DEVICE, GPU, INTERPRETED
from tests.noted import Counted

pytestmark = [pytest.mark.gpu] if GPU else []
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several pieces are short."""
    monkeypatch.setattr(triton_sampling, "PIECE", 64)


def expected(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.double().log_softmax(-1)
    tokens = logits.float().argmax(-1)
    return tokens, scores.gather(1, tokens[:, None]).squeeze(1).float()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 700])
@INTERPRETED
@pytest.mark.usefixtures("pieces")
def test_greedy(vocab: int, dtype: torch.dtype) -> None:
    wide = torch.randn(5, vocab + 3, generator=torch.Generator().manual_seed(vocab)).mul(4).to(DEVICE, dtype)
    logits = wide[:, :vocab]  # rows further apart than they are long
    tokens, logprobs = triton_sampling.greedy(logits)
    best, wanted = expected(logits)
    assert torch.equal(logits.gather(1, tokens[:, None]), logits.gather(1, best[:, None]))
    assert torch.equal(tokens, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))  # the first of equal ones
    torch.testing.assert_close(logprobs, wanted, atol=2e-6, rtol=2e-6)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nucleus, "PIECE", 128)
    monkeypatch.setattr(nucleus, "BLOCK", 128)


@pytest.mark.quick_cases("0.3")
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.999])
@INTERPRETED
@pytest.mark.usefixtures("small_pieces")
def test_top_p_without_sorting(top_p: float) -> None:
    """What transformers' warper keeps with exact sums, apart from scores at the limit; of equal ones the last."""
    scores = torch.randn(9, 203, generator=torch.Generator().manual_seed(0)) * 3
    scores[1] = scores[1].mul(2).round().div(2)
    scores[2], scores[3, 3:], scores[4] = 0.5, -INF, -INF
    scores[5, 7], scores[6, 150], scores[7, :] = NAN, INF, scores[7].abs().neg() - 200
    kept = nucleus.keep_nucleus_unsorted(scores.to(DEVICE, copy=True), torch.full((9,), 1 - top_p, device=DEVICE)).cpu()
    ascending, order = scores.double().sort(dim=1, stable=True)
    sums = ascending.softmax(1).cumsum(1)
    removed = sums <= 1 - top_p
    removed[:, -1] = False
    at_limit = (sums - (1 - top_p)).abs() < 1e-5
    at_limit[:, -1] = False
    wanted = scores.masked_fill(torch.empty_like(removed).scatter(1, order, removed), -INF)
    differs = (kept != wanted) & ~(kept.isnan() & wanted.isnan())
    assert not (differs & ~torch.empty_like(removed).scatter(1, order, at_limit)).any()
    assert int((kept[2] > -INF).sum()) == max(1, round(203 * top_p)) and kept[2, -1] == 0.5


@INTERPRETED
@pytest.mark.usefixtures("small_pieces")
def test_rows_without_a_seed_are_drawn_from_what_top_p_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_by(monkeypatch, "triton", DEVICE)
    scores = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).mul(3).to(DEVICE)
    scores[3, 5] = NAN
    warpers = [TopPLogitsWarper(top_p) for top_p in (0.1, 0.5, 0.9, 0.5)]
    kept = torch.cat([warper(None, row[None]) for warper, row in zip(warpers, scores)])
    for _ in range(2):
        tokens, invalid = sampling.sample_top_p(scores.clone(), warpers, [None] * 4)
        assert (kept.gather(1, tokens[:, None]) > -INF)[:3].all() and invalid.isnan().tolist() == [False] * 3 + [True]


@INTERPRETED
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


@INTERPRETED
@pytest.mark.usefixtures("pieces")
def test_log_probabilities_of_sampled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_by(monkeypatch, "triton", DEVICE)
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


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seeds", [[None] * 6, [None, 3, None, None, 4, None], [1, 2, 3]])
def test_rows_without_a_seed_are_drawn_at_once(seeds: list[int | None]) -> None:
    """Rows with a seed get the numbers that they would get alone."""
    probs = torch.empty(len(seeds), 50)
    torch.manual_seed(0)
    with Counted(lambda each: each.overloadpacket is torch.ops.aten.exponential_) as draws:
        numbers = sampling.exponentials(probs, [None if s is None else seeded(s) for s in seeds], at_once=True)
    assert draws.count == sum(s is not None for s in seeds) + (None in seeds)
    for row, seed in zip(numbers, seeds):
        if seed is not None:
            assert torch.equal(row, torch.empty(50).exponential_(1, generator=seeded(seed)))
    unseeded = [row for row, seed in enumerate(seeds) if seed is None]
    torch.manual_seed(0)
    assert torch.equal(numbers[unseeded], torch.empty(len(unseeded), 50).exponential_(1))


def test_a_cpu_draws_row_by_row_as_ever() -> None:
    torch.manual_seed(0)
    rows = [torch.empty(50).exponential_(1) for _ in range(3)]
    torch.manual_seed(0)
    assert torch.equal(sampling.exponentials(torch.empty(3, 50), [None] * 3, at_once=False), torch.stack(rows))
