"""Tokens and log-probabilities from rows of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    WatermarkLogitsProcessor,
)

from hf_paged.generation.sampling import warpers as warpers_module
from hf_paged.generation.sampling.processors import Chain, chain_of, process_together
from hf_paged.kernels import sampling
from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native import ops as native_ops
from tests.implementations import compute_by
from tests.noted import note_calls
from tests.versions.marks import needs_edits


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("vocab", [96, 1000, 128 * 64, 49152])
@pytest.mark.parametrize("count", [1, 8, 12])
def test_largest_is_topk_of_the_sums(rows: int, vocab: int, count: int) -> None:
    scores, offsets = torch.randn(1, vocab).expand(rows, -1), torch.randn(rows)  # as after a prompt
    for _ in range(3):
        values, index = torch.topk((scores + offsets[:, None]).view(-1), count)
        chosen, totals = sampling.largest(scores, offsets, count)
        assert (chosen.tolist(), totals.tolist()) == (index.tolist(), values.tolist())
        scores = torch.randn(rows, vocab)
        scores[:, 5 : vocab // 2] = -float("inf")


@pytest.fixture(params=["torch", "native"])
def _impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_by(monkeypatch, request.param)


@pytest.mark.usefixtures("_impl")
@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 7, 1003, 49152])
def test_greedy(vocab: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(5, vocab + 3) * 4).to(dtype)[:, :vocab]
    logits[1] = logits[1].round()  # with equals
    logits[2] -= 3e4
    logits[3, : vocab // 2] = -torch.inf
    kept = logits.clone()
    tokens, logprobs = sampling.greedy(logits)
    assert logits.equal(kept)
    assert tokens.tolist() == kept.float().argmax(-1).tolist()
    torch.testing.assert_close(logprobs, torch.log_softmax(kept.float(), -1).max(-1)[0], atol=1e-5, rtol=1e-5)
    assert sampling.greedy(kept[4:5])[1].equal(logprobs[4:5])
    kept[1, vocab // 2] = torch.nan
    kept[2] = -torch.inf
    kept[3, vocab - 1] = torch.inf
    assert torch.isnan(sampling.greedy(kept)[1]).tolist() == [False, True, True, True, False]


@pytest.mark.usefixtures("_impl")
def test_choice_follows_the_generator() -> None:
    scores = torch.randn(4, 20)
    mine, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    for _ in range(50):
        expected = torch.multinomial(torch.softmax(scores, -1), 1, generator=theirs)[:, 0]
        tokens, invalid = sampling.sample_tokens(scores, mine)
        tokens = tokens[:, 0]
        assert tokens.tolist() == expected.tolist() and invalid.tolist() == [0] * 4
    assert mine.get_state().equal(theirs.get_state())
    for generator in (mine, None):
        scores[1] = -torch.inf
        assert torch.isnan(sampling.sample_tokens(scores, generator)[1]).tolist() == [False, True, False, False]
    scores[1] = 0
    torch.testing.assert_close(sampling.logprobs_of(scores, tokens), torch.log_softmax(scores, -1)[range(4), tokens])


@pytest.mark.parametrize("vocab", [96, 128, 128 * 40])
def test_row_max_is_the_first_of_the_largest(vocab: int) -> None:
    scores = torch.randint(0, 9, (6, vocab)).float()
    scores[:4, : vocab // 2] -= 9  # so that the largest, with its equals, is not among the first
    scores[3] = -float("inf")
    values, tokens = sampling.row_max(scores)
    assert tokens.tolist() == scores.argmax(-1).tolist()
    assert values.tolist() == scores.amax(-1).tolist()
    scores[2, 5] = float("nan")
    assert torch.isnan(sampling.row_max(scores)[0]).tolist() == [False, False, True, False, False, False]


def test_one_transfer_changes_no_number() -> None:
    tokens = torch.tensor([0, 49151, 2**40 + 1])
    values = torch.tensor([-0.1, torch.inf, -1e-30])
    expected = sampling.to_host(tokens, values, values.sqrt())
    assert expected[0] == tokens.tolist() and expected[1] == values.tolist()
    first, *others = sampling._in_one(tokens, values, values.sqrt()).tolist()
    assert repr((list(map(int, first)), *others)) == repr(expected)  # NaN included


@pytest.mark.usefixtures("_impl")
@pytest.mark.parametrize("vocab", [1, 7, 311, 312, 513, 49152])
def test_draw_is_multinomial_with_the_generator_of_each_row(vocab: int) -> None:
    probs = torch.softmax(torch.randn(5, vocab) * 4, -1)
    probs[0] = 1 / vocab  # all clocks alike
    probs[1, : vocab // 2] = 0
    probs[2] = 0
    probs[2, vocab - 1] = 1
    for seed in range(3):
        mine, theirs = ([torch.Generator().manual_seed(seed + i) for i in range(4)] for _ in range(2))
        for generator in (*mine, *theirs):
            torch.rand(seed, generator=generator)  # which leaves each at another place of its state
        expected = [torch.multinomial(probs[i : i + 1], 1, generator=theirs[i]).item() for i in range(4)]
        torch.manual_seed(seed)
        expected.append(torch.multinomial(probs[4:], 1).item())
        torch.manual_seed(seed)
        assert sampling.draw(probs.clone(), [*mine, None])[:, 0].tolist() == expected
        for one, other in zip(mine, theirs):
            assert one.get_state().equal(other.get_state())


@pytest.mark.usefixtures("_impl")
def test_rows_of_one_generator_are_drawn_one_after_the_other() -> None:
    probs = torch.softmax(torch.randn(64, 300), -1)
    mine, theirs = (torch.Generator().manual_seed(8) for _ in range(2))
    expected = [torch.multinomial(row, 1, generator=theirs).item() for row in probs]
    assert sampling.draw(probs.clone(), [mine] * 64)[:, 0].tolist() == expected
    many = [torch.Generator().manual_seed(n) for n in range(64)]
    expected = [torch.multinomial(row, 1, generator=g).item() for row, g in zip(probs, many)]
    assert (
        sampling.draw(probs.clone(), [torch.Generator().manual_seed(n) for n in range(64)])[:, 0].tolist() == expected
    )


@pytest.mark.usefixtures("_impl")
def test_a_row_of_nan_disturbs_no_other() -> None:
    probs = torch.softmax(torch.randn(3, 300), -1)
    mine, theirs = (torch.Generator().manual_seed(8) for _ in range(2))
    expected = sampling.draw(probs.clone(), [theirs] * 3)[:, 0].tolist()
    probs[1] = torch.nan
    tokens = sampling.draw(probs.clone(), [mine] * 3)[:, 0].tolist()
    assert tokens[::2] == expected[::2] and 0 <= tokens[1] < 300
    assert mine.get_state().equal(theirs.get_state())


@pytest.fixture
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_by(monkeypatch, "native")


def some_distributions(vocab: int, seed: int) -> torch.Tensor:
    """Flat and steep ones, with ties (as in bf16) and without, most of it removed already, all alike."""
    generator = torch.Generator().manual_seed(seed)
    scores = (
        torch.randn(8, vocab, generator=generator) * torch.tensor([0.1, 1.0, 4.0, 1.0, 30.0, 0.3, 1.0, 0.0])[:, None]
    )
    scores[1:4] = scores[1:4].bfloat16().float()
    few = torch.rand(vocab, generator=generator) < 0.1
    few[0] = True
    scores[5:7, ~few] = -torch.inf
    return scores


@pytest.mark.covering(1)
@pytest.mark.usefixtures("_native")
@pytest.mark.parametrize("vocab", [1, 7, 96, 311, 513, 4096, 49152])
@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.999, 0.999999])
def test_top_p_draws_what_transformers_draws(vocab: int, top_p: float) -> None:
    warper = TopPLogitsWarper(top_p)
    for seed in range(3):
        scores = some_distributions(vocab, seed)
        mine, theirs = ([torch.Generator().manual_seed(seed * 100 + i) for i in range(8)] for _ in range(2))
        probs = torch.softmax(warper(None, scores), -1)
        expected = [torch.multinomial(row, 1, generator=g).item() for row, g in zip(probs, theirs)]
        tokens, invalid = sampling.sample_top_p(scores, [warper] * 8, mine)
        assert tokens.tolist() == expected and not invalid.any()
        for one, other in zip(mine, theirs):
            assert one.get_state().equal(other.get_state())


def test_whether_a_top_p_needs_no_sorting() -> None:
    for options in ({}, {"min_tokens_to_keep": 2}, {"filter_value": -1e9}):
        assert warpers_module.is_drawn_through(TopPLogitsWarper(0.9, **options)) is not bool(options)


@pytest.mark.usefixtures("_native")
def test_top_p_leaves_few_rows_undecided_and_those_with_the_generator_of_before() -> None:
    scores = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    generator = torch.Generator().manual_seed(0)
    undecided = sum(len(native_ops.draw_top_p(scores, [0.9] * 8, [generator] * 8)[1]) for _ in range(50))
    assert undecided < 20
    alike = torch.zeros(2, 4096)  # which of them are removed depends on how torch sorts
    before = generator.get_state()
    rows = native_ops.draw_top_p(alike, [0.9] * 2, [generator] * 2)[1]
    assert list(rows) == [0, 1] and rows[0].get_state().equal(before)
    torch.rand(4096, dtype=torch.float64, generator=rows[0])
    assert rows[1].get_state().equal(rows[0].get_state())


@pytest.mark.usefixtures("_native")
@pytest.mark.parametrize(("second", "top_p"), [(-0.8, 0.5), (-0.6, 0.6), (-1.4, 0.7)])
def test_top_p_decides_every_row_whose_bound_lies_between_two_scores(second: float, top_p: float) -> None:
    scores = torch.tensor([[0.0, second] + [-30.0] * 98])  # the first token alone is kept
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        tokens, undecided = native_ops.draw_top_p(scores, [top_p], [generator])
        assert not undecided and tokens.tolist() == [0]


@pytest.mark.usefixtures("_native")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_without_a_distribution_has_no_top_p(value: float) -> None:
    scores = some_distributions(311, 0)
    scores[2, 17] = value
    scores[3] = -torch.inf
    warpers = [TopPLogitsWarper(0.9)] * 8
    invalid = sampling.sample_top_p(scores, warpers, [torch.Generator().manual_seed(i) for i in range(8)])[1]
    assert invalid.isnan().tolist() == [False, False, True, True, False, False, False, False]


@pytest.mark.covering(1)
@pytest.mark.usefixtures("_impl")
@pytest.mark.parametrize("vocab", [1, 63, 1000, 64 * 96])
def test_drawing_from_the_largest_scores_is_top_k(vocab: int) -> None:
    """With ties, with fewer finite scores than are kept, and with more kept than there are runs of scores."""
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 50, 200, vocab):
        scores = (torch.randn(6, vocab + 5, generator=generator) * 3).bfloat16().float()[:, :vocab]  # rows apart
        scores[1] = 0.5
        scores[2, vocab // 3 :] = -torch.inf
        scores[3] = torch.arange(vocab)
        counts = [min(count + row, vocab) for row in range(6)]
        least = [row.topk(k)[0][-1] for row, k in zip(scores, counts)]
        expected = torch.stack([row.masked_fill(row < edge, -torch.inf) for row, edge in zip(scores, least)])
        assert sampling.keep_largest(scores, counts, -torch.inf) is scores
        assert scores.equal(expected)


@pytest.mark.parametrize("fill", [-torch.inf, 0.0])
def test_nan_is_among_the_largest_scores(fill: float) -> None:
    scores = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    scores[1, 7] = torch.nan
    expected = torch.stack([row.masked_fill(row < row.topk(4)[0][-1], fill) for row in scores])
    assert sampling.keep_largest(scores, [4] * 3, fill).allclose(expected, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def _stable(monkeypatch: pytest.MonkeyPatch) -> None:
    sort = torch.sort
    monkeypatch.setattr(torch, "sort", lambda scores, descending: sort(scores, descending=descending, stable=True))
    monkeypatch.setattr(warpers_module, "_UNSTABLE", set())


@pytest.mark.covering(1)
@pytest.mark.usefixtures("_stable")
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("vocab", [96, 1000, 5003])
def test_the_nucleus_of_the_largest_scores_is_what_transformers_keeps(vocab: int, top_p: float) -> None:
    """With ties at both borders and between them, fewer finite scores than are kept, NaN and infinity."""
    generator = torch.Generator().manual_seed(0)
    for count in (1, 5, vocab // 8):
        scores = torch.randn(40, vocab, generator=generator) * 3
        scores[10:30] = scores[10:30].bfloat16().float().mul(2).round().div(2)
        scores[30:34] = torch.randint(3, (4, vocab), generator=generator).float()
        scores[34], scores[35, 2:] = 0.5, -torch.inf
        scores[36, 7], scores[37, 7], scores[38, 5], scores[38, 9] = torch.nan, torch.inf, torch.inf, torch.nan
        scores[39] = -torch.inf
        counts = [min(count + row % 3, vocab // 8) for row in range(40)]
        warpers = [TopPLogitsWarper(top_p if row % 2 else top_p / 2) for row in range(40)]
        expected = torch.cat([
            warper(None, TopKLogitsWarper(k)(None, row[None])) for warper, row, k in zip(warpers, scores, counts)
        ])  # fmt: skip
        kept = sampling.keep_nucleus(scores, counts, [each.top_p for each in warpers])
        assert kept is scores and kept.allclose(expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("_stable")
def test_top_p_after_top_k_sorts_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a processor changes the scores between them."""
    scores = torch.randn(2, 200, generator=torch.Generator().manual_seed(0))
    top_k, top_p, bias = TopKLogitsWarper(10), TopPLogitsWarper(0.8), SuppressTokensLogitsProcessor([3], device="cpu")
    cases = ([top_k, top_p], 0), ([top_k, bias, top_p], 1), ([bias, top_k, top_p, bias], 0)
    chains = [chain_of(LogitsProcessorList(processors), 200) for processors, _ in cases]
    calls = note_calls(monkeypatch, TopPLogitsWarper, "__call__", lambda *_: None)
    for chain, (processors, sorts) in zip(chains, cases, strict=True):
        edits = [chain.edits([1])] * 2
        calls.clear()
        kept = process_together([chain] * 2, scores.clone(), edits)
        assert len(calls) == sorts and kept.equal(LogitsProcessorList(processors)(torch.tensor([[1], [1]]), scores))


@pytest.mark.usefixtures("_impl")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_before_the_processors(dtype: torch.dtype) -> None:
    logits = (torch.randn(6, 311) * 4).to(dtype)
    logits[1, 8] = torch.inf
    logits[2, 8] = torch.nan
    logits[3] = -torch.inf
    logits[4, 3] = -torch.inf
    for token in (3, 8):
        tokens = torch.full((6,), token)
        expected = sampling.logprobs_of(logits.float(), tokens)
        got = sampling.raw_logprobs(logits, tokens, lambda logits: logits.float().clone())
        torch.testing.assert_close(got, expected, equal_nan=True)


def test_another_torch_that_draws_otherwise_is_left_to_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native_build.has_compiler():
        pytest.skip("no C compiler on this machine")
    native_build.build()
    assert native_ops.draws_like_torch()
    compute_by(monkeypatch, "native")
    native = native_ops.draw
    monkeypatch.setattr(native_ops, "draw", lambda probs, generators: native(probs, generators) + 1)
    native_ops.draws_like_torch.cache_clear()
    try:
        probs = torch.softmax(torch.randn(1, 300), -1)
        expected = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(1)).item()
        assert sampling.draw(probs.clone(), [torch.Generator().manual_seed(1)]).item() == expected
        assert not native_ops.draws_like_torch()
    finally:
        native_ops.draws_like_torch.cache_clear()


@needs_edits
def test_sampling_keys_of_requests_that_may_be_sampled_together() -> None:
    def chain(*processors: Any, callers: Any = (), **options: Any) -> Chain:
        return chain_of(LogitsProcessorList(processors), 96, *options.values(), callers=callers)

    warm, top = TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)
    first = chain(warm, top)
    assert (list(first.own), first.warpers, first.editors) == ([], (warm, top), ((), (), ()))
    assert first.sampling_key == chain(TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)).sampling_key
    assert first.sampling_key == chain(TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.1)).sampling_key
    other = TopPLogitsWarper(0.9, min_tokens_to_keep=2)
    different = [chain(top, warm), chain(warm), chain(warm, other), chain(warm, top, x=1)]
    assert all(first.sampling_key != other.sampling_key for other in different)
    # What changes a few scores is no obstacle.
    penalty = RepetitionPenaltyLogitsProcessor(1.2)
    mixed = chain(warm, penalty, top)
    assert (list(mixed.own), mixed.warpers, list(map(len, mixed.editors))) == ([], (warm, top), [0, 1, 0])
    assert mixed.sampling_key == first.sampling_key
    # What may do anything else is done one by one, and so is all that comes before it.
    watermark = WatermarkLogitsProcessor(96, "cpu", seeding_scheme="selfhash")
    marked = chain(warm, penalty, watermark, top)
    assert (list(marked.own), marked.warpers, marked.editors) == ([warm, penalty, watermark], (top,), ((), ()))
    assert marked.sampling_key == chain(watermark, top).sampling_key != chain(top).sampling_key
    assert list(chain(penalty, warm, callers=[penalty]).own) == [penalty]

    class Mine(TemperatureLogitsWarper):
        pass

    alone = chain(warm, Mine(0.7), top)
    assert alone.is_custom and len(alone.own) == 3 and alone.warpers == ()
    assert alone.sampling_key != chain(warm, Mine(0.7), top).sampling_key


@pytest.mark.parametrize("count", [1, 6])
def test_several_draws_without_replacement_are_those_of_multinomial(count: int) -> None:
    scores = torch.randn(1, 300)
    mine, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    for _ in range(20):
        expected = torch.multinomial(torch.softmax(scores, -1), count, generator=theirs)
        assert sampling.sample_tokens(scores, mine, count)[0].equal(expected)
    assert mine.get_state().equal(theirs.get_state())
