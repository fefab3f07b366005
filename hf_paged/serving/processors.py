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


class ThinkingBudget(LogitsProcessor):
    """Ends reasoning after so many tokens with the mark that the model itself writes there; the answer follows.

    A function of the tokens: once the budget is spent, the only token with a score is the next one of the mark. Nothing
    changes where the model has ended its reasoning before, or has begun none.
    """

    _MARGIN = 8  # tokens without text, or of white space, before a mark

    def __init__(
        self, tokenizer: Tokenizer, marks: tuple[str, str], prompt_length: int, budget: int, *, is_begun: bool
    ) -> None:
        """marks: around reasoning. budget: tokens between them. is_begun: the prompt has the first one."""
        self._tokenizer = tokenizer
        self._begin, self._end = marks
        self._end_ids = list(tokenizer(self._end, add_special_tokens=False, verbose=False)["input_ids"])
        self._prompt_length, self._budget = prompt_length, budget
        # A token of text has a byte at least.
        self._most_before = 0 if is_begun else len(self._begin.encode()) + self._MARGIN

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """input_ids int64 [rows, length], scores fp32 [rows, vocab] -> fp32 [rows, vocab]."""
        count = input_ids.shape[1] - self._prompt_length
        # Behind these tokens the mark has been written, whatever wrote it: a long answer is not decoded any more.
        if not self._budget <= count < self._most_before + self._budget + len(self._end_ids):
            return scores
        forced = [self._forced(row) for row in input_ids[:, self._prompt_length :].tolist()]
        if all(token is None for token in forced):
            return scores
        made = scores.clone()
        for row, token in enumerate(forced):
            if token is not None:
                made[row] = -torch.inf
                made[row, token] = 0.0
        return made  # type: ignore[return-value]

    def _forced(self, answer: list[int]) -> int | None:
        """Return the token that has to follow an answer so far; None: any may."""
        start = self._start(answer)
        if start is None:
            return None
        thought, after = answer[start:][: self._budget], answer[start + self._budget :]
        if len(thought) < self._budget or self._end in self._decode(thought):
            return None
        # The model may have begun the mark with its last tokens.
        counts = range(min(len(self._end_ids) - 1, len(thought)), 0, -1)
        known = next((count for count in counts if thought[-count:] == self._end_ids[:count]), 0)
        rest = self._end_ids[known:]
        return int(rest[len(after)]) if len(after) < len(rest) else None

    def _start(self, answer: list[int]) -> int | None:
        """Return the place of the first token of the reasoning; None: there is none, or it has not begun."""
        if not self._most_before:
            return 0
        counts = range(1, min(self._most_before, len(answer)) + 1)
        return next((count for count in counts if self._decode(answer[:count]).lstrip().startswith(self._begin)), None)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
