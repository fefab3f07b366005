"""torch's default dtype and default device: a program may set both, and they change nothing that we compute."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria

from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.fused.cpu import norms as fused_norms
from tests import models
from tests.architectures.tiny import tiny_model

CASES = [("bfloat16", "float32"), ("meta", "bfloat16"), ("meta for ever", "float32")]
COMMON: dict[str, Any] = {"max_new_tokens": 7, "eos_token_id": None, "pad_token_id": 0}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "scores": {"do_sample": False, "return_dict_in_generate": True, "output_scores": True},
    "top-k": {"do_sample": True, "top_k": 20, "temperature": 0.7},
    "top-p": {"do_sample": True, "top_k": 0, "top_p": 0.9, "temperature": 1.3},
    "top-k and top-p": {"do_sample": True, "top_k": 30, "top_p": 0.9},
    "min-p": {"do_sample": True, "top_k": 0, "min_p": 0.05, "repetition_penalty": 1.2},
    "several": {"do_sample": True, "top_k": 30, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3}, "drawn beams": {"do_sample": True, "num_beams": 2, "top_k": 20},
}  # fmt: skip
OF_GENERATE = ("return_dict_in_generate", "output_scores")
BATCH, PROMPTS = models.batch(5, 30, 1), models.prompts(3, 40, 17)


@contextlib.contextmanager
def default(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        if name == "meta":
            undo.enter_context(torch.device("meta"))
        elif name == "meta for ever":
            undo.callback(torch.set_default_device, None)
            torch.set_default_device("meta")
        else:
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(getattr(torch, name))
        yield


class Third(StoppingCriteria):
    """Ends a row at each token that 7 divides."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, -1] % 7 == 0


def llama(dtype: str) -> Any:
    return models.build("llama").to(getattr(torch, dtype))


def by_engine(model: Any) -> list[Any]:
    """Requests with all options, several at a time, in too little memory for all of them."""
    requests = {}
    sizes = CacheConfig(num_blocks=40, block_size=4), SchedulerConfig(preemption="swap")
    with Engine(model, *sizes) as engine:
        for number, (name, options) in enumerate(OPTIONS.items()):
            config = GenerationConfig(**COMMON, **{k: v for k, v in options.items() if k not in OF_GENERATE})
            config.seed = number
            more = {"stopping_criteria": [Third()], "logprobs": 2, "prompt_logprobs": 2} if name == "greedy" else {}
            for prompt in PROMPTS:
                requests[engine.add_request(prompt, config, **more)] = None
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    samples = [(s.token_ids, s.logprobs, s.top_logprobs) for s in output.outputs]
                    requests[output.request_id] = output.error, samples, output.prompt_logprobs
        engine.check_integrity()
    return list(requests.values())


def by_generate(model: Any, options: dict[str, Any], **more: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    result = model.generate(**BATCH, **COMMON, **options, **more)
    return [result] if isinstance(result, torch.Tensor) else [result.sequences, *result.scores]


@functools.cache
def undisturbed(dtype: str) -> tuple[list[Any], list[list[torch.Tensor]]]:
    model = llama(dtype)
    generated = [by_generate(model, options, cache_implementation="paged") for options in OPTIONS.values()]
    return by_engine(model), generated


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_an_engine(name: str, dtype: str) -> None:
    expected, model = undisturbed(dtype)[0], llama(dtype)
    with default(name):
        found = by_engine(model)
    assert [error for error, *_ in found] == [None] * len(found)
    assert found == expected


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_generate(name: str, dtype: str) -> None:
    """The tokens and scores; transformers' own beams make tensors on the default device, and raise an error."""
    model, expected = llama(dtype), undisturbed(dtype)[1]
    for options, before in zip(OPTIONS.values(), expected, strict=True):
        with default(name):
            if "meta" in name and "num_beams" in options:
                for more in ({}, {"cache_implementation": "paged"}):
                    with pytest.raises(NotImplementedError, match="meta"):
                        by_generate(model, options, **more)
            else:
                found = by_generate(model, options, cache_implementation="paged")
                assert len(found) == len(before) and all(map(torch.equal, found, before))


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["gemma3", "opt", "falcon_h1", "gpt_oss"])
@pytest.mark.parametrize("name", ["bfloat16", "meta"])
def test_families(name: str, family: str) -> None:
    """What plain generate computes under the same default. Where that raises an error, ours may, but need not."""
    make = models.build if family in models.FAMILIES else tiny_model
    options, ids, model = {**COMMON, "do_sample": False}, PROMPTS[2][None], make(family)
    with contextlib.ExitStack() as errors:
        try:
            with default(name):
                expected = model.generate(ids, **options)
        except NotImplementedError as error:  # "Cannot copy out of meta tensor"
            expected = model.generate(ids, **options)
            errors.enter_context(contextlib.suppress(type(error)))
        with default(name):
            found = model.generate(ids, **options, cache_implementation="paged")
        assert found.equal(expected)


@pytest.mark.parametrize("name", ["float16", "float64", "meta"])
def test_what_is_recognised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and rotations are compared with the kernels on numbers that no default changes."""
    monkeypatch.setattr(fused_norms, "_probed", {})
    monkeypatch.setattr(fused_norms, "_rotations", {})
    model = llama("float32")
    with default(name):
        found = fused_norms.native_layers(model)
    assert found is not None and len(found._norms) == 5 and len(found._functions) == 1
