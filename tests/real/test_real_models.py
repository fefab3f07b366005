"""Checkpoints that people know (`scripts/real_models.py`): in fp32, the tokens of plain `generate` of the same model.

    python -m pytest -m real tests/real -s     # a quarter of an hour on one core; shows near ties with their margins

They are skipped where the packages cannot be downloaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import wave
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    pipeline,
)

import hf_paged
from hf_paged import CacheConfig, Engine
from tests.real.prompts import HERE, prompts

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(3600)]

NEW = 24
NEAR = 1e-3
"""Two logits that lie no further apart are a near tie: a sum in another order may decide between them."""
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "beams": {"num_beams": 4, "length_penalty": 0.8},
    "penalties": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
}


@cache
def folder_of(name: str) -> Path:
    script = HERE / "scripts" / "real_models.py"
    made = subprocess.run([sys.executable, script, name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"scripts/real_models.py {name}: {made.stderr.strip().splitlines()[-1]}")
    return Path(made.stdout.splitlines()[-1])


@cache
def loaded(name: str) -> tuple[Any, Any, dict[str, list[list[int]]]]:
    model = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder_of(name))
    return model, tokenizer, prompts(tokenizer)


def config_of(model: Any, **options: Any) -> GenerationConfig:
    eos = model.generation_config.eos_token_id
    pad = eos[0] if isinstance(eos, list) else eos
    return GenerationConfig(max_new_tokens=NEW, eos_token_id=eos, pad_token_id=pad, **({"do_sample": False} | options))


def called(model: Any, ids: list[int], *, seed: int = 0, **options: Any) -> list[int]:
    """The new tokens of a call with one prompt."""
    given = torch.tensor([ids])
    torch.manual_seed(seed)
    paged = {name: options.pop(name) for name in ("cache_implementation",) if name in options}
    config = config_of(model, **options)
    result = model.generate(given, attention_mask=torch.ones_like(given), generation_config=config, **paged)
    return result[0, len(ids) :].tolist()


@cache
def plain(name: str, kind: str, index: int) -> list[int]:
    """Plain greedy tokens. Prints each near tie among them, with its margin."""
    model, _, found = loaded(name)
    given = torch.tensor([found[kind][index]])
    config = config_of(model, output_scores=True, return_dict_in_generate=True)
    result = model.generate(given, attention_mask=torch.ones_like(given), generation_config=config)
    for step, scores in enumerate(result.scores):
        best, second = scores[0].topk(2).values.tolist()
        if best - second < NEAR:
            print(f"near tie: {name}, {kind} {index}, token {step}: {best - second:.1e}")
    return result.sequences[0, given.shape[1] :].tolist()


def until_end(tokens: list[int], model: Any) -> list[int]:
    eos = model.generation_config.eos_token_id
    ends = eos if isinstance(eos, list) else [eos]
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)


@pytest.fixture(params=["smollm2", "gemma3"])
def name(request: pytest.FixtureRequest) -> str:
    folder_of(request.param)
    return str(request.param)


@pytest.mark.parametrize("mode", MODES)
def test_calls(name: str, mode: str) -> None:
    """Two prompts of each kind, of the documents the shortest. (The engine gets all.)"""
    model, _, found = loaded(name)
    different = []
    for kind, every in found.items():
        for index, ids in enumerate(every[: 1 + (kind != "documents")]):
            options = MODES[mode]
            expected = plain(name, kind, index) if mode == "greedy" else called(model, ids, seed=index, **options)
            if called(model, ids, seed=index, cache_implementation="paged", **options) != expected:
                different.append((kind, index))
    assert not different


def test_padded_prompts(name: str) -> None:
    model, _, found = loaded(name)
    chosen = [(kind, index) for kind in ("questions", "examples", "turns", "code") for index in (0, 1)]
    rows = [found[kind][index] for kind, index in chosen]
    longest = max(map(len, rows))
    pad = config_of(model).pad_token_id
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    call = partial(model.generate, ids, attention_mask=mask, generation_config=config_of(model))
    assert torch.equal(call(cache_implementation="paged"), call())


@pytest.mark.parametrize("drafts", [0, 4])
def test_an_engine_with_little_memory(name: str, drafts: int) -> None:
    """All prompts, preempted now and then, with drafts of their own words. Documents apart: others would all fit."""
    model, _, found = loaded(name)
    config = config_of(model, **({"prompt_lookup_num_tokens": drafts} if drafts else {}))
    different, preempted = [], 0
    for kinds in ([kind for kind in found if kind != "documents"], ["documents"]):
        chosen = [(kind, index) for kind in kinds for index in range(len(found[kind]))]
        given = [found[kind][index] for kind, index in chosen]
        with Engine(model, CacheConfig(num_blocks=(max(map(len, given)) + NEW) // 16 + 3)) as engine:
            outputs = engine.generate(given, config)
            preempted += engine.stats().preemptions_recompute + engine.stats().preemptions_swap
        pairs = zip(chosen, outputs, strict=True)
        different += [each for each, out in pairs if out.outputs[0].token_ids != until_end(plain(name, *each), model)]
    assert preempted
    assert not different


def test_answers_within_a_schema() -> None:
    model, tokenizer, found = loaded("smollm2")
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
    }
    answer = hf_paged.grammar(tokenizer, json_schema=schema)
    config = config_of(model)
    config.max_new_tokens = 60
    with Engine(model, CacheConfig(num_blocks=200)) as engine:
        outputs = engine.generate(found["questions"][:6], config, logits_processor=[answer])
    for output in outputs:
        answer = json.loads(tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True))
        assert set(answer) == {"city", "people"}


def test_bf16_is_no_less_exact_than_plain(name: str) -> None:
    """Log-probabilities of given texts in bf16, against fp32: the error of the engine and of transformers."""
    model, _, found = loaded(name)
    half = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.bfloat16).eval()
    texts = [found["code"][1], found["documents"][0], found["turns"][0]]
    errors = {"plain": 0.0, "paged": 0.0}
    with Engine(half, CacheConfig(num_blocks=400)) as engine:
        for ids in texts:
            given = torch.tensor([ids])
            with torch.inference_mode():
                exact, rounded = (each(given).logits[0, :-1].float().log_softmax(-1) for each in (model, half))
            rows = torch.arange(len(ids) - 1)
            exact, rounded = exact[rows, given[0, 1:]], rounded[rows, given[0, 1:]]
            ours = torch.tensor(engine.generate([ids], config_of(half), prompt_logprobs=0)[0].prompt_logprobs[1:])
            errors["plain"] += (rounded - exact).abs().mean().item()
            errors["paged"] += (ours - exact).abs().mean().item()
    print(name, errors)
    assert errors["paged"] <= 1.05 * errors["plain"]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # what PEFT asks
def test_an_adapter_that_was_trained() -> None:
    peft = pytest.importorskip("peft")
    model, _, found = loaded("smollm2")
    without = [until_end(plain("smollm2", "questions", i), model) for i in range(5)]  # PEFT changes the model in place
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    try:
        optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=2e-3)
        for ids in found["questions"][:6]:
            given = torch.tensor([ids])
            tuned(input_ids=given, labels=given).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        tuned.eval()
        texts = [*found["questions"][:5], *found["examples"][:5]]
        expected = [until_end(called(tuned, ids), model) for ids in texts]
        assert expected[:5] != without
        assert [until_end(called(tuned, ids, cache_implementation="paged"), model) for ids in texts] == expected
        with Engine(tuned, CacheConfig(num_blocks=300)) as engine:
            assert [out.outputs[0].token_ids for out in engine.generate(texts, config_of(model))] == expected
    finally:
        tuned.unload()
        loaded.cache_clear()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"return_timestamps": True}], ids=str)
@pytest.mark.parametrize("size", ["whisper-tiny", "whisper-base"])
def test_whisper(size: str, options: dict[str, Any]) -> None:
    """`generate`, and the pipeline, whose text is about what was said."""
    folder = folder_of(size)
    with wave.open(str(folder.parent / "speech.wav")) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    if model.generation_config.is_multilingual:  # what it takes the synthetic voice's language for ends in a loop
        options = {**options, "language": "en"}
    processor = WhisperProcessor.from_pretrained(folder)
    features = processor(sound, sampling_rate=16000, return_tensors="pt").input_features
    call = partial(model.generate, features, **options)
    expected = call()
    assert torch.equal(call(cache_implementation="paged"), expected)
    listen = pipeline("automatic-speech-recognition", model=model, tokenizer=processor.tokenizer,
                      feature_extractor=processor.feature_extractor)  # fmt: skip
    texts = [
        listen(sound, generate_kwargs={**options, **paged}, return_timestamps="return_timestamps" in options)["text"]
        for paged in ({}, {"cache_implementation": "paged"})
    ]
    print(size, options, texts[0])
    assert texts[0] == texts[1]
    assert len({"quick", "brown", "lazy", "dog", "bright", "cold", "april"} & set(texts[0].lower().split())) >= 4
