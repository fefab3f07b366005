"""Every field of a GenerationConfig, at the doors of `generate` and of the engine: carried out, or refused by name."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from typing import Any, get_type_hints

import pytest
import torch
from transformers import CompileConfig, GenerationConfig, WatermarkingConfig

import hf_paged
from hf_paged import CacheConfig, Engine
from hf_paged.generation.options import PREPARED, REFUSED, WITHOUT_EFFECT
from hf_paged.generation.request_options import OptionArguments, RequestOptions
from tests import models

IDS = [5, 6, 7, 8, 9, 10]
FIELDS = list(vars(GenerationConfig()))

# A value of each field that is not its default; several fields have an effect beside another one only.
VALUES: dict[str, Any] = {
    "max_length": 12, "max_new_tokens": 4, "min_length": 9, "min_new_tokens": 3, "early_stopping": True,
    "max_time": 99.0, "stop_strings": ["a"], "do_sample": True, "num_beams": 2, "use_mtp": True, "use_cache": True,
    "cache_implementation": "static", "cache_config": {"num_blocks": 3}, "max_cache_len": 99, "temperature": 0.5,
    "top_k": 3, "top_p": 0.5, "min_p": 0.1, "top_h": 0.3, "typical_p": 0.5, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1,
    "repetition_penalty": 1.5, "encoder_repetition_penalty": 1.5, "length_penalty": 2.0, "no_repeat_ngram_size": 2,
    "bad_words_ids": [[5]], "renormalize_logits": True, "forced_bos_token_id": 7, "forced_eos_token_id": 8,
    "remove_invalid_values": True, "exponential_decay_length_penalty": (2, 1.5), "suppress_tokens": [5],
    "begin_suppress_tokens": [6], "sequence_bias": {(5,): 1.0}, "token_healing": True, "guidance_scale": 1.5,
    "watermarking_config": WatermarkingConfig(), "num_return_sequences": 2, "output_attentions": True,
    "output_hidden_states": True, "output_scores": True, "output_logits": True, "return_dict_in_generate": True,
    "pad_token_id": 3, "bos_token_id": 4, "eos_token_id": 5, "encoder_no_repeat_ngram_size": 2,
    "decoder_start_token_id": 5, "is_assistant": True, "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.3, "prompt_lookup_num_tokens": 3,
    "max_matching_ngram_size": 3, "assistant_early_exit": 2, "assistant_lookbehind": 3, "target_lookbehind": 3,
    "assistant_ensemble_weight": 0.5, "speculation_type": "x", "compile_config": CompileConfig(),
    "disable_compile": True, "continuous_batching_config": {}, "low_memory": True, "penalty_alpha": 0.5,
    "dola_layers": "low",
    "diversity_penalty": 0.5, "num_beam_groups": 2, "constraints": [1], "force_words_ids": [[5]],
    "prefill_chunk_size": 2, "_from_model_config": True, "transformers_version": "1", "_commit_hash": "1",
}  # fmt: skip
WITH_BEAMS = ("length_penalty", "early_stopping", "diversity_penalty")
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def config_with(name: str) -> GenerationConfig:
    config = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    config.num_beams = 2 if name in WITH_BEAMS else None
    config.do_sample = name in (*SAMPLED, "num_return_sequences")
    setattr(config, name, VALUES[name])
    if name == "max_length":
        config.max_new_tokens = None
    return config


@pytest.fixture(scope="module")
def engine() -> Iterator[hf_paged.Engine]:
    with hf_paged.Engine(models.shared("llama"), {"num_blocks": 64}, tokenizer=models.tokenizer()) as engine:
        yield engine


def tokens_or_error(config: GenerationConfig, **options: Any) -> Any:
    torch.manual_seed(0)
    try:
        output = models.shared("llama").generate(
            torch.tensor([IDS]), generation_config=config, tokenizer=models.tokenizer(), **options
        )
    except (ValueError, ImportError, TypeError) as error:
        return type(error), str(error)
    rows = output if isinstance(output, torch.Tensor) else output.sequences
    return [row[len(IDS) :].tolist() for row in rows]


def test_the_table_has_every_field_once() -> None:
    """A field that a newer transformers adds must be entered, and refused or carried out."""
    table = [*PREPARED, *WITHOUT_EFFECT, *REFUSED]
    assert len(set(table)) == len(table)
    assert set(FIELDS) <= set(table) and set(FIELDS) <= set(VALUES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FIELDS)
def test_field(name: str, engine: hf_paged.Engine) -> None:
    config = config_with(name)
    plain = tokens_or_error(copy.deepcopy(config))
    if name != "cache_implementation":
        assert tokens_or_error(copy.deepcopy(config), cache_implementation="paged") == plain
    torch.manual_seed(0)
    if name in REFUSED:
        with pytest.raises(ValueError, match=rf"^{name}={re.escape(repr(VALUES[name]))}: .+"):
            engine.add_request(IDS, config)
    elif isinstance(plain, tuple):
        with pytest.raises(plain[0]):
            engine.add_request(IDS, config)
    else:
        (output,) = engine.generate([IDS], config)
        rows = [list(one.token_ids) for one in output.outputs]
        width = len(plain[0])
        assert [row + [0] * (width - len(row)) for row in rows] == plain
        if name in WITHOUT_EFFECT:
            assert plain == tokens_or_error(config_with("renormalize_logits")) or name == "diversity_penalty"


def test_a_field_that_is_not_in_the_table(engine: hf_paged.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged.generation.options.WITHOUT_EFFECT", WITHOUT_EFFECT - {"low_memory"})
    monkeypatch.setattr("hf_paged.generation.options._unknown", lambda: frozenset({"low_memory"}))
    with pytest.raises(ValueError, match=r"^low_memory=True: this hf_paged does not know it"):
        engine.add_request(IDS, config_with("low_memory"))


def test_the_cache_of_a_checkpoint_is_for_calls(engine: hf_paged.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some checkpoints name a cache in their generation config, which requests may copy."""
    defaults = models.shared("llama").generation_config
    monkeypatch.setattr(defaults, "cache_implementation", "hybrid")
    config = copy.deepcopy(defaults)
    config.max_new_tokens = 2
    for each in (config, GenerationConfig(max_new_tokens=2)):
        engine.abort(engine.add_request(IDS, each))


GIVEN: dict[str, Any] = {
    "request_id": "it", "priority": 2, "logits_processor": [lambda ids, scores: scores],
    "stopping_criteria": [lambda ids, scores: ids.new_zeros(len(ids), dtype=bool)], "streamer": None, "adapter": None,
    "cache_salt": "salt", "attention_mask": [1, 1, 1], "deadline": 60.0, "logprobs": 3, "prompt_logprobs": 1,
    "prompt_logprobs_start": 1, "inputs": {}, "client": "ann", "task": None,
}  # fmt: skip


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
