"""Grammars as logits processors: answers that belong to a constraint.

`Vocabulary` compiles constraints for a tokenizer, with llguidance. A `Matcher` follows one text through a compiled
one. A `Grammar` is the processor; it has a matcher for each text that it has seen. Knows tokens and masks; neither
requests nor blocks.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, Self, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from hf_paged.annotations import Tokenizer
from hf_paged.features.grammar import constraints
from hf_paged.features.grammar.constraints import Constraint
from hf_paged.generation.sampling.editors import Editor, OwnProcessor
from hf_paged.generation.sampling.edits import Edit, Op, Words, keep_only
from hf_paged.locks import usable_after_fork

# Tokens in a word of a mask, as llguidance writes them.
_BITS = 32
_NO_IDS = np.empty(0, dtype=np.int64)


class Vocabulary:
    """The tokens of a tokenizer as llguidance has them, and the constraints that were compiled for them last.

    Special tokens belong to no text: they would be missing in the answer, so they can only end it. `marks` are
    exceptions, for readers who see them.
    """

    # Compiling takes milliseconds, so that what is forgotten costs little.
    MAX_KEPT = 128

    def __init__(self, tokenizer: Tokenizer, marks: frozenset[str] = frozenset()) -> None:
        constraints.check_installed()
        import llguidance

        self.size = len(tokenizer)
        self.width = _width(tokenizer)
        special = {
            index
            for index, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in marks
        }
        self.bytes = _bytes_of(tokenizer, self.width)
        wrapper = llguidance.TokenizerWrapper(_Tokens(self.bytes, special))
        # The last id, which no model has, is where an answer may end: its stop tokens are those of the request.
        self._tokens = llguidance.LLTokenizer(wrapper, n_vocab=self.width + 1, eos_token=self.width)
        # What exceeds them would hold up a step for all requests, and ends one request with an error.
        self._limits = llguidance.LLParserLimits(max_items_in_row=20_000, max_lexer_states=50_000, verbose_errors=False)
        eos = tokenizer.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        self._kept: OrderedDict[str, Compiled] = OrderedDict()  # by last use
        self._lock = usable_after_fork(threading.Lock())

    def known(self, constraint: Constraint) -> Compiled | None:
        """The compiled constraint, if it is one of those that are kept."""
        key = constraints.key_of(constraint)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def compiled(self, constraint: Constraint) -> Compiled:
        """Raises ValueError for a constraint that cannot be followed."""
        made = self.known(constraint)
        if made is None:
            made = self._compiled(constraints.lark_of(constraint))
            with self._lock:
                self._kept[constraints.key_of(constraint)] = made
                while len(self._kept) > self.MAX_KEPT:
                    self._kept.popitem(last=False)
        return made

    def _compiled(self, lark: str) -> Compiled:
        import llguidance

        state = _with_stack(lambda: llguidance.LLMatcher(self._tokens, lark, log_level=0, limits=self._limits))
        if state.is_error():
            raise ValueError(f"the constraint cannot be followed: {_reason(state)}")
        made = Compiled(state, self.width)
        Matcher(made, ()).mask(0)  # some have no answer, which is found out here
        return made


# Bytes. What is not touched takes no memory, so that it may be more than any grammar needs.
_STACK = 2**28
_stack_lock = usable_after_fork(threading.Lock())


def _with_stack(work: Callable[[], Any]) -> Any:
    """Its result. llguidance reads a grammar recursively, for which the stack of a thread may be too small."""
    found: list[Any] = []
    # The size is the process's, so that two threads must not set it at once.
    with _stack_lock:
        before = threading.stack_size(_STACK)
        try:
            thread = threading.Thread(target=lambda: found.append(work()), name="hf-paged-grammar")
            thread.start()
        # A thread takes its size when it starts, so others have theirs back while this one works.
        finally:
            threading.stack_size(before)
    thread.join()
    return found[0]


class _Tokens:
    """The tokenizer that llguidance asks for, made from the bytes of all tokens."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: set[int]) -> None:
        self.tokens = [*tokens, b"<end>"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*special, self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return []  # for tokens that are forced: there are none


def _bytes_of(tokenizer: Tokenizer, width: int) -> list[bytes]:
    """Return the bytes of each token id; empty for ids without a token."""
    import llguidance.hf

    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"grammars need a fast tokenizer, not {type(tokenizer).__name__}; load it with use_fast=True")
    known = llguidance.hf.from_tokenizer(cast(Any, tokenizer), n_vocab=width, eos_token=0, slices=[])
    taken = set(tokenizer.get_vocab().values())
    return [known.decode_bytes([index]) if index in taken else b"" for index in range(width)]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A constraint for a vocabulary of `width` tokens. state: an `llguidance.LLMatcher` at the beginning, which is only
    copied."""

    state: Any
    width: int


_vocabularies: WeakKeyDictionary[Any, dict[frozenset[str], Vocabulary]] = WeakKeyDictionary()
_lock = usable_after_fork(threading.Lock())


def vocabulary_of(tokenizer: Tokenizer, marks: frozenset[str] = frozenset()) -> Vocabulary:
    """Made once for a tokenizer, and again when it has got more tokens. marks: special tokens that are text. Raises
    ImportError without llguidance."""
    with _lock:
        made = _vocabularies.setdefault(tokenizer, {})
        if marks not in made or made[marks].size != len(tokenizer):
            made[marks] = Vocabulary(tokenizer, marks)
        return made[marks]


def _width(tokenizer: Tokenizer) -> int:
    """One more than the largest token id."""
    return max(len(tokenizer), 1 + int(max(tokenizer.get_vocab().values())))


class Allowance:
    """The processor time that following a grammar may take: half a second, and some milliseconds for each token.

    llguidance limits its work for a token. With some grammars each further token takes longer than the one before.
    """

    def __init__(self, *, seconds: float = 0.5, per_token: float = 0.005) -> None:
        self._left = seconds
        self._per_token = per_token

    @contextmanager
    def token(self) -> Iterator[None]:
        """Around the work for one token. Raises ValueError if the time is used up."""
        begin = time.thread_time()
        yield
        self._left += self._per_token - (time.thread_time() - begin)
        if self._left < 0:
            raise ValueError(f"{NOT_FOLLOWED}: it takes too long; simplify it")


NOT_FOLLOWED = "the grammar cannot be followed further"
"""The beginning of the errors that a grammar causes while an answer is written."""


class Matcher:
    """The place that one text has reached in a compiled grammar.

    A text that has ended, and one that has left the grammar (which only a beam without any probability does), can only
    be continued by stop tokens.
    """

    def __init__(self, compiled: Compiled, stop_ids: Sequence[int], allowance: Allowance | None = None) -> None:
        """allowance: of all texts of a request; None: no limit."""
        self._width = compiled.width
        self._allowance = allowance
        self._stop_ids = tuple(stop_ids)
        self._state = compiled.state.deep_copy()
        self._is_over = False  # it has ended, or left the grammar
        self._words: Words | None = None  # of the mask for the next token, as wide as the vocabulary

    def advance(self, tokens: Iterable[int]) -> None:
        """Raises ValueError if that takes too long."""
        for token in tokens:
            if self._is_over:
                return
            self._words = None
            if token in self._stop_ids or token >= self._width:
                self._is_over = True
                return
            with self._timed():
                self._is_over = not self._state.consume_token(token)
            if self._is_over and self._state.stop_reason() in _TOO_COMPLEX:
                raise ValueError(f"{NOT_FOLLOWED}: {_reason(self._state)}; simplify it")

    def fork(self) -> Matcher:
        """Copy for a text that begins like this one and continues differently."""
        other = copy(self)
        with self._timed():
            other._state = self._state.deep_copy()
        return other

    def is_complete(self) -> bool:
        """Return True if the text may end here."""
        return not self._is_over and bool(self._state.is_accepting())

    def _timed(self) -> AbstractContextManager[None]:
        return nullcontext() if self._allowance is None else self._allowance.token()

    def mask(self, width: int) -> Words:
        """The tokens that may follow, as int32 [ceil(width / 32)]: token i is bit i % 32 of word i // 32. Not to be
        written to. Raises ValueError if there are none, or if finding them takes too long."""
        if self._words is None:
            self._words = self._next()
        count = -(-width // _BITS)
        if len(self._words) >= count:
            return self._words[:count]
        return np.concatenate([self._words, np.zeros(count - len(self._words), dtype=np.int32)])

    def _next(self) -> Words:
        words = np.zeros(self._width // _BITS + 1, dtype=np.int32)  # of one token more: the end
        if self._is_over:
            _set(words, self._stop_ids)
            return words
        with self._timed():
            self._state.unsafe_compute_mask_ptr(words.__array_interface__["data"][0], words.nbytes)
        if self._state.is_error():
            raise ValueError(f"{NOT_FOLLOWED}: {_reason(self._state)}")
        # Read first: the next line clears all bits beyond the vocabulary.
        is_end = _has(words, self._width)
        words[-1] &= (1 << self._width % _BITS) - 1
        _set(words, self._stop_ids, is_end)
        if not is_end and not words.any():
            raise ValueError(f"{NOT_FOLLOWED}: no token continues it")
        return words


_TOO_COMPLEX = ("ParserTooComplex", "LexerTooComplex")


_NO_ANSWER = "the schema, or one that it refers to, has no answer: "
_REASONS = {
    "NoExtension": "it has no answer, or no token continues it",
    "Unsatisfiable schema: incompatible types": f"{_NO_ANSWER}no value has all the types that it asks for",
    "Unsatisfiable schema: Regex is empty": f"{_NO_ANSWER}no text is all that it asks for at once",
    "Unsatisfiable schema: ": _NO_ANSWER,
    "Unable to determine if regex is empty": "the schema's keywords 'pattern', 'format', 'minLength' and 'maxLength' "
    "are too much together for one string; leave some out",
    "patternProperty regexes": "two patterns of one 'patternProperties' may match the same name; "
    "let them exclude each other",
    "circular references with sibling keys": "the schema's keyword '$ref' leads back to a schema around it, and has "
    "keywords beside it; leave these out",
}
"""Beginnings of llguidance's messages, and our words in their place. The rest follows where there is a colon."""


def _reason(state: Any) -> str:
    """Explain why the grammar cannot continue: llguidance's message, without the place in its source."""
    text = str(state.get_error()).partition("\n<non-verbose/>")[0]
    text = text.rpartition("failed to compile JSON schema: ")[2].strip().splitlines()[0]
    text = re.sub(r"^at \d+\(\d+\): ", "", text)
    for begin, words in _REASONS.items():
        if text.startswith(begin):
            return words + text.removeprefix(begin)[:200] if words.endswith(": ") else words
    return text[:200]


def _has(words: Words, token: int) -> bool:
    return token < len(words) * _BITS and bool(int(words[token // _BITS]) >> token % _BITS & 1)


def _set(words: Words, tokens: Iterable[int], value: bool = True) -> None:
    bits = words.view(np.uint32)
    for token in tokens:
        if token < len(words) * _BITS:
            bit = np.uint32(1 << token % _BITS)
            bits[token // _BITS] = bits[token // _BITS] | bit if value else bits[token // _BITS] & ~bit


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
