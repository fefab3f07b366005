"""A logits processor and a stopping criterion for options that OpenAI has and `generate` does not.

Both are functions of the tokens alone, so they are right for samples, beams and requests that were preempted, and can
be given to plain `generate` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from hf_paged.annotations import Tokenizer


class OccurrencePenalty(LogitsProcessor):
    """Lowers the scores of tokens that the answer has already, as OpenAI defines it:

        score - count * frequency_penalty - (count > 0) * presence_penalty

    where `count` is how often the token occurs in the answer; the prompt does not count.
    """

    def __init__(self, prompt_length: int, *, presence_penalty: float, frequency_penalty: float) -> None:
        self._prompt_length = prompt_length
        self._presence = presence_penalty
        self._frequency = frequency_penalty

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """input_ids int64 [rows, length], scores fp32 [rows, vocab] -> fp32 [rows, vocab]."""
        answer = input_ids[:, self._prompt_length :]
        # In fp32, as the scores are: counts are exact up to 2^24.
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - (counts * self._frequency + (counts > 0) * self._presence)  # type: ignore[return-value]


class StopText(StoppingCriteria):
    """Ends a row when a stop string ends within the text of its last token. Only the answer's text counts.

    min_tokens: tokens of the answer before which no stop string ends it. is_content: of the beginning of an answer,
    whether what follows it is content, in which alone a stop string counts (None: all is).
    """

    _MARGIN = 8  # tokens: the first ones may lie within a character, or have no text

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        prompt_length: int,
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        is_content: Callable[[str], bool] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._is_content = is_content
        self._stops = tuple(stops)
        self._prompt_length = prompt_length
        self._min_tokens = min_tokens
        self._skip = skip_special_tokens
        # A token has a byte at least, so that a stop string lies within as many tokens as it has bytes.
        self._window = max(len(stop.encode()) for stop in stops) + self._MARGIN

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """input_ids int64 [rows, length] -> bool [rows]."""
        start = max(self._prompt_length, input_ids.shape[1] - self._window)
        rows = input_ids[:, start:].tolist() if input_ids.shape[1] - self._prompt_length >= self._min_tokens else []
        ended = [self._ends(row) for row in rows] or [False] * len(input_ids)
        # The whole text is decoded only where a stop string was found.
        if self._is_content is not None and any(ended):
            whole = input_ids[:, self._prompt_length :].tolist()
            ended = [ends and self._is_seen(row) for ends, row in zip(ended, whole)]
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]

    def _is_seen(self, token_ids: list[int]) -> bool:
        """Return True if the last token is content: the answer is in its content before and after it."""
        texts = (self._decode(token_ids[:-1]), self._decode(token_ids))
        return self._is_content is None or all(map(self._is_content, texts))

    def _ends(self, token_ids: list[int]) -> bool:
        text = self._decode(token_ids)
        if not any(stop in text for stop in self._stops):
            return False
        # It may have been there before, in a part that could not end the row: within the first tokens, or in reasoning.
        before = self._decode(token_ids[:-1])
        # Without the last token's text, but with what a character that it completes had shown until then.
        known = len(before.rstrip("\N{REPLACEMENT CHARACTER}"))
        return any(text.find(stop, max(0, known - len(stop) + 1)) >= 0 for stop in self._stops)

    def _decode(self, token_ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(token_ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        )
