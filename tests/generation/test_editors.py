"""Processors of many requests done together: the bits of transformers' own, and the tokens of each request alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as lp
from transformers.generation.logits_process import LogitsProcessorList

from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.generation.sampling import editors, warpers
from hf_paged.generation.sampling.edits import Edit, Op, apply_edits
from hf_paged.generation.sampling.processors import chain_of, process_together
from tests import models
from tests.generation.solo import assert_as_solo, assert_idle, solo
from tests.implementations import compute_by
from tests.noted import Counted

pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length constraints:UserWarning")

VOCAB = 40


def some_ids(rng: random.Random, most: int = 6, beyond: int = 0) -> list[int]:
    return [rng.randrange(VOCAB + beyond) for _ in range(rng.randint(1, most))]


def eos(rng: random.Random) -> torch.Tensor:
    return torch.tensor(some_ids(rng, beyond=5))


def biases(rng: random.Random) -> dict[tuple[int, ...], float]:
    """Among few tokens, so that several complete one sequence, and one token has several biases."""
    values = [0.1, -0.3, 7.7, 1e8, -1e8, float("-inf"), float("inf")]
    keys = [tuple(rng.randrange(4) for _ in range(rng.choice([1, 2, 2, 3]))) for _ in range(12)]
    return {key: rng.choice(values) for key in keys}


def bad_words(rng: random.Random) -> list[list[int]]:
    return [list(key) for key in biases(rng)]


def prompt(rng: random.Random) -> torch.Tensor:
    return torch.tensor([[rng.randrange(4) for _ in range(rng.randint(1, 12))]])


MAKERS: dict[str, Any] = {
    "bias": lambda rng, ids: lp.SequenceBiasLogitsProcessor(biases(rng)),
    "encoder penalty": lambda rng, ids: lp.EncoderRepetitionPenaltyLogitsProcessor(rng.choice([0.7, 1.3]), ids),
    "penalty": lambda rng, ids: lp.RepetitionPenaltyLogitsProcessor(
        rng.choice([0.7, 1.3]), rng.choice([None, 2, torch.tensor([0]), torch.tensor([3])])
    ),
    "ngrams": lambda rng, ids: lp.NoRepeatNGramLogitsProcessor(rng.choice([1, 2, 3])),
    "encoder ngrams": lambda rng, ids: lp.EncoderNoRepeatNGramLogitsProcessor(rng.choice([1, 2, 3]), ids),
    "bad words": lambda rng, ids: lp.NoBadWordsLogitsProcessor(bad_words(rng), eos(rng)),
    "min length": lambda rng, ids: lp.MinLengthLogitsProcessor(rng.randrange(16), eos(rng)),
    "min new": lambda rng, ids: lp.MinNewTokensLengthLogitsProcessor(ids.shape[1], rng.randrange(5), eos(rng)),
    "forced bos": lambda rng, ids: lp.ForcedBOSTokenLogitsProcessor(rng.randrange(VOCAB)),
    "forced eos": lambda rng, ids: lp.ForcedEOSTokenLogitsProcessor(
        ids.shape[1] + rng.randint(1, 4), torch.tensor(some_ids(rng))
    ),
    "finite": lambda rng, ids: lp.InfNanRemoveLogitsProcessor(),
    "decay": lambda rng, ids: lp.ExponentialDecayLengthPenalty(
        (rng.randrange(3), rng.choice([1.2, 0.9])), torch.tensor(some_ids(rng)), ids.shape[1]
    ),
    "watermark": lambda rng, ids: lp.WatermarkLogitsProcessor(
        VOCAB,
        "cpu",
        greenlist_ratio=rng.choice([0.2, 0.6]),
        bias=rng.choice([2.0, 0.3]),
        context_width=rng.choice([1, 3]),
    ),
    "suppress": lambda rng, ids: lp.SuppressTokensLogitsProcessor(some_ids(rng, beyond=5)),
    "suppress first": lambda rng, ids: lp.SuppressTokensAtBeginLogitsProcessor(some_ids(rng), ids.shape[1]),
}


def some_scores(rows: int, generator: torch.Generator) -> torch.Tensor:
    scores = torch.randn(rows, VOCAB, generator=generator) * 5
    special = torch.rand(rows, VOCAB, generator=generator)
    for low, value in ((0.0, torch.inf), (0.02, -torch.inf), (0.04, torch.nan), (0.06, 0.0), (0.08, -0.0)):
        scores[(special >= low) & (special < low + 0.02)] = value
    return scores


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.isnan().equal(expected.isnan())
    assert got.nan_to_num(nan=0.5).equal(expected.nan_to_num(nan=0.5))


@pytest.mark.parametrize("seed", range(5))
def test_processors_of_several_requests_together_have_the_bits_of_each_alone(seed: int) -> None:
    """Of any types in any order, as histories grow by one token or more."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    requests = []
    for _ in range(6):
        ids = prompt(rng)
        names = rng.sample(sorted(set(MAKERS) - {"finite"}), rng.randint(0, 6))
        processors = [MAKERS[name](rng, ids) for name in names]
        processors.insert(len(processors) // 2, lp.InfNanRemoveLogitsProcessor())
        processors.append(lp.TemperatureLogitsWarper(0.7))
        requests.append((LogitsProcessorList(processors), ids))
    chains = [chain_of(processors, VOCAB) for processors, _ in requests]
    assert not any(chain.own for chain in chains)
    assert len({chain.sampling_key for chain in chains}) == 1
    histories = [ids for _, ids in requests]
    for _ in range(12):
        raw = some_scores(len(requests), generator)
        edits = [chain.edits(ids[0].tolist()) for chain, ids in zip(chains, histories)]
        got = process_together(chains, raw.clone(), edits)
        for row, ((processors, _), ids) in enumerate(zip(requests, histories)):
            assert_same_bits(got[row : row + 1], processors(ids, raw[row : row + 1].clone()))
        histories = [
            torch.cat([ids, torch.tensor([[rng.randrange(4) for _ in range(rng.choice([0, 1, 1, 1, 3]))]]).long()], 1)
            for ids in histories
        ]


@pytest.mark.parametrize("name", MAKERS)
def test_each_processor_has_the_bits_of_transformers(name: str) -> None:
    """Also of two forks of an editor, which know the text so far and no later text of the other."""
    for seed in range(4):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        ids = prompt(rng)
        processors = LogitsProcessorList([MAKERS[name](rng, ids)])
        forks = [(chain_of(processors, VOCAB), ids)]
        assert not forks[0][0].own
        for step in range(9):
            for chain, text in forks:
                scores = some_scores(1, generator)
                got = process_together([chain], scores.clone(), [chain.edits(text[0].tolist())])
                assert_same_bits(got, processors(text, scores.clone()))
            if step == 3:
                forks.append((forks[0][0].fork(), forks[0][1]))
            forks = [(chain, torch.cat([text, torch.tensor([[rng.randrange(4)]])], 1)) for chain, text in forks]


def test_many_tokens_that_are_new_at_once() -> None:
    """Of which one has no score, as those of media may have none."""
    tokens, scores = torch.arange(150)[None], torch.randn(1, 200)
    processors = LogitsProcessorList([lp.RepetitionPenaltyLogitsProcessor(1.3)])
    chain = chain_of(processors, 200)
    got = process_together([chain], scores.clone(), [chain.edits([*range(150), 250])])
    assert_same_bits(got, processors(tokens, scores))


# By a number between 0 and 1, which is to be the only difference between two warpers of one kind.
WARPER_MAKERS: dict[str, Any] = {
    "temperature": lambda x: lp.TemperatureLogitsWarper(0.1 + 2 * x),
    "top k": lambda x: lp.TopKLogitsWarper(1 + int(x**2 * 1000), min_tokens_to_keep=2),
    "top p": lambda x: lp.TopPLogitsWarper(x),
    "top p of several": lambda x: lp.TopPLogitsWarper(x, min_tokens_to_keep=3),
    "min p": lambda x: lp.MinPLogitsWarper(x / 3), "typical": lambda x: lp.TypicalLogitsWarper(x),
    "epsilon": lambda x: lp.EpsilonLogitsWarper(x / 10), "eta": lambda x: lp.EtaLogitsWarper(x / 10),
    "top h": lambda x: lp.TopHLogitsWarper(x), "finite": lambda x: lp.InfNanRemoveLogitsProcessor(),
    "normal": lambda x: lp.LogitNormalization(),
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("width", [VOCAB, 1024])
@pytest.mark.parametrize("name", WARPER_MAKERS)
def test_warpers_of_several_rows_have_the_bits_of_each_alone(name: str, width: int, monkeypatch: Any) -> None:
    """Whatever the setting of each. A row with NaN disturbs no other. Also as on a GPU, without native code."""
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    for impl, settings in itertools.product(
        ("torch", None), ([0.37] * 5, [rng.uniform(0.001, 0.999) for _ in range(40)])
    ):
        if impl is not None:
            compute_by(monkeypatch, impl)
        each = [WARPER_MAKERS[name](x) for x in settings]
        assert len({warpers.warper_key(warper) for warper in each} - {None}) == 1
        raw = torch.randn(len(each), width, generator=generator).bfloat16().float() * 3  # has ties
        raw[0, 5] = torch.nan
        raw[1:, 7] = -torch.inf
        got = warpers.warp(each, raw.clone())
        for row in range(1, len(each)):
            assert_same_bits(got[row : row + 1], each[row](None, raw[row : row + 1].clone()))
        assert name == "finite" or got[0].isnan().any()
        monkeypatch.undo()


def test_warpers_with_another_second_setting_do_not_share_a_call() -> None:
    keys = {
        warpers.warper_key(lp.TopPLogitsWarper(0.9, filter_value, count))
        for filter_value in (0.0, 1.0)
        for count in (1, 2)
    }
    assert len(keys) == 4 and None not in keys


# -- numbers of each row cost no launches ------------------------------------------------------------------------------


PENALTIES: dict[str, Any] = {
    "repetition": lambda x: lp.RepetitionPenaltyLogitsProcessor(1 + x),
    "encoder": lambda x: lp.EncoderRepetitionPenaltyLogitsProcessor(1 + x, torch.tensor([[3, 5, 8]])),
    "decay": lambda x: lp.ExponentialDecayLengthPenalty((1, 1 + x), torch.tensor([2]), 1),
    "bias": lambda x: lp.SequenceBiasLogitsProcessor({(4,): x, (1, 2): 2 * x}),
}


def test_all_settings_of_all_rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_by(monkeypatch, "torch")
    names = sorted(WARPER_MAKERS.keys() - {"typical", "eta"})  # which add up a row: on a CPU they are called for each
    assert_independent(lambda x: [*(PENALTIES[k](x) for k in PENALTIES), *(WARPER_MAKERS[k](x) for k in names)])


def assert_independent(make: Callable[[float], list[Any]]) -> None:
    """64 rows share the calls, whose number is the same for 2 different settings as for 64."""
    found = []
    for distinct in (2, 64):
        lists = [LogitsProcessorList(make((1 + row % distinct) / 65)) for row in range(64)]
        chains = [chain_of(processors, VOCAB) for processors in lists]
        assert len({chain.sampling_key for chain in chains}) == 1
        raw, tokens = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(0)) * 5, [1, 2, 3, 1, 2]
        edits = [chain.edits(tokens) for chain in chains]
        given = raw.clone()
        with Counted(lambda each: not each.is_view) as operations:
            got = process_together(chains, given, edits)
        for row, processors in enumerate(lists):
            assert_same_bits(got[row : row + 1], processors(torch.tensor([tokens]), raw[row : row + 1].clone()))
        found.append(operations.count)
    assert found[0] == found[1] < 150


def test_what_cannot_be_edited_goes_alone() -> None:
    """Indices beyond the vocabulary, on which transformers raises, and subclasses."""

    class Mine(lp.MinLengthLogitsProcessor):
        pass

    beyond = torch.tensor([VOCAB])
    for processor in (
        Mine(3, torch.tensor([1])),
        lp.SequenceBiasLogitsProcessor({(VOCAB,): 1.0}),
        lp.ForcedEOSTokenLogitsProcessor(9, beyond),
        lp.ForcedBOSTokenLogitsProcessor(VOCAB),
        lp.EncoderRepetitionPenaltyLogitsProcessor(1.2, beyond[None]),
        lp.ExponentialDecayLengthPenalty((1, 1.1), beyond, 3),
        lp.RepetitionPenaltyLogitsProcessor(1.2, torch.tensor([0, 1])),
        lp.WatermarkLogitsProcessor(VOCAB, "cpu", seeding_scheme="selfhash"),
        lp.WatermarkLogitsProcessor(VOCAB + 1, "cpu"),
    ):
        assert editors.editor_of(processor, VOCAB) is None
    for token in (0, VOCAB - 1):
        assert editors.editor_of(lp.ForcedBOSTokenLogitsProcessor(token), VOCAB) is not None


OPTIONS: list[dict[str, Any]] = [
    {"min_new_tokens": 5}, {"min_length": 20}, {"repetition_penalty": 1.3}, {"encoder_repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2}, {"encoder_no_repeat_ngram_size": 2}, {"bad_words_ids": [[5], [7, 8], [30], [31]]},
    {"sequence_bias": {(9,): 5.0, (4, 9): -3.0, (50,): 2.0}}, {"suppress_tokens": [10, 11, 12]},
    {"begin_suppress_tokens": [20, 21]}, {"forced_eos_token_id": 7}, {"exponential_decay_length_penalty": (2, 1.2)},
    {"remove_invalid_values": True}, {"renormalize_logits": True},
]  # fmt: skip
WARPERS: dict[str, list[float]] = {
    "temperature": [0.7, 0.9, 1.4], "top_k": [3, 12, 1000], "top_p": [0.3, 0.8, 0.95], "min_p": [0.05, 0.2],
    "typical_p": [0.5, 0.9], "epsilon_cutoff": [0.01], "eta_cutoff": [0.01, 0.03], "top_h": [0.5, 0.8],
}  # fmt: skip


def random_config(rng: random.Random) -> GenerationConfig:
    options: dict[str, Any] = {"max_new_tokens": rng.randint(3, 14), "pad_token_id": models.PAD}
    options["eos_token_id"] = rng.choice([models.EOS, list(range(3, 20))])
    for each in rng.sample(OPTIONS, rng.randint(0, 5)):
        options |= each
    if rng.random() < 0.5:
        options |= {"do_sample": True, "top_k": 0}
        for name in rng.sample(sorted(WARPERS), rng.randint(0, 4)):
            options[name] = rng.choice(WARPERS[name])
        options["seed"] = rng.randrange(1000)
    return GenerationConfig(**options)


def assert_as_solo_or_failed(model: Any, outputs: list[Any], wanted: list[Any]) -> None:
    for output, request in zip(outputs, wanted):
        if output.error is None:
            assert_as_solo(model, [output], [request])
        else:  # the options leave no token
            with pytest.raises(RuntimeError, match="probability tensor"):
                solo(model, *request)
    assert sum(output.error is None for output in outputs) > 0.8 * len(outputs)


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_random_mixes_equal_their_solo_runs(seed: int, is_async: bool) -> None:
    """In a pool so small that requests are preempted and computed again."""
    rng = random.Random(seed)
    model = models.shared("llama")
    wanted = [(each, random_config(rng)) for each in models.prompts(*(rng.randint(1, 30) for _ in range(24)))]
    scheduler = SchedulerConfig(
        max_num_seqs=12, max_num_batched_tokens=24, preemption="recompute", async_scheduling=is_async
    )
    with Engine(model, CacheConfig(num_blocks=14, block_size=4), scheduler) as engine:
        outputs = engine.generate([p for p, _ in wanted], [c for _, c in wanted], raise_on_error=False)
        assert_idle(engine)
        assert engine.stats().preemptions_recompute > 0
    assert_as_solo_or_failed(model, outputs, wanted)


def test_processors_of_transformers_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogitsProcessorList, "__call__", lambda *args: pytest.fail("called"))
    model = models.shared("llama")
    options = {"max_new_tokens": 6, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2, "bad_words_ids": [[7]]}
    beams = GenerationConfig(**options, num_beams=3, pad_token_id=0)
    samples = GenerationConfig(**options, num_return_sequences=3, do_sample=True, pad_token_id=0)
    greedy = GenerationConfig(**options, min_new_tokens=3, pad_token_id=0)
    with Engine(model) as engine:
        outputs = engine.generate(models.prompts(4, 7, 5), [beams, samples, greedy])
    assert [len(output.outputs) for output in outputs] == [1, 3, 1]


def test_a_second_edit_of_one_kind_sees_the_first() -> None:
    """A repetition penalty and an encoder's may have one factor and the same tokens."""
    one, two = np.array([1, 2]), np.array([2, 3])
    for op, expected in ((Op.SCALE, [1.0, 0.5, 0.25, 0.5]), (Op.GROW, [1.0, 3.0, 9.0, 3.0])):
        scores = torch.ones(2, 4)
        apply_edits(scores, [[], [Edit(op, one, None, 2.0), Edit(op, two, None, 2.0)]])
        assert scores.tolist() == [[1.0] * 4, expected]
    scores = torch.ones(1, 4)
    apply_edits(scores, [[Edit(Op.ADD, ids, np.array([2.0, 4.0], dtype=np.float32)) for ids in (one, two)]])
    assert scores.tolist() == [[1.0, 3.0, 7.0, 5.0]]
