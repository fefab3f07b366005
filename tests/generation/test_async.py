"""Async scheduling: steps are prepared before the host knows the last step's tokens, and the results stay the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper

import hf_paged
from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.generation.engine import stepper
from hf_paged.generation.requests import batch
from hf_paged.generation.requests.request import SingleRequest
from hf_paged.kernels.sampling import ToHost
from tests import models
from tests.forwards import before_forwards, fail_forward
from tests.generation.solo import assert_as_solo, assert_idle, config, ended, plain, row_by_row, solo
from tests.noted import note_calls
from tests.schedulings import schedule_asynchronously
from tests.versions.marks import needs_edits

pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length constraints:UserWarning")

NEVER = models.VOCAB  # as EOS: no request ends before its last token
ASYNC = SchedulerConfig(async_scheduling=True)


@pytest.fixture(autouse=True)
def _async(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule_asynchronously(monkeypatch)


class Journal:
    """The order of forwards, of sampling, and of the host's reads of sampled tokens."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.step = 0
        lists, choose = ToHost.lists, batch.sample_batch

        def note(output: Any) -> None:
            self.step += 1
            if output.scheduled:
                self.lines.append(f"forward {self.step}")

        def noted_choice(*args: Any) -> Any:
            choice, failed = choose(*args)
            if choice is not None:
                choice._numbers.name = self.step
                self.lines.append(f"choice {self.step}")
            return choice, failed

        def noted_lists(self_: Any) -> Any:
            self.lines.append(f"read {self_.name}")
            return lists(self_)

        before_forwards(engine, note)
        monkeypatch.setattr(stepper, "sample_batch", noted_choice)
        monkeypatch.setattr(ToHost, "lists", noted_lists)


def test_a_step_is_sent_off_before_the_last_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = models.prompts(5, 9)
    with Engine(models.shared("llama"), None, ASYNC) as engine:
        journal = Journal(engine, monkeypatch)
        monkeypatch.setattr(ToHost, "name", "", raising=False)
        outputs = []
        for prompt in prompts:
            engine.add_request(prompt, config("greedy", max_new_tokens=3, eos_token_id=NEVER))
        while engine.has_unfinished_requests():
            outputs.append([len(output.outputs[0].token_ids) for output in engine.step()])
        assert engine.stats().steps == 3
    assert outputs == [[], [1, 1], [2, 2], [3, 3]]
    # A step's sampling is launched when the host knows which requests have not ended with the previous token.
    assert journal.lines == [
        "forward 1", "choice 1", "forward 2", "read 1", "choice 2", "forward 3", "read 2", "choice 3", "read 3",
    ]  # fmt: skip


def test_a_row_that_was_computed_for_nothing_changes_nothing() -> None:
    """Its request ended with the previous token: no number is drawn for it, and its blocks are freed, not cached."""
    model = models.shared("llama")
    (prompt,) = models.prompts(13)
    made = config("sample", temperature=5.0, max_new_tokens=40, eos_token_id=list(range(3, 30)))
    del made.seed
    torch.manual_seed(1)
    expected = model.generate(prompt[None], generation_config=made)[0, 13:].tolist()
    state = torch.get_rng_state()
    assert len(expected) < 40
    with Engine(model, CacheConfig(block_size=2)) as engine:
        torch.manual_seed(1)
        (output,) = engine.generate([prompt], made)
        assert torch.get_rng_state().equal(state)
        assert output.outputs[0].token_ids == expected
        assert_idle(engine)
        for length in range(1, len(expected) + 1):  # what is cached is right
            longer = torch.cat([prompt, torch.tensor(expected[:length])])
            outputs = engine.generate([longer], config("greedy", eos_token_id=NEVER))
            assert_as_solo(model, outputs, [(longer, config("greedy", eos_token_id=NEVER))])
        assert engine.stats().prefix_cache_hit_tokens > 13


def test_nobody_gives_way_for_a_token_that_may_not_come() -> None:
    """In a pool that exactly holds a request to its end, an EOS is not followed by an append."""
    model = models.shared("llama")
    (prompt,) = models.prompts(6)
    (line,) = plain(model, [prompt], max_new_tokens=6)
    assert line[5] not in line[:5]
    made = config("greedy", max_new_tokens=20, eos_token_id=line[5])
    with Engine(model, CacheConfig(num_blocks=25, block_size=1)) as engine:
        engine.cache_prefix([3] * 14)  # pinned: the pool could hold 20 tokens more, but it has room for 5
        (output,) = engine.generate([prompt], made)
        assert (output.error, output.outputs[0].token_ids) == (None, line)
        assert engine.stats().preemptions_recompute == engine.stats().preemptions_swap == 0


@pytest.mark.parametrize("at", [1, 3])
def test_an_abort_between_two_steps_leaves_the_others_alone(at: int) -> None:
    model = models.shared("llama")
    wanted = [(prompt, config("greedy", eos_token_id=NEVER)) for prompt in models.prompts(7, 12, 9)]
    with Engine(model) as engine:
        ids, finished = [engine.add_request(*each) for each in wanted], {}
        for step in itertools.count():
            if step == at:
                engine.abort(ids[1])
            finished |= {output.request_id: output for output in engine.step()}
            if not engine.has_unfinished_requests():
                break
        assert_idle(engine)
    line = plain(model, [wanted[1][0]], max_new_tokens=10)[0]
    assert finished[ids[1]].outputs[0].token_ids == line[: at - 1]
    assert_as_solo(model, [finished[ids[0]], finished[ids[2]]], [wanted[0], wanted[2]])


@pytest.mark.parametrize("at", [1, 3])
def test_the_token_before_a_forward_that_fails_is_not_lost(at: int) -> None:
    model = models.shared("llama")
    (prompt,) = models.prompts(7)
    (line,) = plain(model, [prompt], max_new_tokens=10)
    with Engine(model) as engine:
        fail_forward(engine, OSError("no device"), at=at)
        (output,) = engine.generate([prompt], config("greedy", eos_token_id=NEVER), raise_on_error=False)
        assert output.error == "the forward failed: OSError: no device"
        assert output.outputs[0].token_ids == line[:at]
        assert_idle(engine)


@pytest.mark.parametrize("at", [1, 3])
def test_after_an_interrupt_it_goes_on(at: int) -> None:
    model = models.shared("llama")
    wanted = [(prompt, config("greedy", eos_token_id=NEVER)) for prompt in models.prompts(7, 12)]
    with Engine(model) as engine:
        finished: dict[str, Any] = {}
        fail_forward(engine, KeyboardInterrupt(), at=at)
        ids = [engine.add_request(*each) for each in wanted]
        while engine.has_unfinished_requests():
            try:
                finished |= {output.request_id: output for output in engine.step()}
            except KeyboardInterrupt:
                continue
        assert_idle(engine)
    assert_as_solo(model, [finished[key] for key in ids], wanted)


@pytest.mark.parametrize("scheduling", [True, False])
def test_a_step_interrupted_while_it_waits_for_tokens_is_done_again(scheduling: bool, monkeypatch: Any) -> None:
    """This is where a host spends most of its time."""
    model = models.shared("llama")
    names = ["greedy", "sample", "beams", "four samples", "greedy"]
    wanted = list(zip(models.prompts(5, 9, 7, 11, 30), map(config, names)))
    for at in (2, 4):
        with Engine(
            model, CacheConfig(num_blocks=200, block_size=4), SchedulerConfig(async_scheduling=scheduling)
        ) as engine:
            ids = [engine.add_request(*each) for each in wanted[:4]]
            finished = {}
            for _ in range(at):
                finished |= {output.request_id: output for output in engine.step()}
            ids.append(engine.add_request(*wanted[4]))  # whose prompt is computed in that step

            def interrupted(self: Any) -> Any:
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(batch.SampledTokens, "read", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
            engine.check_integrity()
            finished |= ended(engine)
            assert_idle(engine)
        assert_as_solo(model, [finished[key] for key in ids], wanted)


def test_who_has_ended_in_a_step_that_is_broken_off_has_ended_well(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = models.prompts(5, 9)
    accept = SingleRequest.accept

    def broken(self: SingleRequest, *args: Any) -> Any:
        if self.request_id == "second" and self.length == 9 + 1:
            raise OSError("no memory")
        return accept(self, *args)

    monkeypatch.setattr(SingleRequest, "accept", broken)
    with Engine(models.shared("llama")) as engine:
        engine.add_request(first, config("greedy", max_new_tokens=2), request_id="first")
        engine.add_request(second, config("greedy", max_new_tokens=5), request_id="second")
        outputs = ended(engine)
        assert_idle(engine)
    assert_as_solo(models.shared("llama"), [outputs["first"]], [(first, config("greedy", max_new_tokens=2))])
    assert outputs["second"].error == "the step was broken off: OSError: no memory"


@needs_edits
def test_like_requests_are_chosen_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets the tokens that it gets alone, with its own random numbers, for any other requests in the batch."""
    model = models.shared("llama")
    shapes: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}, {"min_p": 0.05, "top_k": 0},
        {"typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01}, {"top_k": 0},
        {"do_sample": False, "no_repeat_ngram_size": 2},
        {"output_scores": True, "return_dict_in_generate": True, "temperature": 0.8},
    ]  # fmt: skip
    wanted = []
    for index, (prompt, shape) in enumerate(zip(models.prompts(*range(3, 31)), itertools.cycle(shapes))):
        options = {"do_sample": True, "seed": index, "eos_token_id": NEVER, **shape}
        wanted.append((prompt, config("greedy", **options)))
    groups = note_calls(monkeypatch, batch, "_sample_alike", lambda group, *_: len(group))
    for scheduling in (True, False):
        groups.clear()
        with Engine(model, None, SchedulerConfig(async_scheduling=scheduling, max_num_batched_tokens=1024)) as engine:
            outputs = engine.generate([p for p, _ in wanted], [c for _, c in wanted])
        # A penalty is no obstacle; where an n-gram has returned, a greedy request is not plain.
        assert sum(groups) == 280 and groups.count(8) == 10 and 60 <= len(groups) <= 70
        assert_as_solo(model, outputs, wanted)
        assert all(len(o.outputs[0].processed_logprobs or ()) == 10 for o in outputs[6::7])


def test_one_of_many_that_fails() -> None:
    """A processor or criterion that raises, or forbids every token, among requests that are sampled together."""
    model = models.shared("llama")
    prompts = models.prompts(5, 6, 7, 8, 9, 10)

    def raising(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no more")

    def nothing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf)

    def wrong(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores[:0]

    made = config("sample", eos_token_id=NEVER)
    extras: list[dict[str, Any]] = [
        {}, {"logits_processor": [raising]}, {"logits_processor": [nothing]}, {"logits_processor": [wrong]},
        {"stopping_criteria": [raising]}, {},
    ]  # fmt: skip
    with Engine(model) as engine:
        ids = [engine.add_request(prompt, made, **extra) for prompt, extra in zip(prompts, extras)]
        outputs = ended(engine)
        assert_idle(engine)
    errors = [outputs[key].error for key in ids]
    assert errors[0] is errors[5] is None
    assert errors[1] == errors[4] == "OSError: no more"
    assert errors[2] == "after the logits processors no token has a probability"
    assert errors[3] == "ValueError: the logits processors returned scores of shape (0, 96) for (1, 96)"
    for index in (0, 5):
        assert [outputs[ids[index]].outputs[0].token_ids] == solo(model, prompts[index], made)[0]


def test_a_warper_of_the_caller_s_is_the_caller_s_alone() -> None:
    """The caller may change it while the request runs, so it is never shared."""
    model = models.shared("llama")
    prompts, made = models.prompts(5, 9), config("greedy", do_sample=True, top_k=0, eos_token_id=NEVER, seed=1)
    mine = TemperatureLogitsWarper(0.5)
    with Engine(model) as engine:
        engine.add_request(prompts[0], made, logits_processor=[mine])
        other = config("greedy", do_sample=True, top_k=0, temperature=0.5, eos_token_id=NEVER, seed=2)
        key, finished = engine.add_request(prompts[1], other), {}
        for _ in range(3):
            engine.step()
        mine.temperature = 9.0
        finished |= ended(engine)
    assert_as_solo(model, [finished[key]], [(prompts[1], other)])


def test_the_setting() -> None:
    with pytest.raises(ValueError, match="async_scheduling=True: the model does not run packed"):
        Engine(row_by_row(), scheduler_config=ASYNC)
    with Engine(row_by_row()) as engine:
        assert engine.scheduler_config.async_scheduling is False
    for wrong in (1, "yes"):
        with pytest.raises(ValueError, match=f"async_scheduling={wrong!r}"):
            hf_paged.SchedulerConfig(async_scheduling=wrong)  # type: ignore[arg-type]
