"""Questions to a speech model of Whisper's kind, and the text of its answers. Knows no HTTP and no engine.

A file is cut into windows as transformers' pipeline for speech recognition cuts it: as long as the encoder's input, and
overlapping their neighbours by a sixth of that. No window depends on another one, so they run side by side, and the
tokenizer puts their answers together. The sequential way of `generate`, in which a window begins where the timestamps
of the one before it end, is not taken: it would decode the windows of a file one after another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.models.whisper.tokenization_whisper import LANGUAGES, _find_longest_common_sequence
from transformers.pipelines.automatic_speech_recognition import chunk_iter

from hf_paged.annotations import Model, Tokenizer
from hf_paged.serving.audio import Samples
from hf_paged.serving.problems import Problem

Task = Literal["transcribe", "translate"]

Stride = tuple[float, float, float]
"""Seconds of a window's audio, and of its overlaps with the windows before and after it."""

# A window shares one part of so many with each neighbour, as in the pipeline, whose text is to be the same.
_OVERLAP = 6


@dataclass(frozen=True, slots=True)
class Window:
    """features: of its audio, [1, num_mels, num_frames]."""

    features: torch.Tensor
    stride: Stride


@dataclass(frozen=True, slots=True)
class Question:
    """Arguments of `generate` or the engine for a window. inputs: tensors of one row each."""

    inputs: dict[str, torch.Tensor]
    generation_config: GenerationConfig
    logits_processor: list[Any]


@dataclass(frozen=True, slots=True)
class Segment:
    """start, end: seconds from the beginning of the file."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A client's options. language: a name or code (None: found for each window). prompt: text that might have stood
    before. has_times: segments are asked for. seed: of each window. options: fields of a GenerationConfig."""

    task: Task = "transcribe"
    language: str | None = None
    prompt: str | None = None
    has_times: bool = False
    seed: int | None = None
    options: dict[str, Any]


class Speech:
    """A model with its tokenizer and its feature extractor."""

    def __init__(self, model: Model, tokenizer: Tokenizer, extractor: Any, *, max_length: int | None = None) -> None:
        """max_length: tokens of a window's beginning and answer (None: as many as the model has positions)."""
        self._model = model
        self._tokenizer = tokenizer
        self._extractor = extractor
        self._config: Any = model.generation_config
        self._positions: int = model.config.max_target_positions
        self._longest = self._positions if max_length is None else min(max_length, self._positions)
        self._special = frozenset(tokenizer.all_special_ids)

    @staticmethod
    def is_spoken_to(model: Model, tokenizer: Tokenizer) -> bool:
        """Return True if this class can ask the model: it marks times, and its tokenizer merges windows."""
        return hasattr(model.generation_config, "no_timestamps_token_id") and hasattr(tokenizer, "_decode_asr")

    @property
    def rate(self) -> int:
        """Samples a second."""
        return int(self._extractor.sampling_rate)

    @property
    def is_multilingual(self) -> bool:
        return bool(getattr(self._config, "is_multilingual", True)) and hasattr(self._config, "lang_to_id")

    def count(self, num_samples: int) -> int:
        """Count the windows that `windows` makes."""
        length = int(self._extractor.n_samples)
        step = length - 2 * round(length / _OVERLAP)
        return 1 + max(0, -(-(num_samples - length) // step))

    @property
    def window_seconds(self) -> float:
        return int(self._extractor.n_samples) / self.rate

    def windows(self, samples: Samples) -> Iterator[Window]:
        """samples: fp32 [num_samples] at `rate`. Takes milliseconds for each window; not for the event loop."""
        length = int(self._extractor.n_samples)
        overlap = round(length / _OVERLAP)
        for each in chunk_iter(samples, self._extractor, length, overlap, overlap, self._model.dtype):
            whole, left, right = (part / self.rate for part in each["stride"])
            yield Window(each["input_features"], (whole, left, right))

    def asks_language(self, window: Window) -> Question:
        """Ask the language of a window. `Speech.language` reads the answer, one token, as in `detect_language`."""
        start = [self._config.decoder_start_token_id]
        # The other tokens are forbidden, so that one greedy token is the likeliest language.
        config = GenerationConfig(max_length=2, do_sample=False, num_beams=1, suppress_tokens=self._no_languages)
        return Question(self._inputs(window, start), config, [])

    @cached_property
    def _no_languages(self) -> list[int]:
        """Return all tokens but those of languages."""
        known = set(self._config.lang_to_id.values())
        return [token for token in range(self._model.config.vocab_size) if token not in known]

    def language(self, token: int) -> str:
        """Return a window's language, as the model marks it, from the token that answers `asks_language`."""
        names = {each: name for name, each in self._config.lang_to_id.items()}
        return str(names[token])

    @staticmethod
    def language_name(given: str | None) -> str:
        """Return a language's English name. given: a client's or `language`'s; None: the model knows English only."""
        given = "en" if given is None else given.lower().removeprefix("<|").removesuffix("|>")
        return str(LANGUAGES.get(given, given))

    def check(self, wish: Wish) -> None:
        """Raise Problem (400) for a wish that no window could be asked."""
        self._prompt(wish.prompt)
        if wish.language is not None or not self.is_multilingual:
            self._beginning(wish)

    def asks_text(self, window: Window, wish: Wish) -> Question:
        """language: of `wish`, which must be known for a multilingual model. Raises Problem (400)."""
        start = self._beginning(wish)
        # Whisper's own limit counts new tokens; that of the engine counts the beginning too.
        limit = self._config.max_length
        longest = self._longest if limit is None else min(limit + len(start), self._longest)
        config: Any = GenerationConfig(max_length=longest, **wish.options)
        # Each window has the same, so that a file's text does not depend on how windows share steps.
        config.seed = wish.seed
        times = [WhisperTimeStampLogitsProcessor(self._config, begin_index=len(start))] if wish.has_times else []
        return Question(self._inputs(window, start), config, times)

    def _inputs(self, window: Window, start: Sequence[int]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([list(start)], dtype=torch.int64, device="cpu")
        return {"input_features": window.features, "decoder_input_ids": ids}

    def _beginning(self, wish: Wish) -> list[int]:
        """Return the tokens before an answer. Raises Problem (400) if they leave no room for it."""
        # The prompt stands before the tokens of language and task, as in training.
        start = [*self._prompt(wish.prompt), *self._start(wish)]
        if len(start) >= self._longest:
            text = f"prompt: its tokens and the answer's are more than the {self._longest} of a window; shorten it"
            raise Problem(400, text, param="prompt", code="context_length_exceeded")
        return start

    def _start(self, wish: Wish) -> list[int]:
        """The tokens that tell the model language and task. Raises Problem (400)."""
        language, task = wish.language, None if wish.task == "transcribe" and not self.is_multilingual else wish.task
        if not self.is_multilingual:
            if task is not None:
                raise Problem(400, "this model knows English only and does not translate", code="not_served")
            if language is not None and language.lower() not in ("en", "english"):
                text = f"language={language!r}: this model knows English only; leave it out"
                raise Problem(400, text, param="language")
            language = None
        # A copy: options of one request must not become those of the model.
        config: Any = copy.deepcopy(self._config)
        config.language, config.task, config.return_timestamps = language, task, wish.has_times
        try:
            ids = self._model._retrieve_init_tokens(None, 1, config, self._model.config, 0, {})
        except ValueError as error:
            raise Problem(400, f"language={language!r}: {error}", param="language") from error
        return [int(token) for token in ids[0]]

    def _prompt(self, text: str | None) -> list[int]:
        """Return a prompt's last tokens: as many as Whisper was trained with, as OpenAI does. Raises Problem (400)."""
        if not text:
            return []
        try:
            first, *others = self._tokenizer.get_prompt_ids(text).tolist()
        except ValueError as error:
            raise Problem(400, f"prompt: {error}", param="prompt") from error
        # The first one marks a prompt; of the text its end counts, which is nearest to the audio.
        return [first, *others[-(self._positions // 2 - 2) :]]

    def heard(
        self,
        strides: Sequence[Stride],
        answers: Sequence[Sequence[int]],
        languages: Sequence[str | None],
        *,
        has_times: bool,
    ) -> list[Segment]:
        """Merge the windows' answers into segments in order of time; one segment if they have no times. A sentence
        without an end lasts until the end of the file. languages: heard in the windows; where one begins, nothing is
        merged with the text before."""
        # With the mark of a language before it where one was heard, because `_decode_asr` merges nothing across such a
        # mark.
        outputs = [
            {"tokens": np.array([[*self._mark(language), *answer]], dtype=np.int64), "stride": stride}
            for stride, answer, language in zip(strides, answers, languages, strict=True)
        ]
        precision = self._extractor.chunk_length / self._model.config.max_source_positions
        text, others = self._tokenizer._decode_asr(
            outputs, return_timestamps=has_times or None, return_language=None, time_precision=precision
        )
        ends_at = self.seconds(strides)
        if not has_times:
            return [Segment(0.0, ends_at, text)]
        return [
            Segment(start or 0.0, ends_at if end is None else end, chunk["text"])
            for chunk in others["chunks"]
            for start, end in [chunk["timestamp"]]
        ]

    def _mark(self, language: str | None) -> list[int]:
        return [] if language is None else [int(self._config.lang_to_id[language])]

    @staticmethod
    def seconds(strides: Iterable[Stride]) -> float:
        """Return how many seconds of audio the file has."""
        strides = list(strides)
        return round(sum(length - right for length, _, right in strides) - sum(left for _, left, _ in strides), 6)

    # -- while windows are still asked --------------------------------------------------------------------------

    def is_word(self, token: int) -> bool:
        """Return True if the token is text: no time, and no mark."""
        return token <= self._config.no_timestamps_token_id and token not in self._special


class Merged:
    """The tokens of a file without times, as far as no later window can change them: what `Speech.heard` decodes."""

    def __init__(self) -> None:
        self._open: list[int] = []  # of the latest window

    def add(self, words: Sequence[int]) -> list[int]:
        """Add the next window's tokens, and return those that no later window can change. Takes milliseconds."""
        if not words or not self._open:  # `heard` leaves windows without words out
            self._open = list(words) or self._open
            return []
        both = [self._open, list(words)]
        # What the function does to times shows which tokens are of which window.
        merged, owners = _find_longest_common_sequence(both, [[number] * len(each) for number, each in enumerate(both)])
        count = owners.count(0)
        self._open = merged[count:]
        return list(merged[:count])

    def end(self) -> list[int]:
        """Return the tokens that are left; no later window is merged with them."""
        rest, self._open = self._open, []
        return rest
