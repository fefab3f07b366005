"""Requests that arrive while a step runs, what equal configs share, deadlines, and options at every door."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.logits_process import SuppressTokensLogitsProcessor

from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.errors import QueueFull
from hf_paged.generation import prepare
from hf_paged.generation.engine import loop
from hf_paged.generation.prepare import PreparedRequest, Preparer
from hf_paged.generation.request_options import options_of
from hf_paged.generation.requests.outputs import RequestOutput
from tests import models
from tests.generation.solo import ended
from tests.preempting import force_preempt
from tests.waiting import Gate

BASE: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def config(**options: Any) -> GenerationConfig:
    return GenerationConfig(**{**BASE, **options})


def opened(**scheduler: Any) -> Engine:
    return Engine(models.shared("llama"), CacheConfig(num_blocks=200, block_size=4), SchedulerConfig(**scheduler))


def plain(prompt: torch.Tensor, **options: Any) -> list[int]:
    if "seed" in options:
        torch.manual_seed(options.pop("seed"))
    tokens = models.shared("llama").generate(prompt[None], generation_config=config(**options))
    return tokens[0, len(prompt) :].tolist()


def in_time(function: Callable[[], Any]) -> Any:
    """The function's result; fails if another thread has to end something first."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(120)
    assert results, "it waits"
    return results[0]


def finished(engine: Engine) -> dict[str, RequestOutput]:
    outputs = ended(engine)
    engine.check_integrity()
    return outputs


class HeldStep:
    """A step in another thread that does not go on before `release`."""

    def __init__(self, engine: Engine) -> None:
        self._gate = Gate(engine, 0)
        self.outputs: list[RequestOutput] = []
        self._thread = threading.Thread(target=lambda: self.outputs.extend(engine.step()), daemon=True)
        self._thread.start()
        self._gate.wait()

    def release(self) -> None:
        self._gate.open()
        self._thread.join(120)


# -- arrivals ------------------------------------------------------------------------------------------------------


def test_nothing_waits_for_a_step() -> None:
    first, second, third = models.prompts(5, 9, 7)
    with opened() as engine:
        engine.add_request(first, config(), request_id="a")
        held = HeldStep(engine)
        assert in_time(lambda: engine.add_request(second, config(), request_id="b")) == "b"
        in_time(lambda: engine.add_request(third, config(), request_id="c"))
        assert in_time(lambda: engine.abort("c")) and in_time(lambda: engine.abort("a"))
        assert not in_time(lambda: engine.abort("d"))
        stats = in_time(engine.stats)
        assert stats.num_waiting == 2 and stats.prompt_tokens == 21
        stream = in_time(lambda: engine.stream([second], config()))
        with pytest.raises(ValueError, match="'b' is in use"):
            engine.add_request(second, config(), request_id="b")
        in_time(stream.close)
        held.release()
        outputs = {output.request_id: output for output in held.outputs} | finished(engine)
        assert outputs["a"].outputs[0].finish_reason == outputs["c"].outputs[0].finish_reason == "abort"
        assert outputs["b"].outputs[0].token_ids == plain(second)
        assert engine.stats().blocks_used == 0


def test_a_step_takes_in_many_arrivals_without_shutting_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = models.prompts(3)
    with opened() as engine:
        held: list[int] = []  # requests admitted in each hold of the lock
        door, admit = engine._door, engine._admit

        class Counting:
            def __enter__(self) -> None:
                door.__enter__()
                held.append(0)

            def __exit__(self, *error: Any) -> None:
                door.__exit__(*error)

        def counted(request: Any) -> None:
            held[-1] += 1
            admit(request)

        engine._is_stepping = True
        for _ in range(150):
            engine.add_request(prompt, config(max_new_tokens=1))
        engine._is_stepping = False
        monkeypatch.setattr(engine, "_door", Counting())
        monkeypatch.setattr(engine, "_admit", counted)
        ended = {output.request_id for output in engine.step()}
        assert sum(held) >= 150 and max(held) <= 64
        monkeypatch.undo()
        assert len(ended | set(finished(engine))) == 150


def test_all_prompts_of_a_call_are_added_or_none() -> None:
    prompts = models.prompts(5, 6, 7)
    with opened(max_waiting=3) as engine:
        engine.add_request(prompts[0], config(), request_id="a")
        with pytest.raises(QueueFull, match="1 requests wait already"):
            engine.generate(prompts, config())
        with pytest.raises(ValueError, match="'a' is in use"):
            engine.generate(prompts[:2], config(), request_id=["b", "a"])
        with pytest.raises(ValueError, match="'b' is in use"):
            engine.generate(prompts[:2], config(), request_id=["b", "b"])
        with pytest.raises(ValueError, match="deadline=0"):
            engine.generate(prompts[:2], config(), deadline=[None, 0])
        assert engine.stats().num_waiting == 1 and list(finished(engine)) == ["a"]


class Noted:
    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.got.append(tokens.reshape(-1).tolist())

    def end(self) -> None:
        self.got.append("end")


def test_a_request_does_not_wait_for_a_streamer_that_another_has_interrupted() -> None:
    (prompt,) = models.prompts(5)
    with opened() as engine:
        ending, new = mock.Mock(end=mock.Mock(side_effect=KeyboardInterrupt)), mock.Mock()
        engine.stream([prompt], config(), streamer=[ending]).abandon()
        with pytest.raises(KeyboardInterrupt):
            engine.add_request(prompt, config(), streamer=new)
        assert not finished(engine) and not new.put.called


def test_a_streamer_may_call_the_engine_as_it_ends() -> None:
    """It runs without the lock that other threads' arrivals need."""
    (prompt,) = models.prompts(5)

    class Adding(Noted):
        def end(self) -> None:
            super().end()
            in_time(lambda: engine.add_request(prompt, config(), request_id="next"))

    with opened() as engine:
        streamer = Adding()
        engine.add_request(prompt, config(), request_id="first", streamer=streamer)
        engine.step()
        engine.abort("first")
        assert streamer.got[-1] == "end"
        assert finished(engine)["next"].outputs[0].token_ids == plain(prompt)


# -- what requests with equal configs share ------------------------------------------------------------------------


def prepared(preparer: Preparer, prompt: list[int], config: GenerationConfig | None) -> PreparedRequest:
    return preparer.prepare(prompt, options_of(config, {}))


class Counted(Preparer):
    """Counts the runs of transformers' own preparation."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.count = 0

    def _prepare(self, *args: Any) -> PreparedRequest:
        self.count += 1
        return super()._prepare(*args)

    def takes(self, prompt: list[int], config: GenerationConfig | None, **options: Any) -> int:
        """How many runs one request takes."""
        before = self.count
        self.prepare(prompt, options_of(config, options))
        return self.count - before


def test_equal_configs_are_prepared_once() -> None:
    model = models.build("llama")
    preparer = Counted(model)
    options = {"max_new_tokens": 8, "bad_words_ids": [[3], [4, 5]], "eos_token_id": 1, "pad_token_id": 0}
    first, second = GenerationConfig(**options), GenerationConfig(**options)
    assert preparer.takes([5, 6, 7], first) == 1
    assert preparer.takes([7, 6, 5, 4], first) == 0
    assert preparer.takes([7, 6, 5], second) == 0
    second.max_new_tokens = 20
    assert preparer.takes([7, 6, 5], second) == 0
    second.bad_words_ids[1][0] = 6
    assert preparer.takes([7, 6, 5], second) == 1 and preparer.takes([7, 6, 5], second) == 0
    first.temperature, first.do_sample = 0.5, True
    assert preparer.takes([5, 6, 7], first) == 1
    first.temperature = 1.5
    assert preparer.takes([5, 6, 7], first) == 1
    assert preparer.takes([5, 6, 7], None) == 1
    model.generation_config.repetition_penalty = 1.5
    assert preparer.takes([5, 6, 7], first) == 1
    assert type(prepared(preparer, [5, 6, 7], first).logits_processor[0]).__name__.startswith("RepetitionPenalty")
    # What reads the prompt, has a state or is the caller's is made for each request.
    assert preparer.takes([5, 6], config(encoder_repetition_penalty=1.2)) == 1
    assert preparer.takes([5, 6], config(encoder_repetition_penalty=1.2)) == 1
    own = [SuppressTokensLogitsProcessor([3])]
    assert preparer.takes([5, 6], config(), logits_processor=own) == 1
    assert preparer.takes([5, 6], config(), logits_processor=own) == 1
    for _ in range(2):
        assert preparer.takes([5, 6], config(max_length=9, max_new_tokens=None)) == int(_ == 0)
        assert prepared(preparer, [5, 6], config(max_length=9, max_new_tokens=None)).max_length == 9
    assert preparer.takes([5, 6, 7], config(max_length=9, max_new_tokens=None)) == 1
    with pytest.raises(ValueError, match="max_length"):
        prepared(preparer, [5] * 9, config(max_length=9, max_new_tokens=None))
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"prompt length \(2\)"):
            prepared(preparer, [5, 6], config(min_new_tokens=9))


@pytest.mark.parametrize("place", ["subclass", "class"])
def test_what_another_class_adds_is_made_for_each_request(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit is not one that moves with the prompt."""
    model = models.build("llama", eos_token_id=None)
    own = type(model)._get_stopping_criteria

    def with_limit(self: Any, *args: Any, **kwargs: Any) -> Any:
        criteria = own(self, *args, **kwargs)
        criteria.append(MaxLengthCriteria(12))
        return criteria

    if place == "class":
        monkeypatch.setattr(type(model), "_get_stopping_criteria", with_limit)
    else:
        model.__class__ = type("Mine", (type(model),), {"_get_stopping_criteria": with_limit})
    preparer = Counted(model)
    made = config(max_new_tokens=30)
    assert [prepared(preparer, [5] * n, made).max_length for n in (3, 9)] == [12, 12] and preparer.count == 2


def test_no_more_configs_are_kept_than_needed() -> None:
    preparer = Counted(models.shared("llama"))
    for number in range(200):
        prepared(preparer, [5, 6], config(repetition_penalty=1 + number / 100))
    assert len(preparer._kept) == Preparer.MAX_KEPT
    assert preparer.takes([5, 6], config(repetition_penalty=2.99)) == 0


def test_every_request_has_its_own_time() -> None:
    preparer = Counted(models.shared("llama"))
    first, second = (prepared(preparer, [5, 6], config(max_time=100.0)).stopping_criteria[0] for _ in range(2))
    assert preparer.count == 1 and type(first) is type(second) is MaxTimeCriteria
    assert first is not second and first.initial_timestamp <= second.initial_timestamp


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple, prepare.StoppingCriteriaList)):
        return [described(each) for each in value]
    if type(value).__module__.startswith("transformers.generation"):
        skipped = ("initial_timestamp", "_mask_length")
        return type(value), {name: described(each) for name, each in vars(value).items() if name not in skipped}
    return value


OPTIONS = {
    "max_new_tokens": st.integers(1, 20), "max_length": st.integers(14, 30), "min_new_tokens": st.integers(0, 25),
    "min_length": st.integers(0, 25), "eos_token_id": st.sampled_from([1, [1, 2]]), "do_sample": st.booleans(),
    "temperature": st.sampled_from([1, 1.0, 0.5]), "top_k": st.sampled_from([0, 5]),
    "top_p": st.sampled_from([1.0, 0.5]), "min_p": st.just(0.1), "eta_cutoff": st.just(0.1),
    "num_beams": st.sampled_from([1, 3]), "repetition_penalty": st.sampled_from([1.0, 1.5]),
    "encoder_repetition_penalty": st.just(1.5), "no_repeat_ngram_size": st.just(2),
    "encoder_no_repeat_ngram_size": st.just(2), "bad_words_ids": st.just([[3], [4, 5]]),
    "sequence_bias": st.just([[[4, 5], 2.0]]), "forced_eos_token_id": st.just(1), "forced_bos_token_id": st.just(2),
    "exponential_decay_length_penalty": st.just((3, 1.5)), "suppress_tokens": st.just([7]),
    "begin_suppress_tokens": st.just([8]), "max_time": st.just(100.0), "renormalize_logits": st.just(True),
}  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    st.fixed_dictionaries({}, optional=OPTIONS),
    st.lists(
        st.tuples(st.lists(st.integers(9, 40), min_size=1, max_size=12), st.integers(1, 20)), min_size=2, max_size=4
    ),
)
def test_what_is_shared_equals_what_is_prepared_alone(options: Any, arrivals: list[tuple[list[int], int]]) -> None:
    model = models.shared("llama")
    together = Preparer(model)
    made = GenerationConfig(pad_token_id=0, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for prompt, max_new_tokens in arrivals:
            if "max_new_tokens" in options:
                made.max_new_tokens = max_new_tokens
            results = []
            for preparer in (together, Preparer(model)):
                try:
                    request = prepared(preparer, prompt, made)
                except ValueError as error:
                    results.append(str(error))
                else:
                    parts = ("prompt_token_ids", "num_rows", "generation_config", "logits_processor")
                    parts += ("stopping_criteria", "max_length", "eos", "uses_beams")
                    results.append([described(getattr(request, part)) for part in parts])
            assert results[0] == results[1]


# -- time limits ---------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the engine, in a list of one number that the test may change."""
    now = [1000.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("scheduling", [True, False], ids=["async", "sync"])
def test_deadlines(scheduling: bool, clock: list[float]) -> None:
    first, second, third = models.prompts(5, 9, 7)
    with opened(max_num_seqs=1, async_scheduling=scheduling) as engine:
        engine.add_request(first, config(max_new_tokens=50), request_id="running", deadline=5)
        engine.add_request(second, config(), request_id="waiting", deadline=5.0)
        engine.add_request(third, config(), request_id="later", deadline=50)
        for _ in range(3):
            engine.step()
        clock[0] += 6
        outputs = {output.request_id: output for output in engine.step()}
        (running,), (waiting,) = outputs["running"].outputs, outputs["waiting"].outputs
        assert running.finish_reason == waiting.finish_reason == "deadline"
        assert outputs["running"].finished and outputs["running"].error is None
        assert waiting.token_ids == []
        assert running.token_ids and running.token_ids == plain(first, max_new_tokens=50)[: len(running.token_ids)]
        assert finished(engine)["later"].outputs[0].token_ids == plain(third)
        assert engine.stats().blocks_used == 0
        for _ in range(100):
            engine.abort(engine.add_request(first, config(), deadline=1000))
        engine.step()
        assert not engine._timed


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_max_time_counts_for_a_request_that_is_preempted_after_it(mode: str, clock: list[float]) -> None:
    (prompt,) = models.prompts(5)
    with opened(async_scheduling=False) as engine:
        engine.add_request(prompt, config(max_new_tokens=50, max_time=5.0), request_id="it")
        engine.step()
        clock[0] += 6
        engine._end_overdue()  # it runs: it looks at its time after its next token
        assert force_preempt(engine._scheduler, "it", mode)
        (output,) = engine.step()
        assert output.finished and output.outputs[0].finish_reason == "stop"


def test_max_time_counts_while_a_request_waits(clock: list[float]) -> None:
    first, second = models.prompts(5, 9)
    with opened(max_num_seqs=1) as engine:
        engine.add_request(first, config(), request_id="running", deadline=1000)
        engine.add_request(second, config(max_time=5.0), request_id="waiting")
        engine.step()
        clock[0] += 6
        outputs = {output.request_id: output for output in engine.step()}
        assert outputs["waiting"].outputs[0].finish_reason == "stop" and outputs["waiting"].outputs[0].token_ids == []
        assert finished(engine)["running"].outputs[0].token_ids == plain(first)


def test_deadlines_that_are_no_time() -> None:
    with opened() as engine:
        for deadline in (0, -1, float("nan"), float("inf"), True, "5"):
            with pytest.raises(ValueError, match="deadline="):
                engine.add_request([5, 6], config(), deadline=deadline)  # type: ignore[arg-type]


@pytest.mark.parametrize("options, message", [
    ({"priority": [1]}, "priority: a list of 1 for 2 prompts"),
    ({"request_id": "one"}, "request_id: one for 2 prompts"), ({"streamer": Noted()}, "streamer: one for 2 prompts"),
    ({"cache_salt": [None, 5]}, "cache_salt=5"), ({"logits_processor": [[], [5]]}, "logits_processor="),
])  # fmt: skip
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with opened() as engine:
        for door in (engine.generate, engine.stream):
            with pytest.raises(ValueError, match=message):
                door(models.prompts(5, 9), config(), **options)
        with pytest.raises(TypeError, match="colour= is no option"):
            engine.generate(models.prompts(5), config(), colour="red")
        assert not engine.has_unfinished_requests()


class Aborting:
    """A processor that aborts another request at its second token, in the middle of a step."""

    def __init__(self, engine: Engine, other: str) -> None:
        self.engine, self.other, self.calls = engine, other, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            assert self.engine.abort(self.other)
        return scores


@pytest.mark.parametrize("streamed", [False, True], ids=["step", "stream"])
def test_a_request_that_ends_during_a_step_is_returned_as_finished_once(streamed: bool) -> None:
    prompts = models.prompts(5, 6, 7)
    with opened() as engine:
        processors = [None, [Aborting(engine, "0")], None]
        options = {"request_id": ["0", "1", "2"], "logits_processor": processors}
        outputs: list[RequestOutput] = []
        if streamed:
            outputs += engine.stream(prompts, config(), **options)
        else:
            for prompt, request_id, own in zip(prompts, options["request_id"], processors):
                engine.add_request(prompt, config(), request_id=request_id, logits_processor=own)
            while engine.has_unfinished_requests():
                outputs += engine.step()
        last = [output for output in outputs if output.finished]
        assert sorted(output.request_id for output in last) == ["0", "1", "2"]
        reasons = {output.request_id: output.outputs[0].finish_reason for output in last}
        assert reasons["0"] == "abort" and "abort" not in (reasons["1"], reasons["2"])


def test_a_request_that_ends_after_its_delivery_is_streamed_as_finished_once() -> None:
    """Another reader's step delivers it unfinished, and it is aborted before the stream's reader looks."""
    prompts = models.prompts(5, 6)
    with opened() as engine:
        stream = engine.stream(prompts, config(), request_id=["a", "b"])
        engine.step()
        assert engine.abort("a")
        last = [output.request_id for output in stream if output.finished]
    assert sorted(last) == ["a", "b"]
