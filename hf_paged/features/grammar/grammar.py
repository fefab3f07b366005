"""Grammars as logits processors: answers that belong to a constraint.

A `Grammar` is the processor; it has a matcher for each text that it has seen. Knows tokens and masks; neither requests
nor blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from hf_paged.annotations import Tokenizer
from hf_paged.features.grammar import constraints
from hf_paged.features.grammar.vocabulary import Allowance, Compiled, Matcher, vocabulary_of
from hf_paged.generation.sampling.editors import Editor, OwnProcessor
from hf_paged.generation.sampling.edits import Edit, Op, keep_only

_NO_IDS = np.empty(0, dtype=np.int64)


class _Followed:
    """Keeps the tokens with which an answer stays within a grammar. It begins at position `start`."""

    def __init__(self, matcher: Matcher, start: int, width: int) -> None:
        self._matcher = matcher
        self._known = start  # tokens below this position have been matched
        self._width = width

    def edit(self, token_ids: Sequence[int]) -> Edit | None:
        self._matcher.advance(token_ids[self._known :])
        self._known = len(token_ids)
        return Edit(Op.KEEP, _NO_IDS, words=self._matcher.mask(self._width))

    def fork(self) -> Self:
        other = copy(self)
        other._matcher = self._matcher.fork()
        return other


class Grammar(OwnProcessor):
    """Sets the scores of all tokens to minus infinity with which the answer would leave a grammar. Made by `grammar`.

    The answer is what follows the prompt, row by row; a row ends with one of `eos_token_ids`, which are allowed where
    the answer is complete. The rows may be those of a batch, samples or beams: what each has said is found by its
    tokens, so rows may change places and fork.

    One object serves any number of requests of an engine, and calls of `generate` one after another. (A call begins a
    new answer, unless its prompt is what the last call returned with one more token.)
    """

    def __init__(self, compiled: Compiled, eos_token_ids: Iterable[int], *, is_bounded: bool = False) -> None:
        """is_bounded: a request with which it takes too much time fails."""
        self._compiled = compiled
        self._allowance = Allowance() if is_bounded else None
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        if not self.eos_token_ids:
            raise ValueError("the tokenizer has no EOS token, so no answer could end; give eos_token_id")
        self._start: int | None = None  # tokens of the prompt, if it is for one request
        self._prompt: torch.Tensor | None = None  # int64 [rows, start] of the answers that are followed
        self._matchers: dict[bytes, Matcher] = {}  # by the tokens of the answer so far

    def at(self, start: int) -> Self:
        """One like this for a request whose prompt has `start` tokens."""
        other = copy(self)
        other._start, other._prompt, other._matchers = start, None, {}
        other._allowance = None if self._allowance is None else Allowance()
        return other

    def editor(self, width: int) -> Editor | None:
        return None if self._start is None else _Followed(self.matcher(), self._start, width)

    def matcher(self) -> Matcher:
        """At the beginning of an answer."""
        return Matcher(self._compiled, self.eos_token_ids, self._allowance)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """input_ids int64 [rows, length], scores [rows, vocab] -> [rows, vocab]."""
        start = self._start
        if start is None:
            start = self._start_of(input_ids)
        answers: NDArray[np.int64] = np.ascontiguousarray(input_ids[:, start:].cpu().numpy())
        keys = [row.tobytes() for row in answers]
        self._follow(dict(zip(keys, answers)))
        masks = np.stack([self._matchers[key].mask(scores.shape[1]) for key in keys])
        # A copy, because the scores are the caller's.
        kept = scores.clone()
        keep_only(kept, range(len(keys)), masks)
        return kept  # type: ignore[return-value]

    def _start_of(self, input_ids: torch.Tensor) -> int:
        """Where the answers begin in these rows: where they did in the last call, if they continue it."""
        if self._prompt is not None:
            start = self._prompt.shape[1]
            if len(self._prompt) == len(input_ids) and torch.equal(input_ids[:, :start], self._prompt):
                rows = np.ascontiguousarray(input_ids[:, start:].cpu().numpy())
                if len(rows[0]) and all(self._knows(row[:-1].tobytes()) for row in rows):
                    return start
        self._prompt, self._matchers = input_ids.clone(), {}
        return input_ids.shape[1]

    def _knows(self, key: bytes) -> bool:
        """Return True if these tokens begin an answer that is followed."""
        return key in self._matchers or any(known.startswith(key) for known in self._matchers)

    def _follow(self, answers: dict[bytes, NDArray[np.int64]]) -> None:
        """Have a matcher for each of these answers, and for no others. Most are one token longer than in the last call;
        assisted decoding goes back some tokens."""
        parents = {key: row[:-1].tobytes() for key, row in answers.items()}
        children = Counter(parents.values())
        followed = {}
        for key, row in answers.items():
            parent = self._matchers.get(parents[key]) if len(row) else None
            if parent is None:
                matcher = self.matcher()
                matcher.advance(row.tolist())
            else:
                children[parents[key]] -= 1
                # The last text that continues one takes its matcher, the others copies of it.
                matcher = parent.fork() if children[parents[key]] else parent
                matcher.advance(row[-1:].tolist())
            followed[key] = matcher
        self._matchers = followed


def grammar(
    tokenizer: Tokenizer,
    *,
    json_schema: Any = None,
    json_object: bool = False,
    regex: str | None = None,
    grammar: str | None = None,
    choice: Sequence[str] | None = None,
    strict: bool = True,
    eos_token_id: int | Sequence[int] | None = None,
) -> Grammar:
    """Make a logits processor that keeps answers within a constraint, for `generate` and for `Engine.add_request`.

    Exactly one of `json_schema`, `json_object`, `regex`, `grammar` and `choice` is given. Compiling takes milliseconds
    to seconds; the last constraints are kept for each tokenizer.

    Args:
        tokenizer: The model's tokenizer.
        json_schema: JSON documents of a schema: a dict, a bool, JSON text, or a pydantic model class.
        json_object: True: any JSON object.
        regex: Texts that match a regular expression of Python from beginning to end.
        grammar: Texts of a grammar in llama.cpp's EBNF (GBNF), whose start is the rule `root`.
        choice: One of several texts.
        strict: With `json_schema`: objects that name their properties, and say nothing of `additionalProperties`, have
            no others.
        eos_token_id: The token or tokens that end an answer, in `generate` too. They are allowed where the answer is
            complete, and only there. None = the tokenizer's.

    Returns:
        A processor for any number of requests of an engine, and for calls of `generate` one after another.

    Raises:
        ValueError: If not exactly one constraint is given, or one that cannot be followed, or if there is no EOS token.
        ImportError: If llguidance is not installed; it comes with the extra `hf-paged[grammar]`.

    Example:
        ```python
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
        from hf_paged import Engine, grammar

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        tokenizer = AutoTokenizer.from_pretrained("examples/pydoc-lm-base")
        yes_or_no = grammar(tokenizer, choice=["yes", "no"])
        with Engine(model, {"num_blocks": 64}) as engine:
            prompt = tokenizer("Is a list mutable? ").input_ids
            [output] = engine.generate([prompt], GenerationConfig(max_new_tokens=8), logits_processor=[yes_or_no])
        assert tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True) in ("yes", "no")
        ```
    """
    given = {
        "json_schema": json_schema,
        "json_object": json_object or None,
        "regex": regex,
        "grammar": grammar,
        "choice": choice,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise ValueError(
            f"give one of json_schema, json_object=True, regex, grammar and choice, not {', '.join(named) or 'none'}"
        )
    vocabulary = vocabulary_of(tokenizer)
    # Called for the one that is given, because the others would refuse None.
    made = {  # type: ignore[no-untyped-call]
        "json_schema": lambda: constraints.json_schema(json_schema, strict=strict),
        "json_object": constraints.json_object,
        "regex": lambda: constraints.regex(given["regex"]),
        "grammar": lambda: constraints.ebnf(given["grammar"]),
        "choice": lambda: constraints.choice(given["choice"]),
    }[named[0]]()
    eos = vocabulary.eos_token_ids if eos_token_id is None else eos_token_id
    return Grammar(vocabulary.compiled(made), [eos] if isinstance(eos, int) else eos)
