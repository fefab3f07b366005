"""Options of requests: a finite number of random combinations, so that the results of solo runs can be cached."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from tests import models

NUM_OPTIONS = 80
STOPS = list(range(3, 20))
STOP_STRINGS = ["e", "ab", "7", "Q"]
FAULT = "the fault of this request"


class Nudge(LogitsProcessor):
    """A custom processor that prefers tokens depending on the last one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 3.0 * ((torch.arange(scores.shape[1]) + input_ids[:, -1:]) % 5 == 0)


class Unlucky(StoppingCriteria):
    """A custom criterion that stops after some pairs of tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -2:].sum(dim=1) % 9 == 0


class RaisingProcessor(LogitsProcessor):
    kind: type[Exception] = ArithmeticError

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.kind(FAULT)
        return scores


class RaisingCriterion(RaisingProcessor, StoppingCriteria):
    kind = LookupError

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        super().__call__(input_ids, scores)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class Option:
    """One combination: fields of GenerationConfig, the seed, and the caller's own objects."""

    fields: dict[str, Any]
    seed: int | None = None
    nudges: bool = False
    has_criterion: bool = False

    def config(self, prompt_length: int) -> GenerationConfig:
        fields = {"pad_token_id": models.PAD, "eos_token_id": models.EOS, **self.fields}
        if "max_length" in fields:
            fields["max_length"] += prompt_length
        if "min_length" in fields:
            fields["min_length"] += prompt_length
        if self.seed is not None:
            fields["seed"] = self.seed
        return GenerationConfig(**fields)

    @property
    def is_plain(self) -> bool:
        """Greedy, with every token depending only on previous tokens, so that a run can be split at any token."""
        return set(self.fields) <= {"do_sample", "max_new_tokens"} and not (self.nudges or self.has_criterion)

    def processors(self) -> list[Any]:
        return [Nudge()] if self.nudges else []

    def criteria(self) -> list[Any]:
        return [Unlucky()] if self.has_criterion else []


@functools.cache
def options() -> tuple[Option, ...]:
    rng = random.Random("options")
    plain = [Option({"do_sample": False, "max_new_tokens": count}) for count in (1, 2, 4, 7, 10, 10, 12)]
    return (*plain, *(_random_option(rng) for _ in range(NUM_OPTIONS - len(plain))))


def _random_option(rng: random.Random) -> Option:
    mode = rng.choice(("greedy", "greedy", "sample", "sample", "samples", "beams", "beams", "beam samples"))
    fields: dict[str, Any] = {"do_sample": "sample" in mode}
    count = rng.choice((1, 2, 3, 4, 5, 6, 8, 10))
    fields[rng.choice(("max_new_tokens", "max_new_tokens", "max_length"))] = count
    if rng.random() < 0.6:
        fields["eos_token_id"] = rng.choice((STOPS, STOPS[:3], models.EOS, list(range(3, 60, 2))))
    if mode == "samples":
        fields["num_return_sequences"] = rng.randrange(2, 5)
    if "beam" in mode:
        _add_beams(rng, fields)
    if fields["do_sample"]:
        _add_warpers(rng, fields)
    _add_processors(rng, fields, count)
    is_single = mode in ("greedy", "sample")
    if is_single and rng.random() < 0.2:
        fields["stop_strings"] = STOP_STRINGS
    return Option(
        fields,
        seed=rng.randrange(10**6) if fields["do_sample"] else None,
        nudges=rng.random() < 0.15,
        has_criterion=is_single and rng.random() < 0.15,
    )


def _add_beams(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["num_beams"] = rng.randrange(2, 5)
    fields["num_return_sequences"] = rng.randrange(1, fields["num_beams"] + 1)
    fields["early_stopping"] = rng.choice((False, False, True, "never"))
    fields["length_penalty"] = rng.choice((1.0, 1.0, 2.0, -1.0, 0.0))


def _add_warpers(rng: random.Random, fields: dict[str, Any]) -> None:
    warpers = {
        "temperature": (0.1, 0.7, 1.5), "top_k": (0, 2, 8), "top_p": (0.5, 0.9), "min_p": (0.05,), "typical_p": (0.9,),
        "epsilon_cutoff": (0.01,), "eta_cutoff": (0.01,),
    }  # fmt: skip
    for name, values in rng.sample(sorted(warpers.items()), rng.randrange(4)):
        fields[name] = rng.choice(values)


def _add_processors(rng: random.Random, fields: dict[str, Any], count: int) -> None:
    processors: dict[str, Any] = {
        "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": min(3, count),
        "min_length": min(2, count), "bad_words_ids": [[5], [7, 9], [11, 12]], "suppress_tokens": [4, 6, 40, 41],
        "begin_suppress_tokens": [30, 31, 32], "sequence_bias": [[[21], 2.0], [[22, 23], -3.0]],
        "exponential_decay_length_penalty": (2, 1.2), "forced_eos_token_id": 3, "renormalize_logits": True,
        "remove_invalid_values": True,
    }  # fmt: skip
    for name in rng.sample(sorted(processors), rng.choice((0, 0, 1, 1, 2, 3))):
        fields[name] = processors[name]
