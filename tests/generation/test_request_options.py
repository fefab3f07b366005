"""One object has all that is asked of a request, from the caller's keywords or an HTTP body to the request."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from typing import Any, get_type_hints

import pytest
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine
from hf_paged.generation.request_options import OptionArguments, RequestOptions
from tests import models

GIVEN: dict[str, Any] = {
    "request_id": "it",
    "priority": 2,
    "logits_processor": [lambda ids, scores: scores],
    "stopping_criteria": [lambda ids, scores: ids.new_zeros(len(ids), dtype=bool)],
    "streamer": None,
    "adapter": None,
    "cache_salt": "salt",
    "attention_mask": [1, 1, 1],
    "deadline": 60.0,
    "logprobs": 3,
    "prompt_logprobs": 1,
    "prompt_logprobs_start": 1,
    "inputs": {},
}


def test_editors_show_every_option() -> None:
    names = {field.name for field in fields(RequestOptions)}
    assert set(get_type_hints(OptionArguments)) == names - {"generation_config"} == set(GIVEN)
    parameters = inspect.signature(Engine.add_request).parameters
    assert "OptionArguments" in str(parameters["options"].annotation)
    for name in names:
        assert name in (Engine.add_request.__doc__ or ""), f"add_request does not say what {name} means"


@pytest.mark.parametrize("way", ["add_request", "stream"])
def test_every_option_reaches_the_request(way: str) -> None:
    config = GenerationConfig(max_new_tokens=2)
    with Engine(models.shared("llama"), CacheConfig(num_blocks=32)) as engine:
        if way == "stream":
            each = {name: [value] for name, value in GIVEN.items() if name != "attention_mask"}
            stream = engine.stream([[5, 6, 7]], [config], attention_mask=[GIVEN["attention_mask"]], **each)
            (request,) = stream.requests
        else:
            request = engine.prepare_request([5, 6, 7], RequestOptions(generation_config=config, **GIVEN))
        options = request.options
        assert options.generation_config is config
        assert {name: getattr(options, name) for name in GIVEN} == GIVEN
        with pytest.raises(FrozenInstanceError):
            options.priority = 1  # type: ignore[misc]


@pytest.mark.parametrize("way", ["add_request", "generate"])
def test_an_unknown_option_is_refused_by_name(way: str) -> None:
    with (
        Engine(models.shared("llama"), CacheConfig(num_blocks=32)) as engine,
        pytest.raises(TypeError, match=r"temperature= is no option of a request; choose from .*priority"),
    ):
        if way == "generate":
            engine.generate([[5, 6, 7]], temperature=2.0)
        else:
            engine.add_request([5, 6, 7], temperature=2.0)  # type: ignore[call-arg]
