"""Grammars over the vocabulary of the shipped checkpoint."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hf_paged.features.grammar import constraints
from hf_paged.features.grammar.vocabulary import Compiled, Matcher, vocabulary_of

QA = str(Path(__file__).parent.parent.parent / "examples" / "pydoc-lm-qa")


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(QA)


def accepts(constraint: constraints.Constraint, text: str) -> bool:
    return accepts_tokens(vocabulary_of(tokenizer()).compiled(constraint), text)


def accepts_tokens(compiled: Compiled, text: str, tools: Any = None) -> bool:
    """Whether a text, written with the tokenizer's tokens, stays within the grammar and may end."""
    matcher = Matcher(compiled, [compiled.width])
    for token in (tools or tokenizer())(text, add_special_tokens=False)["input_ids"]:
        if not int(matcher.mask(compiled.width)[token // 32]) >> token % 32 & 1:
            return False
        matcher.advance([token])
    return matcher.is_complete()
