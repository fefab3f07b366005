"""Generation options of an HTTP request: GenerationConfig, processors and criteria for each of its prompts."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any, NamedTuple

from transformers import GenerationConfig

from hf_paged.generation.request_options import RequestOptions
from hf_paged.serving.problems import Problem
from hf_paged.serving.processors import OccurrencePenalty, StopText
from hf_paged.serving.schema import Options, Sampling, Warper
from hf_paged.serving.served import ServedModel

_WARPERS = {
    name: mark.neutral
    for name, field in Options.model_fields.items()
    for mark in field.metadata
    if type(mark) is Warper
}
# The largest finite number of fp32 is a little less than 2^128, and the least normal one 2^-126.
_MAX_EXPONENT = 126


class Submission(NamedTuple):
    """One request to the engine."""

    prompt_ids: list[int]
    options: RequestOptions


class SamplingOptions:
    """The generation options of a request."""

    def __init__(
        self,
        body: Sampling,
        served: ServedModel,
        *,
        skip_special_tokens: bool,
        is_content: Callable[[str], bool] | None = None,
        ends: frozenset[int],
        thinking: Callable[[int], Any] | None = None,
    ) -> None:
        """thinking: makes the processor that ends reasoning, for a prompt of so many tokens."""
        self._body = body
        self._thinking = thinking
        self._ends = ends
        self._is_content = is_content
        self._skip_special_tokens = skip_special_tokens
        self._served = served
        self._defaults = served.model.generation_config
        self._uses_checkpoint = served.settings.defaults == "auto"
        self.width = max(body.n or 1, body.best_of or 1)
        self._do_sample = self._samples()
        self.is_sure = not self._do_sample and not body.use_beam_search
        self.eos_token_ids = tuple({*ends, *(body.stop_token_ids or ())})
        # Once for all prompts, whose options differ in lengths only.
        self._fixed = {**self._lengths_and_width(), **self._sampling(), **self._tokens()}

    def submission(self, prompt: list[int], max_new_tokens: int, **others: Any) -> Submission:
        """others: the options that are equal for all prompts. Raises Problem (400)."""
        begun = self._begun(prompt)
        return Submission(
            prompt,
            RequestOptions(
                generation_config=self._config(max_new_tokens),
                logits_processor=self._processors(begun) or None,
                stopping_criteria=self._criteria(len(begun)) or None,
                **others,
            ),
        )

    def _begun(self, prompt: list[int]) -> list[int]:
        """Return the tokens before an answer: of a model with an encoder, the one that its decoder begins with."""
        if not self._served.model.config.is_encoder_decoder:
            return prompt
        start, bos = self._defaults.decoder_start_token_id, self._defaults.bos_token_id
        return [bos if start is None else start]

    def _config(self, max_new_tokens: int) -> Any:
        body = self._body
        if body.min_tokens > max_new_tokens:
            raise Problem(400, f"min_tokens={body.min_tokens} is more than max_tokens={max_new_tokens}")
        # Beams are ranked by a power of the length in fp32, which would be infinite or 0.
        penalty = body.length_penalty
        if penalty is not None and abs(penalty) * log2(max_new_tokens) > _MAX_EXPONENT:
            raise Problem(
                400,
                f"length_penalty={penalty}: this power of {max_new_tokens} tokens is beyond fp32; use one nearer to 0, "
                "or lower max_tokens",
                param="length_penalty",
            )
        config: Any = GenerationConfig(**self._fixed, max_new_tokens=max_new_tokens)
        # Not by the constructor: it is an attribute of ours.
        config.seed = body.seed
        return config

    def _processors(self, prompt: list[int]) -> list[Any]:
        presence, frequency = self._body.presence_penalty or 0.0, self._body.frequency_penalty or 0.0
        made: list[Any] = []
        if presence or frequency:
            made.append(OccurrencePenalty(len(prompt), presence_penalty=presence, frequency_penalty=frequency))
        made += self._served.processors(self._body.logits_processors or {}, prompt)
        # Last, so that no other one takes the mark away.
        return made if self._thinking is None else [*made, self._thinking(len(prompt))]

    def _criteria(self, prompt_length: int) -> list[Any]:
        body = self._body
        if not body.stops:
            return []
        return [
            StopText(
                self._served.tokenizer,
                body.stops,
                prompt_length,
                min_tokens=body.min_tokens,
                skip_special_tokens=self._skip_special_tokens,
                is_content=self._is_content,
            )
        ]

    def _samples(self) -> bool:
        body = self._body
        if body.temperature is not None:
            return body.temperature > 0
        if body.use_beam_search:
            return False
        # Who sets top_p or the like wants to sample, whatever the checkpoint says.
        if any(getattr(body, name) is not None for name in _WARPERS):
            return True
        return bool(self._defaults.do_sample) if self._uses_checkpoint else True

    def _lengths_and_width(self) -> dict[str, Any]:
        body = self._body
        beams = self.width if body.use_beam_search else 1
        options: dict[str, Any] = {"num_beams": beams, "num_return_sequences": 1}
        if body.use_beam_search:
            options["num_return_sequences"] = body.n or 1
            # OpenAI has no such options; transformers' defaults hold where the checkpoint has none.
            given = {"length_penalty": body.length_penalty, "early_stopping": body.early_stopping}
            options |= {name: value for name, value in given.items() if value is not None}
        elif not self.is_sure:
            options["num_return_sequences"] = self.width
        if body.min_tokens:
            options["min_new_tokens"] = body.min_tokens
        return options

    def _sampling(self) -> dict[str, Any]:
        """Choose each option: the request's, the checkpoint's or neutral. `generate` would default to top_k=50."""
        body = self._body
        options: dict[str, Any] = {"do_sample": self._do_sample}
        if self._do_sample:
            options |= {name: self._first(getattr(body, name), name, neutral) for name, neutral in _WARPERS.items()}
            # vLLM's clients send -1 for none; transformers has 0.
            options["top_k"] = max(0, options["top_k"])
        options["repetition_penalty"] = self._first(body.repetition_penalty, "repetition_penalty", 1.0)
        return options

    def _first(self, given: Any, name: str, neutral: Any) -> Any:
        if given is None and self._uses_checkpoint:
            given = getattr(self._defaults, name, None)
        return neutral if given is None else given

    def _tokens(self) -> dict[str, Any]:
        body, vocab = self._body, self._served.vocab_size
        options: dict[str, Any] = {}
        stops = set(body.stop_token_ids or ())
        self._served.check_ids("stop_token_ids", stops)
        eos = set() if body.ignore_eos else self._ends
        if body.ignore_eos or stops or self._ends != self._served.eos_token_ids:
            # An id that no token has stands for "none": None would mean the checkpoint's.
            options["eos_token_id"] = sorted(stops | eos) or [vocab]
        if body.logit_bias:
            biases = {int(token): float(bias) for token, bias in body.logit_bias.items()}
            self._served.check_ids("logit_bias", biases)
            options["sequence_bias"] = [[[token], bias] for token, bias in biases.items()]
        if body.bad_words:
            words = [ids for word in body.bad_words for ids in self._spellings(word)]
            options["bad_words_ids"] = [*(self._defaults.bad_words_ids or ()), *words]
        if body.allowed_token_ids is not None:
            allowed = set(body.allowed_token_ids)
            self._served.check_ids("allowed_token_ids", allowed)
            also = set(self._defaults.suppress_tokens or ())
            # The checkpoint's stay forbidden, also if the request allows them.
            options["suppress_tokens"] = [token for token in range(vocab) if token not in allowed or token in also]
        return options

    def _spellings(self, word: str) -> list[list[int]]:
        """Return the tokens of a word at the beginning of a text, and those of the word within a text."""
        tokenizer, texts = self._served.tokenizer, (word, f" {word.lstrip()}")
        found = (list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts)
        # A spelling with a token that the model does not have cannot be generated.
        both = [ids for ids in found if max(ids, default=0) < self._served.vocab_size]
        return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in both if ids)]
