"""Scores of rerankers that are language models: which of two answers, such as yes and no, follows a pair of texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from hf_paged.annotations import Tokenizer
from hf_paged.features.tasks.decision import FirstTokens

_PLACES = re.compile(r"\{(query|document)\}")


class FirstOfTwo(FirstTokens):
    """The logit of the first of two tokens less that of the second, as a head of one label gives it: fp32 [1]."""

    def fill(self, output: Any) -> None:
        if self._logprobs:
            first, second = self._logprobs
            output.result = torch.tensor([first - second], dtype=torch.float32, device="cpu")


def filled(template: str, query: str, document: str) -> str:
    """Return a template with a pair in the places {query} and {document}. Raises ValueError if it lacks one of them."""
    if not isinstance(template, str) or {*_PLACES.findall(template)} != {"query", "document"}:
        raise ValueError("template: give a text, and write {query} and {document} where the texts of a pair belong")
    # At once: a text may have such a place itself.
    return _PLACES.sub(lambda place: query if place[1] == "query" else document, template)


def answer_tokens(tokenizer: Tokenizer, answers: Sequence[str]) -> list[int]:
    """Return the tokens of two answers. Raises ValueError if they are not two of one token each."""
    wanted = f"answers={answers!r}: give two texts of one token each, such as ('yes', 'no')"
    if not isinstance(answers, list | tuple) or [type(each) for each in answers] != [str, str]:
        raise ValueError(wanted)
    first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in answers)
    if (len(first), len(second)) != (1, 1):
        raise ValueError(f"{wanted}; these have {len(first)} and {len(second)} tokens")
    if first == second:
        raise ValueError(f"{wanted}; both of these are token {first[0]}")
    return [*first, *second]
