"""`logprobs=k`, `prompt_logprobs=k`, and outputs that copy nothing before they are read."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.generation.requests.outputs import CompletionOutput, Lists, RequestOutput
from tests import models
from tests.generation.solo import row_by_row

PROMPT = {"prompt_logprobs": 1}
BASE: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def config(**options: Any) -> GenerationConfig:
    return GenerationConfig(**{**BASE, "seed": 0, **options})


def model_of(family: str) -> Any:
    return row_by_row() if family == "bloom" else models.shared(family)


def opened(family: str = "llama", num_blocks: int = 200, **scheduler: Any) -> Engine:
    cache = CacheConfig(num_blocks=num_blocks, block_size=4)
    return Engine(model_of(family), cache, SchedulerConfig(**scheduler))


@torch.no_grad()
def expected(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [length, vocab] after each of the tokens."""
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), dim=-1)


def assert_top(top: list[tuple[int, float]], logprobs: torch.Tensor, count: int) -> None:
    values, tokens = logprobs.topk(count)
    assert [token for token, _ in top] == tokens.tolist()
    assert torch.allclose(torch.tensor([value for _, value in top]), values, atol=1e-4)


def assert_right(output: RequestOutput, model: Any, num_top: int | None, num_prompt_top: int | None) -> None:
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        logprobs = expected(model, [*prompt, *completion.token_ids])
        if num_top is None:
            assert completion.top_logprobs is None
        else:
            assert completion.top_logprobs is not None and len(completion.top_logprobs) == len(completion.token_ids)
            for place, top in enumerate(completion.top_logprobs, len(prompt) - 1):
                assert_top(top, logprobs[place], num_top)
        if num_prompt_top is None:
            assert output.prompt_logprobs is None and output.prompt_top_logprobs is None
            continue
        assert output.prompt_logprobs is not None and output.prompt_top_logprobs is not None
        assert len(output.prompt_logprobs) == len(output.prompt_top_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None and output.prompt_top_logprobs[0] is None
        for place, (token, value, top) in enumerate(
            zip(prompt[1:], output.prompt_logprobs[1:], output.prompt_top_logprobs[1:])
        ):
            assert value == pytest.approx(float(logprobs[place, token]), abs=1e-4)
            assert top is not None
            assert_top(top, logprobs[place], num_prompt_top)


KINDS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 2.0, "top_k": 20},
    {"do_sample": True, "temperature": 2.0, "num_return_sequences": 3},
    {"repetition_penalty": 1.5, "output_scores": True},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom"])
@pytest.mark.parametrize("scheduling", [True, False], ids=["async", "sync"])
def test_top_logprobs_of_prompt_and_tokens(family: str, scheduling: bool) -> None:
    prompts = models.prompts(1, 9, 30, 21, 7)
    kinds = [*KINDS, {}]
    tops, prompt_tops = [0, 3, 5, 2, None], [4, 0, 3, None, None]
    wants = {} if family == "bloom" else {"async_scheduling": scheduling}
    with opened(family, max_num_batched_tokens=16, **wants) as engine:
        configs = [config(**kind) for kind in kinds]
        plain = engine.generate(prompts, configs)
        outputs = engine.generate(prompts, configs, logprobs=tops, prompt_logprobs=prompt_tops)
        for output, other, top, prompt_top in zip(outputs, plain, tops, prompt_tops):
            assert [c.token_ids for c in output.outputs] == [c.token_ids for c in other.outputs]
            assert_right(output, engine.model, top, prompt_top)
        engine.check_integrity()


@pytest.mark.parametrize("num_cached", [0, 8, 20])
def test_prompt_logprobs_beside_cached_prefixes(num_cached: int) -> None:
    (prompt,) = models.prompts(25)
    with opened() as engine:
        if num_cached:
            engine.cache_prefix(prompt[:num_cached])
        for _ in range(2):
            (output,) = engine.generate([prompt], config(), prompt_logprobs=2, logprobs=1)
            assert_right(output, engine.model, 1, 2)
            assert output.metrics.num_cached_tokens == 0
        (output,) = engine.generate([prompt], config(), logprobs=1)
        assert_right(output, engine.model, 1, None)
        assert output.metrics.num_cached_tokens == 24


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom"])
@pytest.mark.parametrize("start", [0, 1, 9, 19, 20, 25])
def test_the_end_of_a_prompt_is_scored_on_cached_prefixes(family: str, start: int) -> None:
    (prompt,) = models.prompts(25)
    with opened(family, max_num_batched_tokens=10) as engine:
        for attempt in range(2):
            (output,) = engine.generate([prompt], config(), prompt_logprobs=2, prompt_logprobs_start=start)
            logprobs = expected(engine.model, prompt.tolist())
            assert output.prompt_logprobs is not None and output.prompt_top_logprobs is not None
            first = max(1, start)
            assert output.prompt_logprobs[:first] == output.prompt_top_logprobs[:first] == [None] * first
            for place in range(first, 25):
                value, top = output.prompt_logprobs[place], output.prompt_top_logprobs[place]
                assert value == pytest.approx(float(logprobs[place - 1, prompt[place]]), abs=1e-4) and top is not None
                assert_top(top, logprobs[place - 1], 2)
            if family == "llama":  # the others have no prefix cache
                assert output.metrics.num_cached_tokens == (min(max(0, start - 1), 24) // 4 * 4 if attempt else 0)
        engine.check_integrity()


def test_the_last_token_needs_no_position() -> None:
    """A request may end one token beyond the model's positions, as in `generate`."""
    (prompt,) = models.prompts(models.MAX_POSITIONS)
    with opened() as engine:
        (output,) = engine.generate([prompt], config(max_new_tokens=1))
        plain = engine.model.generate(prompt[None], generation_config=config(max_new_tokens=1))
        assert output.outputs[0].token_ids == plain[0, len(prompt) :].tolist()
        with pytest.raises(ValueError, match="max_position_embeddings"):
            engine.add_request(prompt, config(max_new_tokens=2))


def test_beams_have_no_lists_but_their_prompts_have() -> None:
    """Nor has any list more tokens than the vocabulary."""
    (prompt,) = models.prompts(9)
    with opened() as engine:
        (output,) = engine.generate([[5, 6, 7]], config(max_new_tokens=2), logprobs=1000, prompt_logprobs=1000)
        assert_right(output, engine.model, models.VOCAB, models.VOCAB)
        with pytest.raises(ValueError, match="logprobs=2: beams"):
            engine.add_request(prompt, config(num_beams=2), logprobs=2)
        (output,) = engine.generate([prompt], config(num_beams=2), prompt_logprobs=2)
        assert_right(output, engine.model, None, 2)


def test_counts_and_starts_that_are_none() -> None:
    wrong: list[Any] = [{key: v} for key in ("logprobs", "prompt_logprobs") for v in (-1, 1.5, True, "2", 5000)]
    wrong += [{"prompt_logprobs_start": start, **k} for start, k in ((3, {}), (-1, PROMPT), (3, PROMPT))]
    with opened() as engine:
        for options in wrong:
            with pytest.raises(ValueError, match=r"logprobs(_start)?=.*(needed|a place in|the prompt has 2)"):
                engine.add_request([5, 6], config(), **options)


def test_new_tokens_are_those_since_the_readers_last_output() -> None:
    first, second, third = models.prompts(5, 9, 7)
    with opened() as engine:
        engine.add_request(first, config(), request_id="a")
        engine.add_request(second, config(do_sample=True, num_return_sequences=2), request_id="b")
        stream = engine.stream([third], config())
        got: dict[tuple[str, int], list[int]] = {}
        last: dict[str, RequestOutput] = {}
        streamed: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                last[output.request_id] = output
                for completion in output.outputs:
                    got.setdefault((output.request_id, completion.index), []).extend(completion.new_token_ids)
            if engine.stats().steps % 2:
                streamed += next(stream).outputs[0].new_token_ids
        for output in stream:
            streamed += output.outputs[0].new_token_ids
            assert output.outputs[0].token_ids == streamed
        for key, output in last.items():
            for completion in output.outputs:
                assert completion.token_ids == got[key, completion.index]
        assert len(streamed) == 6
        assert not engine._delivery._delivered


def test_outputs_are_snapshots_that_copy_when_they_are_read() -> None:
    (prompt,) = models.prompts(5)
    with opened() as engine:
        engine.add_request(prompt, config())
        outputs = []
        while engine.has_unfinished_requests():
            outputs += [output.outputs[0] for output in engine.step()]
        assert not any(output._copies for output in outputs)
        final = outputs[-1].token_ids
        for count, output in enumerate(outputs, len(final) - len(outputs) + 1):
            new = output.new_token_ids
            assert output.num_tokens == count and new == final[count - len(new) : count]
            assert output.token_ids == final[:count] and len(output.logprobs) == count
        outputs[0].token_ids.append(0)
        assert outputs[-1].token_ids == final


def test_outputs_are_values() -> None:
    tokens = [5, 6, 7]
    output = CompletionOutput(0, Lists(tokens, 1, [0.5, 0.25]), 2, 0.75, None, "eos", 1)
    same = CompletionOutput(0, Lists([6, 7], 0, [0.5, 0.25]), 2, 0.75, None, "eos")
    assert output == same and output.new_token_ids == [7] and same.new_token_ids == [6, 7]
    assert output != CompletionOutput(0, Lists([6], 0, [0.5]), 1, 0.5) and output != 5
    for copied in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert copied == output and copied.new_token_ids == [7]
    assert dataclasses.asdict(output)["cumulative_logprob"] == 0.75  # programs log dataclasses so
    assert repr(output) == (
        "CompletionOutput(index=0, token_ids=[6, 7], logprobs=[0.5, 0.25], cumulative_logprob=0.75, score=None, "
        "finish_reason='eos', processed_logprobs=None, top_logprobs=None)"
    )
