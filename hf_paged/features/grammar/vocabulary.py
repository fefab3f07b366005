"""Constraints for the tokens of a tokenizer: `Vocabulary` compiles them, with llguidance, and a `Matcher` follows one
text through a compiled one. Knows tokens and masks; neither processors nor requests.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np

from hf_paged.annotations import Tokenizer
from hf_paged.features.grammar import constraints
from hf_paged.features.grammar.constraints import Constraint
from hf_paged.generation.sampling.edits import Words
from hf_paged.locks import usable_after_fork

# Tokens in a word of a mask, as llguidance writes them.
_BITS = 32


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
