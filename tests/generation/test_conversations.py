"""Calls that continue a given PagedKVCache: packed rows, with the text of plain generate turn by turn."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor

import hf_paged
from hf_paged.integration.names import CACHE
from tests import conftest, models
from tests.versions.marks import since

pytestmark = pytest.mark.usefixtures("trusted_code")

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "temperature": 3.0},
    "processors": {"do_sample": True, "temperature": 2.0, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
}
OPTIONS = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True}
PAGED = {"cache_implementation": "paged"}


few = pytest.mark.parametrize("family", models.FEW)


def assert_packed(records: list[hf_paged.CallRecord]) -> None:
    assert records
    assert [record.route for record in records] == ["packed"] * len(records), [record.reason for record in records]


class Turns:
    """Plays a conversation: each turn appends `messages` to what there is and continues the cache of the last turn."""

    def __init__(self, model: Any, inputs: dict[str, torch.Tensor], cache: Any = None, **given: Any) -> None:
        self.model, self.cache, self.given = model, cache, given
        self.ids, self.mask = inputs["input_ids"], inputs["attention_mask"]
        self.texts: list[torch.Tensor] = []

    def say(self, messages: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        self.ids = torch.cat([self.ids, messages], dim=1)
        self.mask = torch.cat([self.mask, torch.ones_like(messages) if mask is None else mask], dim=1)

    def turn(self, *, only_new: bool = False, **options: Any) -> Any:
        ids = self.ids
        if only_new and self.cache is not None:
            ids = ids[:, self.cache.get_seq_length() :]
        output = self.model.generate(
            ids, attention_mask=self.mask, **{CACHE: self.cache}, **{**OPTIONS, **options}, **self.given
        )
        self.cache = output.past_key_values
        text = output.sequences[:, ids.shape[1] :]
        width = len(text) // len(self.ids)
        if width > 1:
            self.ids, self.mask = self.ids.repeat_interleave(width, 0), self.mask.repeat_interleave(width, 0)
        self.say(text)
        self.texts.append(text)
        return output


def play(
    play_one: Callable[[Turns], None],
    model: Any,
    inputs: dict[str, torch.Tensor],
    *,
    route: str | None = "packed",
    given: dict[str, Any] = PAGED,
    cache: Any = None,
) -> hf_paged.PagedKVCache:
    """Play a conversation plain and paged and compare the texts; returns the paged cache."""
    plain, paged = Turns(model, inputs), Turns(model, inputs, cache, **given)
    torch.manual_seed(5)
    play_one(plain)
    torch.manual_seed(5)
    with hf_paged.record_calls() as records:
        play_one(paged)
    for number, (expected, actual) in enumerate(zip(plain.texts, paged.texts, strict=True)):
        assert torch.equal(actual, expected), f"turn {number}:\npaged {actual.tolist()}\nplain {expected.tolist()}"
    assert len(records) == len(paged.texts)
    if route == "packed":
        assert_packed(records)
    elif route is not None:
        assert records[-1].route == route, records[-1].reason
    assert isinstance(paged.cache, hf_paged.PagedKVCache)
    paged.cache.check_integrity()
    assert paged.cache.get_seq_length() == plain.cache.get_seq_length()
    return paged.cache


def messages(turn: int, rows: int, length: int = 5) -> torch.Tensor:
    return torch.stack(models.prompts(*[length] * rows, seed=50 + turn))


def two_turns(turns: Turns, length: int = 5, mask: torch.Tensor | None = None, **options: Any) -> None:
    turns.turn(do_sample=False, **options)
    turns.say(messages(0, len(turns.ids), length), mask)
    turns.turn(do_sample=False, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [(18,), (5, 19, 12)])
@pytest.mark.parametrize("only_new", [False, True])
@pytest.mark.covering(1)
def test_turns(family: str, mode: str, lengths: tuple[int, ...], only_new: bool) -> None:
    def three(turns: Turns) -> None:
        for number in range(3):
            turns.turn(only_new=only_new, **MODES[mode])
            turns.say(messages(number, len(lengths)))

    cache = play(three, models.shared(family), models.batch(*lengths))
    assert cache.padding == [max(lengths) - length for length in lengths]
    cache.reset()
    assert conftest.blocks_in_use() == 0


@pytest.mark.covering(1)
@few
@pytest.mark.parametrize("options", [{}, PAGED], ids=["only the cache", "and by name"])
def test_the_given_cache_is_filled_and_returned(family: str, options: dict[str, Any]) -> None:
    model, inputs = models.shared(family), models.batch(9, 17)
    cache = hf_paged.PagedKVCache(model.config, block_size=4)
    assert play(two_turns, model, inputs, given=options, cache=cache) is cache
    text = model.generate(**inputs, **{**OPTIONS, "return_dict_in_generate": False}, do_sample=False)
    assert text.shape[1] == 23
    cache.reset()
    plain_tensor = {**OPTIONS, "return_dict_in_generate": False}
    with hf_paged.record_calls() as records:
        assert model.generate(**inputs, **plain_tensor, **{CACHE: cache}, **options, do_sample=False).equal(text)
    assert_packed(records)
    assert cache.get_seq_length() == 22 and cache.padding == [8, 0]


@few
def test_a_cache_made_without_a_config(family: str) -> None:
    model = models.shared(family)
    cache = play(two_turns, model, models.batch(9), cache=hf_paged.PagedKVCache(block_size=4))
    assert len(cache.layers) == model.config.num_hidden_layers


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", [{"num_beams": 3, "do_sample": False}, {"num_beams": 2, "do_sample": True}])
def test_beams_of_a_turn(family: str, mode: dict[str, Any]) -> None:
    """The cache of one row, repeated for the beams of the next turn; the beams are computed once as long as equal."""

    def two(turns: Turns) -> None:
        turns.turn(do_sample=False)
        turns.say(messages(0, 2))
        turns.cache.batch_repeat_interleave(mode["num_beams"])
        turns.turn(**mode, num_return_sequences=2)

    cache = play(two, models.shared(family), models.batch(9, 14))
    assert cache.num_rows == 2 * mode["num_beams"]


def test_equal_rows_of_a_turn_are_computed_once() -> None:
    model = models.build("llama")
    first = model.generate(models.prompts(21)[0][None], **OPTIONS, **PAGED, do_sample=False)
    cache, ids = first.past_key_values, torch.cat([first.sequences, messages(0, 1, 7)], dim=1)
    cache.batch_repeat_interleave(4)
    counts: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda m, args, out: counts.append(args[0].numel()))
    output = model.generate(ids.repeat(4, 1), **{CACHE: cache}, **OPTIONS, **PAGED, do_sample=True)
    handle.remove()
    assert counts == [8, 4, 4, 4, 4, 4]
    assert output.past_key_values is cache and cache.num_rows == 4
    cache.check_integrity()
    assert cache.stats().blocks_used <= 3 + 4
    cache.reset()
    assert conftest.blocks_in_use() == 0


@since("5.18", "plain generate forgets the tokens of a given cache where it computes the prompt in chunks")
@few
def test_in_chunks(family: str) -> None:
    play(partial(two_turns, length=11, prefill_chunk_size=4), models.shared(family), models.batch(9))


@pytest.mark.parametrize("family", ["llama", "opt"])  # plain generate cannot crop a cache with sliding windows
def test_after_the_user_has_changed_the_cache(family: str) -> None:
    def turns_of(turns: Turns) -> None:
        turns.turn(do_sample=False)
        turns.cache.crop(-3)
        turns.turn(do_sample=False)
        turns.cache = copy.deepcopy(turns.cache)
        turns.cache.batch_select_indices(torch.tensor([1, 0, 1]))
        turns.ids, turns.mask = turns.ids[[1, 0, 1]], turns.mask[[1, 0, 1]]
        turns.say(messages(0, 3))
        turns.turn(**MODES["sample"])

    play(turns_of, models.shared(family), models.batch(9, 14))


# -- what transformers' own loop does ----------------------------------------------------------------------------------


@few
def test_messages_of_different_lengths(family: str) -> None:
    """Padding between two turns is no left padding."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    play(partial(two_turns, mask=mask), models.shared(family), models.batch(9, 14), route="hf_loop")


class Own(hf_paged.PagedKVCache):
    """A cache that may do more than keep K/V."""


def test_a_class_of_the_users_own() -> None:
    model = models.shared("llama")
    cache = Own(model.config)

    def one(turns: Turns) -> None:
        turns.turn(do_sample=False)

    assert play(one, model, models.batch(9), route="hf_loop", cache=cache) is cache


def test_a_cache_of_other_rows_is_refused() -> None:
    model, ids = models.shared("llama"), models.prompts(9)[0][None]
    cache = model.generate(ids, **OPTIONS, **PAGED).past_key_values
    longer = torch.cat([ids, messages(0, 1, 12)], dim=1).repeat(2, 1)
    with pytest.raises(ValueError, match="a batch of 2 on a cache of 1 rows"):
        model.generate(longer, **{CACHE: cache}, **OPTIONS, **PAGED)


def test_a_pair_of_caches_and_prompt_lookup_are_recorded() -> None:
    model, ids = models.shared("llama"), models.prompts(9)[0].repeat(3)[None]
    options = {**OPTIONS, "return_dict_in_generate": False, "do_sample": False}
    expected = model.generate(ids, **options)
    cache = hf_paged.PagedKVCache(model.config)
    with hf_paged.record_calls() as records:
        text = model.generate(ids, **options, **{CACHE: cache}, prompt_lookup_num_tokens=3)
    assert text.equal(expected)
    assert [record.route for record in records] == ["hf_loop"]


# -- errors ------------------------------------------------------------------------------------------------------------


class FailsAt(LogitsProcessor):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if input_ids.shape[1] == self.length:
            raise RuntimeError("the processor broke")
        return scores


@pytest.mark.covering(1)
@pytest.mark.parametrize("late", [0, 2], ids=["after the prompt", "later"])
@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_a_failed_turn_leaves_a_whole_cache(late: int, mode: dict[str, Any]) -> None:
    """What was computed stays, and the same conversation goes on."""
    model, inputs = models.shared("llama"), models.batch(9, 14)
    for options in ({}, PAGED):
        turns = Turns(model, inputs, **options)
        turns.turn(do_sample=False)
        turns.say(messages(0, 2))
        if mode:
            turns.cache.batch_repeat_interleave(2)
        length = turns.ids.shape[1]
        with pytest.raises(RuntimeError, match="the processor broke"):
            turns.turn(do_sample=False, logits_processor=[FailsAt(length + late)], **mode)
        assert turns.cache.get_seq_length() == length + late
        if options:
            turns.cache.check_integrity()
            assert turns.cache.num_rows == (4 if mode else 2)
            turns.cache.crop(length - 1)
            if mode:
                turns.cache.batch_select_indices(torch.tensor([0, 2]))
            last = turns.turn(do_sample=False)
            turns.cache.reset()
    assert conftest.blocks_in_use() == 0
    plain = model.generate(turns.ids[:, :length], attention_mask=turns.mask[:, :length], **OPTIONS, do_sample=False)
    assert torch.equal(last.sequences, plain.sequences)


@few
def test_a_full_cache(family: str) -> None:
    """The turn that does not fit raises; the cache keeps what fitted, without holes."""
    model, ids = models.shared(family), models.prompts(20)[0][None]
    cache = hf_paged.PagedKVCache(model.config, block_size=4, num_blocks=8)
    first = model.generate(ids, **{CACHE: cache}, **OPTIONS, do_sample=False)
    longer = torch.cat([first.sequences, messages(0, 1)], dim=1)
    with pytest.raises(hf_paged.OutOfBlocks):
        model.generate(longer, **{CACHE: cache}, **OPTIONS, do_sample=False)
    assert cache.get_seq_length() == 32
    cache.check_integrity()
    cache.crop(25)
    options = {**OPTIONS, "max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones(1, 27).long()}
    expected = model.generate(longer[:, :27], **options).sequences
    assert torch.equal(model.generate(longer[:, :27], **{CACHE: cache}, **options).sequences, expected)


def test_a_prompt_that_does_not_fit_leaves_the_cache_empty() -> None:
    model, ids = models.shared("llama"), torch.stack(models.prompts(20, 20))
    cache = hf_paged.PagedKVCache(model.config, block_size=4, num_blocks=6)
    for _ in range(2):
        with pytest.raises(hf_paged.OutOfBlocks):
            model.generate(ids, **{CACHE: cache}, **OPTIONS, attention_mask=torch.ones_like(ids), **PAGED)
        assert cache.num_rows == 0 and cache.padding == [] and cache.stats().blocks_used == 0
    assert model.generate(ids[:1], **{CACHE: cache}, max_new_tokens=3).shape == (1, 23)


def test_one_call_at_a_time() -> None:
    model, ids = models.shared("llama"), models.prompts(9)[0][None]
    cache = model.generate(ids, **OPTIONS, **PAGED).past_key_values
    longer = torch.cat([ids, messages(0, 1, 12)], dim=1)

    class Nested(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            model.generate(longer, **{CACHE: cache}, max_new_tokens=2)
            return scores

    with pytest.raises(ValueError, match="this cache is in use by another call"):
        model.generate(longer, **{CACHE: cache}, **OPTIONS, logits_processor=[Nested()])
    assert model.generate(longer, **{CACHE: cache}, max_new_tokens=2).shape == (1, 23)


def test_conversations_in_threads() -> None:
    model = models.shared("gemma3")
    same: list[bool] = []

    def talk(number: int) -> None:
        texts = []
        for options in ({}, PAGED):
            turns = Turns(model, models.batch(9 + number), **options)
            for turn in range(3):
                turns.turn(do_sample=False)
                turns.say(messages(turn, 1))
            texts.append(turns.ids)
        same.append(torch.equal(*texts))

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 3


_turn = st.tuples(st.sampled_from(sorted(MODES)), st.integers(1, 9), st.booleans(), st.sampled_from([1, 1, 2]))


@pytest.mark.slow
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(models.FAMILIES),
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.lists(_turn, min_size=2, max_size=4),
    st.sampled_from([1, 4, 16]),
)
def test_any_conversation(family: str, lengths: list[int], turns_: list[Any], block_size: int) -> None:
    model = models.shared(family)

    def all_of_them(turns: Turns) -> None:
        for number, (mode, length, only_new, width) in enumerate(turns_):
            if number:
                turns.say(messages(number, len(turns.ids), length))
                if width > 1:
                    turns.cache.batch_repeat_interleave(width)
            options = {**MODES[mode], "num_return_sequences": width} if width > 1 else MODES[mode]
            options = {**options, "do_sample": True} if width > 1 else options
            turns.turn(only_new=only_new, **options)

    cache = hf_paged.PagedKVCache(model.config, block_size=block_size)
    play(all_of_them, model, models.batch(*lengths), cache=cache).reset()
