"""Requests with all kinds of options, and what plain `generate` returns for each alone."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import hf_paged
from hf_paged import Engine
from tests import models

STOPS = list(range(3, 20))  # EOS ids, so many that requests end early and apart

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {}, "greedy with eos": {"eos_token_id": STOPS},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4, "eos_token_id": STOPS},
    "sample": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 1},
    "four samples": {"do_sample": True, "num_return_sequences": 4, "top_k": 8, "eos_token_id": STOPS, "seed": 2},
    "cold samples": {"do_sample": True, "num_return_sequences": 4, "temperature": 0.1, "seed": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beams to the end": {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 2.0, "eos_token_id": STOPS},
    "beams, early": {"num_beams": 3, "early_stopping": True, "length_penalty": -1.0, "eos_token_id": STOPS},
    "beams, never": {"num_beams": 3, "early_stopping": "never", "eos_token_id": STOPS},
    "beams, processors": {"num_beams": 3, "num_return_sequences": 3, "repetition_penalty": 1.5},
    "beam sampling": {"num_beams": 3, "num_return_sequences": 2, "do_sample": True, "seed": 4},
}  # fmt: skip


def config(name: str, **changes: Any) -> GenerationConfig:
    fixed = {"max_new_tokens": 10, "eos_token_id": models.EOS, "pad_token_id": models.PAD}
    return GenerationConfig(**{**fixed, **OPTIONS[name], **changes})


Result = tuple[list[list[int]], list[float] | None]
_known: dict[tuple[Any, ...], Result] = {}


def solo(model: Any, prompt: torch.Tensor, options: GenerationConfig, **kwargs: Any) -> Result:
    """Tokens (and beam scores) of plain generate for this request alone; those of shared models, computed once."""
    if kwargs or not models.is_shared(model):
        return _solo(model, prompt, options, **kwargs)
    key = (id(model), *prompt.tolist(), options.to_json_string(use_diff=False), getattr(options, "seed", None))
    if key not in _known:
        _known[key] = _solo(model, prompt, options)
    return _known[key]


def _solo(model: Any, prompt: torch.Tensor, options: GenerationConfig, **kwargs: Any) -> Result:
    if hasattr(options, "seed"):
        torch.manual_seed(options.seed)
    result = model.generate(
        prompt[None], generation_config=options, attention_mask=torch.ones_like(prompt[None]),
        return_dict_in_generate=True, output_scores=True, **kwargs,
    )  # fmt: skip
    ends = options.eos_token_id if isinstance(options.eos_token_id, list) else [options.eos_token_id]
    rows = []
    for row in result.sequences[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:end])
    scores = getattr(result, "sequences_scores", None)
    return rows, None if scores is None else scores.tolist()


def requests(count: int, seed: int = 0) -> list[tuple[torch.Tensor, GenerationConfig]]:
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 40) for _ in range(count)]
    names = list(itertools.islice(itertools.cycle(OPTIONS), count))
    return list(zip(models.prompts(*lengths, seed=seed), map(config, names)))


def assert_as_solo(model: Any, outputs: list[hf_paged.RequestOutput], wanted: list[Any], **make: Any) -> None:
    """make: further arguments of each plain call, made anew."""
    for output, (prompt, options) in zip(outputs, wanted):
        rows, scores = solo(model, prompt, options, **{name: made() for name, made in make.items()})
        assert output.error is None
        assert output.finished
        assert output.prompt_token_ids == prompt.tolist()
        assert [c.token_ids for c in output.outputs] == rows, options
        assert [c.index for c in output.outputs] == list(range(len(rows)))
        assert all(len(c.logprobs) == len(c.token_ids) for c in output.outputs)
        if scores is not None:
            assert [c.score for c in output.outputs] == pytest.approx(scores, abs=1e-3)


def assert_idle(engine: Engine) -> None:
    engine.check_integrity()
    stats = engine.stats()
    assert stats.blocks_used == stats.blocks_swapped == 0
    assert stats.blocks_free + stats.blocks_cached == stats.num_blocks
    assert not engine.has_unfinished_requests()


def ended(engine: Engine) -> dict[str, hf_paged.RequestOutput]:
    """The last output of each request; all run to their end."""
    outputs: dict[str, hf_paged.RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def row_by_row() -> Any:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 4, "hidden_size": 32, "vocab_size": models.VOCAB}
    return BloomForCausalLM(BloomConfig(**sizes, initializer_range=0.6, eos_token_id=models.EOS)).eval()


class Streamer:
    def __init__(self, fails_at: int | None = None) -> None:
        self.got: list[list[int]] = []
        self.ended = 0
        self.fails_at = fails_at

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu" and self.ended == 0
        if len(self.got) == self.fails_at:
            raise OSError("nobody listens")
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


NEVER = models.VOCAB  # as EOS: no request ends before its last token


def plain(model: Any, prompts: list[torch.Tensor], **options: Any) -> list[list[int]]:
    made = config("greedy", **{"eos_token_id": NEVER, **options})
    return [
        model.generate(input_ids=p[None], generation_config=made, attention_mask=torch.ones_like(p[None]))[
            0, len(p) :
        ].tolist()
        for p in prompts
    ]
